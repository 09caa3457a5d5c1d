// Each rule of the double of CUDA is shown by a program that keeps it and one that breaks it.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/gpu/double/fake_gpu.h"
#include "tests/gpu/gpu_pair.h"

namespace stitch::transport::gpu::test::double_test {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

FakeGpu::Kernel kernel_of(std::chrono::nanoseconds duration) {
  FakeGpu::Kernel kernel;
  kernel.duration = duration;
  return kernel;
}

// --- streams, events, copies --------------------------------------------------------------------

TEST(GpuDouble, CopiesMoveBytesWhenTheyExecute) {
  FakeGpu world;
  const auto stream = make_stream(world);
  char* const device = make_memory(world);
  std::vector<char> host(kBytes, 'a');
  ASSERT_EQ(world.cuda().memcpy_async(device, host.data(), kBytes, cuda::kHostToDevice, stream),
            cuda::kSuccess);
  EXPECT_NE(device[0], 'a');
  EXPECT_EQ(world.run(), "");
  EXPECT_EQ(std::string(device, kBytes), std::string(kBytes, 'a'));
}

TEST(GpuDouble, ACopyInTheWrongDirectionIsRefused) {
  FakeGpu world;
  char* const device = make_memory(world);
  std::vector<char> host(kBytes);
  EXPECT_EQ(world.cuda().memcpy_async(device, host.data(), kBytes, cuda::kDeviceToHost, nullptr),
            cuda::kInvalidValue);
  EXPECT_EQ(world.cuda().get_last_error(), cuda::kInvalidValue);
  EXPECT_EQ(world.cuda().get_last_error(), cuda::kSuccess);
}

TEST(GpuDouble, AMissingWaitIsReported) {
  for (const bool waits : {true, false}) {
    FakeGpu world({.seed = 7});
    const auto writer = make_stream(world), reader = make_stream(world);
    const auto event = make_event(world);
    char* const memory = make_memory(world);
    const auto equal = std::make_shared<bool>(false);
    world.fill(0, writer, memory, kBytes, 'x');
    ASSERT_EQ(world.cuda().event_record(event, writer), cuda::kSuccess);
    if (waits) {
      ASSERT_EQ(world.cuda().stream_wait_event(reader, event, 0), cuda::kSuccess);
    }
    world.check(0, reader, memory, kBytes, 'x', equal);
    EXPECT_EQ(world.run(), "");
    const std::string violations = world.take_violations();
    if (waits) {
      EXPECT_EQ(violations, "");
      EXPECT_TRUE(*equal);
    } else {
      EXPECT_TRUE(says(violations, "is not ordered after"));
      EXPECT_TRUE(says(violations, "seed 7"));
    }
  }
}

TEST(GpuDouble, OneHardwareQueueIsNoOrder) {
  // With one queue the bytes are right by accident; the report comes all the same.
  FakeGpu world({.hardware_queues = 1});
  char* const memory = make_memory(world);
  const auto equal = std::make_shared<bool>(false);
  world.fill(0, make_stream(world), memory, kBytes, 'x');
  world.check(0, make_stream(world), memory, kBytes, 'x', equal);
  EXPECT_EQ(world.run(), "");
  EXPECT_TRUE(*equal);
  EXPECT_TRUE(says(world.take_violations(), "read by check"));
}

TEST(GpuDouble, WhatTheHostHasSeenOrdersWhatItSubmitsNext) {
  FakeGpu world;
  const auto writer = make_stream(world);
  char* const memory = make_memory(world);
  const auto equal = std::make_shared<bool>(false);
  world.fill(0, writer, memory, kBytes, 'x');
  EXPECT_EQ(world.cuda().stream_query(writer), cuda::kNotReady);
  EXPECT_EQ(world.run(), "");
  EXPECT_EQ(world.cuda().stream_query(writer), cuda::kSuccess);
  world.check(0, make_stream(world), memory, kBytes, 'x', equal);
  EXPECT_EQ(world.run(), "");
  EXPECT_TRUE(*equal);
}

TEST(GpuDouble, AnEventIsReadyWhenItsStreamHasComeToIt) {
  FakeGpu world;
  const auto stream = make_stream(world);
  const auto event = make_event(world);
  EXPECT_EQ(world.cuda().event_query(event), cuda::kSuccess);  // never recorded
  world.launch(0, stream, kernel_of(microseconds(10)));
  EXPECT_EQ(world.cuda().event_record(event, stream), cuda::kSuccess);
  world.launch(0, stream, kernel_of(microseconds(10)));
  world.run_until(microseconds(9));
  EXPECT_EQ(world.cuda().event_query(event), cuda::kNotReady);
  world.run_until(microseconds(11));
  EXPECT_EQ(world.cuda().event_query(event), cuda::kSuccess);
  EXPECT_EQ(world.cuda().stream_query(stream), cuda::kNotReady);
  EXPECT_EQ(world.cuda().stream_synchronize(stream), cuda::kSuccess);
  EXPECT_EQ(world.now(), microseconds(20));
}

TEST(GpuDouble, AnEventBelongsToItsDevice) {
  FakeGpu world;
  const auto event = make_event(world);
  ASSERT_EQ(world.cuda().set_device(1), cuda::kSuccess);
  EXPECT_NE(world.cuda().event_record(event, make_stream(world)), cuda::kSuccess);
  EXPECT_TRUE(says(world.take_violations(), "an event of device 0 and a stream of device 1"));
}

TEST(GpuDouble, StreamsShareHardwareQueues) {
  for (const int queues : {1, 2, 0}) {
    FakeGpu world({.hardware_queues = queues});
    const auto blocked = make_stream(world), other = make_stream(world);
    FakeGpu::Kernel spinning;
    spinning.gate = world.make_gate();
    world.launch(0, blocked, spinning);
    world.launch(0, other, kernel_of(microseconds(1)));
    EXPECT_TRUE(says(world.run(), "which is closed"));
    EXPECT_EQ(world.cuda().stream_query(other), queues == 1 ? cuda::kNotReady : cuda::kSuccess);
    world.open_gate(spinning.gate);
    EXPECT_EQ(world.run(), "");
    EXPECT_EQ(world.cuda().stream_query(other), cuda::kSuccess);
  }
}

TEST(GpuDouble, TheDefaultStreamWaitsForBlockingStreamsOnly) {
  for (const unsigned flags : {0u, cuda::kStreamNonBlocking}) {
    FakeGpu world;
    char* const memory = make_memory(world);
    const auto equal = std::make_shared<bool>(false);
    world.fill(0, make_stream(world, 0, flags), memory, kBytes, 'x');
    world.check(0, nullptr, memory, kBytes, 'x', equal);
    EXPECT_EQ(world.run(), "");
    EXPECT_EQ(world.take_violations().empty(), flags == 0);
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
  EXPECT_EQ(world.cuda(1).device_synchronize(), cuda::kSuccess) << "in another process";
  cuda::CaptureMode mode = cuda::kCaptureRelaxed;
  EXPECT_EQ(world.cuda(0).thread_exchange_stream_capture_mode(&mode), cuda::kSuccess);
  EXPECT_EQ(mode, cuda::kCaptureGlobal);
  EXPECT_EQ(world.cuda(0).stream_query(stream), cuda::kSuccess);
  EXPECT_EQ(world.cuda(0).thread_exchange_stream_capture_mode(&mode), cuda::kSuccess);
  EXPECT_EQ(mode, cuda::kCaptureRelaxed);
  world.set_capturing(0, captured, false);
  EXPECT_EQ(world.cuda(0).stream_query(stream), cuda::kSuccess);
}

TEST(GpuDouble, ACallCreatesAContextOnTheCurrentDevice) {
  FakeGpu world({.devices = 3});
  int count = 0;
  EXPECT_EQ(world.cuda(0).get_device_count(&count), cuda::kSuccess);
  EXPECT_TRUE(world.contexts(0).empty());
  EXPECT_EQ(world.cuda(0).set_device(2), cuda::kSuccess);
  const auto event = make_event(world);
  EXPECT_EQ(world.contexts(0), std::vector<int>{2});
  {
    const FakeGpu::AsHost other(world, "a thread that has set none");
    EXPECT_EQ(world.cuda(0).event_query(event), cuda::kSuccess);
  }
  EXPECT_EQ(world.contexts(0), (std::vector<int>{0, 2}));
  EXPECT_TRUE(world.contexts(1).empty());
}

TEST(GpuDouble, ThatAnEventHasNotHappenedIsNotedForTheThread) {
  FakeGpu world;
  const auto stream = make_stream(world);
  const auto event = make_event(world);
  world.launch(0, stream, kernel_of(microseconds(1)));
  EXPECT_EQ(world.cuda().event_record(event, stream), cuda::kSuccess);
  EXPECT_EQ(world.cuda().event_query(event), cuda::kNotReady);
  EXPECT_EQ(world.cuda().get_last_error(), cuda::kNotReady);
  EXPECT_EQ(world.cuda().get_last_error(), cuda::kSuccess);
  EXPECT_EQ(world.run(), "");
}

TEST(GpuDouble, AHandleThatWasDestroyedIsReported) {
  FakeGpu world;
  const auto stream = make_stream(world);
  const auto event = make_event(world);
  EXPECT_EQ(world.live_streams(), 1u);
  EXPECT_EQ(world.cuda().stream_destroy(stream), cuda::kSuccess);
  EXPECT_EQ(world.cuda().event_destroy(event), cuda::kSuccess);
  EXPECT_EQ(world.live_streams() + world.live_events(), 0u);
  EXPECT_NE(world.cuda().stream_query(stream), cuda::kSuccess);
  EXPECT_TRUE(says(world.take_violations(), "stream_query() got no stream"));
  EXPECT_NE(world.cuda().event_query(event), cuda::kSuccess);
  EXPECT_TRUE(says(world.take_violations(), "event_query() got no event"));
}

// --- memory -------------------------------------------------------------------------------------

TEST(GpuDouble, AnEarlyFreeIsReported) {
  for (const bool early : {false, true}) {
    FakeGpu world;
    const auto stream = make_stream(world);
    char* const memory = make_memory(world);
    world.fill(0, stream, memory, kBytes, 'x');
    if (!early) {
      ASSERT_EQ(world.cuda().stream_synchronize(stream), cuda::kSuccess);
    }
    EXPECT_EQ(world.cuda().free(memory), cuda::kSuccess);
    EXPECT_EQ(world.run(), "");
    const std::string violations = world.take_violations();
    EXPECT_EQ(violations.empty(), !early) << violations;
    if (early) {
      EXPECT_TRUE(says(violations, "was freed before"));
    }
  }
}

TEST(GpuDouble, AFreeThatTheHostDidNotWaitForIsReportedEvenAfterTheWork) {
  FakeGpu world;
  char* const memory = make_memory(world);
  world.fill(0, make_stream(world), memory, kBytes, 'x');
  EXPECT_EQ(world.run(), "");  // done, but the host has not seen it
  EXPECT_EQ(world.cuda().free(memory), cuda::kSuccess);
  EXPECT_TRUE(says(world.take_violations(), "free by free()"));
}

TEST(GpuDouble, AFreeThatWaitsForTheDeviceIsNeverEarly) {
  FakeGpu world({.sync_on_free = true});
  char* const memory = make_memory(world);
  world.fill(0, make_stream(world), memory, kBytes, 'x');
  EXPECT_EQ(world.cuda().free(memory), cuda::kSuccess);
}

TEST(GpuDouble, MemoryIsPoisonedAndNeverHandedOutAgain) {
  FakeGpu world;
  char* const memory = make_memory(world);
  EXPECT_EQ(memory[0], '\xcc');
  EXPECT_EQ(world.cuda().free(memory), cuda::kSuccess);
  EXPECT_EQ(memory[0], '\xdd');
  EXPECT_NE(make_memory(world), memory);
  EXPECT_EQ(world.cuda().free(memory), cuda::kInvalidValue);
  EXPECT_TRUE(says(world.take_violations(), "is freed twice"));
}

TEST(GpuDouble, AccessesBeyondTheEndAreReported) {
  FakeGpu world;
  char* const memory = make_memory(world);
  world.fill(0, nullptr, memory + 1, kBytes, 'x');
  EXPECT_EQ(world.run(), "");
  EXPECT_TRUE(says(world.take_violations(), "ends before offset 1001"));
  // What a kernel does beside what it says it does.
  FakeGpu::Kernel kernel;
  kernel.body = [=] { memory[kBytes] = 'x'; };
  world.launch(0, nullptr, kernel);
  EXPECT_EQ(world.run(), "");
  EXPECT_TRUE(says(world.take_violations(), "the red zone of device block 0"));
  memory[kBytes] = '\xfb';
}

TEST(GpuDouble, DeviceMemoryIsLimited) {
  FakeGpu world({.device_memory = 2000});
  char* const memory = make_memory(world);
  void* more = nullptr;
  EXPECT_EQ(world.cuda().malloc(&more, 1001), cuda::kOutOfMemory);
  EXPECT_EQ(more, nullptr);
  std::size_t free = 0, total = 0;
  EXPECT_EQ(world.cuda().mem_get_info(&free, &total), cuda::kSuccess);
  EXPECT_EQ(free, 1000u);
  EXPECT_EQ(world.cuda().free(memory), cuda::kSuccess);
  EXPECT_EQ(world.cuda().malloc(&more, 1001), cuda::kSuccess);
}

TEST(GpuDouble, AKernelNeedsPeerAccessToAnotherDevice) {
  for (const bool enabled : {true, false}) {
    FakeGpu world;
    char* const memory = make_memory(world);
    ASSERT_EQ(world.cuda().set_device(1), cuda::kSuccess);
    if (enabled) {
      EXPECT_EQ(world.cuda().device_enable_peer_access(0, 0), cuda::kSuccess);
      EXPECT_EQ(world.cuda().device_enable_peer_access(0, 0), cuda::kPeerAccessAlreadyEnabled);
    }
    world.fill(0, nullptr, memory, kBytes, 'x');
    EXPECT_EQ(world.run(), "");
    const std::string violations = world.take_violations();
    EXPECT_EQ(violations.empty(), enabled) << violations;
    if (!enabled) {
      EXPECT_TRUE(says(violations, "peer access is not enabled"));
    }
  }
}

TEST(GpuDouble, PinnedMemoryIsCheckedLikeDeviceMemory) {
  FakeGpu world;
  const auto stream = make_stream(world);
  void* pinned = nullptr;
  ASSERT_EQ(world.cuda().host_alloc(&pinned, kBytes, 0), cuda::kSuccess);
  char* const device = make_memory(world);
  world.cuda().memcpy_async(pinned, device, kBytes, cuda::kDeviceToHost, stream);
  EXPECT_EQ(world.run(), "");
  world.host_read(0, pinned, kBytes);  // before it has seen the copy end
  EXPECT_TRUE(says(world.take_violations(), "read by the program"));
  EXPECT_EQ(world.cuda().stream_query(stream), cuda::kSuccess);
  world.host_read(0, pinned, kBytes);
  EXPECT_EQ(world.cuda().free_host(pinned), cuda::kSuccess);
}

TEST(GpuDouble, MemoryThatACacheHandsOnTooEarlyIsReported) {
  FakeGpu world;
  const auto stream = make_stream(world);
  char* const memory = make_memory(world);
  world.fill(0, stream, memory, kBytes, 'x');
  world.host_write(0, memory, kBytes);
  EXPECT_EQ(world.run(), "");
  EXPECT_TRUE(says(world.take_violations(), "is not ordered after the write by the program"));
}

// --- processes ----------------------------------------------------------------------------------

TEST(GpuDouble, MemoryOfAnotherProcessIsReported) {
  FakeGpu world;
  char* const memory = make_memory(world, 0);
  world.fill(1, nullptr, memory, kBytes, 'y');
  EXPECT_EQ(world.run(), "");
  EXPECT_TRUE(says(world.take_violations(), "is not mapped in process 1"));
}

TEST(GpuDouble, ProcessesNumberTheDevicesThatTheySee) {
  FakeGpu world({.devices = 4});
  world.set_visible_devices(1, {3, 2});
  int count = 0;
  EXPECT_EQ(world.cuda(1).get_device_count(&count), cuda::kSuccess);
  EXPECT_EQ(count, 2);
  cuda::Uuid in_first, in_second;
  EXPECT_EQ(world.cuda(0).device_get_uuid(&in_first, 3), 0);
  EXPECT_EQ(world.cuda(1).device_get_uuid(&in_second, 0), 0);
  EXPECT_EQ(std::memcmp(&in_first, &in_second, sizeof(in_first)), 0);
  EXPECT_NE(world.cuda(1).set_device(2), cuda::kSuccess);
  world.set_visible_devices(2, {});
  EXPECT_EQ(world.cuda(2).get_device_count(&count), cuda::kNoDevice);
}

// --- hosts that block ---------------------------------------------------------------------------

TEST(GpuDouble, AHostBlocksWhereTheLaunchQueueIsFull) {
  FakeGpu world({.launch_limit = 4});
  const auto stream = make_stream(world);
  for (int i = 0; i < 4; ++i) world.launch(0, stream, kernel_of(microseconds(10)));
  EXPECT_EQ(world.now(), microseconds(0));
  world.launch(0, stream, kernel_of(microseconds(10)));
  EXPECT_EQ(world.now(), microseconds(10));
}

TEST(GpuDouble, ABlockedHostThatNothingCanFreeIsReported) {
  FakeGpu world({.seed = 3, .sync_on_alloc = true});
  FakeGpu::Kernel spinning;
  spinning.name = "spinning";
  spinning.gate = world.make_gate();
  world.launch(0, nullptr, spinning);
  void* memory = nullptr;
  EXPECT_EQ(world.cuda().malloc(&memory, kBytes), cuda::kLaunchFailure);
  const std::string violations = world.take_violations();
  EXPECT_TRUE(says(violations, "blocks in malloc(), which waits for the device"));
  EXPECT_TRUE(says(violations, "waits for spinning"));
  EXPECT_TRUE(says(violations, "seed 3"));
}

TEST(GpuDouble, OtherHostsGoOnWhileOneBlocks) {
  FakeGpu* running = nullptr;
  FakeGpu::Kernel spinning;
  FakeGpu::Options options;
  options.sync_on_alloc = true;
  bool opened = false;
  options.while_blocked = [&] {
    if (opened) return false;
    running->open_gate(spinning.gate);
    return opened = true;
  };
  FakeGpu world(options);
  running = &world;
  spinning.gate = world.make_gate();
  world.launch(0, nullptr, spinning);
  void* memory = nullptr;
  EXPECT_EQ(world.cuda().malloc(&memory, kBytes), cuda::kSuccess);
  EXPECT_TRUE(opened);
}

TEST(GpuDouble, AFirstLaunchWaitsForTheDeviceWhereModulesAreLoadedLazily) {
  for (const bool lazy : {false, true}) {
    FakeGpu world({.lazy_loading = lazy});
    const auto stream = make_stream(world), other = make_stream(world);
    world.launch(0, stream, kernel_of(microseconds(50)));
    FakeGpu::Kernel second = kernel_of(microseconds(1));
    second.name = "second";
    world.launch(0, other, second);
    EXPECT_EQ(world.now(), lazy ? microseconds(50) : microseconds(0));
    world.launch(0, stream, kernel_of(microseconds(50)));
    world.launch(0, other, second);  // loaded by now
    EXPECT_EQ(world.now(), lazy ? microseconds(50) : microseconds(0));
    EXPECT_EQ(world.run(), "");
  }
}

TEST(GpuDouble, CallsAreCounted) {
  FakeGpu world;
  EXPECT_EQ(world.calls("device_synchronize"), 0u);
  world.cuda(1).device_synchronize();
  EXPECT_EQ(world.calls("device_synchronize"), 1u);
  EXPECT_EQ(world.calls("device_synchronize", 0), 0u);
  EXPECT_THROW((void)world.calls("device_synchronise"), std::out_of_range);
}

// --- errors -------------------------------------------------------------------------------------

TEST(GpuDouble, TheNthCallFailsAsAsked) {
  FakeGpu world;
  world.inject(0, "malloc", cuda::kOutOfMemory, 2);
  void* memory = nullptr;
  EXPECT_EQ(world.cuda(0).malloc(&memory, 1), cuda::kSuccess);
  EXPECT_EQ(world.cuda(1).malloc(&memory, 1), cuda::kSuccess);
  EXPECT_EQ(world.cuda(0).malloc(&memory, 1), cuda::kOutOfMemory);
  EXPECT_EQ(world.cuda(0).malloc(&memory, 1), cuda::kSuccess);
  EXPECT_EQ(world.cuda(0).get_last_error(), cuda::kOutOfMemory);
  EXPECT_EQ(world.cuda(0).get_last_error(), cuda::kSuccess);
}

TEST(GpuDouble, ABrokenContextStaysBroken) {
  FakeGpu world;
  const auto stream = make_stream(world);
  world.fill(0, stream, make_memory(world), kBytes, 'x');
  world.break_context(0, 0, cuda::kIllegalAddress);
  EXPECT_EQ(world.cuda().stream_query(stream), cuda::kIllegalAddress);
  EXPECT_EQ(world.cuda().get_last_error(), cuda::kIllegalAddress);
  EXPECT_EQ(world.cuda().get_last_error(), cuda::kSuccess);  // a note of the thread, no more
  EXPECT_EQ(world.cuda().stream_query(stream), cuda::kIllegalAddress);
  EXPECT_EQ(world.run(), "");  // its work is gone
  EXPECT_EQ(world.cuda().set_device(1), cuda::kSuccess);
  EXPECT_EQ(world.cuda().device_synchronize(), cuda::kSuccess);
}

// --- schedules, threads -------------------------------------------------------------------------

std::string order_of_ends(std::uint64_t seed) {
  FakeGpu world({.seed = seed});
  std::string order;
  for (char name = 'a'; name < 'g'; ++name) {
    FakeGpu::Kernel kernel;
    kernel.body = [&order, name] { order += name; };
    world.launch(0, make_stream(world), kernel);
  }
  EXPECT_EQ(world.run(), "");
  return order + " at " + std::to_string(world.now().count());
}

TEST(GpuDouble, TheSeedChoosesTheSchedule) {
  EXPECT_EQ(order_of_ends(1), order_of_ends(1));
  std::set<std::string> orders;
  for (std::uint64_t seed = 0; seed < 10; ++seed) orders.insert(order_of_ends(seed));
  EXPECT_GT(orders.size(), 5u);
}

TEST(GpuDouble, HostsThatOnlyPassAPointerAreNotOrdered) {
  for (const bool publishes : {true, false}) {
    FakeGpu world({.host_order = FakeGpu::HostOrder::as_published});
    const auto stream = make_stream(world);
    char* memory = nullptr;
    FakeGpu::Token token;
    {
      const FakeGpu::AsHost first(world, "first");
      memory = make_memory(world);
      world.fill(0, stream, memory, kBytes, 'x');
      EXPECT_EQ(world.cuda().stream_synchronize(stream), cuda::kSuccess);
      token = world.publish();
    }
    const FakeGpu::AsHost second(world, "second");
    if (publishes) world.observe(token);
    world.fill(0, make_stream(world), memory, kBytes, 'y');
    EXPECT_EQ(world.run(), "");
    EXPECT_EQ(world.take_violations().empty(), publishes);
  }
}

TEST(GpuDouble, AThreadDrivesTheDevice) {
  FakeGpu world({.driving = FakeGpu::Driving::thread});
  std::vector<std::thread> hosts;
  for (int process : {0, 1, 2}) {
    hosts.emplace_back([&world, process] {
      const auto stream = make_stream(world, process);
      char* const memory = make_memory(world, process);
      for (char value = 'a'; value <= 'z'; ++value) {
        const auto equal = std::make_shared<bool>(false);
        world.fill(process, stream, memory, kBytes, value);
        world.check(process, stream, memory, kBytes, value, equal);
        ASSERT_EQ(world.cuda(process).stream_synchronize(stream), cuda::kSuccess);
        ASSERT_TRUE(*equal);
      }
    });
  }
  for (std::thread& host : hosts) host.join();
  EXPECT_EQ(world.wait_until_idle(), "");
}

TEST(GpuDouble, AThreadThatBlocksTooLongIsReported) {
  FakeGpu world({.driving = FakeGpu::Driving::thread, .block_limit = milliseconds(20)});
  FakeGpu::Kernel spinning;
  spinning.gate = world.make_gate();
  world.launch(0, nullptr, spinning);
  EXPECT_EQ(world.cuda().device_synchronize(), cuda::kLaunchFailure);
  EXPECT_TRUE(says(world.take_violations(), "blocks in device_synchronize() and cannot go on"));
  EXPECT_TRUE(says(world.wait_until_idle(milliseconds(1)), "which is closed"));
  world.open_gate(spinning.gate);
  EXPECT_EQ(world.wait_until_idle(), "");
}

}  // namespace
}  // namespace stitch::transport::gpu::test::double_test
