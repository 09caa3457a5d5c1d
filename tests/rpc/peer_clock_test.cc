#include "stitch/rpc/agent/peer_clock.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <random>
#include <thread>
#include <vector>

namespace stitch::rpc::peer_clock_test {
namespace {

using namespace std::chrono_literals;
using std::chrono::nanoseconds;
using Clock = PeerClock::Clock;
constexpr auto kMax = std::numeric_limits<std::int64_t>::max();
constexpr auto kMin = std::numeric_limits<std::int64_t>::min();

Clock::time_point at(nanoseconds time) { return Clock::time_point(time); }
// A request with `left`, written when the caller's clock showed `written`.
TimeLeft request(nanoseconds left, nanoseconds written) {
  return {left.count(), (written + left).count()};
}

TEST(PeerClock, OneClockTellsTheDeadline) {
  PeerClock clock(true);
  EXPECT_EQ(clock.due(at(1000s), request(100ms, 1000s)), at(1000s + 100ms));
  EXPECT_EQ(clock.due(at(1000s), request(100ms, 1000s - 70ms)), at(1000s + 30ms));
  EXPECT_EQ(clock.due(at(1000s), request(100ms, 1000s - 300ms)), at(1000s - 200ms));
  EXPECT_EQ(clock.due(at(1000s), request(100ms, 1000s + 5ms)), at(1000s + 100ms))
      << "written later than it came: no more than was left";
}

TEST(PeerClock, ACallWithoutALimitHasNone) {
  PeerClock one(true), two(false);
  EXPECT_EQ(one.due(at(1s), {}), Clock::time_point::max());
  EXPECT_EQ(two.due(at(1s), {}), Clock::time_point::max());
  EXPECT_EQ(two.due(at(1s), {0, 77}), Clock::time_point::max());
  EXPECT_EQ(two.due(at(1s), {kMax - 5, 0}), Clock::time_point::max()) << "longer than time goes";
  EXPECT_EQ(one.due(at(1s), {1000, 0}), at(1s + 1us)) << "it does not say by its clock";
}

TEST(PeerClock, WhatARequestTookLongerThanTheQuickestCounts) {
  for (const nanoseconds difference : {nanoseconds(0), nanoseconds(3600s), nanoseconds(-900s)}) {
    PeerClock clock(false);
    const auto due = [&](nanoseconds sent, nanoseconds way, nanoseconds left) {
      return clock.due(at(sent + way), request(left, sent + difference));
    };
    // The first one sets the measure, and a quicker one a better one.
    EXPECT_EQ(due(1000s, 50ms, 100ms), at(1000s + 150ms));
    EXPECT_EQ(due(1001s, 1ms, 100ms), at(1001s + 101ms));
    // 10 ms: 15 s of drift at most, and what has passed since.
    const auto late = due(1002s, 300ms, 100ms);
    EXPECT_GE(late, at(1002s + 101ms));
    EXPECT_LE(late, at(1002s + 101ms + 10ms));
    const auto still = due(1003s, 301ms, 2s);
    EXPECT_GE(still, at(1003s + 2s + 1ms));
    EXPECT_LE(still, at(1003s + 2s + 11ms));
    // Also in the window after it, but not when nothing has come for long.
    EXPECT_LE(due(1007s, 400ms, 1s), at(1008s + 11ms));
    EXPECT_EQ(due(1060s, 400ms, 1s), at(1061s + 400ms));
  }
}

TEST(PeerClock, IsNotEarlyWhileClocksDrift) {
  for (const int drift_ppm : {500, -500, 50, -50}) {
    PeerClock clock(false);
    std::mt19937_64 random(7);
    for (int i = 0; i < 200'000; ++i) {
      const nanoseconds sent = 100s + i * nanoseconds(90ms);  // 5 hours
      const nanoseconds there = sent + nanoseconds(sent.count() / 1'000'000 * drift_ppm);
      const nanoseconds way = nanoseconds(1ms) * (random() % 8 == 0 ? 40 : 1);
      const nanoseconds left = 100ms;
      const auto due = clock.due(at(sent + way), request(left, there));
      ASSERT_GE(due, at(sent + left)) << i;
      ASSERT_LE(due, at(sent + left + way)) << i;
      ASSERT_LE(due, at(sent + left + 30ms)) << i << ": it does not notice what took 40 ms";
    }
  }
}

TEST(PeerClock, TakesWhateverARequestSays) {
  const std::int64_t values[] = {kMin, kMin + 1, -1, 1, 1'000'000, kMax - 1, kMax};
  for (const bool shared : {true, false}) {
    PeerClock clock(shared);
    for (int round = 0; round < 3; ++round) {
      for (const std::int64_t left : values) {
        if (left <= 0) continue;
        for (const std::int64_t deadline : values) {
          for (const auto now : {at(1ns), at(1000s), at(1000s + 6s * round)}) {
            const auto due = clock.due(now, {left, deadline});
            if (left < 1'000'001) {
              EXPECT_LE(due, now + nanoseconds(left));
            }
          }
        }
      }
    }
  }
}

TEST(PeerClock, ThreadsUseItAtTheSameTime) {
  PeerClock clock(false);
  std::atomic<int> late{0};
  std::vector<std::jthread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 100'000; ++i) {
        const nanoseconds sent = 1000s + i * nanoseconds(1ms);
        const nanoseconds way = i % 100 == 99 ? nanoseconds(2s) : nanoseconds(1ms);
        const auto due = clock.due(at(sent + way), request(1s, sent - 77s));
        // Threads are at different places of the time that is made up here.
        if (way > 1s && due < at(sent + way)) ++late;
      }
    });
  }
  threads.clear();
  EXPECT_GT(late, 0);
}

}  // namespace
}  // namespace stitch::rpc::peer_clock_test
