#include "stitch/rpc/gpu/device_gate.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <new>
#include <string>

#include "stitch/transport/gpu/gpu_libraries.h"
#include "stitch/transport/gpu/relaxed_capture.h"

namespace stitch::rpc {

namespace {

// Gates are asked on whatever thread calls, answers or reads.
const transport::gpu::CudaApi* cuda_of_process() noexcept {
  return transport::gpu::GpuLibraries::of_process().cuda();
}

}  // namespace

Error device_error(const std::string& what, const std::exception& exception) {
  const auto* const from_torch = dynamic_cast<const c10::Error*>(&exception);
  const std::string text =
      from_torch != nullptr ? from_torch->what_without_backtrace() : exception.what();
  const bool memory = dynamic_cast<const std::bad_alloc*>(&exception) != nullptr ||
                      text.find("out of memory") != std::string::npos;
  return Error(memory ? ErrorCode::overloaded : ErrorCode::internal, what + ": " + text);
}

void DeviceGate::add(const c10::Stream& stream) {
  const transport::gpu::RelaxedCapture relaxed(cuda_of_process());
  try {
    // On its device: a thread that has none would create a context on the first one.
    const c10::DeviceGuard on(stream.device());
    if (c10::impl::VirtualGuardImpl(stream.device_type()).queryStream(stream)) return;
    marks_.emplace_back(stream);
  } catch (const std::exception& exception) {
    throw device_error("device " + stream.device().str() + " has failed", exception);
  }
}

void DeviceGate::add_all(const StreamSet& streams) {
  for (const auto& stream : streams.streams()) add(stream);
}

bool DeviceGate::open() {
  if (marks_.empty()) return true;  // there may be no CUDA, which need not be looked for
  const transport::gpu::RelaxedCapture relaxed(cuda_of_process());
  while (!marks_.empty()) {
    try {
      if (!marks_.back().query()) return false;
      marks_.pop_back();
    } catch (const std::exception& exception) {
      throw device_error("device " + marks_.back().device().str() + " has failed", exception);
    }
  }
  return true;
}

bool DeviceGate::opens_within(std::chrono::microseconds time) {
  if (open()) return true;
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) {
    if (open()) return true;
  }
  return false;
}

}  // namespace stitch::rpc
