// The poller by itself, and what an endpoint costs that has nothing to do.
#include <time.h>

#include <future>
#include <new>

#include "stitch/transport/stream/stream_endpoint.h"
#include "tests/transport/polled_source.h"

namespace stitch::transport::poller_test {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(Poller, CallsASourceWhenItsDescriptorIsReady) {
  const Joined started;
  Poller& poller = *started.poller;
  for (const bool cheap : {false, true}) {
    const auto source = std::make_shared<Source>(cheap);
    const auto id = add(poller, source);
    for (int i = 1; i <= 200; ++i) {
      source->signal();
      ASSERT_TRUE(source->wait_signals(i)) << i;
    }
    EXPECT_TRUE(wait_until([&] { return source->asleep.load(); }))
        << "the thread sleeps when nothing comes";
    poller.remove(id);
  }
  poller.join();  // before what its sources refer to is destroyed
}

TEST(Poller, ASourceMayRemoveItselfAndOthers) {
  const Joined started;
  Poller& poller = *started.poller;
  const auto first = std::make_shared<Source>();
  const auto second = std::make_shared<Source>();
  const auto first_id = poller.new_id();
  const auto second_id = add(poller, second);
  first->on_ready = [&] {
    EXPECT_TRUE(poller.on_this_thread());
    poller.remove(first_id);
    poller.remove(second_id);
    return true;
  };
  poller.add(first_id, first->fd.get(), first);
  EXPECT_FALSE(poller.on_this_thread());
  first->signal();
  ASSERT_TRUE(first->wait_signals(1));
  const auto third = std::make_shared<Source>();
  add(poller, third);
  first->signal();
  second->signal();
  for (int i = 1; i <= 20; ++i) {
    third->signal();
    ASSERT_TRUE(third->wait_signals(i));
  }
  EXPECT_EQ(first->signals.load(), 1);
  EXPECT_EQ(second->signals.load(), 0);
  poller.join();  // before what its sources refer to is destroyed
}

TEST(Poller, APausedSourceWaits) {
  const Joined started;
  Poller& poller = *started.poller;
  const auto paused = std::make_shared<Source>();
  const auto other = std::make_shared<Source>();
  const auto id = add(poller, paused);
  add(poller, other);
  poller.pause(id, true);
  paused->signal();
  for (int i = 1; i <= 20; ++i) {
    other->signal();
    ASSERT_TRUE(other->wait_signals(i));
  }
  EXPECT_EQ(paused->signals.load(), 0);
  poller.pause(id, false);
  EXPECT_TRUE(paused->wait_signals(1));
  poller.join();  // before what its sources refer to is destroyed
}

TEST(Poller, WhatIsDeliveredWakesAThreadThatHelps) {
  const Joined started;
  Poller& poller = *started.poller;
  base::AwaitedFlag done;
  const auto source = std::make_shared<Source>();
  source->on_ready = [&] {
    done.set();
    return true;
  };
  add(poller, source);
  for (int i = 0; i < 200; ++i) {
    done.clear();
    source->signal();
    EXPECT_TRUE(
        wait_until([&] { return poller.help(done, Clock::now() + seconds(5)); }, seconds(10)));
  }
  poller.join();  // before what its sources refer to is destroyed
}

TEST(Poller, ABusySourceDoesNotKeepTheOthersWaiting) {
  for (const bool cheap : {true, false}) {
    SCOPED_TRACE(cheap ? "cheap" : "with system calls");
    const Joined started;
    Poller& poller = *started.poller;
    std::atomic<bool> busy_now{false};
    const auto busy = std::make_shared<Source>(cheap);
    busy->on_poll = [&] { return busy_now.load(); };
    add(poller, busy);
    const auto quiet = std::make_shared<Source>();
    add(poller, quiet);
    quiet->signal();
    ASSERT_TRUE(quiet->wait_signals(1));
    busy_now = true;
    const int before = busy->polls.load();
    // After so many rounds the quiet one is not active any more, and must still be noticed.
    ASSERT_TRUE(wait_until([&] {
      busy->signal();
      return busy->polls.load() > before + 100'000;
    }));
    quiet->signal();
    EXPECT_TRUE(wait_until([&] { return quiet->signals.load() == 2; }, seconds(3)))
        << "it waits while the other one is busy";
    // And a thread that helps does not, either.
    base::AwaitedFlag never;
    std::thread helper([&] { static_cast<void>(poller.help(never, Clock::now() + seconds(3))); });
    quiet->signal();
    EXPECT_TRUE(wait_until([&] { return quiet->signals.load() == 3; }, seconds(3)))
        << "it waits while a thread helps";
    busy_now = false;
    helper.join();
    EXPECT_TRUE(wait_until([&] { return quiet->signals.load() == 3; }, seconds(3)));
    poller.join();  // before what its sources refer to is destroyed
  }
}

// What a callback asks for is done although its own source brought nothing, as when it failed while
// it was being read.
TEST(Poller, PollsAfterDeliveryEvenIfTheDelivererMovedNothing) {
  const Joined started;
  Poller& poller = *started.poller;
  std::atomic<bool> ask{false};
  const auto asking = std::make_shared<Source>();
  const auto asked = std::make_shared<Source>();
  asking->on_poll = [&] {
    if (ask.exchange(false)) {
      poller.poll_after_delivery(asked);
    }
    return false;
  };
  add(poller, asking);
  for (int i = 1; i <= 40; ++i) {
    // Idle for a while in between, as the thread then spins for a short time only.
    ASSERT_TRUE(wait_until([&] { return asking->asleep.load(); }));
    std::this_thread::sleep_for(milliseconds(2));
    const int before = asked->polls.load();
    ask = true;
    asking->signal();
    // A source that just moved is polled; again, as the thread may have had no processor meanwhile.
    for (int k = 0; k < 50 && !wait_until([&] { return !ask.load(); }, milliseconds(100)); ++k)
      asking->signal();
    ASSERT_FALSE(ask.load());
    ASSERT_TRUE(wait_until([&] { return asked->polls.load() > before; }, seconds(2)))
        << "forgotten in round " << i;
  }
  poller.join();  // before what its sources refer to is destroyed
}

// A thread that is woken for a change must not clear the doorbell that ends both.
TEST(Poller, JoinsWhileItsThreadsAreWoken) {
  constexpr int kRounds = 2000;
  for (int round = 0; round < kRounds; ++round) {
    const auto poller = Poller::start("test");
    const auto id = add(*poller, std::make_shared<Source>(true));
    for (int i = 0; i < round % 4; ++i) poller->poll_soon(id);
    auto joined = std::async(std::launch::async, [&] { poller->join(); });
    if (joined.wait_for(seconds(10)) == std::future_status::ready) continue;
    poller->poll_soon(id);  // gets it going again
    FAIL() << "in round " << round;
  }
}

// A thread that is woken while another one releases the role finds the role taken. What it was
// woken for must not be forgotten.
TEST(Poller, PollsSoonWhenAThreadReleasesTheRoleMeanwhile) {
  std::atomic<bool> hold{false};
  std::atomic<bool> held{false};
  const Joined started;
  Poller& poller = *started.poller;
  const auto source = std::make_shared<Source>(true);
  source->on_sleep = [&] {
    // It has agreed to sleep; the thread that asks continues only later.
    if (hold.load() && !held.exchange(true)) static_cast<void>(wait_until([&] { return !hold; }));
    return true;
  };
  const auto id = add(poller, source);
  for (int round = 0; round < 5; ++round) {
    ASSERT_TRUE(wait_until([&] { return source->asleep.load(); }));
    held = false;
    hold = true;
    source->signal();
    ASSERT_TRUE(wait_until([&] { return held.load(); }));
    const int before = source->polls.load();
    poller.poll_soon(id);
    std::this_thread::sleep_for(milliseconds(30));  // the other thread is woken, and sleeps again
    hold = false;
    ASSERT_TRUE(wait_until([&] { return source->polls.load() > before; }, seconds(5)))
        << "forgotten in round " << round;
  }
  poller.join();  // before what its sources refer to is destroyed
}

// A helping thread keeps its own deadline, however much there is to move.
TEST(Poller, AHelpingThreadKeepsItsDeadlineUnderTraffic) {
  std::atomic<bool> busy{true};
  std::atomic<int> here{0};
  const auto waiter = std::this_thread::get_id();
  const Joined started;
  Poller& poller = *started.poller;
  const auto source = std::make_shared<Source>(true);
  source->on_poll = [&] {
    if (std::this_thread::get_id() == waiter) here.fetch_add(1);
    return busy.load();
  };
  add(poller, source);
  std::thread watch([&] {
    static_cast<void>(wait_until([&] { return !busy.load(); }, seconds(10)));
    busy = false;
  });
  base::AwaitedFlag never;
  // The first calls may find that another thread polls and does not make room in time.
  for (int i = 0; i < 2000 && here.load() == 0; ++i) {
    const auto begin = Clock::now();
    EXPECT_FALSE(poller.help(never, begin + milliseconds(50)));
    EXPECT_LT(Clock::now() - begin, seconds(15));
  }
  EXPECT_GT(here.load(), 0);
  busy = false;
  watch.join();
  poller.join();  // before what its sources refer to is destroyed
}

// Sources that sleep cost nothing, however many there are.
TEST(Poller, SourcesThatRestAreNotVisited) {
  const Joined started;
  Poller& poller = *started.poller;
  std::vector<std::shared_ptr<Source>> resting(300);
  for (auto& each : resting) {
    each = std::make_shared<Source>();
    add(poller, each);
  }
  for (const auto& each : resting) ASSERT_TRUE(wait_until([&] { return each->asleep.load(); }));
  const auto busy = std::make_shared<Source>();
  add(poller, busy);
  const auto looks = [&] {
    int all = 0;
    for (const auto& each : resting) all += each->looks.load();
    return all;
  };
  busy->signal();
  ASSERT_TRUE(busy->wait_signals(1));
  const int before = looks();
  for (int i = 2; i <= 200; ++i) {
    busy->signal();
    ASSERT_TRUE(busy->wait_signals(i));
  }
  EXPECT_LT(looks() - before, 300) << "in 200 rounds";
  for (const auto& each : resting) {
    each->signal();
    ASSERT_TRUE(each->wait_signals(1));
  }
  poller.join();  // before what its sources refer to is destroyed
}

// A thread that is stuck in the work that a message brought does not delay the end.
TEST(Poller, DoesNotWaitLongForAThreadInDeferredWork) {
  const auto release = std::make_shared<std::atomic<bool>>(false);
  const auto working = std::make_shared<std::atomic<bool>>(false);
  const auto poller = Poller::start("test");
  const auto source = std::make_shared<Source>();
  source->on_ready = [&poller = *poller, release, working] {
    Poller::Work work = [release, working](DoWork how) {
      *working = how != DoWork::elsewhere;
      if (how != DoWork::elsewhere) static_cast<void>(wait_until([&] { return release->load(); }));
      return false;
    };
    return poller.defer(work);
  };
  add(*poller, source);
  ASSERT_TRUE(wait_until([&] {
    source->signal();
    return working->load();
  }));
  const auto begin = Clock::now();
  poller->join();
  EXPECT_LT(Clock::now() - begin, seconds(15));
  *release = true;
  EXPECT_TRUE(wait_until([&] { return poller.use_count() == 1; })) << "its thread has not ended";
}

// A source that refuses to sleep because something has arrived is polled.
TEST(Poller, DoesNotSleepOverASourceThatIsAwake) {
  const Joined started;
  Poller& poller = *started.poller;
  std::atomic<int> refusals{0};
  const auto source = std::make_shared<Source>(true);
  source->on_sleep = [&] { return refusals.load() == 0; };
  source->on_poll = [&] {
    if (refusals.load() == 0) return false;
    refusals.fetch_sub(1);
    return true;
  };
  add(poller, source);
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(wait_until([&] { return source->asleep.load(); }));
    refusals = 3;
    source->signal();
    EXPECT_TRUE(wait_until([&] { return refusals.load() == 0; }));
  }
  poller.join();  // before what its sources refer to is destroyed
}

