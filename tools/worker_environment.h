#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "run_options.h"

namespace stitch_run {

// A private folder for the rendezvous file of the run and its secret, removed at the end. Unlike a
// port, which another process may take between the search for a free one and listen(), it cannot be
// lost.
class RendezvousFolder {
 public:
  // Throws std::system_error.
  RendezvousFolder();
  ~RendezvousFolder();
  RendezvousFolder(const RendezvousFolder&) = delete;
  RendezvousFolder& operator=(const RendezvousFolder&) = delete;

  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }
  [[nodiscard]] std::string init_method() const;
  // A file with a random secret, for workers that are given none: whatever they listen on, no other
  // process gets in.
  [[nodiscard]] std::string secret_file() const;
  // What this run is called, at random.
  [[nodiscard]] const std::string& job() const { return job_; }

 private:
  std::filesystem::path folder_;
  std::string job_;
};

// The environment of worker `rank`: this process's with the variables of the run, as "NAME=value".
[[nodiscard]] std::vector<std::string> worker_environment(const RunOptions& options, int rank,
                                                          int port,
                                                          const RendezvousFolder& rendezvous);

}  // namespace stitch_run
