// Deadlines, cancellation and the texts of timeouts.
#include <regex>
#include <stop_token>

#include "tests/support/world_test.h"

namespace deadlines_test {  // its functions are registered under their full names
namespace {

using namespace stitch::testing;
using stitch::rpc::DeadlineHeap;
using stitch::rpc::DeadlineWatch;
using stitch::transport::Fate;
using Time = std::chrono::steady_clock::time_point;

struct Item {
  Time deadline;
  std::size_t heap_place = DeadlineHeap<Item>::kNowhere;
};

TEST(DeadlineHeap, GivesTheEarliestAfterAnyRemovals) {
  std::mt19937 random(7);
  std::vector<Item> items(500);
  DeadlineHeap<Item> heap;
  std::multimap<Time, Item*> expected;
  EXPECT_EQ(heap.first_deadline(), Time::max());
  for (int step = 0; step < 20'000; ++step) {
    Item& item = items[random() % items.size()];
    if (item.heap_place == DeadlineHeap<Item>::kNowhere) {
      item.deadline = Time(std::chrono::nanoseconds(random() % 1000));
      heap.add(item, item.deadline);
      expected.emplace(item.deadline, &item);
    } else {
      heap.remove(item);
      const auto [from, to] = expected.equal_range(item.deadline);
      expected.erase(
          std::find_if(from, to, [&](const auto& each) { return each.second == &item; }));
      heap.remove(item);  // it has been removed already
    }
    ASSERT_EQ(heap.first_deadline(), expected.empty() ? Time::max() : expected.begin()->first);
    if (!heap.empty()) {
      ASSERT_EQ(heap.first().deadline, heap.first_deadline());
    }
  }
}

TEST(DeadlineWatch, HasOneTimerHoweverManyDeadlinesThereAre) {
  const auto loop = std::make_shared<stitch::base::EventLoop>("test");
  std::atomic<int> fired{0};
  const auto watch = std::make_shared<DeadlineWatch>(loop, [&] { ++fired; });
  const auto now = std::chrono::steady_clock::now();
  for (int i = 50; i > 0; --i) watch->watch(now + i * 1ms);
  for (int i = 1; i < 50; ++i) watch->watch(now + i * 1ms);
  std::this_thread::sleep_until(now + 80ms);
  EXPECT_GE(fired, 1);
  EXPECT_LE(fired, 3) << "but for those that were due while they were being set";
  watch->watch(std::chrono::steady_clock::now() + 1ms);
  const int before = fired;
  EXPECT_TRUE(eventually([&] { return fired == before + 1; }));
  loop->close();
}

std::atomic<int> runs{0};
int count_run() { return ++runs; }
std::atomic<bool> saw_stop{false};
void wait_for_stop() {
  ++runs;
  const auto token = current_stop_token();
  saw_stop = eventually([&] { return token.stop_requested(); });
}

class Deadlines : public ::testing::Test {
 protected:
  Deadlines() {
    runs = 0;
    saw_stop = false;
  }
};
// Over loopback only, which can delay, repeat and drop messages.
using DeadlineFaults = Deadlines;

// Like a large request, which small messages overtake.
TEST_F(DeadlineFaults, ARequestOvertakenByItsCancelDoesNotRun) {
  Cluster cluster(2);
  EXPECT_EQ(rpc_sync<count_run>("worker1"), 1);
  {
    const LoopbackFaults faults(
        [](std::uint32_t, std::uint32_t, std::uint64_t, const auto& message) {
          Fate fate;
          if (kind_of(message) == stitch::rpc::wire::kRequest) fate.delay = 50ms;
          return fate;
        });
    auto cancelled = rpc_async<count_run>("worker1");
    cancelled.cancel();
    const auto late = rpc_async<count_run>({.to = "worker1", .timeout = 10ms});
    EXPECT_EQ(error_of([&] { static_cast<void>(late.get()); }).code(), ErrorCode::timeout);
    EXPECT_EQ(rpc_sync<count_run>("worker1"), 2) << "sent after both";
  }
  EXPECT_EQ(runs, 2);
}

constexpr auto kTimeToReconnect = 300ms;

// The first request breaks its connection, and the other one takes kTimeToReconnect.
class BrokenAtFirst {
 public:
  BrokenAtFirst()
      : faults_(
            [broken = broken_](std::uint32_t, std::uint32_t, std::uint64_t, const auto& message) {
              Fate fate;
              const auto kind = kind_of(message);
              if (kind == stitch::rpc::wire::kRequest) {
                fate.fail = !broken->exchange(true);
              } else if (kind == stitch::rpc::wire::kBind && *broken) {
                const auto body = stitch::transport::FrameView(message).body();
                if (stitch::rpc::Bind::decode(body).step == stitch::rpc::Bind::Step::offer)
                  fate.delay = kTimeToReconnect;
              }
              return fate;
            }) {}
  [[nodiscard]] bool broken() const { return *broken_; }

