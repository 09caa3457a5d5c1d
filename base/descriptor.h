#pragma once

#include <cstdint>

#include "stitch/base/forked.h"

namespace stitch::base {

// Owns a file descriptor and closes it. It belongs to the process that made it: in a forked child
// it is closed, and a Descriptor that the child has inherited is empty. Not thread-safe.
class Descriptor {
 public:
  Descriptor() noexcept = default;
  explicit Descriptor(int fd) noexcept : fd_(fd), fork_(fork_count()) { close_in_children(fd_); }
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();
  [[nodiscard]] int get() const noexcept { return fork_ == fork_count() ? fd_ : -1; }
  [[nodiscard]] explicit operator bool() const noexcept { return get() >= 0; }
  int release() noexcept;

 private:
  void close() noexcept;

  int fd_ = -1;
  std::uint32_t fork_ = 0;
};

}  // namespace stitch::base
