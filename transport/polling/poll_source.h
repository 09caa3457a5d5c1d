#pragma once

#include <cstdint>

namespace stitch::transport {

// Something that bytes are read from and written to: a connection or a listener. Shared by its
// owner and its poller. Thread contract: one call at a time, on the thread that polls; no lock of
// the poller is held but its role. Its methods throw nothing.
class PollSource {
 public:
  virtual ~PollSource() = default;
  // Moves what can be moved without waiting, and delivers it. True when something moved.
  virtual bool poll() = 0;
  // The kernel reports its descriptor as ready (epoll's events). True when something moved.
  virtual bool ready(std::uint32_t events) = 0;
  // Whether poll() makes no system call, so that it is called in every round.
  [[nodiscard]] virtual bool cheap() const noexcept { return false; }
  // Whether poll() never does anything, as with a listener: only ready() is called.
  [[nodiscard]] virtual bool passive() const noexcept { return false; }
  // Of a source that is not cheap: whether poll() has something to write, so that it is called even
  // if nothing has come lately.
  [[nodiscard]] virtual bool pending() const noexcept { return false; }
  // Likewise: whether it waits for room to write, so that the kernel is asked instead of calling
  // poll().
  [[nodiscard]] virtual bool blocked() const noexcept { return false; }
  // Whether it is in the middle of more than some small messages, which each poll() moves a part
  // of. On the thread that polls.
  [[nodiscard]] virtual bool moving() const noexcept { return false; }
  // It is not polled again until its descriptor is ready or poll_soon() is called: from now on the
  // other side must send a wake-up. False when something has come meanwhile and must be polled
  // first.
  virtual bool sleep() { return true; }
  // It is polled again: the other side need not send wake-ups.
  virtual void wake() {}
};

}  // namespace stitch::transport
