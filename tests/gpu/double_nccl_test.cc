// Each rule of the double of NCCL is shown by a program that keeps it and one that breaks it.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/gpu/double/fake_gpu.h"
#include "tests/gpu/gpu_pair.h"

namespace stitch::transport::gpu::test::double_nccl_test {
namespace {

TEST(NcclDouble, MovesBytesBetweenTwoProcesses) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    FakeGpu world({.seed = seed});
    GpuPair pair(world);
    world.fill(0, pair.stream[0], pair.memory[0], kBytes, 's');
    EXPECT_EQ(pair.send(0), nccl::kInProgress);
    EXPECT_EQ(pair.recv(1), nccl::kInProgress);
    EXPECT_EQ(world.run(), "");
    EXPECT_EQ(pair.state(0), nccl::kSuccess);
    EXPECT_EQ(std::string(pair.memory[1], kBytes), std::string(kBytes, 's'));
  }
}

TEST(NcclDouble, WhatIsReceivedIsOrderedAfterWhatWasSent) {
  FakeGpu world;
  GpuPair pair(world);
  const auto equal = std::make_shared<bool>(false);
  world.fill(0, pair.stream[0], pair.memory[0], kBytes, 's');
  pair.send(0);
  pair.recv(1);
  EXPECT_EQ(pair.wait(1), nccl::kSuccess);
  world.check(1, pair.stream[1], pair.memory[1], kBytes, 's', equal);
  EXPECT_EQ(world.run(), "");
  EXPECT_TRUE(*equal);
}

TEST(NcclDouble, ABufferThatIsStillBeingSentMayNotBeWritten) {
  FakeGpu world;
  GpuPair pair(world);
  pair.send(0);
  pair.recv(1);
  EXPECT_EQ(pair.wait(0), nccl::kSuccess);
  world.fill(0, make_stream(world, 0), pair.memory[0], kBytes, 'x');
  EXPECT_EQ(world.run(), "");
  EXPECT_TRUE(says(world.take_violations(), "is not ordered after"));
}

TEST(NcclDouble, AnEventThatIsRecordedBeforeTheLaunchWasSeenSaysNothing) {
  for (const bool polls : {true, false}) {
    FakeGpu world;
    GpuPair pair(world);
    const auto event = make_event(world, 1);
    pair.send(0);
    pair.recv(1);
    if (polls) {
      EXPECT_EQ(pair.wait(1), nccl::kSuccess);
    }
    ASSERT_EQ(world.cuda(1).event_record(event, pair.stream[1]), cuda::kSuccess);
    world.run_until(world.now());
    // Without polling the event is in the stream before NCCL's kernel is.
    EXPECT_EQ(world.cuda(1).event_query(event), polls ? cuda::kNotReady : cuda::kSuccess);
    EXPECT_EQ(world.run(), "");
    EXPECT_EQ(world.cuda(1).event_query(event), cuda::kSuccess);
  }
}

TEST(NcclDouble, ACommunicatorMayNotBeUsedBeforeItsLastOperationWasSeenToSucceed) {
  FakeGpu world;
  GpuPair pair(world, false);
  EXPECT_EQ(pair.send(0), nccl::kInvalidArgument);
  EXPECT_TRUE(says(world.take_violations(), "before its last operation was seen to succeed"));
  EXPECT_EQ(pair.wait(0), nccl::kSuccess);
  EXPECT_EQ(pair.send(0), nccl::kInProgress);
  EXPECT_EQ(pair.send(0), nccl::kInvalidArgument);
  EXPECT_TRUE(says(world.take_violations(), "before its last operation was seen to succeed"));
}

TEST(NcclDouble, SizesThatDifferAreReported) {
  FakeGpu world;
  GpuPair pair(world);
  pair.send(0, 100);
  pair.recv(1, 101);
  EXPECT_EQ(world.run(), "");
  EXPECT_TRUE(says(world.take_violations(), "has a send of 100 bytes for a recv of 101 bytes"));
}

TEST(NcclDouble, GroupsThatDifferAreReported) {
  FakeGpu world;
  GpuPair pair(world);
  world.nccl(0).group_start();
  EXPECT_EQ(pair.send(0, 10), nccl::kSuccess);
  EXPECT_EQ(pair.send(0, 10), nccl::kSuccess);
  EXPECT_EQ(world.nccl(0).group_end(), nccl::kInProgress);
  pair.recv(1, 10);
  EXPECT_EQ(pair.wait(1), nccl::kSuccess);
  pair.recv(1, 10);
  EXPECT_EQ(world.run(), "");
  EXPECT_TRUE(says(world.take_violations(), "this is undefined"));
}