 private:
  const std::shared_ptr<std::atomic<bool>> broken_ = std::make_shared<std::atomic<bool>>(false);
  const LoopbackFaults faults_;
};

std::int64_t nanoseconds_left() {
  const std::chrono::nanoseconds left =
      stitch::rpc::ExecutionContext::current().deadline - std::chrono::steady_clock::now();
  return left.count();
}

TEST_F(DeadlineFaults, ADeadlineIsTheSameWhenTheConnectionBreaks) {
  Cluster cluster(2, {.reconnect_timeout = 10s});
  EXPECT_EQ(rpc_sync<count_run>("worker1"), 1);
  const BrokenAtFirst connection;
  const auto left = rpc_async<nanoseconds_left>({.to = "worker1", .timeout = 20s});
  EXPECT_TRUE(connection.broken());
  EXPECT_LE(std::chrono::nanoseconds(left.get()), 20s - kTimeToReconnect);
  EXPECT_GE(cluster[0].debug_info().at("rpc.resent"), 1);
}

// Before the CANCEL behind its request is read.
int count_run_where_read() { return ++runs; }
STITCH_INLINE(count_run_where_read);

TEST_F(DeadlineFaults, ACallThatIsOverBeforeItIsSentAgainDoesNotRun) {
  Cluster cluster(2, {.reconnect_timeout = 10s});
  EXPECT_EQ(rpc_sync<count_run>("worker1"), 1);
  {
    const BrokenAtFirst connection;
    auto cancelled = rpc_async<count_run_where_read>("worker1");
    EXPECT_TRUE(connection.broken());
    cancelled.cancel();
    EXPECT_EQ(rpc_sync<count_run>("worker1"), 2) << "sent after it";
  }
  {
    const BrokenAtFirst connection;
    const auto late = rpc_async<count_run_where_read>({.to = "worker1", .timeout = 20ms});
    EXPECT_TRUE(connection.broken());
    EXPECT_EQ(error_of([&] { static_cast<void>(late.get()); }).code(), ErrorCode::timeout);
    EXPECT_EQ(rpc_sync<count_run>("worker1"), 3) << "sent after it";
  }
  EXPECT_EQ(runs, 3);
  EXPECT_GE(cluster[0].debug_info().at("rpc.resent"), 2) << "they were sent again";
}

TEST_F(DeadlineFaults, StopTheHandlerOfASilentCaller) {
  Cluster cluster(2, {.num_threads = 1});
  {
    const LoopbackFaults faults(
        [](std::uint32_t, std::uint32_t, std::uint64_t, const auto& message) {
          Fate fate;
          fate.drop = kind_of(message) == stitch::rpc::wire::kCancel;
          return fate;
        });
    EXPECT_EQ(error_of([] {
                // It has to begin before this has passed, and then the time until the stop is
                // short.
                rpc_sync<wait_for_stop>({.to = "worker1", .timeout = 300ms});
              }).code(),
              ErrorCode::timeout);
    EXPECT_TRUE(eventually([] { return saw_stop.load(); }, 10s));
  }
  // A graceful shutdown would wait for the dropped messages.
  for (int rank = 0; rank < 2; ++rank) cluster[rank].shutdown({.graceful = false});
}

std::string timeout_text(const Error& error) {
  EXPECT_EQ(error.code(), ErrorCode::timeout) << error.what();
  const std::string text = error.what();
  const auto at = text.find("timed out after");
  return at == std::string::npos ? text : text.substr(at);
}

// On a busy machine what the callee says may come too late: the call is made again then.
std::string text_saying(const std::string& expected, const std::function<void()>& call) {
  std::string text;
  EXPECT_TRUE(eventually([&] {
    text = timeout_text(error_of(call));
    return std::regex_match(text, std::regex(expected));
  })) << text;
  return text;
}

Future<void> await_stop() { co_await rpc_async<wait_for_stop>({.to = "worker1", .timeout = 0s}); }
Gate gate;
void hold_thread() { gate.pass(); }

TEST_F(Deadlines, TimeoutsSayWhereTheCallIs) {
  Cluster cluster(2, {.num_threads = 2});
  EXPECT_EQ(rpc_sync<count_run>("worker1"), 1);
  text_saying("timed out after 50 ms; running [0-9.]+ ms there",
              [] { rpc_sync<wait_for_stop>({.to = "worker1", .timeout = 50ms}); });
  text_saying("timed out after 1300 ms; running 1\\.[0-9] s there",
              [] { rpc_sync<wait_for_stop>({.to = "worker1", .timeout = 1300ms}); });
  text_saying("timed out after 500 ms; awaiting [0-9.]+ ms there",
              [] { rpc_sync<await_stop>({.to = "worker1", .timeout = 500ms}); });
  gate.close();
  const int before = runs;
  const auto first = rpc_async<hold_thread>("worker1");
  const auto second = rpc_async<hold_thread>("worker1");
  text_saying(R"(timed out after 200 ms; queued [0-9.]+ ms there behind .*::hold_thread\(\) )"
              R"(\(running [0-9.]+ m?s on 2 of 2 threads\))",
              [] { rpc_sync<count_run>({.to = "worker1", .timeout = 200ms}); });
  gate.open();
  first.get();
  second.get();
  EXPECT_EQ(runs, before) << "what is queued does not run any more";
}

TEST_F(DeadlineFaults, TimeoutsSayWhatTheCallerKnowsWithoutAWordOfTheCallee) {
  Cluster cluster(2);
  EXPECT_EQ(rpc_sync<count_run>("worker1"), 1);
  {
    const LoopbackFaults faults(
        [](std::uint32_t, std::uint32_t, std::uint64_t, const auto& message) {
          return Fate{.drop = kind_of(message) == stitch::rpc::wire::kErrorReply};
        });
    text_saying(
        "timed out after 300 ms; worker was last heard [0-9.]+ ms ago; the request was sent",
        [] { rpc_sync<wait_for_stop>({.to = "worker1", .timeout = 300ms}); });
  }
  // A graceful shutdown would wait for the dropped messages.
  for (int rank = 0; rank < 2; ++rank) cluster[rank].shutdown({.graceful = false});
}

// A callback of a call that has timed out delays no other timeout, heartbeat or timer.
TEST_F(DeadlineFaults, CallsThatHaveTimedOutDoNotCompleteOnTheEventLoop) {
  Cluster cluster(2, {.num_threads = 1});
  Gate callback_gate;
  {
    const LoopbackFaults faults(
        [](std::uint32_t, std::uint32_t, std::uint64_t, const auto& message) {
          return Fate{.drop = kind_of(message) == stitch::rpc::wire::kErrorReply};
        });
    auto first = rpc_async<wait_for_stop>({.to = "worker1", .timeout = 30ms});
    first.on_ready([&] { callback_gate.pass(); });
    EXPECT_TRUE(callback_gate.wait_for_arrival());
    const Promise<void> ran;
    cluster[0].agent()->loop().call_at(std::chrono::steady_clock::now(),
                                       [ran] { ran.set_value(); });
    EXPECT_TRUE(ran.future().wait_for(10s)) << "the loop is held up";
    callback_gate.open();
  }
  for (int rank = 0; rank < 2; ++rank) cluster[rank].shutdown({.graceful = false});
}

// On a busy machine the handler may answer before the timer has run.
void call_for(std::chrono::microseconds timeout) {
  try {
    rpc_sync<wait_for_stop>({.to = "worker1", .timeout = timeout});
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::timeout) << error.what();
  }
}

TEST_F(Deadlines, ShortOnesExpireInTime) {
  Cluster cluster(2);
  EXPECT_EQ(rpc_sync<count_run>("worker1"), 1);
  // With a timer that counts whole milliseconds no call would be as short.
  EXPECT_TRUE(eventually([] {
    const auto begun = std::chrono::steady_clock::now();
    call_for(500us);
    const auto took = std::chrono::steady_clock::now() - begun;
    EXPECT_GE(took, 500us);
    return took < 2ms;
  }));
  // A timeout that is long enough for the call to complete.
  call_for(50ms);
  EXPECT_TRUE(eventually([] { return saw_stop.load(); }));
}

}  // namespace
}  // namespace deadlines_test
