// Workers that are killed and started again, as processes.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/eventually.h"
#include "tests/support/running_command.h"
#include "tests/support/temporary_folder.h"

namespace {

using std::chrono::steady_clock;
using stitch::testing::RunningCommand;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Restarts, AKilledWorkerComesBackUnderItsName) {
  RunningCommand run({STITCH_RUN, "-n", "3", "--restarts", "1", MEMBER_PROGRAM, "restart"},
                     std::chrono::seconds(100));
  EXPECT_EQ(run.wait(), 0) << run.out() << run.err();
  EXPECT_TRUE(contains(run.out(), "worker1 is back, epoch 2, in another process")) << run.out();
  EXPECT_TRUE(contains(run.out(), "calls to others went on")) << run.out();
  EXPECT_TRUE(contains(run.out(),
                       "disconnected: worker \"worker1\" epoch 1 is gone; it is now epoch 2"))
      << run.out();
  EXPECT_TRUE(contains(run.err(), "worker1 was killed by signal 9 (Killed); restarted (1 of 1)"))
      << run.err();
}

// Worker 0 serves the store over TCP. Its successor finds an empty one, and yet the world.
TEST(Restarts, TheHostOfTheStoreComesBackToItsWorld) {
  RunningCommand run({STITCH_RUN, "-n", "3", "--restarts", "1", MEMBER_PROGRAM, "host"},
                     std::chrono::seconds(100));
  EXPECT_EQ(run.wait(), 0) << run.out() << run.err();
  EXPECT_TRUE(contains(run.out(), "worker0 is back, epoch 2, in another process")) << run.out();
  EXPECT_TRUE(contains(run.out(), "calls to others went on")) << run.out();
  EXPECT_FALSE(contains(run.err(), "stitch:")) << run.err();  // nothing is said about the store
}

// As torchrun does: all workers are killed, then all are started again.
TEST(Restarts, AllWorkersMayBeStartedAgainUnderTorchrun) {
  const stitch::testing::TemporaryFolder folder;
  const std::string store = "STITCH_INIT_METHOD=file://" + (folder.path() / "store").string();
  const auto start = [&](int rank, int restart, const char* what) {
    return std::make_unique<RunningCommand>(
        std::vector<std::string>{"env", store, "RANK=" + std::to_string(rank), "WORLD_SIZE=2",
                                 "TORCHELASTIC_RUN_ID=job",
                                 "TORCHELASTIC_RESTART_COUNT=" + std::to_string(restart),
                                 MEMBER_PROGRAM, what},
        std::chrono::seconds(60));
  };
  std::vector<std::unique_ptr<RunningCommand>> first;
  for (int rank = 0; rank < 2; ++rank) first.push_back(start(rank, 0, "wait"));
  std::this_thread::sleep_for(std::chrono::seconds(2));  // it does not matter how far they are
  for (const auto& worker : first) worker->send_signal(SIGKILL);
  for (const auto& worker : first) worker->wait();
  std::vector<std::unique_ptr<RunningCommand>> second;
  for (int rank = 0; rank < 2; ++rank) second.push_back(start(rank, 1, "meet"));
  for (const auto& worker : second) {
    EXPECT_EQ(worker->wait(), 0) << worker->err();
    EXPECT_TRUE(contains(worker->out(), "has met the others, epoch 1")) << worker->out();
  }
}

// Without torchrun's help: the record of the dead world is still in the store.
TEST(Restarts, ADeadWorldIsFollowedByANewOne) {
  const stitch::testing::TemporaryFolder folder;
  const std::string store = "STITCH_INIT_METHOD=file://" + (folder.path() / "store").string();
  const auto start = [&](int rank, const char* what) {
    return std::make_unique<RunningCommand>(
        std::vector<std::string>{"env", store, "RANK=" + std::to_string(rank), "WORLD_SIZE=2",
                                 MEMBER_PROGRAM, what},
        std::chrono::seconds(60));
  };
  std::vector<std::unique_ptr<RunningCommand>> first;
  for (int rank = 0; rank < 2; ++rank) first.push_back(start(rank, "wait"));
  std::this_thread::sleep_for(std::chrono::seconds(6));  // long after they have met
  for (const auto& worker : first) worker->send_signal(SIGKILL);
  for (const auto& worker : first) {
    worker->wait();
    ASSERT_TRUE(contains(worker->out(), "is there, epoch 1")) << worker->out();
  }
  const auto began = steady_clock::now();
  std::vector<std::unique_ptr<RunningCommand>> second;
  for (int rank = 0; rank < 2; ++rank) second.push_back(start(rank, "meet"));
  for (const auto& worker : second) {
    EXPECT_EQ(worker->wait(), 0) << worker->err();
    EXPECT_TRUE(contains(worker->out(), "has met the others, epoch 2")) << worker->out();
  }
  EXPECT_LT(steady_clock::now() - began, std::chrono::seconds(30));
}

}  // namespace
