#pragma once

#include <sys/types.h>

#include <filesystem>

namespace stitch_run {

// A small process that outlives a stitch-run that was killed by SIGKILL. Workers die with their
// parent by themselves, but not the processes that they started: the guardian kills the workers'
// process groups, and removes the run's folder.
class Guardian {
 public:
  // REQUIRES: a single-threaded process. Throws std::system_error.
  explicit Guardian(const std::filesystem::path& folder);
  // Ends the guardian without any effect.
  ~Guardian();
  Guardian(const Guardian&) = delete;
  Guardian& operator=(const Guardian&) = delete;

  [[nodiscard]] pid_t pid() const { return pid_; }
  // Adds a process group to those that it kills. Also from a fork of this process.
  void watch(pid_t group);

 private:
  void send(pid_t word);

  int socket_ = -1;
  pid_t pid_ = -1;
};

}  // namespace stitch_run
