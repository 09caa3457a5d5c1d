#pragma once

#include <string>
#include <string_view>

namespace stitch_run {

// One of stitch-run's own outputs (stdout or stderr), on which many processes print. Writes are
// whole lines. Not thread-safe.
class LineSink {
 public:
  explicit LineSink(int fd);

  // A finished line.
  void write_line(std::string_view prefix, std::string_view line);
  // A line that the next one replaces (it ended in a carriage return). On a terminal it is
  // overwritten by the next output; elsewhere it is an ordinary line.
  void write_update(std::string_view prefix, std::string_view line);

 private:
  void write(const std::string& bytes);

  const int fd_;
  const bool terminal_;
};

// Cuts one stream of one process into lines and prints them with the process's prefix. Not
// thread-safe.
class LineSplitter {
 public:
  // `sink` outlives this.
  LineSplitter(LineSink& sink, std::string prefix);

  void feed(std::string_view bytes);
  // The stream has ended: an unterminated line is printed, too.
  void finish();

  // Longer lines are printed in pieces.
  static constexpr std::size_t kMaxLine = std::size_t{1} << 20;

 private:
  void finish_line();
  void finish_update();

  LineSink& sink_;
  const std::string prefix_;
  std::string line_;
  // A carriage return was seen; a newline may follow and make both one line end.
  bool carriage_return_ = false;
};

}  // namespace stitch_run
