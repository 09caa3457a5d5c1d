#pragma once

#include <atomic>
#include <chrono>
#include <utility>

#include "stitch/base/event_loop.h"

namespace stitch::rref {

// A timer of which at most one runs. Thread contract: any thread.
class SingleTimer {
 public:
  // Has `fire` run on the loop at that time, unless a timer runs already.
  template <class Fire>
  void start(base::EventLoop& loop, std::chrono::steady_clock::time_point when, Fire fire) {
    if (!runs_.exchange(true)) loop.call_at(when, std::move(fire));
  }
  [[nodiscard]] bool runs() const noexcept { return runs_.load(); }
  // `fire` calls this: from now on start() starts another one.
  void fired() noexcept { runs_.store(false); }

 private:
  std::atomic<bool> runs_{false};
};

}  // namespace stitch::rref
