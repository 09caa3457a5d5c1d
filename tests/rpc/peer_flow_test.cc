// What a PeerFlow lets begin, and what it keeps waiting.
#include "tests/support/world_test.h"

namespace peer_flow_test {
namespace {

using namespace std::chrono_literals;
using stitch::rpc::PeerFlow;
using stitch::rpc::Precedence;
using Time = PeerFlow::Clock::time_point;

bool keep(PeerFlow& flow, std::uint64_t id, const PeerFlow::Size& size,
          std::vector<std::uint64_t>& begun, Precedence precedence = {}) {
  PeerFlow::Waiting request{size, id,
                            [&begun, id] {
                              begun.push_back(id);
                              return true;
                            },
                            std::move(precedence)};
  return flow.wait(request, Time::max(), [] { return true; }) == PeerFlow::Kept::waits;
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

// A program that always has some under way would never leave it enough room.
TEST(PeerFlow, NoneOfTheProgramBeginsWhileALargeOneOfAHandlerWaits) {
  PeerFlow flow({1 << 20, 100});
  const PeerFlow::Size outside{200 << 10, false};
  const PeerFlow::Size inside{700 << 10, true};
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(flow.try_begin(outside));
  std::vector<std::uint64_t> begun;
  EXPECT_TRUE(keep(flow, 1, outside, begun));
  EXPECT_TRUE(keep(flow, 2, inside, begun));
  const auto ends = [&](const PeerFlow::Size& size) {
    flow.written(size);
    flow.end(size);
  };
  EXPECT_FALSE(flow.try_begin({100, false}));
  ends(outside);
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{2}));
  EXPECT_FALSE(flow.try_begin(outside));
  ends(inside);
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{2, 1}));
  // One that the program leaves enough for holds nothing up: it waits for a count of calls only.
  PeerFlow few({1 << 20, 1});
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(few.try_begin({100, true}));
  begun.clear();
  EXPECT_TRUE(keep(few, 1, {100, true}, begun));
  EXPECT_TRUE(keep(few, 2, {100, false}, begun));
  few.end({100, true});
  few.end({100, true});
  few.end({100, true});
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{1, 2}));
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

// ---- requests that follow others

Precedence in_one_order() { return {{7}, {7}}; }

// If it began, it would wait at the peer for the other one, and keep the room that this needs.
TEST(PeerFlow, ARequestThatFollowsAnotherDoesNotBeginBeforeIt) {
  PeerFlow flow({1 << 20, 100});
  const PeerFlow::Size first{500 << 10, false}, large{500 << 10, false};
  const PeerFlow::Size small{100, false}, inside{100, true};
  EXPECT_TRUE(flow.try_begin(first));
  std::vector<std::uint64_t> begun;
  EXPECT_TRUE(keep(flow, 1, large, begun, in_one_order()));
  // Kept before the others: with these it would wait on this thread, where the limit is reached.
  EXPECT_TRUE(keep(flow, 3, small, begun, in_one_order()));
  EXPECT_TRUE(flow.try_begin({100 << 10, true})) << "else 1 would have room once 2 follows it";
  EXPECT_TRUE(flow.waits_behind(in_one_order()));
  EXPECT_FALSE(flow.waits_behind({{}, {8}}));
  EXPECT_TRUE(keep(flow, 2, inside, begun, in_one_order()));
  EXPECT_TRUE(flow.try_begin(inside)) << "one in another order";
  EXPECT_EQ(flow.numbers().waiting, 3U);
  EXPECT_TRUE(begun.empty());
  flow.end(first);
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{1, 2}));
  flow.end(large);
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{1, 2, 3}));
  EXPECT_FALSE(flow.waits_behind(in_one_order()));
  EXPECT_EQ(flow.numbers().waiting, 0U);
  EXPECT_EQ(flow.numbers().waiting_bytes, 0U);
}

// What has the room may wait for the one inside.
TEST(PeerFlow, WhatAHandlersRequestFollowsBeginsByTheLimitsOfHandlers) {
  PeerFlow flow({1 << 20, 100});
  const PeerFlow::Size large{300 << 10, false}, small{100, false}, inside{100, true};
  EXPECT_TRUE(flow.try_begin(large));
  std::vector<std::uint64_t> begun;
  EXPECT_TRUE(keep(flow, 1, large, begun));
  EXPECT_TRUE(keep(flow, 2, large, begun, {{8}, {}}));
  EXPECT_TRUE(keep(flow, 3, small, begun, {{7}, {7, 8}}));
  EXPECT_TRUE(begun.empty());
  EXPECT_TRUE(keep(flow, 4, inside, begun, in_one_order()));
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{2, 3, 4})) << "also what that follows";
  flow.end(large);
  EXPECT_EQ(begun.size(), 3U) << "no other one of the program";
  flow.end(large);
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{2, 3, 4, 1}));
}

