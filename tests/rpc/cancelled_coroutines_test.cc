// Coroutines that are asked to stop: what only they await stops with them, what others hold goes
// on.
#include "tests/support/resident_memory.h"
#include "tests/support/world_test.h"

namespace cancelled_coroutines_test {  // its functions are registered under their full names
namespace {

using namespace std::chrono_literals;
using stitch::Error;
using stitch::ErrorCode;
using stitch::Future;
using stitch::Promise;
using stitch::testing::Cluster;
using stitch::testing::error_of;
using stitch::testing::eventually;
using stitch::testing::resident_bytes;

std::atomic<int> begun_below{0}, stopped_below{0}, ended_by_cancel{0}, told_to_stop{0}, ended{0};
std::atomic<bool> below_may_end{false};
// Returns when it is asked to stop, or may end.
int wait_for_stop() {
  ++begun_below;
  const auto token = stitch::current_stop_token();
  EXPECT_TRUE(eventually([&] { return token.stop_requested() || below_may_end; }));
  if (token.stop_requested()) ++stopped_below;
  return 7;
}
Future<int> wait_below(int depth) {
  try {
    if (depth == 0) {
      co_await stitch::rpc_async<wait_for_stop>("worker1");
    } else {
      co_await wait_below(depth - 1);
    }
  } catch (const Error& error) {
    told_to_stop += stitch::current_stop_token().stop_requested() ? 1 : 0;
    ended_by_cancel += error.code() == ErrorCode::cancelled ? 1 : 0;
    ++ended;  // last: the test waits for it
    throw;
  }
  co_return 0;
}

int answer() { return 0; }

// What several handlers await.
std::unique_ptr<Promise<int>> promised;
Future<int> shared;
// How each handler awaits it.
enum class Way { promise, variable, copy, then, all, any };
std::atomic<int> awaiting{0};
Future<int> await_shared(Way way) {
  ++awaiting;  // so it is not dropped before it runs
  try {
    switch (way) {
      case Way::promise:
        co_return co_await promised->future();
      case Way::variable:
        co_return co_await shared;
      case Way::copy: {
        const Future<int> copy = shared;
        co_return co_await copy;
      }
      case Way::then:
        co_return co_await shared.then([](int value) { return value; });
      case Way::all: {
        const std::vector<int> values = co_await stitch::when_all(std::vector(2, shared));
        co_return values[0];
      }
      case Way::any: {
        const Promise<int> never;
        co_return (co_await stitch::when_any(shared, never.future())).second;
      }
    }
    co_return 0;
  } catch (const Error& error) {
    ended_by_cancel += error.code() == ErrorCode::cancelled ? 1 : 0;
    ++ended;
    throw;
  }
}

// Of worker0. That number is there once something came from it.
std::int64_t calls_held_by(stitch::Worker& worker) {
  const auto numbers = worker.debug_info();
  const auto found = numbers.find("rpc.peer.worker0.calls_held");
  return found == numbers.end() ? 0 : found->second;
}

class CancelledCoroutines : public ::testing::Test {
 protected:
  CancelledCoroutines() {
    begun_below = stopped_below = ended_by_cancel = told_to_stop = ended = awaiting = 0;
    below_may_end = false;
  }
  ~CancelledCoroutines() override {
    below_may_end = true;
    promised = nullptr;
    shared = {};
  }
};

TEST_F(CancelledCoroutines, CancelWhatTheyAwaitHere) {
  Cluster cluster(2);
  auto work = wait_below(2);
  EXPECT_TRUE(eventually([] { return begun_below == 1; }));
  work.cancel();
  EXPECT_EQ(error_of([&] { work.get(); }).code(), ErrorCode::cancelled);
  EXPECT_TRUE(eventually([] { return stopped_below == 1 && ended == 3; }, 10s));
  EXPECT_EQ(ended_by_cancel, 3);
  EXPECT_EQ(told_to_stop, 3);
}

TEST_F(CancelledCoroutines, CancelWhatTheyAwaitForACallerThatHasGivenUp) {
  Cluster cluster(2, [](stitch::Options& options) { options.num_threads = 1; });
  auto cancelled = stitch::rpc_async<wait_below>("worker1", 1);
  EXPECT_TRUE(eventually([] { return begun_below == 1; }));
  cancelled.cancel();
  EXPECT_TRUE(eventually([] { return stopped_below == 1 && ended == 2; }, 10s));
  EXPECT_EQ(ended_by_cancel, 2);
  EXPECT_EQ(told_to_stop, 2);
  EXPECT_EQ(
      error_of([] { stitch::rpc_sync<wait_below>({.to = "worker1", .timeout = 1s}, 0); }).code(),
      ErrorCode::timeout);
  EXPECT_TRUE(eventually([] { return stopped_below == 2 && ended == 3; }, 10s));
}

// ---- what others hold

// Three handlers await one outcome in each way; the caller of one gives up.
class SharedOutcomes : public CancelledCoroutines, public ::testing::WithParamInterface<Way> {
 protected:
  void one_of_three_gives_up(const std::function<void()>& complete, int value) {
    std::vector<Future<int>> calls;
    for (int i = 0; i < 3; ++i)
      calls.push_back(stitch::rpc_async<await_shared>("worker1", GetParam()));
    EXPECT_TRUE(eventually([] { return awaiting == 3; }));
    calls[1].cancel();
    EXPECT_TRUE(eventually([] { return ended == 1; }));
    EXPECT_EQ(ended_by_cancel, 1);
    EXPECT_FALSE(calls[0].ready() || calls[2].ready());
    complete();
    EXPECT_EQ(calls[0].get(), value);
    EXPECT_EQ(calls[2].get(), value);
    EXPECT_EQ(ended, 1);
  }
  Cluster cluster_{2};
};

TEST_P(SharedOutcomes, OfAPromiseReachTheOthers) {
  promised = std::make_unique<Promise<int>>();
  shared = promised->future();
  one_of_three_gives_up([] { promised->set_value(5); }, 5);
}

TEST_P(SharedOutcomes, OfAPromiseThatCanBeCancelledReachTheOthers) {
  promised = std::make_unique<Promise<int>>();
  std::atomic<bool> asked{false};
  promised->on_cancel([&asked] { asked = true; });
  shared = promised->future();
  one_of_three_gives_up([] { promised->set_value(5); }, 5);
  EXPECT_FALSE(asked);
}

TEST_P(SharedOutcomes, OfACallReachTheOthers) {
  if (GetParam() == Way::promise) GTEST_SKIP() << "a call is no promise of the program's";
  shared = stitch::rpc_async<wait_for_stop>({.to = "worker0", .timeout = 0s});
  one_of_three_gives_up([] { below_may_end = true; }, 7);
  EXPECT_EQ(stopped_below, 0);
}

TEST_P(SharedOutcomes, OfACoroutineReachTheOthers) {
  if (GetParam() == Way::promise) GTEST_SKIP() << "a coroutine is no promise of the program's";
  const auto call = []() -> Future<int> {
    const Future<int> below = stitch::rpc_async<wait_for_stop>({.to = "worker0", .timeout = 0s});
    co_return co_await below;
  };
  shared = call();
  one_of_three_gives_up([] { below_may_end = true; }, 7);
  EXPECT_EQ(stopped_below, 0);
}

// The program has dropped the call by then, and all that await it give up.
TEST_P(SharedOutcomes, StopOnceTheLastOneGivesUp) {
  if (GetParam() == Way::promise) GTEST_SKIP() << "nothing is known that could stop";
  shared = stitch::rpc_async<wait_for_stop>({.to = "worker0", .timeout = 0s});
  std::vector<Future<int>> calls;
  for (int i = 0; i < 2; ++i)
    calls.push_back(stitch::rpc_async<await_shared>("worker1", GetParam()));
  EXPECT_TRUE(eventually([] { return begun_below == 1 && awaiting == 2; }));
  calls[0].cancel();
  EXPECT_TRUE(eventually([] { return ended == 1; }));
  calls[1].cancel();
  EXPECT_TRUE(eventually([] { return ended == 2; }));
  EXPECT_EQ(stopped_below, 0);
  shared = {};
  EXPECT_TRUE(eventually([] { return stopped_below == 1; }));
}

std::string name_of(const ::testing::TestParamInfo<Way>& way) {
  constexpr const char* kNames[] = {"Promise", "Variable", "Copy", "Then", "All", "Any"};
  return kNames[static_cast<int>(way.param)];
}
INSTANTIATE_TEST_SUITE_P(Ways, SharedOutcomes,
                         ::testing::Values(Way::promise, Way::variable, Way::all), &name_of);

// ---- what only the coroutine holds

using Begin = Future<int> (*)();
Future<int> begin_call() {
  return stitch::rpc_async<wait_for_stop>({.to = "worker0", .timeout = 0s});
}
Future<int> as_temporary() { co_return co_await begin_call(); }
Future<int> as_variable() {
  const auto call = begin_call();
  co_return co_await call;
}
Future<int> awaits(Future<int> parameter) { co_return co_await parameter; }
Future<int> as_parameter() { return awaits(begin_call()); }
Future<int> as_then() {
  const auto call = begin_call();
  co_return co_await call.then([](int value) { return value; }).then([](int value) {
    return stitch::make_ready(value);
  });
}
Future<int> as_followed() {
  co_return co_await stitch::make_ready(1).then([](int) { return begin_call(); });
}
Future<int> as_member_of_all() {
  std::vector<Future<int>> calls;
  calls.push_back(begin_call());
  calls.push_back(stitch::make_ready(1));
  const std::vector<int> values = co_await stitch::when_all(calls);
  co_return values[0];
}
Future<int> as_one_of_all() {
  co_return std::get<0>(co_await stitch::when_all(begin_call(), stitch::make_ready(1.5)));
}
Future<int> as_member_of_any() {
  const Promise<int> never;
  co_return (co_await stitch::when_any(begin_call(), never.future())).second;
}
Future<int> as_one_of_any() {
  const Promise<double> never;
  co_return std::get<0>(co_await stitch::when_any(begin_call(), never.future()));
}
// In memory that is not the coroutine's frame.
Future<int> in_a_vector() {
  std::vector<Future<int>> calls;
  calls.push_back(begin_call());
  int sum = 0;
  for (auto& call : calls) sum += co_await call;
  co_return sum;
}
Future<int> not_awaited() { return begin_call(); }

class OwnWork : public CancelledCoroutines, public ::testing::WithParamInterface<Begin> {};

TEST_P(OwnWork, StopsWithTheFuture) {
  Cluster cluster(1);
  auto work = GetParam()();
  EXPECT_TRUE(eventually([] { return begun_below == 1; }));
  work.cancel();
  EXPECT_TRUE(eventually([] { return stopped_below == 1; }));
  EXPECT_EQ(error_of([&] { work.get(); }).code(), ErrorCode::cancelled);
}

Begin handled = nullptr;
Future<int> handler() { return handled(); }

TEST_P(OwnWork, StopsWithTheCallOfItsHandler) {
  Cluster cluster(2);
  handled = GetParam();
  auto call = stitch::rpc_async<handler>("worker1");
  EXPECT_TRUE(eventually([] { return begun_below == 1; }));
  call.cancel();
  EXPECT_TRUE(eventually([] { return stopped_below == 1; }));
  EXPECT_TRUE(eventually([&] { return calls_held_by(cluster[1]) == 0; }));
}

INSTANTIATE_TEST_SUITE_P(Ways, OwnWork,
                         ::testing::Values(&as_temporary, &as_variable, &as_parameter, &as_then,
                                           &as_followed, &as_member_of_all, &as_one_of_all,
                                           &as_member_of_any, &as_one_of_any, &in_a_vector,
                                           &not_awaited));

// A handler that returns what others hold is no reason to stop it.
Future<int> return_shared() {
  Future<int> copy = shared;
  ++awaiting;  // then: `shared` may change once all are counted
  return copy;
}
TEST_F(CancelledCoroutines, AHandlerThatReturnsASharedFutureDoesNotStopIt) {
  Cluster cluster(2);
  shared = begin_call();
  auto call = stitch::rpc_async<return_shared>("worker1");
  auto other = stitch::rpc_async<return_shared>("worker1");
  EXPECT_TRUE(eventually([] { return begun_below == 1 && awaiting == 2; }));
  call.cancel();
  stitch::rpc_sync<answer>("worker1");  // behind the cancellation
  EXPECT_FALSE(shared.ready());
  below_may_end = true;
  EXPECT_EQ(other.get(), 7);
  EXPECT_EQ(stopped_below, 0);
}

// The child works on a variable of its parent, which must not end before it.
std::atomic<int> lives{0};
struct Alive {
  Alive() { ++lives; }
  Alive(const Alive&) = delete;
  Alive& operator=(const Alive&) = delete;
  ~Alive() {
    EXPECT_TRUE(child_ended);
    --lives;
  }
  std::atomic<bool> child_ended{false};
};
Future<void> child(Alive& alive) {
  try {
    co_await begin_call();
  } catch (const Error&) {
    // Ends later than it was stopped.
    stitch::rpc_sync<answer>({.to = "worker0", .timeout = 0s});
  }
  alive.child_ended = true;
}
Future<void> parent() {
  Alive alive;
  const Future<void> of_child = child(alive);
  co_await of_child;
}
TEST_F(CancelledCoroutines, OutliveAChildThatTheyAwaitAsAVariable) {
  Cluster cluster(1);
  auto work = parent();
  EXPECT_TRUE(eventually([] { return begun_below == 1; }));
  work.cancel();
  EXPECT_TRUE(eventually([] { return stopped_below == 1 && lives == 0; }));
}

// Without a worker: everything on the threads of the test.
TEST_F(CancelledCoroutines, EndWithoutAnOutcomeWhereNothingCanStopTheWork) {
  Promise<int> promise;
  const auto wait = [](Future<int> future) -> Future<int> { co_return co_await future; };
  auto work = wait(promise.future());
  const auto other = wait(promise.future());
  work.cancel();
  EXPECT_EQ(error_of([&] { work.get(); }).code(), ErrorCode::cancelled);
  EXPECT_FALSE(other.ready() || promise.future().ready());
  EXPECT_TRUE(promise.set_value(3)) << "the promise is not complete";
  EXPECT_EQ(other.get(), 3);
}

TEST_F(CancelledCoroutines, LeaveNothingWithAPromiseThatTheyAwaitedInVain) {
  Promise<int> promise;
  const auto wait = [](Future<int> future, std::shared_ptr<int>) -> Future<int> {
    co_return co_await future;
  };
  const auto wait_in_vain = [&] {
    auto held = std::make_shared<int>(1);
    const std::weak_ptr<int> gone = held;
    auto work = wait(promise.future(), std::move(held));
    EXPECT_FALSE(gone.expired());
    work.cancel();
    EXPECT_TRUE(gone.expired());
  };
  for (int i = 0; i < 1000; ++i) wait_in_vain();
  const auto before = resident_bytes();
  for (int i = 0; i < 100'000; ++i) wait_in_vain();
  if (!stitch::testing::kAddressSanitizer) {  // which keeps freed memory for a while
    EXPECT_LT(resident_bytes(), before + (8 << 20)) << "80 bytes for each";
  }
  promise.set_value(1);
}

// What a then() runs works on variables of the coroutine, which are gone once it has stopped.
TEST_F(CancelledCoroutines, DoNotRunWhatTheyHaveGivenUp) {
  bool in_frame = false;
  int runs = 0;
  struct Marked {
    explicit Marked(bool& flag) : flag_(flag) { flag_ = true; }
    Marked(const Marked&) = delete;
    Marked& operator=(const Marked&) = delete;
    ~Marked() { flag_ = false; }
    bool& flag_;
  };
  const auto wait = [&](Future<int> future) -> Future<int> {
    const Marked marked(in_frame);
    co_return co_await future.then([&runs](int value) {
      ++runs;
      return value;
    });
  };
  Promise<int> promise;
  auto work = wait(promise.future());
  EXPECT_TRUE(in_frame);
  work.cancel();
  EXPECT_FALSE(in_frame);
  promise.set_value(1);
  EXPECT_EQ(runs, 0);
}

// A value that cannot be copied is for those that still wait for it.
using Moved = std::unique_ptr<int>;
Future<int> await_moved(Way way, Future<Moved> future) {
  switch (way) {
    case Way::then:
      co_return co_await std::move(future).then([](Moved value) { return *value; });
    case Way::all: {
      std::vector<Future<Moved>> group;
      group.push_back(std::move(future));
      const auto values = co_await stitch::when_all(std::move(group));
      co_return *values[0];
    }
    case Way::any: {
      const Promise<Moved> never;
      co_return *(co_await stitch::when_any(std::move(future), never.future())).second;
    }
    default: {  // what a then() returns
      Future<Moved> followed = stitch::make_ready(1).then(
          [future = std::move(future)](int) mutable { return std::move(future); });
      const Moved value = co_await followed;
      co_return *value;
    }
  }
}
TEST_F(CancelledCoroutines, TakeNoValueThatTheyHaveGivenUp) {
  for (const Way way : {Way::then, Way::all, Way::any, Way::variable}) {
    Promise<Moved> promise;
    auto given_up = await_moved(way, promise.future());
    const auto other = [](Future<Moved> future) -> Future<int> {
      const Moved value = co_await future;
      co_return value ? *value : -1;
    }(promise.future());
    given_up.cancel();
    promise.set_value(std::make_unique<int>(5));
    EXPECT_EQ(other.get(), 5) << static_cast<int>(way);
  }
}

TEST_F(CancelledCoroutines, LeaveNothingOfAThenOrAGroupWithAPromise) {
  for (const Way way : {Way::then, Way::all, Way::any, Way::variable}) {
    promised = std::make_unique<Promise<int>>();
    const auto kept = std::make_shared<int>(1);
    const auto wait = [&](Future<int> future) -> Future<int> {
      const auto held = [kept](int value) { return value + *kept; };
      if (way == Way::then) co_return co_await future.then(held);
      if (way == Way::variable) {
        // g++ 12 destroys a temporary in a co_await twice.
        const auto follow = [future, held](int) { return future; };
        const Future<int> followed = stitch::make_ready(1).then(follow);
        co_return co_await followed;
      }
      if (way == Way::any) {
        const Promise<int> never;
        co_return (co_await stitch::when_any(future.then(held), never.future())).second;
      }
      std::vector<Future<int>> group;
      group.push_back(future.then(held));
      const std::vector<int> values = co_await stitch::when_all(group);
      co_return values[0];
    };
    for (int i = 0; i < 100; ++i) wait(promised->future()).cancel();
    EXPECT_EQ(kept.use_count(), 1) << static_cast<int>(way);
    EXPECT_TRUE(promised->set_value(1));
  }
}

// Two callers of handlers that return one future; both give up, and the program has dropped it.
TEST_F(CancelledCoroutines, CallsThatReturnOneFutureStopItOnceAllGiveUp) {
  Cluster cluster(2);
  shared = begin_call();
  auto first = stitch::rpc_async<return_shared>("worker1");
  auto second = stitch::rpc_async<return_shared>("worker1");
  EXPECT_TRUE(eventually([] { return begun_below == 1 && awaiting == 2; }));
  first.cancel();
  shared = {};
  stitch::rpc_sync<answer>("worker1");
  EXPECT_EQ(stopped_below, 0);
  second.cancel();
  EXPECT_TRUE(eventually([] { return stopped_below == 1; }));
  EXPECT_TRUE(eventually([&] { return calls_held_by(cluster[1]) == 0; }));
}

// The stop comes while outcomes are on their way: whatever comes first, what the coroutine awaits
// at the end, which never completes, is stopped, and everything goes on once.
class StopsOnTheWay : public CancelledCoroutines {
 protected:
  // Calls each at the same time, after some of a different time each.
  static void together(int round, const std::vector<std::function<void()>>& all) {
    std::atomic<std::size_t> ready{0};
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < all.size(); ++i) {
      threads.emplace_back([&, i] {
        ++ready;
        while (ready < all.size()) std::this_thread::yield();
        const int spins = round / (i == 0 ? 1 : i == 1 ? 7 : 50) % 100;
        for (int spin = 0; spin < spins; ++spin) {
          static_cast<void>(ready.load());  // a little time
        }
        all[i]();
      });
    }
  }
};

TEST_F(StopsOnTheWay, ReachTheNextWaitIfTheFirstHasAValue) {
  for (int round = 0; round < 3000; ++round) {
    std::atomic<int> ends{0};
    Promise<int> first, never;
    first.on_cancel([] {});
    const auto wait = [&ends](Future<int> a, Future<int> b) -> Future<int> {
      try {
        co_await a;
        co_await b;
      } catch (const Error&) {
      }
      ++ends;
      co_return 0;
    };
    const auto work = wait(first.future(), never.future());
    together(round, {[&] { first.set_value(1); }, [&] { work.cancel(); }});
    ASSERT_EQ(ends, 1) << round;
  }
}

TEST_F(StopsOnTheWay, ReachAWaitThatIsJustBeginning) {
  for (int round = 0; round < 3000; ++round) {
    std::atomic<int> ends{0};
    Promise<int> first, second, never;
    const auto wait = [&ends](Future<int> a, Future<int> b, Future<int> c) -> Future<int> {
      try {
        co_await a;
        co_await b;
        co_await c;
      } catch (const Error&) {
      }
      ++ends;
      co_return 0;
    };
    const auto work = wait(first.future(), second.future(), never.future());
    together(round,
             {[&] { first.set_value(1); }, [&] { second.set_value(1); }, [&] { work.cancel(); }});
    ASSERT_EQ(ends, 1) << round;
  }
}

}  // namespace
}  // namespace cancelled_coroutines_test
