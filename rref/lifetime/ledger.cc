#include "stitch/rref/lifetime/ledger.h"

#include <algorithm>
#include <limits>
#include <string>

#include "stitch/base/byte_io.h"

namespace stitch::rref {
namespace {

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
    case LedgerOp::Kind::registered:
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
    case LedgerOp::Kind::registered:
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

void Ledger::push(const LedgerOp& op) {
  if (op.kind == LedgerOp::Kind::settle && !unsent_.empty()) {
    LedgerOp& last = unsent_.back();
    if (last.kind == LedgerOp::Kind::settle && last.first_token + last.tokens == op.first_token) {
      last.tokens += op.tokens;
      return;
    }
  }
  unsent_.push_back(op);
}

bool Ledger::encode(base::Bytes& out) {
  if (unsent_.empty()) return false;
  const std::size_t count = std::min(unsent_.size(), kMaxOps);
  base::ByteWriter writer(out);
  writer.write(static_cast<std::uint32_t>(count));
  for (std::size_t i = 0; i < count; ++i) {
    write(writer, unsent_.front());
    unsent_.pop_front();
  }
  return true;
}

std::vector<LedgerOp> Ledger::decode(std::span<const std::byte> frame) {
  base::ByteReader in(frame, "reference ledger");
  const auto count = in.read_count(kSmallestOpBytes);
  std::vector<LedgerOp> ops;
  ops.reserve(count);
  for (std::uint32_t i = 0; i < count; ++i) ops.push_back(read_op(in));
  in.expect_end();
  return ops;
}

}  // namespace stitch::rref