TEST(PeerFlow, ASmallRequestDoesNotPassALargeOneThatItFollows) {
  PeerFlow flow({std::size_t{1} << 30, 100});
  const PeerFlow::Size large{8 << 20, false}, small{100, false};
  EXPECT_TRUE(flow.try_begin(large));
  std::vector<std::uint64_t> begun;
  EXPECT_TRUE(keep(flow, 1, large, begun, in_one_order()));
  EXPECT_TRUE(keep(flow, 2, small, begun, in_one_order()));
  EXPECT_TRUE(keep(flow, 3, small, begun));
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{3}));
  flow.written(large);
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{3, 1, 2}));
}

TEST(PeerFlow, WhatIsDroppedHoldsUpNothingThatFollowsIt) {
  PeerFlow flow({1 << 20, 1});
  const PeerFlow::Size size{100, false};
  EXPECT_TRUE(flow.try_begin(size));
  std::vector<std::uint64_t> begun;
  for (std::uint64_t id = 1; id <= 6; ++id)
    EXPECT_TRUE(keep(flow, id, size, begun, in_one_order()));
  flow.drop(2);
  EXPECT_EQ(flow.numbers().waiting, 5U);
  flow.drop(1);
  flow.end(size);
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{3}));
  flow.end(size);
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{3, 4}));
  flow.give_up();
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{3, 4, 5, 6}));
  EXPECT_EQ(flow.numbers().waiting_bytes, 0U);
}

// ---- requests of the program that would starve

PeerFlow::Kept keep_until(PeerFlow& flow, std::uint64_t id, const PeerFlow::Size& size, Time until,
                          const std::atomic<bool>& wanted, std::vector<std::uint64_t>& begun) {
  PeerFlow::Waiting request{size, id, [&begun, id] {
                              begun.push_back(id);
                              return true;
                            }};
  return flow.wait(request, until, [&] { return wanted.load(); });
}
Time soon() { return PeerFlow::Clock::now() + 500ms; }

// Threads that make small requests would always take what the large one waits for.
TEST(PeerFlow, ThreadsOfTheProgramGoOnInTheirOrder) {
  PeerFlow flow({1 << 20, 100});
  const PeerFlow::Size first{400 << 10, false}, large{700 << 10, false}, small{100 << 10, false};
  const std::atomic<bool> wanted{true};
  std::vector<std::uint64_t> begun;
  ASSERT_TRUE(flow.try_begin(first));
  flow.written(first);
  std::jthread thread([&] {
    EXPECT_EQ(keep_until(flow, 1, large, Time::max(), wanted, begun), PeerFlow::Kept::waits);
  });
  ASSERT_TRUE(stitch::testing::eventually([&] { return flow.any_wait(); }));
  std::vector<std::uint64_t> none;
  EXPECT_FALSE(flow.try_begin(small));
  EXPECT_EQ(keep_until(flow, 2, small, soon(), wanted, none), PeerFlow::Kept::late)
      << "the limit has room for it, but not for the one before it";
  EXPECT_TRUE(flow.any_wait());
  EXPECT_EQ(flow.numbers().waiting_bytes, 0U);
  EXPECT_TRUE(flow.try_begin({100, true})) << "handlers do not wait for that";
  flow.end({100, true});
  flow.end(first);
  thread.join();
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{1}));
  EXPECT_FALSE(flow.any_wait());
}

TEST(PeerFlow, AThreadThatWaitsNoMoreHoldsUpNoOther) {
  for (const bool is_late : {true, false}) {
    PeerFlow flow({1 << 20, 100});
    const PeerFlow::Size first{400 << 10, false}, large{700 << 10, false};
    std::atomic<bool> wanted{true};
    const std::atomic<bool> always{true};
    std::vector<std::uint64_t> none, begun;
    ASSERT_TRUE(flow.try_begin(first));
    flow.written(first);
    std::jthread thread([&] {
      EXPECT_EQ(keep_until(flow, 1, large, is_late ? soon() : Time::max(), wanted, none),
                is_late ? PeerFlow::Kept::late : PeerFlow::Kept::unwanted);
    });
    ASSERT_TRUE(stitch::testing::eventually([&] { return flow.any_wait(); }));
    wanted = is_late;
    EXPECT_EQ(keep_until(flow, 2, {100, false}, Time::max(), always, begun), PeerFlow::Kept::waits);
    EXPECT_EQ(begun, (std::vector<std::uint64_t>{2}));
    thread.join();
    EXPECT_TRUE(none.empty());
    EXPECT_FALSE(flow.any_wait());
  }
}

