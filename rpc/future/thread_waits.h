#pragma once

#include <cstdint>
#include <vector>

#include "stitch/rpc/future/runtime.h"

namespace stitch::rpc {

// One wait of a thread for a future, as thread_waits() returns it.
struct ThreadWait {
  int thread = 0;                // base::this_thread_id()
  std::uint64_t call = 0;        // the id of the call whose outcome it is, 0 for others
  const void* worker = nullptr;  // the Runtime it runs on, compared only; null for none
  const void* under = nullptr;   // StopFlag::call() of the call that it serves, likewise
  Clock::time_point since{};
  int depth = 0;  // 0 for the outermost wait of that thread
};

// All threads of this process that wait inside a future now; a thread that helps while it waits may
// be in several waits, the outermost first. A picture: values of a wait that begins or ends at this
// moment may be mixed. Any thread.
[[nodiscard]] std::vector<ThreadWait> thread_waits();

// Notes that this thread waits for a future, for thread_waits(). Nested on its thread. Costs some
// nanoseconds; takes no lock but for a thread's first.
class ThreadWaitScope {
 public:
  // `call` as in ThreadWait.
  explicit ThreadWaitScope(std::uint64_t call) noexcept;
  ~ThreadWaitScope();
  ThreadWaitScope(const ThreadWaitScope&) = delete;
  ThreadWaitScope& operator=(const ThreadWaitScope&) = delete;

 private:
  int depth_ = 0;
};

}  // namespace stitch::rpc
