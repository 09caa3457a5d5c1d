#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>

#include "stitch/base/mutex.h"
#include "stitch/rpc/message/peer_limits.h"

namespace stitch::rpc {

// The return of room that one-way requests take in a budget, as they have no answer: the sender
// asks for room (ASK_ROOM), and the receiver replies with the number of requests that it has
// handled (GIVE_ROOM). Both count from the beginning of the peer's life. One half of this class
// counts requests to the peer, the other half requests from the peer. Part of PeerFlow. Thread
// contract: any thread.
class OneWayCredits {
 public:
  struct Handled {
    std::uint64_t calls = 0;
    std::uint64_t bytes = 0;
  };

  explicit OneWayCredits(const PeerLimits& limits) : limits_(limits) {}

  // ---- requests to the peer
  // A request is under way. Returns the number for ASK_ROOM (see asked()), 0 for no ASK_ROOM.
  [[nodiscard]] std::uint64_t begun(std::size_t bytes) STITCH_EXCLUDES(mutex_);
  // The same for a thread that waits for room.
  [[nodiscard]] std::uint64_t to_ask() STITCH_EXCLUDES(mutex_);
  // A request has not been sent. False: the peer has given its room back all the same.
  [[nodiscard]] bool failed(std::size_t bytes) noexcept STITCH_EXCLUDES(mutex_);
  // GIVE_ROOM has come. Returns the requests and bytes that are new to this side, never more than
  // this side has sent.
  [[nodiscard]] Handled given_back(const Handled& handled) noexcept STITCH_EXCLUDES(mutex_);

  // ---- requests of the peer
  // A request has been handled. Returns the GIVE_ROOM to send, where the peer has asked for it.
  [[nodiscard]] std::optional<Handled> handled(std::size_t bytes) noexcept STITCH_EXCLUDES(mutex_);
  // ASK_ROOM has come: the peer asks for reports until `calls` requests have been handled. Returns
  // the GIVE_ROOM to send now.
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
