#pragma once

#include <cstddef>
#include <limits>

#include "stitch/transport/gpu/cuda_api.h"

namespace stitch::transport::gpu {

// The functions of NCCL that stitch uses, as a table: filled at run time from libnccl.so.2, or by
// the double of the tests. Declared as in NCCL 2.28; tests/gpu compares with NCCL's own header
// where that is installed. NCCL's documentation has the values and meanings.
namespace nccl {

enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};
struct CommTag;
using Comm = CommTag*;  // ncclComm_t
struct UniqueId {       // ncclUniqueId
  char internal[128];
};
enum DataType : int { kInt8 = 0 };

inline constexpr int kUndefinedInt = std::numeric_limits<int>::min();  // NCCL_CONFIG_UNDEF_INT
constexpr int version_code(int major, int minor, int patch) {
  return major * 10000 + minor * 100 + patch;
}

// ncclConfig_t of 2.28. A newer library reads as much as `size` says, an older one as much as it
// knows: NCCL adds fields at the end, and the fields that stitch sets are older than 2.26.
// Both ends of a communicator have one version all the same (path_choice.h).
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = static_cast<unsigned>(version_code(2, 28, 9));
  int blocking = kUndefinedInt;
  int cga_cluster_size = kUndefinedInt;
  int min_ctas = kUndefinedInt;
  int max_ctas = kUndefinedInt;
  const char* net_name = nullptr;
  int split_share = kUndefinedInt;
  int traffic_class = kUndefinedInt;
  const char* comm_name = nullptr;
  int collnet_enable = kUndefinedInt;
  int cta_policy = kUndefinedInt;
  int shrink_share = kUndefinedInt;
  int nvls_ctas = kUndefinedInt;
  int channels_per_net_peer = kUndefinedInt;
  int nvlink_centric_sched = kUndefinedInt;
};

}  // namespace nccl

// Thread contract: constant once filled. As NCCL says: calls on one communicator come from one
// thread at a time, and group_start() to group_end() is a matter of one thread.
struct NcclApi {
  nccl::Result (*get_version)(int* version);
  nccl::Result (*get_unique_id)(nccl::UniqueId* id);
  nccl::Result (*comm_init_rank_config)(nccl::Comm* comm, int ranks, nccl::UniqueId id, int rank,
                                        nccl::Config* config);
  nccl::Result (*comm_get_async_error)(nccl::Comm comm, nccl::Result* result);
  nccl::Result (*comm_abort)(nccl::Comm comm);
  nccl::Result (*send)(const void* memory, std::size_t count, nccl::DataType type, int peer,
                       nccl::Comm comm, cuda::Stream stream);
  nccl::Result (*recv)(void* memory, std::size_t count, nccl::DataType type, int peer,
                       nccl::Comm comm, cuda::Stream stream);
  nccl::Result (*group_start)();
  nccl::Result (*group_end)();
  const char* (*get_error_string)(nccl::Result result);
  const char* (*get_last_error)(nccl::Comm comm);  // null comm: of the process
};

}  // namespace stitch::transport::gpu

// The functions of NcclApi by the names that NCCL gives them: X(member, symbol).
#define STITCH_NCCL_FUNCTIONS(X)                   \
  X(get_version, ncclGetVersion)                   \
  X(get_unique_id, ncclGetUniqueId)                \
  X(comm_init_rank_config, ncclCommInitRankConfig) \
  X(comm_get_async_error, ncclCommGetAsyncError)   \
  X(comm_abort, ncclCommAbort)                     \
  X(send, ncclSend)                                \
  X(recv, ncclRecv)                                \
  X(group_start, ncclGroupStart)                   \
  X(group_end, ncclGroupEnd)                       \
  X(get_error_string, ncclGetErrorString)          \
  X(get_last_error, ncclGetLastError)
