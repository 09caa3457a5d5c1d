// A worker process that dies in the middle of a backward pass.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tests/tools/running_command.h"

namespace {

using stitch_test::RunningCommand;

TEST(AutogradProcesses, AKilledWorkerFailsThePassAndItsContextAndNothingElse) {
  for (const char* transport : {"shm", "tcp"}) {
    const std::string file = std::filesystem::temp_directory_path() /
                             ("stitch-autograd-death-" + std::to_string(getpid()));
    std::vector<std::unique_ptr<RunningCommand>> workers;
    for (int rank = 0; rank < 3; ++rank) {
      workers.push_back(std::make_unique<RunningCommand>(
          std::vector<std::string>{"env", "RANK=" + std::to_string(rank), "WORLD_SIZE=3",
                                   "STITCH_INIT_METHOD=file://" + file,
                                   std::string("STITCH_TRANSPORTS=") + transport, WORLD_PROGRAM},
          std::chrono::seconds(60)));
    }
    EXPECT_EQ(workers[0]->wait(), 0) << workers[0]->err();
    EXPECT_EQ(workers[1]->wait(), 0) << workers[1]->err();
    EXPECT_EQ(workers[2]->wait(), 128 + 9);
    EXPECT_EQ(workers[0]->out(),
              "backward: disconnected, worker2\ngradients: disconnected\nthen: 6\nleft: 0\n");
    std::filesystem::remove(file);
  }
}

}  // namespace
