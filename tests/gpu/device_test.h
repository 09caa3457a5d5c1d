#pragma once

// The includes of tests with tensors on devices, and the names that they use.
#include <c10/core/StreamGuard.h>

#include "tests/gpu/device_tensors.h"
#include "tests/gpu/double_torch_device.h"
#include "tests/support/world_test.h"

namespace stitch::testing::device_names {

using namespace std::chrono_literals;  // NOLINT: as in each test
using dist_autograd::Context;
using rpc::DeviceMap;
using rpc::TransferSection;
using stitch::Error;
using stitch::ErrorCode;
using stitch::Future;
using stitch::on;
using stitch::Options;
using stitch::PlacedTensor;
using stitch::rpc_async;
using stitch::rpc_sync;
using stitch::RRef;
using testing::all_are;
using testing::all_is_counted;
using testing::Cluster;
using testing::count;
using testing::device;
using testing::error_of;
using testing::eventually;
using testing::filled;
using testing::has_text;
using testing::holds;
using testing::rounded;
using testing::worker0_maps;
namespace fake = testing::double_device;
namespace cuda_api = transport::gpu::cuda;

}  // namespace stitch::testing::device_names
