// Shutdown: which threads may call it, what it waits for, and which protocol messages are obeyed.
#include <semaphore>

#include "stitch/base/byte_io.h"
#include "stitch/rpc/agent/graceful_shutdown.h"
#include "stitch/rpc/message/message.h"
#include "stitch/transport/loopback/loopback_endpoint.h"
#include "tests/support/world_test.h"

// Functions are registered under their full names; other files of this program have functions of
// the same names.
namespace shutdown_test {
namespace {

using namespace stitch::testing;
using Clock = std::chrono::steady_clock;

int one() { return 1; }

// The worker that the functions below shut down. They return the error text.
std::atomic<Worker*> victim{nullptr};
std::string shut_down_victim(bool graceful) {
  const auto start = Clock::now();
  std::string text;
  try {
    victim.load()->shutdown({.graceful = graceful, .timeout = 20s});
    text = "no error";
  } catch (const Error& error) {
    text = error.code() == ErrorCode::invalid_argument ? error.what() : "another error";
  }
  return Clock::now() - start < 5s ? text : "too late: " + text;
}
std::string from_a_handler(bool graceful) { return shut_down_victim(graceful); }
std::string from_an_inline_function(bool graceful) { return shut_down_victim(graceful); }
STITCH_INLINE(from_an_inline_function);
Future<std::string> from_a_coroutine(bool graceful) {
  co_await rpc_async<one>("worker0");
  co_return shut_down_victim(graceful);
}
std::binary_semaphore release{0};
int wait_for_release() {
  release.acquire();
  return 1;
}

void outlast_the_caller() {
  const auto token = current_stop_token();
  ASSERT_TRUE(eventually([&] { return token.stop_requested(); }));
}

constexpr const char* kFromHandler =
    "shutdown of worker \"worker1\" (id 1) was called from one of its own handlers, which it would "
    "wait for";
constexpr const char* kFromCallback =
    "shutdown of worker \"worker1\" (id 1) was called from an inline function, an on_ready or a "
    "stop callback, which must not wait";

class Shutdown : public ::testing::Test {
 protected:
  Shutdown() { victim = &cluster[1]; }
  // Nothing has happened to the victim.
  void expect_usable() {
    EXPECT_EQ(cluster[1].rpc_sync<one>("worker0"), 1);
    EXPECT_EQ(rpc_sync<one>("worker1"), 1);
  }
  Cluster cluster{2};
};

TEST_F(Shutdown, FromAHandlerOrContinuationFailsImmediatelyAndChangesNothing) {
  for (const bool graceful : {true, false}) {
    EXPECT_EQ(rpc_sync<from_a_handler>("worker1", graceful), kFromHandler);
    EXPECT_EQ(rpc_sync<from_a_coroutine>("worker1", graceful), kFromHandler);
    const WorkerScope in(cluster[1]);
    const auto then =
        rpc_async<one>("worker0").then([graceful](int) { return shut_down_victim(graceful); });
    EXPECT_EQ(then.get(), kFromHandler);
  }
  expect_usable();
}

TEST_F(Shutdown, FromAHandlerOfAnotherWorkerFailsIfItWouldWaitForThatWorker) {
  const std::string expected =
      "shutdown of worker \"worker1\" (id 1) was called from a handler of worker \"worker0\" (id "
      "0), which has to leave, too: it would wait for itself";
  EXPECT_EQ(rpc_sync<from_a_handler>("worker0", true), expected);
  EXPECT_EQ(rpc_async<one>("worker1").then([](int) { return shut_down_victim(true); }).get(),
            expected);
  expect_usable();
  EXPECT_EQ(rpc_sync<from_a_handler>("worker0", false), "no error");
}

// A world within a handler shuts down before the handler ends.
std::string a_world_of_its_own() {
  auto inner = stitch::init({.name = "worker0", .rank = 0, .world_size = 1});
  inner.shutdown({.timeout = 5s});
  return "shut down";
}
TEST_F(Shutdown, OfAnotherWorldIsAllowedInAHandler) {
  EXPECT_EQ(rpc_sync<a_world_of_its_own>("worker1"), "shut down");
}

TEST_F(Shutdown, FromACallbackFailsImmediatelyAndChangesNothing) {
  for (const bool graceful : {true, false}) {
    EXPECT_EQ(rpc_sync<from_an_inline_function>("worker1", graceful), kFromCallback);
    // On the thread that reads the answer.
    Promise<std::string> said;
    auto waiting = cluster[1].rpc_async<wait_for_release>("worker0");
    waiting.on_ready([&] { said.set_value(shut_down_victim(graceful)); });
    release.release();
    EXPECT_EQ(said.future().get(), kFromCallback);
    // Of a call that has timed out: on the thread that reads the callee's word, else on the pool.
    Promise<std::string> timed_out;
    auto late = cluster[1].rpc_async<outlast_the_caller>({.to = "worker0", .timeout = 300ms});
    late.on_ready([&] { timed_out.set_value(shut_down_victim(graceful)); });
    const std::string at_timeout = timed_out.future().get();
    EXPECT_TRUE(at_timeout == kFromCallback || at_timeout == kFromHandler) << at_timeout;
  }
  expect_usable();
}

std::string said_by_stop_callback;
std::binary_semaphore stop_callback_ran{0};
std::atomic<bool> stoppable{false};
void wait_for_a_stop_callback() {
  const std::stop_callback on_stop(current_stop_token(), [] {
    said_by_stop_callback = shut_down_victim(true);
    stop_callback_ran.release();
  });
  stoppable = true;
  stop_callback_ran.acquire();
}
TEST_F(Shutdown, FromAStopCallbackFailsImmediatelyAndChangesNothing) {
  stoppable = false;
  auto call = rpc_async<wait_for_a_stop_callback>("worker1");
  ASSERT_TRUE(eventually([] { return stoppable.load(); }));
  call.cancel();
  expect_usable();
  EXPECT_TRUE(eventually([&] { return cluster[1].debug_info().at("rpc.calls_served") == 0; }));
  EXPECT_EQ(said_by_stop_callback, kFromCallback);
}

// The thread that shuts down runs callbacks itself.
TEST_F(Shutdown, FromACallbackOfShutdownItselfIsAnError) {
  auto waiting = cluster[1].rpc_async<outlast_the_caller>("worker0");
  std::string said;
  waiting.on_ready([&] { said = shut_down_victim(false); });
  cluster[1].shutdown({.graceful = false});
  EXPECT_EQ(said, kFromCallback);
}

TEST_F(Shutdown, ASecondCallWaitsForTheFirst) {
  std::atomic<int> ended{0};
  std::jthread first([&] {
    cluster[1].shutdown({.timeout = 20s});
    ++ended;
  });
  std::jthread second([&] {
    cluster[1].shutdown();
    EXPECT_EQ(error_of([&] { static_cast<void>(cluster[1].rpc_async<one>("worker0")); }).code(),
              ErrorCode::shutting_down);
    EXPECT_TRUE(cluster[1].agent()->stopped());
    ++ended;
  });
  // Both wait for worker 0.
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(ended, 0);
  cluster[0].shutdown();
  first.join();
  second.join();
  EXPECT_EQ(ended, 2);
}

TEST_F(Shutdown, ASecondCallReturnsAtItsOwnLimitAndSaysWhatTheFirstWaitsFor) {
  std::jthread first([&] { cluster[1].shutdown(); });
  ASSERT_TRUE(
      eventually([&] { return cluster[1].agent()->graceful_shutdown().waiting().has_value(); }));
  for (const bool graceful : {true, false}) {
    const auto start = Clock::now();
    const Error error = error_of(
        [&] { cluster[1].shutdown({.graceful = graceful, .wait = 100ms, .timeout = 100ms}); });
    EXPECT_LT(Clock::now() - start, 20s);
    EXPECT_EQ(error.code(), ErrorCode::timeout);
    EXPECT_STREQ(error.what(),
                 "a second shutdown of worker \"worker1\" (id 1) has reached its time limit: the "
                 "first one still waits for the leader of the shutdown: worker \"worker0\" (id 0)");
  }
  EXPECT_FALSE(cluster[1].agent()->stopped());
  cluster[0].shutdown({.timeout = 20s});  // gracefully, and so is the first
}

std::optional<Worker> doomed;
void destroy_the_worker() { doomed.reset(); }
TEST(ShutdownAlone, AWorkerDestroyedByItsOwnHandlerShutsDownInTheBackground) {
  std::optional<Worker> other;
  {
    const auto store = stitch::transport::make_hash_store();
    const auto start = [&](int rank) {
      return stitch::init({.rank = rank, .world_size = 2, .store = store});
    };
    std::jthread thread([&] { doomed.emplace(start(1)); });
    other.emplace(start(0));
  }
  ::testing::internal::CaptureStderr();
  other->rpc_sync<destroy_the_worker>("worker1");
  EXPECT_FALSE(doomed);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "stitch: worker \"worker1\" (id 1) is destroyed on a thread that its shutdown would "
            "wait for: it leaves in the background\n");
  EXPECT_EQ(other->rpc_sync<one>("worker1"), 1);  // until both shut down
  other->shutdown({.timeout = 20s});              // gracefully
}

// ---- what it waits for

TEST(ShutdownAlone, ServesUntilAllWantToLeaveAndSaysForWhomItWaits) {
  Cluster cluster(2, {.shutdown_timeout = 1s});
  ::testing::internal::CaptureStderr();
  std::jthread server([&] { cluster[0].shutdown(); });
  const auto start = Clock::now();
  while (Clock::now() - start < 2500ms) {  // longer than the limit of the end
    EXPECT_EQ(cluster[1].rpc_sync<one>("worker0"), 1);
    std::this_thread::sleep_for(50ms);
  }
  EXPECT_TRUE(cluster.shutdown().empty());
  server.join();
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "stitch: worker \"worker0\" waits in shutdown for worker \"worker1\", which is alive "
            "and has not called shutdown\n");
}

