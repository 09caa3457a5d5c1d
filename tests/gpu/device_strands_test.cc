// Nodes of the CPU and of each device run side by side, those of one device one at a time. Over
// the double of CUDA.
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tests/gpu/device_test.h"

namespace device_strands_test {  // its functions are registered under their full names
namespace {

using namespace stitch::testing::device_names;  // NOLINT
using stitch::testing::Gate;

// What the backward of a node does, by its number.
std::map<std::int64_t, std::function<void()>> actions;

struct Acts : torch::autograd::Function<Acts> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& tensor,
                            std::int64_t action) {
    context->saved_data["action"] = action;
    return tensor.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    actions.at(context->saved_data["action"].toInt())();
    return {gradients[0], at::Tensor()};
  }
};

class DeviceStrands : public ::testing::Test {
 protected:
  void TearDown() override { actions.clear(); }
  // A loss with a node of the device (-1: the CPU) whose backward does that.
  static at::Tensor acting(const at::Tensor& leaf, std::function<void()> action) {
    const auto number = static_cast<std::int64_t>(actions.size());
    actions.emplace(number, std::move(action));
    return Acts::apply(leaf, number).sum();
  }
  static at::Tensor leaf_on(int index) {
    const auto options = index < 0 ? at::TensorOptions(at::kFloat)
                                   : at::TensorOptions(at::kFloat).device(device(index));
    return at::ones({3}, options).requires_grad_();
  }
};

// The node of each pair waits until that of the other has run, whichever begins.
class Pairs : public DeviceStrands, public ::testing::WithParamInterface<std::pair<int, int>> {};
INSTANTIATE_TEST_SUITE_P(OfDevices, Pairs,
                         ::testing::Values(std::pair(-1, 0), std::pair(0, -1), std::pair(0, 1),
                                           std::pair(2, 1)));

TEST_P(Pairs, ANodeThatTakesLongDelaysNoneOfAnotherDevice) {
  Cluster cluster(1, {.num_threads = 1});
  const at::Tensor other = leaf_on(GetParam().second);
  const at::Tensor slow = leaf_on(GetParam().first);
  for (const bool async : {false, true}) {
    Gate gate;
    // The last one made begins, where only one can run at a time.
    const at::Tensor quick_loss = acting(other, [&] { gate.open(); });
    const at::Tensor slow_loss = acting(slow, [&] { gate.pass(); });
    const Context context;
    if (async) {
      context.backward_async({quick_loss, slow_loss}).get();
    } else {
      context.backward({quick_loss, slow_loss});
    }
    EXPECT_TRUE(all_are(context.gradient(other), 1));
    EXPECT_TRUE(all_are(context.gradient(slow), 1));
  }
}

TEST_F(DeviceStrands, NodesOfOneDeviceRunOneAtATime) {
  Cluster cluster(1);
  std::array<std::atomic<int>, 4> running{};
  std::array<std::atomic<int>, 4> runs{};
  std::atomic<int> together{0};
  std::atomic<int> most_together{0};
  std::vector<at::Tensor> leaves;
  std::vector<at::Tensor> losses;
  for (int i = 0; i < 80; ++i) {
    const auto index = static_cast<std::size_t>(i % 4);
    leaves.push_back(leaf_on(static_cast<int>(index) - 1));
    losses.push_back(acting(leaves.back(), [&, index] {
      EXPECT_EQ(++running[index], 1);
      const int now = ++together;
      int most = most_together;
      while (most < now && !most_together.compare_exchange_weak(most, now)) {
      }
      std::this_thread::sleep_for(200us);  // so that nodes of one device would meet, if they could
      --together;
      --running[index];
      ++runs[index];
    }));
  }
  const Context context;
  context.backward(losses);
  for (const auto& each : runs) EXPECT_EQ(each, 20);
  EXPECT_GT(most_together, 1);
  for (const at::Tensor& each : leaves) EXPECT_TRUE(all_are(context.gradient(each), 1));
}

at::Tensor times_two(const at::Tensor& tensor) { return tensor * 2; }
Gate worker1_has_run;
at::Tensor noted_times_two(const at::Tensor& tensor) { return Acts::apply(tensor, 1000) * 2; }

