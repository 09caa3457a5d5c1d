// Contexts and passes when a worker between two others is lost, or has too much in flight to send.
#include "stitch/dist_autograd/engine.h"
#include "stitch/dist_autograd/protocol/messages.h"
#include "tests/dist_autograd/remote_parts.h"
#include "tests/support/oracle.h"
#include "tests/support/world_test.h"

namespace stitch::testing::loss_faults_test {
namespace {

using dist_autograd::Context;
using namespace std::chrono_literals;

void leave_at_once(Worker& worker) {
  try {
    worker.shutdown({.graceful = false, .timeout = 5s});
  } catch (const Error&) {
  }
}

void end_all(Cluster& cluster) {
  for (int i = 0; i < cluster.size(); ++i) leave_at_once(cluster[i]);
}

TEST(LossFaults, AContextEndsAtAWorkerWhenTheLastThatToldOfItIsLost) {
  for (const bool told_by_home : {false, true}) {
    Cluster cluster(4);
    {
      Context context;
      const auto x = ones().requires_grad_();
      rpc_sync<via>("worker1", std::vector<std::string>{"worker2", "worker3"}, x);
      const auto direct = told_by_home ? rpc_sync<times_parameter>("worker2", x) : at::Tensor();
      leave_at_once(cluster[1]);
      for (const int i : {2, 3}) {
        EXPECT_TRUE(eventually([&] {
          return count_on(cluster[i], "contexts") == (told_by_home ? 1 : 0) &&
                 (told_by_home || count_on(cluster[i], "links") == 0);
        })) << "on worker "
            << i;
      }
      if (told_by_home) {
        context.backward({direct.sum()});
        EXPECT_TRUE(equal_gradients(gradient_on(cluster[2], context.id()), ones()));
      } else {
        // A call that comes late is not recorded, and a backward that reaches its result says so.
        const auto late = rpc_sync<times_parameter>("worker2", x);
        const auto error = error_of([&] { context.backward({late.sum()}); });
        EXPECT_NE(std::string(error.what()).find("received without a context"), std::string::npos)
            << error.what();
      }
    }
    end_all(cluster);
  }
}

}  // namespace
}  // namespace stitch::testing::loss_faults_test
