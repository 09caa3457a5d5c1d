// What single messages do to the protocol of a pass. Whole passes are in pass_simulation_test.cc.
#include "stitch/dist_autograd/protocol/pass_protocol.h"
#include "stitch/dist_autograd/protocol/pass_lives.h"
#include "tests/support/plain_test.h"

namespace stitch::dist_autograd::pass_protocol_test {
namespace {

// SendNodes whose tensors went to worker 2, with links from 1 on; the loss uses none, as far as
// marks tell.
class UnmarkedSends final : public PassGraph {
 public:
  explicit UnmarkedSends(std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i) sends_.push_back(i);
  }
  std::uint32_t size() const override { return static_cast<std::uint32_t>(sends_.size()); }
  std::span<const std::uint32_t> sends() const override { return sends_; }
  std::uint32_t find(std::uint64_t link) const override {
    return link - 1 < sends_.size() ? static_cast<std::uint32_t>(link - 1) : kNone;
  }
  WorkerId receiver(std::uint32_t) const override { return WorkerId(2); }
  const std::string& call(std::uint32_t) const override { return call_; }
  void mark(std::uint32_t, std::vector<LinkId>&) override {}
  void mark_used(const std::vector<bool>&, std::vector<LinkId>&) override {}
  bool marked(std::uint32_t) const override { return false; }

