#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "run_options.h"

namespace stitch_run {

// A private folder for the rendezvous file of the run, removed at the end. Unlike a port, which
// another process may take between the search for a free one and listen(), it cannot be lost.
class RendezvousFolder {
 public:
  // Throws std::system_error.
  RendezvousFolder();
  ~RendezvousFolder();
  RendezvousFolder(const RendezvousFolder&) = delete;
  RendezvousFolder& operator=(const RendezvousFolder&) = delete;

  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }
  [[nodiscard]] std::string init_method() const;

 private:
  std::filesystem::path folder_;
};

// The environment of worker `rank`: this process's with the variables of the run, as "NAME=value".
[[nodiscard]] std::vector<std::string> worker_environment(const RunOptions& options, int rank,
                                                          int port,
                                                          const RendezvousFolder& rendezvous);

}  // namespace stitch_run
