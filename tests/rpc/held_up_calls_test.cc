// Calls of handlers that are held up behind one of the program that waits for room, above all those
// that ask to be refused where there is none.
#include "tests/support/world_test.h"

namespace held_up_calls_test {  // its functions are registered under their full names
namespace {

using namespace std::chrono_literals;
using stitch::Error;
using stitch::ErrorCode;
using stitch::Future;
using stitch::rpc::PeerFlow;
using stitch::rpc::Precedence;
using stitch::testing::Cluster;
using stitch::testing::eventually;
using stitch::testing::Gate;
using Ids = std::vector<std::uint64_t>;

// ---- one flow

// Two of handlers are under way, and from some time on others are held up behind 1.
class HeldUp : public ::testing::Test {
 protected:
  HeldUp() {
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(flow.try_begin(under_way));
      flow.written(under_way);
    }
  }
  void hold(const PeerFlow::Size& size, Precedence precedence = {}) {
    EXPECT_EQ(keep({size, 1, {}, std::move(precedence)}), PeerFlow::Kept::waits);
    EXPECT_TRUE(flow.look(begin));
    EXPECT_TRUE(flow.look(begin + 100ms));
    EXPECT_FALSE(flow.try_begin({100, true}));
  }
  PeerFlow::Kept keep(PeerFlow::Waiting request) {
    request.go = [this, id = request.id] {
      begun.push_back(id);
      return true;
    };
    return flow.wait(request, Time::max(), [] { return true; });
  }
  PeerFlow::Kept keep_refusing(std::uint64_t id, const PeerFlow::Size& size,
                               Precedence precedence = {}) {
    PeerFlow::Waiting request{size, id, {}, std::move(precedence), false, true};
    request.refused = [this, id] { refused.push_back(id); };
    return keep(std::move(request));
  }
  // The two that are under way end.
  void let_go() {
    for (int i = 0; i < 2; ++i) flow.end(under_way);
  }
  void expect_nothing_waits() {
    EXPECT_FALSE(flow.any_wait());
    EXPECT_EQ(flow.numbers().waiting, 0U);
    EXPECT_EQ(flow.numbers().waiting_bytes, 0U);
  }

