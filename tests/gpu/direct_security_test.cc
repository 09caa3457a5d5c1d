// With a secret no bytes of devices leave the host unsealed: transfers do not go by NCCL. Over the
// double of CUDA and NCCL.
#include <cstdlib>

#include "tests/gpu/device_test.h"

namespace direct_security_test {  // its functions are registered under their full names
namespace {

using stitch::Encryption;
using namespace stitch::testing::device_names;  // NOLINT

at::Tensor twice(const at::Tensor& tensor) { return tensor * 2; }

class DirectSecurity : public ::testing::Test {
 protected:
  ~DirectSecurity() override { ::unsetenv("STITCH_INSECURE"); }
  // Calls of two such workers: until one has gone by NCCL, or many that all go by staging.
  static void expect_nccl(bool expected, const std::string& secret, std::optional<Encryption> how,
                          bool on_hosts = true) {
    fake::workers_are_processes(true, on_hosts);
    Cluster cluster(2, [&](Options& options) {
      if (!secret.empty()) options.secret = secret;
      options.encryption = how;
      worker0_maps(options);
    });
    const auto call = [] {
      const at::Tensor tensor = filled(0, 3, {300'000});
      EXPECT_TRUE(holds(rpc_sync<twice>("worker1", tensor), 0, 6));
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
}

TEST_F(DirectSecurity, WhereNothingIsSealedTheyDo) {
  expect_nccl(true, "", std::nullopt);
  expect_nccl(true, "a secret of the job", Encryption::off);
  ::setenv("STITCH_INSECURE", "1", 1);
  expect_nccl(true, "a secret of the job", Encryption::on);
}

}  // namespace
}  // namespace direct_security_test
