#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "stitch/transport/gpu/device_transfers.h"
#include "stitch/transport/gpu/lanes.h"
#include "tests/gpu/double/fake_gpu.h"

namespace stitch::transport::gpu::test {

inline constexpr std::size_t kMegabyte = std::size_t{1} << 20;

inline ::testing::AssertionResult says(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "\"" << part << "\" is not in:\n" << text;
}

// Carries what workers send each other: each gets its frames on one thread of its own, those of one
// sender in order, after random delays. Thread contract: any thread.
class TestNetwork {
 public:
  using Delivery = std::function<void()>;

  TestNetwork(std::size_t workers, std::uint64_t seed, std::chrono::microseconds max_delay);
  ~TestNetwork();
  // Runs `delivery` on the thread of `to`, unless one of them is cut off by then.
  void send(std::size_t from, std::size_t to, Delivery delivery);
  // Nothing of or for that worker is delivered any more. `lost(worker)` runs on the thread of each
  // of the others.
  void cut(std::size_t worker, const std::function<void(std::size_t)>& lost);
  // Nothing is delivered to that worker until resume().
  void pause(std::size_t worker);
  void resume(std::size_t worker);
  void stop();

 private:
  using Clock = std::chrono::steady_clock;
  struct Item {
    std::size_t from = 0;
    Delivery delivery;
  };
  struct Inbox {
    std::multimap<Clock::time_point, Item> items;
    std::map<std::size_t, Clock::time_point> last;  // by sender
    bool paused = false;
    std::thread thread;
  };
  void run(std::size_t worker);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 random_;
  const std::chrono::microseconds max_delay_;
  std::vector<Inbox> inboxes_;
  std::vector<bool> cut_;
  bool stopping_ = false;
};

// One transfer as its two ends see it.
struct TestTransfer {
  // All that the source has of it: the memory is the destination's, which may be another process.
  struct Ends {
    std::atomic<int> sent{0}, received{0};  // calls of the ends' callbacks
    std::optional<Error> send_error, receive_error;
    std::atomic<bool> ended{false};  // both
  };
  const std::shared_ptr<Ends> ends = std::make_shared<Ends>();
  std::size_t from = 0, to = 0;
  int from_device = 0, to_device = 0;
  std::size_t bytes = 0;
  char value = 0;
  std::atomic<int>&sent = ends->sent, &received = ends->received;
  std::optional<Error>&send_error = ends->send_error, &receive_error = ends->receive_error;
  void* memory = nullptr;  // at the destination
  std::shared_ptr<void> memory_owner;
  std::atomic<bool>& ended = ends->ended;
};

inline void without_nccl(std::size_t, DeviceTransfers::Options& options) {
  options.use_nccl = false;
}
inline void with_short_pauses(std::size_t, DeviceTransfers::Options& options) {
  options.reopen_backoff = std::chrono::milliseconds(1);
}
inline void with_long_pauses(std::size_t, DeviceTransfers::Options& options) {
  options.reopen_backoff = std::chrono::hours(1);
}

// Workers over the double, each a process of its own unless `processes` says which it shares, with
// DeviceTransfers over a TestNetwork. Everything has ended when it is destroyed.
class TransfersWorld {
 public:
  struct Options {
    std::size_t workers = 2;
    std::vector<int> processes = {};  // by worker; those with equal numbers share lanes
    FakeGpu::Options gpu = {};
    std::map<int, int> nccl_versions = {};  // by process, where it is another than the machine's
    std::chrono::microseconds max_delay{200};
    std::function<void(std::size_t worker, DeviceTransfers::Options&)> adjust = nullptr;
  };
  explicit TransfersWorld(Options options);
  ~TransfersWorld();