std::binary_semaphore begun{0};
Future<int> waits_for_another_call() {
  begun.release();
  co_await rpc_async<outlast_the_caller>("worker0");
  co_return 1;
}
stitch::testing::Gate busy_gate;
void pass_busy_gate() { busy_gate.pass(); }
TEST(ShutdownAlone, CallsThatItDropsAreShuttingDownAndNotCancelled) {
  Cluster cluster(3, {.num_threads = 1});
  const auto awaiting = rpc_async<waits_for_another_call>("worker2");
  begun.acquire();
  cluster[2].shutdown({.graceful = false, .timeout = 10s});
  EXPECT_EQ(error_of([&] { awaiting.get(); }).code(), ErrorCode::shutting_down);
  const auto running = rpc_async<pass_busy_gate>("worker1");
  ASSERT_TRUE(busy_gate.wait_for_arrival());
  const auto queued = rpc_async<one>("worker1");
  ASSERT_TRUE(eventually([&] { return cluster[1].debug_info().at("rpc.calls_served") == 2; }));
  ::testing::internal::CaptureStderr();
  cluster[1].shutdown({.graceful = false, .timeout = 10ms});
  EXPECT_FALSE(contains(::testing::internal::GetCapturedStderr(), "an inline function"))
      << "there is none";
  const Error error = error_of([&] { queued.get(); });
  EXPECT_EQ(error.code(), ErrorCode::shutting_down) << error.what();
  busy_gate.open();
}

