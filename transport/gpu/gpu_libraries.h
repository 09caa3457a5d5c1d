#pragma once

#include <memory>
#include <string>
#include <vector>

#include "stitch/transport/gpu/cuda_api.h"
#include "stitch/transport/gpu/nccl_api.h"

namespace stitch::transport::gpu {

class StreamPool;

// A shared library that was found at run time, and stays loaded until the process ends: CUDA and
// NCCL may not be unloaded. Copies name the same library. Thread contract: any thread.
class LoadedLibrary {
 public:
  // Finds the first of these files that the process has loaded already (a torch wheel brings its
  // own libraries), else the first that can be loaded. A library that is not loaded has a
  // why_not().
  static LoadedLibrary find(const std::vector<std::string>& names);

  [[nodiscard]] bool loaded() const { return handle_ != nullptr; }
  // The name that found the library, and its file.
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const std::string& path() const { return path_; }
  // "the library libnccl.so.2 is not there: <what the linker said>"; empty when it is loaded.
  [[nodiscard]] const std::string& why_not() const { return why_not_; }
  // Null when the library has no function of that name.
  [[nodiscard]] void* function(const char* name) const;

 private:
  void* handle_ = nullptr;
  std::string name_, path_;
  std::string why_not_ = "it was not looked for";
};

// Fills a table's functions by name, and notes the first name that the library lacks.
class TableFiller {
 public:
  explicit TableFiller(const LoadedLibrary& library) : library_(library) {}

  template <typename Function>
  void fill(Function*& entry, const char* name) {
    entry = reinterpret_cast<Function*>(library_.function(name));
    if (entry == nullptr && missing_.empty()) missing_ = name;
  }
  // Empty when all were there, else "<path> has no function <name>".
  [[nodiscard]] std::string why_not() const {
    return missing_.empty() ? "" : library_.path() + " has no function " + missing_;
  }

 private:
  const LoadedLibrary& library_;
  std::string missing_;
};

// CUDA and NCCL of this process: the tables of their functions, or the reasons for having none. The
// search throws nothing, so programs start on hosts without a GPU. Thread contract: constant once
// made; any thread.
class GpuLibraries {
 public:
  // The files of the search, in this order; files that the process has loaded already come first.
  struct Names {
    std::vector<std::string> driver = {"libcuda.so.1"};
    std::vector<std::string> runtime = {"libcudart.so.13", "libcudart.so.12"};
    std::vector<std::string> nccl = {"libnccl.so.2"};
  };
  // The oldest versions that stitch accepts.
  static constexpr int kOldestCuda = 12000;
  static constexpr int kOldestNccl = nccl::version_code(2, 26, 0);

  // The libraries of this process, found by the first call; those of an Override while it lives.
  static const GpuLibraries& of_process();

  // Finds the libraries; NCCL only where CUDA has a device. Sets no environment variable: NCCL
  // reads them for all its users in the process.
  explicit GpuLibraries(const Names& names);
  // Has these tables; `why_not` is the reason for a null one.
  GpuLibraries(const CudaApi* cuda, const NcclApi* nccl, const std::string& why_not);

  // Null where there is no usable CUDA device.
  [[nodiscard]] const CudaApi* cuda() const { return has_cuda_ ? &cuda_ : nullptr; }
  // Null where there is no usable NCCL, or no CUDA device.
  [[nodiscard]] const NcclApi* nccl() const { return has_nccl_ ? &nccl_ : nullptr; }
  // The streams of ended lanes over these libraries.
  [[nodiscard]] const std::shared_ptr<StreamPool>& streams() const { return streams_; }
  // "no CUDA device: the library libcuda.so.1 is not there: ..."; empty with a table.
  [[nodiscard]] const std::string& why_no_cuda() const { return why_no_cuda_; }
  [[nodiscard]] const std::string& why_no_nccl() const { return why_no_nccl_; }
  // Makes of_process() return other tables while it lives; for tests. REQUIRES: no other Override
  // lives, and no other thread uses the libraries while one is made or destroyed.
  class Override {
   public:
    explicit Override(const GpuLibraries& libraries);
    ~Override();
    Override(const Override&) = delete;
    Override& operator=(const Override&) = delete;
  };

 private:
  void find_cuda(const Names& names);
  void find_nccl(const Names& names);

  CudaApi cuda_{};
  NcclApi nccl_{};
  const std::shared_ptr<StreamPool> streams_;
  bool has_cuda_ = false, has_nccl_ = false;
  std::string why_no_cuda_, why_no_nccl_;
};

// "2.28.9" for 22809, "13.0" for 13000.
[[nodiscard]] std::string nccl_version_text(int version);
[[nodiscard]] std::string cuda_version_text(int version);

}  // namespace stitch::transport::gpu
