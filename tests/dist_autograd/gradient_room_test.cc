// Gradients to a worker that does not read: what waits for room in max_inflight_bytes.
#include "tests/support/world_test.h"

namespace stitch::testing::gradient_room_test {
namespace {

using dist_autograd::Context;
using namespace std::chrono_literals;

constexpr std::size_t kLimit = std::size_t{1} << 20;
constexpr int kParts = 64;
constexpr std::int64_t kPartElements = 32 << 10;  // 256 KiB: together 16 times the limit

at::Tensor& weight() {
  static at::Tensor weight = at::ones({kPartElements}, at::kDouble).requires_grad_();
  return weight;
}
at::Tensor part(int factor) { return weight() * factor; }

// On worker1: the sum of the squares of as many parts of worker2.
at::Tensor squares(int parts) {
  at::Tensor sum = at::zeros({}, at::kDouble);
  for (int i = 1; i <= parts; ++i) {
    const at::Tensor each = rpc_sync<part>("worker2", i);
    sum = sum + (each * each).sum();
  }
  return sum;
}

Gate gate;
void stop_reading() { gate.pass(); }
STITCH_INLINE(stop_reading);

class GradientRoom : public ::testing::Test {
 protected:
  // Over shared memory, where a message is counted until it is in the ring.
  GradientRoom()
      : cluster_(3, [](Options& options) {
          options.transports = {"shm"};
          if (options.rank == 1) options.max_inflight_bytes = kLimit;
        }) {}
  void TearDown() override {
    gate.open();
    if (stopped_.valid()) stopped_.get();
  }
  std::int64_t number(const std::string& name) {
    const auto numbers = cluster_[1].debug_info();
    const auto found = numbers.find(name);
    return found == numbers.end() ? 0 : found->second;
  }
  std::int64_t waiting() { return number("rpc.peer.worker2.gradients_waiting_bytes"); }
  void stop_worker2() {
    gate.close();
    stopped_ = cluster_[1].rpc_async<stop_reading>("worker2");
    ASSERT_TRUE(gate.wait_for_arrival());
  }
  // Whether the gradient of the weight is that of squares(parts).
  bool right(const Context& context, int parts) {
    const WorkerScope scope(cluster_[2]);
    double expected = 0;
    for (int i = 1; i <= parts; ++i) expected += 2.0 * i * i;
    const auto gradient = dist_autograd::find_context(context.id()).gradient(weight());
    return gradient.defined() && gradient.eq(expected).all().item<bool>();
  }

  Cluster cluster_;
  Future<void> stopped_;
};

TEST_F(GradientRoom, APassWaitsForAPeerThatReadsSlowlyWithBoundedMemory) {
  const Context context;
  const auto loss = rpc_sync<squares>("worker1", kParts);
  ASSERT_TRUE(eventually([&] { return number("rpc.outgoing_bytes") == 0; }));
  ASSERT_NO_FATAL_FAILURE(stop_worker2());
  const auto pass = context.backward_async({loss}, {.timeout = 60s});
  EXPECT_TRUE(eventually([&] { return waiting() > static_cast<std::int64_t>(kLimit / 2); }));
  // Half of the limit in the hands of the transport, half waiting, a message of 256 KiB each.
  constexpr auto kMost = static_cast<std::int64_t>(kLimit + 2 * (300 << 10));
  std::int64_t most = 0;
  const auto watch = [&] { most = std::max(most, number("rpc.outgoing_bytes")); };
  for (int i = 0; i < 30; ++i) {
    watch();
    std::this_thread::sleep_for(10ms);
  }
  EXPECT_LT(most, kMost) << "the pass goes on while nothing is read";
  EXPECT_FALSE(pass.ready());
  gate.open();
  while (!pass.ready()) watch();
  EXPECT_NO_THROW(pass.get());
  EXPECT_LT(most, kMost);
  EXPECT_TRUE(right(context, kParts));
}

TEST_F(GradientRoom, APassThatFailsDropsWhatWaits) {
  std::optional<Context> context;
  context.emplace();
  const auto loss = rpc_sync<squares>("worker1", kParts);
  ASSERT_NO_FATAL_FAILURE(stop_worker2());
  auto pass = context->backward_async({loss}, {.timeout = 60s});
  EXPECT_TRUE(eventually([&] { return waiting() > static_cast<std::int64_t>(kLimit / 2); }));
  pass.cancel();
  EXPECT_EQ(error_of([&] { pass.get(); }).code(), ErrorCode::cancelled);
  EXPECT_TRUE(eventually([&] { return waiting() == 0; })) << "worker2 still does not read";
  EXPECT_TRUE(eventually([&] { return number("dist_autograd.passes") == 0; }));
  gate.open();
  stopped_.get();
  context.reset();
  const Context next;
  next.backward({rpc_sync<squares>("worker1", 8)}, {.timeout = 60s});
  EXPECT_TRUE(right(next, 8));
}

}  // namespace
}  // namespace stitch::testing::gradient_room_test
