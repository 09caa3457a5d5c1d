// The rules of the double of CUDA and NCCL that other tests stand on: each is shown by a program
// that keeps it and one that breaks it.
#include "tests/gpu/gpu_pair.h"
#include "tests/gpu/transfers_world.h"
#include "tests/support/plain_test.h"

namespace stitch::transport::gpu::test::double_test {
namespace {

using namespace std::chrono_literals;

cuda::Event make_event(FakeGpu& world) {
  cuda::Event event = nullptr;
  EXPECT_EQ(world.cuda().event_create_with_flags(&event, cuda::kEventDisableTiming),
            cuda::kSuccess);
  return event;
}
// With one queue the bytes are right by accident; the report comes all the same.
TEST(GpuDouble, WhatNothingPutsInOrderIsReported) {
  enum class Order { none, event, host, blocking };
  for (const Order order : {Order::none, Order::event, Order::host, Order::blocking}) {
    FakeGpu world({.seed = 7, .hardware_queues = 1});
    const unsigned flags = order == Order::blocking ? 0 : cuda::kStreamNonBlocking;
    const auto writer = make_stream(world, 0, flags);
    const auto reader = order == Order::blocking ? nullptr : make_stream(world);
    char* const memory = make_memory(world);
    const auto equal = std::make_shared<bool>(false);
    world.fill(0, writer, memory, kBytes, 'x');
    if (order == Order::event) {
      const auto event = make_event(world);
      ASSERT_EQ(world.cuda().event_record(event, writer), cuda::kSuccess);
      ASSERT_EQ(world.stream_wait_event(0, reader, event), cuda::kSuccess);
    }
    if (order == Order::host) {
      ASSERT_EQ(world.cuda().stream_synchronize(writer), cuda::kSuccess);
    }
    world.check(0, reader, memory, kBytes, 'x', equal);
    EXPECT_EQ(world.wait_until_idle(), "");
    EXPECT_TRUE(*equal);
    const std::string violations = world.take_violations();
    if (order == Order::none) {
      EXPECT_TRUE(says(violations, "is not ordered after"));
      EXPECT_TRUE(says(violations, "seed 7"));
    } else {
      EXPECT_EQ(violations, "");
    }
  }
}

TEST(GpuDouble, MisuseOfMemoryAndHandlesIsReported) {
  const std::vector<std::pair<std::function<void(FakeGpu&)>, const char*>> cases{
      {[](FakeGpu& world) {  // done, but the host has not seen it
         char* const memory = make_memory(world);
         world.fill(0, make_stream(world), memory, kBytes, 'x');
         EXPECT_EQ(world.wait_until_idle(), "");
         world.cuda().free(memory);
         EXPECT_EQ(memory[0], '\xdd');
       },
       "free by free()"},
      {[](FakeGpu& world) {
         char* const memory = make_memory(world);
         EXPECT_EQ(memory[0], '\xcc');
         world.cuda().free(memory);
         EXPECT_NE(make_memory(world), memory);
         world.fill(0, nullptr, memory, kBytes, 'x');
       },
       "was freed before"},
      {[](FakeGpu& world) {
         char* const memory = make_memory(world);
         world.cuda().free(memory);
         EXPECT_EQ(world.cuda().free(memory), cuda::kInvalidValue);
       },
       "is freed twice"},
      {[](FakeGpu& world) { world.fill(0, nullptr, make_memory(world) + 1, kBytes, 'x'); },
       "ends before offset 1001"},
      {[](FakeGpu& world) {
         FakeGpu::Kernel kernel;  // does more than it says
         kernel.body = [memory = make_memory(world)] { memory[kBytes] = 'x'; };
         world.launch(0, nullptr, kernel);
       },
       "the red zone of device block 0"},
      {[](FakeGpu& world) { world.fill(1, nullptr, make_memory(world, 0), kBytes, 'y'); },
       "is not mapped in process 1"},
      {[](FakeGpu& world) {
         char* const memory = make_memory(world);
         world.cuda().set_device(1);
         world.fill(0, nullptr, memory, kBytes, 'x');
       },
       "peer access is not enabled"},
      {[](FakeGpu& world) {
         const auto event = make_event(world);
         world.cuda().set_device(1);
         EXPECT_NE(world.cuda().event_record(event, make_stream(world)), cuda::kSuccess);
       },
       "an event of device 0 and a stream of device 1"},
      {[](FakeGpu& world) {
         const auto stream = make_stream(world);
         world.cuda().stream_destroy(stream);
         EXPECT_NE(world.cuda().stream_query(stream), cuda::kSuccess);
       },
       "stream_query() got no stream"},
      {[](FakeGpu& world) {
         const auto event = make_event(world);
         world.cuda().event_destroy(event);
         EXPECT_NE(world.cuda().event_query(event), cuda::kSuccess);
       },
       "event_query() got no event"},
  };
  for (const auto& [misuse, text] : cases) {
    FakeGpu world;
    misuse(world);
    EXPECT_EQ(world.wait_until_idle(), "");
    EXPECT_TRUE(says(world.take_violations(), text));
  }
  FakeGpu world({.device_memory = 2000});
  char* const memory = make_memory(world);
  std::vector<char> host(kBytes);
  void* more = nullptr;
  EXPECT_EQ(world.cuda().malloc(&more, 1001), cuda::kOutOfMemory);
  EXPECT_EQ(world.cuda().memcpy_async(memory, host.data(), kBytes, cuda::kDeviceToHost, nullptr),
            cuda::kInvalidValue);
  EXPECT_EQ(world.cuda().get_last_error(), cuda::kInvalidValue);
  EXPECT_EQ(world.cuda().get_last_error(), cuda::kSuccess);
  EXPECT_EQ(world.cuda().free(memory), cuda::kSuccess);
}

TEST(GpuDouble, AKernelThatWaitsHoldsUpItsQueueAndACallThatWaitsForItsDeviceIsReported) {
  for (const int queues : {1, 8}) {
    FakeGpu world({.hardware_queues = queues, .sync_on_alloc = true, .block_limit = 20ms});
    const auto blocked = make_stream(world), other = make_stream(world);
    const int gate = world.hold(0, blocked);
    world.launch(0, other, {});
    EXPECT_TRUE(says(world.wait_until_idle(20ms), "waits for gate 1"));
    EXPECT_EQ(world.cuda().stream_query(other), queues == 1 ? cuda::kNotReady : cuda::kSuccess);
    void* memory = nullptr;
    EXPECT_EQ(world.cuda().malloc(&memory, kBytes), cuda::kLaunchFailure);
    EXPECT_TRUE(says(world.take_violations(), "blocks in malloc(), which waits for the device"));
    world.open_gate(gate);
    EXPECT_EQ(world.wait_until_idle(), "");
    EXPECT_EQ(world.cuda().malloc(&memory, kBytes), cuda::kSuccess);
  }
}

TEST(GpuDouble, ACallThatMightBeUnsafeEndsACaptureUnlessItsThreadSaysOtherwise) {
  FakeGpu world;
  const auto stream = make_stream(world);
  const auto captured = make_stream(world);
  world.set_capturing(0, captured, true);
  constexpr auto kStreamCaptureUnsupported = static_cast<cuda::Status>(900);
  EXPECT_EQ(world.cuda(0).stream_query(stream), kStreamCaptureUnsupported);
  EXPECT_TRUE(says(world.take_violations(), "the capture is invalid"));
  EXPECT_EQ(world.cuda(1).stream_query(nullptr), cuda::kSuccess) << "in another process";
  cuda::CaptureMode mode = cuda::kCaptureRelaxed;
  EXPECT_EQ(world.cuda(0).thread_exchange_stream_capture_mode(&mode), cuda::kSuccess);
  EXPECT_EQ(mode, cuda::kCaptureGlobal);
  EXPECT_EQ(world.cuda(0).stream_query(stream), cuda::kSuccess);
}

TEST(GpuDouble, ACallCreatesAContextOnTheCurrentDevice) {
  FakeGpu world({.devices = 3});
  EXPECT_EQ(world.cuda(0).set_device(2), cuda::kSuccess);
  const auto event = make_event(world);
  EXPECT_EQ(world.take_contexts(0), std::vector<int>{2});
  std::thread([&] { EXPECT_EQ(world.cuda(0).event_query(event), cuda::kSuccess); }).join();
  EXPECT_EQ(world.take_contexts(0), std::vector<int>{0}) << "a thread that has set none";
  EXPECT_TRUE(world.take_contexts(1).empty());
}

TEST(GpuDouble, CallsFailAsAskedAndThoseOfABrokenContextForGood) {
  FakeGpu world;
  world.inject(0, "malloc", cuda::kOutOfMemory, 2);
  void* memory = nullptr;
  EXPECT_EQ(world.cuda(0).malloc(&memory, 1), cuda::kSuccess);
  EXPECT_EQ(world.cuda(1).malloc(&memory, 1), cuda::kSuccess);
  EXPECT_EQ(world.cuda(0).malloc(&memory, 1), cuda::kOutOfMemory);
  EXPECT_EQ(world.cuda(0).malloc(&memory, 1), cuda::kSuccess);
  EXPECT_THROW(world.inject(0, "mallok", cuda::kOutOfMemory), std::out_of_range);
  const auto stream = make_stream(world);
  static_cast<void>(world.hold(0, stream));
  EXPECT_EQ(world.cuda().stream_query(stream), cuda::kNotReady);
  EXPECT_EQ(world.cuda().get_last_error(), cuda::kNotReady);
  world.break_context(0, 0, cuda::kIllegalAddress);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(world.cuda().stream_query(stream), cuda::kIllegalAddress);
  EXPECT_EQ(world.wait_until_idle(), "") << "its work is gone";
  EXPECT_EQ(world.cuda().set_device(1), cuda::kSuccess);
  EXPECT_EQ(world.cuda().stream_query(nullptr), cuda::kSuccess);
}

// ---- NCCL

TEST(NcclDouble, MovesBytesInTheOrderOfBothStreams) {
  for (const bool waits : {true, false}) {
    FakeGpu world;
    GpuPair pair(world);
    pair.connect();
    const auto equal = std::make_shared<bool>(false);
    world.fill(0, pair.stream[0], pair.memory[0], kBytes, 's');
    EXPECT_EQ(pair.send(0), nccl::kInProgress);
    EXPECT_EQ(pair.recv(1), nccl::kInProgress);
    for (int rank : {0, 1}) EXPECT_EQ(pair.wait(rank), nccl::kSuccess);
    world.check(1, pair.stream[1], pair.memory[1], kBytes, 's', equal);
    // The buffer, which may still be being sent.
    world.fill(0, waits ? pair.stream[0] : make_stream(world), pair.memory[0], kBytes, 'x');
    EXPECT_EQ(world.wait_until_idle(), "");
    EXPECT_TRUE(*equal || !waits);
    EXPECT_EQ(world.take_violations().empty(), waits);
  }
}

TEST(NcclDouble, AnEventThatIsRecordedBeforeTheLaunchWasSeenSaysNothing) {
  FakeGpu world;
  GpuPair pair(world);
  for (int rank : {0, 1}) EXPECT_EQ(pair.wait(rank), nccl::kSuccess);
  const int gate = world.hold(1, pair.stream[1]);
  EXPECT_EQ(world.cuda(0).set_device(0), cuda::kSuccess);
  const auto early = make_event(world);
  const auto late = make_event(world);
  EXPECT_EQ(pair.send(0), nccl::kInProgress);  // its receiver, with which it connects, is to come
  ASSERT_EQ(world.cuda(0).event_record(early, pair.stream[0]), cuda::kSuccess);
  EXPECT_TRUE(stitch::testing::eventually(
      [&] { return world.cuda(0).event_query(early) == cuda::kSuccess; }));
  EXPECT_EQ(pair.state(0), nccl::kInProgress);
  EXPECT_EQ(pair.recv(1), nccl::kInProgress);
  EXPECT_EQ(pair.wait(0), nccl::kSuccess);
  ASSERT_EQ(world.cuda(0).event_record(late, pair.stream[0]), cuda::kSuccess);
  EXPECT_NE(world.wait_until_idle(20ms), "");
  EXPECT_EQ(world.cuda(0).event_query(late), cuda::kNotReady);
  world.open_gate(gate);
  EXPECT_EQ(world.wait_until_idle(), "");
  EXPECT_EQ(world.cuda(0).event_query(late), cuda::kSuccess);
}

TEST(NcclDouble, MisuseIsReported) {
  const std::vector<std::pair<std::function<void(GpuPair&)>, const char*>> cases{
      {[](GpuPair& pair) {
         EXPECT_EQ(pair.send(0), nccl::kInProgress);
         EXPECT_EQ(pair.send(0), nccl::kInvalidArgument);
         pair.recv(1);
       },
       "before its last operation was seen to succeed"},
      {[](GpuPair& pair) {
         pair.send(0, 100);
         pair.recv(1, 101);
       },
       "send of 100 bytes for a recv of 101 bytes"},
      {[](GpuPair& pair) {
         pair.world.nccl(0).group_start();
         pair.send(0, 10);
         pair.send(0, 10);
         EXPECT_EQ(pair.world.nccl(0).group_end(), nccl::kInProgress);
         pair.recv(1, 10);
         EXPECT_EQ(pair.wait(1), nccl::kSuccess);
         pair.recv(1, 10);
       },
       "of groups of 2 and 1"},
      {[](GpuPair& pair) {
         std::vector<char> host(kBytes);
         EXPECT_EQ(pair.world.nccl(0).send(host.data(), kBytes, nccl::kInt8, 1, pair.comm[0],
                                           pair.stream[0]),
                   nccl::kInvalidArgument);
       },
       "got memory that is not on device 0"},
      {[](GpuPair& pair) {
         pair.world.nccl(0).send(pair.memory[0], kBytes, nccl::kInt8, 0, pair.comm[0], nullptr);
       },
       "got rank 0"},
  };
  for (const auto& [misuse, text] : cases) {
    FakeGpu world;
    GpuPair pair(world);
    for (int rank : {0, 1}) EXPECT_EQ(pair.wait(rank), nccl::kSuccess);
    misuse(pair);
    EXPECT_EQ(world.wait_until_idle(), "");
    EXPECT_TRUE(says(world.take_violations(), text));
  }
}

// Two communicators between the same two GPUs, used in that order or the other.
std::string run_two(int queues, bool same_order) {
  FakeGpu world({.hardware_queues = queues});
  GpuPair first(world), second(world);
  first.connect();
  second.connect();
  GpuPair* const order[2][2] = {{&first, &second},
                                {same_order ? &first : &second, same_order ? &second : &first}};
  for (int rank : {0, 1}) {
    for (GpuPair* const pair : order[rank]) {
      EXPECT_EQ(rank == 0 ? pair->send(0) : pair->recv(1), nccl::kInProgress);
      EXPECT_EQ(pair->wait(rank), nccl::kSuccess);
    }
  }
  return world.wait_until_idle(same_order || queues > 1 ? 20s : 50ms);
}

TEST(NcclDouble, CommunicatorsInDifferentOrdersDeadlockWhereQueuesAreShared) {
  EXPECT_EQ(run_two(1, true), "");
  EXPECT_TRUE(says(run_two(1, false), "NCCL's communicator 1 rank 0: send of 1000 bytes"));
  EXPECT_EQ(run_two(8, false), "");
}

TEST(NcclDouble, RefusesTwoRanksOnOneDeviceAndVersionsThatDiffer) {
  FakeGpu world;
  EXPECT_EQ(GpuPair(world).wait(0), nccl::kSuccess);
  EXPECT_EQ(GpuPair(world, 0).wait(0), nccl::kInvalidUsage);
  world.set_nccl_version(1, nccl::version_code(2, 29, 2));
  EXPECT_EQ(GpuPair(world).wait(1), nccl::kInvalidUsage);
}

TEST(NcclDouble, AnAbortEndsAKernelOfItsOwnSideOnceTheWorkBeforeItHasEnded) {
  FakeGpu world({.block_limit = 50ms});
  GpuPair pair(world);
  pair.connect();
  world.fill(1, pair.stream[1], pair.memory[1], kBytes, 'o');
  const int gate = world.hold(1, pair.stream[1]);
  pair.recv(1);
  EXPECT_EQ(pair.wait(1), nccl::kSuccess);
  EXPECT_EQ(world.nccl(1).comm_abort(pair.comm[1]), nccl::kSystemError);
  EXPECT_TRUE(says(world.take_violations(), "blocks in comm_abort()"));
  world.open_gate(gate);
  pair.send(0);
  EXPECT_EQ(world.nccl(1).comm_abort(pair.comm[1]), nccl::kSuccess);
  EXPECT_EQ(world.cuda(1).stream_query(pair.stream[1]), cuda::kSuccess);
  EXPECT_EQ(pair.memory[1][5], '\xcc');     // nothing that may be used, old or new
  EXPECT_EQ(pair.wait(0), nccl::kSuccess);  // NVLink notices nothing
  EXPECT_TRUE(says(world.wait_until_idle(20ms), "send of 1000 bytes"));
  world.break_context(0, 0, cuda::kLaunchFailure);
  EXPECT_EQ(pair.state(0), nccl::kUnhandledCudaError);
  EXPECT_EQ(world.nccl(0).comm_abort(pair.comm[0]), nccl::kSuccess);
  EXPECT_EQ(world.wait_until_idle(), "");
  EXPECT_EQ(world.open_communicators(), 0u);
}

}  // namespace
}  // namespace stitch::transport::gpu::test::double_test
