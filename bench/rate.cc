// Calls per second with several in flight.
#include <ATen/ATen.h>

#include <atomic>
#include <future>
#include <memory>
#include <stdexcept>
#include <vector>

#include "handlers.h"
#include "measure.h"
#include "stitch/rpc/future/future.h"
#include "timing.h"
#include "world.h"

namespace stitch_bench {

namespace rate_measure {
namespace {

// One thread keeps `in_flight` futures and waits for the oldest before it calls again.
template <class Call>
double rate_by_window(const Call& call, std::size_t in_flight, double seconds) {
  std::vector<decltype(call())> window(in_flight);
  const auto start = Clock::now();
  const auto end = after(seconds);
  std::size_t calls = 0;
  while (calls < 2 * in_flight || Clock::now() < end) {
    auto& oldest = window[calls % in_flight];
    if (oldest.valid()) static_cast<void>(oldest.get());
    oldest = call();
    ++calls;
  }
  for (auto& pending : window) static_cast<void>(pending.get());
  return static_cast<double>(calls) / seconds_since(start);
}

// Each completion makes the next call, in `in_flight` chains. Owned by the caller, which waits for
// the end.
template <auto F>
class Chains {
 public:
  Chains(stitch::WorkerId to, std::size_t in_flight, double seconds)
      : to_(to), end_(after(seconds)), running_(in_flight) {
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

std::string floor_of(const Side& side, const std::string& in_flight) {
  return side.floor("tensorpipe.shm.calls.", "tensorpipe.uv.calls.") + in_flight;
}

template <class Call>
void measure_window(const Side& side, const std::string& what, const Call& call,
                    std::size_t in_flight) {
  const std::string number = std::to_string(in_flight);
  static_cast<void>(rate_by_window(call, in_flight, side.settings().seconds / 4));
  side.result("rate." + side.path() + '.' + what + ".window." + number,
              rate_by_window(call, in_flight, side.settings().seconds), "calls/s",
              floor_of(side, number));
}

template <auto F>
void measure_callbacks(const Side& side, const std::string& what, std::size_t in_flight) {
  const std::string number = std::to_string(in_flight);
  static_cast<void>(rate_by_callbacks<F>(other(side), in_flight, side.settings().seconds / 4));
  side.result("rate." + side.path() + '.' + what + ".callbacks." + number,
              rate_by_callbacks<F>(other(side), in_flight, side.settings().seconds), "calls/s",
              floor_of(side, number));
}

template <auto F>
void measure_empty_calls(const Side& side, const std::string& what) {
  for (const std::size_t in_flight : {1, 16, 256}) {
    measure_window(
        side, what, [&] { return stitch::rpc_async<F>(other(side)); }, in_flight);
    measure_callbacks<F>(side, what, in_flight);
  }
}

void measure_sums(const Side& side) {
  const auto a = at::arange(8, at::kFloat);
  const auto b = at::ones({8});
  for (const std::size_t in_flight : {1, 16, 256}) {
    measure_window(
        side, "add8.pool", [&] { return stitch::rpc_async<&add>(other(side), a, b); }, in_flight);
  }
}

void first(Side& side) {
  const stitch::Worker self = join_world(side);
  measure_empty_calls<&empty>(side, "empty.pool");
  measure_empty_calls<&empty_inline>(side, "empty.inline");
  measure_sums(side);
  finish(side);
}

}  // namespace
}  // namespace rate_measure

Measure rate() {
  using namespace rate_measure;
  return {.name = "rate",
          .about =
              "calls per second, 1, 16 and 256 in flight: a window of futures, and calls made by "
              "completions; empty ones, and sums of 8 floats",
          .quick = true,
          .paths = {"same_host", "tcp"},
          .floors = {"floor-tensorpipe-rate"},
          .first = &first,
          .second = &serve};
}

}  // namespace stitch_bench
