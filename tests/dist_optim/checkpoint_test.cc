// Checkpoints of optimizers. tests/rref/checkpoint_test.cc has the rest.
#include <filesystem>

#include "stitch/dist_optim/stored_values.h"
#include "tests/support/world_test.h"

namespace checkpoint_test {
namespace {

namespace autograd = stitch::dist_autograd;
namespace fs = std::filesystem;
namespace optim = stitch::optim;
using namespace stitch::testing;
using stitch::Checkpoint;
using stitch::optim::DistributedOptimizer;
using stitch::optim::NamedParameter;
using stitch::optim::NamedValue;
using stitch::optim::NamedValues;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

// A folder that a checkpoint may make.
struct Folder : TemporaryFolder {
  [[nodiscard]] fs::path path() const { return TemporaryFolder::path() / "checkpoint"; }
};

class Weight {
 public:
  explicit Weight(at::Tensor initial) : tensor_(initial.clone().set_requires_grad(true)) {}
  RRef<at::Tensor> parameter() { return make_rref(tensor_); }
  at::Tensor squared() { return tensor_.pow(2); }
  at::Tensor now() { return tensor_.detach().clone(); }

 private:
  at::Tensor tensor_;
};

at::Tensor start(int which) { return torch::linspace(1.0 + which, 2.0 + which, 3, torch::kDouble); }

// A weight on each of the named workers, in order.
std::vector<RRef<Weight>> weights_on(const std::vector<std::string>& owners) {
  std::vector<RRef<Weight>> weights;
  for (const auto& owner : owners)
    weights.push_back(remote<Weight>(owner, start(static_cast<int>(weights.size()))));
  return weights;
}
std::vector<NamedParameter> named(const std::vector<RRef<Weight>>& weights) {
  std::vector<NamedParameter> parameters;
  for (const auto& weight : weights)
    parameters.emplace_back(std::string(1, static_cast<char>('a' + parameters.size())),
                            weight.rpc_sync<&Weight::parameter>());
  return parameters;
}

template <class Optimizer>
void step(const std::vector<RRef<Weight>>& weights, DistributedOptimizer<Optimizer>& optimizer,
          int steps) {
  for (int i = 0; i < steps; ++i) {
    autograd::Context context;
    auto loss = torch::zeros({}, torch::kDouble);
    for (const auto& weight : weights)
      loss = loss + weight.rpc_async<&Weight::squared>().get().sum();
    context.backward({loss});
    EXPECT_EQ(optimizer.step(context), static_cast<std::int64_t>(weights.size()));
  }
}
std::vector<at::Tensor> values_of(const std::vector<RRef<Weight>>& weights) {
  std::vector<at::Tensor> values;
  for (const auto& weight : weights) values.push_back(weight.rpc_sync<&Weight::now>());
  return values;
}
void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::equal(a[i], b[i])) << a[i] << b[i];
}

template <class Optimizer>
void expect_resumed(const typename DistributedOptimizer<Optimizer>::Options& options) {
  SCOPED_TRACE(optim::optimizer_name<Optimizer>());
  Cluster cluster(3);
  const Folder folder;
  const auto weights = weights_on({"worker1", "worker2", "worker1"});
  DistributedOptimizer<Optimizer> optimizer(named(weights), options);
  step(weights, optimizer, 3);
  optimizer.save(folder.path());
  // Another order, other owners: the state follows the names.
  const auto before = values_of(weights);
  std::vector<RRef<Weight>> moved{remote<Weight>("worker0", before[0]),
                                  remote<Weight>("worker1", before[1]),
                                  remote<Weight>("worker2", before[2])};
  auto parameters = named(moved);
  std::swap(parameters[0], parameters[2]);
  DistributedOptimizer<Optimizer> resumed(parameters, options);
  resumed.load(folder.path());
  EXPECT_EQ(resumed.next_step(), 3);
  step(weights, optimizer, 3);
  step(moved, resumed, 3);
  expect_equal(values_of(weights), values_of(moved));
}

TEST(OptimizerCheckpoint, TrainingGoesOnAsIfNothingHadHappened) {
  expect_resumed<SGD>(SGDOptions(0.1).momentum(0.9));
  expect_resumed<Adam>(AdamOptions(0.1).amsgrad(true));
  expect_resumed<torch::optim::AdamW>(torch::optim::AdamWOptions(0.1));
  expect_resumed<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.1).lr_decay(0.1));
  expect_resumed<torch::optim::RMSprop>(
      torch::optim::RMSpropOptions(0.1).momentum(0.5).centered(true));
  expect_resumed<optim::SparseAdam>(optim::SparseAdamOptions(0.1));
  expect_resumed<optim::SparseAdagrad>(optim::SparseAdagradOptions(0.1));
  expect_resumed<optim::SparseSGD>(optim::SparseSGDOptions(0.1));
}

