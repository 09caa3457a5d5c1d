#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

namespace stitch_run {

// How a process ended.
struct ExitStatus {
  bool signalled = false;
  int value = 0;  // exit status or signal number

  [[nodiscard]] bool success() const { return !signalled && value == 0; }
  // As a shell counts it.
  [[nodiscard]] int code() const { return signalled ? 128 + value : value; }
  // "exited with status 3", "was killed by signal 11 (Segmentation fault)".
  [[nodiscard]] std::string text() const;
};

// A started process: leader of its own process group, standard input empty. It dies when this
// process dies.
struct ChildProcess {
  pid_t pid = -1;
  // Our ends of its outputs, non-blocking; -1 where it was given ours.
  int out = -1;
  int err = -1;
};

// Starts `command` with `environment`. Its stdout is a pipe if `pipe_stdout`, else this process's;
// its stderr is always a pipe. Calls `announce` in the new process, with its group, before that
// becomes the program: nothing the program does comes earlier. Throws std::system_error with the
// reason when the program cannot be run. REQUIRES: a single-threaded process.
[[nodiscard]] ChildProcess start_process(const std::vector<std::string>& command,
                                         const std::vector<std::string>& environment,
                                         bool pipe_stdout,
                                         const std::function<void(pid_t group)>& announce);

}  // namespace stitch_run
