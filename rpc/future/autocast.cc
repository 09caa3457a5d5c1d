#include "stitch/rpc/future/autocast.h"

#include <ATen/autocast_mode.h>
#include <c10/core/DeviceType.h>

#include <exception>
#include <string>

#include "stitch/base/error.h"

// Libtorch has one set of functions for all kinds of devices, or one for each kind. Which one is
// asked for, versions are not. What is not declared there is found here, and never called. A global
// namespace: one within stitch would hide libtorch's functions.
namespace not_in_this_libtorch {
template <class = void>
bool is_enabled();
template <class = void>
bool is_cpu_enabled();
template <class = void>
void set_enabled(bool);
template <class = void>
void set_cpu_enabled(bool);
template <class = void>
c10::ScalarType get_autocast_gpu_dtype();
template <class = void>
c10::ScalarType get_autocast_cpu_dtype();
template <class = void>
void set_autocast_gpu_dtype(c10::ScalarType);
template <class = void>
void set_autocast_cpu_dtype(c10::ScalarType);
}  // namespace not_in_this_libtorch

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace stitch::rpc {

namespace {

using namespace at::autocast;          // NOLINT: lookup must find either kind
using namespace not_in_this_libtorch;  // NOLINT

// Templates, because `requires` tests only dependent expressions softly.
template <class Device>
bool enabled_on(Device device) {
  if constexpr (requires { is_autocast_enabled(device); }) {
    return is_autocast_enabled(device);
  } else {
    return device == c10::kCUDA ? is_enabled() : is_cpu_enabled();
  }
}

template <class Device>
c10::ScalarType dtype_on(Device device) {
  if constexpr (requires { get_autocast_dtype(device); }) {
    return get_autocast_dtype(device);
  } else {
    return device == c10::kCUDA ? get_autocast_gpu_dtype() : get_autocast_cpu_dtype();
  }
}

template <class Device>
void set_on(Device device, bool enabled, c10::ScalarType dtype) {
  if constexpr (requires { set_autocast_enabled(device, enabled); }) {
    set_autocast_enabled(device, enabled);
    set_autocast_dtype(device, dtype);
  } else if (device == c10::kCUDA) {
    set_enabled(enabled);
    set_autocast_gpu_dtype(dtype);
  } else {
    set_cpu_enabled(enabled);
    set_autocast_cpu_dtype(dtype);
  }
}

std::string name_of(const std::optional<c10::ScalarType>& dtype) {
  return dtype ? c10::toString(*dtype) : "nothing";
}

std::optional<c10::ScalarType> state_on(c10::DeviceType device) {
  return enabled_on(device) ? std::optional(dtype_on(device)) : std::nullopt;
}

}  // namespace

Autocast Autocast::current() { return {state_on(c10::kCPU), state_on(c10::kCUDA)}; }

AutocastScope::AutocastScope(const Autocast& autocast)
    : cpu_{enabled_on(c10::kCPU), dtype_on(c10::kCPU)},
      cuda_{enabled_on(c10::kCUDA), dtype_on(c10::kCUDA)},
      cache_(is_autocast_cache_enabled()) {
  try {
    set_on(c10::kCPU, autocast.cpu.has_value(), autocast.cpu.value_or(cpu_.dtype));
    set_on(c10::kCUDA, autocast.cuda.has_value(), autocast.cuda.value_or(cuda_.dtype));
  } catch (...) {
    restore();
    throw Error(ErrorCode::invalid_argument,
                "autocast to " + name_of(autocast.cpu) + " on the CPU and " +
                    name_of(autocast.cuda) +
                    " on CUDA devices: " + to_error(std::current_exception()).what());
  }
  set_autocast_cache_enabled(false);
}

AutocastScope::~AutocastScope() { restore(); }

void AutocastScope::restore() noexcept {
  set_on(c10::kCPU, cpu_.enabled, cpu_.dtype);
  set_on(c10::kCUDA, cuda_.enabled, cuda_.dtype);
  set_autocast_cache_enabled(cache_);
}

}  // namespace stitch::rpc

#pragma GCC diagnostic pop
