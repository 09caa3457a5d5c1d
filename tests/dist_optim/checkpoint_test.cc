#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/support/world_test.h"

namespace checkpoint_test {
namespace {

namespace autograd = stitch::dist_autograd;
namespace fs = std::filesystem;
namespace optim = stitch::optim;
using namespace stitch::testing;
using stitch::optim::DistributedOptimizer;
using stitch::optim::NamedParameter;
using stitch::optim::NamedValues;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

// A folder that a checkpoint may make.
struct Folder : TemporaryFolder {
  [[nodiscard]] fs::path path() const { return TemporaryFolder::path() / "checkpoint"; }
};

std::string contents(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void overwrite(const fs::path& file, const std::string& bytes) {
  std::ofstream(file, std::ios::binary | std::ios::trunc) << bytes;
}

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
  step(weights, optimizer, 3);
  step(moved, resumed, 3);
  expect_equal(values_of(weights), values_of(moved));
}

TEST(Checkpoint, TrainingGoesOnAsIfNothingHadHappened) {
  expect_resumed<SGD>(SGDOptions(0.1).momentum(0.9));
  expect_resumed<Adam>(AdamOptions(0.1).amsgrad(true));
  expect_resumed<torch::optim::AdamW>(torch::optim::AdamWOptions(0.1));
  expect_resumed<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.1).lr_decay(0.1));
  expect_resumed<torch::optim::RMSprop>(
      torch::optim::RMSpropOptions(0.1).momentum(0.5).centered(true));
}

TEST(Checkpoint, HasTheOptionsInIt) {
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

TEST(Checkpoint, AParameterThatHadNoStateHasNoneAfterwards) {
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

// Any damaged byte in any owner's file gives an error that names the file, and nothing changes on
// any owner.
TEST(Checkpoint, DamageAnywhereIsFoundAndNothingChanges) {
  Cluster cluster(2);
  const Folder folder;
  const auto weights = weights_on({"worker0", "worker1"});
  DistributedOptimizer<SGD> optimizer(named(weights), SGDOptions(0.1).momentum(0.9));
  step(weights, optimizer, 1);
  optimizer.save(folder.path());
  const auto same_weights = values_of(weights);
  step(weights, optimizer, 1);
  const auto state_now = [&] { return optimizer.options().momentum(); };
  for (const std::string owner : {"worker0", "worker1"}) {
    const fs::path file = folder.path() / (owner + ".optimizer");
    const std::string good = contents(file);
    ASSERT_GT(good.size(), 100U);
    for (std::size_t at = 0; at < good.size(); at += at < 40 ? 1 : 7) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ 0x41);
      overwrite(file, bad);
      const Error error = error_of([&] { optimizer.load(folder.path()); });
      ASSERT_EQ(error.code(), ErrorCode::invalid_argument) << at << ": " << error.what();
      ASSERT_TRUE(contains(error.what(), folder.path().string())) << at << ": " << error.what();
    }
    for (std::size_t size = 0; size < good.size(); size += 11) {
      overwrite(file, good.substr(0, size));
      ASSERT_EQ(error_of([&] { optimizer.load(folder.path()); }).code(),
                ErrorCode::invalid_argument);
    }
    overwrite(file, good + "x");
    EXPECT_EQ(error_of([&] { optimizer.load(folder.path()); }).code(), ErrorCode::invalid_argument);
    overwrite(file, good);
  }
  EXPECT_EQ(state_now(), 0.9);
  // The momentum is that of two steps still, not the saved one of one step.
  const auto reference = weights_on({"worker0", "worker1"});
  DistributedOptimizer<SGD> undisturbed(named(reference), SGDOptions(0.1).momentum(0.9));
  step(reference, undisturbed, 3);
  step(weights, optimizer, 1);
  expect_equal(values_of(weights), values_of(reference));
}