  // Starts a transfer of bytes that a kernel fills with `value`. `gate`: that kernel ends when it
  // opens. `receive`: false: the message that names it is refused there.
  std::shared_ptr<TestTransfer> start(std::size_t from, int from_device, std::size_t to,
                                      int to_device, std::size_t bytes, char value, int gate = 0,
                                      bool receive = true);
  // Waits until both ends have been called; fails the test after a while.
  void wait(const TestTransfer& transfer);
  // Starts one, waits for it, and checks the bytes.
  void expect_arrival(std::size_t from, int from_device, std::size_t to, int to_device,
                      std::size_t bytes, char value);
  // The bytes at the destination, once it has ended well.
  void expect_bytes(const TestTransfer& transfer);
  // Transfers until one takes that path; fails the test after a while.
  void await_path(std::size_t from, int from_device, std::size_t to, int to_device, Path path);
  [[nodiscard]] DeviceTransfers::PathCount count(std::size_t worker, std::size_t peer, Path path,
                                                 bool sent) const;
  // Starts so many, waits for all, and checks their bytes.
  void expect_arrivals(int count, std::size_t from, int from_device, std::size_t to, int to_device,
                       std::size_t bytes);
  // Of both workers of a world of two.
  [[nodiscard]] std::uint64_t breaks() const;
  // Runs `task` on that worker's lane of the device and waits for its end.
  void on_lane(std::size_t worker, int device, const std::function<void(Lane&)>& task);
  void lose(std::size_t worker);
  // Ends all but the machine; the destructor does it, too.
  void end();
  void shut_down(std::size_t worker, std::chrono::milliseconds limit);

  [[nodiscard]] int process(std::size_t worker) const { return processes_.at(worker); }
  [[nodiscard]] const std::shared_ptr<Lanes>& lanes(std::size_t worker) const {
    return lanes_.at(process(worker));
  }
  [[nodiscard]] const CudaApi& cuda(std::size_t worker) const { return gpu.cuda(process(worker)); }

  FakeGpu gpu;
  std::atomic<int> failing_allocations{0};        // so many allocations of receivers give no memory
  std::atomic<int> allocation_ms{0};              // how long each allocation of receivers takes
  std::atomic<bool> keep_acknowledgments{false};  // of what arrives, here:
  std::vector<std::shared_ptr<void>> acknowledgments;
  std::vector<std::unique_ptr<DeviceTransfers>> transfers;
  std::unique_ptr<TestNetwork> network;
  // What a worker has said of the paths to a peer.
  [[nodiscard]] std::vector<std::string> said(std::size_t worker, std::size_t peer);
  std::string protocol_error;  // of any worker; guarded by mutex_
  [[nodiscard]] std::string take_protocol_error();
  // One that may come at any time, also after the last look.
  std::string may_come;

 private:
  void receive(std::size_t worker, std::size_t from, TransferId id,
               std::shared_ptr<TestTransfer> transfer);
  void ended(TestTransfer::Ends& ends);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int> processes_;
  std::map<int, std::shared_ptr<Lanes>> lanes_;
  std::vector<bool> closed_;
  std::map<std::pair<std::size_t, std::size_t>, std::vector<std::string>> said_;
};

// A kernel of the program on a device of a worker, which does not end before end() is called. With
// one hardware queue nothing that is queued there later runs.
class EndlessKernel {
 public:
  EndlessKernel(TransfersWorld& world, std::size_t worker, int device)
      : world_(world), worker_(worker) {
    EXPECT_EQ(world.cuda(worker).set_device(device), cuda::kSuccess);
    EXPECT_EQ(world.cuda(worker).stream_create_with_priority(&stream_, cuda::kStreamNonBlocking, 0),
              cuda::kSuccess);
    gate_ = world.gpu.hold(world.process(worker), stream_);
  }
  ~EndlessKernel() { EXPECT_EQ(world_.cuda(worker_).stream_destroy(stream_), cuda::kSuccess); }
  EndlessKernel(const EndlessKernel&) = delete;
  EndlessKernel& operator=(const EndlessKernel&) = delete;
  void end() { world_.gpu.open_gate(gate_); }

 private:
  TransfersWorld& world_;
  const std::size_t worker_;
  cuda::Stream stream_ = nullptr;
  int gate_ = 0;
};

}  // namespace stitch::transport::gpu::test
