#include "stitch/dist_autograd/protocol/messages.h"
#include "tests/dist_autograd/remote_parts.h"
#include "tests/support/oracle.h"
#include "tests/support/world_test.h"

namespace stitch::testing::faults_test {
namespace {

using dist_autograd::Context;
using transport::Fate;
using transport::Message;

bool belongs_to_autograd(const Message& message) {
  const auto kind = kind_of(message);
  return kind >= dist_autograd::wire::kFirstKind && kind <= dist_autograd::wire::kLastKind;
}

TEST(Faults, MessagesThatOvertakeEachOtherChangeNothing) {
  Cluster cluster(4);
  {
    const LoopbackFaults faults(
        [](std::uint32_t, std::uint32_t, std::uint64_t sequence, const Message& message) {
          std::mt19937_64 random(sequence);
          Fate fate;
          if (belongs_to_autograd(message)) fate.delay = std::chrono::microseconds(random() % 2000);
          return fate;
        });
    const auto p = parameter_of(cluster[1]).detach(), q = parameter_of(cluster[2]).detach(),
               r = parameter_of(cluster[3]).detach();
    for (int i = 0; i < 40; ++i) {
      Context context;
      const auto x = ones().requires_grad_();
      const auto a = rpc_async<via>("worker1", std::vector<std::string>{"worker2", "worker1"}, x);
      const auto b =
          rpc_async<via>("worker3", std::vector<std::string>{"worker2", "worker1", "worker3"}, x);
      rpc_sync<via>("worker2", std::vector<std::string>{"worker3", "worker2"}, x);
      context.backward({(a.get() + b.get()).sum()});
      EXPECT_TRUE(equal_gradients(context.gradient(x), p * q * p + r * q * p * r)) << "round " << i;
      EXPECT_TRUE(equal_gradients(gradient_on(cluster[2], context.id()), p * p + r * p * r))
          << "round " << i;
    }
    EXPECT_TRUE(nothing_is_left(cluster));
  }
}

TEST(Faults, ABrokenConnectionDoesNotDisturbThePassWhicheverMessageItHits) {
  bool broken = true;
  for (std::uint64_t k = 0; broken; ++k) {
    ASSERT_LT(k, 100u) << "the pass needs no end of messages";
    Cluster cluster(3, {.reconnect_timeout = std::chrono::seconds(30)});
    std::atomic<std::uint64_t> count{0};
    std::atomic<bool> hit{false};
    {
      const LoopbackFaults faults(
          [&](std::uint32_t, std::uint32_t, std::uint64_t, const Message& message) {
            const bool fail = belongs_to_autograd(message) && count++ == k;
            if (fail) hit = true;
            return Fate{.fail = fail};
          });
      Context context;
      const auto x = ones().requires_grad_();
      const auto loss =
          rpc_sync<via>("worker1", std::vector<std::string>{"worker2", "worker1"}, x).sum();
      EXPECT_NO_THROW(context.backward({loss}, {.timeout = std::chrono::seconds(20)}))
          << "message " << k;
      const auto p = parameter_of(cluster[1]).detach(), q = parameter_of(cluster[2]).detach();
      EXPECT_TRUE(equal_gradients(context.gradient(x), p * q * p)) << "message " << k;
    }
    EXPECT_TRUE(nothing_is_left(cluster)) << "message " << k;
    broken = hit;
    EXPECT_TRUE(cluster.shutdown().empty()) << "message " << k;
  }
}

TEST(Faults, ABrokenConnectionEndsThePassWhicheverMessageItHits) {
  bool all_survived = false;
  for (std::uint64_t k = 0; !all_survived; ++k) {
    ASSERT_LT(k, 100u) << "the pass never succeeds";
    Cluster cluster(3, {.reconnect_timeout = {}});
    std::atomic<std::uint64_t> count{0};
    std::atomic<bool> broken{false};
    {
      const LoopbackFaults faults(
          [&](std::uint32_t, std::uint32_t, std::uint64_t, const Message& message) {
            Fate fate;
            fate.fail = belongs_to_autograd(message) && count++ == k;
            if (fate.fail) broken = true;
            return fate;
          });
      Context context;
      const auto x = ones().requires_grad_();
      const auto loss =
          rpc_sync<via>("worker1", std::vector<std::string>{"worker2", "worker1"}, x).sum();
      try {
        context.backward({loss}, {.timeout = std::chrono::seconds(20)});
        // A connection that broke after the last gradient does not change the result.
        const auto p = parameter_of(cluster[1]).detach(), q = parameter_of(cluster[2]).detach();
        EXPECT_TRUE(equal_gradients(context.gradient(x), p * q * p)) << "message " << k;
      } catch (const Error& error) {
        EXPECT_TRUE(broken) << error.what();
        EXPECT_EQ(error.code(), ErrorCode::disconnected) << "message " << k << ": " << error.what();
        EXPECT_NE(std::string(error.what()).find("worker \"worker"), std::string::npos)
            << error.what();
        EXPECT_THROW(static_cast<void>(context.gradient(x)), Error) << "message " << k;
      }
      EXPECT_TRUE(eventually([&] {
        return count_on(cluster[0], "passes") + count_on(cluster[1], "passes") +
                   count_on(cluster[2], "passes") ==
               0;
      })) << "message "
          << k;
    }
    // RELEASE messages are still sent after the context has ended.
    const bool released = eventually([&] {
      return broken || count_on(cluster[0], "contexts") + count_on(cluster[1], "contexts") +
                               count_on(cluster[2], "contexts") ==
                           0;
    });
    EXPECT_TRUE(released);
    all_survived = !broken;
    // With a connection lost, shutdown cannot be graceful.
    for (int i = 0; broken && i < cluster.size(); ++i) cluster[i].shutdown({.graceful = false});
  }
}

}  // namespace
}  // namespace stitch::testing::faults_test
