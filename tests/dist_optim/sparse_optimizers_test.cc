#include "tests/dist_optim/sparse_reference.h"
#include "tests/support/world_test.h"

namespace sparse_optimizers_test {
namespace {

namespace optim = stitch::optim;
using optim::SparseAdagrad;
using optim::SparseAdagradOptions;
using optim::SparseAdam;
using optim::SparseAdamOptions;
using optim::SparseSGD;
using optim::SparseSGDOptions;
using namespace stitch::testing;

at::Tensor coo(const std::vector<std::int64_t>& rows, const at::Tensor& values,
               at::IntArrayRef sizes) {
  return at::sparse_coo_tensor(at::tensor(rows).unsqueeze(0), values, sizes);
}

// Steps `optimizer`'s parameter, and the same in fp64 beside it.
template <class Optimizer>
void expect_steps_as_reference(SparseCase c, const optim::OptionsOf<Optimizer>& options) {
  const auto sizes = std::vector<std::int64_t>{c.rows, c.columns};
  const at::Tensor weights = at::from_blob(c.weights.data(), sizes).clone().set_requires_grad(true);
  Optimizer optimizer({weights}, options);
  std::fill(c.first.begin(), c.first.end(), 0.0F);
  std::fill(c.second.begin(), c.second.end(), 0.0F);
  std::mt19937_64 random(7);
  for (c.step = 1; c.step <= 4; ++c.step) {
    for (float& value : c.gradients) value = static_cast<float>(random() % 2000) / 1000 - 1;
    for (std::int64_t& index : c.indices)
      index = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(c.rows));
    const at::Tensor values =
        at::from_blob(c.gradients.data(), {static_cast<std::int64_t>(c.indices.size()), c.columns});
    weights.mutable_grad() = coo(c.indices, values.clone(), sizes);
    optimizer.step();
    const auto expected = stitch::testing::sparse_reference(c);
    c.weights.assign(expected.weights.begin(), expected.weights.end());
    c.first.assign(expected.first.begin(), expected.first.end());
    c.second.assign(expected.second.begin(), expected.second.end());
    const std::vector<float> stepped(weights.data_ptr<float>(),
                                     weights.data_ptr<float>() + weights.numel());
    EXPECT_LE(stitch::testing::largest_difference(stepped, expected.weights), 1e-5)
        << "step " << c.step;
  }
}

SparseCase some_case(SparseRule rule) {
  std::mt19937_64 random(1);
  return stitch::testing::random_sparse_case(rule, 30, 7, 7, 60, 0.2, random);
}

TEST(SparseOptimizers, StepTheRowsOfAGradientAsInDoublePrecision) {
  SparseCase c = some_case(SparseRule::sgd);
  expect_steps_as_reference<SparseSGD>(c, SparseSGDOptions(c.learning_rate));
  c = some_case(SparseRule::rowwise_adagrad);
  expect_steps_as_reference<SparseAdagrad>(
      c, SparseAdagradOptions(c.learning_rate).lr_decay(c.lr_decay).eps(c.eps));
  c = some_case(SparseRule::adam);
  expect_steps_as_reference<SparseAdam>(
      c, SparseAdamOptions(c.learning_rate).betas({c.beta1, c.beta2}).eps(c.eps));
}

// What torch.optim.SparseAdam of torch 2.11 makes of the same.
TEST(SparseOptimizers, SparseAdamStepsAsPythonsDoes) {
  const auto weights = torch::tensor({{1.0, -2.0}, {0.5, 0.25}, {3.0, -1.0}}, torch::kDouble)
                           .set_requires_grad(true);
  SparseAdam optimizer({weights}, SparseAdamOptions(0.1).betas({0.8, 0.95}).eps(1e-3));
  const auto step = [&](const std::vector<std::int64_t>& rows, const at::Tensor& values) {
    weights.mutable_grad() = coo(rows, values, {3, 2});
    optimizer.step();
  };
  step({0, 2, 0}, torch::tensor({{1.0, -1.0}, {0.5, 2.0}, {3.0, 0.25}}, torch::kDouble));
  step({2}, torch::tensor({{-1.5, 0.75}}, torch::kDouble));
  step({1, 2}, torch::tensor({{0.125, 1.0}, {2.0, -2.0}}, torch::kDouble));
  const auto expected = torch::tensor({{0.9001116785384732, -1.9005927503140112},
                                       {0.43317227136460273, 0.18108954677597072},
                                       {2.924162149283829, -1.1839704711664139}},
                                      torch::kDouble);
  EXPECT_TRUE(torch::allclose(weights, expected, 1e-13, 0)) << weights;
}

TEST(SparseOptimizers, SparseSgdStepsAsSgd) {
  const auto mine = torch::linspace(0, 1, 24, torch::kDouble).view({4, 3, 2});
  const auto first = mine.clone().set_requires_grad(true);
  const auto second = mine.clone().set_requires_grad(true);
  const auto gradient = coo({3, 1, 3}, torch::randn({3, 3, 2}, torch::kDouble), {4, 3, 2});
  first.mutable_grad() = gradient;
  second.mutable_grad() = gradient;
  SparseSGD({first}, SparseSGDOptions(0.1)).step();
  torch::optim::SGD({second}, torch::optim::SGDOptions(0.1)).step();
  EXPECT_TRUE(torch::allclose(first, second, 1e-13, 0));
}

// Rows of one number: then there is nothing to take the mean of.
TEST(SparseOptimizers, SparseAdagradOfRowsOfOneNumberStepsAsAdagrad) {
  const auto first = torch::ones({5}, torch::kDouble).set_requires_grad(true);
  const auto second = torch::ones({5}, torch::kDouble).set_requires_grad(true);
  SparseAdagrad mine({first}, SparseAdagradOptions(0.1).lr_decay(0.2).initial_accumulator_value(1));
  torch::optim::Adagrad theirs(
      {second}, torch::optim::AdagradOptions(0.1).lr_decay(0.2).initial_accumulator_value(1));
  for (int step = 0; step < 3; ++step) {
    const auto gradient = coo({4, 0, 4}, torch::randn({3}, torch::kDouble), {5});
    first.mutable_grad() = gradient;
    second.mutable_grad() = gradient;
    mine.step();
    theirs.step();
  }
  EXPECT_TRUE(torch::allclose(first, second, 1e-12, 0)) << first << second;
}

template <class Optimizer>
void expect_a_dense_gradient_names_all_rows(const optim::OptionsOf<Optimizer>& options) {
  const auto values = torch::randn({4, 3}, torch::kDouble);
  const auto first = torch::ones({4, 3}, torch::kDouble).set_requires_grad(true);
  const auto second = torch::ones({4, 3}, torch::kDouble).set_requires_grad(true);
  Optimizer dense({first}, options);
  Optimizer sparse({second}, options);
  for (int step = 0; step < 2; ++step) {
    first.mutable_grad() = values;
    second.mutable_grad() =
        coo({2, 0, 1, 3}, values.index_select(0, torch::tensor({2, 0, 1, 3})), {4, 3});
    dense.step();
    sparse.step();
  }
  EXPECT_TRUE(torch::allclose(first, second, 1e-13, 0));
  EXPECT_FALSE(torch::allclose(first, torch::ones({4, 3}, torch::kDouble)));
}

TEST(SparseOptimizers, TakeADenseGradientForOneThatNamesAllRows) {
  expect_a_dense_gradient_names_all_rows<SparseSGD>(SparseSGDOptions(0.1));
  expect_a_dense_gradient_names_all_rows<SparseAdagrad>(SparseAdagradOptions(0.1));
  expect_a_dense_gradient_names_all_rows<SparseAdam>(SparseAdamOptions(0.1));
}

TEST(SparseOptimizers, CountAStepWhoseGradientNamesNoRow) {
  const auto weights = torch::ones({4, 3}).set_requires_grad(true);
  SparseAdagrad optimizer({weights}, SparseAdagradOptions(0.1));
  weights.mutable_grad() = coo({}, torch::empty({0, 3}), {4, 3});
  optimizer.step();
  EXPECT_TRUE(torch::equal(weights, torch::ones({4, 3})));
  const auto& state =
      static_cast<const optim::SparseAdagradParamState&>(*optimizer.state().begin()->second);
  EXPECT_EQ(state.step(), 1);
}

// libtorch's own would write and read nothing.
TEST(SparseOptimizers, AreNotSavedOrLoadedByThemselves) {
  SparseAdam adam({at::ones({4, 2})}, SparseAdamOptions(0.1));
  torch::serialize::OutputArchive out;
  EXPECT_THROW(adam.save(out), c10::Error);
  torch::serialize::InputArchive in;
  EXPECT_THROW(adam.load(in), c10::Error);
}

TEST(SparseOptimizers, RefuseWhatHasNoRowsAndOptionsOutOfRange) {
  const auto weights = torch::ones({4, 3}).set_requires_grad(true);
  SparseSGD optimizer({weights}, SparseSGDOptions(0.1));
  weights.mutable_grad() =
      torch::sparse_coo_tensor(torch::tensor({{0}, {1}}), torch::ones({1}), {4, 3});
  EXPECT_THROW(optimizer.step(), c10::Error);
  const auto scalar = torch::ones({}).set_requires_grad(true);
  scalar.mutable_grad() = torch::ones({});
  EXPECT_THROW(SparseSGD({scalar}, SparseSGDOptions(0.1)).step(), c10::Error);
  const auto complex = torch::ones({4, 3}, torch::kComplexDouble).set_requires_grad(true);
  complex.mutable_grad() = torch::ones({4, 3}, torch::kComplexDouble);
  EXPECT_THROW(SparseAdagrad({complex}, SparseAdagradOptions(1)).step(), c10::Error);
  EXPECT_THROW(SparseSGD({weights}, SparseSGDOptions(-1)), c10::Error);
  EXPECT_THROW(SparseAdagrad({weights}, SparseAdagradOptions(1).lr_decay(-1)), c10::Error);
  EXPECT_THROW(SparseAdagrad({weights}, SparseAdagradOptions(1).initial_accumulator_value(-1)),
               c10::Error);
  EXPECT_THROW(SparseAdam({weights}, SparseAdamOptions(1).betas({0.5, 1.0})), c10::Error);
  EXPECT_THROW(SparseAdam({weights}, SparseAdamOptions(1).eps(-1)), c10::Error);
}

template <class Optimizer>
void expect_all_or_none_stepped() {
  const auto rows = torch::ones({4, 3}).set_requires_grad(true);
  const auto other = torch::ones({4, 3}).set_requires_grad(true);
  Optimizer optimizer(std::vector<at::Tensor>{rows, other}, 0.1);
  rows.mutable_grad() = torch::ones({4, 3});
  other.mutable_grad() =
      torch::sparse_coo_tensor(torch::tensor({{0}, {1}}), torch::ones({1}), {4, 3});
  EXPECT_THROW(optimizer.step(), c10::Error);
  EXPECT_TRUE(torch::equal(rows.detach(), torch::ones({4, 3})));
}

TEST(SparseOptimizers, StepNothingWhenOneGradientIsRefused) {
  expect_all_or_none_stepped<SparseSGD>();
  expect_all_or_none_stepped<SparseAdagrad>();
  expect_all_or_none_stepped<SparseAdam>();
}

TEST(SparseOptimizers, StepNothingOfAnOwnerWhenOneOfItsParametersHasNoRows) {
  const Cluster cluster(1);
  const auto rows = torch::ones({4, 3}).set_requires_grad(true);
  const auto scalar = torch::ones({}).set_requires_grad(true);
  optim::DistributedOptimizer<SparseSGD> optimizer(
      {make_rref<at::Tensor>(rows), make_rref<at::Tensor>(scalar)}, SparseSGDOptions(0.1));
  const stitch::dist_autograd::Context context;
  context.backward({(rows * scalar).sum()});
  EXPECT_ANY_THROW(optimizer.step(context));
  EXPECT_TRUE(torch::equal(rows.detach(), torch::ones({4, 3})));
}

// The rows of worker 1, looked up by index.
class SparseTable {
 public:
  SparseTable() : rows_(torch::linspace(0.5, 3, 12).view({6, 2}).clone().set_requires_grad(true)) {}
  RRef<at::Tensor> parameter() { return make_rref(rows_); }
  at::Tensor look_up(const at::Tensor& ids) {
    return at::embedding(rows_, ids, -1, /*scale_grad_by_freq=*/false, /*sparse=*/true);
  }
  at::Tensor now() { return rows_.detach().clone(); }

