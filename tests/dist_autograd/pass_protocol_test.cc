// What single messages do to the protocol of a pass. Whole passes are in pass_simulation_test.cc.
#include "stitch/dist_autograd/pass_protocol.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace stitch::dist_autograd {
namespace {

// One SendNode, number 0, whose tensors went to worker 2; the loss does not use it.
class OneUnusedSend final : public PassGraph {
 public:
  std::uint32_t size() const override { return 1; }
  std::span<const std::uint32_t> sends() const override { return sends_; }
  std::uint32_t find(std::uint64_t link) const override { return link == 1 ? 0 : kNone; }
  WorkerId receiver(std::uint32_t) const override { return WorkerId(2); }
  const std::string& call(std::uint32_t) const override { return call_; }
  void mark(std::uint32_t, std::vector<LinkId>&) override {}
  void mark_roots(std::vector<LinkId>&) override {}
  bool marked(std::uint32_t) const override { return false; }

 private:
  const std::array<std::uint32_t, 1> sends_{0};
  const std::string call_ = "a call";
};

WorkerInfo worker(std::uint32_t id) { return {"worker" + std::to_string(id), WorkerId(id), 1}; }

PassProtocol protocol_of_worker1(bool fast) {
  PassProtocol protocol(WorkerId(1), WorkerId(0), fast);
  protocol.set_graph(std::make_unique<OneUnusedSend>());
  return protocol;
}

TEST(PassProtocol, AGradientForAnUnusedLinkBeforeTheMarkingClosesFailsThePass) {
  PassProtocol protocol = protocol_of_worker1(false);
  static_cast<void>(protocol.on_mark(worker(0), {}));
  const std::array<std::uint32_t, 1> sends{0};
  EXPECT_TRUE(protocol.on_gradients(worker(2), sends).deliver);
  const PassEffects closed = protocol.on_close_marking(worker(0));
  ASSERT_TRUE(closed.fail);
  EXPECT_EQ(closed.fail->code(), ErrorCode::protocol);
  EXPECT_TRUE(closed.kill.empty()) << "the node has a gradient already";
  // Nothing ends the pass before it is failed.
  const PassEffects quiet = protocol.strand_quiet(1, true);
  EXPECT_FALSE(quiet.done);
  EXPECT_TRUE(protocol.fail());
}

TEST(PassProtocol, AnUnusedLinkWithoutAGradientIsDead) {
  PassProtocol protocol = protocol_of_worker1(false);
  static_cast<void>(protocol.on_mark(worker(0), {}));
  const PassEffects closed = protocol.on_close_marking(worker(0));
  EXPECT_FALSE(closed.fail);
  EXPECT_EQ(closed.kill, std::vector<std::uint32_t>{0});
  EXPECT_TRUE(protocol.strand_quiet(1, true).done);
}

TEST(PassProtocol, AMarkInAFastPassIsRefused) {
  PassProtocol protocol = protocol_of_worker1(true);
  EXPECT_THROW(static_cast<void>(protocol.on_mark(worker(2), {{1}})), Error);
}

}  // namespace
}  // namespace stitch::dist_autograd
