// Optimizers whose parameters lie on devices, over the double of CUDA.
#include <unistd.h>

#include <filesystem>

#include "tests/gpu/device_test.h"

namespace device_optim_test {  // its functions are registered under their full names
namespace {

namespace autograd = stitch::dist_autograd;
using namespace stitch::testing::device_names;  // NOLINT
namespace optim = stitch::optim;
using optim::DistributedOptimizer;
using optim::OptionsOf;
using optim::SparseAdagrad;
using optim::SparseAdagradOptions;
using optim::SparseAdam;
using optim::SparseAdamOptions;
using optim::SparseSGD;
using optim::SparseSGDOptions;
using torch::optim::Adagrad;
using torch::optim::AdagradOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

[[maybe_unused]] const bool installed = fake::install();

constexpr std::int64_t kRows = 50;
constexpr std::int64_t kColumns = 12;

at::Tensor first_rows(at::ScalarType type = at::kFloat) {
  at::manual_seed(3);
  return at::randn({kRows, kColumns}, at::kDouble).to(type);
}

// A table of rows that are looked up: its gradient is sparse, and names rows more than once.
class Table {
 public:
  explicit Table(const at::Tensor& rows) : rows_(rows.detach().requires_grad_()) {}
  RRef<at::Tensor> parameter() { return stitch::make_rref(rows_); }
  at::Tensor look_up(const at::Tensor& ids) { return at::embedding(rows_, ids, -1, false, true); }
  at::Tensor now() { return rows_.detach().cpu(); }
  [[nodiscard]] const at::Tensor& rows() const { return rows_; }

