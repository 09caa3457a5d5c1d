#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

namespace stitch_test {

// A command running beside the test, its outputs collected. A command that outlives `limit` is
// killed and reported as such.
class RunningCommand {
 public:
  explicit RunningCommand(const std::vector<std::string>& command,
                          std::chrono::seconds limit = std::chrono::seconds(30));
  ~RunningCommand();
  RunningCommand(const RunningCommand&) = delete;
  RunningCommand& operator=(const RunningCommand&) = delete;

  [[nodiscard]] pid_t pid() const { return pid_; }
  void send_signal(int signal) const;

  // Waits for the end. The exit status, 128 + signal, or -1 when the limit was reached.
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

// True once no process has this number any more (or only a zombie has), false when that does not
// happen within `limit`.
bool gone(pid_t pid, std::chrono::seconds limit = std::chrono::seconds(10));

}  // namespace stitch_test
