// Averages of parameters on their owners, beside the same in one process.
#include "tests/dist_optim/spread_model.h"

namespace ema_test {
namespace {

namespace optim = stitch::optim;
using namespace spread_model;
using stitch::ErrorCode;
using stitch::testing::Cluster;
using stitch::testing::error_of;
using stitch::testing::has_text;

std::vector<optim::NamedParameter> named(const SpreadModel& model) {
  std::vector<optim::NamedParameter> all;
  for (std::size_t i = 0; i < kParameters; ++i)
    all.emplace_back("p" + std::to_string(i), model.references[i]);
  return all;
}
std::vector<at::Tensor> values_there(const SpreadModel& model) {
  std::vector<at::Tensor> all;
  for (const auto& holder : model.holders) all.push_back(holder.rpc_sync<&Holder::now>());
  return all;
}
std::map<std::string, at::Tensor> averages(const optim::Ema& ema) {
  std::map<std::string, at::Tensor> all;
  for (const auto& [name, average] : ema.averages()) all[name] = average.to_here();
  return all;
}
void train(const SpreadModel& model, DistributedOptimizer<torch::optim::SGD>& optimizer, int i) {
  autograd::Context context;
  context.backward({model.loss_there(i)});
  optimizer.step(context);
}

TEST(Ema, FollowsTheParametersOfEveryOwnerAndStandsInForThem) {
  Cluster cluster(3);
  const SpreadModel model(2);
  DistributedOptimizer<torch::optim::SGD> optimizer(model.references, 0.05);
  optim::Ema ema(named(model), 0.9);
  auto expected = values_there(model);
  for (int i = 0; i < 6; ++i) {
    train(model, optimizer, i);
    ema.update();
    const auto now = values_there(model);
    for (std::size_t k = 0; k < kParameters; ++k) expected[k] = 0.9 * expected[k] + 0.1 * now[k];
  }
  const auto own = values_there(model);
  ema.swap();
  const auto swapped = values_there(model);
  EXPECT_TRUE(has_text(error_of([&] { ema.update(); }), ErrorCode::remote_exception,
                       "the parameters have their values until swap()"));
  ema.swap();
  const auto again = values_there(model);
  const auto found = averages(ema);
  for (std::size_t k = 0; k < kParameters; ++k) {
    EXPECT_TRUE(torch::allclose(swapped[k], expected[k], 1e-12, 1e-12)) << k;
    EXPECT_TRUE(torch::equal(found.at("p" + std::to_string(k)), swapped[k])) << k;
    EXPECT_TRUE(torch::equal(again[k], own[k])) << k;
  }
  train(model, optimizer, 6);  // and training goes on
  ema.update();
}

// In bfloat16 an average would never move by a thousandth of itself.
TEST(Ema, OfHalfPrecisionIsKeptInFloat) {
  Cluster cluster(2);
  const SpreadModel model(1, at::kBFloat16);
  optim::Ema ema(named(model), 0.999);
  const auto before = averages(ema);
  model.holders[0].rpc_sync<&Holder::assign>(torch::full({6}, 2.0));
  ema.update();
  EXPECT_EQ(before.at("p0").scalar_type(), at::kFloat);
  EXPECT_TRUE(torch::allclose(averages(ema).at("p0"), before.at("p0") * 0.999 + 0.002, 1e-6, 0));
  const auto own = values_there(model);
  ema.swap();
  EXPECT_TRUE(torch::equal(values_there(model)[0], averages(ema).at("p0").to(at::kBFloat16)));
  ema.swap();
  EXPECT_TRUE(torch::equal(values_there(model)[0], own[0]));
}

void write(const RRef<at::Tensor>& average, const at::Tensor& values) {
  average.local_value().copy_(values);
}

TEST(Ema, IsSavedAndLoadedByTheNamesOfItsAverages) {
  Cluster cluster(3);
  const SpreadModel model(2);
  DistributedOptimizer<torch::optim::SGD> optimizer(model.references, 0.05);
  optim::Ema ema(named(model), 0.9);
  train(model, optimizer, 0);
  ema.update();
  const auto saved = averages(ema);
  const optim::Ema resumed(named(model), 0.9);
  for (const auto& [name, average] : resumed.averages())
    stitch::rpc_sync<write>(average.owner(), average, saved.at(name));
  const auto loaded = averages(resumed);
  for (const auto& [name, average] : saved) EXPECT_TRUE(torch::equal(loaded.at(name), average));
}

TEST(Ema, CountsATensorOnceAndRefusesWhatCannotBeAveraged) {
  const Cluster cluster(1);
  const auto tied = torch::ones({2}).requires_grad_();
  const auto first = stitch::make_rref(tied), second = stitch::make_rref(tied);
  EXPECT_EQ(optim::Ema({{"a", first}, {"b", second}}, 0.5).averages().size(), 1u);
  EXPECT_TRUE(has_text(error_of([&] {
                         optim::Ema({{"a", first}}, 1.5);
                       }),
                       ErrorCode::invalid_argument, "decay of 1.5"));
  const auto numbers = stitch::make_rref(torch::ones({2}, at::kLong));
  EXPECT_TRUE(has_text(error_of([&] {
                         optim::Ema({{"numbers", numbers}}, 0.5);
                       }),
                       ErrorCode::remote_exception, "(\"numbers\") cannot be averaged"));
}

}  // namespace
}  // namespace ema_test
