#include "stitch/base/descriptor.h"

#include <unistd.h>

#include <utility>

namespace stitch::base {

Descriptor::Descriptor(Descriptor&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), fork_(other.fork_) {}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = std::exchange(other.fd_, -1);
    fork_ = other.fork_;
  }
  return *this;
}

Descriptor::~Descriptor() { close(); }

void Descriptor::close() noexcept {
  const int fd = release();
  if (fd >= 0) ::close(fd);
}

int Descriptor::release() noexcept {
  const int fd = get();
  fd_ = -1;
  keep_in_children(fd);
  return fd;
}

}  // namespace stitch::base
