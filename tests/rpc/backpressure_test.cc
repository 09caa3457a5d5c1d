// The budget of calls to one peer: a thread that exceeds it waits, and nothing waits without end.
#include <numeric>
#include <regex>

#include "tests/support/world_test.h"

namespace backpressure_test {  // its functions are registered under their full names
namespace {

using namespace stitch::testing;
using stitch::transport::Fate;

// ---- calls

Gate gate;
std::atomic<int> running{0}, most_running{0}, runs{0};
std::vector<int> order;
stitch::base::Mutex order_mutex;

int pass_gate(int number) {
  const int now = ++running;
  for (int most = most_running; now > most && !most_running.compare_exchange_weak(most, now);) {
  }
  gate.pass();
  {
    const stitch::base::MutexLock lock(order_mutex);
    order.push_back(number);
  }
  --running;
  ++runs;
  return number;
}
int count_run() { return ++runs; }
std::int64_t elements(const at::Tensor& tensor) {
  ++runs;
  return tensor.numel();
}
void stop_reading() { gate.pass(); }
STITCH_INLINE(stop_reading);

// Ends, without a thread, once the test says so.
stitch::base::Mutex later_mutex;
std::vector<Promise<void>> later STITCH_GUARDED_BY(later_mutex);
std::size_t waiting_later() {
  const stitch::base::MutexLock lock(later_mutex);
  return later.size();
}

// Numbers of a peer are there once something was sent to it or came from it; all others always.
std::int64_t number(Worker& worker, const std::string& name) {
  const auto numbers = worker.debug_info();
  if (!name.starts_with("rpc.peer.")) return numbers.at(name);
  const auto found = numbers.find(name);
  return found == numbers.end() ? 0 : found->second;
}

class Backpressure : public ::testing::Test {
 protected:
  Backpressure() {
    gate.close();
    most_running = runs = 0;
    order.clear();
  }
};
using BackpressureFaults = Backpressure;  // over loopback only

// On a thread of the program.
std::jthread call_from(Worker& worker, std::function<void()> calls) {
  return std::jthread([&worker, calls = std::move(calls)] {
    const WorkerScope scope(worker);
    calls();
  });
}

TEST_F(Backpressure, AThreadWhoseCallFindsTheBudgetFullWaitsItsTurn) {
  Cluster cluster(2, {.num_threads = 1, .max_inflight_calls = 4});
  std::vector<Future<int>> answers;
  std::atomic<int> made{0};
  {
    const auto caller = call_from(cluster[0], [&] {
      for (; made < 20; ++made) answers.push_back(rpc_async<pass_gate>("worker1", +made));
    });
    EXPECT_TRUE(eventually([&] { return number(cluster[0], "rpc.calls_waiting") == 1; }));
    EXPECT_EQ(made, 4);
    EXPECT_EQ(number(cluster[0], "rpc.peer.worker1.calls_sent"), 4);
    EXPECT_TRUE(eventually([&] { return number(cluster[1], "rpc.peer.worker0.calls_held") == 4; }));
    gate.open();
  }
  for (int i = 0; i < 20; ++i) EXPECT_EQ(answers[static_cast<std::size_t>(i)].get(), i);
  std::vector<int> expected(20);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(order, expected);
  EXPECT_EQ(number(cluster[0], "rpc.calls_waiting"), 0);
  EXPECT_TRUE(eventually([&] { return number(cluster[0], "rpc.peer.worker1.calls_sent") == 0; }));
}

TEST_F(Backpressure, AThreadThatWaitsGoesOnOnceOneWayCallsAreHandled) {
  Cluster cluster(2, {.max_inflight_bytes = 1 << 20});
  const auto first = cluster[0].rpc_async<pass_gate>("worker1", 1);
  const auto large = at::ones({(1 << 20) - 3000}, at::kByte);
  std::atomic<std::int64_t> received{0};
  const auto caller =
      call_from(cluster[0], [&] { received = rpc_sync<elements>("worker1", large); });
  EXPECT_TRUE(eventually([&] { return number(cluster[0], "rpc.calls_waiting") == 1; }));
  const Promise<void> now;
  now.future().on_ready([&] { cluster[0].notify<count_run>("worker1"); });  // it waits for no room
  now.set_value();
  EXPECT_TRUE(eventually([] { return runs == 1; }));
  gate.open();
  EXPECT_TRUE(eventually([&] { return received == large.numel(); }));
}

TEST_F(Backpressure, ACallCountsAtItsCalleeUntilItsFunctionEndsAlsoAfterItsDeadline) {
  Cluster cluster(2);
  const auto late = cluster[0].rpc_async<pass_gate>({.to = "worker1", .timeout = 50ms}, 1);
  EXPECT_EQ(error_of([&] { late.get(); }).code(), ErrorCode::timeout);
  EXPECT_EQ(number(cluster[1], "rpc.peer.worker0.calls_held"), 1);
  gate.open();
  EXPECT_TRUE(eventually([&] { return number(cluster[1], "rpc.peer.worker0.calls_held") == 0; }));
}

TEST_F(Backpressure, BarriersDoNotWaitBehindCalls) {
  Cluster cluster(2, {.num_threads = 1, .max_inflight_calls = 4});
  std::vector<Future<int>> answers;
  for (int i = 0; i < 4; ++i) answers.push_back(rpc_async<pass_gate>("worker1", i));
  std::map<std::string, int> values;
  {
    const auto waits = call_from(cluster[0], [] { rpc_sync<pass_gate>("worker1", 4); });
    EXPECT_TRUE(eventually([&] { return number(cluster[0], "rpc.calls_waiting") == 1; }));
    const auto other = call_from(cluster[1], [&] {
      cluster[1].barrier();
      values = cluster[1].all_gather(1);
    });
    cluster[0].barrier();
    EXPECT_EQ(cluster[0].all_gather(0),
              (std::map<std::string, int>{{"worker0", 0}, {"worker1", 1}}));
    EXPECT_EQ(runs, 0);
    gate.open();
  }
  EXPECT_EQ(values.size(), 2U);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(answers[static_cast<std::size_t>(i)].get(), i);
}

TEST_F(Backpressure, ACallWhoseDeadlinePassesWhileItWaitsIsNotSent) {
  Cluster cluster(2, {.max_inflight_calls = 2});
  const auto first = rpc_async<pass_gate>("worker1", 1);
  const auto second = rpc_async<pass_gate>("worker1", 2);
  const auto sent = number(cluster[0], "rpc.messages_sent");
  const Error late = error_of([] { rpc_sync<count_run>({.to = "worker1", .timeout = 500ms}); });
  EXPECT_TRUE(has_text(late, ErrorCode::timeout, "; the request waits for room"));
  EXPECT_EQ(number(cluster[0], "rpc.calls_waiting"), 0);
  EXPECT_EQ(number(cluster[0], "rpc.messages_sent"), sent);
  gate.open();
  EXPECT_EQ(first.get() + second.get(), 3);
  EXPECT_EQ(rpc_sync<count_run>("worker1"), 3);
}

TEST_F(Backpressure, AThreadThatWaitsGoesOnWhenThePeerIsLost) {
  Cluster cluster(2, {.max_inflight_calls = 1});
  const auto first = rpc_async<pass_gate>("worker1", 1);
  Error error;
  {
    const auto waits = call_from(cluster[0], [&] {
      error = error_of([] { rpc_sync<count_run>({.to = "worker1", .timeout = 0s}); });
    });
    EXPECT_TRUE(eventually([&] { return number(cluster[0], "rpc.calls_waiting") == 1; }));
    cluster[0].agent()->peers().give_up(cluster[1].info(),
                                        Error(ErrorCode::disconnected, "the test says so"));
  }
  EXPECT_EQ(error.code(), ErrorCode::disconnected) << error.what();
  EXPECT_EQ(error_of([&] { static_cast<void>(first.get()); }).code(), ErrorCode::disconnected);
  gate.open();
  for (int rank = 0; rank < 2; ++rank) cluster[rank].shutdown({.graceful = false});
}

// ---- limits of both sides

TEST_F(Backpressure, TheSmallerLimitOfBothSidesHolds) {
  Cluster cluster(2, [](Options& options) {
    options.num_threads = 1;
    if (options.rank == 1) options.max_inflight_calls = 2;
  });
  std::atomic<int> made{0};
  {
    const auto caller = call_from(cluster[0], [&] {
      for (; made < 50; ++made) notify<pass_gate>("worker1", +made);
    });
    EXPECT_TRUE(eventually([&] { return number(cluster[0], "rpc.calls_waiting") == 1; }));
    EXPECT_EQ(made, 2);
    gate.open();
  }
  EXPECT_TRUE(eventually([] { return runs == 50; })) << "none is dropped";
  auto& calls = cluster[0].agent()->outgoing_calls();
  EXPECT_TRUE(eventually([&] { return calls.unhandled() == 0; }));
}

std::int64_t length_of(const std::string& text) { return static_cast<std::int64_t>(text.size()); }
std::string text_of(std::size_t bytes) { return std::string(bytes, 'x'); }

TEST_F(Backpressure, FramesLongerThanTheReceiverTakesAreRefusedByTheirSender) {
  Cluster cluster(2, [](Options& options) {
    if (options.rank == 1) options.max_frame_bytes = 8192;
  });
  const char* const limit = "exceeds max_frame_bytes 8192";
  for (const std::size_t bytes : {std::size_t{100} << 10, std::size_t{20} << 20}) {
    const std::string text(bytes, 'x');
    EXPECT_TRUE(has_text(error_of([&] { rpc_sync<length_of>("worker1", text); }),
                         ErrorCode::out_of_range, limit));
    EXPECT_TRUE(has_text(error_of([&] { notify<length_of>("worker1", text); }),
                         ErrorCode::out_of_range, limit));
    EXPECT_TRUE(has_text(error_of([&] { cluster[1].rpc_sync<text_of>("worker0", bytes); }),
                         ErrorCode::out_of_range, limit));
  }
  EXPECT_EQ(rpc_sync<length_of>("worker1", std::string(1000, 'x')), 1000);
  EXPECT_TRUE(eventually([&] { return number(cluster[0], "rpc.peer.worker1.calls_sent") == 0; }));
}

// ---- calls of handlers

TEST_F(Backpressure, WhoAsksForItIsRefusedAtOnce) {
  Cluster cluster(2, {.max_inflight_calls = 1});
  const auto first = rpc_async<pass_gate>("worker1", 1);
  const TargetOptions refusing{.to = "worker1", .when_full = stitch::WhenFull::refuse};
  EXPECT_TRUE(has_text(error_of([&] { rpc_sync<count_run>(refusing); }), ErrorCode::overloaded,
                       "was not made: 1 calls of "));
  EXPECT_TRUE(has_text(error_of([&] { notify<count_run>(refusing); }), ErrorCode::overloaded,
                       "one-way call "));
  gate.open();
  EXPECT_EQ(first.get(), 1);
  EXPECT_TRUE(eventually([&] { return number(cluster[0], "rpc.peer.worker1.calls_sent") == 0; }));
  EXPECT_EQ(rpc_sync<count_run>(refusing), 2);
}

// Each of the calls of either side needs a further one of the other side.
Future<int> ask_back(int depth) {
  const std::string other =
      stitch::rpc::current_agent()->name() == "worker0" ? "worker1" : "worker0";
  if (depth == 0) co_return 1;
  co_return 1 + co_await rpc_async<ask_back>(other, depth - 1);
}

TEST_F(Backpressure, TwoWorkersThatFloodEachOtherFinish) {
  Cluster cluster(2, {.num_threads = 1, .max_inflight_bytes = 1 << 20, .max_inflight_calls = 64});
  std::vector<std::thread> callers;
  std::atomic<int> good{0};
  for (int rank = 0; rank < 2; ++rank) {
    callers.emplace_back([&, rank] {
      const WorkerScope scope(cluster[rank]);
      std::vector<Future<int>> answers;
      const std::string other = "worker" + std::to_string(1 - rank);
      for (int i = 0; i < 2'000; ++i) answers.push_back(rpc_async<ask_back>(other, 1));
      for (auto& answer : answers) good += answer.get() == 2 ? 1 : 0;
    });
  }
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(good, 4'000);
}

// None of them waits for another one, which may wait for it.
TEST_F(Backpressure, CallsOfHandlersBeyondFourBudgetsFail) {
  Cluster cluster(2, {.max_inflight_calls = 4});
  const TargetOptions to{.to = "worker1", .timeout = 0s};
  EXPECT_EQ(rpc_sync<ask_back>(to, 20), 21);
  EXPECT_TRUE(has_text(error_of([&] { rpc_sync<ask_back>(to, 100); }), ErrorCode::remote_exception,
                       "was not made: 16 calls of "));
}

TEST_F(Backpressure, OneWayCallsWaitUntilTheirReceiverHasHandledOthers) {
  Cluster cluster(2, {.num_threads = 1, .max_inflight_bytes = 512 << 10, .max_inflight_calls = 64});
  std::atomic<int> made{0};
  std::thread caller([&] {
    const WorkerScope scope(cluster[0]);
    for (int i = 0; i < 1'000; ++i) {
      notify<pass_gate>("worker1", i);
      ++made;
    }
  });
  EXPECT_TRUE(eventually([&] { return number(cluster[1], "rpc.peer.worker0.calls_held") == 64; }));
  EXPECT_TRUE(eventually([&] { return number(cluster[0], "rpc.calls_waiting") == 1; }));
  EXPECT_EQ(made, 64);
  EXPECT_EQ(number(cluster[1], "rpc.peer.worker0.calls_held"), 64);
  gate.open();
  caller.join();
  EXPECT_TRUE(eventually([] { return runs == 1'000; }));
}

// Behind a reader that does not read, more than a ring holds.
TEST_F(Backpressure, ALargeRequestThatIsCancelledWhileItWaitsIsNotWritten) {
  Cluster cluster(2, {.heartbeat_timeout = 60s, .transports = {"shm"}});
  const auto large = at::zeros({8 << 20});
  const auto waiting = rpc_async<stop_reading>("worker1");
  ASSERT_TRUE(gate.wait_for_arrival());
  const auto under_way = rpc_async<elements>("worker1", large);
  auto cancelled = rpc_async<elements>("worker1", large);
  const auto late = rpc_async<elements>({.to = "worker1", .timeout = 500ms}, large);
  EXPECT_EQ(number(cluster[0], "rpc.calls_waiting"), 2);
  cancelled.cancel();
  EXPECT_EQ(error_of([&] { static_cast<void>(late.get()); }).code(), ErrorCode::timeout);
  EXPECT_EQ(number(cluster[0], "rpc.calls_waiting"), 0);
  EXPECT_EQ(number(cluster[0], "rpc.messages_sent"), 2) << "stop_reading() and the first one";
  gate.open();
  waiting.get();
  EXPECT_EQ(under_way.get(), 8 << 20);
  EXPECT_EQ(number(cluster[1], "rpc.messages_received"), 2);
  EXPECT_EQ(runs, 1);
}

TEST_F(BackpressureFaults, ACallThatIsOverBeforeItsTurnFreesItsMessage) {
  Cluster cluster(2, {.num_threads = 1});
  const auto running_one = rpc_async<pass_gate>("worker1", 1);
  ASSERT_TRUE(gate.wait_for_arrival());
  {
    const LoopbackFaults faults(  // its caller cannot cancel it
        [](std::uint32_t, std::uint32_t, std::uint64_t, const auto& message) {
          Fate fate;
          fate.drop = kind_of(message) == stitch::rpc::wire::kCancel;
          return fate;
        });
    const auto late = rpc_async<elements>({.to = "worker1", .timeout = 1s}, at::zeros({1 << 20}));
    EXPECT_TRUE(eventually([&] { return number(cluster[1], "rpc.incoming_bytes") > 1 << 20; }));
    EXPECT_EQ(error_of([&] { static_cast<void>(late.get()); }).code(), ErrorCode::timeout);
    EXPECT_TRUE(eventually([&] { return number(cluster[1], "rpc.incoming_bytes") < 1 << 20; }))
        << "while the only thread is held";
  }
  EXPECT_EQ(runs, 0);
  gate.open();
  EXPECT_EQ(running_one.get(), 1);
  EXPECT_EQ(runs, 1) << "it has not been run";
  for (int rank = 0; rank < 2; ++rank) cluster[rank].shutdown({.graceful = false});
}

// The caller's only reader stands still.
TEST_F(Backpressure, HandlersWaitWhileTheirCallerDoesNotReadAnswers) {
  Cluster cluster(2, {.heartbeat_timeout = 60s,
                      .num_threads = 2,
                      .transports = {"shm"},
                      .max_inflight_bytes = 64 << 20});
  auto standing = cluster[1].rpc_async<stop_reading>("worker0");
  ASSERT_TRUE(gate.wait_for_arrival());
  std::vector<Future<std::string>> answers;
  for (int i = 0; i < 100; ++i)
    answers.push_back(rpc_async<text_of>("worker1", std::size_t{1} << 20));
  const auto unwritten = [&] {
    return number(cluster[1], "rpc.peer.worker0.replies_unwritten_bytes");
  };
  EXPECT_TRUE(eventually([&] { return unwritten() > 32 << 20; }));
  std::this_thread::sleep_for(100ms);
  EXPECT_LT(unwritten(), 40 << 20);
  gate.open();
  standing.get();
  for (const auto& answer : answers) EXPECT_EQ(answer.get().size(), std::size_t{1} << 20);
}

// All of them have begun when the first one answers.
Future<std::string> text_later(std::size_t bytes) {
  Future<void> until;
  {
    const stitch::base::MutexLock lock(later_mutex);
    later.emplace_back();
    until = later.back().future();
  }
  co_await std::move(until);
  co_return std::string(bytes, 'x');
}

TEST_F(Backpressure, RepliesAreNeverHeldBackAndAllArrive) {
  constexpr int kCalls = 100;
  Cluster cluster(2, {.heartbeat_timeout = 60s,
                      .num_threads = 2,
                      .transports = {"shm"},
                      .max_inflight_bytes = 16 << 20});
  std::vector<Future<std::string>> answers;
  for (int i = 0; i < kCalls; ++i)
    answers.push_back(rpc_async<text_later>("worker1", std::size_t{1} << 20));
  ASSERT_TRUE(eventually([] { return waiting_later() == kCalls; }));
  auto standing = cluster[1].rpc_async<stop_reading>("worker0");
  ASSERT_TRUE(gate.wait_for_arrival());
  std::vector<Promise<void>> promises;
  {
    const stitch::base::MutexLock lock(later_mutex);
    promises.swap(later);
  }
  for (auto& promise : promises) promise.set_value();
  const auto unwritten = [&] {
    return number(cluster[1], "rpc.peer.worker0.replies_unwritten_bytes");
  };
  EXPECT_TRUE(eventually([&] { return unwritten() > 48 << 20; })) << unwritten();
  const auto begun = rpc_async<count_run>("worker1");  // is not begun
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(runs, 0);
  gate.open();
  standing.get();
  for (const auto& answer : answers) EXPECT_EQ(answer.get().size(), std::size_t{1} << 20);
  EXPECT_EQ(begun.get(), 1);
  EXPECT_TRUE(eventually([&] { return unwritten() == 0; }));
}

}  // namespace
}  // namespace backpressure_test