TEST(OptimizerCheckpoint, HasTheOptionsInIt) {
  Cluster cluster(2);
  const Folder folder;
  const auto weights = weights_on({"worker1"});
  const auto options = AdamOptions(0.25).betas({0.5, 0.75}).amsgrad(true).eps(0.125);
  DistributedOptimizer<Adam> optimizer(named(weights), options);
  optimizer.save(folder.path());
  DistributedOptimizer<Adam> other(named(weights), AdamOptions(9.0));
  other.load(folder.path());
  EXPECT_TRUE(other.options() == options);
}

TEST(OptimizerCheckpoint, AParameterThatHadNoStateHasNoneAfterwards) {
  Cluster cluster(2);
  const Folder folder;
  const auto weights = weights_on({"worker1", "worker0"});
  DistributedOptimizer<Adam> optimizer(named(weights), AdamOptions(0.1));
  optimizer.save(folder.path());  // never stepped
  const auto fresh = weights_on({"worker1", "worker0"});
  step(weights, optimizer, 3);
  optimizer.load(folder.path());
  // One more step from the start is a first step again: bias correction is that of step 1.
  const auto again = values_of(weights);
  const std::vector<RRef<Weight>> copies{remote<Weight>("worker1", again[0]),
                                         remote<Weight>("worker0", again[1])};
  DistributedOptimizer<Adam> first(named(copies), AdamOptions(0.1));
  step(weights, optimizer, 1);
  step(copies, first, 1);
  expect_equal(values_of(weights), values_of(copies));
}

// Two learning rates of one type are two optimizers.
TEST(OptimizerCheckpoint, OfTwoOptimizersMayBeInOneFolder) {
  Cluster cluster(2);
  const Folder folder;
  const auto weights = weights_on({"worker0", "worker1"});
  const auto parameters = named(weights);
  DistributedOptimizer<Adam> a({parameters[0]}, AdamOptions(1e-3));
  DistributedOptimizer<Adam> b({parameters[1]}, AdamOptions(1e-4));
  a.save(folder.path());
  EXPECT_TRUE(has_text(error_of([&] { b.save(folder.path()); }), ErrorCode::invalid_argument,
                       "optimizer.1.json: it has parameter \"a\" in part \"optimizer\", which "
                       "this one has not: it is another program's or another optimizer's; give"));
  b.save(folder.path(), "slow");
  a.set_lr(9.0);
  b.set_lr(9.0);
  a.load(folder.path());
  b.load(folder.path(), "slow");
  EXPECT_EQ(a.options().lr(), 1e-3);
  EXPECT_EQ(b.options().lr(), 1e-4);
  // Or two parts of one checkpoint, with the model.
  Checkpoint both(folder.path(), {.name = "all"});
  both.add("model", parameters);
  both.add("a", a);
  both.add("b", b);
  both.save();
  const auto before = values_of(weights);
  DistributedOptimizer<SGD> sgd(parameters, SGDOptions(0.1));
  step(weights, sgd, 1);
  b.set_lr(9.0);
  both.load();
  EXPECT_EQ(b.options().lr(), 1e-4);
  expect_equal(values_of(weights), before);
  DistributedOptimizer<Adam> with_more(parameters, AdamOptions(1e-3));
  with_more.save(folder.path());  // one that has grown replaces itself
}

TEST(OptimizerCheckpoint, WhatDoesNotFitIsNamed) {
  Cluster cluster(2);
  const Folder folder;
  const auto parameters = named(weights_on({"worker0", "worker1"}));
  DistributedOptimizer<SGD> optimizer(parameters, SGDOptions(0.1));
  optimizer.save(folder.path());
  DistributedOptimizer<Adam> adam(parameters, AdamOptions(0.1));
  const std::string another = "its part \"optimizer\" is of a torch::optim::SGD, not a ";
  EXPECT_TRUE(contains(error_of([&] { adam.load(folder.path()); }).what(), another));
  EXPECT_TRUE(contains(error_of([&] { adam.save(folder.path()); }).what(), another));
  DistributedOptimizer<SGD> less({parameters[0]}, SGDOptions(0.1));
  EXPECT_TRUE(contains(error_of([&] { less.load(folder.path()); }).what(),
                       "has parameter \"b\", which is unknown here"));
  auto other_shape = parameters;
  other_shape[1].second = make_rref(torch::ones({2}, torch::kDouble));
  DistributedOptimizer<SGD> misfit(other_shape, SGDOptions(0.1));
  EXPECT_TRUE(contains(error_of([&] { misfit.load(folder.path()); }).what(),
                       "parameter \"b\" of part \"optimizer\" is F64 [3], here it is F64 [2]"));
}

