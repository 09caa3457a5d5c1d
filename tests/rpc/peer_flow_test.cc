// What a PeerFlow lets begin, and what it keeps waiting.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "stitch/rpc/agent/peer_flow.h"
#include "tests/support/eventually.h"

namespace peer_flow_test {
namespace {

using namespace std::chrono_literals;
using stitch::rpc::PeerFlow;
using stitch::testing::eventually;
using Time = PeerFlow::Clock::time_point;

bool keep(PeerFlow& flow, std::uint64_t id, const PeerFlow::Size& size,
          std::vector<std::uint64_t>& begun) {
  PeerFlow::Waiting request{size, id, [&begun, id] {
                              begun.push_back(id);
                              return true;
                            }};
  return flow.wait(request, PeerFlow::WithoutRoom::wait, Time::max(), [] { return true; }) ==
         PeerFlow::Kept::waits;
}

TEST(PeerFlow, LetsWaitingRequestsBeginInTheirOrder) {
  PeerFlow flow({1 << 20, 2});
  const PeerFlow::Size size{100, false};
  EXPECT_TRUE(flow.try_begin(size));
  EXPECT_TRUE(flow.try_begin(size));
  EXPECT_FALSE(flow.try_begin(size));
  std::vector<std::uint64_t> begun;
  for (std::uint64_t id = 1; id <= 4; ++id) EXPECT_TRUE(keep(flow, id, size, begun));
  EXPECT_EQ(flow.numbers().waiting, 4U);
  flow.end(size);
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{1}));
  EXPECT_FALSE(flow.try_begin(size)) << "others wait before it";
  flow.drop(2);
  flow.end(size);
  flow.end(size);
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{1, 3, 4}));
  EXPECT_EQ(flow.numbers().calls, 2U);
  EXPECT_EQ(flow.numbers().waiting_bytes, 0U);
}

TEST(PeerFlow, CallsOfHandlersDoNotWaitForThoseOfTheProgram) {
  PeerFlow flow({1 << 20, 1});
  EXPECT_TRUE(flow.try_begin({100, false}));
  std::vector<std::uint64_t> begun;
  EXPECT_TRUE(keep(flow, 1, {100, false}, begun));
  EXPECT_TRUE(flow.try_begin({100, true}));
  EXPECT_FALSE(flow.try_begin({100, true})) << "twice the calls, no more";
  EXPECT_TRUE(keep(flow, 2, {100, true}, begun));
  flow.end({100, true});
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{2})) << "and first";
  flow.end({100, true});
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{2}));
  flow.end({100, false});
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{2, 1}));
}

TEST(PeerFlow, OneThatIsLargerThanItsShareGoesAlone) {
  PeerFlow flow({1 << 20, 100});
  EXPECT_TRUE(flow.try_begin({1 << 20, false}));
  EXPECT_FALSE(flow.try_begin({1, false}));
  std::vector<std::uint64_t> begun;
  flow.written({1 << 20, false});
  flow.end({1 << 20, false});
  EXPECT_TRUE(flow.try_begin({1, false}));
}

TEST(PeerFlow, SmallOnesDoNotWaitForLargeOnesToBeWritten) {
  PeerFlow flow({std::size_t{1} << 30, 100});
  const PeerFlow::Size large{8 << 20, false};
  EXPECT_TRUE(flow.try_begin(large));
  EXPECT_FALSE(flow.try_begin(large)) << "the first one is not written";
  std::vector<std::uint64_t> begun;
  EXPECT_TRUE(keep(flow, 1, large, begun));
  EXPECT_TRUE(keep(flow, 2, {100, false}, begun));
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{2}));
  flow.written(large);
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{2, 1}));
}

TEST(PeerFlow, RoomOfOneWayRequestsIsGivenBackOnce) {
  PeerFlow sender({1 << 20, 16}), receiver({1 << 20, 16});
  const PeerFlow::Size size{100, false};
  std::uint64_t asked = 0;
  for (int i = 0; i < 16; ++i) {
    ASSERT_TRUE(sender.try_begin(size));
    sender.written(size);
    if (const auto ask = sender.one_way_begun(size)) {
      EXPECT_EQ(asked, 0U) << "one question at a time";
      asked = ask;
    }
  }
  ASSERT_NE(asked, 0U);
  EXPECT_FALSE(sender.try_begin(size));
  EXPECT_EQ(sender.given_back(receiver.asked(asked)), 0U);
  std::size_t handled = 0;
  for (int i = 0; i < 16; ++i) {
    if (const auto told = receiver.handled(100)) {
      static_cast<void>(sender.given_back(*told));
      handled = told->calls;
    }
  }
  EXPECT_GE(handled, asked);
  static_cast<void>(sender.given_back({1000, 1 << 30}));  // a peer that lies
  EXPECT_EQ(sender.numbers().calls, 0U);
  EXPECT_EQ(sender.numbers().bytes, 0U);
}