// Helping threads take the role from an own thread that the doorbell has woken: whichever arms
// last, what arrives afterwards is noticed without any help.
TEST(Poller, HandingTheRoleOverLeavesTheSocketsWatched) {
  const Joined started;
  Poller& poller = *started.poller;
  const auto source = std::make_shared<Source>();
  const auto id = add(poller, source);
  const auto end = Clock::now() + milliseconds(500);
  for (int i = 1; Clock::now() < end; ++i) {
    std::atomic<int> ready{0};
    const auto help = [&] {
      base::AwaitedFlag never;
      ready.fetch_add(1);
      while (ready.load() < 3) std::this_thread::yield();
      static_cast<void>(poller.help(never, Clock::now() + std::chrono::microseconds(20)));
    };
    std::thread first(help);
    std::thread second(help);
    while (ready.load() < 2) std::this_thread::yield();
    ready.fetch_add(1);
    poller.poll_soon(id);  // rings the doorbell when all are asleep
    first.join();
    second.join();
    source->signal();
    ASSERT_TRUE(source->wait_signals(i)) << i;
  }
  poller.join();  // before what its sources refer to is destroyed
}

double cpu_seconds() {
  timespec time{};
  EXPECT_EQ(::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time), 0);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Of the wall time, how much this process computes in a second in which nothing happens.
