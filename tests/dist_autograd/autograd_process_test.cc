// Backward passes over worker processes: what state of libtorch that belongs to a process does.
#include "tests/support/plain_test.h"
#include "tests/support/process_world.h"

namespace autograd_process_test {
namespace {

using namespace stitch::testing;

TEST(AutogradProcesses, APassHasTheAnomalyModeOfItsRootAndStacksWhereItWasOnInForward) {
  ProcessWorld world(3, {AUTOGRAD_WORLD_PROGRAM});
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(world[rank].wait(), 0) << world[rank].err();
  // The root's mode alone decides what fails, and changes no other process.
  EXPECT_EQ(world[0].out(),
            "worker1: no error, mode off\nworker2: no error, mode on\n"
            "worker1: NaN of worker1, mode off\nworker2: NaN of worker2, mode on\n");
  for (int rank : {1, 2}) {
    const bool on = rank == 2;
    const std::string err = world[rank].err();
    EXPECT_TRUE(contains(err, "Error detected in SqrtBackward0")) << err;
    EXPECT_EQ(contains(err, "frame #"), on) << err;
    EXPECT_EQ(contains(err, "anomaly mode is off in this process"), !on) << err;
  }
  EXPECT_FALSE(contains(world[0].err(), "Error detected")) << world[0].err();
}

}  // namespace
}  // namespace autograd_process_test
