// The death of a process that owns objects and holds references to others.
#include "tests/support/plain_test.h"
#include "tests/support/process_world.h"

namespace owner_death_test {
namespace {

using stitch::testing::ProcessWorld;

TEST(OwnerDeath, FailsItsReferencesByNameAndEpochAndHarmsNoObjectOfOthers) {
  for (const char* transport : {"shm", "tcp"}) {
    ProcessWorld world(3, {OWNER_DEATH_PROGRAM}, {std::string("STITCH_TRANSPORTS=") + transport},
                       std::chrono::seconds(90));
    EXPECT_EQ(world[0].wait(), 0) << world[0].err();
    EXPECT_EQ(world[1].wait(), 128 + 9);
    EXPECT_EQ(world[2].wait(), 0) << world[2].err();

    const std::string out = world[0].out();
    const std::string before = "owner epoch ";
    const auto at = out.find(before);
    ASSERT_NE(at, std::string::npos) << out;
    const std::string epoch =
        out.substr(at + before.size(), out.find('\n', at) - at - before.size());
    const std::string gone = "worker \"worker1\" epoch " + epoch + " is gone";
    for (const std::string& line :
         {std::string("its creation: disconnected, worker \"worker1\": "),
          std::string("its method: disconnected, worker \"worker1\": "),
          std::string("passed on: disconnected, worker \"worker1\": "),
          "Tally::add() to worker \"worker1\" (id 1) was not made: " + gone,
          std::string("noticed within 2 s"), std::string("other object 5"),
          std::string("own object 1")}) {
      EXPECT_NE(out.find(line), std::string::npos) << line << "\nis not in\n" << out;
    }
  }
}

}  // namespace
}  // namespace owner_death_test
