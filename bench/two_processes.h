#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace stitch_bench {

// Starts this program's own further processes and sees to it that none of them outlives it: they
// die with this process, with each other when one fails, at the time limit, and on SIGINT, SIGTERM
// and SIGHUP. Owned by main(); REQUIRES: a single-threaded process. While it lives those signals
// are blocked.
class TwoProcesses {
 public:
  using OnLine = std::function<void(const std::string&)>;

  TwoProcesses();
  ~TwoProcesses();
  TwoProcesses(const TwoProcesses&) = delete;
  TwoProcesses& operator=(const TwoProcesses&) = delete;

  // Runs one process (one or two) with each of these arguments, and waits for all. `on_line` gets
  // each line that they write to Side::kResults. Returns what went wrong, in words; empty when all
  // exited with 0.
  [[nodiscard]] std::string run(const std::vector<std::vector<std::string>>& arguments,
                                std::chrono::seconds limit, const OnLine& on_line);

  // The signal that asked this program to end; 0 for none.
  [[nodiscard]] int interrupted() const { return interrupted_; }

 private:
  int signals_ = -1;
  int interrupted_ = 0;
};

}  // namespace stitch_bench
