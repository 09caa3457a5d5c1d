// Each call of CUDA and NCCL fails once, the first, the second, and so on, while a path is opened
// and used: every transfer ends, the same way at both ends, and the ones that follow arrive.

#include "tests/gpu/transfers_world.h"
#include "tests/support/plain_test.h"

namespace stitch::transport::gpu::test::transfers_sweep_test {
namespace {

using namespace std::chrono_literals;

struct Way {
  Path path;
  bool one_process;
  int to_device;
};

// Those that a lane makes once, when it is made: without them its device cannot be used.
constexpr const char* kFirst[] = {"set_device", "thread_exchange_stream_capture_mode",
                                  "device_get_stream_priority_range",
                                  "stream_create_with_priority"};
constexpr const char* kCuda[] = {"malloc",
                                 "free",
                                 "host_alloc",
                                 "free_host",
                                 "memcpy_async",
                                 "memcpy_peer_async",
                                 "memset_async",
                                 "stream_query",
                                 "event_create_with_flags",
                                 "event_record",
                                 "event_query",
                                 "device_can_access_peer",
                                 "device_enable_peer_access"};
constexpr const char* kNccl[] = {
    "get_unique_id", "comm_init_rank_config", "comm_get_async_error", "send", "recv", "group_start",
    "group_end"};
constexpr int kLimit = 3;  // of calls to fail one after another

class Sweep {
 public:
  Sweep(const Way& way, int process, const std::string& function, int nth)
      : way_(way),
        function_(function),
        world_({.processes = {0, way.one_process ? 0 : 1},
                .max_delay = 0us,
                .adjust = [&](std::size_t, DeviceTransfers::Options& options) {
                  options.use_nccl = way.path == Path::nccl;
                  options.nccl_piece_bytes = 4096;
                  options.reopen_backoff = 1ms;
                  options.stall_timeout = 1s;
                }}) {
    world_.gpu.spare_this_host();
    if (std::count(std::begin(kNccl), std::end(kNccl), function) > 0) {
      world_.gpu.inject(process, function, nccl::kSystemError, nth);
    } else {
      world_.gpu.inject(process, function, cuda::kInvalidValue, nth);
    }
  }

  // Whether there was such a call.
  bool run(bool is_usable_afterwards) {
    const auto by_path = [&] {
      return std::min(world_.count(0, 1, way_.path, true).messages,
                      world_.count(1, 0, way_.path, true).messages);
    };
    for (int i = 0; i < 200 && by_path() < 2; ++i) {
      round();
      if (::testing::Test::HasFailure()) return false;
      if (world_.gpu.all_injected() && !is_usable_afterwards) break;
    }
    if (is_usable_afterwards) {
      EXPECT_GE(by_path(), 2U) << "it is not used any more";
      round();
    }
    const bool came = world_.gpu.all_injected();
    world_.end();
    check_leaks();
    return came;
  }

 private:
  void round() {
    std::vector<std::shared_ptr<TestTransfer>> started;
    for (const char value : {'a', 'b'})
      started.push_back(world_.start(0, 0, 1, way_.to_device, 9000, value));
    started.push_back(world_.start(1, way_.to_device, 0, 0, 9000, 'c'));
    for (const auto& transfer : started) {
      world_.wait(*transfer);
      if (::testing::Test::HasFatalFailure()) return;
      EXPECT_EQ(transfer->send_error.has_value(), transfer->receive_error.has_value())
          << (transfer->send_error ? transfer->send_error : transfer->receive_error)->what();
      if (!transfer->send_error && !transfer->receive_error) world_.expect_bytes(*transfer);
    }
  }
  void check_leaks() {
    for (const int device : {0, 1}) {
      if (function_ != "free") {
        EXPECT_EQ(world_.gpu.device_memory_used(device), 0U) << "device " << device;
      }
    }
    if (function_ != "free_host") {
      EXPECT_EQ(world_.gpu.pinned_memory_used(), 0U);
    }
    EXPECT_EQ(world_.gpu.live_events(), 0U);
  }

  const Way way_;
  const std::string function_;
  TransfersWorld world_;
};

void sweep(const Way& way, std::span<const char* const> calls, bool is_usable_afterwards = true) {
  // Each process is source and destination.
  const int process = way.one_process ? 0 : 1;
  int failed = 0;
  for (const char* const call : calls) {
    for (int nth = 1; nth <= kLimit; ++nth) {
      SCOPED_TRACE(std::string(short_name(way.path)) + ": call " + std::to_string(nth) + " of " +
                   call + "()");
      const bool came = Sweep(way, process, call, nth).run(is_usable_afterwards);
      if (::testing::Test::HasFailure()) return;
      if (!came) break;
      ++failed;
    }
  }
  EXPECT_GT(failed, 3);
}

constexpr Way kStaging{Path::staging, false, 1};
constexpr Way kLocal{Path::local, true, 0};
constexpr Way kPeer{Path::peer, true, 1};
constexpr Way kNcclWay{Path::nccl, false, 1};

TEST(Sweep, ByStagingEveryTransferEndsWhateverCallFails) { sweep(kStaging, kCuda); }
TEST(Sweep, ByACopyOnTheDeviceEveryTransferEndsWhateverCallFails) { sweep(kLocal, kCuda); }
TEST(Sweep, ByACopyBetweenDevicesEveryTransferEndsWhateverCallFails) { sweep(kPeer, kCuda); }
TEST(Sweep, ByNcclEveryTransferEndsWhateverCallOfCudaFails) { sweep(kNcclWay, kCuda); }
TEST(Sweep, ByNcclEveryTransferEndsWhateverCallOfNcclFails) { sweep(kNcclWay, kNccl); }
TEST(Sweep, ADeviceThatCannotBeSetUpFailsItsTransfers) {
  for (const Way& way : {kStaging, kNcclWay}) sweep(way, kFirst, false);
}

}  // namespace
}  // namespace stitch::transport::gpu::test::transfers_sweep_test
