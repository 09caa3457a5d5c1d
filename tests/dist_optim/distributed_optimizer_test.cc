#include "stitch/dist_optim/distributed_optimizer.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>

#include "tests/support/cluster.h"
#include "tests/support/error_of.h"

// An optimizer of a program's own: it steps by the sign of the gradient.
struct SignOptions : torch::optim::OptimizerCloneableOptions<SignOptions> {
  SignOptions(double rate = 0) : rate(rate) {}
  void serialize(torch::serialize::InputArchive& archive) override {
    c10::IValue value;
    archive.read("rate", value);
    rate = value.toDouble();
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("rate", c10::IValue(rate));
  }
  double rate;
};
class SignDescent : public torch::optim::Optimizer {
 public:
  SignDescent(std::vector<at::Tensor> parameters, SignOptions options)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                  std::make_unique<SignOptions>(options)) {}
  at::Tensor step(LossClosure = nullptr) override {
    const torch::NoGradGuard no_grad;
    for (auto& group : param_groups()) {
      for (auto& parameter : group.params())
        parameter.sub_(static_cast<SignOptions&>(group.options()).rate * parameter.grad().sign());
    }
    return {};
  }
};
template <>
struct stitch::optim::OptimizerTraits<SignDescent> {
  using Options = SignOptions;
};

namespace {

namespace autograd = stitch::dist_autograd;
using stitch::ErrorCode;
using stitch::RRef;
using stitch::optim::DistributedOptimizer;
using stitch::testing::Cluster;
using stitch::testing::error_of;

// A parameter and what is computed from it, on one worker.
class Holder {
 public:
  explicit Holder(at::Tensor initial) : parameter_(initial.clone().set_requires_grad(true)) {}
  RRef<at::Tensor> parameter() { return stitch::make_rref(parameter_); }
  at::Tensor times(const at::Tensor& x) { return parameter_ * x; }
  at::Tensor squared() { return parameter_.pow(2); }
  at::Tensor now() { return parameter_.detach().clone(); }
  bool has_grad() { return parameter_.grad().defined(); }

 private:
  at::Tensor parameter_;
};

at::Tensor initial(int which) {
  return torch::linspace(0.5 + which, 2.0 + which, 6, torch::kDouble);
}

// Holders on worker 1 and worker 2, and the same parameters here, stepped by plain torch::optim.
struct Twins {
  std::vector<RRef<Holder>> holders{stitch::remote<Holder>("worker1", initial(0)),
                                    stitch::remote<Holder>("worker2", initial(1))};
  std::vector<at::Tensor> local{initial(0).set_requires_grad(true),
                                initial(1).set_requires_grad(true)};
  [[nodiscard]] std::vector<RRef<at::Tensor>> parameters() const {
    std::vector<RRef<at::Tensor>> references;
    for (const auto& holder : holders) references.push_back(holder.rpc_sync<&Holder::parameter>());
    return references;
  }
};

template <class Optimizer>
void expect_same_trajectory(const stitch::optim::OptionsOf<Optimizer>& options) {
  Cluster cluster(3);
  Twins twins;
  DistributedOptimizer<Optimizer> remote_optimizer(twins.parameters(), options);
  Optimizer local_optimizer(twins.local, options);
  for (int step = 0; step < 20; ++step) {
    const auto x = torch::full({6}, 0.1 * step + 1, torch::kDouble);
    autograd::Context context;
    const auto loss = (twins.holders[0].rpc_async<&Holder::times>(x).get() *
                       twins.holders[1].rpc_async<&Holder::times>(x).get())
                          .sum();
    context.backward({loss});
    remote_optimizer.step(context);
    local_optimizer.zero_grad();
    ((twins.local[0] * x) * (twins.local[1] * x)).sum().backward();
    local_optimizer.step();
  }
  for (int i = 0; i < 2; ++i) {
    const auto there = twins.holders[static_cast<std::size_t>(i)].rpc_sync<&Holder::now>();
    EXPECT_TRUE(torch::allclose(there, twins.local[static_cast<std::size_t>(i)], 1e-12, 0))
        << there << twins.local[static_cast<std::size_t>(i)];
    EXPECT_FALSE(twins.holders[static_cast<std::size_t>(i)].rpc_sync<&Holder::has_grad>());
  }
}

TEST(DistributedOptimizer, SgdFollowsTheLocalOne) {
  expect_same_trajectory<torch::optim::SGD>(torch::optim::SGDOptions(0.01).momentum(0.9));
}
TEST(DistributedOptimizer, AdamFollowsTheLocalOne) {
  expect_same_trajectory<torch::optim::Adam>(torch::optim::AdamOptions(0.05));
}
TEST(DistributedOptimizer, AdamWFollowsTheLocalOne) {
  expect_same_trajectory<torch::optim::AdamW>(torch::optim::AdamWOptions(0.05));
}
TEST(DistributedOptimizer, AdagradFollowsTheLocalOne) {
  expect_same_trajectory<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.05));
}
TEST(DistributedOptimizer, RmspropFollowsTheLocalOne) {
  expect_same_trajectory<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.01));
}
TEST(DistributedOptimizer, OneOfOnesOwnFollowsTheLocalOne) {
  expect_same_trajectory<SignDescent>(SignOptions(0.01));
}

