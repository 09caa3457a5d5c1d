// What the budget of a peer lets begin, and what waits: requests, one-way requests, replies,
// frames.
#include "stitch/rpc/peers/peer_budget.h"

#include "tests/support/world_test.h"

namespace peer_budget_test {
namespace {

using namespace stitch::testing;
using stitch::rpc::FrameQueue;
using stitch::rpc::OneWayCredits;
using stitch::rpc::PeerBudget;
using stitch::rpc::PeerLimits;
using stitch::rpc::Room;
using stitch::rpc::UnwrittenReplies;
using Time = PeerBudget::Clock::time_point;
using Ids = std::vector<std::uint64_t>;

constexpr auto kProgram = PeerBudget::Caller::program;
constexpr auto kHandler = PeerBudget::Caller::handler;

// ---- room

TEST(PeerBudgets, LetCallsOfTheProgramTakeOneBudgetAndThoseOfHandlersFour) {
  PeerBudget budget({1 << 20, 2});
  EXPECT_TRUE(budget.try_take(100, kProgram));
  EXPECT_TRUE(budget.try_take(100, kProgram));
  EXPECT_FALSE(budget.try_take(100, kProgram));
  for (int i = 0; i < 6; ++i) EXPECT_TRUE(budget.try_take(100, kHandler)) << i;
  EXPECT_FALSE(budget.try_take(100, kHandler)) << "four times two calls";
  for (int i = 0; i < 8; ++i) budget.give_back(100);
  EXPECT_EQ(budget.numbers().calls, 0U);
  EXPECT_EQ(budget.numbers().bytes, 0U);
  EXPECT_TRUE(budget.try_take(900 << 10, kProgram));
  EXPECT_FALSE(budget.try_take(200 << 10, kProgram));
  EXPECT_TRUE(budget.try_take(900 << 10, kHandler));
}

TEST(PeerBudgets, LetARequestAloneGo) {
  PeerBudget budget({1 << 20, 100});
  EXPECT_TRUE(budget.try_take(1 << 20, kProgram)) << "with its 2 KiB it exceeds the budget";
  EXPECT_FALSE(budget.try_take(1, kProgram));
  budget.give_back(1 << 20);
  EXPECT_TRUE(budget.try_take(1, kProgram));
}

TEST(PeerBudgets, GiveARoomBackOnce) {
  PeerBudget budget({1 << 20, 100});
  ASSERT_TRUE(budget.try_take(100, kProgram));
  {
    Room room(budget, 100);
    const Room moved(std::move(room));
    EXPECT_EQ(budget.numbers().calls, 1U);
  }
  EXPECT_EQ(budget.numbers().calls, 0U);
}

// Threads that make small requests would always take what the large one waits for.
TEST(PeerBudgets, LetThreadsGoOnInTheirOrder) {
  PeerBudget budget({1 << 20, 100});
  const std::size_t first = 400 << 10, large = 700 << 10, small = 100 << 10;
  ASSERT_TRUE(budget.try_take(first, kProgram));
  std::jthread thread([&] { EXPECT_TRUE(budget.wait(large, Time::max())); });
  ASSERT_TRUE(eventually([&] { return budget.any_wait(); }));
  EXPECT_FALSE(budget.try_take(small, kProgram));
  EXPECT_FALSE(budget.wait(small, PeerBudget::Clock::now() + 300ms))
      << "there is room for it, but not for the one before it";
  EXPECT_TRUE(budget.any_wait());
  EXPECT_TRUE(budget.try_take(small, kHandler)) << "handlers do not wait for that";
  budget.give_back(small);
  budget.give_back(first);
  thread.join();
  EXPECT_FALSE(budget.any_wait());
  EXPECT_EQ(budget.numbers().calls, 1U);
}

TEST(PeerBudgets, AThreadThatWaitsNoMoreHoldsUpNoOther) {
  PeerBudget budget({1 << 20, 100});
  ASSERT_TRUE(budget.try_take(400 << 10, kProgram));
  std::jthread thread(
      [&] { EXPECT_FALSE(budget.wait(700 << 10, PeerBudget::Clock::now() + 300ms)); });
  ASSERT_TRUE(eventually([&] { return budget.any_wait(); }));
  EXPECT_TRUE(budget.wait(100 << 10, Time::max()));
  thread.join();
  EXPECT_FALSE(budget.any_wait());
}

TEST(PeerBudgets, OfALostPeerLetAllGoOn) {
  PeerBudget budget({1 << 20, 1});
  ASSERT_TRUE(budget.try_take(900 << 10, kProgram));
  std::vector<std::jthread> threads;
  for (int i = 0; i < 3; ++i)
    threads.emplace_back([&] { EXPECT_TRUE(budget.wait(900 << 10, Time::max())); });
  ASSERT_TRUE(eventually([&] { return budget.numbers().waiting == 3; }));
  budget.give_up();
  threads.clear();
  EXPECT_FALSE(budget.any_wait());
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(budget.try_take(100, kHandler)) << "it fails elsewhere";
}

// ---- the window

// As OutgoingCalls does.
void send(PeerBudget& budget, std::uint64_t id, std::size_t bytes, Ids& begun) {
  if (budget.try_send(bytes)) {
    begun.push_back(id);
  } else {
    budget.send_later(id, bytes, [&begun, id] {
      begun.push_back(id);
      return true;
    });
  }
}

TEST(PeerBudgets, SmallRequestsDoNotWaitForLargeOnesToBeWritten) {
  PeerBudget budget({std::size_t{1} << 30, 100});
  const std::size_t large = 8 << 20;
  Ids begun;
  send(budget, 1, large, begun);
  send(budget, 2, large, begun);
  send(budget, 3, 100, begun);
  EXPECT_EQ(begun, (Ids{1, 3})) << "the first one is not written";
  EXPECT_EQ(budget.numbers().waiting, 1U);
  EXPECT_EQ(budget.numbers().waiting_bytes, large);
  budget.written(large);
  EXPECT_EQ(begun, (Ids{1, 3, 2}));
  EXPECT_EQ(budget.numbers().unwritten_bytes, large + 100);
}

TEST(PeerBudgets, RequestsOfOneWindowKeepTheirOrder) {
  PeerBudget budget({std::size_t{1} << 30, 100});
  const std::size_t large = 8 << 20;
  Ids begun;
  for (std::uint64_t id = 1; id <= 5; ++id) send(budget, id, large, begun);
  budget.drop(3);
  EXPECT_EQ(begun, (Ids{1}));
  for (int i = 0; i < 3; ++i) budget.written(large);
  EXPECT_EQ(begun, (Ids{1, 2, 4, 5}));
  budget.written(large);
  EXPECT_EQ(budget.numbers().unwritten_bytes, 0U);
  send(budget, 6, large, begun);
  EXPECT_EQ(begun.back(), 6U);
}

TEST(PeerBudgets, ARequestThatIsNotWantedAnyMoreLetsTheNextOneGo) {
  PeerBudget budget({std::size_t{1} << 30, 100});
  const std::size_t large = 8 << 20;
  Ids begun;
  send(budget, 1, large, begun);
  budget.send_later(2, large, [] { return false; });
  send(budget, 3, large, begun);
  budget.written(large);
  EXPECT_EQ(begun, (Ids{1, 3}));
}

TEST(PeerBudgets, RefuseWhatAPeerSendsBeyondFourBudgets) {
  PeerBudget budget({1 << 20, 2});
  for (int i = 0; i < 8; ++i) EXPECT_EQ(budget.count_received(100), nullptr);
  EXPECT_EQ(budget.count_received(100), PeerBudget::kCallsName);
  for (int i = 0; i < 9; ++i) budget.end_received(100);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(budget.count_received(1000 << 10), nullptr);
  EXPECT_EQ(budget.count_received(1000 << 10), PeerBudget::kBytesName);
  EXPECT_EQ(budget.count_received(2 << 20), PeerBudget::kBytesName) << "no peer may send one";
}

TEST(PeerBudgets, ASmallerLimitOfThePeerHolds) {
  const PeerLimits mine{1 << 20, 100, 1 << 16};
  const PeerLimits both = mine.with({1 << 10, 200, 1 << 12});
  EXPECT_EQ(both.bytes, 1U << 10);
  EXPECT_EQ(both.calls, 100U);
  EXPECT_EQ(both.frame_bytes, 1U << 12);
}

// ---- one-way requests

TEST(OneWay, RoomIsGivenBackOnce) {
  OneWayCredits sender({1 << 20, 16}), receiver({1 << 20, 16});
  std::uint64_t asked = 0;
  for (int i = 0; i < 16; ++i) {
    if (const auto ask = sender.begun(100)) {
      EXPECT_EQ(asked, 0U) << "one question at a time";
      asked = ask;
    }
  }
  ASSERT_NE(asked, 0U);
  OneWayCredits::Handled back = sender.given_back(receiver.asked(asked));
  EXPECT_EQ(back.calls, 0U);
  for (int i = 0; i < 16; ++i) {
    if (const auto told = receiver.handled(100)) {
      const auto fresh = sender.given_back(*told);
      back.calls += fresh.calls;
      back.bytes += fresh.bytes;
    }
  }
  EXPECT_GE(back.calls, asked);
  const auto rest = sender.given_back({1000, 1 << 30});  // a peer that lies
  EXPECT_EQ(back.calls + rest.calls, 16U);
  EXPECT_EQ(back.bytes + rest.bytes, 1600U);
}

TEST(OneWay, APeerThatGivesBackWhatItNeverGotGivesItBackOnce) {
  OneWayCredits credits({1 << 20, 16});
  for (std::uint64_t i = 1; i <= 3; ++i) {
    static_cast<void>(credits.begun(100));
    EXPECT_EQ(credits.given_back({i, 100}).calls, 1U);
    EXPECT_FALSE(credits.failed(100));
  }
  static_cast<void>(credits.begun(100));
  EXPECT_TRUE(credits.failed(100)) << "it counts on";
}

// ---- frames

TEST(FrameQueues, KeepFramesInTheirOrder) {
  FrameQueue frames(512 << 10);
  std::vector<int> gone;
  const int owner = 0;
  const auto wait = [&](int number, std::size_t bytes) {
    frames.wait(bytes, &owner, [&gone, number](bool sent) {
      EXPECT_TRUE(sent);
      gone.push_back(number);
    });
  };
  EXPECT_TRUE(frames.try_begin(500 << 10));
  EXPECT_FALSE(frames.try_begin(100 << 10));
  wait(1, 900 << 10);
  wait(2, 100 << 10);
  EXPECT_TRUE(frames.many());
  EXPECT_FALSE(frames.try_begin(1)) << "others wait before it";
  EXPECT_EQ(frames.waiting(), 2U);
  EXPECT_EQ(frames.waiting_bytes(), std::size_t{1000} << 10);
  EXPECT_TRUE(gone.empty()) << "a large one goes alone";
  frames.written(500 << 10);
  EXPECT_EQ(gone, (std::vector<int>{1}));
  EXPECT_FALSE(frames.many());
  frames.written(900 << 10);
  EXPECT_EQ(gone, (std::vector<int>{1, 2}));
  wait(3, 1 << 20);
  frames.give_up();
  EXPECT_EQ(gone, (std::vector<int>{1, 2, 3})) << "it is to fail";
}

TEST(FrameQueues, TellOfDroppedFramesOnceAndMakeRoom) {
  FrameQueue frames(512 << 10);
  std::vector<int> gone, dropped;
  const int owners[2] = {};
  const auto wait = [&](int number, std::size_t bytes) {
    frames.wait(bytes, &owners[number % 2],
                [&, number](bool sent) { (sent ? gone : dropped).push_back(number); });
  };
  EXPECT_TRUE(frames.try_begin(400 << 10));
  wait(1, 300 << 10);  // keeps those behind it waiting
  wait(2, 50 << 10);
  wait(3, 300 << 10);
  wait(4, 50 << 10);
  EXPECT_TRUE(frames.many());
  frames.drop(&owners[1]);
  EXPECT_EQ(dropped, (std::vector<int>{1, 3}));
  EXPECT_EQ(gone, (std::vector<int>{2, 4})) << "they have room now";
  EXPECT_EQ(frames.waiting(), 0U);
  EXPECT_EQ(frames.waiting_bytes(), 0U);
  frames.drop(&owners[1]);
  EXPECT_EQ(dropped.size(), 2U);
  EXPECT_EQ(frames.unwritten_bytes(), std::size_t{500} << 10);
}

// ---- replies

TEST(Replies, ParkHandlersUntilHalfOfThemIsWritten) {
  UnwrittenReplies replies(1 << 20);
  int run = 0;
  stitch::base::UniqueFunction<void()> task = [&] { ++run; };
  replies.add(500 << 10);
  EXPECT_FALSE(replies.many());
  EXPECT_FALSE(replies.park(task));
  replies.add(100 << 10);
  EXPECT_TRUE(replies.many());
  EXPECT_TRUE(replies.park(task));
  replies.written(100 << 10);
  EXPECT_TRUE(replies.many()) << "others wait already";
  EXPECT_EQ(run, 0);
  replies.written(300 << 10);
  EXPECT_EQ(run, 1);
  EXPECT_FALSE(replies.many());
  replies.add(1 << 20);
  task = [&] { ++run; };
  EXPECT_TRUE(replies.park(task));
  replies.give_up();
  EXPECT_EQ(run, 2);
}

}  // namespace
}  // namespace peer_budget_test
