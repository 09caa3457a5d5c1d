#include "stitch/rpc/gpu/device_gate.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <new>
#include <string>

#include "stitch/rpc/gpu/on_device.h"

namespace stitch::rpc {

Error device_error(const std::string& what, const std::exception& exception) {
  const auto* const from_torch = dynamic_cast<const c10::Error*>(&exception);
  const std::string text =
      from_torch != nullptr ? from_torch->what_without_backtrace() : exception.what();
  const bool memory = dynamic_cast<const std::bad_alloc*>(&exception) != nullptr ||
                      text.find("out of memory") != std::string::npos;
  return Error(memory ? ErrorCode::overloaded : ErrorCode::internal, what + ": " + text);
}

void DeviceGate::add(const c10::Stream& stream) {
  on_device(stream.device(), [&] {
    if (c10::impl::VirtualGuardImpl(stream.device_type()).queryStream(stream)) return;
    marks_.emplace_back(stream);
  });
}

void DeviceGate::add_all(const StreamSet& streams) {
  for (const auto& stream : streams.streams()) add(stream);
}

bool DeviceGate::open() {
  while (!marks_.empty()) {
    const bool happened = on_device(marks_.back().device(), [this] {
      if (!marks_.back().query()) return false;
      marks_.pop_back();
      return true;
    });
    if (!happened) return false;
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
