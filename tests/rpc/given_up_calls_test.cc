// Calls and coroutines of handlers that are given up: stop callbacks, tokens, arguments, answers.

#include <stop_token>

#include "tests/support/world_test.h"

namespace given_up_calls_test {  // its functions are registered under their full names
namespace {

using namespace std::chrono_literals;
using stitch::Error;
using stitch::Future;
using stitch::Options;
using stitch::Promise;
using stitch::testing::Cluster;
using stitch::testing::eventually;

std::unique_ptr<Promise<int>> never;
std::atomic<int> begun{0};
std::atomic<int> ended{0};
std::atomic<bool> called_back{false};
stitch::Worker* worker1 = nullptr;
int answer() { return 3; }

// Its code has a token of its own once it has awaited something.
Future<int> with_a_callback() {
  co_await stitch::rpc_async<answer>("worker1");
  const auto ask = [] {
    const stitch::WorkerScope scope(*worker1);
    called_back = stitch::rpc_sync<answer>("worker0") == 3;
  };
  const std::stop_callback callback(stitch::current_stop_token(), ask);
  ++begun;
  try {
    co_await never->future();
  } catch (const Error&) {
    EXPECT_TRUE(eventually([] { return called_back.load(); }));
  }
  ++ended;
  co_return 0;
}

std::atomic<int> told{0};
// At its own token, where it is given none.
Future<int> looks_at(std::optional<std::stop_token> given) {
  co_await stitch::rpc_async<answer>("worker1");
  const std::stop_token token = given ? *given : stitch::current_stop_token();
  ++begun;
  try {
    co_await never->future();
  } catch (const Error&) {
    told += token.stop_requested() ? 1 : 0;
  }
  ++ended;
  co_return 0;
}
Future<int> looks_at_its_token() { return looks_at(std::nullopt); }
// That of the call, two further out.
Future<int> passes_its_token_on() {
  const std::stop_token token = stitch::current_stop_token();
  co_await stitch::rpc_async<answer>("worker1");
  const std::optional<std::stop_token> given(token);
  co_return co_await looks_at(given);
}

TEST(GivenUpCalls, ACoroutineInsideAStoppedOneFindsTheTokenThatItWasGivenStopped) {
  Cluster cluster(2);
  told = 0;
  constexpr int kStops = 50;
  for (int i = 0; i < kStops; ++i) {
    never = std::make_unique<Promise<int>>();
    begun = ended = 0;
    const auto call = stitch::rpc_async<passes_its_token_on>("worker1");
    EXPECT_TRUE(eventually([] { return begun == 1; }));
    call.cancel();
    EXPECT_TRUE(eventually([] { return ended == 1; }));
  }
  EXPECT_EQ(told, kStops);
  never = nullptr;
}

// What it awaited fails because it was stopped: it can tell that from any other failure.
TEST(GivenUpCalls, AStoppedCoroutineFindsItsTokenStopped) {
  Cluster cluster(2);
  for (const bool can_stop : {false, true}) {
    told = 0;
    constexpr int kStops = 50;
    for (int i = 0; i < kStops; ++i) {
      never = std::make_unique<Promise<int>>();
      if (can_stop) never->on_cancel([] {});
      begun = ended = 0;
      const auto call = stitch::rpc_async<looks_at_its_token>("worker1");
      EXPECT_TRUE(eventually([] { return begun == 1; }));
      call.cancel();
      EXPECT_TRUE(eventually([] { return ended == 1; }));
    }
    EXPECT_EQ(told, kStops) << can_stop;
  }
  never = nullptr;
}

// On whichever thread the stop is noticed.
TEST(GivenUpCalls, StopCallbacksOfCoroutinesMayWaitForFutures) {
  for (const bool by_deadline : {false, true}) {
    Cluster cluster(2);
    worker1 = &cluster[1];
    for (int i = 0; i < 10; ++i) {
      never = std::make_unique<Promise<int>>();
      begun = ended = 0;
      called_back = false;
      const auto call =
          by_deadline ? stitch::rpc_async<with_a_callback>({.to = "worker1", .timeout = 100ms})
                      : stitch::rpc_async<with_a_callback>("worker1");
      EXPECT_TRUE(eventually([] { return begun == 1; }));
      if (!by_deadline) call.cancel();
      EXPECT_TRUE(eventually([] { return called_back && ended == 1; })) << by_deadline << ", " << i;
      never = nullptr;
    }
  }
}

Future<int> nested(int depth, const Future<int>& innermost) {
  if (depth == 0) {
    co_await stitch::make_ready(1);
    co_return co_await innermost.then(
        [](int) { return stitch::current_stop_token().stop_requested() ? 1 : 0; });
  }
  co_return co_await nested(depth - 1, innermost);
}

// The stack that each takes to begin the next one is larger under sanitizers and without
// optimization.
#ifdef __OPTIMIZE__
constexpr bool kLargeFrames =
    stitch::testing::kAddressSanitizer || stitch::testing::kThreadSanitizer;
#else
constexpr bool kLargeFrames = true;
#endif
constexpr int kDepth = kLargeFrames ? 2'000 : 20'000;

// Each has a token that its caller's passes on to: the innermost asks for the first of them.
TEST(GivenUpCalls, CoroutinesMayBeNestedDeeplyAndAskForATokenInside) {
  const Promise<int> innermost;
  const auto outermost = nested(kDepth, innermost.future());
  innermost.set_value(1);
  EXPECT_EQ(outermost.get(), 0);
}

// Each has awaited something when it begins the next one, so that it has a token by then.
struct Nest {
  explicit Nest(std::size_t depth) : gates(depth + 1) {}
  Future<int> enter(std::size_t depth) {
    co_await gates[depth].future();
    if (depth == 0) {
      token = stitch::current_stop_token();
      co_return co_await innermost.future();
    }
    co_return co_await enter(depth - 1);
  }
  Future<int> enter_all() {
    auto outermost = enter(gates.size() - 1);
    for (std::size_t depth = gates.size(); depth-- > 0;) gates[depth].set_value();
    return outermost;
  }
  std::vector<Promise<void>> gates;
  Promise<int> innermost;
  std::stop_token token;
};

// A stop goes through the tokens of all of them, and neither takes stack for each nor has each look
// at all that it is inside.
TEST(GivenUpCalls, CoroutinesMayBeNestedDeeplyAndStopped) {
  Nest nest(kLargeFrames ? 20'000 : 200'000);
  const auto outermost = nest.enter_all();
  ASSERT_TRUE(nest.token.stop_possible());
  EXPECT_FALSE(nest.token.stop_requested());
  outermost.cancel();
  EXPECT_TRUE(nest.token.stop_requested());
  EXPECT_THROW(static_cast<void>(outermost.get()), Error);
}

// A stop callback that stops something else, and goes on once that has ended.
TEST(GivenUpCalls, AStopInsideAStopIsCompleteWhenItReturns) {
  constexpr std::size_t kDepths[] = {3, 3 * stitch::rpc::StopFlag::kMaxNestedStops};
  for (const std::size_t depth : kDepths) {
    Nest nest(depth);
    Nest other(depth);
    const auto outermost = nest.enter_all();
    const auto of_other = other.enter_all();
    ASSERT_TRUE(nest.token.stop_possible());
    bool complete = false;
    const std::stop_callback stop_other(nest.token, [&] {
      of_other.cancel();
      complete = other.token.stop_requested() && of_other.ready();
    });
    outermost.cancel();
    EXPECT_TRUE(complete) << depth;
  }
}

Future<int> shared;
Future<int> return_shared(const std::string&) {
  Future<int> copy = shared;
  ++begun;
  return copy;
}

// Their caller has cancelled them: they take nothing of what it may have under way.
TEST(GivenUpCalls, CallsThatReturnWhatOthersHoldAreAnswered) {
  Cluster cluster(2, [](Options& options) { options.max_inflight_calls = 8; });
  const Promise<int> promise;
  shared = promise.future();
  begun = 0;
  for (int i = 0; i < 50; ++i) {
    const auto call = stitch::rpc_async<return_shared>("worker1", std::string(1000, 'x'));
    ASSERT_TRUE(eventually([&] { return begun == i + 1 || call.ready(); }));
    ASSERT_FALSE(call.ready()) << call.error().what();
    call.cancel();
  }
  EXPECT_TRUE(eventually([&] {
    const auto numbers = cluster[1].debug_info();
    const auto held = numbers.find("rpc.peer.worker0.calls_held");
    return held == numbers.end() || held->second == 0;
  }));
  EXPECT_FALSE(shared.ready());
  const auto last = stitch::rpc_async<return_shared>("worker1", std::string());
  EXPECT_TRUE(promise.set_value(4));
  EXPECT_EQ(last.get(), 4);
  shared = {};
}

// One computation for all that ask for the same.
struct Key {
  std::string text;
  ~Key() { text = "destroyed"; }
  template <class Archive>
  void serialize(Archive& archive) {
    archive(text);
  }
};
std::unique_ptr<Promise<int>> may_compute;
Future<int> compute(const Key& key) {
  co_await may_compute->future();
  co_return key.text == std::string(100, 'x') ? 1 : 0;
}
Future<int> compute_once(const Key& key) {
  if (!shared.valid()) shared = compute(key);
  Future<int> copy = shared;
  ++begun;
  return copy;
}

// The caller whose arguments the work has gives up, another one does not.
TEST(GivenUpCalls, ArgumentsLiveAsLongAsTheWorkThatOthersWaitFor) {
  Cluster cluster(2);
  may_compute = std::make_unique<Promise<int>>();
  shared = {};
  begun = 0;
  std::vector<Future<int>> calls;
  for (int i = 0; i < 2; ++i) {
    calls.push_back(stitch::rpc_async<compute_once>("worker1", Key{std::string(100, 'x')}));
    EXPECT_TRUE(eventually([&] { return begun == i + 1; }));
  }
  calls[0].cancel();
  EXPECT_TRUE(eventually([&] {
    const auto numbers = cluster[1].debug_info();
    return numbers.at("rpc.peer.worker0.calls_held") == 1;
  }));
  may_compute->set_value(1);
  EXPECT_EQ(calls[1].get(), 1);
  shared = {};
  may_compute = nullptr;
}

std::atomic<bool> asked{false};
Future<int> await_future(Future<int> future) { co_return co_await future; }
Future<int> returns_late() {
  const auto token = stitch::current_stop_token();
  begun = 1;
  EXPECT_TRUE(eventually([&] { return token.stop_requested(); }));
  std::this_thread::sleep_for(20ms);  // all that a stop does has been done by then
  return await_future(never->future());
}

TEST(GivenUpCalls, AStopThatComesBeforeItsHandlerReturnsReachesWhatItReturns) {
  Cluster cluster(2);
  never = std::make_unique<Promise<int>>();
  asked = false;
  begun = 0;
  never->on_cancel([] { asked = true; });
  const auto call = stitch::rpc_async<returns_late>("worker1");
  EXPECT_TRUE(eventually([] { return begun == 1; }));
  call.cancel();
  EXPECT_TRUE(eventually([] { return asked.load(); }));
  never = nullptr;
}

}  // namespace
}  // namespace given_up_calls_test
