// Workers that end before any other has called them, as processes: all others notice.
#include <signal.h>

#include "tests/support/plain_test.h"
#include "tests/support/running_command.h"

namespace unconnected_test {
namespace {

using std::chrono::seconds;
using namespace stitch::testing;

// An elastic world of three founders, w0 to w2. They make no call.
class Unconnected : public ::testing::TestWithParam<const char*> {
 protected:
  // `end`: "kill" or "stop", which it does to itself as soon as it is a member, or "no".
  std::unique_ptr<RunningCommand> start(int rank, int count, const std::string& end) const {
    return std::make_unique<RunningCommand>(
        std::vector<std::string>{"env", "STITCH_INIT_METHOD=file://" + path("store"),
                                 "STITCH_HEARTBEAT_TIMEOUT=1500ms", MEMBER_PROGRAM, "watch",
                                 folder_.path().string(), std::to_string(rank),
                                 std::to_string(count), end},
        seconds(90));
  }
  [[nodiscard]] bool told(const std::string& what) const {
    return std::filesystem::exists(path(what));
  }
  // All of `names` tell this.
  [[nodiscard]] bool tell(const std::vector<std::string>& names, const std::string& what) const {
    return eventually(
        [&] {
          return std::ranges::all_of(names, [&](const auto& name) { return told(name + what); });
        },
        seconds(15));
  }
  static void end(const std::vector<std::unique_ptr<RunningCommand>>& workers) {
    for (const auto& worker : workers) {
      worker->send_signal(SIGKILL);
      EXPECT_EQ(worker->wait(), 128 + SIGKILL) << worker->err();
      EXPECT_EQ(worker->err(), "");
    }
  }

 private:
  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }
  const TemporaryFolder folder_;
};

// heartbeat_timeout is 1.5 s: so long others wait for a first connection, so long it may take, and
// so long a probe.
TEST_P(Unconnected, AWorkerThatHasJustJoinedIsMissed) {
  std::vector<std::unique_ptr<RunningCommand>> workers;
  for (int rank = 0; rank < 3; ++rank) workers.push_back(start(rank, 3, "no"));
  ASSERT_TRUE(eventually([&] { return told("w0") && told("w1") && told("w2"); }));
  workers.push_back(start(3, 3, GetParam()));
  EXPECT_TRUE(tell({"w0", "w1", "w2"}, "-w3-dead"));
  end(workers);
}

INSTANTIATE_TEST_SUITE_P(Ends, Unconnected, ::testing::Values("kill", "stop"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace unconnected_test