// Momentum of rows: the state is as sparse as the gradients.
class Rows {
 public:
  explicit Rows(at::Tensor initial) : rows_(initial.clone().set_requires_grad(true)) {}
  RRef<at::Tensor> parameter() { return make_rref(rows_); }
  at::Tensor look_up(const at::Tensor& ids) { return at::embedding(rows_, ids, -1, false, true); }
  at::Tensor now() { return rows_.detach().clone(); }

 private:
  at::Tensor rows_;
};

TEST(OptimizerCheckpoint, SparseStateGoesOn) {
  Cluster cluster(2);
  const Folder folder;
  const auto rows = remote<Rows>("worker1", torch::randn({10, 2}, torch::kDouble));
  const auto options = SGDOptions(0.1).momentum(0.5);
  DistributedOptimizer<SGD> optimizer({rows.rpc_sync<&Rows::parameter>()}, options);
  const auto train = [](const RRef<Rows>& of, DistributedOptimizer<SGD>& with, int first) {
    for (int i = first; i < first + 3; ++i) {
      autograd::Context context;
      const at::Tensor ids = torch::tensor({i, 2 * i, i});
      context.backward({of.rpc_sync<&Rows::look_up>(ids).square().sum()});
      with.step(context);
    }
  };
  train(rows, optimizer, 0);
  optimizer.save(folder.path());
  const auto file = stitch::load(folder.path() / "optimizer.1.optimizer.0.safetensors");
  EXPECT_EQ(file.size(), 3U);
  EXPECT_TRUE(at::equal(file.at("0.momentum_buffer.sizes"), torch::tensor({10, 2})));
  const auto copy = remote<Rows>("worker0", rows.rpc_sync<&Rows::now>());
  DistributedOptimizer<SGD> resumed({copy.rpc_sync<&Rows::parameter>()}, options);
  resumed.load(folder.path());
  train(rows, optimizer, 2);
  train(copy, resumed, 2);
  EXPECT_TRUE(at::allclose(rows.rpc_sync<&Rows::now>(), copy.rpc_sync<&Rows::now>(), 0, 1e-14));
}

// State for an owner from a peer or a file.
template <class Optimizer>
void expect_fitting_state(const optim::OptionsOf<Optimizer>& options, const std::string& field,
                          bool counts, std::vector<std::int64_t> sizes) {
  SCOPED_TRACE(optim::optimizer_name<Optimizer>());
  const auto parameter = make_rref(torch::ones({3, 2}).set_requires_grad(true));
  auto local = optim::make_local<Optimizer>(
      {{{{"w", parameter}}, optim::options_to_values<Optimizer>(options)}},
      optim::StalePolicy::detect);
  const auto prepare = [&](std::vector<stitch::rref::StoredTensor> tensors) {
    local.stored().prepare({{"w", "F32", {3, 2}, std::move(tensors)}}, {});
  };
  const stitch::rref::StoredTensor good{field, "F32", sizes}, step{"step", "I64", {}};
  const auto with = [&](const stitch::rref::StoredTensor& tensor) {
    return counts ? std::vector{tensor, step} : std::vector{tensor};
  };
  const auto refused = [&](const std::vector<stitch::rref::StoredTensor>& tensors,
                           const std::string& why) {
    EXPECT_TRUE(has_text(error_of([&] { prepare(tensors); }), ErrorCode::invalid_argument, why));
  };
  prepare({});
  prepare(with(good));
  for (const std::vector<std::int64_t>& wrong : {std::vector<std::int64_t>{2, 3}, {7}, {}})
    refused(with({field, "F32", wrong}), "state has \"" + field + "\" of type Float [");
  refused(with({field, "F64", sizes}), "for a parameter of type Float [3, 2]");
  auto twice = with({field, "F32", {1 << 20}});
  twice.push_back(good);
  refused(twice, "is given twice");
  refused({step, {"code", "F32", {}}, good}, counts ? "have no \"code\"" : "have no \"");
  if (!counts) return;
  refused({good}, "come without \"step\"");
  refused({good, {"step", "F64", {}}}, "have a tensor for \"step\", it takes an integer");
  refused({good, {"step", "I64", {2}}}, "have a tensor for \"step\", it takes an integer");
}

