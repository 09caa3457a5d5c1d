// Worlds of real processes whose tensors go from device to device, each over a double of the same
// machine: communicators and pinned memory between two of them, and a process that is killed in the
// middle of a transfer.
#include "tests/support/plain_test.h"
#include "tests/support/process_world.h"
#include "tests/support/running_command.h"

namespace direct_process_test {
namespace {

using stitch::testing::ProcessWorld;
using stitch::testing::TemporaryFolder;

class DirectProcesses : public ::testing::TestWithParam<const char*> {
 protected:
  ProcessWorld world(int size, std::vector<std::string> command) {
    command.insert(command.begin(), DIRECT_PROGRAM);
    return ProcessWorld(size, command, {"GPU_DOUBLE_MEETING=" + meeting_.path().string()},
                        std::chrono::seconds(120));
  }

 private:
  TemporaryFolder meeting_;
};

TEST_P(DirectProcesses, CallEachOther) {
  ProcessWorld two = world(2, {"calls", GetParam()});
  EXPECT_EQ(two[0].wait(), 0) << two[0].out() << two[0].err();
  EXPECT_EQ(two[1].wait(), 0) << two[1].out() << two[1].err();
  EXPECT_NE(two[0].out().find(std::string("calls by ") + GetParam()), std::string::npos);
}

TEST_P(DirectProcesses, GetRoundedWhatAMapHasTravelAsANarrowerType) {
  ProcessWorld two = world(2, {"casts", GetParam()});
  EXPECT_EQ(two[0].wait(), 0) << two[0].out() << two[0].err();
  EXPECT_EQ(two[1].wait(), 0) << two[1].out() << two[1].err();
  EXPECT_NE(two[0].out().find(std::string("casts by ") + GetParam()), std::string::npos);
}

TEST_P(DirectProcesses, GoOnWhenOneIsKilledInTheMiddleOfATransfer) {
  int failed = 0;
  for (const int microseconds : {0, 5'000, 20'000, 50'000}) {
    ProcessWorld three = world(3, {"death", GetParam(), std::to_string(microseconds)});
    EXPECT_EQ(three[0].wait(), 0) << three[0].out() << three[0].err();
    EXPECT_NE(three[0].out().find("worker2 goes on"), std::string::npos) << three[0].out();
    failed += three[0].out().find("calls failed") != std::string::npos ? 1 : 0;
  }
  EXPECT_GT(failed, 0);
}

INSTANTIATE_TEST_SUITE_P(By, DirectProcesses, ::testing::Values("staging", "nccl"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace direct_process_test
