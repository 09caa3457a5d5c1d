// Tensors that travel as a narrower type from device to device, by each path, over the double of
// CUDA and NCCL: what arrives depends on no path.
#include "tests/gpu/device_test.h"

namespace direct_cast_test {  // its functions are registered under their full names
namespace {

using namespace stitch::testing::device_names;  // NOLINT

std::vector<at::Tensor> all_same(std::vector<at::Tensor> tensors) { return tensors; }

// Small ones, packed; a large one; strided, expanded; others than floats.
std::vector<at::Tensor> samples() {
  at::manual_seed(11);
  const at::Tensor matrix = at::randn({300, 400});
  std::vector<at::Tensor> tensors{matrix,
                                  matrix.t(),
                                  matrix.slice(1, 0, 400, 3),
                                  at::randn({700'000}),
                                  at::randn({900, 800}).t(),
                                  at::randn({1, 600'000}).expand({3, 600'000}),
                                  at::randn({40}, at::kDouble),
                                  at::arange(70'000),
                                  at::randn({50}).to(at::kHalf)};
  for (at::Tensor& tensor : tensors) tensor = tensor.to(device(0));
  return tensors;
}

void expect_cast(const std::vector<at::Tensor>& results, const std::vector<at::Tensor>& tensors,
                 at::ScalarType type) {
  ASSERT_EQ(results.size(), tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const bool is_float = tensors[i].scalar_type() == at::kFloat;
    EXPECT_EQ(results[i].scalar_type(), tensors[i].scalar_type()) << i;
    EXPECT_EQ(results[i].device(), device(0)) << i;
    const at::Tensor expected = is_float ? rounded(tensors[i], type) : tensors[i].cpu();
    EXPECT_TRUE(at::equal(results[i].cpu(), expected)) << i;
    EXPECT_TRUE(!is_float || !at::equal(expected, tensors[i].cpu())) << "nothing to round: " << i;
  }
}

struct Way {
  const char* path;
  bool apart;          // processes of their own
  const char* device;  // of worker 1
};
void PrintTo(const Way& way, std::ostream* out) { *out << way.path; }

class DirectCastsBy : public ::testing::TestWithParam<Way> {};

TEST_P(DirectCastsBy, ArriveRoundedOnce) {
  const Way& way = GetParam();
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    fake::workers_are_processes(way.apart);
    Cluster cluster(2, [&](Options& options) {
      if (options.rank == 0) {
        options.device_maps["worker1"] = {
            {"cuda:0", std::string(way.device) + (type == at::kHalf ? "/fp16" : "/bf16")}};
      }
    });
    const std::string name = std::string("gpu.sent_messages.") + way.path + ".worker1.cuda:0";
    const auto tensors = samples();
    ASSERT_TRUE(eventually([&] {
      const auto before = count(cluster[0], name);
      expect_cast(rpc_sync<all_same>("worker1", tensors), tensors, type);
      return HasFailure() || (all_is_counted(cluster[0]) && count(cluster[0], name) > before);
    }));
    EXPECT_GE(count(cluster[0], "gpu.sent_cast"), 6);
    EXPECT_EQ(count(cluster[0], "gpu.sent_cast"), count(cluster[0], "gpu.received_cast"));
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, DirectCastsBy,
                         ::testing::Values(Way{"local", false, "cuda:0"},
                                           Way{"peer", false, "cuda:1"},
                                           Way{"staging", true, "cuda:1"},
                                           Way{"nccl", true, "cuda:1"}),
                         [](const auto& info) { return std::string(info.param.path); });

TEST(DirectCasts, AreHandedOverRoundedAndTheirSenderKeepsWhatItHas) {
  Cluster cluster(1, [](Options& options) {
    options.device_maps["worker0"] = {{"cuda:0", "cuda:0/bf16"}};
  });
  const at::Tensor tensor = at::randn({700'000}).to(device(0));
  const at::Tensor before = tensor.cpu();
  const auto results = rpc_sync<all_same>("worker0", std::vector{tensor});
  expect_cast(results, {tensor}, at::kBFloat16);
  EXPECT_TRUE(at::equal(tensor.cpu(), before));
}

TEST(DirectCasts, ArePackedAndTakeHalfTheBytes) {
  Cluster cluster(2, [](Options& options) {
    if (options.rank == 0) options.device_maps["worker1"] = {{"cuda:0", "cuda:1/bf16"}};
  });
  const std::vector<at::Tensor> tensors{at::randn({50'000}).to(device(0)),
                                        at::randn({200, 250}).to(device(0)).t()};
  expect_cast(rpc_sync<all_same>("worker1", tensors), tensors, at::kBFloat16);
  ASSERT_TRUE(all_is_counted(cluster[0]));
  std::int64_t bytes = 0;
  for (const char* const path : {"staging", "peer"})
    bytes += count(cluster[0], std::string("gpu.sent_bytes.") + path + ".worker1.cuda:0");
  const auto packed = [](std::int64_t elements) { return (2 * elements + 255) / 256 * 256; };
  EXPECT_EQ(bytes, 2 * packed(50'000));
}

}  // namespace
}  // namespace direct_cast_test
