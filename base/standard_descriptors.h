#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace stitch::base {

// Opens /dev/null for those of the descriptors 0 to 2 that are closed: a socket would get their
// numbers else, and what is printed would go there. Any thread.
inline void open_standard_descriptors() noexcept {
  for (const int standard : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(standard, F_GETFD) >= 0 || errno != EBADF) continue;
    // Those below it are open, so it gets this number.
    static_cast<void>(::open("/dev/null", O_RDWR));
  }
}

}  // namespace stitch::base
