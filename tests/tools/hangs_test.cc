// Worlds of processes that hang on purpose: stitch-run --diagnose names the worker and the function
// that hold them up.
#include <signal.h>

#include "tests/support/plain_test.h"
#include "tests/support/process_world.h"
#include "tests/support/running_command.h"

namespace hangs_test {
namespace {

using namespace std::chrono_literals;
using stitch::testing::ProcessWorld;
using stitch::testing::RunningCommand;
using stitch::testing::TemporaryFolder;

class Hang {
 public:
  Hang(int size, const std::string& how, const std::string& program = HANG_PROGRAM)
      : world_(size, {program, how}, variables(how)), size_(size) {}
  ~Hang() {
    for (int rank = 0; rank < size_; ++rank) {
      world_[rank].send_signal(SIGKILL);
      world_[rank].wait();
    }
  }
  Hang(const Hang&) = delete;
  Hang& operator=(const Hang&) = delete;

  [[nodiscard]] std::filesystem::path dumps() const { return folder_.path() / "dumps"; }
  // The files of dumps whose names contain `part`.
  [[nodiscard]] int count(const std::string& part) const {
    int found = 0;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(dumps(), error))
      found += entry.path().extension() == ".json" &&
                       entry.path().filename().string().find(part) != std::string::npos
                   ? 1
                   : 0;
    return found;
  }
  // A signal before the worker has its handler would kill it.
  [[nodiscard]] bool started() const {
    return stitch::testing::eventually([&] {
      for (int rank = 0; rank < size_; ++rank) {
        if (!std::filesystem::exists(dumps() / ("worker" + std::to_string(rank) + ".started")))
          return false;
      }
      return true;
    });
  }
  void ask_for_dumps(int first = 0) {
    for (int rank = first; rank < size_; ++rank) world_[rank].send_signal(SIGUSR1);
  }
  std::string diagnose() const {
    RunningCommand command({STITCH_RUN, "--diagnose", dumps()});
    command.wait();
    return command.out() + command.err();
  }
  // Asks for dumps and a diagnosis until that says all of `wanted`, or for long enough.
  std::string diagnose_until(const std::vector<std::string>& wanted) {
    if (!started()) return "the world did not start";
    std::this_thread::sleep_for(500ms);
    std::string text;
    for (int i = 0; i < 20; ++i) {
      ask_for_dumps();
      std::this_thread::sleep_for(500ms);
      text = diagnose();
      bool all = true;
      for (const auto& each : wanted) all = all && text.find(each) != std::string::npos;
      if (all) return "";
    }
    return text;
  }

 private:
  [[nodiscard]] std::vector<std::string> variables(const std::string& how) const {
    std::vector<std::string> all{"STITCH_DUMP_DIR=" + dumps().string(), "STITCH_NUM_THREADS=2",
                                 "STITCH_RPC_TIMEOUT=0"};
    // A stopped process would be declared dead, and then nothing hangs.
    if (how == "stopped process") all.emplace_back("STITCH_HEARTBEAT_TIMEOUT=1h");
    return all;
  }

  TemporaryFolder folder_;
  ProcessWorld world_;
  const int size_;
};

// `verdict` is in the first line: the pieces are looked for in the whole text, and the first line
// begins with the first of them.
void expect_diagnosis(int size, const std::string& how, const std::string& culprit,
                      std::vector<std::string> pieces, const std::string& program = HANG_PROGRAM) {
  Hang hang(size, how, program);
  pieces.push_back("\nculprit: " + culprit + "\n");
  EXPECT_EQ(hang.diagnose_until(pieces), "") << "no " << ::testing::PrintToString(pieces);
  EXPECT_TRUE(hang.diagnose().starts_with(pieces.front()));
}

TEST(Hangs, ACircleOfTwoWorkersIsNamedAsOne) {
  expect_diagnosis(
      2, "circle of two", R"(worker "worker0", locker())",
      {R"(circular wait: worker "worker0" waits for worker "worker1": call )"
       "calls_back_and_locks() since ",
       R"("worker1" runs calls_back_and_locks() since )",
       R"(which waits for worker "worker0": call locker() since )", "waits for a lock"});
}

TEST(Hangs, ACircleOfThreeWorkersIsNamedAsOne) {
  expect_diagnosis(3, "circle of three", R"(worker "worker0", locker())",
                   {R"(circular wait: worker "worker0" waits for worker "worker1": call )"
                    "goes_on_to_worker2() since ",
                    R"(waits for worker "worker2": call goes_on_to_worker0() since )",
                    R"(waits for worker "worker0": call locker() since )"});
}

TEST(Hangs, AHandlerThatSleepsIsNamed) {
  expect_diagnosis(2, "sleeping handler", R"(worker "worker1", sleepy())",
                   {R"(worker "worker0" waits for worker "worker1": call sleepy() since )",
                    R"("worker1" runs sleepy() since )", "in which its thread sleeps"});
}

TEST(Hangs, WhatHoldsAllThreadsOfAPoolIsNamed) {
  expect_diagnosis(2, "pool", R"(worker "worker1", hold())",
                   {R"(worker "worker0" waits for worker "worker1": call quick() since )",
                    R"(quick() is queued there: all 2 threads of "worker1" are held by hold())"});
}

TEST(Hangs, AStoppedProcessIsNamedThoughItHasWrittenNoDump) {
  expect_diagnosis(3, "stopped process", R"(worker "worker1")",
                   {R"(worker "worker0" waits for worker "worker1": call quick() since )",
                    R"(worker "worker1" has written no dump: it is stopped, dead, )"});
}

TEST(Hangs, TheWorkerThatMissesABarrierIsNamed) {
  expect_diagnosis(
      3, "barrier", R"(worker "worker2", barrier())",
      {R"(worker "worker)", R"( waits for worker "worker2" in a barrier or an all_gather since )",
       "where it has not arrived"});
}

