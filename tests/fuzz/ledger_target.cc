#include "stitch/rref/lifetime/ledger.h"

#include "stitch/base/error.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz {
namespace {

using rref::Ledger;
using rref::LedgerOp;

rref::RRefId id_of(std::uint64_t k) { return {{1, 1}, {2, 1}, k}; }

// The input: how many operations this side has sent, then frames, each behind its length.
bool run(Bytes input) {
  Choices choices(input);
  Ledger ledger;
  const unsigned sent = choices.byte() % 32;
  for (unsigned i = 0; i < sent; ++i) {
    ledger.push(i % 3 == 0 ? LedgerOp::make_reg(id_of(i)) : LedgerOp::make_settle(i));
  }
  base::Bytes out;
  static_cast<void>(ledger.encode(out));
  bool accepted = false;
  bool refused = false;
  while (!choices.empty()) {
    try {
      const auto arrived = ledger.accept(choices.take(choices.word()));
      accepted |= !arrived.ops.empty();
    } catch (const Error&) {
      refused = true;
    }
    out.clear();
    static_cast<void>(ledger.encode(out));
    static_cast<void>(ledger.tick());
  }
  return accepted && !refused;
}

std::vector<base::Bytes> seeds() {
  Ledger peer;
  for (std::uint64_t i = 0; i < 5; ++i) peer.push(LedgerOp::make_settle(3 * i));
  peer.push(LedgerOp::make_reg(id_of(7)));
  peer.push(LedgerOp::make_drop(id_of(7)));
  base::Bytes frame;
  static_cast<void>(peer.encode(frame));
  base::Bytes seed;
  base::ByteWriter to(seed);
  to.write(std::uint8_t{3});
  to.write(static_cast<std::uint16_t>(frame.size()));
  to.write_bytes({frame.data(), frame.size()});
  std::vector<base::Bytes> list;
  list.push_back(std::move(seed));
  return list;
}

}  // namespace

const Target ledger{"ledger", run, seeds};

}  // namespace stitch::fuzz