  using Time = PeerFlow::Clock::time_point;
  PeerFlow flow{{1 << 20, 100}};
  const PeerFlow::Size under_way{50 << 10, true}, inside{200 << 10, true}, small{100, true};
  const PeerFlow::Size large{600 << 10, false}, most{900 << 10, false};
  const Time begin = PeerFlow::Clock::now() + 1h;  // no time passes by itself
  Ids begun, refused;
};

TEST_F(HeldUp, OneThatRefusesWaitsUntilItIsLetGo) {
  hold(large);
  EXPECT_EQ(keep_refusing(2, inside), PeerFlow::Kept::waits);
  EXPECT_EQ(keep_refusing(3, small), PeerFlow::Kept::waits);
  EXPECT_TRUE(begun.empty());
  let_go();
  EXPECT_EQ(begun, (Ids{1, 2, 3}));
  EXPECT_TRUE(refused.empty());
  expect_nothing_waits();
}

TEST_F(HeldUp, OneThatRefusesIsLetGoAfterATime) {
  hold(large);
  EXPECT_EQ(keep_refusing(2, inside), PeerFlow::Kept::waits);
  EXPECT_TRUE(flow.look(begin + 199ms));
  EXPECT_TRUE(begun.empty());
  EXPECT_TRUE(flow.look(begin + 200ms));
  EXPECT_EQ(begun, (Ids{2}));
  EXPECT_TRUE(refused.empty());
}

TEST_F(HeldUp, OneThatRefusesIsLetGoBeforeItWouldFillWhatMayWait) {
  hold(large);
  EXPECT_EQ(keep_refusing(2, inside), PeerFlow::Kept::waits);
  EXPECT_EQ(keep_refusing(3, inside), PeerFlow::Kept::waits);
  EXPECT_TRUE(begun.empty());
  EXPECT_EQ(keep_refusing(4, inside), PeerFlow::Kept::waits);
  EXPECT_EQ(begun, (Ids{2, 3, 4}));
  EXPECT_TRUE(refused.empty());
}

TEST_F(HeldUp, OneThatRefusesIsRefusedAtOnceWhereTheLimitsAreExceeded) {
  hold(large);
  EXPECT_EQ(keep_refusing(2, {1000 << 10, true}), PeerFlow::Kept::full);
  EXPECT_EQ(keep_refusing(3, {300 << 10, true}), PeerFlow::Kept::waits);
  EXPECT_EQ(keep_refusing(4, {700 << 10, true}), PeerFlow::Kept::full)
      << "3 has its room before it";
  EXPECT_EQ(keep_refusing(5, inside), PeerFlow::Kept::waits);
  EXPECT_EQ(keep_refusing(6, {100, false}), PeerFlow::Kept::full) << "the program's own";
  EXPECT_TRUE(begun.empty()) << "for none of these are the others let go";
  EXPECT_TRUE(refused.empty()) << "and what is not kept is its caller's";
  flow.drop(3);
  EXPECT_EQ(keep_refusing(7, {300 << 10, true}), PeerFlow::Kept::waits);
}

// It does not wait for room.
TEST_F(HeldUp, OneThatRefusesAndHasNoRoomOnceItIsLetGoIsRefused) {
  hold(most);
  EXPECT_EQ(keep_refusing(2, inside), PeerFlow::Kept::waits);
  EXPECT_EQ(keep_refusing(3, small), PeerFlow::Kept::waits);
  let_go();
  EXPECT_EQ(begun, (Ids{1, 3}));
  EXPECT_EQ(refused, (Ids{2}));
  expect_nothing_waits();
  EXPECT_EQ(keep_refusing(4, inside), PeerFlow::Kept::full);
  EXPECT_EQ(refused, (Ids{2}));
}

TEST_F(HeldUp, OneThatRefusesIsRefusedBehindOneThatWaitsForRoom) {
  hold(most);
  EXPECT_EQ(keep({inside, 2, {}}), PeerFlow::Kept::waits);
  EXPECT_EQ(keep_refusing(3, small), PeerFlow::Kept::waits);
  let_go();
  EXPECT_EQ(begun, (Ids{1}));
  EXPECT_EQ(refused, (Ids{3}));
  EXPECT_EQ(flow.numbers().waiting, 1U);
  flow.written(most);
  flow.end(most);
  EXPECT_EQ(begun, (Ids{1, 2}));
  expect_nothing_waits();
}

// No future could tell that.
TEST_F(HeldUp, OneThatCannotBeToldThatItIsRefusedWaitsForRoom) {
  hold(most);
  EXPECT_EQ(keep({inside, 2, {}, {}, false, true}), PeerFlow::Kept::waits);
  let_go();
  EXPECT_EQ(begun, (Ids{1}));
  flow.written(most);
  flow.end(most);
  EXPECT_EQ(begun, (Ids{1, 2}));
}

TEST_F(HeldUp, OneThatRefusesMayFollowOthersThatAreHeldUp) {
  hold(most);
  EXPECT_EQ(keep_refusing(2, inside, {{7}, {7}}), PeerFlow::Kept::waits);
  EXPECT_EQ(keep_refusing(3, small, {{7}, {7}}), PeerFlow::Kept::waits);
  EXPECT_EQ(keep_refusing(4, small, {{7}, {7}}), PeerFlow::Kept::waits);
  let_go();
  EXPECT_EQ(refused, (Ids{2}));
  EXPECT_EQ(begun, (Ids{1, 3, 4}));
  expect_nothing_waits();
}

TEST_F(HeldUp, OneThatRefusesDoesNotFollowOneOfTheProgram) {
  hold(large, {{7}, {7}});
  EXPECT_EQ(keep_refusing(2, small, {{7}, {7}}), PeerFlow::Kept::full);
  EXPECT_EQ(keep_refusing(3, small, {{7}, {8}}), PeerFlow::Kept::waits) << "of another order";
}

TEST_F(HeldUp, WhatIsDroppedIsNotRefused) {
  hold(most);
  EXPECT_EQ(keep_refusing(2, inside), PeerFlow::Kept::waits);
  flow.drop(2);
  let_go();
  EXPECT_EQ(begun, (Ids{1}));
  EXPECT_TRUE(refused.empty());
  expect_nothing_waits();
}

// Else many that were held up together would be.
TEST(HeldUpTogether, NoneIsRefusedForWhatTheTransportHasToWriteFirst) {
  constexpr std::uint64_t kCalls = 40;
  PeerFlow flow({16 << 20, 100});
  Ids begun, refused;
  const auto begin = PeerFlow::Clock::now() + 1h;
  const PeerFlow::Size busy{1 << 20, true}, alone{12 << 20, false}, each{32 << 10, true};
  ASSERT_TRUE(flow.try_begin(busy));
  flow.written(busy);
  const auto wait = [&](std::uint64_t id, const PeerFlow::Size& size, bool refuses) {
    PeerFlow::Waiting request{size, id, {}, {}, false, refuses};
    request.go = [&, id] {
      begun.push_back(id);
      return true;
    };
    if (refuses) request.refused = [&, id] { refused.push_back(id); };
    return flow.wait(request, PeerFlow::Clock::time_point::max(), [] { return true; });
  };
  EXPECT_EQ(wait(1, alone, false), PeerFlow::Kept::waits);
  EXPECT_TRUE(flow.look(begin));
  EXPECT_TRUE(flow.look(begin + 100ms));
  for (std::uint64_t i = 0; i < kCalls; ++i)
    EXPECT_EQ(wait(2 + i, each, true), PeerFlow::Kept::waits);
  flow.end(busy);
  EXPECT_GT(begun.size(), 1U);
  EXPECT_LT(begun.size(), 1 + kCalls) << "more than may be unwritten";
  EXPECT_EQ(wait(2 + kCalls, each, true), PeerFlow::Kept::full) << "not held up";
  for (std::uint64_t i = 0; i < kCalls; ++i) flow.written(each);
  EXPECT_EQ(begun.size(), 1 + kCalls);
  EXPECT_TRUE(refused.empty());
}

// The caller has found it held up, and comes too late to wait for the end of that.
TEST(HeldUpNoMore, OneThatRefusesBeginsAtOnceOrNotAtAll) {
  PeerFlow flow({1 << 20, 100});
  int begun = 0;
  const auto wait = [&](const PeerFlow::Size& size) {
    PeerFlow::Waiting request{size, 1, [&] { return ++begun == 1; }, {}, false, true};
    return flow.wait(request, PeerFlow::Clock::time_point::max(), [] { return true; });
  };
  EXPECT_EQ(wait({900 << 10, true}), PeerFlow::Kept::waits);
  EXPECT_EQ(begun, 1);
  EXPECT_EQ(flow.numbers().calls, 1U);
  EXPECT_EQ(wait({200 << 10, true}), PeerFlow::Kept::full);
  EXPECT_EQ(begun, 1);
  EXPECT_EQ(wait({100, true}), PeerFlow::Kept::waits) << "not wanted any more";
  EXPECT_EQ(begun, 2);
  EXPECT_EQ(flow.numbers().calls, 1U);
  EXPECT_FALSE(flow.any_wait());
}

// It is told to calls whose time is up.
TEST_F(HeldUp, ForHowLongAndBehindWhatIsKnown) {
  const auto before = PeerFlow::Clock::now();
  const auto since = before - 12700ms;  // holds last 5 s by now
  EXPECT_EQ(keep({large, 1, {}}), PeerFlow::Kept::waits);
  EXPECT_TRUE(flow.look(since));
  EXPECT_EQ(flow.held_up(since, before + 1h).time, 0ms);
  EXPECT_TRUE(flow.look(before));
  const auto after = PeerFlow::Clock::now();
  auto held = flow.held_up(after, after + 80ms);
  EXPECT_EQ(held.time, 80ms);
  EXPECT_EQ(held.bytes, large.bytes);
  EXPECT_EQ(held.overtaken, after + 80ms - since);
  held = flow.held_up(since, after + 80ms);
  EXPECT_GE(held.time, 80ms);
  EXPECT_LE(held.time, after + 80ms - before);
  EXPECT_EQ(flow.held_up(since, before).time, 0ms);
  let_go();
  const auto end = PeerFlow::Clock::now();
  held = flow.held_up(after, end + 1h);
  EXPECT_GE(held.time, 0ms);
  EXPECT_LE(held.time, end - after);
  EXPECT_EQ(flow.held_up(end, end + 1h).time, 0ms);
}

// ---- workers

Gate held_gate, large_gate;
std::atomic<bool> quiet{false};
std::atomic<int> answered{0}, refusals{0};

int take_a_time() {
  std::this_thread::sleep_for(20ms);  // calls of several threads overlap
  return ++answered;
}
std::int64_t count_elements(const at::Tensor& tensor) { return tensor.numel(); }
std::int64_t count_behind_gate(const at::Tensor& tensor) {
  large_gate.pass();
  return tensor.numel();
}
void pass_held_gate() { held_gate.pass(); }

// These run at worker0, and their calls to worker1 are those of handlers.
void keep_busy_refusing() {
  while (!quiet) {
    try {
      stitch::rpc_sync<take_a_time>({.to = "worker1", .when_full = stitch::WhenFull::refuse});
    } catch (const Error&) {
      ++refusals;
    }
  }
}
void hold_room() { stitch::rpc_sync<pass_held_gate>("worker1"); }
std::string call_until_refused() {
  const auto tensor = at::zeros({1 << 20}, at::kByte);
  for (;;) {
    const auto answer = stitch::rpc_async<count_elements>(
        {.to = "worker1", .when_full = stitch::WhenFull::refuse}, tensor);
    try {
      static_cast<void>(answer.get());
    } catch (const Error& error) {
      return error.code() == ErrorCode::overloaded ? error.what() : "another error";
    }
  }
}

class HeldUpWorkers : public ::testing::Test {
 protected:
  HeldUpWorkers() {
    held_gate.close();
    large_gate.close();
    quiet = false;
    answered = refusals = 0;
  }
  std::int64_t waiting() { return cluster[0].debug_info().at("rpc.calls_waiting"); }

