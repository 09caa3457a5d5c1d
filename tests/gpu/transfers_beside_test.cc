// The program beside the transfers: what its own calls of CUDA find, and what it keeps.

#include "tests/gpu/transfers_world.h"
#include "tests/support/plain_test.h"

namespace stitch::transport::gpu::test::transfers_beside_test {
namespace {

using namespace stitch::testing;

// What the lane's stream for copies in gets from now on waits for the gate that is returned.
int hold(TransfersWorld& world, std::size_t worker, int device) {
  int gate = 0;
  world.on_lane(worker, device, [&](Lane& lane) {
    gate = world.gpu.hold(world.process(worker), lane.copies_in());
  });
  return gate;
}

// This thread of the test does what it likes while the program captures.
void relax(TransfersWorld& world, std::size_t worker, int device) {
  EXPECT_EQ(world.cuda(worker).set_device(device), cuda::kSuccess);
  cuda::CaptureMode mode = cuda::kCaptureRelaxed;
  EXPECT_EQ(world.cuda(worker).thread_exchange_stream_capture_mode(&mode), cuda::kSuccess);
}

TEST(Beside, AGraphThatTheProgramCapturesStaysValidWhateverPathIsUsed) {
  for (const bool nccl : {true, false}) {
    TransfersWorld world({.workers = 3,
                          .processes = {0, 0, 1},
                          .adjust = [nccl](std::size_t, DeviceTransfers::Options& options) {
                            options.use_nccl = nccl;
                            options.reopen_backoff = 1ms;
                          }});
    for (const std::size_t worker : {0U, 2U}) {
      relax(world, worker, 0);
      cuda::Stream captured = nullptr;
      ASSERT_EQ(
          world.cuda(worker).stream_create_with_priority(&captured, cuda::kStreamNonBlocking, 0),
          cuda::kSuccess);
      world.gpu.set_capturing(world.process(worker), captured, true);
    }
    world.await_path(0, 0, 1, 0, Path::local);
    world.await_path(0, 0, 1, 1, Path::peer);
    world.await_path(0, 0, 2, 0, Path::staging);
    world.await_path(0, 0, 2, 1, nccl ? Path::nccl : Path::staging);
    world.gpu.inject(0, "send", nccl::kSystemError);
    world.expect_arrival(0, 0, 2, 1, 5 * kMegabyte, 'a');  // a communicator is aborted meanwhile
    world.end();
    EXPECT_EQ(world.gpu.violations(), "");
  }
}

TEST(Beside, AProcessHasContextsOnTheDevicesThatItUsesAndNoOthers) {
  TransfersWorld world({.gpu = {.devices = 4}, .adjust = with_short_pauses});
  ASSERT_EQ(world.cuda(0).set_device(1), cuda::kSuccess);
  ASSERT_EQ(world.cuda(1).set_device(2), cuda::kSuccess);
  world.await_path(0, 1, 1, 2, Path::nccl);
  world.gpu.inject(0, "send", nccl::kSystemError);
  world.expect_arrival(0, 1, 1, 2, 5000, 'a');
  world.await_path(0, 1, 1, 2, Path::nccl);
  world.end();
  EXPECT_EQ(world.gpu.take_contexts(0), std::vector<int>{1});
  EXPECT_EQ(world.gpu.take_contexts(1), std::vector<int>{2});
}

TEST(Beside, MemoryMayBeReturnedToItsStreamWhenTheLanesHaveEnded) {
  TransfersWorld world({});
  world.await_path(0, 0, 1, 1, Path::nccl);
  std::vector<std::shared_ptr<TestTransfer>> kept;
  for (const int to_device : {0, 1}) kept.push_back(world.start(0, 0, 1, to_device, 5000, 'a'));
  for (const auto& transfer : kept) world.wait(*transfer);
  world.end();
  ASSERT_EQ(world.gpu.violations(), "");
  ASSERT_EQ(world.cuda(1).set_device(0), cuda::kSuccess);
  for (const auto& transfer : kept) transfer->memory_owner.reset();
  EXPECT_EQ(world.gpu.violations(), "");
}

TEST(Beside, StreamsOfLanesThatHaveEndedAreUsedAgain) {
  FakeGpu world;
  const auto streams = std::make_shared<StreamPool>();
  const auto use = [](Lanes& lanes) {
    std::promise<void> done;
    lanes.lane(1).post([&] { done.set_value(); });
    done.get_future().wait();
  };
  for (int i = 0; i < 3; ++i) {
    Lanes lanes(world.cuda(), nullptr, streams);
    use(lanes);
    EXPECT_EQ(world.live_streams(), StreamPool::kStreams);
  }
  Lanes two(world.cuda(), nullptr, streams);
  Lanes more(world.cuda(), nullptr, streams);
  use(two);
  use(more);
  EXPECT_EQ(world.live_streams(), 2 * StreamPool::kStreams) << "no two lanes have the same";
}

// An event that is not yet there leaves a note in the runtime, which the next one to look takes for
// an own error. TransfersWorld looks.
TEST(Beside, CallbacksFindNoErrorThatIsNotTheirs) {
  TransfersWorld world({.gpu = {.hardware_queues = 0}});
  const int gate = world.gpu.make_gate();
  const auto late = world.start(1, 1, 0, 1, 5000, 'a', gate);
  const auto polls = world.gpu.calls("event_query", 1);
  ASSERT_TRUE(eventually([&] { return world.gpu.calls("event_query", 1) > polls; }));
  for (int i = 0; i < 5; ++i) world.expect_arrival(0, 1, 1, 1, 3000, 'b');
  world.gpu.open_gate(gate);
  world.wait(*late);
  world.expect_bytes(*late);
}

// Work whose end cannot be asked for still uses its memory.
TEST(Beside, ACallThatFailsGivesBackNoMemoryThatIsInUse) {
  for (const char* const function : {"event_create_with_flags", "event_record", "event_query"}) {
    for (const Path path : {Path::staging, Path::local}) {
      SCOPED_TRACE(function + std::string(", ") + short_name(path).data());
      TransfersWorld world({.processes = {0, path == Path::local ? 0 : 1},
                            .gpu = {.hardware_queues = 0},
                            .adjust = without_nccl});
      const int to_device = path == Path::staging ? 1 : 0;
      world.await_path(0, 0, 1, to_device, path);
      const int gate = hold(world, 1, to_device);
      const auto copies = world.gpu.calls("memcpy_async", world.process(1));
      const auto transfer = world.start(0, 0, 1, to_device, 5 * kMegabyte, 'a');
      const int process = world.process(1);
      // All events are in use from now on.
      world.on_lane(1, to_device, [&](Lane& lane) {
        for (int i = 0; i < 40; ++i) lane.when_done(lane.copies_in(), [](cuda::Status) {});
        world.gpu.inject(process, function, cuda::kInvalidValue);
      });
      ASSERT_TRUE(eventually([&] { return world.gpu.calls("memcpy_async", process) > copies; }));
      const auto calls = world.gpu.calls("stream_query", process);
      (void)eventually([&] { return world.gpu.calls("stream_query", process) > calls + 3; }, 50ms);
      world.gpu.open_gate(gate);
      ASSERT_NO_FATAL_FAILURE(world.wait(*transfer));
      world.expect_bytes(*transfer);
    }
  }
}

TEST(Beside, ALaneWhoseDeviceHangsEndsWithoutWaitingForIt) {
  TransfersWorld world(
      {.gpu = {.sync_on_free = true}, .adjust = [](std::size_t, DeviceTransfers::Options& options) {
         options.use_nccl = false;
         options.abort_timeout = 100ms;
       }});
  const auto kept = world.start(0, 0, 1, 1, 5000, 'a');  // whose memory is not freed meanwhile
  world.wait(*kept);
  const int gate = hold(world, 1, 1);
  const auto copies = world.gpu.calls("memcpy_async", 1);
  const auto transfer = world.start(0, 0, 1, 1, 5000, 'b');
  ASSERT_TRUE(eventually([&] { return world.gpu.calls("memcpy_async", 1) > copies; }));
  const auto begun = std::chrono::steady_clock::now();
  world.end();
  EXPECT_LT(std::chrono::steady_clock::now() - begun, 15s);
  EXPECT_EQ(transfer->received, 1);
  EXPECT_EQ(world.gpu.violations(), "");
  world.gpu.open_gate(gate);
  EXPECT_EQ(world.gpu.wait_until_idle(), "");
}

}  // namespace
}  // namespace stitch::transport::gpu::test::transfers_beside_test
