#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include "tests/support/world_test.h"

namespace stitch::remote_module_test {
namespace {

using namespace stitch::testing;

struct Net : torch::nn::Module {
  Net(int64_t in, int64_t out) {
    linear = register_module("linear", torch::nn::Linear(in, out));
    dropout = register_module("dropout", torch::nn::Dropout(0.5));
    calls = register_buffer("calls", at::zeros({1}));
  }
  at::Tensor forward(at::Tensor x) {
    calls += 1;
    return dropout(linear(x));
  }
  torch::nn::Linear linear{nullptr};
  torch::nn::Dropout dropout{nullptr};
  at::Tensor calls;
};

std::vector<double> forward_elsewhere(RemoteModule<Net> net, at::Tensor x) {
  const at::Tensor y = net.forward(x).flatten().to(at::kDouble);
  return {y.data_ptr<double>(), y.data_ptr<double>() + y.numel()};
}

TEST(RemoteModule, ForwardParametersModesAndStateActOnTheOneModule) {
  Cluster cluster(3);
  {
    const RemoteModule<Net> net("worker1", 3, 2);
    EXPECT_EQ(net.owner().name, "worker1");
    net.eval();
    const auto state = net.state_dict();
    ASSERT_EQ(state.size(), 3u);
    const at::Tensor x = at::randn({4, 3});
    const at::Tensor expected = at::linear(x, state.at("linear.weight"), state.at("linear.bias"));
    EXPECT_TRUE(at::allclose(net.forward(x), expected));
    EXPECT_TRUE(at::allclose(net.forward_async(x).get(), expected));
    EXPECT_EQ(forward_elsewhere(net, x), rpc_sync<&forward_elsewhere>("worker2", net, x));
    EXPECT_EQ(net.state_dict().at("calls").item<double>(), 4.0);

    EXPECT_EQ(net.parameter_names(), (std::vector<std::string>{"linear.weight", "linear.bias"}));
    const auto parameters = net.parameters();
    ASSERT_EQ(parameters.size(), 2u);
    EXPECT_EQ(parameters[0].owner().name, "worker1");
    EXPECT_TRUE(at::equal(parameters[0].to_here(), state.at("linear.weight")));

    auto changed = state;
    changed.at("linear.weight") = at::ones({2, 3});
    changed.at("linear.bias") = at::zeros({2});
    net.load_state_dict(changed);
    EXPECT_TRUE(at::equal(parameters[0].to_here(), at::ones({2, 3})))
        << "parameters are changed in place";
    EXPECT_TRUE(at::allclose(net.forward(at::ones({1, 3})), at::full({1, 2}, 3.0)));

    net.train();
    const at::Tensor dropped = net.forward(at::ones({200, 3}));
    EXPECT_TRUE((dropped == 0).any().item<bool>());
  }
  EXPECT_TRUE(eventually([&] { return cluster[1].debug_info().at("rref.entries") == 0; }));
}

TEST(RemoteModule, HoldersOfLibtorchsOwnModulesWork) {
  Cluster cluster(2);
  const RemoteModule<torch::nn::Linear> linear("worker1", 2, 5);
  EXPECT_EQ(linear.forward(at::ones({1, 2})).sizes(), (at::IntArrayRef{1, 5}));
}

RRef<RemoteModule<Net>::Host> reference_of(RemoteModule<Net> net) { return net.reference(); }

TEST(RemoteModule, HasOneReferenceWhichGivesTheParametersOfTheModule) {
  Cluster cluster(3);
  const RemoteModule<Net> net("worker1", 3, 2), other("worker1", 3, 2);
  const auto reference = net.reference();
  EXPECT_EQ(reference.owner(), net.owner());
  EXPECT_EQ(reference, RemoteModule<Net>(net).reference());
  EXPECT_EQ(reference, rpc_sync<&reference_of>("worker2", net));
  EXPECT_NE(reference, other.reference());
  const auto parameters = reference.rpc_sync<&RemoteModule<Net>::Host::parameters>();
  const auto state = net.state_dict();
  ASSERT_EQ(parameters.size(), 2u);
  EXPECT_TRUE(at::equal(parameters[0].to_here(), state.at("linear.weight")));
  EXPECT_TRUE(at::equal(parameters[1].to_here(), state.at("linear.bias")));
}

TEST(RemoteModule, BuffersAreReferencesLikeParameters) {
  Cluster cluster(2);
  {
    const RemoteModule<Net> net("worker1", 3, 2);
    net.forward(at::ones({1, 3}));
    const auto buffers = net.named_buffers();
    ASSERT_EQ(buffers.size(), 1u);
    EXPECT_EQ(buffers[0].first, "calls");
    EXPECT_EQ(buffers[0].second.owner().name, "worker1");
    EXPECT_EQ(buffers[0].second.to_here().item<double>(), 1.0);
    net.forward(at::ones({1, 3}));
    EXPECT_EQ(net.buffers().at(0).to_here().item<double>(), 2.0) << "changed in place there";
    EXPECT_EQ(net.named_parameters().at(1).first, "linear.bias");
  }
  EXPECT_TRUE(eventually([&] { return cluster[1].debug_info().at("rref.entries") == 0; }));
}

TEST(RemoteModule, AStateThatIsNotStrictLoadsWhatFitsAndReturnsTheRest) {
  Cluster cluster(2);
  const RemoteModule<torch::nn::Linear> linear("worker1", 2, 5);
  const auto before = linear.state_dict();
  const auto rest =
      linear.load_state_dict({{"weight", at::ones({5, 2})}, {"wait", at::ones({1})}}, false);
  EXPECT_EQ(rest.missing, std::vector<std::string>{"bias"});
  EXPECT_EQ(rest.unknown, std::vector<std::string>{"wait"});
  EXPECT_TRUE(at::equal(linear.state_dict().at("weight"), at::ones({5, 2})));
  EXPECT_TRUE(at::equal(linear.state_dict().at("bias"), before.at("bias")));
  // Sizes and dtypes have to fit all the same.
  const Error error = error_of([&] {
    linear.load_state_dict({{"weight", at::zeros({5, 2}, at::kDouble)}, {"bias", at::ones({4})}},
                           false);
  });
  const std::string text = error.what();
  for (const char* part :
       {"\"weight\" has dtype Float, given is Double", "\"bias\" has sizes [5], given are [4]"}) {
    EXPECT_TRUE(contains(text, part)) << text;
  }
  EXPECT_TRUE(at::equal(linear.state_dict().at("weight"), at::ones({5, 2})));
}

TEST(RemoteModule, ForwardTakesAReferenceInPlaceOfItsObject) {
  Cluster cluster(3);
  const RemoteModule<torch::nn::Linear> first("worker1", 3, 4);
  const RemoteModule<torch::nn::Linear> second("worker2", 4, 2);
  const at::Tensor x = at::ones({1, 3});
  // The caller sends x and gets the last result; what is between goes from worker1 to worker2.
  const RRef<at::Tensor> between = first.forward_remote(x);
  EXPECT_EQ(between.owner().name, "worker1");
  const at::Tensor piped = second.forward(between);
  EXPECT_TRUE(at::allclose(piped, second.forward(first.forward(x))));
  EXPECT_TRUE(at::equal(between.to_here(), first.forward(x)));
}

struct TakesReferenceImpl : torch::nn::Module {
  at::Tensor forward(const RRef<at::Tensor>& tensor) {
    return at::full({1}, tensor.owner().id.value() + 0.0);
  }
};

TEST(RemoteModule, ForwardThatTakesReferencesGetsThem) {
  Cluster cluster(3);
  const RemoteModule<TakesReferenceImpl> module("worker1");
  const RemoteModule<torch::nn::Linear> linear("worker2", 3, 4);
  EXPECT_EQ(module.forward(linear.forward_remote(at::ones({1, 3}))).item<double>(), 2);
}

TEST(RemoteModule, LivesOnTheCpuAndRefusesADeviceThatItsWorkerLacks) {
  Cluster cluster(2);
  const RemoteModule<torch::nn::Linear> linear({.to = "worker1", .device = at::kCPU}, 2, 5);
  EXPECT_EQ(linear.forward(at::ones({1, 2})).sizes(), (at::IntArrayRef{1, 5}));
  const Error error = error_of([&] {
    const RemoteModule<torch::nn::Linear> elsewhere(
        {.to = "worker1", .device = at::Device(at::kCUDA, 1)}, 2, 5);
  });
  EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument, "cannot be made on device cuda:1"));
  EXPECT_TRUE(contains(error.what(), "worker \"worker1\"")) << error.what();
}

TEST(RemoteModule, AStateThatDoesNotFitIsRefusedNamingEveryDifference) {
  Cluster cluster(2);
  const RemoteModule<torch::nn::Linear> linear("worker1", 2, 5);
  const auto before = linear.state_dict();
  const Error error = error_of([&] {
    linear.load_state_dict({{"weight", at::ones({5, 3})}, {"wait", at::ones({1})}});
  });
  const std::string text = error.what();
  EXPECT_EQ(error.code(), ErrorCode::remote_exception);
  for (const char* part : {"\"bias\" is missing", "\"wait\" is unknown",
                           "\"weight\" has sizes [5, 2], given are [5, 3]"}) {
    EXPECT_TRUE(contains(text, part)) << text;
  }
  EXPECT_TRUE(at::equal(linear.state_dict().at("weight"), before.at("weight")));
}

}  // namespace
}  // namespace stitch::remote_module_test
