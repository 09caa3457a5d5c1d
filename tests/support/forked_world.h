#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "stitch/rpc/options/options.h"
#include "tests/support/temporary_folder.h"

namespace stitch::testing {

// A world of processes that are forked from this one, which must have no threads: much quicker than
// starting a program for each. They meet at a store in a file. Thread contract: one thread.
class ForkedWorld {
 public:
  using Clock = std::chrono::steady_clock;
  // Runs in each process; `options` have rank, world_size and init_method. What it returns is the
  // exit status; an exception that leaves it leaves main().
  using Body = std::function<int(Options options)>;

  struct Outcome {
    std::optional<int> status;  // of exit(); nothing: killed by a signal
    int signal = 0;
    std::string said;  // on stderr
  };

  // A process that runs for longer than `limit` is killed by SIGALRM.
  ForkedWorld(int size, const Body& body, std::chrono::seconds limit = std::chrono::seconds(60));
  // Kills what still runs.
  ~ForkedWorld();
  ForkedWorld(const ForkedWorld&) = delete;
  ForkedWorld& operator=(const ForkedWorld&) = delete;

  // Starts one more process under a rank: the process that had it before is over.
  void start(int rank);
  void signal(int rank, int number) const;
  // Waits for the end of a process.
  Outcome wait(int rank);
  // Where the processes may leave files for the test.
  [[nodiscard]] const std::filesystem::path& folder() const { return folder_.path(); }

 private:
  struct Process {
    pid_t pid = 0;
    int generation = 0;
  };
  [[nodiscard]] std::filesystem::path stderr_of(int rank) const;
  [[noreturn]] void run(int rank) const;

  TemporaryFolder folder_;
  const Body body_;
  const std::chrono::seconds limit_;
  std::vector<Process> processes_;
};

}  // namespace stitch::testing