double idle_share() {
  const auto begin = Clock::now();
  const double before = cpu_seconds();
  std::this_thread::sleep_for(milliseconds(1000));
  return (cpu_seconds() - before) / std::chrono::duration<double>(Clock::now() - begin).count();
}
constexpr double kIdle = 0.05;

class StreamIdle : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Stream, StreamIdle, ::testing::Values("shm", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(StreamIdle, AnIdleConnectionCostsNothing) {
  const auto server = stream_endpoint(1, {GetParam()});
  const auto client = stream_endpoint(2, {GetParam()});
  const auto in = std::make_shared<Recorder>();
  in->handle = [](const std::shared_ptr<Connection>& from, Message message) {
    from->send(std::move(message), nullptr);
  };
  const auto addresses = server->listen([&] { return in->events(); });
  const auto out = std::make_shared<Recorder>();
  const auto connection = client->connect(addresses.front(), {1}, out->events());
  for (std::size_t i = 1; i <= 1000; ++i) {
    connection->send(make_message(std::string(i % 100 == 0 ? 200'000 : 50, 'm')), nullptr);
    ASSERT_TRUE(out->wait_messages(i));
  }
  EXPECT_LT(idle_share(), kIdle);
  base::AwaitedFlag never;
  static_cast<void>(client->help(never, Clock::now() + milliseconds(5)));
  EXPECT_LT(idle_share(), kIdle) << "after a thread has helped";
}

TEST_P(StreamIdle, SilentStrangersCostNothing) {
  const auto server = stream_endpoint(1, {GetParam()});
  const auto addresses = server->listen([] { return std::make_shared<Recorder>()->events(); });
  std::vector<base::Descriptor> strangers;
  for (int i = 0; i < 10; ++i) strangers.push_back(connect_raw(addresses.front()));
  RawPeer half(addresses.front());
  half.write(std::string("\1\0\0\0", 4));
  EXPECT_LT(idle_share(), kIdle);
}

TEST_P(StreamIdle, APeerThatDoesNotReadCostsNothing) {
  const auto server = stream_endpoint(1, {GetParam()});
  const auto in = std::make_shared<Recorder>();
  const auto addresses = server->listen([&] { return in->events(); });
  RawPeer peer(addresses.front());
  ASSERT_TRUE(peer.shake_hands());
  ASSERT_TRUE(in->wait_open());
  for (int i = 0; i < 10; ++i)
    in->connection()->send(make_message(std::string(4'000'000, 'x')), in->done());
  in->connection()->send(make_message("small"), in->done());
  EXPECT_LT(idle_share(), kIdle);
  EXPECT_EQ(in->failed(), 0U);
  peer.hang_up();
  ASSERT_TRUE(in->wait_closed());
  EXPECT_TRUE(in->wait_sends_done());
}

}  // namespace
}  // namespace stitch::transport::poller_test
