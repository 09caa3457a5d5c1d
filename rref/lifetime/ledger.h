#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <unordered_set>
#include <vector>

#include "stitch/base/bytes.h"
#include "stitch/rref/lifetime/rref_id.h"

namespace stitch::rref {

// One word of the lifetime protocol from this worker to a peer.
struct LedgerOp {
  enum class Kind : std::uint8_t {
    reg = 1,   // holder -> owner: I hold `id`
    drop = 2,  // holder -> owner: I hold `id` no longer
    settle =
        3,  // receiver -> sender: the pins of tokens first_token .. first_token + tokens - 1 may go
  };
  Kind kind = Kind::settle;
  RRefId id;                      // reg, drop
  std::uint64_t first_token = 0;  // settle
  std::uint32_t tokens = 0;       // settle, at least 1

  [[nodiscard]] static LedgerOp make_reg(const RRefId& id) { return {Kind::reg, id, 0, 0}; }
  [[nodiscard]] static LedgerOp make_drop(const RRefId& id) { return {Kind::drop, id, 0, 0}; }
  [[nodiscard]] static LedgerOp make_settle(std::uint64_t token) {
    return {Kind::settle, {}, token, 1};
  }
};

// How soon a ledger's frame has to leave when no other message to the peer gives it a ride: nothing
// to say; only an acknowledgement that nobody waits for; settlements; something that an object's
// life or a peer waits for.
enum class Urgency : std::uint8_t { none, whenever, later, soon };

// Both directions of the ledger between this worker and one life of a peer: ordered, numbered
// operations, each taken in exactly once and in order whatever the network does to frames (loss,
// repetition, reordering), because every operation is kept until the peer's cumulative
// acknowledgement covers it and every arrival is compared with the next number expected (G4). A
// frame is: u8 flags, u64 acknowledged, u64 first, u32 count, operations numbered first, first + 1,
// ... Pure state, no I/O, not thread-safe: whoever owns it locks.
class Ledger {
 public:
  // A frame carries at most this many operations; the rest waits for the next.
  static constexpr std::size_t kMaxOps = 256;
  // Operations that arrived ahead of their turn are kept up to this many; more are dropped and come
  // again.
  static constexpr std::size_t kMaxEarly = 4096;

  // Queues an operation. Settlements of consecutive tokens share one operation while they wait.
  void push(const LedgerOp& op);
  // Takes back a queued DROP of `id` that has not left. True when there was one: the owner still
  // counts us as a holder.
  bool withdraw_drop(const RRefId& id);

  // Writes what has to be said now; false, writing nothing, when that is nothing at all.
  // Marks the operations as sent: they come again only by resend().
  bool encode(base::Bytes& out);
  [[nodiscard]] Urgency urgency() const noexcept;

  struct Arrived {
    std::vector<LedgerOp>
        ops;  // to be applied now, in this order, before the next encode() acknowledges them
    std::vector<LedgerOp> acknowledged;  // ours that the peer has applied
  };
  // Takes in a peer's frame. Throws Error(protocol), having changed nothing, when it is malformed
  // or acknowledges what was never sent.
  [[nodiscard]] Arrived accept(std::span<const std::byte> frame);

  // The next frames say again what is not acknowledged, and ask for an acknowledgement: after a
  // reconnect, or when tick() finds that nothing has moved.
  void resend();
  // To be called at regular times: resends when the oldest operation sent was there at the previous
  // tick already. True when that makes a frame due.
  bool tick();

  [[nodiscard]] std::size_t unsent() const noexcept { return unsent_.size(); }
  [[nodiscard]] std::size_t unacknowledged() const noexcept {
    return sent_.size() + unsent_.size();
  }

 private:
  // Sending: operations [first_, first_ + sent_.size()) have left and are unacknowledged; unsent_
  // follow, unnumbered.
  std::uint64_t first_ = 0;
  std::deque<LedgerOp> sent_;
  std::size_t on_wire_ =
      0;  // of sent_, how many are on their way: the next frame starts behind them
  std::deque<LedgerOp> unsent_;
  std::unordered_set<RRefId, RRefIdHash> unsent_drops_;
  std::size_t unsent_prompt_ =
      0;  // of unsent_, how many the peer is waiting for (all but settlements)
  std::uint64_t first_at_tick_ = 0;
  bool waiting_at_tick_ = false;
  bool ask_acknowledgement_ = false;

  // Receiving.
  std::uint64_t expected_ = 0;
  std::uint64_t acknowledged_to_peer_ = 0;
  Urgency acknowledge_ = Urgency::none;
  std::map<std::uint64_t, LedgerOp> early_;
};

}  // namespace stitch::rref
