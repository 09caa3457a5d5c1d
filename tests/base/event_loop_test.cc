#include <future>

#include "stitch/base/event_loop.h"
#include "tests/support/plain_test.h"

namespace stitch::base::event_loop_test {
namespace {

using namespace std::chrono_literals;
using Clock = EventLoop::Clock;

// Waits until everything posted so far has run.
void drain(EventLoop& loop) {
  std::promise<void> done;
  ASSERT_TRUE(loop.post([&] { done.set_value(); }));
  ASSERT_EQ(done.get_future().wait_for(30s), std::future_status::ready);
}

TEST(EventLoop, RunsPostedTasksInOrderOnItsThread) {
  EventLoop loop("test loop");
  std::vector<int> order;
  bool on_thread = false;
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(loop.post([&order, i] { order.push_back(i); }));
  loop.post([&] { on_thread = loop.on_loop_thread(); });
  drain(loop);
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
  EXPECT_TRUE(on_thread);
  EXPECT_FALSE(loop.on_loop_thread());
}

TEST(EventLoop, TasksPostedFromManyThreadsAllRun) {
  EventLoop loop("test loop");
  std::atomic<int> count = 0;
  {
    testing::on_each(8, [&](int t) {
      for (int i = 0; i < 1000; ++i) loop.post([&] { ++count; });
    });
  }
  drain(loop);
  EXPECT_EQ(count, 8000);
}

TEST(EventLoop, TimersRunInOrderOfTheirDeadlinesAndNeverEarly) {
  EventLoop loop("test loop");
  const auto start = Clock::now();
  std::vector<int> order;
  std::promise<void> done;
  bool early = false;
  const auto timer = [&](int after_ms, int name, bool last) {
    const auto when = start + std::chrono::milliseconds(after_ms);
    loop.call_at(when, [&, when, name, last] {
      early = early || Clock::now() < when;
      order.push_back(name);
      if (last) done.set_value();
    });
  };
  timer(60, 4, true);
  timer(20, 2, false);
  timer(40, 3, false);
  timer(-5, 1, false);
  ASSERT_EQ(done.get_future().wait_for(30s), std::future_status::ready);
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3, 4}));
  EXPECT_FALSE(early);
}

TEST(EventLoop, ACancelledTimerNeverRuns) {
  EventLoop loop("test loop");
  std::atomic<bool> ran = false;
  const auto timer = loop.call_at(Clock::now() + 1h, [&] { ran = true; });
  EXPECT_NE(timer, 0u);
  EXPECT_TRUE(loop.cancel(timer));
  EXPECT_FALSE(loop.cancel(timer));
  EXPECT_FALSE(loop.cancel(timer + 1000));
  loop.close();
  EXPECT_FALSE(ran);
}

TEST(EventLoop, ATimerCannotBeCancelledWhileItRunsOrAfter) {
  EventLoop loop("test loop");
  std::promise<bool> inside;
  std::promise<EventLoop::TimerId> id;
  auto known = id.get_future();
  const auto timer =
      loop.call_at(Clock::now(), [&] { inside.set_value(loop.cancel(known.get())); });
  id.set_value(timer);
  EXPECT_FALSE(inside.get_future().get());
  EXPECT_FALSE(loop.cancel(timer));
}

TEST(EventLoop, EachTimerEitherRunsOrIsCancelled) {
  EventLoop loop("test loop");
  std::atomic<int> ran = 0;
  std::atomic<int> cancelled = 0;
  {
    testing::on_each(4, [&](int t) {
      for (int i = 0; i < 2000; ++i) {
        const auto timer =
            loop.call_at(Clock::now() + std::chrono::microseconds(i % 50), [&] { ++ran; });
        if (i % 3 == 0) std::this_thread::yield();
        if (loop.cancel(timer)) ++cancelled;
      }
    });
  }
  std::promise<void> after;
  loop.call_at(Clock::now() + 5ms, [&] { after.set_value(); });
  after.get_future().wait();
  EXPECT_EQ(ran + cancelled, 8000);
}

TEST(EventLoop, ATimerThatSetsItselfForThePastDoesNotStarveOthers) {
  EventLoop loop("test loop");
  std::atomic<bool> stop = false;
  std::function<void()> again = [&] {
    if (!stop) loop.call_at(Clock::time_point::min(), [&] { again(); });
  };
  again();
  std::promise<void> other;
  loop.call_at(Clock::now() + 2ms, [&] { other.set_value(); });
  EXPECT_EQ(other.get_future().wait_for(30s), std::future_status::ready);
  drain(loop);
  stop = true;
  loop.close();  // a timer that is still pending refers to locals
}

TEST(EventLoop, CloseRunsWhatWasPostedDropsTimersAndRefusesMore) {
  const auto timer_state = std::make_shared<int>(0);
  EventLoop loop("test loop");
  std::promise<void> release;
  std::atomic<int> ran = 0;
  loop.post([held = release.get_future().share()] { held.wait(); });
  for (int i = 0; i < 10; ++i) loop.post([&] { ++ran; });
  loop.call_at(Clock::now() + 1h, [timer_state] { ++*timer_state; });
  std::jthread closer([&] { loop.close(); });
  release.set_value();
  loop.close();
  closer.join();
  EXPECT_EQ(ran, 10);
  EXPECT_EQ(timer_state.use_count(), 1) << "the timer's task was not destroyed";
  EXPECT_EQ(*timer_state, 0);
  EXPECT_FALSE(loop.post([&] { ++ran; }));
  const auto timer = loop.call_at(Clock::now(), [&] { ++ran; });
  EXPECT_NE(timer, 0u);
  EXPECT_FALSE(loop.cancel(timer));
  EXPECT_EQ(ran, 10);
}

TEST(EventLoop, ADroppedTaskMayUseTheLoop) {
  EventLoop loop("test loop");
  bool refused = false;
  const std::shared_ptr<void> at_end(nullptr, [&](void*) { refused = !loop.post([] {}); });
  std::weak_ptr<void> watch = at_end;
  loop.call_at(Clock::now() + 1h, [held = std::shared_ptr<void>(
                                       nullptr, [&](void*) { refused = !loop.post([] {}); })] {});
  loop.close();
  EXPECT_TRUE(refused);
}

TEST(EventLoop, AddingAndCancellingATimerIsCheap) {
  EventLoop loop("test loop");
  loop.call_at(Clock::now() + 1h, [] {});
  constexpr int kTimers = 200'000;
  const auto deadline = Clock::now() + 2h;
  const auto start = Clock::now();
  for (int i = 0; i < kTimers; ++i)
    loop.cancel(loop.call_at(deadline + std::chrono::microseconds(i), [] {}));
  const auto each =
      std::chrono::duration<double, std::nano>(Clock::now() - start).count() / kTimers;
  RecordProperty("nanoseconds", static_cast<int>(each));
  EXPECT_LT(each, 50'000) << "the loop was woken, or the timers are not in order";
}

}  // namespace
}  // namespace stitch::base::event_loop_test