TEST(PeerFlow, ALostPeerLetsAllThreadsGoOn) {
  PeerFlow flow({1 << 20, 100});
  const PeerFlow::Size large{900 << 10, false};
  const std::atomic<bool> wanted{true};
  ASSERT_TRUE(flow.try_begin(large));
  std::vector<std::uint64_t> begun[3];
  std::vector<std::jthread> threads;
  for (auto& each : begun) {
    threads.emplace_back([&] {
      EXPECT_EQ(keep_until(flow, 1 + static_cast<std::uint64_t>(&each - begun), large, Time::max(),
                           wanted, each),
                PeerFlow::Kept::waits);
    });
  }
  ASSERT_TRUE(stitch::testing::eventually([&] { return flow.any_wait(); }));
  flow.give_up();
  threads.clear();
  EXPECT_FALSE(flow.any_wait());
}

// Calls of handlers that overlap, so that something is always under way.
class Overtaken : public ::testing::Test {
 protected:
  Overtaken() {
    EXPECT_TRUE(flow.try_begin(inside));
    EXPECT_TRUE(flow.try_begin(inside));
    written();
    written();
  }
  void written() { flow.written(inside); }
  // At that time after the first look.
  bool look(std::chrono::milliseconds at) { return flow.look(begin + at); }

  PeerFlow flow{{1 << 20, 100}};
  const PeerFlow::Size inside{200 << 10, true}, large{600 << 10, false};
  const Time begin = PeerFlow::Clock::now() + 1h;  // no time passes by itself
  std::vector<std::uint64_t> begun;
};

TEST_F(Overtaken, ALargeRequestOfTheProgramBeginsWhileHandlersMakeOneCallAfterTheOther) {
  EXPECT_TRUE(keep(flow, 1, large, begun));
  EXPECT_TRUE(look(0ms));
  EXPECT_TRUE(look(50ms));
  EXPECT_TRUE(flow.try_begin(inside)) << "not yet";
  written();
  flow.end(inside);
  EXPECT_TRUE(look(100ms));
  EXPECT_FALSE(flow.try_begin(inside));
  EXPECT_TRUE(keep(flow, 2, inside, begun));
  flow.end(inside);
  EXPECT_TRUE(begun.empty());
  flow.end(inside);
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{1, 2}));
  written();
  EXPECT_TRUE(flow.try_begin({100, true}));
  EXPECT_FALSE(look(150ms)) << "no other one waits";
}

// What is under way may wait for the calls that are held up.
TEST_F(Overtaken, CallsOfHandlersAreHeldUpForATimeOnly) {
  EXPECT_TRUE(keep(flow, 1, large, begun));
  EXPECT_TRUE(look(0ms));
  std::uint64_t id = 2;
  const auto is_held = [&](std::chrono::milliseconds at) {
    EXPECT_TRUE(look(at));
    const PeerFlow::Size nested{100, true};
    if (flow.try_begin(nested)) {
      flow.written(nested);
      flow.end(nested);
      return false;
    }
    return keep(flow, id++, nested, begun) && begun.empty();
  };
  EXPECT_TRUE(is_held(100ms));
  EXPECT_TRUE(is_held(199ms));
  EXPECT_TRUE(look(200ms));
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{2, 3}));
  begun.clear();
  EXPECT_FALSE(is_held(299ms));
  EXPECT_TRUE(is_held(300ms));
  EXPECT_TRUE(is_held(499ms));
  EXPECT_TRUE(look(500ms));
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{4, 5}));
  begun.clear();
  EXPECT_FALSE(is_held(699ms));
  EXPECT_TRUE(is_held(700ms));
  flow.drop(1);
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{6})) << "nothing waits before it any more";
  EXPECT_EQ(flow.numbers().waiting, 0U);
}

TEST_F(Overtaken, CallsOfHandlersAreNotRefusedBecauseTheyAreHeldUp) {
  EXPECT_TRUE(keep(flow, 1, large, begun));
  EXPECT_TRUE(look(0ms));
  EXPECT_TRUE(look(100ms));
  EXPECT_TRUE(keep(flow, 2, inside, begun));
  EXPECT_TRUE(keep(flow, 3, inside, begun));
  EXPECT_TRUE(begun.empty());
  EXPECT_TRUE(keep(flow, 4, inside, begun)) << "with it half of the limit would wait";
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{2, 3, 4}));
}

