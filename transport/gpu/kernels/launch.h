#pragma once

#include <cuda_runtime_api.h>

// What the launchers share. For the .cu files only.
namespace stitch::transport::gpu::kernels {

// Makes `device` the calling thread's current device until the end of the scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    status_ = cudaGetDevice(&before_);
    if (status_ == cudaSuccess && before_ != device) {
      status_ = cudaSetDevice(device);
      changed_ = status_ == cudaSuccess;
    }
  }
  ~DeviceScope() {
    if (changed_) (void)cudaSetDevice(before_);
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
