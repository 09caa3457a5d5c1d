#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "stitch/base/bytes.h"
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
    gone = 9,    // owner -> holder, in answer to its REG: there is no object `id`
    registered = 10,  // owner -> holder, in answer to its REG: the receiver is a holder of `id`
  };
  Kind kind = Kind::settle;
  RRefId id;                      // reg, drop, unmade, gone, registered
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
  [[nodiscard]] static LedgerOp make_registered(const RRefId& id) {
    return {Kind::registered, id, 0, 0};
  }
};

// What this worker has to say to one life of a peer, in the order in which it was decided. The
// session delivers each frame once and in order, so nothing is numbered, repeated or kept once it
// has been written (G4). A frame is: u32 count, operations. Pure state, no I/O, not thread-safe:
// the owner of the ledger locks.
class Ledger {
 public:
  // A frame carries at most this many operations, less than the least max_frame_bytes; the rest
  // follow in the next frame.
  static constexpr std::size_t kMaxOps = 100;

  // Queues an operation. Settlements of consecutive tokens are merged into one operation.
  void push(const LedgerOp& op);
  [[nodiscard]] bool empty() const noexcept { return unsent_.empty(); }
  [[nodiscard]] std::size_t unsent() const noexcept { return unsent_.size(); }
  // Writes the next frame; false, writing nothing, if there is nothing to say. REQUIRES: frames are
  // sent in the order in which they are written.
  bool encode(base::Bytes& out);
  // The operations of a peer's frame. Throws Error(protocol) if it is malformed.
  [[nodiscard]] static std::vector<LedgerOp> decode(std::span<const std::byte> frame);

 private:
  std::deque<LedgerOp> unsent_;
};

}  // namespace stitch::rref
