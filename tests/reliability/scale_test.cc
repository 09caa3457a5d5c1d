// Worlds of many processes on one host: they start, meet, lose eleven workers, and leave.
#include "tests/support/plain_test.h"
#include "tests/support/running_command.h"

namespace scale_test {
namespace {

using namespace std::chrono_literals;
using stitch::testing::RunningCommand;

void expect_whole(const std::vector<std::string>& arguments, std::chrono::seconds limit) {
  std::vector<std::string> command{SCALE_PROGRAM};
  command.insert(command.end(), arguments.begin(), arguments.end());
  RunningCommand world(command, limit);
  EXPECT_EQ(world.wait(), 0) << world.out() << world.err();
  std::printf("%s", world.out().c_str());
}

TEST(Scale, Of64ProcessesMeetsAndLosesEleven) { expect_whole({"64"}, 120s); }

TEST(LargeScale, Of256ProcessesMeetsAndLosesEleven) { expect_whole({"256"}, 300s); }

TEST(LargeScale, Of128ProcessesDoesSoWhileTheHostIsBusy) { expect_whole({"128", "busy"}, 300s); }

}  // namespace
}  // namespace scale_test
