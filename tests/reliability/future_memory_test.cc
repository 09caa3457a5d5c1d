// What waits for a future goes on when it completes, also where there is no memory left.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "stitch/rpc/calls.h"
#include "stitch/rpc/future/autocast.h"
#include "stitch/rpc/future/execution_context.h"
#include "stitch/rpc/future/future.h"
#include "tests/support/cluster.h"
#include "tests/support/failing_memory.h"

namespace stitch::future_memory_test {
namespace {

using namespace std::chrono_literals;
using testing::Cluster;
using testing::FailingMemory;

constexpr std::int64_t kAll = std::int64_t{1} << 40;

Future<int> one_more_than(Future<int> number) { co_return co_await number + 1; }

// With a worker, whose pool runs what waits, and without one.
class FuturesWithoutMemory : public ::testing::TestWithParam<bool> {
 protected:
  FuturesWithoutMemory() {
    if (GetParam()) cluster_ = std::make_unique<Cluster>(1);
  }
  std::unique_ptr<Cluster> cluster_;
};

TEST_P(FuturesWithoutMemory, RunTheirContinuations) {
  const Promise<int> promise;
  const auto text = std::make_shared<const std::string>("what a continuation holds");
  const Future<int> doubled = promise.future().then(
      [text, more = std::vector<int>(3, 7)](int number) { return number * 2 + more[1]; });
  const Future<int> added = one_more_than(doubled);
  const Future<void> seen = added.then([](const Future<int>&) {});
  FailingMemory::begin(1, kAll);
  bool thrown = false;
  try {
    promise.set_value(10);
  } catch (...) {
    thrown = true;
  }
  const bool completed = seen.wait_for(20s);
  FailingMemory::end();
  EXPECT_FALSE(thrown);
  ASSERT_TRUE(completed);
  EXPECT_EQ(doubled.get(), 27);
  EXPECT_EQ(added.get(), 28);
}

// Continuations that have more to set up than their thread's context.
TEST_P(FuturesWithoutMemory, RunContinuationsUnderTheirAutocast) {
  const Promise<int> promise;
  Future<bool> as_made, awaited;
  const auto on_after = [](Future<int> number) -> Future<bool> {
    co_await number;
    co_return rpc::Autocast::is_on();
  };
  {
    const rpc::AutocastScope scope({at::kBFloat16, std::nullopt});
    rpc::ExecutionContext here = rpc::ExecutionContext::captured();
    here.autocast = std::make_shared<const rpc::Autocast>(rpc::Autocast::current());
    const rpc::ExecutionContextScope inside(here);
    as_made = promise.future().then([](int) { return rpc::Autocast::is_on(); });
    awaited = on_after(promise.future());
  }
  FailingMemory::begin(1, kAll);
  promise.set_value(1);
  const bool completed = as_made.wait_for(20s) && awaited.wait_for(20s);
  FailingMemory::end();
  ASSERT_TRUE(completed);
  EXPECT_TRUE(as_made.get());
  EXPECT_TRUE(awaited.get());
  EXPECT_FALSE(rpc::Autocast::is_on());
}

// A thread's first wait is noted for reports, where there is memory for that.
TEST_P(FuturesWithoutMemory, AreWaitedForByNewThreads) {
  const Promise<int> promise;
  std::atomic<bool> waits{false};
  std::jthread thread([&] {
    waits = true;
    EXPECT_EQ(promise.future().get(), 3);
    EXPECT_EQ(promise.future().get(), 3);
  });
  FailingMemory::begin(1, kAll);
  while (!waits) std::this_thread::yield();
  std::this_thread::sleep_for(5ms);  // it sleeps in get() by now, most likely
  FailingMemory::end();
  promise.set_value(3);
}

TEST_P(FuturesWithoutMemory, TellOfMembersThatFailed) {
  const Promise<int> first, second;
  const auto all = when_all(std::vector<Future<int>>{first.future(), second.future()});
  const auto both = when_all(first.future(), second.future());
  const auto error =
      std::make_exception_ptr(Error(ErrorCode::disconnected, "the first has failed"));
  FailingMemory::begin(1, kAll);
  first.set_exception(error);
  second.set_exception(error);
  FailingMemory::end();
  ASSERT_TRUE(all.ready() && both.ready());
  for (const Error& reason : {all.error(), both.error()}) {
    EXPECT_EQ(reason.code(), ErrorCode::disconnected);
    EXPECT_EQ(std::string(reason.what()).find("the first has failed"), 0U) << reason.what();
  }
}

// A future that a continuation returned has a value that cannot be copied; or cannot be followed.
TEST_P(FuturesWithoutMemory, FailWithWhatTheFollowedOneCouldNotDo) {
  const std::string long_text(100, 'x');
  int failed = 0, copies_failed = 0;
  // Several times: memory that one attempt has freed is none that the next one has to allocate, so
  // that the first ones may pass over the copy.
  int times = 0;
  for (std::int64_t at = 1; times < 4; ++at) {
    ASSERT_LT(at, 1'000);
    const Promise<void> begin;
    const Promise<std::string> inner;
    const Future<std::string> outer =
        begin.future().then([future = inner.future()] { return future; });
    std::string text = long_text;
    FailingMemory::begin(at, kAll);
    begin.set_value();
    if (GetParam()) static_cast<void>(outer.wait_for(10ms));  // it follows, or has failed
    const bool follows = !outer.ready();
    inner.set_value(std::move(text));
    const bool completed = outer.wait_for(20s);
    const bool any = FailingMemory::end() != 0;
    ASSERT_TRUE(completed) << "without the allocation " << at << " and those after it";
    if (!outer.has_error()) {
      EXPECT_EQ(outer.get(), long_text);
    } else {
      ++failed;
      if (follows) ++copies_failed;
      EXPECT_THROW(outer.get(), std::bad_alloc) << at;
    }
    if (!any) {
      ++times;
      at = 0;
    }
  }
  EXPECT_GT(failed, 0);
  EXPECT_GT(copies_failed, 0);
}

// co_await without memory throws where it stands, and leaves what was current there.
Future<int> value_or_minus_one(Future<int> number, bool* same) {
  rpc::ExecutionContext inside = rpc::ExecutionContext::captured();
  inside.deadline -= 1h;  // of never
  const rpc::ExecutionContextScope scope(inside);
  int value = -1;
  try {
    value = co_await number;
  } catch (const std::bad_alloc&) {
  }
  *same = rpc::ExecutionContext::current().deadline == inside.deadline;
  co_return value;
}

TEST_P(FuturesWithoutMemory, ThrowWhereACoroutineWouldHaveWaited) {
  const rpc::ExecutionContextScope scope(rpc::ExecutionContext::captured());
  int thrown = 0;
  for (std::int64_t at = 1;; ++at) {
    ASSERT_LT(at, 1'000);
    const Promise<int> promise;
    const Future<int> number = promise.future();
    bool same = false;
    Future<int> outcome;
    FailingMemory::begin(at);
    try {
      outcome = value_or_minus_one(number, &same);
    } catch (const std::bad_alloc&) {  // no memory for the coroutine itself
    }
    const bool any = FailingMemory::end() != 0;
    EXPECT_EQ(rpc::ExecutionContext::current().deadline, rpc::Clock::time_point::max());
    promise.set_value(5);
    if (outcome.valid()) {
      ASSERT_TRUE(outcome.wait_for(20s)) << at;
      if (outcome.get() == -1) {
        ++thrown;
      } else {
        EXPECT_EQ(outcome.get(), 5);
      }
      EXPECT_TRUE(same) << at;
    }
    if (!any) break;
  }
  EXPECT_GT(thrown, 1);
}

// A handler has returned a coroutine that refers to its arguments; what waits for it has its
// memory.
std::atomic<int> destroyed{0};
struct Argument {
  int value = 0;
  Argument() = default;
  explicit Argument(int number) : value(number) {}
  Argument(Argument&& other) noexcept : value(std::exchange(other.value, 0)) {}
  Argument& operator=(Argument&& other) noexcept {
    value = std::exchange(other.value, 0);
    return *this;
  }
  ~Argument() {
    if (value != 0) ++destroyed;
  }
  template <class Archive>
  void serialize(Archive& archive) {
    archive(value);
  }
};
std::unique_ptr<Promise<int>> later;
std::atomic<bool> has_begun{false};
std::atomic<int> destroyed_inside{0};
std::atomic<std::int64_t> failing{0};
Future<int> works_on(const Argument& argument) {
  co_await later->future();
  destroyed_inside = destroyed.load();
  co_return argument.value;
}
Future<int> begins(const Argument& argument) {
  auto result = works_on(argument);
  has_begun = true;
  FailingMemory::begin(failing);
  return result;
}

TEST(HandlersWithoutMemory, KeepTheArgumentsOfACoroutineThatWaits) {
  const auto cluster = std::make_unique<Cluster>(1);
  int failed = 0;
  for (failing = 1; failing <= 12; ++failing) {
    later = std::make_unique<Promise<int>>();
    has_begun = false;
    const auto call = rpc_async<begins>("worker0", Argument(42));
    while (!has_begun) std::this_thread::sleep_for(1ms);
    std::this_thread::sleep_for(20ms);  // it waits for the coroutine by then, or has given up
    failed += FailingMemory::end() != 0 ? 1 : 0;
    destroyed = 0;
    destroyed_inside = -1;
    later->set_value(1);
    ASSERT_TRUE(call.wait_for(20s)) << failing;
    EXPECT_EQ(destroyed_inside, 0) << failing;
    EXPECT_EQ(call.get(), 42) << failing;
  }
  EXPECT_LT(failed, 12);  // there are so few that all have been tried
}

INSTANTIATE_TEST_SUITE_P(Workers, FuturesWithoutMemory, ::testing::Bool(), [](const auto& info) {
  return info.param ? "WithAWorker" : "WithoutOne";
});

}  // namespace
}  // namespace stitch::future_memory_test
