#include "stitch/base/exiting.h"

#include <sys/socket.h>

#include <atomic>

#include "stitch/base/forked.h"

namespace stitch::base {

namespace {

constinit std::atomic<bool> exiting{false};

struct EndsSockets {
  ~EndsSockets() {
    exiting = true;
    // Descriptors of other kinds refuse. Each process has its own list: a child does not end its
    // parent's connections.
    visit_closed_in_children([](int fd) { ::shutdown(fd, SHUT_RDWR); });
  }
};

// Constructed before the program's static objects, and so destroyed after them: a worker among them
// leaves in order.
[[gnu::init_priority(101)]] EndsSockets ends_sockets;

}  // namespace

bool process_is_exiting() noexcept { return exiting; }

}  // namespace stitch::base
