// What TransferOrder returns for each event, and what it refuses.

#include "stitch/transport/gpu/transfer_order.h"
#include "tests/support/plain_test.h"

namespace stitch::transport::gpu::order_rules_test {
namespace {

using stitch::testing::error_of;
using End = TransferOrder::End;
constexpr TransferOrder::Time kNow;

// A device that is the source of pair 1 and the destination of pair 2.
class OrderRules : public ::testing::Test {
 protected:
  OrderRules() {
    order_.add_pair(1, End::source, 100);
    order_.add_pair(2, End::destination, 200);
  }
  TransferOrder order_;
};

TEST_F(OrderRules, ABrokenPairLeavesTheOrderAndTheOthersGoOn) {
  EXPECT_TRUE(order_.announce(1, 7, kNow));
  EXPECT_TRUE(order_.accept(2, 9, 1));
  EXPECT_EQ(order_.drop_pair(1), std::vector<std::uint64_t>{7});
  EXPECT_EQ(order_.launch()->key.number, 9U);
  EXPECT_FALSE(order_.announce(1, 8, kNow));
  EXPECT_FALSE(order_.agree(1, 7, 5));
  EXPECT_TRUE(order_.drop_pair(1).empty());
}

TEST_F(OrderRules, LaunchesStopAtTheLimitsAndGoOnWhenOneFinishes) {
  TransferOrder order({.launched = 3, .launched_by_pair = 2});
  order.add_pair(1, End::destination, 100);
  order.add_pair(2, End::destination, 200);
  for (std::uint64_t i = 0; i < 3; ++i) EXPECT_TRUE(order.accept(1, i, 1));
  for (std::uint64_t i = 0; i < 2; ++i) EXPECT_TRUE(order.accept(2, i, 1));
  EXPECT_TRUE(order.launch());
  EXPECT_TRUE(order.launch());
  EXPECT_FALSE(order.launch());  // two of pair 1
  order.finish(1);
  EXPECT_EQ(order.launch()->pair, 1U);
  EXPECT_EQ(order.launch()->pair, 2U);
  EXPECT_FALSE(order.launch());  // three of the device
  order.finish(1);
  EXPECT_EQ(order.launch()->pair, 2U);
  EXPECT_EQ(order.launched(), 3U);
}

TEST_F(OrderRules, ALateCtsNamesItsPair) {
  const TransferOrder::Time later = kNow + std::chrono::seconds(2);
  EXPECT_TRUE(order_.announce(1, 7, kNow));
  EXPECT_TRUE(order_.announce(1, 8, later));
  EXPECT_EQ(order_.overdue(kNow), std::vector<TransferOrder::Pair>{1});
  EXPECT_TRUE(order_.agree(1, 7, 9));
  EXPECT_TRUE(order_.overdue(kNow).empty());
  EXPECT_EQ(order_.overdue(later), std::vector<TransferOrder::Pair>{1});
}

TEST_F(OrderRules, FramesThatNoCorrectPeerSendsAreRefused) {
  EXPECT_TRUE(order_.announce(1, 7, kNow));
  EXPECT_TRUE(order_.accept(2, 9, 4));
  const auto refused = [](const auto& action) {
    return error_of(action).code() == ErrorCode::protocol;
  };
  EXPECT_TRUE(refused([&] { (void)order_.accept(2, 9, 8); })) << "announced twice";
  EXPECT_TRUE(refused([&] { (void)order_.accept(1, 5, 8); })) << "against the direction";
  EXPECT_TRUE(refused([&] { (void)order_.accept(2, 5, 0); })) << "no clock value";
  EXPECT_TRUE(refused([&] { (void)order_.accept(2, 5, TransferOrder::kMaxClock + 1); }));
  EXPECT_TRUE(refused([&] { (void)order_.accept(2, 5, TransferOrder::kMaxClockStep + 100); }));
  EXPECT_TRUE(refused([&] { order_.agree(2, 9, 8); })) << "CTS from a source";
  EXPECT_TRUE(refused([&] { order_.agree(1, 5, 8); })) << "unknown transfer";
  EXPECT_TRUE(refused([&] { order_.agree(1, 7, 1); })) << "not above the RTS";
  EXPECT_TRUE(order_.agree(1, 7, 6));
  EXPECT_TRUE(refused([&] { order_.agree(1, 7, 8); })) << "second CTS";
  EXPECT_EQ(order_.pending(), 2U);
}

TEST_F(OrderRules, AnExhaustedClockSendsTransfersAnotherWay) {
  std::uint64_t clock = 0;
  for (std::uint64_t i = 0; clock < TransferOrder::kMaxClock; ++i) {
    const std::uint64_t next =
        std::min(TransferOrder::kMaxClock, order_.clock() + TransferOrder::kMaxClockStep);
    const auto answer = order_.accept(2, i, next);
    if (!answer) break;
    clock = *answer;
  }
  EXPECT_LE(order_.clock(), TransferOrder::kMaxClock);
  EXPECT_FALSE(order_.accept(2, 1'000'000, TransferOrder::kMaxClock));
  TransferOrder full;
  full.add_pair(1, End::source, 100);
  full.add_pair(2, End::destination, 200);
  for (std::uint64_t i = 0; full.accept(2, i, full.clock() + TransferOrder::kMaxClockStep - 2);
       ++i) {
    if (full.clock() > TransferOrder::kMaxClock - TransferOrder::kMaxClockStep) break;
  }
  EXPECT_TRUE(full.accept(2, 1'000'000, TransferOrder::kMaxClock - 2));
  EXPECT_FALSE(full.announce(1, 1, kNow));
}

}  // namespace
}  // namespace stitch::transport::gpu::order_rules_test
