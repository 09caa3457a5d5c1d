#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <string>

#include "tests/gpu/double/fake_gpu.h"

// CUDA devices for a libtorch without CUDA, whose memory and streams are those of the double of
// CUDA and NCCL: so that tensors can be sent by device transfers on the CPU, and each access that
// no stream, no event and nothing the host has seen puts in order is a violation. What libtorch
// computes runs on the CPU, in a kernel of the current stream, and is waited for; copies and fills
// are queued. Memory that is freed goes back when the work of its stream, and of the streams that
// recordDataPtrOnStream() has named, has ended: work of any other is a violation then.
//
// Processes that are given one folder as GPU_DOUBLE_MEETING pass for processes on one machine:
// those devices are the same in each.
//
// Autograd works in stitch's executor alone. Thread contract: any thread, unless said otherwise.
namespace stitch::testing::double_device {

inline constexpr int kDevices = 3;

// Registers cuda:0 to cuda:<kDevices-1>, and the double as this process's CUDA and NCCL. To be
// called once, before anything else: by a namespace-scope variable of the test.
bool install();
[[nodiscard]] transport::gpu::test::FakeGpu& gpu();

// Each worker passes for a process of its own from now on, maybe on a host of its own, or again for
// one of this process.
void workers_are_processes(bool apart, bool on_hosts = false);
// Queues on the current stream of its device: fills a float tensor with `value`, once `gate` (0:
// none) is open.
void fill_later(const at::Tensor& tensor, float value, int gate = 0);
// Queues a kernel on that stream that ends once `gate` is open.
void hold(const c10::Stream& stream, int gate);
[[nodiscard]] c10::Stream pool_stream(c10::Device device);
// The next `count` allocations of tensors fail for want of memory.
void fail_allocations(int count);
// What was done wrong since the last call, with the seed.
[[nodiscard]] std::string take_violations();

}  // namespace stitch::testing::double_device