TEST(Hangs, AFunctionWhosePromiseIsNeverSetIsNamed) {
  expect_diagnosis(2, "promise", R"(worker "worker1", never())",
                   {R"(worker "worker0" waits for worker "worker1": call never() since )",
                    "a promise that is not set"});
}

TEST(Hangs, AHandlerThatABackwardPassWaitsForIsNamed) {
  expect_diagnosis(2, "backward", R"(worker "worker1", hold())",
                   {R"(worker "worker0" waits for worker "worker1": backward of context )",
                    R"(all 2 threads of "worker1" are held by hold())"},
                   HANG_UPPER_PROGRAM);
}

TEST(Hangs, ACreationThatAReferenceWaitsForIsNamed) {
  expect_diagnosis(
      2, "creation", R"(worker "worker1", make())",
      {R"(worker "worker0" waits for worker "worker1": call )",
       "the object is still being created by make()", R"("worker1" runs make() since )"},
      HANG_UPPER_PROGRAM);
}

TEST(Hangs, AHandlerThatWaitsForALockIsNamed) {
  expect_diagnosis(2, "lock", R"(worker "worker1", locker())",
                   {R"(worker "worker0" waits for worker "worker1": call locker() since )",
                    "in which its thread waits for a lock or a condition"});
}

TEST(Hangs, TheCallThatAShutdownWaitsForIsNamed) {
  expect_diagnosis(2, "shutdown", R"(worker "worker1", hold())",
                   {R"(worker "worker)", "in its shutdown since ", R"("worker1" runs hold())"});
}

// With the dumps for which the others were asked.
std::string diagnosis_of_timeout(Hang& hang, const std::string& reason) {
  EXPECT_TRUE(hang.started());
  EXPECT_TRUE(stitch::testing::eventually([&] { return hang.count(reason) == 1; }));
  hang.ask_for_dumps(1);
  EXPECT_TRUE(stitch::testing::eventually([&] { return hang.count("signal_SIGUSR1") == 1; }));
  return hang.diagnose();
}

TEST(Dumps, ATimeoutWritesThatOfTheCaller) {
  Hang hang(2, "timeout");
  const std::string text = diagnosis_of_timeout(hang, "call_timed_out");
  EXPECT_TRUE(
      text.starts_with(R"(worker "worker0" waits for worker "worker1": call sleepy() since )"))
      << text;
  EXPECT_NE(text.find("\nculprit: worker \"worker1\", sleepy()\n"), std::string::npos) << text;
}

TEST(Dumps, ABackwardPassThatTimesOutWritesThatOfItsRoot) {
  Hang hang(2, "backward that times out", HANG_UPPER_PROGRAM);
  const std::string text = diagnosis_of_timeout(hang, "backward_timed_out");
  EXPECT_TRUE(
      text.starts_with(R"(worker "worker0" waits for worker "worker1": backward of context )"))
      << text;
  EXPECT_NE(text.find("\nculprit: worker \"worker1\", hold()\n"), std::string::npos) << text;
}

TEST(Dumps, AShutdownThatTimesOutWritesThatOfItsWorker) {
  Hang hang(2, "shutdown that times out");
  const std::string text = diagnosis_of_timeout(hang, "shutdown_timed_out");
  EXPECT_NE(text.find(R"(worker "worker0" waits for worker "worker1" in its shutdown since )"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find(R"(: for shutdown to be called; "worker1" runs hold() since )"),
            std::string::npos)
      << text;
}

}  // namespace
}  // namespace hangs_test
