// STITCH_FAULT in worlds of processes, over each transport.
#include <gtest/gtest.h>
#include <signal.h>

#include <string>
#include <vector>

#include "tests/support/process_world.h"

namespace {

using stitch::testing::ProcessWorld;

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

// What a seed does is the same each time: see the end of the same call. Only where a broken
// connection is not replaced does it fail.
TEST(FaultsOfProcesses, CutConnectionsReproducibly) {
  for (const char* transport : {"shm", "tcp"}) {
    const std::string first = call_with("seed=7,drop=0.01", "calls", transport, "0");
    EXPECT_NE(first.find(" answered, then disconnected\n"), std::string::npos) << first;
    EXPECT_EQ(call_with("seed=7,drop=0.01", "calls", transport, "0"), first) << transport;
    EXPECT_EQ(call_with("seed=7,drop=0.01", "calls", transport), "all answered\n") << transport;
  }
}

TEST(FaultsOfProcesses, OfAnotherWorkerDoNothing) {
  EXPECT_EQ(call_with("kill=worker1@call50,kill=worker0@call1", "calls", "shm"),
            "49 answered, then disconnected\n");
}

}  // namespace
