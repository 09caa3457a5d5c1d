// What runs under default streams comes after what the program has queued on its own, and before
// what it queues there next. Over fake devices.
#include <c10/core/StreamGuard.h>

#include "stitch/rpc/default_streams.h"
#include "tests/gpu/device_tensors.h"
#include "tests/gpu/fake_torch_device.h"
#include "tests/support/world_test.h"

namespace default_streams_test {  // its functions are registered under their full names
namespace {

using namespace std::chrono_literals;
using stitch::rpc_async;
using stitch::RRef;
using stitch::testing::all_are;
using stitch::testing::Cluster;
using stitch::testing::device;
using stitch::testing::filled;
namespace fake = stitch::testing::fake_device;

class DefaultStreams : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_TRUE(fake::take_violations().empty()); }
};

TEST_F(DefaultStreams, WaitForWhatTheCurrentOneHas) {
  const at::Tensor written = filled(1, 1, {8});
  at::Tensor read = filled(1, 2, {8});
  const c10::Stream own = fake::pool_stream(device(1));
  {
    const fake::Hold hold(own);
    {
      const c10::StreamGuard guard(own);
      fake::fill_later(written, 5);
      stitch::rpc::default_streams_wait_for_current();
    }
    read.copy_(written, /*non_blocking=*/true);
    EXPECT_TRUE(fake::has_queued_work(device(1)));
  }
  EXPECT_TRUE(all_are(read, 5));
}

TEST_F(DefaultStreams, AreWaitedForByTheCurrentOne) {
  const at::Tensor written = filled(1, 1, {8});
  at::Tensor read = filled(1, 2, {8});
  const c10::StreamGuard guard(fake::pool_stream(device(1)));
  {
    const fake::Hold hold(fake::default_stream(device(1)));
    {
      const c10::StreamGuard standard(fake::default_stream(device(1)));
      fake::fill_later(written, 5);
    }
    stitch::rpc::current_streams_wait_for_default();
    read.copy_(written, /*non_blocking=*/true);
    EXPECT_TRUE(fake::has_queued_work(device(1)));
  }
  EXPECT_TRUE(all_are(read, 5));
}

TEST_F(DefaultStreams, AndNothingElseNeedNotBeWaitedFor) {
  stitch::rpc::default_streams_wait_for_current();
  stitch::rpc::current_streams_wait_for_default();
  for (int index = 0; index < fake::kDevices; ++index)
    EXPECT_FALSE(fake::has_queued_work(device(index)));
}

at::Tensor fetch(const RRef<at::Tensor>& tensor) { return tensor.to_here() + 0; }

TEST_F(DefaultStreams, AnObjectIsFetchedOnceTheStreamThatMadeItHasWrittenIt) {
  Cluster cluster(2);
  for (const int elements : {8, 40'000}) {
    const c10::Stream own = fake::pool_stream(device(1));
    const c10::StreamGuard guard(own);
    const at::Tensor made = at::empty({elements}, at::TensorOptions(at::kFloat).device(device(1)));
    stitch::Future<at::Tensor> fetched;
    {
      const fake::Hold hold(own);
      fake::fill_later(made, 5);
      fetched = rpc_async<fetch>("worker1", stitch::make_rref(made));
      EXPECT_FALSE(fetched.wait_for(50ms));
    }
    EXPECT_TRUE(all_are(fetched.get(), 5));
  }
}

}  // namespace
}  // namespace default_streams_test