TEST(NcclDouble, MemoryHasToBeOnTheDevice) {
  FakeGpu world;
  GpuPair pair(world);
  std::vector<char> host(kBytes);
  EXPECT_EQ(world.nccl(0).send(host.data(), kBytes, nccl::kInt8, 1, pair.comm[0], pair.stream[0]),
            nccl::kInvalidArgument);
  EXPECT_TRUE(says(world.take_violations(), "got memory that is not on device 0"));
  EXPECT_EQ(world.nccl(0).send(pair.memory[0], kBytes, nccl::kInt8, 0, pair.comm[0], nullptr),
            nccl::kInvalidArgument);
  EXPECT_TRUE(says(world.take_violations(), "got rank 0"));
}

// --- deadlocks ----------------------------------------------------------------------------------

TEST(NcclDouble, BothSidesSendingFirstIsADeadlockWithItsCycle) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    FakeGpu world({.seed = seed});
    GpuPair pair(world);
    pair.connect();  // so that it is the transfers that wait for each other
    for (int rank : {0, 1}) ASSERT_EQ(pair.send(rank), nccl::kInProgress);
    for (int rank : {0, 1}) EXPECT_EQ(pair.wait(rank), nccl::kSuccess);
    for (int rank : {0, 1}) ASSERT_EQ(pair.recv(rank), nccl::kInProgress);
    const std::string report = world.run();
    EXPECT_TRUE(says(report, "deadlock: a cycle of 4"));
    EXPECT_TRUE(says(report, "NCCL's communicator 1 rank 0: send of 1000 bytes"));
    EXPECT_TRUE(says(report, "seed " + std::to_string(seed)));
  }
}

TEST(NcclDouble, BothSidesInOneGroupEachIsNoDeadlock) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    FakeGpu world({.seed = seed});
    GpuPair pair(world);
    pair.connect();
  }
}

TEST(NcclDouble, FirstTransfersInOppositeDirectionsDeadlockWhileConnecting) {
  FakeGpu world;
  GpuPair pair(world);
  for (int rank : {0, 1}) ASSERT_EQ(pair.send(rank), nccl::kInProgress);
  const std::string report = world.run();
  EXPECT_TRUE(says(report, "deadlock: a cycle of 2"));
  EXPECT_TRUE(says(report, "connects the first send of communicator 1 rank 1"));
  EXPECT_EQ(pair.state(0), nccl::kInProgress);
}

TEST(NcclDouble, ACommunicatorIsOneQueueWhateverTheStreams) {
  FakeGpu world;
  GpuPair pair(world);
  pair.connect();
  for (int rank : {0, 1}) {
    ASSERT_EQ(pair.send(rank), nccl::kInProgress);
    EXPECT_EQ(pair.wait(rank), nccl::kSuccess);
    ASSERT_EQ(world.nccl(rank).recv(make_memory(world, rank), kBytes, nccl::kInt8, 1 - rank,
                                    pair.comm[rank], make_stream(world, rank)),
              nccl::kInProgress);
    EXPECT_EQ(pair.wait(rank), nccl::kSuccess);
  }
  EXPECT_TRUE(says(world.run(), "deadlock: a cycle of 4"));
}

TEST(NcclDouble, TheStreamsOfAGroupWaitForEachOther) {
  FakeGpu world;
  GpuPair pair(world);
  pair.connect();
  FakeGpu::Kernel users;
  users.gate = world.make_gate();
  const auto other = make_stream(world, 0);
  world.launch(0, other, users);
  world.nccl(0).group_start();
  EXPECT_EQ(pair.send(0, 10), nccl::kSuccess);
  EXPECT_EQ(world.nccl(0).recv(make_memory(world, 0), 10, nccl::kInt8, 1, pair.comm[0], other),
            nccl::kSuccess);
  EXPECT_EQ(world.nccl(0).group_end(), nccl::kInProgress);
  world.nccl(1).group_start();
  EXPECT_EQ(pair.recv(1, 10), nccl::kSuccess);
  EXPECT_EQ(
      world.nccl(1).send(make_memory(world, 1), 10, nccl::kInt8, 0, pair.comm[1], pair.stream[1]),
      nccl::kSuccess);
  EXPECT_EQ(world.nccl(1).group_end(), nccl::kInProgress);
  EXPECT_TRUE(says(world.run(), "gate 1, which is closed"));
  EXPECT_EQ(world.cuda(0).stream_query(pair.stream[0]), cuda::kNotReady);
  world.open_gate(users.gate);
  EXPECT_EQ(world.run(), "");
}

