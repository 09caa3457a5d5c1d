// A worker process that dies in the middle of a backward pass.
#include <gtest/gtest.h>

#include <string>

#include "tests/support/process_world.h"

namespace {

using stitch::testing::ProcessWorld;

TEST(AutogradProcesses, AKilledWorkerFailsThePassAndItsContextAndNothingElse) {
  for (const char* transport : {"shm", "tcp"}) {
    ProcessWorld world(3, {WORLD_PROGRAM}, {std::string("STITCH_TRANSPORTS=") + transport});
    EXPECT_EQ(world[0].wait(), 0) << world[0].err();
    EXPECT_EQ(world[1].wait(), 0) << world[1].err();
    EXPECT_EQ(world[2].wait(), 128 + 9);
    EXPECT_EQ(world[0].out(),
              "backward: disconnected, worker2\ngradients: disconnected\nthen: 6\nleft: 0\n");
  }
}

}  // namespace
