#include "stitch/rref/lifetime/ledger.h"
#include "tests/support/plain_test.h"

namespace stitch::rref::ledger_test {
namespace {

RRefId make_id(std::uint64_t k) { return {{1, 10}, {2, 20}, k}; }

base::Bytes frame_of(Ledger& ledger) {
  base::Bytes bytes;
  EXPECT_TRUE(ledger.encode(bytes));
  return bytes;
}

TEST(Ledger, CarriesOperationsOnceAndInOrder) {
  Ledger ledger;
  EXPECT_TRUE(ledger.empty());
  ledger.push(LedgerOp::make_reg(make_id(1)));
  ledger.push(LedgerOp::make_settle(7));
  ledger.push(LedgerOp::make_drop(make_id(2)));
  ledger.push(LedgerOp::make_registered(make_id(3)));
  const auto ops = Ledger::decode(frame_of(ledger).span());
  ASSERT_EQ(ops.size(), 4u);
  EXPECT_EQ(ops[0].kind, LedgerOp::Kind::reg);
  EXPECT_EQ(ops[0].id, make_id(1));
  EXPECT_EQ(ops[1].first_token, 7u);
  EXPECT_EQ(ops[2].kind, LedgerOp::Kind::drop);
  EXPECT_EQ(ops[3].kind, LedgerOp::Kind::registered);
  EXPECT_EQ(ops[3].id, make_id(3));
  EXPECT_TRUE(ledger.empty());
  base::Bytes nothing;
  EXPECT_FALSE(ledger.encode(nothing));
}

TEST(Ledger, ConsecutiveSettlementsShareOneOperation) {
  Ledger ledger;
  for (std::uint64_t token = 5; token < 105; ++token) ledger.push(LedgerOp::make_settle(token));
  EXPECT_EQ(ledger.unsent(), 1u);
  const auto ops = Ledger::decode(frame_of(ledger).span());
  ASSERT_EQ(ops.size(), 1u);
  EXPECT_EQ(ops[0].first_token, 5u);
  EXPECT_EQ(ops[0].tokens, 100u);
}

TEST(Ledger, MoreOperationsThanAFrameHoldsAreSentInSeveral) {
  Ledger ledger;
  for (std::uint64_t k = 0; k < 3 * Ledger::kMaxOps; ++k)
    ledger.push(LedgerOp::make_drop(make_id(k)));
  std::size_t frames = 0;
  std::uint64_t next = 0;
  for (base::Bytes bytes; ledger.encode(bytes); bytes = {}, ++frames) {
    for (const LedgerOp& op : Ledger::decode(bytes.span())) EXPECT_EQ(op.id.k, next++);
  }
  EXPECT_EQ(frames, 3u);
  EXPECT_EQ(next, 3 * Ledger::kMaxOps);
}

}  // namespace
}  // namespace stitch::rref::ledger_test
