// The owner's end of ordered handles: numbers in, starts out.

#include "stitch/base/byte_io.h"
#include "stitch/rref/ordered_calls.h"
#include "tests/support/plain_test.h"

namespace stitch::rref::ordered_calls_table_test {
namespace {

using testing::error_of;

constexpr WorkerLife kCaller{3, 1};

void tell(OrderedCalls& calls, std::uint64_t stream, bool end, std::uint64_t number) {
  base::Bytes frame;
  base::ByteWriter out(frame);
  out.write(stream);
  out.write(static_cast<std::uint8_t>(end ? 1 : 0));
  out.write(number);
  calls.on_frame(kCaller, frame.span());
}

TEST(OrderedCallsTable, StartsRequestsInOrderHoweverTheyArriveAndEnd) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const auto calls = std::make_shared<OrderedCalls>();
    std::vector<std::uint64_t> arrivals(10), started;
    std::iota(arrivals.begin(), arrivals.end(), 0);
    std::shuffle(arrivals.begin(), arrivals.end(), random);
    std::map<std::uint64_t, OrderedCalls::Arrived> running;
    std::size_t skipped = 0;
    for (const std::uint64_t number : arrivals) {
      if (number % 4 == 3) {
        tell(*calls, 1, false, number);
        ++skipped;
      } else {
        auto& arrived = running[number] = calls->arrive(kCaller, {1, number});
        arrived.wait([&started, number] { started.push_back(number); });
      }
      if (number == 5) tell(*calls, 1, true, 10);
    }
    while (!running.empty()) {
      const std::size_t before = started.size();
      ASSERT_EQ(running.erase(started.back()), 1u) << "one at a time";
      ASSERT_EQ(started.size(), before + (running.empty() ? 0 : 1));
    }
    EXPECT_EQ(started.size(), arrivals.size() - skipped);
    EXPECT_TRUE(std::is_sorted(started.begin(), started.end()));
    EXPECT_EQ(calls->counts().streams, 0u);
  }
}

TEST(OrderedCallsTable, RefusesNumbersThatCameBefore) {
  const auto calls = std::make_shared<OrderedCalls>();
  { const auto first = calls->arrive(kCaller, {1, 0}); }
  EXPECT_EQ(error_of([&] {
              static_cast<void>(calls->arrive(kCaller, {1, 0}));
            }).code(),
            ErrorCode::protocol);
  const auto third = calls->arrive(kCaller, {1, 2});
  EXPECT_EQ(error_of([&] { tell(*calls, 1, false, 2); }).code(), ErrorCode::protocol);
  EXPECT_EQ(error_of([&] { calls->on_frame(kCaller, {}); }).code(), ErrorCode::protocol);
  EXPECT_NO_THROW(tell(*calls, 2, false, 0));
}

TEST(OrderedCallsTable, TheEndOfACallerStartsWhatWaitsAndItsLateRequestsDoNotWait) {
  const auto calls = std::make_shared<OrderedCalls>();
  int started = 0;
  const auto second = calls->arrive(kCaller, {1, 1});
  second.wait([&] { ++started; });
  EXPECT_EQ(started, 0);
  calls->caller_lost(kCaller);
  EXPECT_EQ(started, 1);
  const auto late = calls->arrive(kCaller, {1, 5});
  EXPECT_FALSE(late.ordered());
  EXPECT_EQ(calls->counts().streams, 0u);
}

}  // namespace
}  // namespace stitch::rref::ordered_calls_table_test
