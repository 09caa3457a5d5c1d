// Calls and their handlers that are stopped: what they await, tokens, stop callbacks.

#include <stop_token>

#include "tests/support/world_test.h"

namespace stopped_calls_test {  // its functions are registered under their full names
namespace {

using namespace stitch::testing;

Future<int> await(Future<int> future) { co_return co_await future; }

std::atomic<int> begun{0}, stopped{0}, ended{0}, told{0};
std::atomic<bool> may_end{false};
// Returns when it is asked to stop, or may end.
int wait_for_stop() {
  ++begun;
  const auto token = current_stop_token();
  EXPECT_TRUE(eventually([&] { return token.stop_requested() || may_end; }));
  if (token.stop_requested()) ++stopped;
  return 7;
}
Future<int> begin_call() { return rpc_async<wait_for_stop>({.to = "worker0", .timeout = 0s}); }

Future<int> as_temporary() { co_return co_await begin_call(); }
Future<int> as_parameter() { return await(begin_call()); }
Future<int> as_then() {
  co_return co_await begin_call().then([](int value) { return value; }).then([](int value) {
    return make_ready(value);
  });
}
Future<int> as_followed() {
  co_return co_await make_ready(1).then([](int) { return begin_call(); });
}
Future<int> as_member_of_all() {
  co_return std::get<0>(co_await when_all(begin_call(), make_ready(1.5)));
}
Future<int> as_member_of_any() {
  const Promise<int> never;
  co_return (co_await when_any(begin_call(), never.future())).second;
}
Future<int> in_a_vector() {
  std::vector<Future<int>> calls;
  calls.push_back(begin_call());
  int sum = 0;
  for (auto& call : calls) sum += co_await call;
  co_return sum;
}
Future<int> under_a_timeout() { co_return co_await stitch::with_timeout(begin_call(), 1h); }
Future<int> not_awaited() { return begin_call(); }

void begin_anew() {
  begun = stopped = ended = told = 0;
  may_end = false;
}

using Begin = Future<int> (*)();
class WorkOfCalls : public ::testing::TestWithParam<Begin> {
 protected:
  WorkOfCalls() { begin_anew(); }
};

TEST_P(WorkOfCalls, StopsWithTheFuture) {
  Cluster cluster(1);
  const auto work = GetParam()();
  EXPECT_TRUE(eventually([] { return begun == 1; }));
  work.cancel();
  EXPECT_EQ(error_of([&] { work.get(); }).code(), ErrorCode::cancelled);
  EXPECT_TRUE(eventually([] { return stopped == 1; }));
}

Begin handled = nullptr;
Future<int> handler() { return handled(); }

// Of worker0. That number is there once something came from it.
std::int64_t calls_held_by(Worker& worker) {
  const auto numbers = worker.debug_info();
  const auto found = numbers.find("rpc.peer.worker0.calls_held");
  return found == numbers.end() ? 0 : found->second;
}

TEST_P(WorkOfCalls, StopsWithTheCallOfItsHandler) {
  Cluster cluster(2, {.num_threads = 1});
  handled = GetParam();
  const auto call = rpc_async<handler>("worker1");
  EXPECT_TRUE(eventually([] { return begun == 1; }));
  call.cancel();
  EXPECT_TRUE(eventually([] { return stopped == 1; }));
  EXPECT_TRUE(eventually([&] { return calls_held_by(cluster[1]) == 0; }));
}

INSTANTIATE_TEST_SUITE_P(Ways, WorkOfCalls,
                         ::testing::Values(&as_temporary, &as_parameter, &as_then, &as_followed,
                                           &as_member_of_all, &as_member_of_any, &in_a_vector,
                                           &under_a_timeout, &not_awaited));

// Through two workers; where its caller gives up, and where its time is over.
Future<int> wait_below(int depth) {
  try {
    if (depth == 0) {
      co_await rpc_async<wait_for_stop>("worker1");
    } else {
      co_await wait_below(depth - 1);
    }
  } catch (const Error& error) {
    told += current_stop_token().stop_requested() && error.code() == ErrorCode::cancelled ? 1 : 0;
    ++ended;  // last: the test waits for it
    throw;
  }
  co_return 0;
}

TEST(StoppedCalls, StopWhatTheirCoroutinesAwait) {
  begin_anew();
  Cluster cluster(2, {.num_threads = 1});
  const auto cancelled = rpc_async<wait_below>("worker1", 1);
  EXPECT_TRUE(eventually([] { return begun == 1; }));
  cancelled.cancel();
  EXPECT_TRUE(eventually([] { return stopped == 1 && ended == 2; }, 10s));
  EXPECT_EQ(told, 2);
  EXPECT_EQ(error_of([] { rpc_sync<wait_below>({.to = "worker1", .timeout = 1s}, 0); }).code(),
            ErrorCode::timeout);
  EXPECT_TRUE(eventually([] { return stopped == 2 && ended == 3; }, 10s));
}

// ---- tokens and stop callbacks

std::unique_ptr<Promise<int>> never;
int answer() { return 3; }
std::atomic<bool> called_back{false};
Worker* worker1 = nullptr;

// Its code has a token of its own once it has awaited something.
Future<int> with_a_callback() {
  co_await rpc_async<answer>("worker1");
  const auto ask = [] {
    const WorkerScope scope(*worker1);
    called_back = rpc_sync<answer>("worker0") == 3;
  };
  const std::stop_callback callback(current_stop_token(), ask);
  ++begun;
  try {
    co_await never->future();
  } catch (const Error&) {
    told += called_back ? 1 : 0;
  }
  ++ended;
  co_return 0;
}

// On whichever thread the stop is noticed; what the coroutine awaits is stopped after them.
TEST(StoppedCalls, CallStopCallbacksThatMayWaitForFutures) {
  for (const bool by_deadline : {false, true}) {
    Cluster cluster(2);
    worker1 = &cluster[1];
    begin_anew();
    const int rounds = by_deadline ? 2 : 10;
    for (int i = 1; i <= rounds; ++i) {
      never = std::make_unique<Promise<int>>();
      called_back = false;
      const auto call = by_deadline
                            ? rpc_async<with_a_callback>({.to = "worker1", .timeout = 500ms})
                            : rpc_async<with_a_callback>("worker1");
      EXPECT_TRUE(eventually([&] { return begun == i; }));
      if (!by_deadline) call.cancel();
      EXPECT_TRUE(eventually([&] { return ended == i; })) << by_deadline << ", " << i;
      never = nullptr;
    }
    EXPECT_EQ(told, rounds);
  }
}

std::atomic<bool> asked{false};
Future<int> returns_late() {
  const auto token = current_stop_token();
  begun = 1;
  EXPECT_TRUE(eventually([&] { return token.stop_requested(); }));
  std::this_thread::sleep_for(20ms);  // all that a stop does has been done by then
  return await(never->future());
}

TEST(StoppedCalls, StopWhatTheirHandlersReturnLater) {
  Cluster cluster(2);
  never = std::make_unique<Promise<int>>();
  begin_anew();
  asked = false;
  never->on_cancel([] { asked = true; });
  const auto call = rpc_async<returns_late>("worker1");
  EXPECT_TRUE(eventually([] { return begun == 1; }));
  call.cancel();
  EXPECT_TRUE(eventually([] { return asked.load(); }));
  never = nullptr;
}

}  // namespace
}  // namespace stopped_calls_test
