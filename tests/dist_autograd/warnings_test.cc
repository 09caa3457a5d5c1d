// Which thread gets the warnings that nodes raise.
#include "stitch/dist_autograd/executor/warning_collector.h"
#include "tests/dist_autograd/remote_parts.h"
#include "tests/support/world_test.h"

namespace stitch::testing::warnings_test {
namespace {

using dist_autograd::Context;
namespace torch_warnings = dist_autograd::torch_warnings;

// Where warnings have no types.
[[maybe_unused]] std::string text_of(const c10::SourceLocation&, const std::string& text, bool) {
  return text;
}
template <class Warning>
std::string text_of(const Warning& warning) {
  return warning.msg();
}

template <class Process>
struct BasicRecorder;
// Keeps the texts of the warnings of one thread.
template <class... Parts>
struct BasicRecorder<void (c10::WarningHandler::*)(Parts...)> : c10::WarningHandler {
  void process(Parts... parts) override { texts.push_back(text_of(parts...)); }
  std::vector<std::string> texts;
};
using Recorder = BasicRecorder<decltype(&c10::WarningHandler::process)>;

// The identity, whose backward warns.
struct Warns : torch::autograd::Function<Warns> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const std::string& text) {
    context->saved_data["text"] = text;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const std::string text = context->saved_data["text"].toStringRef();
    TORCH_WARN(text);
    if (text == "thrown") throw std::runtime_error("the last node throws");
    return {gradients[0], at::Tensor()};
  }
};
at::Tensor warns_remotely(at::Tensor x, std::string text) { return Warns::apply(x, text) * 2; }

std::size_t count_of(const std::string& text, const std::string& in) {
  std::size_t count = 0;
  for (auto at = in.find(text); at != std::string::npos; at = in.find(text, at + 1)) ++count;
  return count;
}

using Texts = std::vector<std::string>;

TEST(WarningsOfNodes, ReachTheThreadThatCallsBackwardOnceAndInOrder) {
  Cluster cluster(2);
  Recorder recorder;
  const torch_warnings::WarningHandlerGuard guard(&recorder);
  const auto x = ones().requires_grad_();
  ::testing::internal::CaptureStderr();
  for (int pass = 0; pass < 2; ++pass) {
    Context context;
    const auto before = Warns::apply(x, "before the call");
    const auto there = rpc_sync<warns_remotely>("worker1", before, "on the other worker");
    const auto loss = Warns::apply(there, "after the call").sum();
    context.backward({loss});
    EXPECT_TRUE(context.gradient(x).equal(2 * ones()));
    EXPECT_EQ(std::exchange(recorder.texts, {}), (Texts{"after the call", "before the call"}));
    EXPECT_EQ(torch_warnings::get_warning_handler(), &recorder);
  }
  const std::string printed = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(count_of("on the other worker", printed), 2u) << printed;
  EXPECT_EQ(count_of("the call", printed), 0u) << printed;
}

TEST(WarningsOfNodes, ReachItWhenThePassFails) {
  Cluster cluster(2);
  Recorder recorder;
  const torch_warnings::WarningHandlerGuard guard(&recorder);
  const auto x = ones().requires_grad_();
  Context context;
  const auto there = rpc_sync<times_parameter>("worker1", Warns::apply(x, "thrown"));
  const auto loss = Warns::apply(there, "before the error").sum();
  const Error error = error_of([&] { context.backward({loss}); });
  EXPECT_NE(std::string(error.what()).find("the last node throws"), std::string::npos);
  EXPECT_EQ(recorder.texts, (Texts{"before the error", "thrown"}));
}

TEST(WarningsOfNodes, GoToTheProcessWhenNoThreadWaits) {
  Cluster cluster(2);
  Recorder recorder;
  const torch_warnings::WarningHandlerGuard guard(&recorder);
  const auto x = ones().requires_grad_();
  ::testing::internal::CaptureStderr();
  Context context;
  const auto sent = Warns::apply(x, "of a pass not waited for");
  const auto there = rpc_sync<times_parameter>("worker1", sent);
  context.backward_async({there.sum()}).get();
  const std::string printed = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(recorder.texts, Texts{});
  EXPECT_EQ(count_of("of a pass not waited for", printed), 1u) << printed;
}

}  // namespace
}  // namespace stitch::testing::warnings_test