 private:
  at::Tensor rows_;
};
RRef<Table> remote_table(const at::Tensor& rows) { return stitch::remote<Table>("worker1", rows); }

// 0 and 7 many times.
at::Tensor ids_of(int step) {
  at::manual_seed(100 + step);
  return at::cat({at::randint(kRows, {40}, at::kLong), at::zeros({35}, at::kLong),
                  at::full({70}, 7, at::kLong)});
}

at::Tensor loss_of(const at::Tensor& found) { return found.pow(2).sum() / 50; }

template <class Optimizer>
void step_once(const RRef<Table>& table, DistributedOptimizer<Optimizer>& optimizer, int step) {
  const autograd::Context context;
  const at::Tensor found =
      table.rpc_sync<&Table::look_up>(stitch::on(device(0), ids_of(step).to(device(0))));
  ASSERT_EQ(found.device(), device(0));
  context.backward({loss_of(found)});
  EXPECT_EQ(optimizer.step(context), 1);
}

template <class Optimizer>
void step_once(Table& table, Optimizer& optimizer, int step) {
  optimizer.zero_grad();
  loss_of(table.look_up(ids_of(step))).backward();
  ASSERT_TRUE(table.rows().grad().is_sparse());
  optimizer.step();
}

// Steps a table on a device of worker 1, and the same on the CPU here.
template <class Optimizer>
void expect_same_steps(const OptionsOf<Optimizer>& options, at::ScalarType type = at::kFloat,
                       double tolerance = 1e-5) {
  const Cluster cluster(2);
  const auto table = remote_table(first_rows(type).to(device(0)));
  DistributedOptimizer<Optimizer> optimizer({table.template rpc_sync<&Table::parameter>()},
                                            options);
  Table here(first_rows(type));
  Optimizer oracle(std::vector<at::Tensor>{here.rows()}, options);
  for (int step = 0; step < 5; ++step) {
    step_once(table, optimizer, step);
    step_once(here, oracle, step);
    const at::Tensor there = table.template rpc_sync<&Table::now>();
    EXPECT_TRUE(at::allclose(there, here.now(), tolerance, tolerance))
        << step << ": " << (there - here.now()).abs().max().template item<double>();
  }
}

TEST(DeviceOptimizer, StepsSparseGradientsAsLibtorchsOptimizersDo) {
  expect_same_steps<SGD>(SGDOptions(0.05).momentum(0.5));
  expect_same_steps<Adagrad>(
      AdagradOptions(0.05).lr_decay(0.1).initial_accumulator_value(0.5).eps(1e-3));
  expect_same_steps<Adagrad>(AdagradOptions(0.05), at::kDouble, 1e-12);
}

TEST(DeviceOptimizer, StepsRowWiseOptimizersAsTheCpuDoes) {
  expect_same_steps<SparseSGD>(SparseSGDOptions(0.05));
  expect_same_steps<SparseAdagrad>(
      SparseAdagradOptions(0.05).lr_decay(0.1).initial_accumulator_value(0.5));
  expect_same_steps<SparseAdam>(SparseAdamOptions(0.05).betas({0.8, 0.95}).eps(1e-3));
  expect_same_steps<SparseAdam>(SparseAdamOptions(0.05), at::kDouble, 1e-12);
}

std::filesystem::path checkpoint_folder() {
  return std::filesystem::temp_directory_path() /
         ("stitch-device-checkpoint-" + std::to_string(::getpid()));
}

template <class Optimizer>
void expect_to_go_on_from_a_checkpoint(const OptionsOf<Optimizer>& options) {
  const auto folder = checkpoint_folder();
  const Cluster cluster(2);
  const auto table = remote_table(first_rows().to(device(0)));
  const auto parameter = table.template rpc_sync<&Table::parameter>();
  DistributedOptimizer<Optimizer> optimizer({parameter}, options);
  Table here(first_rows());
  Optimizer oracle(std::vector<at::Tensor>{here.rows()}, options);
  for (int step = 0; step < 2; ++step) {
    step_once(table, optimizer, step);
    step_once(here, oracle, step);
  }
  optimizer.save(folder);
  DistributedOptimizer<Optimizer> other({parameter}, options);
  other.load(folder);
  std::filesystem::remove_all(folder);
  step_once(table, other, 2);
  step_once(here, oracle, 2);
  EXPECT_TRUE(at::allclose(table.template rpc_sync<&Table::now>(), here.now(), 1e-5, 1e-5));
}

TEST(DeviceOptimizer, StepsAreOrderedWithTheStreamOfTheirCaller) {
  Cluster cluster(1);
  const c10::StreamGuard own(fake::pool_stream(device(0)));
  const at::Tensor parameter =
      at::ones({kRows}, at::TensorOptions(at::kFloat).device(device(0))).requires_grad_();
  DistributedOptimizer<SGD> optimizer({stitch::make_rref(parameter)}, SGDOptions(0.5));
  for (int step = 0; step < 4; ++step) {
    const autograd::Context context;
    const at::Tensor loss = (parameter * 2).sum();
    const at::Tensor before = parameter.detach() * 1;
    if (step % 2 == 0) {
      context.backward({loss});
      EXPECT_EQ(optimizer.step(context), 1);
    } else {
      EXPECT_EQ(optim::backward_and_step(context, {loss}, optimizer), 1);
    }
    const at::Tensor after = parameter.detach() * 1;
    EXPECT_TRUE(at::equal(after.cpu() + 1, before.cpu()));
  }
}

TEST(DeviceOptimizer, GoesOnFromACheckpoint) {
  expect_to_go_on_from_a_checkpoint<Adagrad>(AdagradOptions(0.05).lr_decay(0.1));
  expect_to_go_on_from_a_checkpoint<SparseAdagrad>(SparseAdagradOptions(0.05).lr_decay(0.1));
  expect_to_go_on_from_a_checkpoint<SparseAdam>(SparseAdamOptions(0.05));
}

TEST(DeviceOptimizer, ALoadForWhichOneOwnerHasNoMemoryChangesNoOwner) {
  const Cluster cluster(3);
  const SparseAdagradOptions options(0.05);
  std::vector<RRef<Table>> tables;
  std::vector<RRef<at::Tensor>> parameters;
  for (const char* const owner : {"worker1", "worker2"}) {
    tables.push_back(stitch::remote<Table>(owner, first_rows().to(device(0))));
    parameters.push_back(tables.back().rpc_sync<&Table::parameter>());
  }
  DistributedOptimizer<SparseAdagrad> optimizer(parameters, options);
  Table here(first_rows());
  SparseAdagrad oracle(std::vector<at::Tensor>{here.rows()}, options);
  const auto step = [&](int number) {
    const autograd::Context context;
    std::vector<at::Tensor> losses;
    for (const auto& table : tables) {
      losses.push_back(loss_of(
          table.rpc_sync<&Table::look_up>(stitch::on(device(0), ids_of(number).to(device(0))))));
    }
    context.backward(losses);
    EXPECT_EQ(optimizer.step(context), 2);
    step_once(here, oracle, number);
  };
  step(0);
  optimizer.save(checkpoint_folder());
  step(1);
  fake::fail_allocations(1);
  EXPECT_ANY_THROW(optimizer.load(checkpoint_folder()));
  fake::fail_allocations(0);
  std::filesystem::remove_all(checkpoint_folder());
  step(2);
  for (const auto& table : tables)
    EXPECT_TRUE(at::allclose(table.rpc_sync<&Table::now>(), here.now(), 1e-5, 1e-5));
}

TEST(DeviceOptimizer, SavesStateThatHasNoPlaceOnDevicesHere) {
  const Cluster cluster(2, [](stitch::Options& options) {
    if (options.rank == 0) options.device_maps["worker1"] = {{"cuda:0", "cuda:0"}};
  });
  const auto table =
      stitch::remote<Table>("worker1", stitch::on(device(2), first_rows().to(device(0))));
  DistributedOptimizer<Adagrad> optimizer({table.rpc_sync<&Table::parameter>()},
                                          AdagradOptions(0.05));
  optimizer.save(checkpoint_folder());
  optimizer.load(checkpoint_folder());
  std::filesystem::remove_all(checkpoint_folder());
}

}  // namespace
}  // namespace device_optim_test
