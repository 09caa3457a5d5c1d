// Compares the declarations of nccl_api.h with NCCL's own header, almost all at compile time. Built
// where the toolkit is installed.
#include <gtest/gtest.h>
#include <nccl.h>

#include <cstddef>

#include "stitch/transport/gpu/nccl_api.h"
#include "tests/gpu/called_alike.h"

namespace stitch::transport::gpu::test::nccl_abi_test {
namespace {

#define STITCH_SAME(member, symbol) \
  static_assert(called_alike<decltype(NcclApi::member), decltype(&symbol)>, #symbol);
STITCH_NCCL_FUNCTIONS(STITCH_SAME)
#undef STITCH_SAME
static_assert(static_cast<int>(nccl::kSuccess) == ncclSuccess);
static_assert(static_cast<int>(nccl::kUnhandledCudaError) == ncclUnhandledCudaError);
static_assert(static_cast<int>(nccl::kSystemError) == ncclSystemError);
static_assert(static_cast<int>(nccl::kInternalError) == ncclInternalError);
static_assert(static_cast<int>(nccl::kInvalidArgument) == ncclInvalidArgument);
static_assert(static_cast<int>(nccl::kInvalidUsage) == ncclInvalidUsage);
static_assert(static_cast<int>(nccl::kRemoteError) == ncclRemoteError);
static_assert(static_cast<int>(nccl::kInProgress) == ncclInProgress);
static_assert(static_cast<int>(nccl::kInt8) == ncclInt8);
static_assert(sizeof(nccl::UniqueId) == sizeof(ncclUniqueId));
static_assert(nccl::version_code(2, 28, 9) == NCCL_VERSION(2, 28, 9));
static_assert(nccl::kUndefinedInt == NCCL_CONFIG_UNDEF_INT);

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0) && NCCL_VERSION_CODE < NCCL_VERSION(2, 29, 0)
static_assert(sizeof(nccl::Config) == sizeof(ncclConfig_t));
#endif
// A later NCCL may append fields, never move those.
#define STITCH_AT(own, theirs) \
  static_assert(offsetof(nccl::Config, own) == offsetof(ncclConfig_t, theirs), #theirs);
STITCH_AT(size, size)
STITCH_AT(magic, magic)
STITCH_AT(version, version)
STITCH_AT(blocking, blocking)
STITCH_AT(cga_cluster_size, cgaClusterSize)
STITCH_AT(min_ctas, minCTAs)
STITCH_AT(max_ctas, maxCTAs)
STITCH_AT(net_name, netName)
STITCH_AT(split_share, splitShare)
STITCH_AT(traffic_class, trafficClass)
STITCH_AT(comm_name, commName)
STITCH_AT(collnet_enable, collnetEnable)
STITCH_AT(cta_policy, CTAPolicy)
STITCH_AT(shrink_share, shrinkShare)
STITCH_AT(nvls_ctas, nvlsCTAs)
STITCH_AT(channels_per_net_peer, nChannelsPerNetPeer)
STITCH_AT(nvlink_centric_sched, nvlinkCentricSched)
#undef STITCH_AT

TEST(GpuAbi, AFreshConfigIsWhatNcclsInitializerMakes) {
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  const nccl::Config own;
  EXPECT_EQ(own.magic, theirs.magic);
  EXPECT_EQ(own.blocking, theirs.blocking);
  EXPECT_EQ(own.max_ctas, theirs.maxCTAs);
  EXPECT_EQ(own.net_name, theirs.netName);
  EXPECT_EQ(own.comm_name, theirs.commName);
  EXPECT_EQ(own.nvlink_centric_sched, theirs.nvlinkCentricSched);
}

}  // namespace
}  // namespace stitch::transport::gpu::test::nccl_abi_test
