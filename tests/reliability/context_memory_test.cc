// What ends passes and contexts ends all of them, also where memory is missing in between: nothing
// finds them afterwards.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <vector>

#include "stitch/dist_autograd/context.h"
#include "stitch/dist_autograd/context_table.h"
#include "stitch/dist_autograd/engine.h"
#include "stitch/dist_autograd/executor/nested_backward.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/worker.h"
#include "tests/support/cluster.h"
#include "tests/support/failing_memory.h"
#include "tests/support/gate.h"

namespace stitch::context_memory_test {
namespace {

using namespace std::chrono_literals;
using dist_autograd::Engine;
using testing::Cluster;
using testing::FailingMemory;
using testing::Gate;

// A node of worker1 that waits until the test lets it go on.
Gate gate;
at::Tensor times_held(at::Tensor x) {
  static const at::Tensor parameter = at::full({3}, 2.0, at::kDouble).requires_grad_();
  const at::Tensor y = x * parameter;
  y.register_hook([](const at::Tensor& gradient) {
    gate.pass();
    return gradient;
  });
  return y;
}

// For each allocation of `end`, which ends the context of a pass at one worker.
void the_pass_ends(const std::function<void(Cluster&)>& end) {
  for (std::int64_t first = 1, failed = 1; failed != 0; ++first) {
    ASSERT_LT(first, 1'000);
    gate.close();
    Cluster cluster(2);
    {
      dist_autograd::Context context;
      const at::Tensor x = at::ones({3}, at::kDouble).requires_grad_();
      const at::Tensor loss = rpc_sync<times_held>("worker1", x).sum();
      const auto future = context.backward_async({loss});
      EXPECT_TRUE(gate.wait_for_arrival());
      FailingMemory::begin(first);
      try {
        end(cluster);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "allocation " << first << ": " << error.what();
      }
      failed = FailingMemory::end();
      EXPECT_TRUE(future.wait_for(10s)) << "allocation " << first;
      EXPECT_TRUE(future.has_error()) << "allocation " << first;
      gate.open();
    }
    for (int rank = 0; rank < 2; ++rank) cluster[rank].shutdown({.graceful = false});
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(PassesWhoseWorkerStops, EndWhereMemoryFailsOnce) {
  the_pass_ends([](Cluster& cluster) { Engine::of(*cluster[0].agent()).stop(); });
}

TEST(PassesWhoseHomeIsLost, EndWhereMemoryFailsOnce) {
  the_pass_ends([](Cluster& cluster) {
    Engine::of(*cluster[1].agent())
        .on_peer_lost(cluster[0].agent()->self(), Error(ErrorCode::disconnected, "a test says so"));
  });
}

TEST(ContextTables, GiveAllContextsAwayWhereMemoryFailsOnce) {
  constexpr std::size_t kContexts = 5;
  for (std::int64_t first = 1, failed = 1; failed != 0; ++first) {
    ASSERT_LT(first, 100);
    dist_autograd::ContextTable table(WorkerId(0), 1);
    for (std::size_t i = 0; i < kContexts; ++i) static_cast<void>(table.create());
    std::vector<std::shared_ptr<dist_autograd::ContextState>> removed;
    FailingMemory::begin(first);
    try {
      removed = table.remove_all();
    } catch (const std::bad_alloc&) {
    }
    failed = FailingMemory::end();
    if (removed.empty()) removed = table.remove_all();
    ASSERT_EQ(removed.size(), kContexts) << "allocation " << first;
    for (const auto& each : removed) ASSERT_NE(each, nullptr) << "allocation " << first;
  }
}

TEST(NestedBackwards, GiveBackGradOfEveryLeafWhereMemoryFailsOnce) {
  for (std::int64_t first = 1, failed = 1; failed != 0; ++first) {
    ASSERT_LT(first, 1'000);
    const at::Tensor p = at::ones({3}, at::kDouble).requires_grad_();
    const at::Tensor q = at::full({3}, 2.0, at::kDouble).requires_grad_();
    {
      dist_autograd::GradientStore store;
      dist_autograd::NestedBackward nested(dist_autograd::GradientSink{store});
      (p * q).sum().backward();
      ASSERT_TRUE(p.grad().defined());
      ASSERT_TRUE(q.grad().defined());
      FailingMemory::begin(first);
      try {
        nested.finish();
      } catch (const std::exception&) {
        // The pass fails.
      }
      failed = FailingMemory::end();
    }
    EXPECT_FALSE(p.grad().defined()) << "allocation " << first;
    EXPECT_FALSE(q.grad().defined()) << "allocation " << first;
  }
}

}  // namespace
}  // namespace stitch::context_memory_test
