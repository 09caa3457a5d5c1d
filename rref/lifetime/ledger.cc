#include "stitch/rref/lifetime/ledger.h"

#include <algorithm>
#include <limits>
#include <new>
#include <string>

#include "stitch/base/byte_io.h"

namespace stitch::rref {
namespace {

// Flag: the sender resends and waits for an acknowledgement.
constexpr std::uint8_t kAcknowledgeSoon = 1;
constexpr std::size_t kSmallestOpBytes = 13;  // kind, and 12 of a settlement or a life

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::protocol, "reference ledger " + what);
}

void write(base::ByteWriter& out, const LedgerOp& op) {
  out.write(op.kind);
  switch (op.kind) {
    case LedgerOp::Kind::settle:
      out.write(op.first_token);
      out.write(op.tokens);
      return;
    case LedgerOp::Kind::reg:
    case LedgerOp::Kind::drop:
    case LedgerOp::Kind::unmade:
    case LedgerOp::Kind::gone:
      rref::write(out, op.id);
      return;
    case LedgerOp::Kind::sweep:
    case LedgerOp::Kind::clean:
    case LedgerOp::Kind::ask:
    case LedgerOp::Kind::swept:
      out.write(op.life.id);
      out.write(op.life.epoch);
      return;
  }
}

LedgerOp read_op(base::ByteReader& in) {
  LedgerOp op;
  op.kind = in.read<LedgerOp::Kind>();
  switch (op.kind) {
    case LedgerOp::Kind::reg:
    case LedgerOp::Kind::drop:
    case LedgerOp::Kind::unmade:
    case LedgerOp::Kind::gone:
      op.id = read_rref_id(in);
      return op;
    case LedgerOp::Kind::sweep:
    case LedgerOp::Kind::clean:
    case LedgerOp::Kind::ask:
    case LedgerOp::Kind::swept:
      op.life.id = in.read<std::uint32_t>();
      op.life.epoch = in.read<std::uint64_t>();
      return op;
    case LedgerOp::Kind::settle:
      op.first_token = in.read<std::uint64_t>();
      op.tokens = in.read<std::uint32_t>();
      if (op.tokens == 0) refuse("settles no token");
      if (op.first_token > std::numeric_limits<std::uint64_t>::max() - op.tokens)
        refuse("settles tokens beyond the largest number");
      return op;
  }
  refuse("has an operation of unknown kind " + std::to_string(static_cast<int>(op.kind)));
}

}  // namespace

// First what may fail: nothing has changed then.
void Ledger::push(const LedgerOp& op) {
  if (op.kind == LedgerOp::Kind::settle) {
    if (!unsent_.empty() && unsent_.back().kind == LedgerOp::Kind::settle &&
        unsent_.back().first_token + unsent_.back().tokens == op.first_token) {
      unsent_.back().tokens += op.tokens;
      return;
    }
  }
  unsent_.push_back(op);
  if (op.kind != LedgerOp::Kind::settle) {
    ++unsent_prompt_;
    if (op.kind == LedgerOp::Kind::drop) {
      try {
        unsent_drops_.insert(op.id);
      } catch (const std::bad_alloc&) {
        // It is not withdrawn then, but sent.
      }
    }
  }
}

bool Ledger::withdraw_drop(const RRefId& id) {
  if (unsent_drops_.erase(id) == 0) return false;
  const auto at = std::find_if(unsent_.rbegin(), unsent_.rend(), [&](const LedgerOp& op) {
    return op.kind == LedgerOp::Kind::drop && op.id == id;
  });
  unsent_.erase(std::next(at).base());
  --unsent_prompt_;
  return true;
}

Urgency Ledger::urgency() const noexcept {
  if (unsent_prompt_ > 0 || on_wire_ < sent_.size() || acknowledge_ == Urgency::soon ||
      unsent_.size() >= kMaxOps)
    return Urgency::soon;
  return unsent_.empty() ? acknowledge_ : Urgency::later;
}

