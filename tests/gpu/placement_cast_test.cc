// Tensors that a device map has travel as bfloat16 or half: which they are, and what of them
// arrives. Over the double of CUDA, through the frame and through host memory.
#include <cstdlib>

#include "tests/gpu/device_test.h"

namespace placement_cast_test {  // its functions are registered under their full names
namespace {

using namespace stitch::testing::device_names;  // NOLINT

constexpr float kThird = 1.0F / 3;  // no bfloat16 and no half

void worker0_casts(Options& options) {
  if (options.rank == 0) {
    options.device_maps["worker1"] = {
        {"cuda:0", "cuda:1/bf16"}, {"cuda:1", "cuda:0/fp16"}, {"cuda:2", "cuda:2"}};
  }
}
at::Tensor thirds(int index, at::IntArrayRef sizes = {4, 6}) {
  return filled(index, kThird, sizes);
}
at::Tensor same(at::Tensor tensor) { return tensor; }
bool all_thirds(const at::Tensor& tensor) { return all_are(tensor, kThird); }
at::Tensor made_on(int index) { return thirds(index); }
PlacedTensor placed_on(std::string device, at::Tensor tensor) {
  return on(std::move(device), std::move(tensor));
}
TEST(CastPlacement, FloatsAreRoundedOnTheirWayThereAndBackAndStayFloats) {
  Cluster cluster(2, worker0_casts);
  const std::vector<std::pair<int, at::ScalarType>> cases{{0, at::kBFloat16}, {1, at::kHalf}};
  std::int64_t sent = 0;
  for (const auto& [index, type] : cases) {
    for (const std::int64_t rows : {4, 40'000}) {  // in the frame, and through the host
      EXPECT_FALSE(rpc_sync<all_thirds>("worker1", thirds(index, {rows, 6})));
      const at::Tensor base = at::rand({rows, 6}).to(device(index));
      const at::Tensor result = rpc_sync<same>("worker1", base);
      EXPECT_EQ(result.device(), device(index));
      EXPECT_EQ(result.scalar_type(), at::kFloat);
      EXPECT_TRUE(at::equal(result.cpu(), rounded(base, type)));
      // A result is rounded as well.
      const at::Tensor made = rpc_sync<made_on>("worker1", 1 - index);
      EXPECT_TRUE(at::equal(made.cpu(), rounded(thirds(index), type)));
      sent += 2;
    }
  }
  EXPECT_EQ(count(cluster[0], "gpu.sent_cast"), sent);
  EXPECT_EQ(count(cluster[0], "gpu.received_cast"), sent);
  EXPECT_EQ(count(cluster[1], "gpu.sent_cast"), sent);
  // As they travel: 2 bytes an element.
  EXPECT_EQ(count(cluster[0], "gpu.sent_bytes.host.worker1.cuda:0"), 2 * 40'000 * 6 * 2);
}

TEST(CastPlacement, WhatIsNoFloatOrGoesByAnotherEntryIsNotTouched) {
  Cluster cluster(2, worker0_casts);
  const auto returns = [](const at::Tensor& tensor) {
    const at::Tensor result = rpc_sync<same>("worker1", tensor);
    return result.scalar_type() == tensor.scalar_type() && at::equal(result.cpu(), tensor.cpu());
  };
  const at::Tensor values = at::rand({3, 5}, at::kDouble);
  for (const auto type : {at::kDouble, at::kBFloat16, at::kHalf, at::kLong, at::kComplexFloat})
    EXPECT_TRUE(returns((values * 100).to(type).to(device(0)))) << type;
  EXPECT_TRUE(returns(thirds(2)));
  EXPECT_TRUE(returns(at::rand({3, 5})));  // of the CPU
  EXPECT_TRUE(returns(thirds(0, {0, 3})));
  EXPECT_EQ(count(cluster[0], "gpu.sent_cast"), 0);
}

TEST(CastPlacement, OnPutsATensorWhereItSaysAsItIs) {
  Cluster cluster(2, worker0_casts);
  EXPECT_TRUE(rpc_sync<all_thirds>("worker1", on("cuda:1", thirds(0))));
  const at::Tensor result =
      rpc_sync<placed_on>("worker1", std::string("cuda:0"), on("cuda:1", thirds(0)));
  EXPECT_EQ(result.device(), device(0));
  EXPECT_TRUE(all_thirds(result));
}

TEST(CastPlacement, BetweenTheCpuAndADeviceItIsTheSame) {
  Cluster cluster(2, [](Options& options) {
    if (options.rank == 0)
      options.device_maps["worker1"] = {{"cpu", "cuda:0/bf16"}, {"cuda:0", "cpu/fp16"}};
  });
  for (const std::int64_t rows : {4, 40'000}) {
    const at::Tensor base = at::rand({rows, 6});
    const at::Tensor from_cpu = rpc_sync<same>("worker1", base);
    EXPECT_TRUE(from_cpu.is_cpu());
    EXPECT_TRUE(at::equal(from_cpu, rounded(base, at::kBFloat16)));
    const at::Tensor from_device = rpc_sync<same>("worker1", base.to(device(0)));
    EXPECT_EQ(from_device.device(), device(0));
    EXPECT_TRUE(at::equal(from_device.cpu(), rounded(base, at::kHalf)));
    const at::Tensor ids = at::arange(rows);
    EXPECT_TRUE(at::equal(rpc_sync<same>("worker1", ids), ids));
  }
}

TEST(CastPlacement, ShapesStridesAndFlagsAreKept) {
  Cluster cluster(2, worker0_casts);
  const at::Tensor base = at::rand({40, 60}).to(device(0));
  const std::vector<at::Tensor> tensors{base.t(),
                                        base.slice(1, 0, 60, 2),
                                        base.narrow(0, 1, 1).expand({1000, 60}),
                                        base.select(0, 2),
                                        base[0][0],
                                        base.clone().requires_grad_()};
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor result = rpc_sync<same>("worker1", tensor);
    EXPECT_EQ(result.sizes(), tensor.sizes());
    EXPECT_EQ(result.scalar_type(), at::kFloat);
    EXPECT_EQ(result.requires_grad(), tensor.requires_grad());
    EXPECT_TRUE(at::equal(result.detach().cpu(), rounded(tensor.detach(), at::kBFloat16)));
  }
  EXPECT_EQ(rpc_sync<same>("worker1", base.t()).strides(), base.t().strides());
  EXPECT_EQ(rpc_sync<same>("worker1", tensors[2]).stride(0), 0);  // not materialized
}

TEST(CastPlacement, TheValuesOfASparseTensorAreRoundedAndItsIndicesAreNot) {
  Cluster cluster(2, worker0_casts);
  const at::Tensor indices = at::arange(300, 306).reshape({1, 6});
  const at::Tensor values = at::rand({6, 3});
  const auto sparse = at::sparse_coo_tensor(indices.to(device(0)), values.to(device(0)), {400, 3});
  const at::Tensor result = rpc_sync<same>("worker1", sparse);
  EXPECT_TRUE(result.is_sparse());
  EXPECT_EQ(result.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(result._indices().cpu(), indices));
  EXPECT_TRUE(at::equal(result._values().cpu(), rounded(values, at::kBFloat16)));
}

TEST(CastPlacement, GradientsAreCastWhereTheirTensorsWere) {
  Cluster cluster(2, worker0_casts);
  const at::Tensor input = thirds(0).requires_grad_();
  const at::Tensor plain = thirds(2).requires_grad_();
  const at::Tensor weight = at::rand({4, 6});
  const stitch::dist_autograd::Context context;
  const at::Tensor first = rpc_sync<same>("worker1", input);
  const at::Tensor second = rpc_sync<same>("worker1", plain);
  context.backward({(first * weight.to(device(0))).sum(), (second * weight.to(device(2))).sum()});
  const auto gradients = context.gradients();
  EXPECT_EQ(gradients.at(input).scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(gradients.at(input).cpu(), rounded(weight, at::kBFloat16)));
  EXPECT_TRUE(at::equal(gradients.at(plain).cpu(), weight));
  // A tensor and a gradient of each direction.
  EXPECT_EQ(count(cluster[0], "gpu.sent_cast"), 2);
  EXPECT_EQ(count(cluster[1], "gpu.sent_cast"), 2);
}

TEST(CastPlacement, TheMapsOfBothWorkersHaveTheirOwnCasts) {
  Cluster cluster(2, [](Options& options) {
    options.device_maps[options.rank == 0 ? "worker1" : "worker0"] = {
        {"cuda:0", options.rank == 0 ? "cuda:0/bf16" : "cuda:0/fp16"}};
  });
  const at::Tensor base = at::rand({5}).to(device(0));
  EXPECT_TRUE(
      at::equal(cluster[0].rpc_sync<same>("worker1", base).cpu(), rounded(base, at::kBFloat16)));
  EXPECT_TRUE(
      at::equal(cluster[1].rpc_sync<same>("worker0", base).cpu(), rounded(base, at::kHalf)));
}

TEST(CastPlacement, AnUnknownCastFailsInitAndNamesMapEntryAndText) {
  const auto error_with = [](const char* from, const char* to) {
    return error_of([&] {
      const Cluster cluster(1, [&](Options& options) {
        options.device_maps["worker0"] = {{from, to}};
      });
    });
  };
  EXPECT_TRUE(has_text(error_with("cuda:0", "cuda:1/int8"), ErrorCode::invalid_argument,
                       "device_maps of worker \"worker0\": entry \"cuda:0=cuda:1/int8\": \"/int8\" "
                       "is nothing that tensors are cast to on their way; known are /bf16 and "
                       "/fp16"));
  EXPECT_TRUE(has_text(error_with("cuda:0", "cuda:1/"), ErrorCode::invalid_argument, "\"/\" is"));
  EXPECT_TRUE(has_text(error_with("cuda:0", "cuda:1/bf16/fp16"), ErrorCode::invalid_argument,
                       "\"/bf16/fp16\" is nothing"));
  EXPECT_TRUE(has_text(error_with("cuda:0/bf16", "cuda:1"), ErrorCode::invalid_argument,
                       "entry \"cuda:0/bf16=cuda:1\": \"cuda:0/bf16\" is no device"));
  EXPECT_TRUE(has_text(error_with("cpu", "cpu/bf16"), ErrorCode::invalid_argument,
                       "entry \"cpu=cpu/bf16\": what stays on the CPU is not cast"));
  EXPECT_TRUE(has_text(error_with("cuda:0", "cuda:9/bf16"), ErrorCode::invalid_argument,
                       "(cuda:0=cuda:9/bf16) name cuda:9"));
}

TEST(CastPlacement, TheVariableAndTheInverseOfAMapKeepCasts) {
  setenv("STITCH_DEVICE_MAPS", "ps0:cuda:0=cuda:1/bf16,ps0:cpu=cuda:0/fp16", 1);
  Options options;
  options.rank = 0;
  options.world_size = 1;
  const auto maps = stitch::resolve_options(options).device_maps;
  unsetenv("STITCH_DEVICE_MAPS");
  const DeviceMap map(maps.at("ps0"));
  EXPECT_EQ(map.text(), "cpu=cuda:0/fp16, cuda:0=cuda:1/bf16");
  EXPECT_EQ(map.inverse().text(), "cuda:0=cpu/fp16, cuda:1=cuda:0/bf16");
  EXPECT_EQ(map.inverse().inverse().text(), map.text());
}

}  // namespace
}  // namespace placement_cast_test