 private:
  std::vector<std::uint32_t> sends_;
  const std::string call_ = "a call";
};

WorkerInfo worker(std::uint32_t id) { return {"worker" + std::to_string(id), WorkerId(id), 1}; }

PassProtocol protocol_of_worker1(std::uint32_t sends = 1) {
  PassProtocol protocol(WorkerId(1), WorkerId(0));
  protocol.set_graph(std::make_unique<UnmarkedSends>(sends));
  return protocol;
}

TEST(PassProtocol, AnUnusedLinkWithoutAGradientIsDead) {
  PassProtocol protocol = protocol_of_worker1();
  static_cast<void>(protocol.on_mark(worker(0), {}));
  EXPECT_EQ(protocol.on_close_marking(worker(0)).kill, std::vector<std::uint32_t>{0});
  EXPECT_TRUE(protocol.strand_quiet(1, true).done);
}

PassEffects deliver(PassProtocol& protocol, std::uint32_t from, std::uint32_t send) {
  const std::array<std::uint32_t, 1> sends{send};
  return protocol.on_gradients(worker(from), {}, sends);
}

TEST(PassProtocol, TheAnswerToTheParentRidesOnTheLastGradients) {
  PassProtocol protocol = protocol_of_worker1(2);
  EXPECT_TRUE(deliver(protocol, 2, 0).acks.empty());
  EXPECT_EQ(protocol.parent(), WorkerId(2));
  EXPECT_TRUE(deliver(protocol, 2, 1).acks.empty());
  const auto ack = protocol.sending_gradients(WorkerId(2), 2);
  ASSERT_TRUE(ack);
  EXPECT_EQ(ack->count, 2u);
  EXPECT_EQ(ack->participants, std::vector<WorkerId>{WorkerId(1)});
  EXPECT_FALSE(protocol.parent());
  EXPECT_TRUE(protocol.strand_quiet(2, true).acks.empty());
  static_cast<void>(protocol.gradients_written());
  EXPECT_TRUE(protocol.on_quiet(worker(0)).done);
}

TEST(PassProtocol, GradientsBeforeTheLastCarryWhatIsOwedToOthersThanTheParent) {
  PassProtocol protocol = protocol_of_worker1(3);
  static_cast<void>(deliver(protocol, 2, 0));
  static_cast<void>(deliver(protocol, 3, 1));
  static_cast<void>(deliver(protocol, 3, 2));
  const auto to_other = protocol.sending_gradients(WorkerId(3));
  ASSERT_TRUE(to_other);
  EXPECT_EQ(to_other->count, 2u);
  EXPECT_TRUE(to_other->participants.empty());
  // That one is not acknowledged, so these do not answer.
  const auto to_parent = protocol.sending_gradients(WorkerId(2), 3);
  ASSERT_TRUE(to_parent);
  EXPECT_EQ(to_parent->count, 0u);
  EXPECT_TRUE(protocol.strand_quiet(3, true).acks.empty());
  static_cast<void>(protocol.on_ack(worker(3), {1, {WorkerId(3)}}));
  const PassEffects last = protocol.on_ack(worker(2), {1, {}});
  ASSERT_EQ(last.acks.size(), 1u);
  EXPECT_EQ(last.acks[0].first, WorkerId(2));
  EXPECT_EQ(last.acks[0].second.count, 1u);
  EXPECT_EQ(last.acks[0].second.participants.size(), 2u);
}

TEST(PassProtocol, AcksThatFindNoRideGoTogetherWhenTheStrandIsQuiet) {
  PassProtocol protocol = protocol_of_worker1(3);
  static_cast<void>(deliver(protocol, 2, 0));
  static_cast<void>(deliver(protocol, 3, 1));
  static_cast<void>(deliver(protocol, 3, 2));
  const PassEffects quiet = protocol.strand_quiet(3, true);
  ASSERT_EQ(quiet.acks.size(), 2u);
  EXPECT_EQ(quiet.acks[0].first, WorkerId(3));
  EXPECT_EQ(quiet.acks[0].second.count, 2u);
  EXPECT_EQ(quiet.acks[1].first, WorkerId(2));
  EXPECT_EQ(quiet.acks[1].second.count, 1u);
}

TEST(PassProtocol, QuietAsksAWorkerThatWaitsForMarksAndKillsNothingYet) {
  PassProtocol protocol = protocol_of_worker1(2);
  static_cast<void>(deliver(protocol, 2, 0));
  static_cast<void>(protocol.strand_quiet(1, false));
  const PassEffects asked = protocol.on_quiet(worker(0));
  EXPECT_FALSE(asked.done);
  EXPECT_TRUE(asked.kill.empty());
  ASSERT_EQ(asked.acks.size(), 1u) << "the answer to QUIET";
  EXPECT_EQ(asked.acks[0].first, WorkerId(0));
  const PassEffects closed = protocol.on_close_marking(worker(0));
  EXPECT_EQ(closed.kill, std::vector<std::uint32_t>{1});
  EXPECT_TRUE(protocol.strand_quiet(2, true).done);
}

TEST(PassProtocol, WhatNoCorrectWorkerSendsIsRefused) {
  PassProtocol flowing = protocol_of_worker1(2);
  static_cast<void>(deliver(flowing, 2, 0));
  EXPECT_THROW(static_cast<void>(flowing.on_mark(worker(2), {{2}})), Error);
  EXPECT_THROW(static_cast<void>(flowing.on_quiet(worker(0))), Error);
  EXPECT_THROW(static_cast<void>(flowing.on_quiet(worker(2))), Error);
  EXPECT_THROW(static_cast<void>(flowing.on_close_marking(worker(0))), Error);
  EXPECT_THROW(static_cast<void>(deliver(flowing, 2, 0)), Error);
  EXPECT_THROW(static_cast<void>(flowing.on_done(worker(2))), Error);

  PassProtocol marking = protocol_of_worker1(2);
  static_cast<void>(deliver(marking, 2, 0));
  static_cast<void>(marking.strand_quiet(1, false));
  static_cast<void>(marking.on_quiet(worker(0)));
  EXPECT_THROW(static_cast<void>(marking.on_quiet(worker(0))), Error);
  EXPECT_THROW(static_cast<void>(deliver(marking, 2, 1)), Error) << "it is not marked";
  static_cast<void>(marking.on_close_marking(worker(0)));
  EXPECT_THROW(static_cast<void>(marking.on_mark(worker(2), {{2}})), Error);
}

TEST(PassLives, TellALostWorkerOfThePassFromItsPredecessor) {
  const auto life = [](std::uint64_t epoch) { return WorkerInfo{"worker1", WorkerId(1), epoch}; };
  PassLives lives;
  lives.note(worker(2));
  // Nothing has gone to it yet; the present life would get it.
  EXPECT_TRUE(lives.is_former(life(1), 2));
  EXPECT_FALSE(lives.is_former(life(2), 2));
  lives.note(life(2));
  EXPECT_TRUE(lives.is_former(life(1), 2));
  EXPECT_FALSE(lives.is_former(life(2), 2));
  // Its successor has no part in the pass, also where that comes to deal with it.
  lives.note(life(3));
  EXPECT_FALSE(lives.is_former(life(2), 3));
  EXPECT_FALSE(lives.is_former(life(3), 3));
}

}  // namespace
}  // namespace stitch::dist_autograd::pass_protocol_test