TEST(DistributedOptimizer, LeavesParametersWithoutAGradientAlone) {
  Cluster cluster(3);
  Twins twins;
  DistributedOptimizer<torch::optim::Adam> optimizer(twins.parameters(),
                                                     torch::optim::AdamOptions(0.1));
  autograd::Context context;
  context.backward({twins.holders[0].rpc_async<&Holder::squared>().get().sum()});
  optimizer.step(context);
  EXPECT_FALSE(torch::equal(twins.holders[0].rpc_sync<&Holder::now>(), initial(0)));
  EXPECT_TRUE(torch::equal(twins.holders[1].rpc_sync<&Holder::now>(), initial(1)));
}

// Runs on a trainer: each step in a context of its own.
void subtract_one_each_step(RRef<Holder> holder, int steps) {
  DistributedOptimizer<torch::optim::SGD> optimizer({holder.rpc_sync<&Holder::parameter>()},
                                                    torch::optim::SGDOptions(1.0));
  for (int step = 0; step < steps; ++step) {
    autograd::Context context;
    context.backward(
        {holder.rpc_async<&Holder::times>(torch::ones({4}, torch::kDouble)).get().sum()});
    optimizer.step(context);
  }
}

TEST(DistributedOptimizer, StepsOfManyContextsAddUpExactly) {
  Cluster cluster(3);
  const auto holder = stitch::remote<Holder>("worker1", torch::zeros({4}, torch::kDouble));
  std::vector<stitch::Future<void>> trainers;
  for (std::uint32_t t = 0; t < 4; ++t)
    trainers.push_back(
        stitch::rpc_async<subtract_one_each_step>(stitch::WorkerId(t % 3), holder, 25));
  stitch::when_all(std::move(trainers)).get();
  EXPECT_TRUE(
      torch::equal(holder.rpc_sync<&Holder::now>(), torch::full({4}, -100.0, torch::kDouble)));
}

TEST(DistributedOptimizer, AStepBetweenForwardAndBackwardIsDetectedUnlessAllowed) {
  Cluster cluster(2);
  for (const auto policy :
       {stitch::optim::StalePolicy::detect, stitch::optim::StalePolicy::allow}) {
    const auto holder = stitch::remote<Holder>("worker1", initial(0));
    DistributedOptimizer<torch::optim::SGD> optimizer({holder.rpc_sync<&Holder::parameter>()},
                                                      torch::optim::SGDOptions(0.1), policy);
    autograd::Context first;
    const auto loss = holder.rpc_async<&Holder::squared>().get().sum();
    {
      autograd::Context second;
      second.backward({holder.rpc_async<&Holder::squared>().get().sum()});
      optimizer.step(second);
    }
    if (policy == stitch::optim::StalePolicy::allow) {
      first.backward({loss});
    } else {
      try {
        first.backward({loss});
        ADD_FAILURE() << "the stale backward passed";
      } catch (const stitch::Error& error) {
        EXPECT_NE(std::string(error.what()).find("modified by an inplace operation"),
                  std::string::npos)
            << error.what();
      }
    }
  }
}

