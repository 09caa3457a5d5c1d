// The devices of device/calls_check.cc: the double of CUDA.
#include "tests/gpu/device/calls_check.h"
#include "tests/gpu/double_torch_device.h"
#include "tests/support/sanitizers.h"

namespace stitch::gpu_check {

namespace double_device = stitch::testing::double_device;

namespace {

[[maybe_unused]] const bool installed = double_device::install();

}  // namespace

std::string set_up_devices() { return {}; }
int device_count() { return double_device::kDevices; }
bool has_local_engine() { return false; }
c10::Stream pool_stream(at::Device device) { return double_device::pool_stream(device); }
void delay(at::Device) {}  // the double's operations take a time that its seed chooses
int default_trials() { return testing::kAddressSanitizer || testing::kThreadSanitizer ? 15 : 60; }
int default_programs() { return testing::kAddressSanitizer || testing::kThreadSanitizer ? 4 : 20; }
std::optional<std::int64_t> reserved_bytes() { return std::nullopt; }
std::string take_violations() { return double_device::take_violations(); }

}  // namespace stitch::gpu_check
