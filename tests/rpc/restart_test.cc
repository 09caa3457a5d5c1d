// Workers that are killed and started again, as processes.
#include <signal.h>

#include "tests/support/plain_test.h"
#include "tests/support/running_command.h"

namespace restart_test {
namespace {

using std::chrono::steady_clock;
using stitch::testing::contains;
using stitch::testing::eventually;
using stitch::testing::RunningCommand;

TEST(Restarts, AKilledWorkerComesBackUnderItsName) {
  RunningCommand run({STITCH_RUN, "-n", "3", "--restarts", "1", MEMBER_PROGRAM, "restart"},
                     std::chrono::seconds(100));
  EXPECT_EQ(run.wait(), 0) << run.out() << run.err();
  EXPECT_TRUE(contains(run.out(), "worker1 is back, epoch 2, in another process")) << run.out();
  EXPECT_TRUE(contains(run.out(), "calls to others went on")) << run.out();
  EXPECT_TRUE(
      contains(run.out(), "disconnected: worker \"worker1\" epoch 1 is gone; it is now epoch 2"))
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

// What is killed has not founded a world yet, and no other worker fails for that.
class WhileFounding : public ::testing::Test {
 protected:
  void expect_all_meet(const std::string& workers, const std::string& what) {
    RunningCommand run({STITCH_RUN, "-n", workers, "--restarts", "1", MEMBER_PROGRAM, what,
                        folder_.path().string()},
                       std::chrono::seconds(100));
    EXPECT_EQ(run.wait(), 0) << run.out() << run.err();
    for (int rank = 0; rank < std::stoi(workers); ++rank) {
      const std::string name = "worker" + std::to_string(rank);
      EXPECT_TRUE(contains(run.out(), name + " has met the others")) << run.out();
      EXPECT_EQ(contains(run.err(), name), rank == 0) << run.err();
    }
    EXPECT_TRUE(contains(run.err(), "worker0 was killed by signal 9 (Killed); restarted (1 of 1)"))
        << run.err();
  }

 private:
  const stitch::testing::TemporaryFolder folder_;
};

TEST_F(WhileFounding, AKilledWorkerComesBackAndIsNoDuplicateOfItself) {
  expect_all_meet("2", "founding");
}

// The others lose their store, and look for the next one.
TEST_F(WhileFounding, TheKilledHostOfTheStoreServesItAgain) {
  expect_all_meet("3", "host founding");
}

// Two workers that meet at a file and are killed, all of them.
class AllKilled : public ::testing::Test {
 protected:
  std::unique_ptr<RunningCommand> start(int rank, const std::vector<std::string>& variables,
                                        const char* what) const {
    std::vector<std::string> command{"env", "STITCH_INIT_METHOD=file://" + path("store"),
                                     "RANK=" + std::to_string(rank), "WORLD_SIZE=2"};
    command.insert(command.end(), variables.begin(), variables.end());
    command.insert(command.end(), {MEMBER_PROGRAM, what, path("there-")});
    return std::make_unique<RunningCommand>(command, std::chrono::seconds(60));
  }
  void start_and_kill(const std::vector<std::string>& variables) const {
    const auto worker0 = start(0, variables, "wait");
    const auto worker1 = start(1, variables, "wait");
    EXPECT_TRUE(eventually([&] {
      return std::filesystem::exists(path("there-worker0")) &&
             std::filesystem::exists(path("there-worker1"));
    }));
    for (const auto* worker : {worker0.get(), worker1.get()}) worker->send_signal(SIGKILL);
    EXPECT_EQ(worker0->wait(), 128 + SIGKILL);
    EXPECT_EQ(worker1->wait(), 128 + SIGKILL);
  }
  // What the workers print once they have met.
  std::string meet_again(const std::vector<std::string>& variables) const {
    return meet_again(variables, variables);
  }
  std::string meet_again(const std::vector<std::string>& variables0,
                         const std::vector<std::string>& variables1) const {
    const auto worker0 = start(0, variables0, "meet");
    const auto worker1 = start(1, variables1, "meet");
    EXPECT_EQ(worker0->wait(), 0) << worker0->err();
    EXPECT_EQ(worker1->wait(), 0) << worker1->err();
    return worker0->out() + worker1->out();
  }

 private:
  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }
  const stitch::testing::TemporaryFolder folder_;
};

// torchrun starts all workers again, with a higher count of restarts.
TEST_F(AllKilled, WorkersMeetAnewUnderTorchrun) {
  start_and_kill({"TORCHELASTIC_RUN_ID=job", "TORCHELASTIC_RESTART_COUNT=0"});
  EXPECT_EQ(meet_again({"TORCHELASTIC_RUN_ID=job", "TORCHELASTIC_RESTART_COUNT=1"}),
            "worker0 has met the others, epoch 1\nworker1 has met the others, epoch 1\n");
}

// The record of the dead world is still in the store.
TEST_F(AllKilled, ADeadWorldIsFollowedByANewOne) {
  start_and_kill({});
  const auto began = steady_clock::now();
  EXPECT_EQ(meet_again({}),
            "worker0 has met the others, epoch 1\nworker1 has met the others, epoch 1\n");
  EXPECT_LT(steady_clock::now() - began, std::chrono::seconds(30));
}

// Three workers that meet at a file, of which one is killed while the others wait for all to leave.
class AmongLeaving : public ::testing::Test {
 protected:
  std::unique_ptr<RunningCommand> start(const std::string& mode, int rank) const {
    const std::vector<std::string> command{"env",
                                           "STITCH_INIT_METHOD=file://" + store(),
                                           "RANK=" + std::to_string(rank),
                                           "WORLD_SIZE=3",
                                           MEMBER_PROGRAM,
                                           mode};
    return std::make_unique<RunningCommand>(command, std::chrono::seconds(60));
  }
  // What it prints in its second life.
  std::string kill_and_restart(int victim) const {
    const std::string mode = "worker" + std::to_string(victim) + " among leaving";
    std::vector<std::unique_ptr<RunningCommand>> workers;
    for (int rank = 0; rank < 3; ++rank) workers.push_back(start(mode, rank));
    auto& killed = workers[static_cast<std::size_t>(victim)];
    EXPECT_EQ(killed->wait(), 128 + SIGKILL) << killed->err();
    killed = start(mode, victim);
    for (const auto& worker : workers) {
      EXPECT_EQ(worker->wait(), 0) << worker->out() << worker->err();
      EXPECT_FALSE(contains(worker->err(), "stitch:")) << worker->err();
    }
    return killed->out();
  }
  std::string recorded() const {
    RunningCommand look({MEMBER_PROGRAM, "record", store()}, std::chrono::seconds(30));
    EXPECT_EQ(look.wait(), 0) << look.err();
    return look.out();
  }

 private:
  std::string store() const { return (folder_.path() / "store").string(); }
  const stitch::testing::TemporaryFolder folder_;
};

// Worker 0, which keeps the record of the world, is one of those that leave.
TEST_F(AmongLeaving, AKilledWorkerComesBackAndTheRecordGoesWithTheLast) {
  EXPECT_EQ(kill_and_restart(1), "worker1 is back, epoch 2, the others wait for it\n");
  EXPECT_EQ(recorded(), "the record is gone\n");
}

TEST_F(AmongLeaving, TheKeeperOfTheRecordComesBackAndTheRecordGoesWithTheLast) {
  EXPECT_EQ(kill_and_restart(0), "worker0 is back, epoch 2, the others wait for it\n");
  EXPECT_EQ(recorded(), "the record is gone\n");
}

}  // namespace
}  // namespace restart_test
