#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

namespace stitch::testing {

// A command that runs concurrently with the test, its outputs collected. It is killed when it runs
// for longer than `limit`. Thread contract: one thread.
class RunningCommand {
 public:
  explicit RunningCommand(const std::vector<std::string>& command,
                          std::chrono::seconds limit = std::chrono::seconds(30));
  ~RunningCommand();
  RunningCommand(const RunningCommand&) = delete;
  RunningCommand& operator=(const RunningCommand&) = delete;

  [[nodiscard]] pid_t pid() const { return pid_; }
  void send_signal(int signal) const;

  // Waits for the end. The exit status, 128 + the signal that killed it, or -1 past the limit.
  int wait();
  // What it printed; REQUIRES: wait() has returned.
  [[nodiscard]] const std::string& out() const { return out_; }
  [[nodiscard]] const std::string& err() const { return err_; }

 private:
  pid_t pid_ = -1;
  std::chrono::steady_clock::time_point deadline_;
  bool waited_ = false;
  int status_ = -1;
  std::string out_;
  std::string err_;
  std::thread out_reader_;
  std::thread err_reader_;
};

struct CommandResult {
  int status;
  std::string out;
  std::string err;
};
// Runs a command to its end.
[[nodiscard]] CommandResult run_command(const std::vector<std::string>& command,
                                        std::chrono::seconds limit = std::chrono::seconds(30));

// Waits until no process has this id, or only a zombie. False when that takes longer than `limit`.
[[nodiscard]] bool gone(pid_t pid, std::chrono::seconds limit = std::chrono::seconds(10));

}  // namespace stitch::testing
