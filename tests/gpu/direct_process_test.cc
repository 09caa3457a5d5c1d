// Worlds of real processes whose tensors go from device to device, each over a double of its own,
// so through pinned memory: calls, and a process that is killed in the middle of a transfer.
#include "tests/support/plain_test.h"
#include "tests/support/process_world.h"
#include "tests/support/running_command.h"

namespace direct_process_test {
namespace {

using stitch::testing::ProcessWorld;

ProcessWorld world(int size, std::vector<std::string> command) {
  command.insert(command.begin(), DIRECT_PROGRAM);
  return ProcessWorld(size, command, {}, std::chrono::seconds(120));
}

TEST(DirectProcesses, CallEachOther) {
  ProcessWorld two = world(2, {"calls"});
  EXPECT_EQ(two[0].wait(), 0) << two[0].out() << two[0].err();
  EXPECT_EQ(two[1].wait(), 0) << two[1].out() << two[1].err();
  EXPECT_NE(two[0].out().find("12 calls"), std::string::npos);
}

TEST(DirectProcesses, GoOnWhenOneIsKilledInTheMiddleOfATransfer) {
  int failed = 0;
  for (const int microseconds : {0, 5'000, 20'000, 50'000}) {
    ProcessWorld three = world(3, {"death", std::to_string(microseconds)});
    EXPECT_EQ(three[0].wait(), 0) << three[0].out() << three[0].err();
    EXPECT_NE(three[0].out().find("worker2 goes on"), std::string::npos) << three[0].out();
    failed += three[0].out().find("calls failed") != std::string::npos ? 1 : 0;
  }
  EXPECT_GT(failed, 0);
}

}  // namespace
}  // namespace direct_process_test
