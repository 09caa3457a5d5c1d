#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// What the programs of this folder need of CUDA, with errors as exceptions.
namespace stitch::transport::gpu {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// Memory on the current device, freed at the end of the scope.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::uint64_t bytes) : bytes_(bytes) {
    check_cuda(cudaMalloc(&memory_, bytes > 0 ? bytes : 1), "cudaMalloc");
  }
  template <class T>
  explicit DeviceMemory(const std::vector<T>& values) : DeviceMemory(values.size() * sizeof(T)) {
    set(values.data(), bytes_);
  }
  ~DeviceMemory() {
    if (memory_ != nullptr) (void)cudaFree(memory_);
  }
  DeviceMemory(DeviceMemory&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)), bytes_(other.bytes_) {}
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  DeviceMemory& operator=(DeviceMemory&&) = delete;

  [[nodiscard]] void* get() const { return memory_; }
  [[nodiscard]] std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(memory_); }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }

  void set(const void* from, std::uint64_t bytes) {
    check_cuda(cudaMemcpy(memory_, from, bytes, cudaMemcpyHostToDevice), "copy to the device");
  }
  void get(void* to, std::uint64_t bytes) const {
    check_cuda(cudaMemcpy(to, memory_, bytes, cudaMemcpyDeviceToHost), "copy from the device");
  }
  template <class T>
  [[nodiscard]] std::vector<T> values() const {
    std::vector<T> all(bytes_ / sizeof(T));
    get(all.data(), bytes_);
    return all;
  }

 private:
  void* memory_ = nullptr;
  std::uint64_t bytes_;
};

class Stream {
 public:
  Stream() {
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "create a stream");
  }
  ~Stream() { (void)cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  [[nodiscard]] cudaStream_t get() const { return stream_; }
  void wait() const { check_cuda(cudaStreamSynchronize(stream_), "wait for the stream"); }

 private:
  cudaStream_t stream_ = nullptr;
};

// The median time of `rounds` runs on the stream, in seconds, after two that do not count.
template <class Run>
double median_seconds(const Stream& stream, int rounds, Run&& run) {
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check_cuda(cudaEventCreate(&begin), "create an event");
  check_cuda(cudaEventCreate(&end), "create an event");
  std::vector<double> seconds;
  for (int i = -2; i < rounds; ++i) {
    check_cuda(cudaEventRecord(begin, stream.get()), "record an event");
    run();
    check_cuda(cudaEventRecord(end, stream.get()), "record an event");
    check_cuda(cudaEventSynchronize(end), "wait for an event");
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, begin, end), "time between events");
    if (i >= 0) seconds.push_back(static_cast<double>(milliseconds) / 1000);
  }
  (void)cudaEventDestroy(begin);
  (void)cudaEventDestroy(end);
  auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
}

}  // namespace stitch::transport::gpu
