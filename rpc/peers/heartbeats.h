#pragma once

#include <chrono>
#include <functional>
#include <thread>

#include "stitch/base/mutex.h"

namespace stitch::rpc {

// The thread of a worker that sends its heartbeats and runs nothing else: whatever a callback or a
// table of the worker takes, its peers hear that it lives. Owned by PeerTable. Thread contract:
// start() once, stop() any time; after stop() `beat` does not run.
class Heartbeats {
 public:
  Heartbeats() = default;
  ~Heartbeats() { stop(); }

  // Calls `beat`, which neither blocks nor throws, each `interval` from now on.
  void start(std::chrono::nanoseconds interval, std::function<void()> beat);
  void stop() noexcept STITCH_EXCLUDES(mutex_);

 private:
  void run(std::chrono::nanoseconds interval, const std::function<void()>& beat)
      STITCH_EXCLUDES(mutex_);

  base::Mutex mutex_;
  base::CondVar changed_;
  bool stopping_ STITCH_GUARDED_BY(mutex_) = false;
  base::Mutex join_mutex_;
  std::thread thread_ STITCH_GUARDED_BY(join_mutex_);
};

}  // namespace stitch::rpc
