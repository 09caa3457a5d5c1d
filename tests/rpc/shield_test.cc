// How far a stop and a deadline reach: shield(), detached(), with_timeout().

#include "tests/support/resident_memory.h"
#include "tests/support/world_test.h"

namespace shield_test {  // its functions are registered under their full names
namespace {

using namespace stitch::testing;

Future<int> await(Future<int> future) { co_return co_await future; }

TEST(Shield, KeepsAStopFromWhatOthersNeed) {
  int asked = 0;
  const Promise<int> promise;
  promise.on_cancel([&] { ++asked; });
  const auto shared = promise.future();
  const auto work = [&]() -> Future<int> { co_return co_await stitch::shield(shared); };
  const auto stopped = work(), goes_on = work();
  stopped.cancel();
  EXPECT_EQ(stopped.error().code(), ErrorCode::cancelled);
  EXPECT_EQ(asked, 0);
  EXPECT_FALSE(goes_on.ready());
  EXPECT_TRUE(promise.set_value(3));
  EXPECT_EQ(goes_on.get(), 3);
}

TEST(Shield, HasTheOutcome) {
  EXPECT_EQ(stitch::shield(make_ready(4)).get(), 4);
  EXPECT_EQ(*stitch::shield(make_ready(std::make_unique<int>(4))).get(), 4);
  stitch::shield(make_ready()).get();
  const auto failed = make_failed<int>({ErrorCode::timeout, "late"});
  EXPECT_EQ(stitch::shield(failed).error().code(), ErrorCode::timeout);
  EXPECT_EQ(error_of([] { static_cast<void>(stitch::shield(Future<int>())); }).code(),
            ErrorCode::invalid_argument);
  const Promise<int> promise;
  const auto shielded = stitch::shield(promise.future());
  promise.future().cancel();
  EXPECT_EQ(shielded.error().code(), ErrorCode::cancelled);
}

TEST(Shield, LeavesNothingWithAFutureThatIsAwaitedInVain) {
  const Promise<int> promise;
  const auto wait_in_vain = [&] {
    await(stitch::shield(promise.future())).cancel();
    static_cast<void>(stitch::shield(promise.future()));
    static_cast<void>(when_any(stitch::shield(promise.future()), make_ready(1)).get());
  };
  const auto uses = promise.shared_state().use_count();
  for (int i = 0; i < 1000; ++i) wait_in_vain();
  EXPECT_EQ(promise.shared_state().use_count(), uses);
  const auto before = resident_bytes();
  for (int i = 0; i < 20'000; ++i) wait_in_vain();
  if (!kAddressSanitizer) {  // which keeps freed memory for a while
    EXPECT_LT(resident_bytes(), before + (2 << 20)) << "100 bytes for each";
  }
  promise.set_value(1);
}

int answer() { return 3; }
std::atomic<int> background{0};
std::atomic<bool> asks_under_nothing{false};
std::unique_ptr<Promise<int>> gate;

int begin_in_background() {
  const auto work = [kept = std::string(100, 'x')]() -> Future<void> {
    co_await gate->future();
    background += co_await rpc_async<answer>("worker0") + static_cast<int>(kept.size());
  };
  static_cast<void>(stitch::detached(work));
  stitch::detached([] {
    const auto& context = stitch::rpc::ExecutionContext::current();
    asks_under_nothing = context.deadline == stitch::rpc::Clock::time_point::max() &&
                         !current_stop_token().stop_possible() &&
                         context.autograd_context == nullptr && context.runtime != nullptr;
  });
  return 1;
}

TEST(Detached, WorkOutlivesItsCall) {
  Cluster cluster(2);
  gate = std::make_unique<Promise<int>>();
  background = 0;
  asks_under_nothing = false;
  EXPECT_EQ(rpc_sync<begin_in_background>({.to = "worker1", .timeout = 200ms}), 1);
  std::this_thread::sleep_for(250ms);  // the deadline of the call that has begun it
  gate->set_value(1);
  EXPECT_TRUE(eventually([] { return background == 103; }));
  EXPECT_TRUE(asks_under_nothing);
  gate = nullptr;
}

TEST(Detached, ItsFunctionLivesUntilTheWorkHasEnded) {
  Cluster cluster(1);
  const Promise<void> never;
  auto kept = std::make_shared<int>(7);
  const std::weak_ptr<int> watch = kept;
  std::atomic<int> lived{-1};
  const auto work =
      stitch::detached([kept, watch, future = never.future(), &lived]() -> Future<void> {
        try {
          co_await future;
        } catch (const Error&) {
          std::this_thread::sleep_for(20ms);  // the future is complete
          lived = watch.expired() ? 0 : 1;
        }
      });
  kept = nullptr;
  work.cancel();
  EXPECT_TRUE(eventually([&] { return lived != -1; }));
  EXPECT_EQ(lived, 1);
  EXPECT_TRUE(eventually([&] { return watch.expired(); }));
}

TEST(Detached, ReturnsWhatItsFunctionDoes) {
  EXPECT_EQ(stitch::detached([] { return 2; }), 2);
  EXPECT_EQ(stitch::detached([] { return make_ready(2); }).get(), 2);
  EXPECT_THROW(stitch::detached([] { throw std::runtime_error("from the function"); }),
               std::runtime_error);
}

TEST(WithTimeout, BoundsTheWaitAndNotTheWork) {
  Cluster cluster(1);
  int asked = 0;
  const Promise<int> promise;
  promise.on_cancel([&] { ++asked; });
  const auto late = stitch::with_timeout(promise.future(), 5ms);
  const auto error = error_of([&] { late.get(); });
  EXPECT_EQ(error.code(), ErrorCode::timeout);
  EXPECT_STREQ(error.what(), "future was not complete after 5 ms; its work goes on");
  EXPECT_EQ(asked, 0);
  const auto in_time = stitch::with_timeout(promise.future(), 1min);
  const auto unbounded = stitch::with_timeout(promise.future(), std::chrono::hours::max());
  EXPECT_TRUE(promise.set_value(4));
  EXPECT_EQ(in_time.get(), 4);
  EXPECT_EQ(unbounded.get(), 4);
  const Promise<int> stopped;
  stitch::with_timeout(stopped.future(), 1min).cancel();
  EXPECT_EQ(stopped.future().error().code(), ErrorCode::cancelled);
}

TEST(WithTimeout, EndsWithItsWorker) {
  Future<int> waits;
  const Promise<int> never;
  {
    Cluster cluster(1);
    waits = stitch::with_timeout(never.future(), 1h);
  }
  EXPECT_EQ(error_of([&] { waits.get(); }).code(), ErrorCode::cancelled);
  EXPECT_THROW(static_cast<void>(stitch::with_timeout(never.future(), 1h)), Error);
}

}  // namespace
}  // namespace shield_test