// Its gradient leaves, comes back from the other worker, and reaches the leaf, all while a node of
// the CPU runs.
TEST_F(DeviceStrands, GradientsOfADeviceTravelWhileANodeOfTheCpuRuns) {
  // One of them runs the node where backward() does not; another one takes what comes.
  Cluster cluster(2, {.num_threads = 2});
  const at::Tensor parameter = leaf_on(1);
  const at::Tensor here = leaf_on(-1);
  for (const bool async : {false, true}) {
    worker1_has_run.close();
    actions.clear();
    Gate reached;
    actions.emplace(1000, [] { worker1_has_run.open(); });
    actions.emplace(1001, [&] { reached.open(); });
    const Context context;
    const at::Tensor sent = Acts::apply(parameter, 1001);
    const at::Tensor received = rpc_sync<noted_times_two>("worker1", sent);
    const at::Tensor slow = acting(here, [&] {
      worker1_has_run.pass();
      reached.pass();
    });
    if (async) {
      context.backward_async({received.sum(), slow}).get();
    } else {
      context.backward({received.sum(), slow});
    }
    EXPECT_TRUE(holds(context.gradient(parameter), 1, 2));
    EXPECT_TRUE(all_are(context.gradient(here), 1));
  }
}

TEST_F(DeviceStrands, TheFirstNodeThatFailsEndsThePassOnceAllHaveEnded) {
  Cluster cluster(1);
  Gate gate;
  std::atomic<bool> slow_has_ended{false};
  const at::Tensor slow = acting(leaf_on(-1), [&] {
    gate.pass();
    std::this_thread::sleep_for(20ms);  // a pass that does not wait for it has ended by then
    slow_has_ended = true;
  });
  const at::Tensor failing = acting(leaf_on(1), [&] {
    EXPECT_TRUE(gate.wait_for_arrival());  // no node begins after the first failure
    gate.open();
    throw std::runtime_error("the node of the device has failed");
  });
  const Context context;
  const Error error = error_of([&] { context.backward({slow, failing}); });
  EXPECT_TRUE(has_text(error, ErrorCode::remote_exception, "the node of the device has failed"));
  EXPECT_TRUE(slow_has_ended);
  EXPECT_EQ(error_of([&] { static_cast<void>(context.gradients()); }).code(), error.code());
}

TEST_F(DeviceStrands, AContextEndsOnceTheNodesOfAllDevicesHave) {
  Cluster cluster(1);
  Gate on_cpu;
  Gate on_device;
  std::atomic<int> ended{0};
  const auto wait_at = [&](Gate& gate) {
    return [&] {
      gate.pass();
      ++ended;
    };
  };
  const at::Tensor first = acting(leaf_on(-1), wait_at(on_cpu));
  const at::Tensor second = acting(leaf_on(1), wait_at(on_device));
  std::optional<Context> context;
  context.emplace();
  const auto done = context->backward_async({first, second});
  EXPECT_TRUE(on_cpu.wait_for_arrival());
  EXPECT_TRUE(on_device.wait_for_arrival());
  std::atomic<bool> ending{false};
  std::atomic<bool> over{false};
  std::thread opening([&] {
    EXPECT_TRUE(eventually([&] { return ending.load(); }));
    on_device.open();
    EXPECT_TRUE(eventually([&] { return ended == 1; }));
    std::this_thread::sleep_for(20ms);  // an end that waits for the first one only would be over
    EXPECT_FALSE(over);
    on_cpu.open();
  });
  ending = true;
  context.reset();
  over = true;
  opening.join();
  EXPECT_EQ(ended, 2);
  EXPECT_EQ(error_of([&] { done.get(); }).code(), ErrorCode::cancelled);
}

// The only thread of the device waits inside a node.
TEST_F(DeviceStrands, ANodeOfADeviceMayWaitForAnotherPassThere) {
  Cluster cluster(2, {.num_threads = 1});
  const at::Tensor inner = leaf_on(1);
  const at::Tensor outer = leaf_on(1);
  const at::Tensor loss = acting(outer, [&] {
    const at::AutoGradMode grad(true);
    const stitch::WorkerScope scope(cluster[0]);
    const Context context;
    const at::Tensor received = rpc_sync<times_two>("worker1", inner * 3);
    context.backward({received.sum()});
    EXPECT_TRUE(holds(context.gradient(inner), 1, 6));
  });
  const Context context;
  context.backward({loss});
  EXPECT_TRUE(holds(context.gradient(outer), 1, 1));
}

TEST_F(DeviceStrands, ShutdownIsRefusedInsideANodeOfADevice) {
  Cluster cluster(1);
  const at::Tensor parameter = leaf_on(1);
  const at::Tensor loss = acting(parameter, [&] {
    const Error error = error_of([&] { cluster[0].shutdown(); });
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  });
  const Context context;
  context.backward({loss});
  EXPECT_TRUE(holds(context.gradient(parameter), 1, 1));
}

}  // namespace
}  // namespace device_strands_test