TEST_F(Shutdown, IsNotDelayedByAThreadThatKeepsCalling) {
  std::optional<ErrorCode> code;
  std::atomic<int> calls{0};
  std::jthread caller([&] {
    const WorkerScope in(cluster[1]);
    try {
      for (;; ++calls) rpc_sync<one>("worker0");
    } catch (const Error& error) {
      code = error.code();
    }
  });
  ASSERT_TRUE(eventually([&] { return calls > 10; }));
  const auto start = Clock::now();
  EXPECT_TRUE(cluster.shutdown().empty());
  EXPECT_LT(Clock::now() - start, 20s);
  caller.join();
  EXPECT_EQ(code, ErrorCode::shutting_down);
}

std::atomic<int> steps{0};
void step_and_continue(int left) {
  ++steps;
  std::this_thread::sleep_for(1ms);
  if (left > 0)
    rpc_sync<step_and_continue>(
        stitch::rpc::current_agent()->self().id.value() == 0 ? "worker1" : "worker0", left - 1);
}
TEST_F(Shutdown, WaitsForHandlersThatMakeFurtherCalls) {
  steps = 0;
  auto chain = rpc_async<step_and_continue>("worker1", 100);
  EXPECT_TRUE(cluster.shutdown().empty());
  EXPECT_EQ(steps, 101);
  EXPECT_TRUE(chain.ready() && !chain.has_error());
}