TEST(PeerFlow, WhatHandlersCallCountsWithAllElseThatWaits) {
  PeerFlow flow({1 << 20, 100});
  constexpr std::size_t kEighth = (1 << 17) - PeerFlow::kCallBytes;
  const auto request = [](std::size_t bytes, std::uint64_t id) {
    return PeerFlow::Waiting{{bytes, true}, id, [] { return true; }};
  };
  const auto wanted = [] { return true; };
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(flow.try_begin({kEighth, false}));
  std::vector<std::uint64_t> begun;
  for (std::uint64_t id = 1; id <= 2; ++id) EXPECT_TRUE(keep(flow, id, {kEighth, false}, begun));
  auto late = request(kEighth, 3);
  late.size.inside = false;
  EXPECT_EQ(flow.wait(late, PeerFlow::WithoutRoom::wait, PeerFlow::Clock::now() + 10ms, wanted),
            PeerFlow::Kept::late)
      << "a quarter is left to handlers";
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(flow.try_begin({kEighth, true}));
  EXPECT_FALSE(flow.try_begin({kEighth, true})) << "all is counted";
  auto full = request(kEighth, 4);
  EXPECT_EQ(flow.wait(full, PeerFlow::WithoutRoom::full, Time::max(), wanted),
            PeerFlow::Kept::full);
  // The thread of a handler waits until a call has ended.
  std::atomic<bool> kept{false};
  std::jthread handler([&] {
    auto waiting = request(kEighth, 5);
    EXPECT_EQ(flow.wait(waiting, PeerFlow::WithoutRoom::wait, Time::max(), wanted),
              PeerFlow::Kept::waits);
    kept = true;
  });
  std::this_thread::sleep_for(100ms);
  EXPECT_FALSE(kept);
  flow.written({kEighth, true});
  flow.end({kEighth, true});
  EXPECT_TRUE(eventually([&] { return kept.load(); }));
  EXPECT_EQ(flow.numbers().bytes + flow.numbers().waiting_bytes, std::size_t{1} << 20);
}

TEST(PeerFlow, AHandlerWaitsForRoomNoLongerThanTheStandstillLasts) {
  PeerFlow flow({1 << 20, 100});
  const PeerFlow::Size half{(1 << 19) - PeerFlow::kCallBytes, true};
  EXPECT_TRUE(flow.try_begin(half));
  std::vector<std::uint64_t> begun;
  EXPECT_TRUE(keep(flow, 1, half, begun)) << "within the limit";
  const auto begin = PeerFlow::Clock::now();
  EXPECT_TRUE(keep(flow, 2, half, begun)) << "those under way may wait for what it does next";
  const auto waited = PeerFlow::Clock::now() - begin;
  EXPECT_GE(waited, PeerFlow::kMaxStandstill);
  EXPECT_LT(waited, 5 * PeerFlow::kMaxStandstill);
  // As much as the limit again may wait then, and so it may for a thread that must not wait.
  const auto wanted = [] { return true; };
  PeerFlow::Waiting too_much{half, 3, [] { return true; }};
  EXPECT_EQ(flow.wait(too_much, PeerFlow::WithoutRoom::keep_more, Time::max(), wanted),
            PeerFlow::Kept::full);
  flow.give_up();
}

TEST(PeerFlow, FramesWaitForRoomAndGoInTheirOrder) {
  PeerFlow flow({1 << 20, 100});
  std::vector<int> gone;
  const auto wait = [&](int number, std::size_t bytes) {
    flow.wait_frame(bytes, [&gone, number] { gone.push_back(number); });
  };
  EXPECT_TRUE(flow.add_data(700 << 10));
  EXPECT_FALSE(flow.try_begin_frame(100 << 10)) << "replies take half of the limit";
  wait(1, 900 << 10);
  wait(2, 100 << 10);
  EXPECT_FALSE(flow.try_begin_frame(1)) << "others wait before it";
  EXPECT_EQ(flow.numbers().waiting_frames, 2U);
  EXPECT_EQ(flow.numbers().waiting_frame_bytes, std::size_t{1000} << 10);
  flow.data_written(690 << 10);
  EXPECT_TRUE(gone.empty()) << "both would exceed the limit";
  EXPECT_TRUE(flow.many_replies()) << "no reply is to take the room that it needs";
  flow.data_written(10 << 10);
  EXPECT_EQ(gone, (std::vector<int>{1}));
  flow.data_written(900 << 10);
  EXPECT_EQ(gone, (std::vector<int>{1, 2}));
  EXPECT_FALSE(flow.many_replies());
  wait(3, 1 << 20);
  flow.give_up();
  EXPECT_EQ(gone, (std::vector<int>{1, 2, 3})) << "it is to fail";
}

}  // namespace
}  // namespace peer_flow_test