TEST(Checkpoint, WhatDoesNotFitIsNamed) {
  Cluster cluster(2);
  const Folder folder;
  const auto weights = weights_on({"worker0", "worker1"});
  DistributedOptimizer<SGD> optimizer(named(weights), SGDOptions(0.1));
  optimizer.save(folder.path());

  DistributedOptimizer<Adam> of_another_type(named(weights), AdamOptions(0.1));
  EXPECT_TRUE(contains(error_of([&] { of_another_type.load(folder.path()); }).what(),
                       "is of a torch::optim::SGD, not a torch::optim::Adam"));
  EXPECT_TRUE(contains(error_of([&] { of_another_type.save(folder.path()); }).what(),
                       "each optimizer needs a folder of its own"));
  DistributedOptimizer<SGD> with_less({named(weights)[0]}, SGDOptions(0.1));
  EXPECT_TRUE(contains(error_of([&] { with_less.load(folder.path()); }).what(),
                       "has parameter \"b\", which this optimizer does not have"));
  auto more = named(weights);
  more.emplace_back("c", make_rref(torch::ones({2})));
  DistributedOptimizer<SGD> with_more(more, SGDOptions(0.1));
  EXPECT_TRUE(
      contains(error_of([&] { with_more.load(folder.path()); }).what(), "has no parameter \"c\""));
  auto other_shape = named(weights);
  other_shape[1].second = make_rref(torch::ones({2}));
  DistributedOptimizer<SGD> misfit(other_shape, SGDOptions(0.1));
  EXPECT_TRUE(contains(error_of([&] { misfit.load(folder.path()); }).what(),
                       "has shape [3] for parameter \"b\", it is [2]"));
  EXPECT_TRUE(
      contains(error_of([&] { optimizer.load(folder.path() / "nowhere"); }).what(), "nowhere"));
  EXPECT_TRUE(contains(error_of([&] { optimizer.save("/proc/stitch-cannot-write-here"); }).what(),
                       "cannot be made"));
}

TEST(Checkpoint, OfAnotherOptimizerOfItsTypeIsNotOverwritten) {
  Cluster cluster(2);
  const Folder folder;
  const auto parameters = named(weights_on({"worker0", "worker1"}));
  DistributedOptimizer<Adam> a({parameters[0]}, AdamOptions(1e-3));
  DistributedOptimizer<Adam> b({parameters[1]}, AdamOptions(1e-4));
  a.save(folder.path());
  EXPECT_TRUE(contains(error_of([&] { b.save(folder.path()); }).what(),
                       "has parameter \"a\" of another optimizer: each optimizer needs a folder"));
  a.load(folder.path());
  a.save(folder.path());  // its own it replaces
  DistributedOptimizer<Adam> with_more(parameters, AdamOptions(1e-3));
  with_more.save(folder.path());
}

TEST(Checkpoint, ADamagedFileInTheFolderOfASaveIsToBeRemoved) {
  Cluster cluster(1);
  const Folder folder;
  DistributedOptimizer<SGD> optimizer(named(weights_on({"worker0"})), SGDOptions(0.1));
  fs::create_directories(folder.path());
  overwrite(folder.path() / "gone.optimizer", "stitchos and not much more than that, to be sure");
  EXPECT_TRUE(contains(error_of([&] { optimizer.save(folder.path()); }).what(),
                       "to save into this folder, remove that file"));
  fs::remove(folder.path() / "gone.optimizer");
  optimizer.save(folder.path());
}

template <class Optimizer>
void expect_fitting_state(const optim::OptionsOf<Optimizer>& options, const std::string& field,
                          NamedValues state, at::IntArrayRef sizes) {
  SCOPED_TRACE(optim::optimizer_name<Optimizer>());
  const auto parameter = make_rref(torch::ones({3, 2}).set_requires_grad(true));
  auto local = optim::make_local<Optimizer>(
      {{{{"w", parameter}}, optim::options_to_values<Optimizer>(options)}},
      optim::StalePolicy::detect);
  const auto stage = [&](const at::Tensor& tensor) {
    state[field] = tensor;
    local.stage("load", 0, state);
  };
  stage(torch::zeros(sizes));
  for (const auto& wrong : {torch::zeros({2, 3}), torch::zeros({7}), torch::zeros({})}) {
    const Error error = error_of([&] { stage(wrong); });
    EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument,
                         "state has \"" + field + "\" of type Float ["));
  }
  EXPECT_TRUE(contains(error_of([&] { stage(torch::zeros(sizes, torch::kDouble)); }).what(),
                       "for a parameter of type Float [3, 2]"));
}

TEST(Checkpoint, StateOfAnotherShapeOrTypeThanItsParameterIsRefused) {
  Cluster cluster(1);
  const NamedValues step{{"step", std::int64_t{1}}};
  expect_fitting_state<SGD>(SGDOptions(0.1), "momentum_buffer", {}, {3, 2});
  expect_fitting_state<Adam>(AdamOptions(0.1), "exp_avg", step, {3, 2});
  expect_fitting_state<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.1), "sum", step,
                                              {3, 2});
  expect_fitting_state<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.1), "square_avg", step,
                                              {3, 2});
  expect_fitting_state<optim::SparseAdam>(optim::SparseAdamOptions(0.1), "exp_avg", step, {3, 2});
  expect_fitting_state<optim::SparseAdagrad>(optim::SparseAdagradOptions(0.1), "sum", step, {3});
}

