#pragma once

#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace stitch_run {

// The options of the command line.
struct RunOptions {
  int processes = 0;
  // An elastic world: with how many workers it starts, how many there may be.
  struct Range {
    int min = 1;
    int max = 1;
  };
  std::optional<Range> elastic;
  // How many times each worker that fails is started again.
  int restarts = 0;
  // Worker i is named <name><i>.
  std::string name = "worker";
  // Stops everything after this time.
  std::optional<std::chrono::milliseconds> timeout;
  // From the request to stop to SIGKILL.
  std::chrono::milliseconds grace{5000};
  bool prefix = true;
  bool help = false;
  bool version = false;
  // The program and its arguments.
  std::vector<std::string> command;
};

// An invalid command line; the text is for the user.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// `arguments` without the program's own name. Throws UsageError.
[[nodiscard]] RunOptions parse_options(const std::vector<std::string>& arguments);

[[nodiscard]] std::string help_text();

}  // namespace stitch_run
