// With a secret no bytes of devices leave the host unsealed: transfers do not go by NCCL. Over the
// double of CUDA and NCCL.
#include <cstdlib>

#include "tests/gpu/double_torch_device.h"
#include "tests/support/world_test.h"

namespace direct_security_test {  // its functions are registered under their full names
namespace {

using stitch::Encryption;
using stitch::Options;
using stitch::rpc_sync;
using stitch::testing::Cluster;
using stitch::testing::eventually;
namespace fake = stitch::testing::double_device;

at::Tensor twice(const at::Tensor& tensor) { return tensor * 2; }

std::int64_t count(stitch::Worker& worker, const std::string& key) {
  const auto numbers = worker.debug_info();
  const auto found = numbers.find(key);
  return found == numbers.end() ? 0 : found->second;
}

class DirectSecurity : public ::testing::Test {
 protected:
  void TearDown() override {
    ::unsetenv("STITCH_INSECURE");
    fake::workers_are_processes(false);
    EXPECT_EQ(fake::take_violations(), "");
  }
  // Calls of two such workers: until one has gone by NCCL, or many that all go by staging.
  static void expect_nccl(bool expected, const std::string& secret, std::optional<Encryption> how,
                          bool on_hosts = true) {
    fake::workers_are_processes(true, on_hosts);
    Cluster cluster(2, [&](Options& options) {
      options.secret = secret;
      options.encryption = how;
      if (options.rank == 0) options.device_maps["worker1"] = {{"cuda:0", "cuda:1"}};
    });
    const auto call = [] {
      const at::Tensor tensor =
          at::full({300'000}, 3, at::TensorOptions(at::kFloat).device("cuda:0"));
      EXPECT_TRUE(at::all(rpc_sync<twice>("worker1", tensor).cpu() == 6).item<bool>());
    };
    const auto opened = fake::gpu().calls("nccl_comm_init_rank_config");
    const std::string sent = "gpu.sent_messages.";
    if (expected) {
      EXPECT_TRUE(eventually([&] {
        call();
        return count(cluster[0], sent + "nccl.worker1.cuda:0") > 0;
      }));
      return;
    }
    constexpr int kCalls = 30;
    for (int i = 0; i < kCalls; ++i) call();
    EXPECT_EQ(count(cluster[0], sent + "staging.worker1.cuda:0"), kCalls);
    EXPECT_EQ(fake::gpu().calls("nccl_comm_init_rank_config"), opened);
  }
};

TEST_F(DirectSecurity, WithASecretTensorsGoByNcclWithinAHost) {
  expect_nccl(true, "a secret of the job", std::nullopt, false);
}

TEST_F(DirectSecurity, WithASecretTensorsDoNotGoByNcclFromHostToHost) {
  expect_nccl(false, "a secret of the job", std::nullopt);
  expect_nccl(false, "a secret of the job", Encryption::integrity);
}

TEST_F(DirectSecurity, WhereNothingIsSealedTheyDo) {
  expect_nccl(true, "", std::nullopt);
  expect_nccl(true, "a secret of the job", Encryption::off);
  ::setenv("STITCH_INSECURE", "1", 1);
  expect_nccl(true, "a secret of the job", Encryption::on);
}

}  // namespace
}  // namespace direct_security_test
