// Which streams a backward pass makes, adds and reads gradients on: none is used before it is
// written, on any of the devices of a node. Over the double of CUDA.
#include <torch/csrc/autograd/custom_function.h>

#include "tests/gpu/device_test.h"

namespace autograd_streams_test {  // its functions are registered under their full names
namespace {

using namespace stitch::testing::device_names;  // NOLINT

at::Tensor leaf(int index, at::IntArrayRef sizes = {3, 4}) {
  return filled(index, 1, sizes).requires_grad_();
}

// Streams that nodes have had stopped, so that what they queue there is not done yet.
class StoppedStreams {
 public:
  void stop(c10::Stream stream) {
    const std::lock_guard lock(mutex_);
    if (stops_) holds_.push_back(std::make_unique<fake::Hold>(stream));
  }
  void stop_from_now_on(bool stops) {
    const std::lock_guard lock(mutex_);
    stops_ = stops;
  }
  void let_go() {
    std::vector<std::unique_ptr<fake::Hold>> holds;
    const std::lock_guard lock(mutex_);
    holds.swap(holds_);
  }

 private:
  std::mutex mutex_;
  bool stops_ = false;
  std::vector<std::unique_ptr<fake::Hold>> holds_;
};
StoppedStreams& stopped_streams() {
  static StoppedStreams streams;
  return streams;
}

// The same values, whose gradient is `value`, written by what backward queues on its stream.
struct LateGradient : torch::autograd::Function<LateGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& tensor,
                            double value) {
    context->saved_data["value"] = value;
    return tensor.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const at::Tensor late = at::empty_like(gradients[0]);
    stopped_streams().stop(fake::current_stream(late.device()));
    fake::fill_later(late, static_cast<float>(context->saved_data["value"].toDouble()));
    return {late, at::Tensor()};
  }
};
// On a stream of its own.
at::Tensor with_late_gradient(const at::Tensor& tensor, double value) {
  const c10::StreamGuard own(fake::pool_stream(tensor.device()));
  return LateGradient::apply(tensor, value).sum();
}

std::vector<at::Tensor> all_times_two(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> results;
  for (const at::Tensor& each : tensors) results.push_back(each * 2);
  return results;
}

// Each gradient is written long after a pass that did not wait for it would have read it.
void backward_with_stopped_streams(const Context& context, const std::vector<at::Tensor>& losses) {
  stopped_streams().stop_from_now_on(true);
  const auto done = context.backward_async(losses);
  while (!done.wait_for(std::chrono::milliseconds(20))) stopped_streams().let_go();
  stopped_streams().let_go();
  stopped_streams().stop_from_now_on(false);
  done.get();
}

// The tensors of one message are the inputs of one node. So many bytes are sent while there is
// something else to run.
TEST(AutogradStreams, GradientsOfOneMessageToTwoDevicesAreSentOnceBothAreWritten) {
  Cluster cluster(2);
  const at::Tensor first = leaf(0, {300, 300});
  const at::Tensor second = leaf(1, {300, 300});
  const at::Tensor here = leaf(2);
  const Context context;
  const auto received = rpc_sync<all_times_two>("worker1", std::vector{first, second});
  backward_with_stopped_streams(context,
                                {with_late_gradient(here, 1), with_late_gradient(received[0], 3),
                                 with_late_gradient(received[1], 5)});
  EXPECT_TRUE(holds(context.gradient(first), 0, 6));
  EXPECT_TRUE(holds(context.gradient(second), 1, 10));
}

TEST(AutogradStreams, GradientsFromSeveralStreamsAreAddedOnceEachIsWritten) {
  Cluster cluster(2);
  const at::Tensor first = leaf(0);
  const at::Tensor second = leaf(1);
  const Context context;
  const auto received = rpc_sync<all_times_two>("worker1", std::vector{first, second});
  std::vector<at::Tensor> losses;
  for (const at::Tensor& each : received) {
    for (const double value : {3, 5, 7}) losses.push_back(with_late_gradient(each, value));
  }
  backward_with_stopped_streams(context, losses);
  EXPECT_TRUE(holds(context.gradient(first), 0, 30));
  EXPECT_TRUE(holds(context.gradient(second), 1, 30));
}

