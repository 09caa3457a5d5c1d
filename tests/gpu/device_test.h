#pragma once

// The includes of tests with tensors on devices, and the names that they use.
#include <c10/core/StreamGuard.h>

#include "tests/gpu/device_tensors.h"
#include "tests/gpu/double_torch_device.h"
#include "tests/support/world_test.h"

namespace stitch::testing::device_names {

using namespace stitch::testing;  // NOLINT: as in each test
using dist_autograd::Context;
using rpc::DeviceMap;
using rpc::TransferSection;
using stitch::on;
using stitch::PlacedTensor;
namespace fake = testing::double_device;
namespace cuda_api = transport::gpu::cuda;

}  // namespace stitch::testing::device_names