// That it waits is no reason to hold up the calls of handlers: they keep nothing from it.
TEST(PeerFlow, CallsOfHandlersAreNotHeldUpWhereTheProgramHasTheRoom) {
  PeerFlow flow({1 << 20, 100});
  const Time begin = PeerFlow::Clock::now() + 1h;
  std::vector<std::uint64_t> begun;
  EXPECT_TRUE(flow.try_begin({400 << 10, false}));
  EXPECT_TRUE(flow.try_begin({100, true}));
  EXPECT_TRUE(keep(flow, 1, {600 << 10, false}, begun));
  EXPECT_TRUE(flow.look(begin));
  EXPECT_TRUE(flow.look(begin + 100ms));
  EXPECT_TRUE(flow.try_begin({100, true}));
}

TEST(PeerFlow, OneWayCallsOfHandlersAreHeldUpToo) {
  PeerFlow flow({1 << 20, 100});
  const Time begin = PeerFlow::Clock::now() + 1h;
  const PeerFlow::Size inside{100, true};
  std::vector<std::uint64_t> begun;
  ASSERT_TRUE(flow.try_begin(inside));
  flow.written(inside);
  static_cast<void>(flow.one_way_begun(inside));
  EXPECT_TRUE(keep(flow, 1, {600 << 10, false}, begun));
  EXPECT_TRUE(flow.look(begin));
  EXPECT_TRUE(flow.look(begin + 100ms));
  EXPECT_FALSE(flow.try_begin(inside));
  static_cast<void>(flow.given_back({1, 100}));
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{1}));
}

void begin_one_way(PeerFlow& flow, const PeerFlow::Size& size) {
  ASSERT_TRUE(flow.try_begin(size));
  flow.written(size);
  static_cast<void>(flow.one_way_begun(size));
}

// What the program itself has under way keeps its next request waiting.
TEST(PeerFlow, AOneWayCallOfAHandlerMakesNoneOfTheProgramCountAsOne) {
  const PeerFlow::Size small{100, false}, inside{100, true}, large{200 << 10, false};
  const Time begin = PeerFlow::Clock::now() + 1h;
  for (const bool handled : {false, true}) {
    PeerFlow flow({1 << 20, 100});
    if (handled) begin_one_way(flow, small);
    begin_one_way(flow, inside);
    begin_one_way(flow, large);
    if (handled) static_cast<void>(flow.given_back({2, 200}));
    std::vector<std::uint64_t> begun;
    EXPECT_TRUE(keep(flow, 1, {400 << 10, false}, begun));
    EXPECT_TRUE(flow.look(begin));
    EXPECT_TRUE(flow.look(begin + 100ms));
    EXPECT_TRUE(flow.try_begin(inside)) << "nothing is held up";
    EXPECT_TRUE(begun.empty());
  }
}

// ---- one-way requests

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

TEST(PeerFlow, APeerThatGivesBackWhatItNeverGotGivesItBackOnce) {
  PeerFlow flow({1 << 20, 16});
  const PeerFlow::Size size{100, false};
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(flow.try_begin(size));
    static_cast<void>(flow.one_way_begun(size));
    flow.written(size);
    static_cast<void>(flow.given_back({static_cast<std::uint64_t>(i + 1), 100}));
    flow.one_way_failed(size);
    EXPECT_EQ(flow.numbers().calls, 0U);
    EXPECT_EQ(flow.numbers().bytes, 0U);
  }
  begin_one_way(flow, size);
  EXPECT_EQ(flow.numbers().calls, 1U) << "it counts on";
}

// One that is above any share would otherwise keep what it waits for from beginning.
TEST(PeerFlow, CallsOfHandlersBeginWhileALargeOneIsUnderWay) {
  PeerFlow flow({1 << 20, 100});
  const PeerFlow::Size large{900 << 10, false};
  EXPECT_TRUE(flow.try_begin(large));
  flow.written(large);
  EXPECT_TRUE(flow.try_begin({64 << 10, true}));
  std::vector<std::uint64_t> begun;
  EXPECT_TRUE(keep(flow, 1, {512 << 10, true}, begun)) << "no thread waits";
  EXPECT_TRUE(keep(flow, 2, {400 << 10, true}, begun));
  EXPECT_FALSE(keep(flow, 3, {400 << 10, true}, begun)) << "as many bytes as the limit wait";
  flow.end(large);
  EXPECT_EQ(begun, (std::vector<std::uint64_t>{1, 2}));
}

