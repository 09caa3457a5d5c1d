// Worlds of processes that hang on purpose: stitch-run --diagnose names the worker and the function
// that hold them up.
#include <signal.h>

#include "tests/support/plain_test.h"
#include "tests/support/process_world.h"
#include "tests/support/running_command.h"

namespace hangs_test {
namespace {

using namespace stitch::testing;

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
    return eventually([&] {
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

struct Case {
  const char* how;
  int size;
  const char* culprit;
  std::vector<std::string> pieces;  // the text begins with the first of them
  const char* program = HANG_PROGRAM;
};
class Hangs : public ::testing::TestWithParam<Case> {};

TEST_P(Hangs, AreExplainedByWhatHoldsThemUp) {
  const Case& hung = GetParam();
  Hang hang(hung.size, hung.how, hung.program);
  auto pieces = hung.pieces;
  pieces.push_back(std::string("\nculprit: ") + hung.culprit + "\n");
  EXPECT_EQ(hang.diagnose_until(pieces), "") << "no " << ::testing::PrintToString(pieces);
  EXPECT_TRUE(hang.diagnose().starts_with(pieces.front()));
}

INSTANTIATE_TEST_SUITE_P(
    Each, Hangs,
    ::testing::ValuesIn(std::vector<Case>{
        {"circle of two",
         2,
         R"(worker "worker0", locker())",
         {R"(circular wait: worker "worker0" waits for worker "worker1": call )"
          "calls_back_and_locks() since ",
          R"("worker1" runs calls_back_and_locks() since )",
          R"(which waits for worker "worker0": call locker() since )", "waits for a lock"}},
        {"sleeping handler",
         2,
         R"(worker "worker1", sleepy())",
         {R"(worker "worker0" waits for worker "worker1": call sleepy() since )",
          R"("worker1" runs sleepy() since )", "in which its thread sleeps"}},
        {"pool",
         2,
         R"(worker "worker1", hold())",
         {R"(worker "worker0" waits for worker "worker1": call quick() since )",
          R"(quick() is queued there: all 2 threads of "worker1" are held by hold())"}},
        {"stopped process",
         3,
         R"(worker "worker1")",
         {R"(worker "worker0" waits for worker "worker1": call quick() since )",
          R"(worker "worker1" has written no dump: it is stopped, dead, )"}},
        {"barrier",
         3,
         R"(worker "worker2", barrier())",
         {R"(worker "worker)",
          R"( waits for worker "worker2" in a barrier or an all_gather since )",
          "where it has not arrived"}},
        {"promise",
         2,
         R"(worker "worker1", never())",
         {R"(worker "worker0" waits for worker "worker1": call never() since )",
          "a promise that is not set"}},
        {"backward",
         2,
         R"(worker "worker1", hold())",
         {R"(worker "worker0" waits for worker "worker1": backward of context )",
          R"(all 2 threads of "worker1" are held by hold())"},
         HANG_UPPER_PROGRAM},
        {"creation",
         2,
         R"(worker "worker1", make())",
         {R"(worker "worker0" waits for worker "worker1": call )",
          "the object is still being created by make()", R"("worker1" runs make() since )"},
         HANG_UPPER_PROGRAM},
        {"lock",
         2,
         R"(worker "worker1", locker())",
         {R"(worker "worker0" waits for worker "worker1": call locker() since )",
          "in which its thread waits for a lock or a condition"}},
        {"shutdown",
         2,
         R"(worker "worker1", hold())",
         {R"(worker "worker)", "in its shutdown since ", R"("worker1" runs hold())"}},
    }),
    [](const auto& info) {
      std::string name = info.param.how;
      std::replace(name.begin(), name.end(), ' ', '_');
      return name;
    });

// With the dumps for which the others were asked.
std::string diagnosis_of_timeout(Hang& hang, const std::string& reason) {
  EXPECT_TRUE(hang.started());
  EXPECT_TRUE(eventually([&] { return hang.count(reason) == 1; }));
  hang.ask_for_dumps(1);
  EXPECT_TRUE(eventually([&] { return hang.count("signal_SIGUSR1") == 1; }));
  return hang.diagnose();
}

TEST(Dumps, ATimeoutWritesThatOfTheCaller) {
  Hang hang(2, "timeout");
  const std::string text = diagnosis_of_timeout(hang, "call_timed_out");
  EXPECT_TRUE(
      text.starts_with(R"(worker "worker0" waits for worker "worker1": call sleepy() since )"))
      << text;
  EXPECT_TRUE(contains(text, "\nculprit: worker \"worker1\", sleepy()\n")) << text;
}

TEST(Dumps, ABackwardPassThatTimesOutWritesThatOfItsRoot) {
  Hang hang(2, "backward that times out", HANG_UPPER_PROGRAM);
  const std::string text = diagnosis_of_timeout(hang, "backward_timed_out");
  EXPECT_TRUE(
      text.starts_with(R"(worker "worker0" waits for worker "worker1": backward of context )"))
      << text;
  EXPECT_TRUE(contains(text, "\nculprit: worker \"worker1\", hold()\n")) << text;
}

TEST(Dumps, AShutdownThatTimesOutWritesThatOfItsWorker) {
  Hang hang(2, "shutdown that times out");
  const std::string text = diagnosis_of_timeout(hang, "shutdown_timed_out");
  EXPECT_TRUE(
      contains(text, R"(worker "worker0" waits for worker "worker1" in its shutdown since )"))
      << text;
  EXPECT_TRUE(contains(text, R"(: for shutdown to be called; "worker1" runs hold() since )"))
      << text;
}

}  // namespace
}  // namespace hangs_test
