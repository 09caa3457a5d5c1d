#include "line_output.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>

namespace stitch_run {
namespace {

// Both outputs are usually one terminal, so the state of the cursor is shared by both.
bool g_update_on_terminal = false;

constexpr std::string_view kEraseLine = "\033[K";

}  // namespace

LineSink::LineSink(int fd) : fd_(fd), terminal_(::isatty(fd) == 1) {}

void LineSink::write_line(std::string_view prefix, std::string_view line) {
  std::string bytes;
  bytes.reserve(prefix.size() + line.size() + 8);
  if (terminal_ && g_update_on_terminal) {
    bytes += kEraseLine;
    g_update_on_terminal = false;
  }
  bytes += prefix;
  bytes += line;
  bytes += '\n';
  write(bytes);
}

void LineSink::write_update(std::string_view prefix, std::string_view line) {
  if (!terminal_) {
    write_line(prefix, line);
    return;
  }
  std::string bytes;
  if (g_update_on_terminal) bytes += kEraseLine;
  bytes += prefix;
  bytes += line;
  bytes += '\r';
  g_update_on_terminal = true;
  write(bytes);
}

void LineSink::write(const std::string& bytes) {
  std::string_view rest = bytes;
  while (!rest.empty()) {
    const ssize_t written = ::write(fd_, rest.data(), rest.size());
    if (written >= 0) {
      rest.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno == EAGAIN) {
      pollfd ready{fd_, POLLOUT, 0};
      ::poll(&ready, 1, -1);
    } else if (errno != EINTR) {
      return;  // there is no other place for an error
    }
  }
}

LineSplitter::LineSplitter(LineSink& sink, std::string prefix)
    : sink_(sink), prefix_(std::move(prefix)) {}

void LineSplitter::feed(std::string_view bytes) {
  for (char c : bytes) {
    if (c == '\n') {
      carriage_return_ = false;
      finish_line();
      continue;
    }
    if (carriage_return_) {
      carriage_return_ = false;
      finish_update();
    }
    if (c == '\r') {
      carriage_return_ = true;
      continue;
    }
    line_ += c;
    if (line_.size() >= kMaxLine) finish_line();
  }
}

void LineSplitter::finish() {
  carriage_return_ = false;
  if (!line_.empty()) finish_line();
}

void LineSplitter::finish_line() {
  sink_.write_line(prefix_, line_);
  line_.clear();
}

void LineSplitter::finish_update() {
  // Nothing precedes the carriage return of a program that starts its updates with one.
  if (!line_.empty()) sink_.write_update(prefix_, line_);
  line_.clear();
}

}  // namespace stitch_run
