#include "stitch/rpc/future/shield.h"

#include "stitch/rpc/future/live_runtimes.h"

namespace stitch::detail {

Error waited_in_vain(std::chrono::nanoseconds time) {
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(time).count();
  return Error(ErrorCode::timeout,
               "future was not complete after " + std::to_string(ms) + " ms; its work goes on");
}

Timer::Timer(rpc::Clock::time_point when, base::UniqueFunction<void()> task)
    : stop_(rpc::current_runtime()->call_at(when, std::move(task))) {}

}  // namespace stitch::detail
