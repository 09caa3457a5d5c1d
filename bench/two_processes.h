#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace stitch_bench {

// Starts the further processes of this program. None of them outlives it: they are killed when this
// process ends, when one of them fails, at the timeout, and on SIGINT, SIGTERM and SIGHUP. Owned by
// main(); REQUIRES: a single-threaded process. While it exists those signals are blocked.
class TwoProcesses {
 public:
  using OnLine = std::function<void(const std::string&)>;

  TwoProcesses();
  ~TwoProcesses();
  TwoProcesses(const TwoProcesses&) = delete;
  TwoProcesses& operator=(const TwoProcesses&) = delete;

  // Runs a process (one or two) with each of these arguments, and waits for all; meanwhile
  // `competitors` further ones compute. `on_line` gets
  // each line that they write to Side::kResults. Returns the text of an error; empty when all
  // exited with 0.
  [[nodiscard]] std::string run(const std::vector<std::vector<std::string>>& arguments,
                                int competitors, std::chrono::seconds limit, const OnLine& on_line);

  // The signal that this program was stopped by; 0 for none.
  [[nodiscard]] int interrupted() const { return interrupted_; }

 private:
  int signals_ = -1;
  int interrupted_ = 0;
};

}  // namespace stitch_bench