TEST(AutogradStreams, LeavesAddWhatSeveralStreamsWrite) {
  Cluster cluster(1);
  const at::Tensor parameter = leaf(1);
  const Context context;
  for (int pass = 1; pass <= 3; ++pass) {
    backward_with_stopped_streams(
        context, {with_late_gradient(parameter, 3), with_late_gradient(parameter, 5)});
    EXPECT_TRUE(holds(context.gradient(parameter), 1, static_cast<float>(8 * pass)));
  }
}

TEST(AutogradStreams, TheGradientOfARootMayComeFromTheStreamOfTheCaller) {
  Cluster cluster(1);
  const at::Tensor parameter = leaf(1);
  const Context context;
  const at::Tensor root = parameter * 2;
  const c10::StreamGuard own(fake::pool_stream(device(1)));
  for (int pass = 1; pass <= 2; ++pass) {
    const at::Tensor gradient = at::empty_like(root);
    fake::fill_later(gradient, 4);
    const stitch::dist_autograd::Options options{.retain_graph = true, .grads = {gradient}};
    if (pass == 1) {
      context.backward({root}, options);
    } else {
      context.backward_async({root}, options).get();
    }
    EXPECT_TRUE(holds(context.gradient(parameter), 1, static_cast<float>(8 * pass)));
  }
}

TEST(AutogradStreams, AReaderWaitsForTheGradientOnItsOwnStream) {
  Cluster cluster(1);
  const at::Tensor parameter = leaf(1);
  const Context context;
  const at::Tensor loss = with_late_gradient(parameter, 5);
  const c10::StreamGuard own(fake::pool_stream(device(1)));
  context.backward({loss});
  EXPECT_TRUE(all_are(context.gradient(parameter), 5));
  EXPECT_TRUE(all_are(context.gradients().at(parameter), 5));
}

fake::Hold* held_by_node = nullptr;
// The same values; its gradient is copied late, on the stream that the node runs under.
struct CopiedLater : torch::autograd::Function<CopiedLater> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& tensor) {
    return tensor.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    at::Tensor copy = at::empty_like(gradients[0]);
    held_by_node = new fake::Hold(fake::current_stream(copy.device()));
    copy.copy_(gradients[0], /*non_blocking=*/true);
    return {copy};
  }
};

TEST(AutogradStreams, WhatOneNodeStillReadsIsNotAddedToForAnother) {
  Cluster cluster(1);
  const at::Tensor first = leaf(1);
  const at::Tensor second = leaf(1);
  const Context context;
  // No stream but that of the copy is held, and none waits for it.
  const auto on_a_stream_of_its_own = [](const auto& compute) {
    const c10::StreamGuard own(fake::pool_stream(device(1)));
    return compute();
  };
  const at::Tensor used_twice = on_a_stream_of_its_own([&] { return first * 1; });
  const at::Tensor other_use = on_a_stream_of_its_own([&] { return (used_twice * 3).sum(); });
  const at::Tensor copied = on_a_stream_of_its_own([&] { return CopiedLater::apply(second); });
  // One gradient for both, which the copy needs as it is.
  context.backward({with_late_gradient(copied + used_twice, 1), other_use});
  ASSERT_NE(held_by_node, nullptr);
  delete held_by_node;
  EXPECT_TRUE(all_are(context.gradient(second), 1));
  EXPECT_TRUE(all_are(context.gradient(first), 4));
}

TEST(AutogradStreams, WhatAStreamStillReadsIsNotAddedTo) {
  Cluster cluster(1);
  const at::Tensor parameter = leaf(1);
  const Context context;
  const at::Tensor loss = (parameter * 5).sum();
  context.backward({loss}, {.retain_graph = true});
  const c10::StreamGuard own(fake::pool_stream(device(1)));
  at::Tensor read = filled(1, 0, {3, 4});
  {
    const fake::Hold hold(fake::current_stream(device(1)));
    read.copy_(context.stored_gradient(parameter), /*non_blocking=*/true);
    const c10::StreamGuard another(fake::default_stream(device(1)));
    context.backward({loss});
  }
  EXPECT_TRUE(all_are(read, 5));
  EXPECT_TRUE(all_are(context.gradient(parameter), 10));
}

}  // namespace
}  // namespace autograd_streams_test
