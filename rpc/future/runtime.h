#pragma once

#include <chrono>
#include <string>

#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"
#include "stitch/rpc/future/execution_context.h"

namespace stitch::rpc {

// What futures and continuations need of the worker they run on; its Agent implements it. Shared by
// its Worker, by every ExecutionContext that names it, and by what is in flight. Thread contract:
// any thread.
class Runtime {
 public:
  // Runs `task` on the user-function threads, or here when they have ended.
  virtual void post(base::UniqueFunction<void()> task) = 0;
  // Runs `task`, which calls stop callbacks, on a thread that is reserved for these; they may wait
  // for futures.
  virtual void run_stop(base::UniqueFunction<void()> task) = 0;
  // Runs `task` as post() does, at `when` or soon after, unless the returned function is called
  // before. Destroys it uncalled when the worker has ended by then.
  [[nodiscard]] virtual base::UniqueFunction<void()> call_at(Clock::time_point when,
                                                             base::UniqueFunction<void()> task) = 0;
  // For a thread that waits for `done`, which an answer may set: reads messages of this worker, and
  // sleeps until they come, unless another thread reads. True when `done` is set.
  virtual bool help(base::AwaitedFlag& done, Clock::time_point deadline) = 0;
  // The worker's name, for error texts. Constant.
  [[nodiscard]] virtual const std::string& name() const noexcept = 0;

 protected:
  Runtime() = default;
  ~Runtime() = default;
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;
};

}  // namespace stitch::rpc
