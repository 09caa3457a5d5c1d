#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <span>
#include <unordered_set>
#include <vector>

#include "stitch/base/bytes.h"
#include "stitch/base/reserve.h"
#include "stitch/rref/lifetime/rref_id.h"

namespace stitch::rref {

// One operation of the lifetime protocol, from this worker to a peer.
struct LedgerOp {
  enum class Kind : std::uint8_t {
    reg = 1,     // holder -> owner: the sender holds `id`
    drop = 2,    // holder -> owner: the sender no longer holds `id`
    settle = 3,  // receiver -> sender: drop the pins of tokens [first_token, first_token + tokens)
    sweep = 4,   // owner -> worker: `life` is over; register what you borrowed from it, say clean
    clean = 5,   // worker -> owner: the REGs before this one are all that `life` leaves here
    ask = 6,     // holder -> owner: the sender has pins of your objects towards `life`
    swept = 7,   // owner -> holder: no worker depends on `life` for my objects; drop those pins
    unmade = 8,  // creator -> owner: the request to create `id` was never sent and will not be
    gone = 9,    // owner -> holder: `id` had been deleted when the receiver's REG came
  };
  Kind kind = Kind::settle;
  RRefId id;                      // reg, drop, unmade, gone
  std::uint64_t first_token = 0;  // settle
  std::uint32_t tokens = 0;       // settle, at least 1
  WorkerLife life{};              // sweep, clean, ask, swept

  [[nodiscard]] static LedgerOp make_reg(const RRefId& id) { return {Kind::reg, id, 0, 0}; }
  [[nodiscard]] static LedgerOp make_drop(const RRefId& id) { return {Kind::drop, id, 0, 0}; }
  [[nodiscard]] static LedgerOp make_settle(std::uint64_t token) {
    return {Kind::settle, {}, token, 1};
  }
  [[nodiscard]] static LedgerOp make_sweep(const WorkerLife& over) {
    return {Kind::sweep, {}, 0, 0, over};
  }
  [[nodiscard]] static LedgerOp make_clean(const WorkerLife& over) {
    return {Kind::clean, {}, 0, 0, over};
  }
  [[nodiscard]] static LedgerOp make_ask(const WorkerLife& over) {
    return {Kind::ask, {}, 0, 0, over};
  }
  [[nodiscard]] static LedgerOp make_swept(const WorkerLife& over) {
    return {Kind::swept, {}, 0, 0, over};
  }
  [[nodiscard]] static LedgerOp make_unmade(const RRefId& id) { return {Kind::unmade, id, 0, 0}; }
  [[nodiscard]] static LedgerOp make_gone(const RRefId& id) { return {Kind::gone, id, 0, 0}; }
};

// How soon a ledger frame must leave if no message to the peer can carry it before. none: there is
// nothing to send; whenever: only an acknowledgement that the peer does not wait for; later:
// settlements; soon: something that an object's life or the peer waits for.
enum class Urgency : std::uint8_t { none, whenever, later, soon };

// Both directions of the ledger between this worker and one life of a peer: ordered, numbered
// operations, each applied exactly once and in order although frames may be lost, duplicated and
// reordered, because every operation is kept until the peer's cumulative acknowledgement covers it
// and every arrival is compared with the next number expected (G4). A frame is: u8 flags, u64
// acknowledged, u64 first, u32 count, operations numbered first, first + 1, ... Pure state, no I/O,
// not thread-safe: the owner of the ledger locks.
class Ledger {
 public:
  // A frame carries at most this many operations; the rest follow in the next frame.
  static constexpr std::size_t kMaxOps = 256;
  // At most this many operations that arrived early are kept; others are dropped and resent by the
  // peer.
  static constexpr std::size_t kMaxEarly = 4096;

  // Queues an operation. Unsent settlements of consecutive tokens are merged into one operation.
  void push(const LedgerOp& op);
  // Withdraws an unsent DROP of `id`. True if there was one: the owner still counts this worker as
  // a holder.
  bool withdraw_drop(const RRefId& id);

  // Writes the frame that is due; false, writing nothing, if none is. The operations count as sent:
  // they are written again only after resend().
  bool encode(base::Bytes& out);
  [[nodiscard]] Urgency urgency() const noexcept;

  struct Arrived {
    // To be applied now, in this order, before the next encode() acknowledges them.
    std::vector<LedgerOp> ops;
    std::vector<LedgerOp> acknowledged;  // this worker's operations that the peer has applied
  };
  // Accepts a peer's frame. Throws Error(protocol), having changed nothing, if it is malformed or
  // acknowledges operations that were never sent.
  [[nodiscard]] Arrived accept(std::span<const std::byte> frame);

  // The last `count` operations that accept() returned could not be applied: the peer sends them
  // again, as they are not acknowledged.
  void put_back(std::size_t count) noexcept;

  // The next frames repeat all unacknowledged operations and ask for an acknowledgement.
  void resend();
  // To be called periodically: resends if nothing was acknowledged since the previous tick and the
  // oldest operation had been sent by then. True if that makes a frame due.
  bool tick();

  [[nodiscard]] std::size_t unsent() const noexcept { return unsent_.size(); }
  [[nodiscard]] std::size_t unacknowledged() const noexcept {
    return sent_.size() + unsent_.size();
  }

 private:
  // Sending: operations [first_, first_ + sent_.size()) have left and are unacknowledged; unsent_
  // follow, unnumbered.
  std::uint64_t first_ = 0;
  using Ops = std::deque<LedgerOp, base::ReservedAllocator<LedgerOp>>;
  Ops sent_;
  std::size_t on_wire_ = 0;  // the first of sent_ that are in flight: the next frame follows them
  Ops unsent_;
  std::unordered_set<RRefId, RRefIdHash, std::equal_to<>, base::ReservedAllocator<RRefId>>
      unsent_drops_;
  std::size_t unsent_prompt_ = 0;  // of unsent_, those the peer waits for (all but settlements)
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