TEST(PeerFlow, FramesWaitForRoomAndGoInTheirOrder) {
  PeerFlow flow({1 << 20, 100});
  std::vector<int> gone;
  const int owner = 0;
  const auto wait = [&](int number, std::size_t bytes) {
    flow.wait_frame(bytes, &owner, [&gone, number](bool sent) {
      EXPECT_TRUE(sent);
      gone.push_back(number);
    });
  };
  flow.add_data(1 << 20);
  EXPECT_TRUE(flow.try_begin_frame(500 << 10)) << "replies do not keep it out";
  EXPECT_FALSE(flow.try_begin_frame(100 << 10)) << "more than half of the limit";
  wait(1, 900 << 10);
  wait(2, 100 << 10);
  EXPECT_TRUE(flow.many_frames());
  EXPECT_FALSE(flow.try_begin_frame(1)) << "others wait before it";
  EXPECT_EQ(flow.numbers().waiting_frames, 2U);
  EXPECT_EQ(flow.numbers().waiting_frame_bytes, std::size_t{1000} << 10);
  EXPECT_TRUE(gone.empty()) << "a large one goes alone";
  flow.frame_written(500 << 10);
  EXPECT_EQ(gone, (std::vector<int>{1}));
  EXPECT_FALSE(flow.many_frames());
  flow.frame_written(900 << 10);
  EXPECT_EQ(gone, (std::vector<int>{1, 2}));
  wait(3, 1 << 20);
  flow.give_up();
  EXPECT_EQ(gone, (std::vector<int>{1, 2, 3})) << "it is to fail";
}

TEST(PeerFlow, DroppedFramesAreToldOnceAndMakeRoom) {
  PeerFlow flow({1 << 20, 100});
  std::vector<int> gone, dropped;
  const int owners[2] = {};
  const auto wait = [&](int number, std::size_t bytes) {
    flow.wait_frame(bytes, &owners[number % 2],
                    [&, number](bool sent) { (sent ? gone : dropped).push_back(number); });
  };
  EXPECT_TRUE(flow.try_begin_frame(400 << 10));
  wait(1, 300 << 10);  // keeps those behind it waiting
  wait(2, 50 << 10);
  wait(3, 300 << 10);
  wait(4, 50 << 10);
  EXPECT_TRUE(flow.many_frames());
  flow.drop_frames(&owners[1]);
  EXPECT_EQ(dropped, (std::vector<int>{1, 3}));
  EXPECT_EQ(gone, (std::vector<int>{2, 4})) << "they have room now";
  EXPECT_EQ(flow.numbers().waiting_frames, 0U);
  EXPECT_EQ(flow.numbers().waiting_frame_bytes, 0U);
  flow.drop_frames(&owners[1]);
  EXPECT_EQ(dropped.size(), 2U);
  EXPECT_EQ(flow.numbers().frame_bytes, std::size_t{500} << 10);
}

TEST(PeerFlow, RepliesWaitForRoomAndGoInTheirOrder) {
  PeerFlow flow({1 << 20, 100});
  std::vector<int> gone;
  const auto wait = [&](int number, std::size_t bytes) {
    flow.add_data(bytes);
    flow.wait_reply(bytes, [&gone, number] { gone.push_back(number); });
  };
  const auto end = [&](std::size_t bytes) {
    flow.reply_ended(bytes);
    flow.data_written(bytes);
  };
  flow.add_data(900 << 10);
  EXPECT_TRUE(flow.try_begin_reply(900 << 10));
  flow.add_data(200 << 10);
  EXPECT_FALSE(flow.try_begin_reply(200 << 10)) << "more than the limit";
  flow.data_written(200 << 10);
  wait(1, 200 << 10);
  wait(2, 2 << 20);
  flow.add_data(1);
  EXPECT_FALSE(flow.try_begin_reply(1)) << "others wait before it";
  flow.data_written(1);
  EXPECT_EQ(flow.numbers().data_bytes, std::size_t{1100 + 2048} << 10);
  end(900 << 10);
  EXPECT_EQ(gone, (std::vector<int>{1})) << "a large one goes alone";
  end(200 << 10);
  EXPECT_EQ(gone, (std::vector<int>{1, 2}));
  wait(3, 1 << 10);
  flow.give_up();
  EXPECT_EQ(gone, (std::vector<int>{1, 2, 3})) << "it is to fail";
}

// Frames that wait are no reason to keep handlers from beginning, which is what makes replies.
TEST(PeerFlow, FramesDoNotKeepHandlersFromBeginning) {
  PeerFlow flow({1 << 20, 100});
  EXPECT_TRUE(flow.try_begin_frame(1 << 20));
  flow.wait_frame(1 << 20, nullptr, [](bool) {});
  EXPECT_FALSE(flow.many_replies());
  flow.add_data(600 << 10);
  EXPECT_TRUE(flow.many_replies());
  flow.give_up();
}

}  // namespace
}  // namespace peer_flow_test
