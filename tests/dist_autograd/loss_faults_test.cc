// Contexts and passes when a worker between two others is lost, or has too much in flight to send.
#include "stitch/dist_autograd/engine.h"
#include "stitch/dist_autograd/messages.h"
#include "tests/dist_autograd/remote_parts.h"
#include "tests/support/oracle.h"
#include "tests/support/world_test.h"

namespace stitch::testing::loss_faults_test {
namespace {

using dist_autograd::Context;
using namespace std::chrono_literals;
using transport::Fate;
using transport::Message;

void leave_at_once(Worker& worker) {
  try {
    worker.shutdown({.graceful = false, .timeout = 5s});
  } catch (const Error&) {
  }
}

void end_all(Cluster& cluster) {
  for (int i = 0; i < cluster.size(); ++i) leave_at_once(cluster[i]);
}

TEST(LossFaults, AContextEndsAtAWorkerWhenTheLastThatToldOfItIsLost) {
  for (const bool told_by_home : {false, true}) {
    Cluster cluster(4);
    {
      Context context;
      const auto x = ones().requires_grad_();
      rpc_sync<via>("worker1", std::vector<std::string>{"worker2", "worker3"}, x);
      const auto direct = told_by_home ? rpc_sync<times_parameter>("worker2", x) : at::Tensor();
      leave_at_once(cluster[1]);
      for (const int i : {2, 3}) {
        EXPECT_TRUE(eventually([&] {
          return count_on(cluster[i], "contexts") == (told_by_home ? 1 : 0) &&
                 (told_by_home || count_on(cluster[i], "links") == 0);
        })) << "on worker "
            << i;
      }
      if (told_by_home) {
        context.backward({direct.sum()});
        EXPECT_TRUE(equal_gradients(gradient_on(cluster[2], context.id()), ones()));
      } else {
        // A call that comes late is not recorded, and a backward that reaches its result says so.
        const auto late = rpc_sync<times_parameter>("worker2", x);
        const auto error = error_of([&] { context.backward({late.sum()}); });
        EXPECT_NE(std::string(error.what()).find("received without a context"), std::string::npos)
            << error.what();
      }
    }
    end_all(cluster);
  }
}

Gate gate;
void hold_a_thread() { gate.pass(); }

TEST(LossFaults, AMessageOfAPassThatIsHandledAfterItsSenderWasLostLeavesNoPassOpen) {
  gate.close();
  Cluster cluster(3, [](Options& options) { options.num_threads = options.rank == 2 ? 1 : 2; });
  {
    Context context;
    const auto x = ones().requires_grad_();
    const auto loss = rpc_sync<via>("worker1", std::vector<std::string>{"worker2"}, x).sum();
    auto held = rpc_async<hold_a_thread>("worker2");
    ASSERT_TRUE(gate.wait_for_arrival());
    std::atomic<bool> arrived{false};
    const LoopbackFaults faults(
        [&](std::uint32_t from, std::uint32_t to, std::uint64_t, const Message& message) {
          const auto kind = kind_of(message);
          if (from == 1 && to == 2 &&
              (kind == dist_autograd::wire::kMark || kind == dist_autograd::wire::kGradients))
            arrived = true;
          return Fate{};
        });
    const auto pass = context.backward_async({loss});
    ASSERT_TRUE(eventually([&] { return arrived.load(); }));
    std::this_thread::sleep_for(50ms);  // it waits for the thread
    leave_at_once(cluster[1]);
    const auto error = error_of([&] { pass.get(); });
    EXPECT_NE(std::string(error.what()).find("worker1"), std::string::npos) << error.what();
    gate.open();
    held.get();
    EXPECT_TRUE(eventually([&] { return count_on(cluster[2], "passes") == 0; }));
  }
  EXPECT_TRUE(eventually([&] { return count_on(cluster[2], "contexts") == 0; }));
  end_all(cluster);
}

at::Tensor held_in_backward(at::Tensor x) {
  const auto y = times_parameter(x);
  y.register_hook([](const at::Tensor& gradient) {
    gate.pass();
    return gradient;
  });
  return y;
}
at::Tensor held_in_backward_via(std::string next, at::Tensor x) {
  return rpc_sync<held_in_backward>(next, times_parameter(x));
}

// The world tells that a life is over before it tells of the next one, but a pass does not need
// that: as if the end of each worker's former life were told again while one runs.
TEST(LossFaults, TheEndOfAFormerLifeEndsNoPassOfItsSuccessor) {
  gate.close();
  Cluster cluster(3);
  Context context;
  const auto x = ones().requires_grad_();
  const auto loss = rpc_sync<held_in_backward_via>("worker1", "worker2", x).sum();
  const auto pass = context.backward_async({loss});
  ASSERT_TRUE(gate.wait_for_arrival());
  for (int at = 0; at < cluster.size(); ++at) {
    const WorkerScope scope(cluster[at]);
    auto& engine = dist_autograd::Engine::of(*rpc::current_agent());
    for (int of = 0; of < cluster.size(); ++of) {
      WorkerInfo former = cluster[of].info();
      ASSERT_GT(former.epoch, 0u);
      --former.epoch;
      engine.on_member_dead(former, Error(ErrorCode::disconnected, "it died long ago"));
    }
  }
  gate.open();
  pass.get();
  EXPECT_TRUE(
      equal_gradients(context.gradient(x), parameter_of(cluster[1]) * parameter_of(cluster[2])));
}

at::Tensor a_large_result() { return at::ones({1 << 14}, at::kDouble); }

TEST(LossFaults, ControlFramesAndGradientsPassWhereRepliesTakeAllRoom) {
  std::size_t reply_bytes = 0;
  const auto is_large = [](std::uint32_t from, const Message& message) {
    return from == 1 && kind_of(message) == rpc::wire::kReply &&
           rpc::total_bytes(message) > 100'000;
  };
  {
    Cluster cluster(2);
    const LoopbackFaults faults(
        [&](std::uint32_t from, std::uint32_t, std::uint64_t, const Message& message) {
          if (is_large(from, message)) reply_bytes = rpc::total_bytes(message);
          return Fate{};
        });
    rpc_sync<a_large_result>("worker1");
  }
  ASSERT_GT(reply_bytes, 0u);
  std::atomic<int> under_way{0};
  std::atomic<bool> go{false};
  Cluster cluster(3, [&](Options& options) {
    if (options.rank != 1) return;
    options.max_inflight_bytes = reply_bytes + 16;
    options.num_threads = 4;
  });
  std::optional<Context> words, data;
  words.emplace();
  const auto words_loss = rpc_sync<times_parameter>("worker1", ones()).sum();
  data.emplace();
  const auto data_loss =
      rpc_sync<via>("worker1", std::vector<std::string>{"worker2"}, ones()).sum();
  const LoopbackFaults faults(
      [&](std::uint32_t from, std::uint32_t, std::uint64_t, const Message& message) {
        if (is_large(from, message)) {
          ++under_way;
          while (!go) std::this_thread::sleep_for(1ms);  // it is being written all the time
        }
        return Fate{};
      });
  // Its earlier replies have arrived, but may still count.
  ASSERT_TRUE(eventually([&] { return cluster[1].debug_info().at("rpc.outgoing_bytes") == 0; }));
  // Limits are per peer: neither worker 0 nor worker 2 can be sent another reply.
  const auto to_the_root = rpc_async<a_large_result>("worker1");
  const auto to_worker2 = cluster[2].rpc_async<a_large_result>("worker1");
  ASSERT_TRUE(eventually([&] { return under_way == 2; }));
  // Here worker1 has only marks, acknowledgements and its end to send.
  words->backward({words_loss}, {.timeout = 10s});
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[1], words->id()), ones()));
  // Here it has a gradient for worker2: replies do not keep gradients out.
  data->backward({data_loss}, {.timeout = 10s});
  EXPECT_EQ(under_way, 2);
  go = true;
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[2], data->id()), parameter_of(cluster[1])));
  // Only worker1 sends RELEASE to worker2.
  data.reset();
  words.reset();
  EXPECT_TRUE(nothing_is_left(cluster));
  to_the_root.get();
  to_worker2.get();
}

}  // namespace
}  // namespace stitch::testing::loss_faults_test
