#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <string>
#include <vector>

#include "tests/gpu/double/fake_gpu.h"

// CUDA devices for a libtorch without CUDA, whose memory and streams are those of the double of
// CUDA and NCCL: so that tensors can be sent by device transfers on the CPU, and each access that
// no stream, no event and nothing the host has seen puts in order is a violation. What libtorch
// computes runs on the CPU, in a kernel of the current stream, and is waited for; copies and fills
// are queued. Memory that is freed goes back when the work of its stream, and of the streams that
// recordDataPtrOnStream() has named, has ended: work of any other is a violation then.
//
// Autograd works in stitch's executor alone. Thread contract: any thread, unless said otherwise.
namespace stitch::testing::double_device {

inline constexpr int kDevices = 4;

// Registers cuda:0 to cuda:<kDevices-1>, and the double as this process's CUDA and NCCL. Without
// `transfers` there is no bridge to its streams, so that tensors go through the message and host
// memory. What a test does that nothing puts in order fails it. To be called before anything else:
// by a namespace-scope variable of the test.
bool install(bool transfers = true);
[[nodiscard]] transport::gpu::test::FakeGpu& gpu();

// Each worker passes for a process of its own from now on, maybe on a host of its own; or again, as
// at the end of each test, for one of this process.
void workers_are_processes(bool apart, bool on_hosts = false);
// Queues on the current stream of its device: fills a float tensor with `value`, once `gate` (0:
// none) is open.
void fill_later(const at::Tensor& tensor, float value, int gate = 0);
// Stops a stream, or all of a device, while it lives: what is queued there from now on waits.
class Hold {
 public:
  explicit Hold(const c10::Stream& stream);
  explicit Hold(c10::Device device);
  ~Hold();
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  // Lets them go on now.
  void release();

 private:
  const int gate_;
};
[[nodiscard]] c10::Stream current_stream(c10::Device device);
[[nodiscard]] c10::Stream default_stream(c10::Device device);
[[nodiscard]] c10::Stream pool_stream(c10::Device device);
// Whether work of a device waits behind a Hold.
[[nodiscard]] bool has_queued_work(c10::Device device);
// The streams that recordDataPtrOnStream() has named for the tensor's memory.
[[nodiscard]] std::vector<c10::Stream> recorded_streams(const at::Tensor& tensor);
// From now on everything on the device fails as after an illegal access, until heal().
void break_device(int index);
void heal();
// The next `count` allocations of tensors fail for want of memory.
void fail_allocations(int count);
// What was done wrong since the last call, with the seed.
[[nodiscard]] std::string take_violations();

}  // namespace stitch::testing::double_device
