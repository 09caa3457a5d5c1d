#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <optional>
#include <span>

#include "stitch/base/descriptor.h"
#include "stitch/base/error.h"

namespace stitch::transport {

// An ordered, reliable, two-way stream of bytes to one peer that never blocks: what a
// StreamConnection is laid over. Owned by its connection. Thread contract: read(), sleep() and
// wake() by the thread that polls; write() and await_room() by one thread at a time, which may be
// another one; close() from any thread. No callbacks.
class Link {
 public:
  virtual ~Link() = default;

  // Watched for input, for the end of the stream, and by TCP for room.
  [[nodiscard]] virtual int descriptor() const noexcept = 0;
  // Whether read() can be tried without a system call.
  [[nodiscard]] virtual bool cheap() const noexcept = 0;
  // Whether many small writes should be gathered because each costs a system call.
  [[nodiscard]] bool gathers() const noexcept { return !cheap(); }

  // Fills the parts in order with what has arrived. Returns the number of bytes: 0 when there is
  // nothing now, or at the end of the stream.
  virtual std::size_t read(std::span<const iovec> parts) = 0;
  // Takes bytes from the parts in order, as many as there is room for; 0 when there is none, or
  // when the stream has ended.
  virtual std::size_t write(std::span<const iovec> parts) = 0;
  // How many bytes of a large transfer may be written now: few when small messages are expected,
  // which would wait behind them.
  [[nodiscard]] virtual std::size_t bulk_room(bool few) = 0;
  // Asks to be polled when there is room again. False when there is room already.
  virtual bool await_room() = 0;
  // Why the stream has ended; nothing while it has not. After a read() that returned 0.
  [[nodiscard]] virtual std::optional<Error> ended() = 0;
  // Whether others than the two processes and their user may read or change its bytes, so that it
  // must be sealed when there is a secret.
  [[nodiscard]] virtual bool exposed() const noexcept { return true; }
  // As Connection::within_host().
  [[nodiscard]] virtual bool within_host() const noexcept { return false; }
  // Whether write() has taken bytes that are not sent yet. flush_output() sends them, as far as
  // there is room: true when all are sent. Threads as write().
  [[nodiscard]] virtual bool holds_output() const noexcept { return false; }
  virtual bool flush_output() { return true; }
  // Whether read() has something although the kernel may have nothing. Threads as read().
  [[nodiscard]] virtual bool holds_input() { return false; }
  // Whether read() and ended() have nothing to say at this moment. Threads as read().
  [[nodiscard]] virtual bool quiet() { return false; }
  // As Connection::trim(). Threads as write().
  virtual void trim() noexcept {}
  // The descriptor has something for the link itself.
  virtual void on_descriptor() {}

  // As PollSource's.
  virtual bool sleep() { return true; }
  virtual void wake() {}
  // Reading is suspended, or resumed: sleep() ignores what arrives meanwhile. For links that are
  // cheap; the descriptors of the others are not watched then.
  virtual void suspend_reading(bool suspended) {}
  // Ends the stream both ways; what was written can still be read by the peer.
  virtual void close() noexcept = 0;
};

}  // namespace stitch::transport
