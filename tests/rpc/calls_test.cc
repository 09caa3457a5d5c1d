#include <type_traits>

#include "stitch/transport/loopback/loopback_endpoint.h"
#include "tests/support/world_test.h"

namespace calls_test {
namespace {

using namespace stitch::testing;

at::Tensor add(at::Tensor a, at::Tensor b) { return a + b; }
int twice(int x) { return 2 * x; }
double twice(double x) { return 2 * x; }
template <class T>
T triple(T x) {
  return 3 * x;
}
std::string greet(const std::string& name) { return "hello " + name; }
std::string whoami() { return stitch::rpc::current_agent()->self().name; }

// A literal 0 is a null pointer, too, and so was once taken for the name of a worker.
template <class T>
concept MadeOfZero = requires {
  T(0);
};
template <class T>
concept MadeOfNull = requires {
  T(nullptr);
};
static_assert(!MadeOfZero<Target> && !MadeOfNull<Target>);
static_assert(!std::is_constructible_v<Target, int>);
static_assert(!std::is_constructible_v<Target, std::nullptr_t>);
static_assert(std::is_convertible_v<WorkerId, Target>);

TEST(Calls, NumbersAndNullPointersAreNoTargets) {
  Cluster cluster(2);
  EXPECT_EQ(rpc_sync<whoami>(WorkerId(0)), "worker0");
  EXPECT_EQ(rpc_sync<whoami>(WorkerId{1}), "worker1");
  const char* const none = nullptr;
  const auto error = error_of([&] { rpc_sync<whoami>(none); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_STREQ(error.what(),
               "a null pointer is not the name of a worker; write WorkerId(0) for worker 0");
}

TEST(Calls, ReturnTheResultOfTheFunction) {
  Cluster cluster(2);
  EXPECT_TRUE(at::equal(rpc_sync<add>("worker1", at::ones(2), at::ones(2)), at::full({2}, 2.0)));
}

TEST(Calls, ConvertArgumentsAsADirectCallDoes) {
  Cluster cluster(2);
  EXPECT_EQ(rpc_sync<greet>("worker1", "you"), "hello you");
  EXPECT_EQ(rpc_sync<stitch::overload<double(double)>(twice)>("worker1", 2), 4.0);
}

TEST(Calls, NameOverloadsTemplatesAndLambdas) {
  Cluster cluster(2);
  EXPECT_EQ(rpc_sync<stitch::overload<int(int)>(twice)>("worker1", 21), 42);
  EXPECT_EQ(rpc_sync<triple<int>>("worker1", 5), 15);
  EXPECT_EQ(rpc_sync<[](int x) { return x + 1; }>("worker1", 1), 2);
}

TEST(Calls, ReachWorkersByNameIdAndInfo) {
  Cluster cluster(3);
  using namespace std::chrono_literals;
  EXPECT_EQ(rpc_sync<whoami>("worker2"), "worker2");
  EXPECT_EQ(rpc_sync<whoami>(WorkerId(1)), "worker1");
  EXPECT_EQ(rpc_sync<whoami>(cluster[2].info()), "worker2");
  EXPECT_EQ(rpc_sync<whoami>({.to = "worker1", .timeout = 5s}), "worker1");
  EXPECT_EQ(cluster[2].rpc_sync<whoami>("worker2"), "worker2");
  EXPECT_EQ(cluster[1].rpc_sync<whoami>(WorkerId(0)), "worker0");
}

std::atomic<int> times_run{0};
int run_once_more() { return ++times_run; }

TEST(Calls, AreNeverRepeated) {
  for (const auto lost : {stitch::rpc::wire::kRequest, stitch::rpc::wire::kReply}) {
    Cluster cluster(2, {.reconnect_timeout = 0s});
    times_run = 0;
    stitch::transport::Faults::set_judge([lost](std::uint32_t, std::uint32_t, std::uint64_t,
                                                const stitch::transport::Message& message) {
      return stitch::transport::Fate{.fail = stitch::transport::FrameView(message).kind() == lost};
    });
    const auto future = rpc_async<run_once_more>("worker1");
    EXPECT_TRUE(future.wait_for(std::chrono::seconds(20)));
    stitch::transport::Faults::set_judge(nullptr);
    EXPECT_EQ(future.error().code(), ErrorCode::disconnected) << future.error().what();
    // Its connection is gone for good: no other is opened, and leaving cannot be graceful.
    const auto later = rpc_async<run_once_more>("worker1");
    EXPECT_TRUE(later.wait_for(std::chrono::seconds(20)));
    EXPECT_EQ(later.error().code(), ErrorCode::disconnected) << later.error().what();
    for (int rank = 0; rank < 2; ++rank) cluster[rank].shutdown({.graceful = false});
    EXPECT_EQ(times_run, lost == stitch::rpc::wire::kRequest ? 0 : 1);
  }
}

// Every sixth message breaks its connection.
TEST(Calls, RunOnceThoughTheirConnectionsBreak) {
  Cluster cluster(2, {.reconnect_timeout = 10s});
  times_run = 0;
  std::atomic<std::uint64_t> messages{0};
  stitch::transport::Faults::set_judge(
      [&](std::uint32_t, std::uint32_t, std::uint64_t, const stitch::transport::Message& message) {
        const auto kind = stitch::transport::FrameView(message).kind();
        const bool call = kind == stitch::rpc::wire::kRequest || kind == stitch::rpc::wire::kReply;
        return stitch::transport::Fate{.fail = call && ++messages % 6 == 0};
      });
  for (int i = 1; i <= 60; ++i) EXPECT_EQ(rpc_sync<run_once_more>("worker1"), i);
  stitch::transport::Faults::set_judge(nullptr);
  EXPECT_GT(cluster[0].debug_info().at("rpc.reconnects"), 5);
  EXPECT_TRUE(cluster.shutdown().empty()) << "what was sent and received balances";
  EXPECT_EQ(times_run, 60);
}

}  // namespace
}  // namespace calls_test