TEST(DistributedOptimizer, RefusesWhatItCannotStep) {
  Cluster cluster(2);
  stitch::Error error = error_of(
      [] { DistributedOptimizer<torch::optim::SGD> optimizer({}, torch::optim::SGDOptions(0.1)); });
  EXPECT_STREQ(error.what(), "optimizer has no parameters to step");
  const auto plain = stitch::make_rref(torch::ones(2));
  error = error_of([&] {
    DistributedOptimizer<torch::optim::SGD> optimizer({plain}, torch::optim::SGDOptions(0.1));
  });
  EXPECT_NE(std::string(error.what())
                .find("is not a parameter: it must be a leaf tensor that requires grad"),
            std::string::npos)
      << error.what();
  const auto good = stitch::make_rref(torch::ones(2).set_requires_grad(true));
  error = error_of([&] {
    DistributedOptimizer<torch::optim::SGD> optimizer({good, good}, torch::optim::SGDOptions(0.1));
  });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  error = error_of([&] {
    DistributedOptimizer<torch::optim::LBFGS> optimizer({good}, torch::optim::LBFGSOptions(0.1));
  });
  EXPECT_NE(std::string(error.what()).find("LBFGS re-evaluates the loss"), std::string::npos)
      << error.what();
}

TEST(DistributedOptimizer, ChangesItsOptions) {
  Cluster cluster(2);
  const auto holder = stitch::remote<Holder>("worker1", torch::zeros({2}, torch::kDouble));
  DistributedOptimizer<torch::optim::SGD> optimizer({holder.rpc_sync<&Holder::parameter>()},
                                                    torch::optim::SGDOptions(1.0));
  const auto step = [&] {
    autograd::Context context;
    context.backward(
        {holder.rpc_async<&Holder::times>(torch::ones({2}, torch::kDouble)).get().sum()});
    optimizer.step(context);
  };
  step();
  optimizer.set_options(torch::optim::SGDOptions(10.0));
  step();
  EXPECT_TRUE(
      torch::equal(holder.rpc_sync<&Holder::now>(), torch::full({2}, -11.0, torch::kDouble)));
}

TEST(DistributedOptimizer, SavesAndLoadsItsState) {
  Cluster cluster(3);
  const auto folder =
      std::filesystem::temp_directory_path() / ("stitch-optimizer-" + std::to_string(::getpid()));
  const auto run = [&](Twins& twins, DistributedOptimizer<torch::optim::Adam>& optimizer,
                       int steps) {
    for (int i = 0; i < steps; ++i) {
      autograd::Context context;
      context.backward({(twins.holders[0].rpc_async<&Holder::squared>().get() *
                         twins.holders[1].rpc_async<&Holder::squared>().get())
                            .sum()});
      optimizer.step(context);
    }
  };
  const torch::optim::AdamOptions options(0.1);
  Twins original;
  DistributedOptimizer<torch::optim::Adam> first(original.parameters(), options);
  run(original, first, 5);
  first.save(folder);
  Twins resumed;
  for (std::size_t i = 0; i < 2; ++i)
    resumed.holders[i] = stitch::remote<Holder>(i == 0 ? "worker1" : "worker2",
                                                original.holders[i].rpc_sync<&Holder::now>());
  DistributedOptimizer<torch::optim::Adam> second(resumed.parameters(), options);
  second.load(folder);
  run(original, first, 5);
  run(resumed, second, 5);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(torch::equal(original.holders[i].rpc_sync<&Holder::now>(),
                             resumed.holders[i].rpc_sync<&Holder::now>()));
  }
  const auto other = stitch::remote<Holder>("worker1", torch::zeros({3}, torch::kDouble));
  DistributedOptimizer<torch::optim::Adam> misfit({other.rpc_sync<&Holder::parameter>()}, options);
  EXPECT_NE(std::string(error_of([&] { misfit.load(folder); }).what())
                .find("has shape [6] for parameter 0, it is [3]"),
            std::string::npos);
  EXPECT_NE(std::string(error_of([&] { misfit.load(folder / "nowhere"); }).what())
                .find("is not there or cannot be read"),
            std::string::npos);
  std::filesystem::remove_all(folder);
}

}  // namespace
