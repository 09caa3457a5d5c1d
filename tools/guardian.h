#pragma once

#include <sys/types.h>

#include <filesystem>

namespace stitch_run {

// A small process that outlives stitch-run when stitch-run is killed outright. Workers die with
// their parent by themselves; what they started does not, so the guardian then kills their process
// groups, and removes the run's folder.
class Guardian {
 public:
  // REQUIRES: a single-threaded process. Throws std::system_error.
  explicit Guardian(const std::filesystem::path& folder);
  // Dismisses the guardian: it ends without doing anything.
  ~Guardian();
  Guardian(const Guardian&) = delete;
  Guardian& operator=(const Guardian&) = delete;

  [[nodiscard]] pid_t pid() const { return pid_; }
  // Puts a process group under its protection. Also from a fork of this process.
  void watch(pid_t group);

 private:
  void tell(pid_t word);

  int socket_ = -1;
  pid_t pid_ = -1;
};

}  // namespace stitch_run