// Holds a request that has been read but is not yet counted as a call being served. The worker
// calls itself over loopback, so another thread answers the polls meanwhile.
std::atomic<bool> gate_armed{false};
std::binary_semaphore gate_entered{0};
class Gate final : public stitch::rpc::Extension {
  void on_receive(stitch::rpc::InMessage& message) override {
    if (message.view.kind() != stitch::rpc::wire::kRequest || !gate_armed.exchange(false)) return;
    gate_entered.release();
    std::this_thread::sleep_for(1s);
  }
};
[[maybe_unused]] const int gate = stitch::rpc::register_extension(
    [](stitch::rpc::Agent&) -> std::unique_ptr<stitch::rpc::Extension> {
      return std::make_unique<Gate>();
    });
std::atomic<int> arrivals{0};
void arrive() { ++arrivals; }
TEST(ShutdownAlone, AMessageCountsAsReceivedOnceItIsBeingServed) {
  Cluster cluster(2, {.transports = {"shm"}});
  arrivals = 0;
  gate_armed = true;
  cluster[1].notify<arrive>("worker1");
  gate_entered.acquire();
  EXPECT_TRUE(cluster.shutdown().empty());
  EXPECT_EQ(arrivals, 1);
}

// The messages lost with their connection make the sums differ permanently, and the leader has lost
// no peer.
TEST(ShutdownFaults, TwoFollowersThatHaveLostEachOtherDoNotBlockIt) {
  Cluster cluster(3, {.reconnect_timeout = 0s});
  EXPECT_EQ(cluster[1].rpc_sync<one>("worker2"), 1);
  for (const bool fail : {false, true}) {
    stitch::transport::Faults::set_judge([fail](std::uint32_t from, std::uint32_t to, std::uint64_t,
                                                const stitch::transport::Message&) {
      const bool between = from == 1 && to == 2;
      return stitch::transport::Fate{.drop = between && !fail, .fail = between && fail};
    });
    cluster[1].notify<arrive>("worker2");
  }
  for (const int rank : {1, 2}) {
    const WorkerId other(static_cast<std::uint32_t>(3 - rank));
    EXPECT_TRUE(eventually([&] { return cluster[rank].agent()->peers().lost(other).has_value(); }));
  }
  stitch::transport::Faults::set_judge(nullptr);
  const auto start = Clock::now();
  EXPECT_TRUE(cluster.shutdown().empty());
  EXPECT_LT(Clock::now() - start, 10s);
}

TEST(ShutdownFaults, ABrokenConnectionDoesNotDisturbItWhicheverMessageItHits) {
  bool broke = true;
  for (std::uint64_t k = 0; broke; ++k) {
    ASSERT_LT(k, 200u) << "leaving needs no end of messages";
    Cluster cluster(3, {.reconnect_timeout = 30s});
    EXPECT_EQ(cluster[1].rpc_sync<one>("worker2"), 1);
    std::atomic<std::uint64_t> count{0};
    std::atomic<bool> hit{false};
    stitch::transport::Faults::set_judge(
        [&](std::uint32_t, std::uint32_t, std::uint64_t, const stitch::transport::Message&) {
          const bool fail = count++ == k;
          if (fail) hit = true;
          return stitch::transport::Fate{.fail = fail};
        });
    const auto start = Clock::now();
    EXPECT_TRUE(cluster.shutdown().empty()) << "message " << k;
    EXPECT_LT(Clock::now() - start, 10s) << "message " << k;
    stitch::transport::Faults::set_judge(nullptr);
    broke = hit;
  }
}

