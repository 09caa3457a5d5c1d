// Empty calls per second with several in flight.
#include <atomic>
#include <future>
#include <memory>
#include <stdexcept>
#include <vector>

#include "handlers.h"
#include "measure.h"
#include "stitch/rpc/future.h"
#include "timing.h"
#include "world.h"

namespace stitch_bench {

namespace {

// One thread keeps `in_flight` futures and waits for the oldest before it calls again.
template <auto F>
double rate_by_window(stitch::WorkerId to, std::size_t in_flight, double seconds) {
  std::vector<stitch::Future<void>> window(in_flight);
  const auto start = Clock::now();
  const auto end = after(seconds);
  std::size_t calls = 0;
  while (calls < 2 * in_flight || Clock::now() < end) {
    auto& oldest = window[calls % in_flight];
    if (oldest.valid()) oldest.get();
    oldest = stitch::rpc_async<F>(to);
    ++calls;
  }
  for (auto& call : window) call.get();
  return static_cast<double>(calls) / seconds_since(start);
}

// Each call's completion makes the next, `in_flight` such chains at once. Owned by the caller, who waits for the end.
template <auto F>
class Chains {
 public:
  Chains(stitch::WorkerId to, std::size_t in_flight, double seconds) : to_(to), end_(after(seconds)), running_(in_flight) {
    for (std::size_t i = 0; i < in_flight; ++i) call();
  }
  // The number of calls made, after all have completed.
  std::size_t wait() {
    ended_.get_future().get();
    if (failed_) throw std::runtime_error("a call failed");
    return calls_;
  }

 private:
  void call() {
    calls_.fetch_add(1, std::memory_order_relaxed);
    const stitch::Future<void> call = stitch::rpc_async<F>(to_);
    call.on_ready([this, call] {
      if (call.has_error()) failed_ = true;
      if (!failed_ && Clock::now() < end_) {
        this->call();
      } else if (--running_ == 0) {
        ended_.set_value();
      }
    });
  }

  const stitch::WorkerId to_;
  const Clock::time_point end_;
  std::atomic<std::size_t> calls_{0};
  std::atomic<std::size_t> running_;
  std::atomic<bool> failed_{false};
  std::promise<void> ended_;
};

template <auto F>
double rate_by_callbacks(stitch::WorkerId to, std::size_t in_flight, double seconds) {
  const auto start = Clock::now();
  Chains<F> chains(to, in_flight, seconds);
  const auto calls = chains.wait();
  return static_cast<double>(calls) / seconds_since(start);
}

template <auto F>
void measure_rates(const Side& side, const std::string& handler) {
  const double seconds = side.settings().seconds;
  for (const std::size_t in_flight : {1, 16, 256}) {
    const std::string number = std::to_string(in_flight);
    const std::string floor = side.floor("tensorpipe.shm.calls.", "tensorpipe.uv.calls.") + number;
    const std::string key = "rate." + side.path() + '.' + handler;
    static_cast<void>(rate_by_window<F>(other(side), in_flight, seconds / 4));
    side.result(key + ".window." + number, rate_by_window<F>(other(side), in_flight, seconds), "calls/s", floor);
    static_cast<void>(rate_by_callbacks<F>(other(side), in_flight, seconds / 4));
    side.result(key + ".callbacks." + number, rate_by_callbacks<F>(other(side), in_flight, seconds), "calls/s", floor);
  }
}

void first(Side& side) {
  const stitch::Worker self = join_world(side);
  measure_rates<&empty>(side, "pool");
  measure_rates<&empty_inline>(side, "inline");
  finish(side);
}

}  // namespace

Measure rate() {
  return {.name = "rate",
          .about = "empty calls per second, 1, 16 and 256 in flight: a window of futures, and calls made by completions",
          .quick = true,
          .paths = {"same_host", "tcp"},
          .floors = {"floor-tensorpipe-rate"},
          .first = &first,
          .second = &serve};
}

}  // namespace stitch_bench
