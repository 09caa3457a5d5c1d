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
  // As a shell reports it: the exit status, or 128 + the signal.
  [[nodiscard]] int code() const { return signalled ? 128 + value : value; }
  // "exited with status 3", "was killed by signal 11 (Segmentation fault)".
  [[nodiscard]] std::string text() const;
};

// A started process: leader of its own process group, standard input empty. It dies when this
// process dies.
struct ChildProcess {
  pid_t pid = -1;
  // Our ends of its output pipes, non-blocking; -1 where it inherits ours.
  int out = -1;
  int err = -1;
};

// Starts `command` with `environment`. Its stdout is a pipe if `pipe_stdout`, else this process's;
// its stderr is always a pipe. Calls `announce` with the process group in the new process before it
// executes the program. Throws std::system_error with the reason when the program cannot be run.
// REQUIRES: a single-threaded process.
[[nodiscard]] ChildProcess start_process(const std::vector<std::string>& command,
                                         const std::vector<std::string>& environment,
                                         bool pipe_stdout,
                                         const std::function<void(pid_t group)>& announce);

}  // namespace stitch_run