  Cluster cluster{2, [](stitch::Options& options) {
                    options.max_inflight_bytes = 4 << 20;
                    options.num_threads = 8;
                  }};
};

TEST_F(HeldUpWorkers, CallsOfHandlersThatRefuseAreNotRefusedBecauseTheyAreHeldUp) {
  std::vector<Future<void>> busy;
  for (int i = 0; i < 6; ++i) busy.push_back(cluster[1].rpc_async<keep_busy_refusing>("worker0"));
  EXPECT_TRUE(eventually([] { return answered > 20; }));
  const auto large = at::zeros({3 << 20}, at::kByte);
  EXPECT_EQ(stitch::rpc_sync<count_elements>({.to = "worker1", .timeout = 10s}, large), 3 << 20);
  const int then = answered;
  EXPECT_TRUE(eventually([&] { return answered > then + 20; })) << "they go on";
  quiet = true;
  for (const auto& each : busy) each.get();
  EXPECT_EQ(refusals, 0);
}

TEST_F(HeldUpWorkers, ACallThatRefusesFailsIfTheCallBeforeItTakesItsRoom) {
  const auto holds = cluster[1].rpc_async<hold_room>("worker0");
  ASSERT_TRUE(held_gate.wait_for_arrival());
  const auto large =
      stitch::rpc_async<count_behind_gate>("worker1", at::zeros({7 << 19}, at::kByte));
  const auto text = cluster[1].rpc_async<call_until_refused>("worker0");
  EXPECT_TRUE(eventually([&] { return waiting() == 2; })) << "the large one, and one held up";
  held_gate.open();
  EXPECT_NE(text.get().find("was not made: 1 calls of "), std::string::npos) << text.get();
  large_gate.open();
  EXPECT_EQ(large.get(), 7 << 19);
  holds.get();
}

}  // namespace
}  // namespace held_up_calls_test
