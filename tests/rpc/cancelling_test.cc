// One file, though long: what a stop does to futures, coroutines and groups.

#include <pthread.h>

#include <stop_token>

#include "tests/support/resident_memory.h"
#include "tests/support/world_test.h"

namespace cancelling_test {  // its functions are registered under their full names
namespace {

using namespace stitch::testing;

// A variable of a coroutine, and whether it exists.
class Variable {
 public:
  explicit Variable(std::atomic<bool>& exists) : exists_(exists) { exists_ = true; }
  ~Variable() { exists_ = false; }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  std::atomic<bool>& exists_;
};

Future<int> await(Future<int> future) { co_return co_await future; }

// ---- futures and coroutines, on the threads of the test

TEST(Cancelling, CompletesAPromiseForAllThatHoldIt) {
  int asked = 0;
  const Promise<int> promise;
  promise.on_cancel([&] { ++asked; });
  const auto first = await(promise.future());
  const auto second = await(promise.future());
  first.cancel();
  first.cancel();
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(second.error().code(), ErrorCode::cancelled);
  EXPECT_EQ(promise.future().error().code(), ErrorCode::cancelled);
  EXPECT_FALSE(promise.set_value(3));
  promise.on_cancel([&] { ++asked; });
  EXPECT_EQ(asked, 2) << "it has been cancelled: at once";
}

TEST(Cancelling, DroppingAFutureStopsNothing) {
  int asked = 0;
  const Promise<int> promise;
  promise.on_cancel([&] { ++asked; });
  static_cast<void>(await(promise.future()));
  EXPECT_EQ(asked, 0);
  EXPECT_TRUE(promise.set_value(1));
}

// What a coroutine does after that is its own matter: no second stop reaches it.
TEST(Cancelling, ReachesACoroutineOnce) {
  const Promise<int> first, cleanup;
  std::atomic<int> seen{0};
  const auto work = [&]() -> Future<int> {
    try {
      co_await first.future();
    } catch (const Error& error) {
      seen = error.code() == ErrorCode::cancelled ? 1 : -1;
    }
    seen = seen + co_await cleanup.future();
    co_return 5;
  };
  const auto inner = work();
  const auto outer = await(inner);
  outer.cancel();
  EXPECT_EQ(outer.error().code(), ErrorCode::cancelled);
  EXPECT_EQ(seen, 1);
  EXPECT_FALSE(inner.ready()) << "it goes on";
  inner.cancel();
  EXPECT_EQ(inner.error().code(), ErrorCode::cancelled);
  EXPECT_TRUE(cleanup.set_value(10));
  EXPECT_EQ(seen, 11);
}

// The children of a coroutine work on its variables: it goes on once they have ended.
class Children : public ::testing::Test {
 protected:
  // It works on `variable` until it is told to end.
  Future<int> child(const Variable&) {
    ++begun_;
    const Promise<int> work;
    work.on_cancel([this] { ++asked_; });
    try {
      co_await work.future();
    } catch (const Error&) {
      dangled_ = !exists_;
    }
    co_await cleanup_.future();
    dangled_ = dangled_ || !exists_;
    ++ended_;
    co_return 1;
  }
  template <class Parent>
  void expect_in_order(Parent parent, int children) {
    const Future<int> running = parent();
    EXPECT_EQ(begun_, children);
    running.cancel();
    EXPECT_TRUE(running.ready()) << "at once, for the program";
    EXPECT_EQ(asked_, children);
    EXPECT_TRUE(exists_) << "it has not waited for what works on its variables";
    cleanup_.set_value(1);
    EXPECT_TRUE(eventually([&] { return ended_ == children && !exists_; }));
    EXPECT_FALSE(dangled_);
  }