TEST(NcclDouble, ALonelySendNamesTheMissingReceive) {
  FakeGpu world;
  GpuPair pair(world);
  pair.connect();
  pair.send(0);
  EXPECT_TRUE(says(world.run(),
                   "waits for a recv of communicator 1 rank 1 in process 1, which was not called"));
}

// Two communicators between the same two GPUs, used in that order or the other.
std::string run_two(int queues, bool same_order, std::uint64_t seed) {
  FakeGpu world({.seed = seed, .hardware_queues = queues});
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
  return world.run();
}

TEST(NcclDouble, CommunicatorsInDifferentOrdersDeadlockWhereQueuesAreShared) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    EXPECT_EQ(run_two(1, true, seed), "");
    EXPECT_TRUE(says(run_two(1, false, seed), "deadlock: a cycle of 4"));
    EXPECT_EQ(run_two(8, false, seed), "");
  }
}

TEST(NcclDouble, AnImplicitSyncBesideASpinningKernelIsADeadlockOfHostsToo) {
  for (const bool syncs : {false, true}) {
    FakeGpu world({.sync_on_alloc = syncs});
    void* memory = nullptr;
    GpuPair pair(world);
    pair.connect();
    pair.recv(1);
    EXPECT_EQ(pair.wait(1), nccl::kSuccess);
    world.run_until(world.now());
    // Its kernel waits for rank 0, which this one host would only serve afterwards.
    const bool ended = world.cuda(1).malloc(&memory, 1) == cuda::kSuccess;
    EXPECT_EQ(ended, !syncs);
    if (syncs) {
      const std::string violations = world.take_violations();
      EXPECT_TRUE(says(violations, "in malloc(), which waits for the device (process 1)"));
      EXPECT_TRUE(says(violations, "a send of communicator 1 rank 0 in process 0"));
    }
    pair.send(0);
    EXPECT_EQ(world.run(), "");
  }
}

// --- init ---------------------------------------------------------------------------------------

TEST(NcclDouble, InitWaitsForBothRanks) {
  FakeGpu world;
  nccl::UniqueId id;
  world.nccl().get_unique_id(&id);
  nccl::Config config;
  config.blocking = 0;
  nccl::Comm first = nullptr, second = nullptr;
  EXPECT_EQ(world.nccl(0).comm_init_rank_config(&first, 2, id, 0, &config), nccl::kInProgress);
  EXPECT_EQ(world.run(), "");
  nccl::Result state = nccl::kSuccess;
  EXPECT_EQ(world.nccl(0).comm_get_async_error(first, &state), nccl::kSuccess);
  EXPECT_EQ(state, nccl::kInProgress);
  EXPECT_EQ(world.nccl(1).comm_init_rank_config(&second, 2, id, 0, &config), nccl::kInvalidUsage);
  world.cuda(1).set_device(1);
  EXPECT_EQ(world.nccl(1).comm_init_rank_config(&second, 2, id, 1, &config), nccl::kInProgress);
  EXPECT_EQ(world.run(), "");
  EXPECT_EQ(world.nccl(0).comm_get_async_error(first, &state), nccl::kSuccess);
  EXPECT_EQ(state, nccl::kSuccess);
  EXPECT_EQ(world.open_communicators(), 2u);
}

// The state of both ranks after init, on these devices.
nccl::Result init_state(FakeGpu& world, int second_device) {
  nccl::UniqueId id;
  world.nccl().get_unique_id(&id);
  nccl::Config config;
  config.blocking = 0;
  nccl::Comm comm[2];
  for (int rank : {0, 1}) {
    world.cuda(rank).set_device(rank == 0 ? 0 : second_device);
    world.nccl(rank).comm_init_rank_config(&comm[rank], 2, id, rank, &config);
  }
  EXPECT_EQ(world.run(), "");
  nccl::Result state[2];
  for (int rank : {0, 1}) world.nccl(rank).comm_get_async_error(comm[rank], &state[rank]);
  EXPECT_EQ(state[0], state[1]);
  return state[0];
}

