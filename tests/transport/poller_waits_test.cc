// Threads that sleep in a poller until what they wait for is there.
#include "tests/transport/polled_source.h"

namespace stitch::transport::poller_waits_test {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

// A thread that waits, asleep with the role.
class SleepingHelper {
 public:
  explicit SleepingHelper(Poller& poller, Clock::duration limit = seconds(60))
      : thread_([this, &poller, end = Clock::now() + limit] {
          while (!poller.help(done, end) && Clock::now() < end - seconds(1) && !stop) {
          }
          returned = true;
        }) {}
  ~SleepingHelper() {
    stop = true;
    done.set();
    thread_.join();
  }
  base::AwaitedFlag done;
  std::atomic<bool> stop{false};
  std::atomic<bool> returned{false};
  [[nodiscard]] std::thread::id id() const { return thread_.get_id(); }

 private:
  std::thread thread_;
};

TEST(PollerWaits, TrafficWakesTheThreadThatWaitsForIt) {
  for (const bool busy : {false, true}) {
    const Joined started(busy);
    const auto source = std::make_shared<Source>();
    SleepingHelper helper(*started.poller);
    std::atomic<int> there{0};
    source->on_ready = [&] {
      if (std::this_thread::get_id() == helper.id()) there.fetch_add(1);
      return true;
    };
    add(*started.poller, source);
    for (int i = 1; i <= 20; ++i) {
      std::this_thread::sleep_for(milliseconds(4));  // the helper polls for 2 ms, then sleeps
      source->signal();
      ASSERT_TRUE(source->wait_signals(i));
    }
    EXPECT_GT(there.load(), 10) << "another thread was woken";
    EXPECT_FALSE(helper.returned.load());
  }
}

TEST(PollerWaits, AnotherThreadWakesTheOneThatWaits) {
  for (int i = 0; i < 100; ++i) {
    const Joined started(i % 2 == 0);
    SleepingHelper helper(*started.poller);
    // Before, in and after the helper's way to sleep.
    std::this_thread::sleep_for(std::chrono::microseconds(100 * (i % 50)));
    helper.done.set();
    ASSERT_TRUE(wait_until([&] { return helper.returned.load(); })) << i;
  }
}

TEST(PollerWaits, ASleepingHelperTakesUpWhatIsAddedAndAskedFor) {
  const Joined started(true);
  Poller& poller = *started.poller;
  SleepingHelper helper(poller);
  for (int i = 0; i < 200; ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(i % 7 * 300));  // polling, or asleep
    const auto source = std::make_shared<Source>(true);
    const auto asked = std::make_shared<std::atomic<bool>>(false);
    source->on_poll = [asked] { return asked->exchange(false); };
    const auto id = add(poller, source);
    *asked = true;
    poller.poll_soon(id);
    ASSERT_TRUE(wait_until([&] { return !asked->load(); })) << i;
    poller.remove(id);
  }
}

// The calling thread expects an answer and does not read. Returns the signals that were read all
// the same.
int woken_while_expected(Joined& started, Source& source) {
  Poller& poller = *started.poller;
  started.lose_core();
  base::AnswerWait::request_follows();
  poller.expect_help();
  source.signal();
  std::this_thread::sleep_for(milliseconds(50));  // an own thread would read within this
  return source.signals.load();
}

TEST(PollerWaits, WhatComesBeforeTheThreadThatWaitsForItWakesNoOther) {
  Joined started(true);
  Poller& poller = *started.poller;
  const auto source = std::make_shared<Source>();
  base::AwaitedFlag done;
  source->on_ready = [&] {
    done.set();
    return true;
  };
  add(poller, source);
  std::this_thread::sleep_for(milliseconds(50));  // its threads take it up and sleep
  for (int i = 0; i < 5; ++i) {
    base::AnswerWait::set(true);
    done.clear();
    EXPECT_EQ(woken_while_expected(started, *source), 2 * i) << "an own thread was woken";
    EXPECT_TRUE(poller.help(done, Clock::now() + seconds(10)));
    source->signal();
    EXPECT_TRUE(source->wait_signals(2 * i + 2)) << "own threads read again";
    std::this_thread::sleep_for(milliseconds(20));  // own threads sleep again
  }
  base::AnswerWait::set(false);
  poller.join();
}

TEST(PollerWaits, OwnThreadsReadWhereAThreadDoesNotComeToWait) {
  Joined started(true);
  Poller& poller = *started.poller;
  const auto source = std::make_shared<Source>();
  add(poller, source);
  std::this_thread::sleep_for(milliseconds(50));  // as above
  for (int i = 0; i < 5; ++i) {
    base::AnswerWait::set(true);
    EXPECT_EQ(woken_while_expected(started, *source), i);
    i % 2 == 0 ? base::AnswerWait::give_up() : static_cast<void>(base::AnswerWait::set(false));
    EXPECT_TRUE(source->wait_signals(i + 1)) << i;
    std::this_thread::sleep_for(milliseconds(20));  // own threads sleep again
  }
  base::AnswerWait::set(false);
}

TEST(PollerWaits, ARequestThatIsNotWaitedForIsReadByOwnThreads) {
  Joined busy(true);
  const Joined idle(false);
  busy.lose_core();
  for (Poller* const poller : {busy.poller.get(), idle.poller.get()}) {
    const auto source = std::make_shared<Source>();
    add(*poller, source);
    poller->expect_help();  // in no scope
    base::AnswerWait::set(true);
    poller->expect_help();  // no request
    if (poller == idle.poller.get()) base::AnswerWait::request_follows();
    poller->expect_help();
    source->signal();
    EXPECT_TRUE(source->wait_signals(1));
    base::AnswerWait::set(false);
  }
}

TEST(PollerWaits, JoinsWhileAThreadSleepsWithTheRole) {
  for (int i = 0; i < 50; ++i) {
    const Joined started(i % 2 == 0);
    SleepingHelper helper(*started.poller);
    // Before, in and after the helper's way to sleep.
    std::this_thread::sleep_for(std::chrono::microseconds(100 * (i % 50)));
    const auto begin = Clock::now();
    started.poller->join();
    EXPECT_LT(Clock::now() - begin, seconds(15));
    helper.stop = true;
    ASSERT_TRUE(wait_until([&] { return helper.returned.load(); })) << i;
  }
}

}  // namespace
}  // namespace stitch::transport::poller_waits_test