std::binary_semaphore entered{0};
void block_inline() {
  entered.release();
  release.acquire();
}
STITCH_INLINE(block_inline);
void block_in_a_handler() {
  entered.release();
  release.acquire();
}
TEST(ShutdownAlone, EndsASecondAfterItsLimitWhenAFunctionDoesNotReturn) {
  for (const bool is_inline : {false, true}) {
    Cluster cluster{2};
    auto call =
        is_inline ? rpc_async<block_inline>("worker1") : rpc_async<block_in_a_handler>("worker1");
    entered.acquire();
    ::testing::internal::CaptureStderr();
    const auto start = Clock::now();
    cluster[1].shutdown({.graceful = false, .timeout = 200ms});
    EXPECT_LT(Clock::now() - start, 15s);
    const std::string said = ::testing::internal::GetCapturedStderr();
    if (is_inline) {
      EXPECT_EQ(said,
                "stitch: worker \"worker1\" (id 1) leaves while an inline function or a callback "
                "blocks one of its threads\n");
    } else {
      EXPECT_TRUE(contains(said, "leaves while handlers still run")) << said;
    }
    release.release();
    EXPECT_TRUE(eventually([&] { return cluster[1].agent().use_count() == 1; }));
  }
}

// ---- which messages are obeyed

enum class Step : std::uint8_t { ready = 1, poll, status, go, gone };
void forge(Worker& from, std::string_view to, std::uint8_t step, std::size_t extra_bytes = 0) {
  stitch::rpc::OutMessage message(stitch::rpc::wire::kLeave);
  stitch::base::ByteWriter out(message.frame.body());
  out.write(step);
  for (int i = 0; i < 5; ++i) out.write(std::uint64_t{1});
  for (std::size_t i = 0; i < extra_bytes; ++i) out.write(std::uint8_t{0});
  from.agent()->send_frame(from.worker(to), std::move(message));
}
void forge(Worker& from, std::string_view to, Step step) {
  forge(from, to, static_cast<std::uint8_t>(step));
}

TEST(ShutdownMessages, OutOfTurnCloseTheConnection) {
  const auto expect_refused = [](const std::string& what, const std::string& why, auto&& send) {
    Cluster cluster(2);
    auto waiting = cluster[1].rpc_async<outlast_the_caller>("worker0");
    send(cluster[1]);
    EXPECT_TRUE(waiting.wait_for(20s) && waiting.has_error()) << what;
    // The loss of a peer is always `disconnected`; the text has the cause.
    const auto lost = [&] { return cluster[0].agent()->peers().lost(WorkerId(1)); };
    ASSERT_TRUE(eventually([&] { return lost().has_value(); })) << what;
    const std::string text = lost()->what();
    EXPECT_TRUE(contains(text, why)) << what << ": " << text;
    waiting.cancel();
  };
  for (const auto& [step, why] :
       {std::pair(Step::poll, "shutdown message: \"poll\" from worker \"worker1\" (id 1)"),
        std::pair(Step::status,
                  "shutdown message: a status of round 1 when the last round asked for"),
        std::pair(Step::go, "shutdown message: \"go\" from worker \"worker1\" (id 1)"),
        std::pair(Step::gone, "shutdown message: \"gone\" before \"go\" was sent")}) {
    expect_refused("step " + std::to_string(static_cast<int>(step)), why,
                   [step = step](Worker& from) { forge(from, "worker0", step); });
  }
  for (const std::uint8_t step : {0, 6, 255}) {
    expect_refused("an unknown step",
                   "shutdown message: step " + std::to_string(int{step}) + " is unknown",
                   [&](Worker& from) { forge(from, "worker0", step); });
  }
  expect_refused("a long one", "shutdown message",
                 [](Worker& from) { forge(from, "worker0", 1, 1); });
}

TEST(ShutdownMessages, AGoFromANonLeaderDoesNotEndTheShutdown) {
  Cluster cluster(3);
  forge(cluster[2], "worker1", Step::go);
  EXPECT_TRUE(
      eventually([&] { return cluster[1].agent()->peers().lost(WorkerId(2)).has_value(); }));
  const Error error = error_of([&] { cluster[1].shutdown({.wait = 200ms}); });
  EXPECT_EQ(error.code(), ErrorCode::timeout);
}

TEST(ShutdownMessages, ReadyMayBeRepeated) {
  Cluster cluster(3);
  for (int i = 0; i < 3; ++i) forge(cluster[1], "worker0", Step::ready);
  EXPECT_EQ(rpc_sync<one>("worker1"), 1);
}

}  // namespace
}  // namespace shutdown_test
