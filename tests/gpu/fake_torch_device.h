#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

// CUDA devices for a libtorch without CUDA: memory is the host's, streams are queues. What libtorch
// computes on such a tensor runs on the CPU, after what is queued on the current stream of its
// device; copies are queued like a GPU's, and run late where a test says so. So code that reads
// what has not been written, or frees what is still used, is found without a GPU.
//
// Autograd works in stitch's executor (libtorch's own engine has no thread for these devices).
// Thread contract: any thread, unless said otherwise.
namespace stitch::testing::fake_device {

inline constexpr int kDevices = 4;

// Registers devices cuda:0 to cuda:<kDevices-1>. To be called once, before any other use and before
// any worker starts: by a namespace-scope variable of the test.
bool install();

// Stops streams while it lives: what is queued on them waits. Those that were created with it, or
// all of a device.
class Hold {
 public:
  explicit Hold(c10::Stream stream);
  explicit Hold(c10::Device device);  // all of its streams
  ~Hold();
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  // Lets them go on now.
  void release();

 private:
  const c10::Device device_;
  const std::int64_t stream_;  // kAll: every one
  bool held_ = true;
};

// Has every stream of every device run its work later, on a thread of the fake, one piece at a time
// in an order drawn from `seed`, while it lives.
class Lag {
 public:
  explicit Lag(std::uint64_t seed);
  ~Lag();
  Lag(const Lag&) = delete;
  Lag& operator=(const Lag&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

[[nodiscard]] c10::Stream current_stream(c10::Device device);
[[nodiscard]] c10::Stream default_stream(c10::Device device);
// Another one than the default stream.
[[nodiscard]] c10::Stream pool_stream(c10::Device device);
// Queues on the current stream of its device: fills a float tensor with `value`.
void fill_later(const at::Tensor& tensor, float value);
// Whether work is queued on any stream of the device.
[[nodiscard]] bool has_queued_work(c10::Device device);

// The streams that recordDataPtrOnStream() has named for the tensor's memory.
[[nodiscard]] std::vector<c10::Stream> recorded_streams(const at::Tensor& tensor);
// The stream that was current when the tensor's memory was allocated.
[[nodiscard]] c10::Stream allocation_stream(const at::Tensor& tensor);
// Uses of memory that had been freed by then, since the last call: work on a stream that neither
// the memory was allocated on nor recordDataPtrOnStream() had named.
[[nodiscard]] std::vector<std::string> take_violations();

// The devices that a thread has made current since the last call in a way that creates a context,
// without having been on them.
[[nodiscard]] std::vector<int> take_contexts();

// The next `count` allocations on devices fail for want of memory.
void fail_allocations(int count);
// From now on everything on the device fails as after an illegal access, until heal().
void break_device(int index);
void heal();

}  // namespace stitch::testing::fake_device
