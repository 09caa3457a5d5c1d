#include "stitch/base/kernel_clock.h"

#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <string_view>

namespace stitch::base {

namespace {

// Kernels without time namespaces have no such file, and one clock.
bool is_in_first_time_namespace() noexcept {
  constexpr std::string_view kFirst = "time:[4026531834]";  // the kernel's PROC_TIME_INIT_INO
  char text[64];
  const ssize_t bytes = readlink("/proc/self/ns/time", text, sizeof(text));
  if (bytes >= 0) return std::string_view(text, static_cast<std::size_t>(bytes)) == kFirst;
  return errno == ENOENT && access("/proc/self/ns", F_OK) == 0;  // not for want of /proc
}

}  // namespace

bool has_kernel_clock() noexcept {
  static const bool has = is_in_first_time_namespace();
  return has;
}

}  // namespace stitch::base
