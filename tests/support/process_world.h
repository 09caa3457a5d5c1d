#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/running_command.h"
#include "tests/support/temporary_folder.h"

namespace stitch::testing {

// A world of worker processes that all run one command and meet at a store in a file. They are
// given RANK, WORLD_SIZE and STITCH_INIT_METHOD. Thread contract: one thread.
class ProcessWorld {
 public:
  // `variables`: more of the environment, as "NAME=value". A worker that runs for longer than
  // `limit` is killed.
  ProcessWorld(int size, const std::vector<std::string>& command,
               const std::vector<std::string>& variables = {},
               std::chrono::seconds limit = std::chrono::seconds(60));

  [[nodiscard]] RunningCommand& operator[](int rank) {
    return *workers_.at(static_cast<std::size_t>(rank));
  }

 private:
  TemporaryFolder folder_;
  std::vector<std::unique_ptr<RunningCommand>> workers_;
};

}  // namespace stitch::testing
