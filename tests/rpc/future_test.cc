#include "tests/support/world_test.h"

namespace future_test {
namespace {

using namespace stitch::testing;

TEST(Future, GivesTheValueToEveryCopy) {
  Promise<int> promise;
  Future<int> first = promise.future();
  Future<int> second = first;
  EXPECT_FALSE(first.ready());
  EXPECT_FALSE(first.wait_for(1ms));
  EXPECT_TRUE(promise.set_value(7));
  EXPECT_FALSE(promise.set_value(8));
  EXPECT_EQ(first.get(), 7);
  EXPECT_EQ(second.get(), 7);
  EXPECT_EQ(second.get(), 7);
  EXPECT_FALSE(second.has_error());
}

TEST(Future, MovesOutWhatCannotBeCopied) {
  Promise<std::unique_ptr<int>> promise;
  promise.set_value(std::make_unique<int>(3));
  EXPECT_EQ(*promise.future().get(), 3);
}

TEST(Future, MovesOutContainersOfWhatCannotBeCopied) {
  using Many = std::vector<std::unique_ptr<int>>;
  Many many;
  many.push_back(std::make_unique<int>(3));
  EXPECT_EQ(*make_ready(std::move(many)).get().front(), 3);
  std::map<int, Many> nested;
  nested[1].push_back(std::make_unique<int>(4));
  EXPECT_EQ(*make_ready(std::make_pair(1, std::move(nested))).get().second.at(1).front(), 4);
  std::vector<Future<std::unique_ptr<int>>> futures;
  futures.push_back(make_ready(std::make_unique<int>(5)));
  EXPECT_EQ(*when_all(std::move(futures)).get().front(), 5);
}

TEST(Future, IsMadeReadyInEveryForm) {
  const int value = 3;
  EXPECT_EQ(make_ready<int>(value).get(), 3);
  EXPECT_EQ(make_ready(value).get(), 3);
  EXPECT_EQ(make_ready<double>(3).get(), 3.0);
  EXPECT_EQ(std::string(make_ready("text").get()), "text");
  make_ready<void>().get();
  const Promise<void> promise;
  std::jthread([promise] { promise.set_value(); }).join();
  promise.future().get();
  const std::string text = "kept";
  EXPECT_EQ(make_ready(1).then([&](int) -> const std::string& { return text; }).get(), "kept");
  // What refers to its argument is copied in time.
  EXPECT_EQ(make_ready(std::string(100, 'x')).then(std::identity()).get(), std::string(100, 'x'));
  EXPECT_EQ(make_ready(1).then([](int x) -> const Future<int> { return make_ready(x); }).get(), 1);
}

struct Tree : std::vector<Tree> {};

TEST(Future, HoldsContainersOfThemselves) {
  EXPECT_EQ(make_ready(Tree{{{}, {}}}).get().size(), 2U);
}

Future<int> loop(int left) {
  return make_ready(left).then([](int now) { return now == 0 ? make_ready(0) : loop(now - 1); });
}

TEST(Future, CallbacksOfOneFutureKeepTheirOrderInsideAnother) {
  Promise<int> outer;
  std::vector<int> order;
  outer.future().on_ready([&] {
    Promise<int> inner;
    inner.future().on_ready([&] { order.push_back(1); });
    inner.set_value(1);
    inner.future().on_ready([&] { order.push_back(2); });
    order.push_back(0);
  });
  outer.set_value(1);
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2}));
}

// A chain of `links` continuations on `first`, and its end.
Future<int> chain(Future<int> first, int links) {
  for (int i = 0; i < links; ++i) first = first.then([](int x) { return x + 1; });
  return first;
}
// Counts down by futures that follow futures.
Future<int> count_down(Promise<int> start, int left) {
  return start.future().then([left](int so_far) -> Future<int> {
    if (left == 0) return make_ready(so_far);
    Promise<int> next;
    auto rest = count_down(next, left - 1);
    next.set_value(so_far + 1);
    return rest;
  });
}