TEST(NcclDouble, RefusesTwoRanksOnOneDevice) {
  FakeGpu world;
  EXPECT_EQ(init_state(world, 1), nccl::kSuccess);
  EXPECT_EQ(init_state(world, 0), nccl::kInvalidUsage);
}

TEST(NcclDouble, RefusesVersionsThatDiffer) {
  FakeGpu world;
  world.set_nccl_version(1, nccl::version_code(2, 29, 2));
  int version = 0;
  EXPECT_EQ(world.nccl(1).get_version(&version), nccl::kSuccess);
  EXPECT_EQ(version, 22902);
  EXPECT_EQ(init_state(world, 1), nccl::kInvalidUsage);
}

TEST(NcclDouble, BlockingInitWaitsInTwoThreads) {
  FakeGpu world({.driving = FakeGpu::Driving::thread});
  nccl::UniqueId id;
  world.nccl().get_unique_id(&id);
  nccl::Comm comm[2];
  std::vector<std::thread> ranks;
  for (int rank : {0, 1}) {
    ranks.emplace_back([&, rank] {
      world.cuda(rank).set_device(rank);
      char* const memory = make_memory(world, rank);
      const auto stream = make_stream(world, rank);
      const NcclApi& api = world.nccl(rank);
      ASSERT_EQ(api.comm_init_rank_config(&comm[rank], 2, id, rank, nullptr), nccl::kSuccess);
      if (rank == 0) {
        world.fill(rank, stream, memory, kBytes, 'b');
        ASSERT_EQ(api.send(memory, kBytes, nccl::kInt8, 1, comm[rank], stream), nccl::kSuccess);
      } else {
        ASSERT_EQ(api.recv(memory, kBytes, nccl::kInt8, 0, comm[rank], stream), nccl::kSuccess);
      }
      ASSERT_EQ(world.cuda(rank).stream_synchronize(stream), cuda::kSuccess);
      EXPECT_EQ(memory[0], 'b');
      EXPECT_EQ(api.comm_destroy(comm[rank]), nccl::kSuccess);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(world.wait_until_idle(), "");
  EXPECT_EQ(world.open_communicators(), 0u);
  EXPECT_EQ(world.nccl_launching_hosts(0, 0), 1u);
}

// --- the end ------------------------------------------------------------------------------------

TEST(NcclDouble, AbortEndsASpinningKernelOfItsOwnSideOnly) {
  FakeGpu world;
  GpuPair pair(world);
  pair.connect();
  world.fill(1, pair.stream[1], pair.memory[1], kBytes, 'o');
  pair.recv(1);
  EXPECT_EQ(pair.wait(1), nccl::kSuccess);
  pair.send(0);
  EXPECT_EQ(world.nccl(1).comm_abort(pair.comm[1]), nccl::kSuccess);
  EXPECT_EQ(world.cuda(1).stream_query(pair.stream[1]), cuda::kSuccess);
  EXPECT_EQ(pair.memory[1][5], '\xcc');  // nothing that may be used, old or new
  EXPECT_TRUE(says(world.run(), "communicator 1 rank 1, which is gone"));
  EXPECT_EQ(pair.state(0), nccl::kSuccess);  // NVLink notices nothing
  EXPECT_EQ(world.nccl(0).comm_abort(pair.comm[0]), nccl::kSuccess);
  EXPECT_EQ(world.run(), "");
  EXPECT_EQ(world.open_communicators(), 0u);
}

TEST(NcclDouble, AbortWaitsForTheWorkBeforeItsKernel) {
  FakeGpu world;
  GpuPair pair(world);
  pair.connect();
  FakeGpu::Kernel users;
  users.name = "the user's kernel";
  users.gate = world.make_gate();
  world.launch(1, pair.stream[1], users);
  pair.recv(1);
  EXPECT_EQ(pair.wait(1), nccl::kSuccess);
  EXPECT_EQ(world.nccl(1).comm_abort(pair.comm[1]), nccl::kSystemError);
  EXPECT_TRUE(says(world.take_violations(), "the user's kernel"));
  world.open_gate(users.gate);
  EXPECT_EQ(world.nccl(1).comm_abort(pair.comm[1]), nccl::kSuccess);
}

TEST(NcclDouble, AbortDuringInitAndDuringConnectEnds) {
  FakeGpu world;
  GpuPair starting(world, false);
  EXPECT_EQ(world.nccl(0).comm_abort(starting.comm[0]), nccl::kSuccess);
  GpuPair connecting(world);
  connecting.send(0);
  EXPECT_EQ(world.nccl(0).comm_abort(connecting.comm[0]), nccl::kSuccess);
  EXPECT_EQ(world.run(), "");
}

TEST(NcclDouble, SeveralAreAbortedInOneGroup) {
  FakeGpu world({.hardware_queues = 1});
  GpuPair first(world), second(world);
  first.connect();
  second.connect();
  // The second's kernel is behind the first's in the queue.
  for (GpuPair* pair : {&first, &second}) {
    pair->recv(1);
    EXPECT_EQ(pair->wait(1), nccl::kSuccess);
  }
  world.nccl(1).group_start();
  EXPECT_EQ(world.nccl(1).comm_abort(second.comm[1]), nccl::kSuccess);
  EXPECT_EQ(world.nccl(1).comm_abort(first.comm[1]), nccl::kSuccess);
  EXPECT_EQ(world.nccl(1).group_end(), nccl::kSuccess);
  EXPECT_EQ(world.run(), "");
}

TEST(NcclDouble, APeerThatDiesIsSeenOverTheNetworkOnly) {
  for (const bool network : {false, true}) {
    FakeGpu world({.network_transport = network});
    GpuPair pair(world);
    pair.connect();
    pair.recv(1);
    world.kill(0);
    const std::string left = world.run();
    EXPECT_TRUE(says(left, "communicator 1 rank 0, which is gone"));
    EXPECT_EQ(pair.state(1), network ? nccl::kRemoteError : nccl::kSuccess);
    EXPECT_EQ(world.nccl(1).comm_abort(pair.comm[1]), nccl::kSuccess);
    EXPECT_EQ(world.run(), "");
    EXPECT_EQ(world.open_communicators(), 0u);
  }
}

TEST(NcclDouble, ErrorsAreInjected) {
  FakeGpu world;
  GpuPair pair(world);
  world.inject(0, "send", nccl::kSystemError);
  EXPECT_EQ(pair.send(0), nccl::kSystemError);
  world.set_async_error(0, pair.comm[0], nccl::kRemoteError);
  EXPECT_EQ(pair.state(0), nccl::kRemoteError);
  EXPECT_EQ(pair.send(0), nccl::kRemoteError);
  world.break_context(1, 1, cuda::kLaunchFailure);
  EXPECT_EQ(pair.state(1), nccl::kUnhandledCudaError);
}

TEST(NcclDouble, NothingIsLaunchedIntoABrokenContext) {
  FakeGpu world;
  GpuPair pair(world);
  pair.connect();
  EXPECT_EQ(pair.recv(1), nccl::kInProgress);  // to be launched in the background
  world.break_context(1, 1, cuda::kLaunchFailure);
  EXPECT_EQ(world.run(), "");
  EXPECT_EQ(pair.state(1), nccl::kUnhandledCudaError);
  EXPECT_EQ(world.nccl(1).comm_abort(pair.comm[1]), nccl::kSuccess);
}

TEST(NcclDouble, FinalizeWaitsForWhatWasLaunched) {
  FakeGpu world;
  GpuPair pair(world);
  pair.send(0);
  pair.recv(1);
  for (int rank : {0, 1}) EXPECT_EQ(pair.wait(rank), nccl::kSuccess);
  EXPECT_EQ(world.nccl(1).comm_finalize(pair.comm[1]), nccl::kInProgress);
  EXPECT_EQ(pair.recv(1), nccl::kInvalidArgument);
  EXPECT_FALSE(world.take_violations().empty());
  EXPECT_EQ(pair.wait(1), nccl::kSuccess);
  EXPECT_EQ(world.cuda(1).stream_query(pair.stream[1]), cuda::kSuccess);
  EXPECT_EQ(world.nccl(1).comm_destroy(pair.comm[1]), nccl::kSuccess);
  EXPECT_EQ(world.nccl(1).comm_destroy(pair.comm[1]), nccl::kInvalidArgument);
  EXPECT_TRUE(says(world.take_violations(), "comm_destroy() got no communicator"));
}

}  // namespace
}  // namespace stitch::transport::gpu::test::double_nccl_test
