// STITCH_FAULT in worlds of processes, over each transport.
#include <signal.h>

#include "tests/support/plain_test.h"
#include "tests/support/process_world.h"
#include "tests/support/running_command.h"

namespace fault_process_test {
namespace {

using namespace stitch::testing;

// Worker 0 calls worker 1 until that fails. Returns what worker 0 says then.
std::string call_with(const std::string& fault, const std::string& what,
                      const std::string& transport, const std::string& reconnect = "1s") {
  ProcessWorld world(2, {HANG_PROGRAM, what},
                     {"STITCH_FAULT=" + fault, "STITCH_TRANSPORTS=" + transport,
                      "STITCH_RECONNECT_TIMEOUT=" + reconnect});
  EXPECT_EQ(world[0].wait(), 0) << world[0].err();
  world[1].send_signal(SIGKILL);
  world[1].wait();
  return world[0].out();
}

TEST(FaultsOfProcesses, KillTheCalleeAtAnExactCall) {
  for (const char* transport : {"shm", "tcp", "uv"}) {
    EXPECT_EQ(call_with("kill=worker1@call100", "calls", transport),
              "99 answered, then disconnected\n")
        << transport;
  }
}

TEST(FaultsOfProcesses, KillTheCalleeAtAnExactStep) {
  EXPECT_EQ(call_with("kill=worker1@step10", "steps", "shm"), "9 answered, then disconnected\n");
}

// The contract's example, with a restart: at its own tenth step the second life goes on.
TEST(FaultsOfProcesses, DoNotKillTheWorkerThatIsStartedAgain) {
  RunningCommand command({"env", "STITCH_FAULT=kill=worker1@step10", STITCH_RUN, "-n", "2",
                          "--restarts", "1", HANG_PROGRAM, "steps over a restart"},
                         std::chrono::seconds(60));
  EXPECT_EQ(command.wait(), 0) << command.err();
  EXPECT_EQ(command.out(), "[worker0] 30 steps over a restart\n");
  EXPECT_TRUE(contains(command.err(),
                       "stitch-run: worker1 was killed by signal 9 (Killed); restarted (1 "
                       "of 1)\n"))
      << command.err();
  EXPECT_TRUE(
      contains(command.err(),
               "stitch: faults do not kill or stop worker \"worker1\" (id 1): it has epoch 2"))
      << command.err();
}

// What a seed does is the same each time: see the end of the same call. Only where a broken
// connection is not replaced does it fail.
TEST(FaultsOfProcesses, CutConnectionsReproducibly) {
  for (const char* transport : {"shm", "tcp"}) {
    const std::string first = call_with("seed=7,drop=0.01", "calls", transport, "0");
    EXPECT_TRUE(contains(first, " answered, then disconnected\n")) << first;
    EXPECT_EQ(call_with("seed=7,drop=0.01", "calls", transport, "0"), first) << transport;
    EXPECT_EQ(call_with("seed=7,drop=0.01", "calls", transport, "20s"), "all answered\n")
        << transport;
  }
}

}  // namespace
}  // namespace fault_process_test
