// The death of a process that owns objects and holds references to others.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tests/tools/running_command.h"

namespace {

using stitch_test::RunningCommand;

TEST(OwnerDeath, FailsItsReferencesByNameAndEpochAndHarmsNoObjectOfOthers) {
  for (const char* transport : {"shm", "tcp"}) {
    const std::string file =
        std::filesystem::temp_directory_path() / ("stitch-owner-death-" + std::to_string(getpid()));
    std::vector<std::unique_ptr<RunningCommand>> workers;
    for (int rank = 0; rank < 3; ++rank) {
      workers.push_back(std::make_unique<RunningCommand>(
          std::vector<std::string>{"env", "RANK=" + std::to_string(rank), "WORLD_SIZE=3",
                                   "STITCH_INIT_METHOD=file://" + file,
                                   std::string("STITCH_TRANSPORTS=") + transport,
                                   OWNER_DEATH_PROGRAM},
          std::chrono::seconds(90)));
    }
    EXPECT_EQ(workers[0]->wait(), 0) << workers[0]->err();
    EXPECT_EQ(workers[1]->wait(), 128 + 9);
    EXPECT_EQ(workers[2]->wait(), 0) << workers[2]->err();
    std::filesystem::remove(file);

    const std::string out = workers[0]->out();
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
