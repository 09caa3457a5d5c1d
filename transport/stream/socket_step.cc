#include "stitch/transport/stream/socket_step.h"

#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <utility>

#include "stitch/base/errno_text.h"

namespace stitch::transport {

namespace {
// Connections accepted in one go; then other sources have their turn, and the kernel reports the
// rest again.
constexpr int kAcceptBatch = 16;

// Once for the process, whose limit it is.
void say_exhausted(int error) {
  static std::atomic<bool> said{false};
  if (said.exchange(true)) return;
  std::fprintf(stderr, "stitch: connections wait to be accepted: %s\n",
               base::errno_text(error).c_str());
}
}  // namespace

SocketStep::SocketStep(Poller& poller, base::Descriptor socket, Action action, Failed failed)
    : poller_(poller),
      id_(poller.new_id()),
      socket_(std::move(socket)),
      action_(std::move(action)),
      failed_(std::move(failed)) {}

std::shared_ptr<SocketStep> SocketStep::start(Poller& poller, base::Descriptor socket,
                                              bool until_writable, Action action, Failed failed) {
  auto step =
      std::make_shared<SocketStep>(poller, std::move(socket), std::move(action), std::move(failed));
  poller.add(step->id_, step->socket_.get(), step);
  if (until_writable) poller.watch_room(step->id_, true);
  return step;
}

void SocketStep::expire() {
  expired_.store(true);
  poller_.remove(id_);
}

bool SocketStep::ready(std::uint32_t) {
  const auto self = shared_from_this();
  poller_.remove(id_);
  try {
    if (action_(socket_)) return true;
    poller_.add(id_, socket_.get(), self);
  } catch (...) {
    failed_(to_error(std::current_exception()));
  }
  if (expired_.load()) poller_.remove(id_);
  return true;
}

SocketListener::SocketListener(base::Descriptor socket, DescriptorReserve& reserve,
                               Accepted accepted, std::function<void()> exhausted)
    : socket_(std::move(socket)),
      reserve_(reserve),
      accepted_(std::move(accepted)),
      exhausted_(std::move(exhausted)) {}

bool SocketListener::ready(std::uint32_t) {
  for (int i = 0; i < kAcceptBatch; ++i) {
    base::Descriptor socket = reserve_.take_for_others([this] {
      return base::Descriptor(
          ::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    });
    if (!socket) {
      const int error = errno;
      if (error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM) {
        exhausted_();
        say_exhausted(error);
      }
      break;
    }
    accepted_(std::move(socket));
  }
  return false;
}

}  // namespace stitch::transport
