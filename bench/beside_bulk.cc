// Small calls while a large tensor is being sent over the same connection.
#include <ATen/ATen.h>

#include <atomic>
#include <future>

#include "handlers.h"
#include "measure.h"
#include "stitch/rpc/future/future.h"
#include "timing.h"
#include "world.h"

namespace stitch_bench {

namespace beside_bulk_measure {
namespace {

void consume(at::Tensor) {}

// A call may wait for a whole large transfer on a busy machine.
stitch::Target patiently(stitch::WorkerId to) {
  return stitch::TargetOptions{.to = to, .timeout = std::chrono::seconds(180)};
}

// Sends a tensor to the other worker repeatedly, on a thread of its own, until it is destroyed.
class Load {
 public:
  Load(stitch::WorkerId to, at::Tensor tensor)
      : mover_(std::async(std::launch::async, [this, to, tensor] { move(to, tensor); })) {}
  ~Load() { stop_ = true; }  // the future waits for the thread
  Load(const Load&) = delete;
  Load& operator=(const Load&) = delete;

  [[nodiscard]] bool running() const {
    return mover_.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
  }
  [[nodiscard]] std::size_t transfers() const { return transfers_; }
  // Throws the error that ended it.
  void finish() {
    stop_ = true;
    mover_.get();
  }

 private:
  void move(stitch::WorkerId to, const at::Tensor& tensor) {
    while (!stop_) {
      stitch::rpc_sync<&consume>(patiently(to), tensor);
      ++transfers_;
    }
  }
  std::atomic<bool> stop_{false};
  std::atomic<std::size_t> transfers_{0};
  std::future<void> mover_;  // last: the thread uses the others
};

void first(Side& side) {
  const stitch::Worker self = join_world(side);
  const std::string key = "beside_bulk." + side.path();
  const double seconds = side.settings().seconds;
  const auto call = [&] { stitch::rpc_sync<&empty>(patiently(other(side))); };
  const auto tensor =
      at::zeros({static_cast<std::int64_t>(side.settings().load_mib) << 20}, at::kByte);
  stitch::rpc_sync<&consume>(patiently(other(side)), tensor);
  report_latency(side, key + ".idle", time_each_us(seconds, 20, call));

  Load load(other(side), tensor);
  const auto start = Clock::now();
  std::vector<double> times;
  // At least two whole transfers.
  while (load.running() && (times.empty() || load.transfers() < 2)) {
    const auto more = time_each_us(seconds, 5, call);
    times.insert(times.end(), more.begin(), more.end());
  }
  const double transferred =
      static_cast<double>(load.transfers()) * side.settings().load_mib * kMiB;
  const double took = seconds_since(start);
  load.finish();
  report_latency(side, key + ".loaded", times, key + ".idle");
  side.result(key + ".transfer", transferred / kGiB / took, "GiB/s");
  finish(side);
}

}  // namespace
}  // namespace beside_bulk_measure

Measure beside_bulk() {
  using namespace beside_bulk_measure;
  return {.name = "beside_bulk",
          .about =
              "empty calls alone, and while a tensor of --load-size MiB is sent again and again "
              "over the same connection",
          .paths = {"same_host", "tcp"},
          .first = &first,
          .second = &serve};
}

}  // namespace stitch_bench