TEST(OptimizerCheckpoint, StateOfAnotherShapeOrTypeThanItsParameterIsRefused) {
  Cluster cluster(1);
  expect_fitting_state<SGD>(SGDOptions(0.1), "momentum_buffer", false, {3, 2});
  expect_fitting_state<Adam>(AdamOptions(0.1), "exp_avg", true, {3, 2});
  expect_fitting_state<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.1), "sum", true,
                                              {3, 2});
  expect_fitting_state<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.1), "square_avg", true,
                                              {3, 2});
  expect_fitting_state<optim::SparseAdam>(optim::SparseAdamOptions(0.1), "exp_avg", true, {3, 2});
  expect_fitting_state<optim::SparseAdagrad>(optim::SparseAdagradOptions(0.1), "sum", true, {3});
}

// As an owner does when another one fails.
TEST(OptimizerCheckpoint, StateAndOptionsAreTakenBack) {
  Cluster cluster(1);
  const auto weights = weights_on({"worker0"});
  const auto values = [](double lr) {
    return optim::options_to_values<SGD>(SGDOptions(lr).momentum(0.9));
  };
  auto local = optim::make_local<SGD>({{named(weights), values(0.1)}}, optim::StalePolicy::detect);
  autograd::Context context;
  context.backward({weights[0].rpc_sync<&Weight::squared>().sum()});
  local.step(context.id(), {});
  const auto momentum = [&] { return std::get<at::Tensor>(local.state(0)->at("momentum_buffer")); };
  const at::Tensor before = momentum();
  auto loading = local.stored();
  loading.prepare({{"a", "F64", {3}, {{"momentum_buffer", "F64", {3}}}}},
                  optim::join_groups({values(9.0)}));
  const at::Tensor five = torch::full({3}, 5.0, torch::kDouble);
  loading.write(0, five.view(torch::kByte));
  EXPECT_TRUE(at::equal(momentum(), before));
  loading.take();
  EXPECT_TRUE(at::equal(momentum(), five));
  EXPECT_EQ(std::get<double>(local.options()[0].at("lr")), 9.0);
  loading.take_back();
  EXPECT_TRUE(at::equal(momentum(), before));
  EXPECT_EQ(std::get<double>(local.options()[0].at("lr")), 0.1);
}

TEST(OptimizerCheckpoint, OptionsFromTheWireAreCheckedByNameAndType) {
  Cluster cluster(2);
  using Local = optim::LocalOptimizer;
  const auto weights = weights_on({"worker1"});
  const auto good = optim::options_to_values<SGD>(SGDOptions(0.5));
  const auto local = stitch::remote<optim::make_local<SGD>>(
      "worker1", std::vector<optim::OwnersGroup>{{named(weights), good}},
      optim::StalePolicy::detect);
  const auto refused = [&](const NamedValues& values) {
    const Error error =
        error_of([&] { local.rpc_sync<&Local::set_options>(0U, std::vector{values}); });
    EXPECT_EQ(error.code(), ErrorCode::remote_exception);
    return std::string(error.what());
  };
  auto values = good;
  values.erase("momentum");
  EXPECT_TRUE(contains(refused(values), "come without \"momentum\""));
  values = good;
  values["__setstate__"] = 1.0;
  EXPECT_TRUE(contains(refused(values), "have no \"__setstate__\""));
  values = good;
  values["lr"] = std::string("0.1");
  EXPECT_TRUE(contains(refused(values), "have a string for \"lr\", it takes a number"));
  values = good;
  values["lr"] = -1.0;
  EXPECT_TRUE(contains(refused(values), "Invalid learning rate: -1"));
  EXPECT_TRUE(optim::options_from_values<SGD>(local.rpc_sync<&Local::options>().at(0)) ==
              SGDOptions(0.5));
}

// Fields of an optimizer of one's own.
TEST(OptimizerCheckpoint, StateOfEveryTypeOfFieldComesBack) {
  const NamedValues state{{"flag", true},
                          {"count", std::int64_t{1} << 40},
                          {"rate", 0.1},
                          {"list", std::vector<double>{1, 2}},
                          {"name", std::string("a\xe5")},
                          {"tensor", torch::ones({2})}};
  const at::Tensor parameter = torch::ones({2});
  const auto back = optim::from_fields(optim::to_fields(state), parameter);
  for (const auto& [name, value] : state) {
    if (name == "tensor") continue;
    NamedValue read;
    EXPECT_TRUE(optim::value_in_tensor(back.at(name), value, read)) << name;
    EXPECT_TRUE(at::equal(optim::tensor_of(read), optim::tensor_of(value))) << name;
    EXPECT_FALSE(optim::value_in_tensor(back.at("tensor"), value, read)) << name;
  }
}

}  // namespace
}  // namespace checkpoint_test