  std::atomic<int> begun_{0}, asked_{0}, ended_{0};
  std::atomic<bool> exists_{false}, dangled_{false};
  Promise<int> cleanup_;
};

TEST_F(Children, EndBeforeTheCoroutineThatAwaitsOne) {
  expect_in_order(
      [this]() -> Future<int> {
        const Variable variable(exists_);
        co_return co_await child(variable);
      },
      1);
}
TEST_F(Children, EndBeforeTheCoroutineThatAwaitsAllOfThem) {
  expect_in_order(
      [this]() -> Future<int> {
        const Variable variable(exists_);
        std::vector<Future<int>> all;
        for (int i = 0; i < 3; ++i) all.push_back(child(variable));
        co_await when_all(all);
        co_return 0;
      },
      3);
}
TEST_F(Children, EndBeforeTheCoroutineThatAwaitsWhatFollows) {
  expect_in_order(
      [this]() -> Future<int> {
        const Variable variable(exists_);
        const auto step = [](int value) { return value; };
        co_return co_await child(variable).then(step);
      },
      1);
}

// ---- then()

// However many steps there are: what the first one works on exists until it ends.
TEST(Cancelling, WaitsForAFunctionThatRuns) {
  for (const int steps : {1, 2, 1000, 20'000}) {
    std::atomic<bool> exists{false}, runs{false}, go_on{false}, dangled{false};
    const auto work = [&](Future<int> future) -> Future<int> {
      const Variable variable(exists);
      const auto first = [&](int value) {
        runs = true;
        EXPECT_TRUE(eventually([&] { return go_on.load(); }));
        dangled = !exists;
        return value;
      };
      const auto step = [](int value) { return value; };
      future = std::move(future).then(first);
      for (int i = 1; i < steps; ++i) future = std::move(future).then(step);
      co_return co_await future;
    };
    const Promise<int> promise;
    const auto running = work(promise.future());
    std::thread other([&] { promise.set_value(1); });
    EXPECT_TRUE(eventually([&] { return runs.load(); }));
    running.cancel();
    EXPECT_TRUE(running.ready());
    EXPECT_TRUE(exists) << steps;
    go_on = true;
    other.join();
    EXPECT_FALSE(dangled) << steps;
    EXPECT_TRUE(eventually([&] { return !exists; })) << steps;
  }
}

// The future that it returns is stopped: its result is not wanted any more.
TEST(Cancelling, StopsWhatARunningFunctionReturns) {
  for (const bool by_program : {false, true}) {
    std::atomic<bool> runs{false}, go_on{false};
    std::atomic<int> asked{0};
    const Promise<int> inner;
    inner.on_cancel([&] { ++asked; });
    const auto begin = [&](int) {
      runs = true;
      EXPECT_TRUE(eventually([&] { return go_on.load(); }));
      return inner.future();
    };
    const auto work = [&](Future<int> future) -> Future<int> {
      co_return co_await future.then(begin);
    };
    const Promise<int> promise;
    const auto running = by_program ? promise.future().then(begin) : work(promise.future());
    std::thread other([&] { promise.set_value(1); });
    EXPECT_TRUE(eventually([&] { return runs.load(); }));
    running.cancel();
    EXPECT_EQ(asked, 0);
    go_on = true;
    other.join();
    EXPECT_EQ(asked, 1) << by_program;
    EXPECT_TRUE(inner.future().ready());
  }
}

std::atomic<bool> blocked{false}, may_unblock{false};
int block() {
  blocked = true;
  EXPECT_TRUE(eventually([] { return may_unblock.load(); }));
  return 0;
}

TEST(Cancelling, DoesNotRunAFunctionThatWaitsForAThread) {
  Cluster cluster(1, {.num_threads = 1});
  blocked = may_unblock = false;
  const auto blocking = rpc_async<block>("worker0");
  EXPECT_TRUE(eventually([] { return blocked.load(); }));
  std::atomic<int> runs{0};
  const Promise<std::unique_ptr<int>> promise;
  const auto waiting = promise.future().then([&](const std::unique_ptr<int>&) {
    ++runs;
    return 1;
  });
  promise.set_value(std::make_unique<int>(4));
  waiting.cancel();
  may_unblock = true;
  blocking.get();
  // Behind it on the one thread there is.
  make_ready(1).then([](int value) { return value; }).get();
  EXPECT_EQ(runs, 0);
  EXPECT_NE(promise.future().get(), nullptr) << "and takes nothing from others";
}

// ---- groups

TEST(Cancelling, OfARaceReachesAllAndItsEndNone) {
  for (const bool of_two_types : {false, true}) {
    int asked = 0;
    std::atomic<bool> exists{false};
    const Promise<int> a, b;
    a.on_cancel([&] { ++asked; });
    b.on_cancel([&] { ++asked; });
    const auto race = [&]() -> Future<int> {
      const Variable variable(exists);
      if (of_two_types) {
        const auto text = [](int) { return std::string("text"); };
        co_await when_any(a.future(), b.future().then(text));
      } else {
        co_await when_any(a.future(), b.future());
      }
      co_return 1;
    };
    const auto won = when_any(a.future(), make_ready(1));
    EXPECT_EQ(won.get().second, 1);
    won.cancel();
    EXPECT_EQ(asked, 0) << "the others go on";
    const auto running = await(race());
    running.cancel();
    EXPECT_EQ(asked, 2);
    EXPECT_FALSE(exists) << "it goes on when the first has ended";
  }
}

TEST(Cancelling, AFinishedRaceLeavesNothingWithItsLosers) {
  const Promise<int> loser;
  const auto before = loser.shared_state().use_count();
  for (int i = 0; i < 100; ++i) {
    static_cast<void>(when_any(loser.future(), make_ready(i)).get());
    static_cast<void>(when_any(make_ready(1.5), loser.future()).get());
  }
  EXPECT_EQ(loser.shared_state().use_count(), before);
  EXPECT_TRUE(loser.set_value(1));
}

// The second of two that complete at one moment keeps its value.
TEST(Cancelling, ARaceTakesOneValue) {
  const Promise<std::unique_ptr<int>> a, b;
  const auto any = when_any(a.future(), b.future());
  a.set_value(std::make_unique<int>(1));
  b.set_value(std::make_unique<int>(2));
  EXPECT_EQ(*any.get().second, 1);
  EXPECT_EQ(*b.future().get(), 2);
}

// ---- callbacks that throw

TEST(Callbacks, ThatThrowAreCountedAndDropped) {
  const auto before = stitch::detail::callbacks_thrown();
  const auto throws = [] { throw std::runtime_error("a callback's mistake"); };
  int ran = 0;
  Future<int> dropped;
  {
    const Promise<int> promise;
    dropped = promise.future();
    dropped.on_ready(throws);
    dropped.on_ready([&] { ++ran; });
  }
  EXPECT_EQ(dropped.error().code(), ErrorCode::cancelled);
  const Promise<int> promise;
  const auto future = promise.future();
  future.on_ready([&] {
    const Promise<int> inner;
    inner.future().on_ready(throws);
    inner.future().on_ready([&] { ++ran; });
    inner.set_value(1);
    throw std::runtime_error("it must not");
  });
  future.on_ready([&] { ++ran; });
  EXPECT_TRUE(promise.set_value(1));
  EXPECT_NO_THROW(future.on_ready(throws));
  const Promise<int> cancelled;
  cancelled.on_cancel(throws);
  EXPECT_NO_THROW(cancelled.future().cancel());
  EXPECT_EQ(cancelled.future().error().code(), ErrorCode::cancelled);
  EXPECT_EQ(ran, 3);
  EXPECT_EQ(stitch::detail::callbacks_thrown() - before, 5U);
}

// ---- depth and number

#ifdef __OPTIMIZE__
constexpr bool kLargeFrames = kAddressSanitizer || kThreadSanitizer;
#else
constexpr bool kLargeFrames = true;
#endif

// Coroutines inside one another, each with a token that has been taken.
struct Nest {
  explicit Nest(std::size_t depth) : gates(depth + 1) {}
  Future<int> enter(std::size_t depth) {
    co_await gates[depth].future();
    const std::stop_token own = current_stop_token();
    if (depth == 0) {
      token = own;
      co_return co_await innermost.future();
    }
    try {
      co_return co_await enter(depth - 1);
    } catch (const Error&) {
      told += own.stop_requested() ? 1 : 0;
      throw;
    }
  }
  Future<int> enter_all() {
    auto outermost = enter(gates.size() - 1);
    for (std::size_t depth = gates.size(); depth-- > 0;) gates[depth].set_value();
    return outermost;
  }
  std::vector<Promise<void>> gates;
  Promise<int> innermost;
  std::stop_token token;
  std::size_t told = 0;
};

// Runs `task` on a thread with little stack.
void on_small_stack(const std::function<void()>& task) {
  pthread_attr_t attributes;
  ASSERT_EQ(::pthread_attr_init(&attributes), 0);
  ASSERT_EQ(::pthread_attr_setstacksize(&attributes, 512 << 10), 0);
  pthread_t thread{};
  auto copy = task;
  const auto run = [](void* what) -> void* {
    (*static_cast<std::function<void()>*>(what))();
    return nullptr;
  };
  ASSERT_EQ(::pthread_create(&thread, &attributes, run, &copy), 0);
  ::pthread_join(thread, nullptr);
  ::pthread_attr_destroy(&attributes);
}

TEST(Cancelling, TakesNoStackForCoroutinesInsideOneAnother) {
  on_small_stack([] {
    const std::size_t depth = kLargeFrames ? 10'000 : 100'000;
    Nest nest(depth);
    const auto outermost = nest.enter_all();
    ASSERT_TRUE(nest.token.stop_possible());
    EXPECT_FALSE(nest.token.stop_requested());
    outermost.cancel();
    EXPECT_TRUE(nest.token.stop_requested());
    EXPECT_EQ(nest.told, depth);
    EXPECT_EQ(outermost.error().code(), ErrorCode::cancelled);
  });
}

// Each starts its successor, and ends.
struct Loop {
  Future<void> step() {
    co_await next.future();
    next = Promise<void>();
    if (current_stop_token().stop_requested()) ++stopped;
    if (++rounds < kRounds) static_cast<void>(step());
  }
  static constexpr int kRounds = 200'000;
  Promise<void> next;
  int rounds = 0, stopped = 0;
};

TEST(Coroutines, ThatStartTheirSuccessorsLeaveNothingBehind) {
  on_small_stack([] {
    Loop loop;
    static_cast<void>(loop.step());
    const auto run_to = [&](int rounds) {
      while (loop.rounds < rounds) Promise<void>(loop.next).set_value();
    };
    run_to(1000);
    const auto before = resident_bytes();
    run_to(Loop::kRounds);
    if (!kAddressSanitizer) {
      EXPECT_LT(resident_bytes(), before + (4 << 20)) << "20 bytes for each";
    }
    EXPECT_EQ(loop.stopped, 0);
  });
}

}  // namespace
}  // namespace cancelling_test
