#include "side.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <stdexcept>
#include <system_error>

namespace stitch_bench {

namespace {

void write_all(int descriptor, const std::string& text) {
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t written = ::write(descriptor, text.data() + done, text.size() - done);
    if (written > 0) {
      done += static_cast<std::size_t>(written);
    } else if (errno != EINTR) {
      throw std::system_error(errno, std::generic_category(),
                              "cannot write to another process of the benchmark");
    }
  }
}

}  // namespace

void Side::send_line(const std::string& line) const { write_all(kLink, line + '\n'); }

std::string Side::receive_line() const {
  std::string line;
  for (char letter = 0;;) {
    const ssize_t got = ::read(kLink, &letter, 1);
    if (got < 0 && errno == EINTR) continue;
    if (got != 1) throw std::runtime_error("the other process of the benchmark has ended");
    if (letter == '\n') return line;
    line += letter;
  }
}

void Side::meet() const {
  send_line("here");
  static_cast<void>(receive_line());
}

void Side::result(const std::string& key, double value, const std::string& unit,
                  const std::string& floor) const {
  char number[64];
  std::snprintf(number, sizeof(number), "%.9g", value);
  write_all(kResults, prefix_ + key + ' ' + number + ' ' + unit + ' ' +
                          (floor.empty() ? "-" : prefix_ + floor) + '\n');
}

}  // namespace stitch_bench