bool Ledger::encode(base::Bytes& out) {
  if (urgency() == Urgency::none) return false;
  while (!unsent_.empty() && sent_.size() - on_wire_ < kMaxOps) {
    const LedgerOp& op = unsent_.front();
    sent_.push_back(op);
    if (op.kind != LedgerOp::Kind::settle) --unsent_prompt_;
    if (op.kind == LedgerOp::Kind::drop) unsent_drops_.erase(op.id);
    unsent_.pop_front();
  }
  const std::size_t count = std::min(sent_.size() - on_wire_, kMaxOps);
  base::ByteWriter writer(out);
  writer.write(ask_acknowledgement_ ? kAcknowledgeSoon : std::uint8_t{0});
  writer.write(expected_);
  writer.write(first_ + on_wire_);
  writer.write(static_cast<std::uint32_t>(count));
  for (std::size_t i = 0; i < count; ++i) write(writer, sent_[on_wire_ + i]);
  on_wire_ += count;
  if (on_wire_ == sent_.size()) ask_acknowledgement_ = false;
  acknowledged_to_peer_ = expected_;
  acknowledge_ = Urgency::none;
  return true;
}

Ledger::Arrived Ledger::accept(std::span<const std::byte> frame) {
  // Everything is read and checked before anything changes.
  base::ByteReader in(frame, "reference ledger");
  const auto flags = in.read<std::uint8_t>();
  const auto acknowledged = in.read<std::uint64_t>();
  const auto first = in.read<std::uint64_t>();
  const auto count = in.read_count(kSmallestOpBytes);
  if (flags > kAcknowledgeSoon) refuse("has unknown flags " + std::to_string(flags));
  if (acknowledged > first_ + sent_.size()) {
    refuse("acknowledges " + std::to_string(acknowledged) + " operations, " +
           std::to_string(first_ + sent_.size()) + " were sent");
  }
  if (first > std::numeric_limits<std::uint64_t>::max() - count)
    refuse("numbers its operations beyond the largest number");
  std::vector<LedgerOp> ops;
  ops.reserve(count);
  for (std::uint32_t i = 0; i < count; ++i) ops.push_back(read_op(in));
  in.expect_end();

  // All memory is taken, too: the peer sends again what could not be read.
  Arrived arrived;
  arrived.ops.reserve(count + early_.size());
  if (first_ < acknowledged) arrived.acknowledged.reserve(acknowledged - first_);
  if (first > expected_) {
    for (std::uint32_t i = 0; i < count && early_.size() < kMaxEarly; ++i)
      early_.emplace(first + i, ops[i]);
  }
  while (first_ < acknowledged) {  // a delayed, older acknowledgement changes nothing
    arrived.acknowledged.push_back(sent_.front());
    sent_.pop_front();
    ++first_;
    if (on_wire_ > 0) --on_wire_;
  }
  bool repeated = false;
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint64_t number = first + i;
    if (number < expected_) {
      repeated = true;
    } else if (number > expected_) {
      continue;  // it is kept
    } else {
      arrived.ops.push_back(ops[i]);
      ++expected_;
      for (auto next = early_.begin(); next != early_.end() && next->first <= expected_;
           next = early_.erase(next)) {
        if (next->first < expected_) continue;
        arrived.ops.push_back(next->second);
        ++expected_;
      }
    }
  }
  // The peer waits for acknowledgements of registrations. Those of settlements and drops only free
  // its memory and can be carried by a later frame.
  const bool prompt =
      repeated || (flags & kAcknowledgeSoon) != 0 || expected_ - acknowledged_to_peer_ >= kMaxOps ||
      std::any_of(arrived.ops.begin(), arrived.ops.end(),
                  [](const LedgerOp& op) { return op.kind == LedgerOp::Kind::reg; });
  if (prompt) {
    acknowledge_ = Urgency::soon;
  } else if (!arrived.ops.empty()) {
    acknowledge_ = std::max(acknowledge_, Urgency::whenever);
  }
  return arrived;
}

void Ledger::put_back(std::size_t count) noexcept { expected_ -= count; }

void Ledger::resend() {
  if (sent_.empty()) return;
  on_wire_ = 0;
  ask_acknowledgement_ = true;
}

bool Ledger::tick() {
  const bool stuck = waiting_at_tick_ && !sent_.empty() && first_ == first_at_tick_;
  waiting_at_tick_ = !sent_.empty();
  first_at_tick_ = first_;
  if (stuck) resend();
  return stuck;
}

}  // namespace stitch::rref
