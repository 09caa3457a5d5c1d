#pragma once

#include <cuda_runtime_api.h>

// What the launchers share. For the .cu files only.
namespace stitch::transport::gpu::kernels {

// Makes `device` the calling thread's current device until the end of the scope. CUDA notes the
// last error of a thread until it is asked for: what calls before the scope have left would be
// taken for an error of a launch in it, and what fails in it, which its caller is told, for one of
// calls after it. So no note is there at the beginning, and none is left at the end.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    (void)cudaGetLastError();
    status_ = cudaGetDevice(&before_);
    if (status_ == cudaSuccess && before_ != device) {
      status_ = cudaSetDevice(device);
      changed_ = status_ == cudaSuccess;
    }
  }
  ~DeviceScope() {
    if (changed_) (void)cudaSetDevice(before_);
    (void)cudaGetLastError();
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

  // A cudaError_t.
  int status() const { return status_; }

 private:
  int before_ = 0;
  cudaError_t status_ = cudaSuccess;
  bool changed_ = false;
};

// Each file of kernels loads its own; returns a cudaError_t.
int load_pack_kernels();
int load_sparse_kernels();

}  // namespace stitch::transport::gpu::kernels