TEST(Future, LongChainsNeedNoDeepStack) {
  constexpr int kLinks = 50'000;
  {
    Promise<int> promise;
    const auto end = chain(promise.future(), kLinks);
    promise.set_value(0);
    EXPECT_EQ(end.get(), kLinks);
  }
  {
    Promise<int> promise;
    const auto end = chain(promise.future(), kLinks);
    promise.set_error({ErrorCode::timeout, "late"});
    EXPECT_EQ(end.error().code(), ErrorCode::timeout);
  }
  {
    Promise<int> promise;
    bool asked = false;
    promise.on_cancel([&] { asked = true; });
    const auto end = chain(promise.future(), kLinks);
    end.cancel();
    EXPECT_EQ(end.error().code(), ErrorCode::cancelled);
    EXPECT_TRUE(asked);
  }
  Future<int> dropped;
  {
    Promise<int> promise;
    dropped = chain(promise.future(), kLinks);
  }
  EXPECT_EQ(dropped.error().code(), ErrorCode::cancelled);
  Promise<int> start;
  const auto end = count_down(start, 2'000);
  start.set_value(0);
  EXPECT_EQ(end.get(), 2'000);
  EXPECT_EQ(loop(20'000).get(), 0);
}

TEST(Future, AContinuationMayWaitForWhatComesAfterIt) {
  Promise<int> first;
  Promise<int> second;
  const auto later = second.future().then([](int x) { return x + 1; });
  const auto waits = first.future().then([&](int x) {
    second.set_value(x);
    return later.get() + when_all(std::vector{later, second.future()}).get().front();
  });
  first.set_value(1);
  EXPECT_EQ(waits.get(), 4);
}

TEST(Future, ThenPassesValuesErrorsAndFutures) {
  EXPECT_EQ(make_ready(2).then([](int x) { return x + 1; }).get(), 3);
  EXPECT_EQ(make_ready(2).then([](int x) { return make_ready(x * 10); }).get(), 20);
  EXPECT_EQ(make_ready().then([] { return 5; }).get(), 5);
  bool called = false;
  auto failed = make_failed<int>({ErrorCode::timeout, "late"}).then([&](int) { called = true; });
  EXPECT_EQ(failed.error().code(), ErrorCode::timeout);
  EXPECT_FALSE(called);
  EXPECT_TRUE(make_failed<int>({ErrorCode::timeout, "late"})
                  .then([](Future<int> done) { return done.has_error(); })
                  .get());
}

TEST(Future, AThrowingContinuationHarmsNoOther) {
  Promise<int> promise;
  auto before = promise.future().then([](int x) { return x; });
  auto throwing = promise.future().then([](int) -> int { throw std::runtime_error("boom"); });
  auto after = promise.future().then([](int x) { return x; });
  promise.set_value(4);
  EXPECT_EQ(before.get(), 4);
  EXPECT_THROW(throwing.get(), std::runtime_error);
  EXPECT_STREQ(throwing.error().what(), "std::runtime_error: boom");
  EXPECT_EQ(after.get(), 4);
}

TEST(Future, CallbacksRunInTheOrderInWhichTheyWereAdded) {
  Promise<int> promise;
  std::vector<int> order;
  for (int i = 0; i < 100; ++i) promise.future().on_ready([&, i] { order.push_back(i); });
  promise.set_value(0);
  promise.future().on_ready([&] { order.push_back(100); });
  ASSERT_EQ(order.size(), 101u);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST(Future, DroppedPromisesCancel) {
  Future<int> future;
  {
    Promise<int> promise;
    future = promise.future();
  }
  EXPECT_EQ(future.error().code(), ErrorCode::cancelled);
}

TEST(Future, WhenAllGathersValuesInOrder) {
  Promise<int> late;
  auto all = when_all(std::vector<Future<int>>{late.future(), make_ready(2)});
  EXPECT_FALSE(all.ready());
  late.set_value(1);
  EXPECT_EQ(all.get(), (std::vector<int>{1, 2}));
  auto [a, b] = when_all(make_ready(1), make_ready(std::string("x"))).get();
  EXPECT_EQ(a, 1);
  EXPECT_EQ(b, "x");
  when_all(std::vector<Future<void>>{}).get();
}

TEST(Future, WhenAllReportsTheFirstErrorAndCountsTheOthers) {
  auto all = when_all(std::vector<Future<int>>{make_failed<int>({ErrorCode::timeout, "first"}),
                                               make_ready(2),
                                               make_failed<int>({ErrorCode::internal, "second"})});
  EXPECT_EQ(all.error().code(), ErrorCode::timeout);
  EXPECT_STREQ(all.error().what(), "first (and 1 other failed)");
}

TEST(Future, WhenAnyGivesTheFirst) {
  Promise<int> never;
  const auto [index, value] = when_any(never.future(), make_ready(9)).get();
  EXPECT_EQ(index, 1u);
  EXPECT_EQ(value, 9);
}

TEST(Future, WhenAnyTakesFuturesOfDifferentTypes) {
  Promise<int> number;
  Promise<std::string> text;
  Promise<void> nothing;
  const auto first = when_any(number.future(), text.future(), nothing.future());
  EXPECT_FALSE(first.ready());
  text.set_value("first");
  number.set_value(1);
  EXPECT_EQ(first.get().index(), 1U);
  EXPECT_EQ(std::get<1>(first.get()), "first");
  const auto failed = when_any(make_failed<int>({ErrorCode::timeout, "late"}), nothing.future());
  EXPECT_EQ(failed.error().code(), ErrorCode::timeout);
  nothing.set_value();
  EXPECT_EQ(when_any(Promise<int>().future(), nothing.future()).get().index(), 1U);
}

TEST(Future, CancellingAGroupCancelsItsMembers) {
  Promise<int> a;
  Promise<std::string> b;
  when_any(std::vector{a.future()}).cancel();
  EXPECT_EQ(a.future().error().code(), ErrorCode::cancelled);
  Promise<int> c;
  when_any(c.future(), b.future()).cancel();
  EXPECT_TRUE(c.future().has_error() && b.future().has_error());
}

TEST(Future, ManyThreadsCompleteWaitAndContinue) {
  for (int round = 0; round < 200; ++round) {
    Promise<int> promise;
    std::atomic<int> completions{0};
    std::atomic<int> continued{0};
    {
      std::vector<std::jthread> threads;
      for (int i = 0; i < 3; ++i) {
        threads.emplace_back([&, i] { completions += promise.set_value(i) ? 1 : 0; });
        threads.emplace_back([&] { promise.future().on_ready([&] { ++continued; }); });
        threads.emplace_back([&] { promise.future().get(); });
      }
    }
    EXPECT_EQ(completions, 1);
    EXPECT_EQ(continued, 3);
  }
}

Future<int> sum_of(Future<int> a, Future<int> b) { co_return co_await a + co_await b; }
Future<int> fails() {
  throw Error(ErrorCode::out_of_range, "too far");
  co_return 0;
}
Future<int> catches() {
  try {
    co_return co_await fails();
  } catch (const Error& error) {
    co_return static_cast<int>(error.code());
  }
}

TEST(Coroutine, AwaitsFutures) {
  Promise<int> promise;
  auto sum = sum_of(promise.future(), make_ready(2));
  EXPECT_FALSE(sum.ready());
  promise.set_value(40);
  EXPECT_EQ(sum.get(), 42);
}

TEST(Coroutine, CarriesErrors) {
  EXPECT_EQ(catches().get(), static_cast<int>(ErrorCode::out_of_range));
}

// Counts in its destructor, which takes a while.
class SlowToDestroy {
 public:
  explicit SlowToDestroy(std::atomic<int>& gone) : gone_(&gone) {}
  SlowToDestroy(SlowToDestroy&& other) noexcept : gone_(std::exchange(other.gone_, nullptr)) {}
  SlowToDestroy& operator=(SlowToDestroy&&) = delete;
  ~SlowToDestroy() {
    if (gone_ == nullptr) return;
    std::this_thread::sleep_for(20ms);
    ++*gone_;
  }

 private:
  std::atomic<int>* gone_;
};
Future<int> with_locals(SlowToDestroy, std::atomic<int>& gone, Future<int> gate) {
  const SlowToDestroy local(gone);
  const int value = co_await gate;
  if (value < 0) throw Error(ErrorCode::out_of_range, "negative");
  co_return value;
}
Future<void> with_locals_and_nothing_to_say(SlowToDestroy, std::atomic<int>& gone,
                                            Future<int> gate) {
  const SlowToDestroy local(gone);
  co_await gate;
}

TEST(Coroutine, PublishesItsOutcomeWhenItsLocalsAndParametersAreGone) {
  for (const int value : {7, -1}) {
    for (const bool ready_before : {false, true}) {
      Promise<int> gate;
      if (ready_before) gate.set_value(value);
      std::atomic<int> gone = 0, gone_too = 0, seen = -1;
      auto outcome = with_locals(SlowToDestroy(gone), gone, gate.future());
      auto nothing =
          with_locals_and_nothing_to_say(SlowToDestroy(gone_too), gone_too, gate.future());
      outcome.on_ready([&] { seen = gone.load(); });
      std::jthread opener([&] { gate.set_value(value); });
      EXPECT_EQ(outcome.then([](Future<int> done) { return done.has_error(); }).get(), value < 0);
      EXPECT_EQ(seen, 2);
      nothing.get();
      EXPECT_EQ(gone_too, 2);
    }
  }
}

Future<std::unique_ptr<int>> what_cannot_be_copied(Future<int> gate) {
  co_return std::make_unique<int>(co_await gate);
}

TEST(Coroutine, ReturnsWhatCannotBeCopied) {
  EXPECT_EQ(*what_cannot_be_copied(make_ready(3)).get(), 3);
}

std::string current_name() { return stitch::rpc::current_agent()->self().name; }
Future<std::string> name_before_and_after(const Worker& worker, Future<int> gate) {
  const WorkerScope in(worker);
  const std::string before = current_name();
  co_await gate;
  co_return before + "," + current_name();
}

TEST(Coroutine, KeepsItsWorkerAndLeavesItsCallersAlone) {
  Cluster cluster(2);
  Promise<int> gate;
  auto names = name_before_and_after(cluster[1], gate.future());
  EXPECT_EQ(current_name(), "worker0");
  std::jthread opener([gate] { gate.set_value(0); });
  EXPECT_EQ(names.get(), "worker1,worker1");
  EXPECT_EQ(current_name(), "worker0");
}

int square(int x) { return x * x; }

Future<int> squares_twice() {
  const int once = co_await rpc_async<square>("worker0", 2);
  co_return rpc_sync<square>("worker0", once);
}

// A main() makes no worker current: what waits must not hold up the thread that brings the answers.
TEST(Continuation, MayWaitOnTheOnlyWorkerOfTheProcess) {
  const auto self = stitch::init({.rank = 0, .world_size = 1, .rpc_timeout = 10s});
  const auto waits = [](int x) {
    return current_name() + " " + std::to_string(rpc_sync<square>("worker0", x));
  };
  EXPECT_EQ(rpc_async<square>("worker0", 2).then(waits).get(), "worker0 16");
  EXPECT_EQ(when_all(rpc_async<square>("worker0", 2), make_ready(1))
                .then([&](const std::tuple<int, int>& both) { return waits(std::get<0>(both)); })
                .get(),
            "worker0 16");
  EXPECT_EQ(squares_twice().get(), 16);
}

TEST(Continuation, MayWaitOnAnyWorkerOfTheProcess) {
  Cluster cluster(2);
  const stitch::rpc::ExecutionContextScope as_in_main{stitch::rpc::ExecutionContext()};
  Worker& worker = cluster[0];
  EXPECT_EQ(worker.rpc_async<square>("worker1", 2)
                .then([&](int x) { return worker.rpc_sync<square>("worker1", x); })
                .get(),
            16);
}

TEST(Continuation, KeepsItsWorker) {
  Cluster cluster(2);
  Promise<int> gate;
  Future<std::string> name;
  {
    const WorkerScope in(cluster[1]);
    name = gate.future().then([](int) { return current_name(); });
  }
  gate.set_value(0);
  EXPECT_EQ(name.get(), "worker1");
}

}  // namespace
}  // namespace future_test
