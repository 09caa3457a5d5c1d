// Workers that torchrun of python3-torch starts: they meet at the store of its agent.
#include "tests/support/plain_test.h"
#include "tests/support/running_command.h"
#include "tests/transport/plain_socket.h"

namespace torchrun_test {
namespace {

using stitch::testing::contains;
using stitch::testing::RunningCommand;

constexpr const char* kPython = "/usr/bin/python3";  // of Debian, which has its torch

class Torchrun : public ::testing::Test {
 protected:
  void SetUp() override {
    RunningCommand has_torch({kPython, "-c", "import torch.distributed.run"});
    if (has_torch.wait() != 0) GTEST_SKIP() << "python3-torch is not installed";
  }
  // Both workers run `script`, with the program as $0; worker 1 fails in their first life.
  static void expect_restarted(const std::string& script,
                               const std::vector<std::string>& variables) {
    std::vector<std::string> command{"env"};
    command.insert(command.end(), variables.begin(), variables.end());
    stitch::transport::Socket free;
    const std::string port = std::to_string(free.bind());
    free.close();
    std::istringstream torchrun(
        std::string(kPython) +
        " -m torch.distributed.run -r 1 -t 1 --nproc_per_node 2 --nnodes 1 --max_restarts 2 "
        "--monitor_interval 0.1 --no_python --master_port " +
        port + " sh -c");
    command.insert(command.end(), std::istream_iterator<std::string>(torchrun), {});
    command.insert(command.end(), {script, MEMBER_PROGRAM});
    RunningCommand run(command, std::chrono::seconds(100));
    EXPECT_EQ(run.wait(), 0) << run.out() << run.err();
    for (const char* rank : {"0", "1"}) {
      const std::string text =
          "worker" + std::string(rank) + " has met the others, epoch 1 after restart 1";
      EXPECT_TRUE(contains(run.out(), text)) << run.out() << run.err();
    }
    EXPECT_TRUE(contains(run.out(), "store of the agent: True")) << run.out();
  }
};

constexpr const char* kMeet =
    "echo store of the agent: $TORCHELASTIC_USE_AGENT_STORE; "
    "echo $($0 meet none) after restart $TORCHELASTIC_RESTART_COUNT; ";

// All keys of the world are still in the store.
TEST_F(Torchrun, AWorkerThatFailsInItsWorldIsRestartedWithTheOthers) {
  expect_restarted(std::string(kMeet) + "[ $TORCHELASTIC_RESTART_COUNT$RANK != 01 ]",
                   {"STITCH_SECRET=the secret of this test"});
}

// Worker 0 waits for it.
TEST_F(Torchrun, AWorkerThatFailsBeforeItsWorldIsRestartedWithTheOthers) {
  expect_restarted(
      "[ $TORCHELASTIC_RESTART_COUNT$RANK = 01 ] && sleep 1 && exit 1; " + std::string(kMeet),
      {"STITCH_TRANSPORTS=shm"});
}

}  // namespace
}  // namespace torchrun_test
