#pragma once

#include <memory>
#include <string>
#include <vector>

#include "stitch/transport/gpu/cuda_api.h"
#include "stitch/transport/gpu/kept_streams.h"
#include "stitch/transport/gpu/nccl_api.h"

namespace stitch::transport::gpu {

// CUDA and NCCL as this process has them: the tables of their functions, or why there are none.
// Looking for them never throws, so that programs start on hosts without a GPU. Constant once made;
// any thread may read it.
class GpuLibraries {
 public:
  // Which files are looked for, in this order; those that the process has already loaded first.
  struct Names {
    std::vector<std::string> driver = {"libcuda.so.1"};
    std::vector<std::string> runtime = {"libcudart.so.13", "libcudart.so.12"};
    std::vector<std::string> nccl = {"libnccl.so.2"};
  };
  // Oldest versions that will do.
  static constexpr int kOldestCuda = 12000;
  static constexpr int kOldestNccl = nccl::version_code(2, 26, 0);

  // The libraries of this process, looked for by the first call; while an Override lives, its.
  static const GpuLibraries& of_process();

  // Looks for the libraries. NCCL is looked for only where CUDA has a device. Nothing is put into
  // the environment: what NCCL reads there holds for all its users in the process.
  explicit GpuLibraries(const Names& names);
  // These tables; null: there is none, and `why_not` says why.
  GpuLibraries(const CudaApi* cuda, const NcclApi* nccl, const std::string& why_not);

  // Null where there is no usable CUDA device.
  [[nodiscard]] const CudaApi* cuda() const { return has_cuda_ ? &cuda_ : nullptr; }
  // Null where there is no usable NCCL, or no CUDA device.
  [[nodiscard]] const NcclApi* nccl() const { return has_nccl_ ? &nccl_ : nullptr; }
  // The streams that lanes over these libraries leave behind.
  [[nodiscard]] const std::shared_ptr<KeptStreams>& streams() const { return streams_; }
  // Why there is none: "no CUDA device: the library libcuda.so.1 is not there: ..."; empty when
  // there is one.
  [[nodiscard]] const std::string& why_no_cuda() const { return why_no_cuda_; }
  [[nodiscard]] const std::string& why_no_nccl() const { return why_no_nccl_; }
  // Makes of_process() return other tables while it lives; for tests. One at a time, made and
  // destroyed while no other thread uses the libraries.
  class Override {
   public:
    explicit Override(const GpuLibraries& libraries);
    ~Override();
    Override(const Override&) = delete;
    Override& operator=(const Override&) = delete;
  };

 private:
  void look_for_cuda(const Names& names);
  void look_for_nccl(const Names& names);

  CudaApi cuda_{};
  NcclApi nccl_{};
  const std::shared_ptr<KeptStreams> streams_ = std::make_shared<KeptStreams>();
  bool has_cuda_ = false, has_nccl_ = false;
  std::string why_no_cuda_, why_no_nccl_;
};

// "2.28.9" for 22809, "13.0" for 13000.
[[nodiscard]] std::string nccl_version_text(int version);
[[nodiscard]] std::string cuda_version_text(int version);

}  // namespace stitch::transport::gpu
