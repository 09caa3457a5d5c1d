#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "run_options.h"

namespace stitch_run {

// A private folder for the length of the run, removed at the end; the workers meet in a file in it.
// Unlike a port, which somebody else may take between being found free and being listened on, it
// cannot be lost.
class MeetingPlace {
 public:
  // Throws std::system_error.
  MeetingPlace();
  ~MeetingPlace();
  MeetingPlace(const MeetingPlace&) = delete;
  MeetingPlace& operator=(const MeetingPlace&) = delete;

  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }
  [[nodiscard]] std::string init_method() const;

 private:
  std::filesystem::path folder_;
};

// A TCP port of 127.0.0.1 that was free a moment ago.
[[nodiscard]] int find_free_port();

// This process's environment as worker `rank` shall see it, as "NAME=value".
[[nodiscard]] std::vector<std::string> worker_environment(const RunOptions& options, int rank,
                                                          int port, const MeetingPlace& place);

}  // namespace stitch_run
