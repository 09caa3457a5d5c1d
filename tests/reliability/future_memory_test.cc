// What waits for a future goes on when it completes, also where there is no memory left.

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "stitch/rpc/future/future.h"
#include "tests/support/cluster.h"
#include "tests/support/failing_memory.h"

namespace stitch::future_memory_test {
namespace {

using namespace std::chrono_literals;
using testing::Cluster;
using testing::FailingMemory;

constexpr std::int64_t kAll = std::numeric_limits<std::int64_t>::max() - 1;

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
  int failed = 0;
  for (std::int64_t at = 1;; ++at) {
    ASSERT_LT(at, 1'000);
    const Promise<void> begin;
    const Promise<std::string> inner;
    const Future<std::string> outer =
        begin.future().then([future = inner.future()] { return future; });
    FailingMemory::begin(at, kAll);
    begin.set_value();
    if (GetParam()) static_cast<void>(outer.wait_for(10ms));  // it follows, or has failed
    inner.set_value(std::string(long_text.data(), 10));
    const bool completed = outer.wait_for(20s);
    const bool any = FailingMemory::end() != 0;
    ASSERT_TRUE(completed) << "without the allocation " << at << " and those after it";
    if (!outer.has_error()) {
      EXPECT_EQ(outer.get(), long_text.substr(0, 10));
    } else {
      ++failed;
      EXPECT_THROW(outer.get(), std::bad_alloc) << at;
    }
    if (!any) break;
  }
  EXPECT_GT(failed, 0);
}

// co_await without memory throws where it stands, and leaves what was current there.
Future<int> value_or_minus_one(Future<int> number, bool* same) {
  const rpc::ExecutionContext before = rpc::ExecutionContext::captured();
  int value = -1;
  try {
    value = co_await number;
  } catch (const std::bad_alloc&) {
  }
  *same = rpc::ExecutionContext::current().runtime == before.runtime;
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

INSTANTIATE_TEST_SUITE_P(Workers, FuturesWithoutMemory, ::testing::Bool(), [](const auto& info) {
  return info.param ? "WithAWorker" : "WithoutOne";
});

}  // namespace
}  // namespace stitch::future_memory_test
