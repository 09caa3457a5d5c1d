// What is given up, by a coroutine that is asked to stop or a caller that has cancelled: it ends
// before what it works on does, nothing of it is left behind, and what others hold goes on.

#include "tests/support/world_test.h"

namespace given_up_work_test {  // its functions are registered under their full names
namespace {

using namespace std::chrono_literals;
using stitch::Error;
using stitch::ErrorCode;
using stitch::Future;
using stitch::Options;
using stitch::Promise;
using stitch::testing::Cluster;
using stitch::testing::error_of;
using stitch::testing::eventually;

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

// ---- a then() whose function runs

TEST(GivenUpWork, AFunctionThatRunsEndsBeforeTheCoroutineThatAwaitsIt) {
  std::atomic<bool> exists{false}, runs{false}, go_on{false}, dangled{false};
  const auto work = [&](Future<int> future) -> Future<int> {
    const Variable variable(exists);
    const auto step = [&](int value) {
      runs = true;
      EXPECT_TRUE(eventually([&] { return go_on.load(); }));
      dangled = !exists;
      return value;
    };
    co_return co_await future.then(step);
  };
  const Promise<int> promise;
  const auto running = work(promise.future());
  std::thread other([&] { promise.set_value(1); });
  EXPECT_TRUE(eventually([&] { return runs.load(); }));
  running.cancel();
  EXPECT_TRUE(running.ready());  // at once, for the program
  EXPECT_TRUE(exists);
  go_on = true;
  other.join();
  EXPECT_FALSE(dangled);
  EXPECT_TRUE(eventually([&] { return !exists; }));
}

// The future that it returns is stopped: its result is not wanted any more.
TEST(GivenUpWork, WhatARunningFunctionReturnsIsStopped) {
  for (const bool by_program : {false, true}) {
    std::atomic<bool> runs{false}, go_on{false};
    std::atomic<int> asked{0};
    const Promise<int> inner;
    inner.on_cancel([&] { ++asked; });
    auto returned = inner.future();
    const auto begin = [&](int) {
      runs = true;
      EXPECT_TRUE(eventually([&] { return go_on.load(); }));
      return std::move(returned);
    };
    const auto work = [&](Future<int> future) -> Future<int> {
      const auto result = std::move(future).then(begin);
      co_return co_await result;
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

// However many steps there are: what the first one works on exists until it ends.
TEST(GivenUpWork, TheFirstOfManyFunctionsEndsBeforeTheCoroutineThatAwaitsTheLast) {
  for (const int steps : {2, 64, 65, 1000, 20'000}) {
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
    EXPECT_TRUE(exists) << steps;
    go_on = true;
    other.join();
    EXPECT_FALSE(dangled) << steps;
    EXPECT_TRUE(eventually([&] { return !exists; })) << steps;
  }
}

int block_until(std::atomic<bool>& may_end) {
  EXPECT_TRUE(eventually([&] { return may_end.load(); }));
  return 0;
}
std::atomic<bool> blocked{false}, may_unblock{false};
int block() {
  blocked = true;
  return block_until(may_unblock);
}

// Its function waits for a thread. It does not run, and takes nothing from others.
TEST(GivenUpWork, AFunctionThatWaitsForAThreadDoesNotRun) {
  Cluster cluster(1, [](Options& options) { options.num_threads = 1; });
  for (const bool by_program : {false, true}) {
    blocked = may_unblock = false;
    const auto blocking = stitch::rpc_async<block>("worker0");
    EXPECT_TRUE(eventually([] { return blocked.load(); }));
    std::atomic<int> runs{0};
    std::atomic<bool> exists{false};
    const auto step = [&](const std::unique_ptr<int>&) {
      ++runs;
      return 1;
    };
    const auto work = [&](Future<std::unique_ptr<int>> future) -> Future<int> {
      const Variable variable(exists);
      co_return co_await future.then(step);
    };
    const Promise<std::unique_ptr<int>> promise;
    const auto waiting = by_program ? promise.future().then(step) : work(promise.future());
    promise.set_value(std::make_unique<int>(4));
    waiting.cancel();
    may_unblock = true;
    blocking.get();
    EXPECT_TRUE(eventually([&] { return !exists; }));
    // Behind it on the one thread there is.
    const Promise<int> last;
    const auto after = last.future().then([](int value) { return value; });
    last.set_value(1);
    after.get();
    EXPECT_EQ(runs, 0) << by_program;
    EXPECT_NE(promise.future().get(), nullptr) << by_program;
  }
}

// ---- children that end some time after they were asked to

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
    }
    try {
      co_await cleanup_.future();
    } catch (const Error&) {
    }
    dangled_ = dangled_ || !exists_;
    ++ended_;
    co_return 1;
  }
  template <class Parent>
  void expect_in_order(Parent parent, int children) {
    const Future<int> running = parent();
    EXPECT_EQ(begun_, children);
    running.cancel();
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
TEST_F(Children, EndBeforeTheCoroutineThatAwaitsAVectorOfThem) {
  expect_in_order(
      [this]() -> Future<int> {
        const Variable variable(exists_);
        std::vector<Future<int>> all;
        for (int i = 0; i < 3; ++i) all.push_back(child(variable));
        co_await stitch::when_all(std::move(all));
        co_return 0;
      },
      3);
}
TEST_F(Children, EndBeforeTheCoroutineThatAwaitsThemTogether) {
  expect_in_order(
      [this]() -> Future<int> {
        const Variable variable(exists_);
        co_await stitch::when_all(child(variable), child(variable));
        co_return 0;
      },
      2);
}
TEST_F(Children, EndBeforeTheCoroutineThatAwaitsTheFirst) {
  expect_in_order(
      [this]() -> Future<int> {
        const Variable variable(exists_);
        co_await stitch::when_any(child(variable), child(variable));
        co_return 0;
      },
      2);
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

TEST_F(Children, EndBeforeTheCoroutineThatAwaitsTheFirstOfTwoTypes) {
  expect_in_order(
      [this]() -> Future<int> {
        const Variable variable(exists_);
        const auto to_text = [](int) { return std::string("text"); };
        co_await stitch::when_any(child(variable), child(variable).then(to_text));
        co_return 0;
      },
      2);
}
TEST_F(Children, EndBeforeTheCoroutineThatAwaitsTwoTypesTogether) {
  expect_in_order(
      [this]() -> Future<int> {
        const Variable variable(exists_);
        const auto to_text = [](int) { return std::string("text"); };
        co_await stitch::when_all(child(variable), child(variable).then(to_text));
        co_return 0;
      },
      2);
}
// A function that runs while the coroutine is stopped returns a child.
TEST_F(Children, EndBeforeTheCoroutineWhoseFunctionReturnsOneLate) {
  std::atomic<bool> runs{false}, go_on{false};
  const auto parent = [&](Future<int> future) -> Future<int> {
    const Variable variable(exists_);
    const auto step = [&](int) {
      runs = true;
      EXPECT_TRUE(eventually([&] { return go_on.load(); }));
      return child(variable);
    };
    co_return co_await std::move(future).then(step);
  };
  const Promise<int> promise;
  const auto running = parent(promise.future());
  std::thread other([&] { promise.set_value(1); });
  EXPECT_TRUE(eventually([&] { return runs.load(); }));
  running.cancel();
  go_on = true;
  other.join();
  EXPECT_TRUE(eventually([&] { return asked_ == 1; }));
  EXPECT_TRUE(exists_);
  cleanup_.set_value(1);
  EXPECT_TRUE(eventually([&] { return ended_ == 1 && !exists_; }));
  EXPECT_FALSE(dangled_);
}

// ---- groups

TEST(GivenUpWork, ALoserOfAFinishedRaceIsStopped) {
  for (const bool of_two_types : {false, true}) {
    int asked = 0;
    const Promise<int> loser;
    const Promise<int> winner;
    loser.on_cancel([&] { ++asked; });
    const auto work = [&](Future<int> first, Future<int> second) -> Future<int> {
      if (of_two_types) {
        const auto text = second.then([](int) { return std::string("text"); });
        const auto any = stitch::when_any(first, text);
        co_await any;
      } else {
        const auto any = stitch::when_any(first, second);
        co_await any;
      }
      co_return co_await first;
    };
    const auto running = work(loser.future(), winner.future());
    winner.set_value(1);
    running.cancel();
    EXPECT_EQ(asked, 1) << of_two_types;
  }
}

// Who sees the outcome of a race may be the only one that holds a loser.
TEST(GivenUpWork, ARaceLetsItsLosersGoBeforeItsOutcomeIsSeen) {
  int asked = 0;
  int asked_by_then = -1;
  const Promise<int> loser;
  const Promise<int> winner;
  loser.on_cancel([&] { ++asked; });
  const auto any = stitch::when_any(std::vector{loser.future(), winner.future()});
  const auto await = [](Future<int> future) -> Future<int> { co_return co_await future; };
  const auto running = await(loser.future());
  any.on_ready([&] {
    running.cancel();
    asked_by_then = asked;
  });
  winner.set_value(1);
  EXPECT_EQ(asked_by_then, 1);
}

TEST(GivenUpWork, SaysSo) {
  const auto step = [](int value) { return value; };
  const auto held_elsewhere = [](const Future<int>& future, auto make) {
    const auto work = [](auto awaited) -> Future<int> {
      co_await awaited;
      co_return 0;
    };
    const auto made = make(future);
    work(made).cancel();
    return made;
  };
  const Promise<int> promise;
  promise.on_cancel([] {});
  const auto shared = promise.future();
  // The coroutine alone wanted the then(); others hold its source.
  std::string text;
  const auto work = [&](Future<int> future) -> Future<int> {
    try {
      co_await std::move(future).then(step);
    } catch (const Error& error) {
      text = error.what();
    }
    co_return 0;
  };
  work(shared).cancel();
  EXPECT_EQ(text, "it was given up by the only one that waited for it");
  EXPECT_FALSE(held_elsewhere(shared, [&](const Future<int>& future) {
                 return future.then(step);
               }).ready());  // `made` is held here
  EXPECT_TRUE(promise.set_value(1));
}

TEST(GivenUpWork, AFinishedRaceLeavesNothingWithItsLosers) {
  const Promise<int> loser;
  const auto before = loser.shared_state().use_count();
  for (int i = 0; i < 100; ++i)
    static_cast<void>(stitch::when_any(loser.future(), stitch::make_ready(i)).get());
  EXPECT_EQ(loser.shared_state().use_count(), before);
  EXPECT_TRUE(loser.set_value(1));
}

TEST(GivenUpWork, AGroupLeavesWhatOthersHold) {
  for (const bool any : {false, true}) {
    int asked = 0;
    const Promise<int> shared;
    const Promise<int> own;
    shared.on_cancel([&] { ++asked; });
    own.on_cancel([&] { ++asked; });
    const auto work = [&](Future<int> first, Future<int> second) -> Future<int> {
      std::vector<Future<int>> both{std::move(first), std::move(second)};
      if (any) {
        co_await stitch::when_any(std::move(both));
      } else {
        co_await stitch::when_all(std::move(both));
      }
      co_return 0;
    };
    const auto held = shared.future();
    const auto running = work(shared.future(), own.future());
    running.cancel();
    EXPECT_EQ(asked, 1) << any;
    EXPECT_TRUE(own.future().ready());
    EXPECT_FALSE(held.ready());
    EXPECT_TRUE(shared.set_value(3));
    EXPECT_EQ(held.get(), 3);
  }
}

// ---- holds

// One more holder is enough, however it holds the future.
TEST(GivenUpWork, GoesOnWhileOneMoreHoldsIt) {
  enum class Other { handle, then, group, coroutine };
  for (const Other other : {Other::handle, Other::then, Other::group, Other::coroutine}) {
    int asked = 0;
    const Promise<int> promise;
    promise.on_cancel([&] { ++asked; });
    const auto await = [](Future<int> future) -> Future<int> { co_return co_await future; };
    Future<int> held;
    if (other == Other::handle) held = promise.future();
    if (other == Other::then) held = promise.future().then([](int value) { return value; });
    if (other == Other::group) {
      held = stitch::when_all(std::vector{promise.future()}).then([](std::vector<int> values) {
        return values.front();
      });
    }
    if (other == Other::coroutine) held = await(promise.future());
    const auto running = await(promise.future());
    running.cancel();
    EXPECT_EQ(asked, 0) << static_cast<int>(other);
    EXPECT_EQ(error_of([&] { running.get(); }).code(), ErrorCode::cancelled);
    EXPECT_TRUE(promise.set_value(5));
    EXPECT_EQ(held.get(), 5);
  }
}

TEST(GivenUpWork, WhatACancellerThrowsIsDropped) {
  constexpr int kDepths[] = {1, 63, 64, 65, 200, 600};
  for (const int depth : kDepths) {
    const Promise<int> promise;
    promise.on_cancel([] { throw std::runtime_error("from on_cancel"); });
    Future<int> last = promise.future();
    for (int i = 0; i < depth; ++i) last = last.then([](int value) { return value; });
    const Promise<int> other;
    other.future().on_ready([&] { last.cancel(); });
    EXPECT_NO_THROW(other.set_value(1)) << depth;
    EXPECT_TRUE(last.ready());
    EXPECT_TRUE(promise.future().ready());
  }
}

}  // namespace
}  // namespace given_up_work_test
