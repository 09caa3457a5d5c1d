#include "stitch/rref/lifetime/ledger.h"
#include "stitch/base/byte_io.h"
#include "tests/support/plain_test.h"

namespace stitch::rref::ledger_test {
namespace {

RRefId make_id(std::uint64_t k) { return {{1, 10}, {2, 20}, k}; }

base::Bytes frame_of(Ledger& ledger) {
  base::Bytes bytes;
  EXPECT_TRUE(ledger.encode(bytes));
  return bytes;
}

TEST(Ledger, CarriesOperationsInOrderAndReceivesTheirAcknowledgement) {
  Ledger here, there;
  here.push(LedgerOp::make_reg(make_id(1)));
  here.push(LedgerOp::make_settle(7));
  here.push(LedgerOp::make_drop(make_id(2)));
  EXPECT_EQ(here.urgency(), Urgency::soon);
  const auto arrived = there.accept(frame_of(here).span());
  ASSERT_EQ(arrived.ops.size(), 3u);
  EXPECT_EQ(arrived.ops[0].kind, LedgerOp::Kind::reg);
  EXPECT_EQ(arrived.ops[0].id, make_id(1));
  EXPECT_EQ(arrived.ops[1].first_token, 7u);
  EXPECT_EQ(arrived.ops[2].kind, LedgerOp::Kind::drop);
  EXPECT_EQ(here.unacknowledged(), 3u);
  EXPECT_EQ(here.accept(frame_of(there).span()).acknowledged.size(), 3u);
  EXPECT_EQ(here.unacknowledged(), 0u);
  EXPECT_EQ(here.urgency(), Urgency::none);
  EXPECT_EQ(there.urgency(), Urgency::none);
}

TEST(Ledger, ConsecutiveSettlementsShareOneOperation) {
  Ledger here, there;
  for (std::uint64_t token = 5; token < 105; ++token) here.push(LedgerOp::make_settle(token));
  EXPECT_EQ(here.unsent(), 1u);
  EXPECT_EQ(here.urgency(), Urgency::later);
  const auto arrived = there.accept(frame_of(here).span());
  ASSERT_EQ(arrived.ops.size(), 1u);
  EXPECT_EQ(arrived.ops[0].first_token, 5u);
  EXPECT_EQ(arrived.ops[0].tokens, 100u);
  EXPECT_EQ(there.urgency(), Urgency::whenever);
}

TEST(Ledger, ADropIsWithdrawnOnlyBeforeItIsSent) {
  Ledger here, there;
  here.push(LedgerOp::make_drop(make_id(1)));
  here.push(LedgerOp::make_drop(make_id(2)));
  EXPECT_TRUE(here.withdraw_drop(make_id(1)));
  EXPECT_FALSE(here.withdraw_drop(make_id(1)));
  EXPECT_EQ(there.accept(frame_of(here).span()).ops.at(0).id, make_id(2));
  EXPECT_FALSE(here.withdraw_drop(make_id(2)));
  here.resend();
  EXPECT_FALSE(here.withdraw_drop(make_id(2)));
}

TEST(Ledger, FramesInAnyOrderRepeatedAndLostAreTakenInOnceAndInOrder) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 random(seed);
    Ledger here, there;
    std::vector<base::Bytes> to_there, to_here;
    std::vector<std::uint64_t> taken;
    std::uint64_t pushed = 0, acknowledged = 0;
    const std::uint64_t total = 200;
    const auto any = [&](std::vector<base::Bytes>& frames, auto&& take) {
      if (frames.empty()) return;
      const auto at = std::uniform_int_distribution<std::size_t>(0, frames.size() - 1)(random);
      if (random() % 5 != 0) take(frames[at].span());
      if (random() % 4 != 0) frames.erase(frames.begin() + static_cast<std::ptrdiff_t>(at));
    };
    for (int step = 0; step < 100'000 && acknowledged < total; ++step) {
      switch (random() % 6) {
        case 0:
          if (pushed < total) here.push(LedgerOp::make_reg(make_id(pushed++)));
          break;
        case 1: {
          base::Bytes bytes;
          if (here.encode(bytes)) to_there.push_back(std::move(bytes));
          break;
        }
        case 2: {
          base::Bytes bytes;
          if (there.encode(bytes)) to_here.push_back(std::move(bytes));
          break;
        }
        case 3:
          any(to_there, [&](auto span) {
            for (const LedgerOp& op : there.accept(span).ops) taken.push_back(op.id.k);
          });
          break;
        case 4:
          any(to_here, [&](auto span) {
            for (const LedgerOp& op : here.accept(span).acknowledged) {
              EXPECT_EQ(op.id.k, acknowledged) << "seed " << seed;
              ++acknowledged;
              EXPECT_LE(acknowledged, taken.size()) << "seed " << seed;
            }
          });
          break;
        default:
          if (random() % 10 == 0) here.tick();
      }
    }
    ASSERT_EQ(acknowledged, total) << "seed " << seed;
    ASSERT_EQ(taken.size(), total) << "seed " << seed;
    for (std::uint64_t k = 0; k < total; ++k) ASSERT_EQ(taken[k], k) << "seed " << seed;
  }
}

TEST(Ledger, MoreOperationsThanAFrameHoldsAreSentInSeveral) {
  Ledger here, there;
  for (std::uint64_t k = 0; k < 3 * Ledger::kMaxOps; ++k)
    here.push(LedgerOp::make_drop(make_id(k)));
  std::size_t frames = 0, ops = 0;
  for (base::Bytes bytes; here.encode(bytes); bytes = {}, ++frames)
    ops += there.accept(bytes.span()).ops.size();
  EXPECT_EQ(frames, 3u);
  EXPECT_EQ(ops, 3 * Ledger::kMaxOps);
}

TEST(Ledger, EveryCutOffOrChangedFrameIsRefusedOrHarmless) {
  Ledger here;
  here.push(LedgerOp::make_reg(make_id(1)));
  here.push(LedgerOp::make_settle(3));
  const base::Bytes whole = frame_of(here);
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    Ledger there;
    try {
      (void)there.accept(whole.span().first(bytes));
      ADD_FAILURE() << "a frame cut to " << bytes << " bytes was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::protocol);
    }
    EXPECT_EQ(there.accept(whole.span()).ops.size(), 2u) << "the refused frame changed the ledger";
  }
  for (std::size_t at = 0; at < whole.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      base::Bytes changed(whole.size());
      std::copy_n(whole.data(), whole.size(), changed.data());
      changed.data()[at] ^= std::byte(1 << bit);
      Ledger there;
      try {
        (void)there.accept(changed.span());
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::protocol);
      }
    }
  }
}

TEST(Ledger, AnAcknowledgementOfWhatWasNeverSentIsRefused) {
  base::Bytes frame;
  base::ByteWriter out(frame);
  out.write(std::uint8_t{0});
  out.write(std::uint64_t{1});
  out.write(std::uint64_t{0});
  out.write(std::uint32_t{0});
  Ledger ledger;
  try {
    (void)ledger.accept(frame.span());
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "reference ledger acknowledges 1 operations, 0 were sent");
  }
}

}  // namespace
}  // namespace stitch::rref::ledger_test
