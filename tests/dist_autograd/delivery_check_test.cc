// The assertions about deliveries fire, alone and in the strand.
#include "stitch/dist_autograd/executor/delivery_check.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "stitch/dist_autograd/executor/strand.h"
#include "stitch/dist_autograd/graph/send_node.h"

namespace stitch::dist_autograd::testing::delivery_check_test {
namespace {

// x, sent to another worker and back: a send node, which leads to a product and a leaf.
class DeliveryAssertionsDeathTest : public ::testing::Test {
 protected:
  DeliveryAssertionsDeathTest() {
    DeliveryCheck::switch_on();
    const auto x = at::ones({3}).requires_grad_();
    const auto product = x * 2;
    const LinkId link{WorkerId(0), 1};
    plan = std::make_unique<Plan>(
        std::vector<Edge>{},
        std::vector<NodePtr>{make_node<SendNode>(link, WorkerInfo{"worker1", WorkerId(1), 1},
                                                 LinkName{}, std::vector<at::Tensor>{product})});
    send = plan->find(link);
    after = plan->edges(send)[0].node;
    leaf = plan->edges(after)[0].node;
    check = std::make_unique<DeliveryCheck>(*plan);
  }
  void run(std::uint32_t node) {
    check->delivers(node);
    check->runs(node);
  }

  std::unique_ptr<Plan> plan;
  std::unique_ptr<DeliveryCheck> check;
  std::uint32_t send = 0, after = 0, leaf = 0;
};

TEST_F(DeliveryAssertionsDeathTest, AcceptAPassThatKeepsTheRules) {
  check->arrives(send);
  run(send);
  run(after);
  run(leaf);
  check->resolved();
}

TEST_F(DeliveryAssertionsDeathTest, FindANodeThatRunsTwice) {
  check->arrives(send);
  run(send);
  EXPECT_DEATH(check->runs(send), "a node runs at most once a pass");
}

TEST_F(DeliveryAssertionsDeathTest, FindANodeThatRunsBeforeItsInputsAreComplete) {
  EXPECT_DEATH(check->runs(after), "a node runs with complete inputs");
}

TEST_F(DeliveryAssertionsDeathTest, FindASecondGradientMessageAndAKillAfterOne) {
  check->arrives(send);
  EXPECT_DEATH(check->arrives(send), "one gradient message or one kill");
}

TEST_F(DeliveryAssertionsDeathTest, FindAMessageForANodeThatGetsNone) {
  EXPECT_DEATH(check->arrives(after), "only send nodes get messages");
}

TEST_F(DeliveryAssertionsDeathTest, FindADeliveryTooMany) {
  check->delivers(after);
  EXPECT_DEATH(check->delivers(after), "no more deliveries than edges");
}

TEST_F(DeliveryAssertionsDeathTest, FindAPassThatEndsWithoutAllItsDeliveries) {
  check->arrives(send);
  run(send);
  EXPECT_DEATH(check->resolved(), "deliveries and kills add up");
}

// An owner that has nothing to send.
class NoOwner : public StrandOwner {
  void gradients_ready(RecvNode&, variable_list, const Positions&) override {}
  void went_quiet(std::uint64_t, bool) override {}
  void failed(Error error) override { ADD_FAILURE() << error.what(); }
  void stopped() override {}
};

TEST_F(DeliveryAssertionsDeathTest, AreMadeByTheStrand) {
  const auto owner = std::make_shared<NoOwner>();
  const auto strand = std::make_shared<Strand>(
      std::move(plan), RunFlags{}, std::make_shared<GradientStore>(),
      [](c10::Device, base::UniqueFunction<void()> slice) { slice(); }, owner);
  strand->start();
  EXPECT_DEATH(strand->deliver({after}, {{at::ones({3})}}), "only send nodes get messages");
  strand->deliver({send}, {{at::ones({3})}});
  EXPECT_EQ(strand->nodes_run(), 3u);
  EXPECT_DEATH(strand->deliver({send}, {{at::ones({3})}}), "one gradient message or one kill");
}

}  // namespace
}  // namespace stitch::dist_autograd::testing::delivery_check_test