// Another user has planted what has the name of an unfinished file.
TEST(Checkpoint, CanBeReadByTheUserAlone) {
  Cluster cluster(1);
  const Folder folder;
  DistributedOptimizer<SGD> optimizer(named(weights_on({"worker0"})), SGDOptions(0.1));
  optimizer.save(folder.path());
  std::vector<fs::path> shards;
  for (const auto& each : fs::directory_iterator(folder.path())) shards.push_back(each.path());
  ASSERT_EQ(shards.size(), 1U);
  const auto mode = [&] { return fs::symlink_status(shards[0]).permissions() & fs::perms::all; };
  EXPECT_EQ(mode(), fs::perms::owner_read | fs::perms::owner_write);
  const fs::path unfinished = folder.path() / "worker0.optimizer.new";
  const fs::path theirs = folder.path() / "theirs";
  overwrite(theirs, "as it was");
  fs::create_hard_link(theirs, unfinished);
  optimizer.save(folder.path());
  EXPECT_EQ(mode(), fs::perms::owner_read | fs::perms::owner_write);
  EXPECT_EQ(fs::file_size(theirs), std::string("as it was").size());
}

// The process dies between the renames of a second save, or before the first.
TEST(Checkpoint, ASaveThatIsCutOffLeavesAWholeCheckpoint) {
  Cluster cluster(2);
  const Folder folder, second;
  const auto weights = weights_on({"worker0", "worker1"});
  DistributedOptimizer<SGD> optimizer(named(weights), SGDOptions(1.0));
  optimizer.save(folder.path());
  optimizer.set_options(SGDOptions(2.0));
  optimizer.save(second.path() / "later");
  const auto later = [&](const std::string& owner) {
    return second.path() / "later" / (owner + ".optimizer");
  };
  const auto put = [&](const std::string& owner, const std::string& suffix) {
    fs::copy_file(later(owner), folder.path() / (owner + suffix),
                  fs::copy_options::overwrite_existing);
  };
  const auto loaded_rate = [&] {
    optimizer.set_options(SGDOptions(3.0));
    optimizer.load(folder.path());
    return optimizer.options().lr();
  };
  put("worker0", ".optimizer.new");
  EXPECT_EQ(loaded_rate(), 1.0);  // not all was written
  put("worker1", ".optimizer.new");
  EXPECT_EQ(loaded_rate(), 1.0);  // nothing was renamed
  fs::rename(folder.path() / "worker0.optimizer.new", folder.path() / "worker0.optimizer");
  EXPECT_EQ(loaded_rate(), 2.0);  // half was renamed: the other half is complete, too
  fs::remove(folder.path() / "worker1.optimizer.new");
  EXPECT_TRUE(contains(error_of([&] { optimizer.load(folder.path()); }).what(), "is not complete"));
  fs::rename(folder.path() / "worker0.optimizer", folder.path() / "worker0.optimizer.new");
  fs::remove(folder.path() / "worker1.optimizer");
  EXPECT_TRUE(contains(error_of([&] { optimizer.load(folder.path()); }).what(), "is not complete"));
}

// What a peer can send to an owner: values with names and types, each checked.
TEST(Checkpoint, OptionsAndStateFromTheWireAreCheckedByNameAndType) {
  Cluster cluster(2);
  using Local = optim::LocalOptimizer;
  const auto weights = weights_on({"worker1"});
  const auto good = optim::options_to_values<SGD>(SGDOptions(0.5));
  const auto local = stitch::remote<&optim::make_local<SGD>>(
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

  const auto stage = [&](std::uint64_t position, const NamedValues& state) {
    local.rpc_sync<&Local::stage>(std::string("load"), position, std::optional(state));
  };
  EXPECT_TRUE(contains(error_of([&] { stage(1, {}); }).what(), "parameter 1 does not exist"));
  EXPECT_TRUE(contains(error_of([&] {
                         stage(0, {{"momentum_buffer", 1.0}});
                       }).what(),
                       "it takes a tensor"));
  EXPECT_TRUE(contains(error_of([&] { stage(0, {{"code", 1.0}}); }).what(), "have no \"code\""));
  EXPECT_EQ(error_of([&] {
              local.rpc_sync<&Local::commit>(std::string("other"), std::vector{good});
            }).code(),
            ErrorCode::remote_exception);
}

}  // namespace
}  // namespace checkpoint_test