 private:
  at::Tensor rows_;
};

template <class Optimizer>
void expect_distributed_steps(const optim::OptionsOf<Optimizer>& options) {
  const Cluster cluster(2);
  const auto table = remote<SparseTable>("worker1");
  SparseTable here;
  optim::DistributedOptimizer<Optimizer> optimizer({table.rpc_sync<&SparseTable::parameter>()},
                                                   options);
  const auto rows = here.parameter().local_value();
  Optimizer oracle(std::vector<at::Tensor>{rows}, options);
  for (int step = 0; step < 4; ++step) {
    const auto ids = torch::tensor({0, 5, 5, step % 3});
    const stitch::dist_autograd::Context context;
    context.backward({table.rpc_sync<&SparseTable::look_up>(ids).pow(2).sum()});
    EXPECT_EQ(optimizer.step(context), 1);
    oracle.zero_grad();
    here.look_up(ids).pow(2).sum().backward();
    oracle.step();
  }
  EXPECT_TRUE(torch::equal(table.rpc_sync<&SparseTable::now>(), here.now()));
}

TEST(SparseOptimizers, StepRemoteParametersAsLocalOnes) {
  expect_distributed_steps<SparseSGD>(SparseSGDOptions(0.1));
  expect_distributed_steps<SparseAdagrad>(SparseAdagradOptions(0.1).lr_decay(0.1));
  expect_distributed_steps<SparseAdam>(SparseAdamOptions(0.1));
}

}  // namespace
}  // namespace sparse_optimizers_test
