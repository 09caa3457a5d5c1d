#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>

#include "stitch/base/mutex.h"
#include "stitch/rpc/message/peer_limits.h"

namespace stitch::rpc {

// How one-way requests, which have no answer, give back their room: the sender asks for it
// (ASK_ROOM), the receiver says how many it has handled (GIVE_ROOM). Both count since the beginning
// of the peer's life. One half here is of the requests to the peer, the other of those from it.
// Thread contract: any thread.
class OneWayCredits {
 public:
  struct Handled {
    std::uint64_t calls = 0;
    std::uint64_t bytes = 0;
  };

  explicit OneWayCredits(const PeerLimits& limits) : limits_(limits) {}

  // ---- requests to the peer
  // One is under way. Returns the number to ask for (see asked()), 0: nothing is to be asked.
  [[nodiscard]] std::uint64_t begun(std::size_t bytes) STITCH_EXCLUDES(mutex_);
  // The same for a thread that waits for room.
  [[nodiscard]] std::uint64_t to_ask() STITCH_EXCLUDES(mutex_);
  // A request has not been sent. False: the peer has given its room back all the same.
  [[nodiscard]] bool failed(std::size_t bytes) noexcept STITCH_EXCLUDES(mutex_);
  // The peer has handled so many. Returns how many of these are new to this side, never more than
  // were sent.
  [[nodiscard]] Handled given_back(const Handled& handled) noexcept STITCH_EXCLUDES(mutex_);

  // ---- requests of the peer
  // One has been handled; what to tell the peer, if it wants to know by now.
  [[nodiscard]] std::optional<Handled> handled(std::size_t bytes) noexcept STITCH_EXCLUDES(mutex_);
  // The peer wants to know until `calls` have been handled; what to tell it now.
  [[nodiscard]] Handled asked(std::uint64_t calls) noexcept STITCH_EXCLUDES(mutex_);

 private:
  static constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();
  [[nodiscard]] Handled report() noexcept STITCH_REQUIRES(mutex_);

  const PeerLimits limits_;
  std::atomic<std::uint64_t> handled_calls_{0};
  std::atomic<std::uint64_t> handled_bytes_{0};
  std::atomic<std::uint64_t> tell_at_{kNever};  // handled_calls_

  base::Mutex mutex_;
  Handled sent_ STITCH_GUARDED_BY(mutex_);
  Handled returned_ STITCH_GUARDED_BY(mutex_);             // of these
  std::uint64_t asked_for_ STITCH_GUARDED_BY(mutex_) = 0;  // 0: nothing
  std::uint64_t told_until_ STITCH_GUARDED_BY(mutex_) = 0;
};

}  // namespace stitch::rpc
