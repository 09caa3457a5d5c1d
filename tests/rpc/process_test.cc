// Worlds of real processes, over TensorPipe.
#include <stdlib.h>
#include <unistd.h>

#include "tests/support/plain_test.h"
#include "tests/support/process_world.h"
#include "tests/support/running_command.h"

namespace process_test {
namespace {

using stitch::testing::kAddressSanitizer;
using stitch::testing::kThreadSanitizer;
using stitch::testing::ProcessWorld;
using stitch::testing::RunningCommand;
using stitch::testing::TemporaryFolder;

std::vector<std::string> under_stitch_run(int processes, const std::string& what) {
  return {STITCH_RUN, "-n", std::to_string(processes), WORLD_PROGRAM, what};
}

void expect_clean(const std::vector<std::string>& command, const std::string& line) {
  RunningCommand running(command, std::chrono::seconds(60));
  EXPECT_EQ(running.wait(), 0) << running.err();
  EXPECT_NE(running.out().find(line), std::string::npos) << running.out();
  EXPECT_EQ(running.err(), "");
}

TEST(Processes, CallOneAnotherOverEachTransport) {
  for (const char* transport : {"shm,tcp", "tcp", "shm", "tensorpipe-shm,uv", "uv", "shm,uv"}) {
    setenv("STITCH_TRANSPORTS", transport, 1);
    expect_clean(under_stitch_run(3, "calls"), "[worker0] all workers have called");
  }
  unsetenv("STITCH_TRANSPORTS");
}

TEST(Processes, CallOneAnotherWithASecret) {
  setenv("STITCH_SECRET", "it is a long secret", 1);
  expect_clean(under_stitch_run(2, "calls"), "[worker0] all workers have called");
  // Over TCP, where it also encrypts.
  setenv("STITCH_TRANSPORTS", "tcp", 1);
  for (const char* encryption : {"on", "off"}) {
    setenv("STITCH_ENCRYPTION", encryption, 1);
    expect_clean(under_stitch_run(2, "calls"), "[worker0] all workers have called");
  }
  for (const char* name : {"STITCH_SECRET", "STITCH_TRANSPORTS", "STITCH_ENCRYPTION"})
    unsetenv(name);
}

TEST(Processes, AnswerThousandsOfCalls) {
  expect_clean(under_stitch_run(2, "throughput"), "5000 calls answered");
}

// What is over the limit is thrown away while it is read: the connection lasts.
TEST(Processes, AMessageThatDoesNotFitIntoMemoryFailsItsCallAndNoOther) {
  if (kAddressSanitizer || kThreadSanitizer) GTEST_SKIP() << "they map memory without end";
  for (const char* transport : {"shm", "tcp"}) {
    setenv("STITCH_TRANSPORTS", transport, 1);
    expect_clean(under_stitch_run(2, "memory"), "12 of 12, 0 connections made again");
  }
  unsetenv("STITCH_TRANSPORTS");
}

TEST(Processes, MeetOverATcpStore) {
  const std::string port = std::to_string(20'000 + getpid() % 20'000);
  std::vector<std::unique_ptr<RunningCommand>> workers;
  for (int rank = 0; rank < 3; ++rank) {
    workers.push_back(std::make_unique<RunningCommand>(std::vector<std::string>{
        "env", "RANK=" + std::to_string(rank), "WORLD_SIZE=3", "MASTER_ADDR=127.0.0.1",
        "MASTER_PORT=" + port, WORLD_PROGRAM, "calls"}));
  }
  for (auto& worker : workers) EXPECT_EQ(worker->wait(), 0) << worker->err();
}

TEST(Processes, RunUnderMpirun) {
  expect_clean(
      {"mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", WORLD_PROGRAM, "calls"},
      "all workers have called");
}

TEST(Processes, RunWithPlainVariables) {
  ProcessWorld world(2, {WORLD_PROGRAM, "calls"});
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(world[rank].wait(), 0) << world[rank].err();
}

// Three workers over `transport`, of which worker 1 dies as `what` says.
void expect_death_noticed(const std::string& transport, const std::string& what) {
  SCOPED_TRACE(transport + ", " + what);
  ProcessWorld world(3, {WORLD_PROGRAM, what}, {"STITCH_TRANSPORTS=" + transport});
  EXPECT_EQ(world[0].wait(), 0) << world[0].err();
  EXPECT_EQ(world[1].wait(), 128 + 9);
  EXPECT_EQ(world[2].wait(), 0) << world[2].err();
  EXPECT_NE(world[0].out().find("disconnected after less than 2 s: call (anonymous "
                                "namespace)::sleep_until_stopped() to worker \"worker1\" (id 1) "
                                "failed: the worker is gone: "),
            std::string::npos)
      << world[0].out();
  EXPECT_NE(world[0].out().find("worker2 answers 1"), std::string::npos) << world[0].out();
}

TEST(Processes, AKilledPeerFailsItsCallsByNameAndNoOthers) {
  for (const char* transport : {"shm", "tcp", "tensorpipe-shm", "uv"})
    expect_death_noticed(transport, "death");
}

// A process that does not run is noticed by its silence, declared dead, and told so when it runs.
TEST(Processes, AStoppedPeerIsNoticedDeclaredDeadAndToldSo) {
  for (const char* transport : {"shm", "tcp"}) {
    SCOPED_TRACE(transport);
    ProcessWorld world(
        3, {WORLD_PROGRAM, "stop"},
        {std::string("STITCH_TRANSPORTS=") + transport, "STITCH_HEARTBEAT_TIMEOUT=1500ms"});
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(world[rank].wait(), 0) << world[rank].err();
    EXPECT_NE(world[0].out().find("disconnected after less than 2.5 s: call (anonymous "
                                  "namespace)::sleep_until_stopped() to worker \"worker1\" (id 1) "
                                  "failed: the worker is gone: worker \"worker1\" (id 1) epoch "),
              std::string::npos)
        << world[0].out();
    EXPECT_NE(world[0].out().find("has been silent for "), std::string::npos) << world[0].out();
    EXPECT_NE(world[0].out().find("worker2 answers 1"), std::string::npos) << world[0].out();
    EXPECT_NE(world[1].out().find("its call fails: "), std::string::npos) << world[1].out();
    EXPECT_NE(world[1].out().find("was declared dead by worker \"worker0\" (id 0)"),
              std::string::npos)
        << world[1].out();
  }
}

// Its child does not keep its connections open.
TEST(Processes, AKilledPeerThatHasForkedIsNoticedAsSoon) {
  for (const char* transport : {"shm", "tcp"})
    expect_death_noticed(transport, "death with a child");
}

TEST(Processes, ForkedFromOneThatWasAWorkerAreToldApart) {
  if (kThreadSanitizer) GTEST_SKIP() << "it ends a process that starts threads after a fork";
  const TemporaryFolder folder;
  expect_clean({WORLD_PROGRAM, "forks", folder.path() / "store"},
               "the children have called each other");
}

// Processes start ten times more slowly under AddressSanitizer.
constexpr int kStarts = kAddressSanitizer ? 10 : 100;

TEST(Processes, StartAndEndAHundredTimes) {
  for (int round = 0; round < kStarts; ++round) {
    // Mostly of two: each process loads libtorch for a second.
    const int workers = round % 10 == 0 ? 4 : 2;
    RunningCommand running(under_stitch_run(workers, "nothing"), std::chrono::seconds(60));
    ASSERT_EQ(running.wait(), 0) << "round " << round << ": " << running.err();
    ASSERT_EQ(running.err(), "") << "round " << round;
    ASSERT_EQ(running.out(), "") << "round " << round;
  }
}

}  // namespace
}  // namespace process_test
