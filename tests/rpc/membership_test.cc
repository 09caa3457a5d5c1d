// Workers that join a world which runs, come back, and leave it, over loopback.
#include <fstream>
#include <iterator>

#include "stitch/rpc/agent/membership_hooks.h"
#include "stitch/rpc/membership/notice.h"
#include "stitch/transport/loopback/loopback_endpoint.h"
#include "stitch/transport/trimmed_pool.h"
#include "tests/support/world_test.h"

namespace membership_test {
namespace {

using namespace std::chrono_literals;
using stitch::Error;
using stitch::ErrorCode;
using stitch::WorkerId;
using stitch::WorkerInfo;
using stitch::rpc::Agent;
using stitch::rpc::Member;
using stitch::rpc::MemberCard;
using stitch::testing::error_of;
using stitch::testing::eventually;

std::string who_am_i() { return stitch::rpc::current_agent()->self().name; }

// Writes down what the layers above are told.
class Recorder final : public stitch::rpc::Extension {
 public:
  void on_peer_lost(const WorkerInfo& peer, const Error&) override { note("lost", peer); }
  void on_member_dead(const WorkerInfo& dead, const Error&) override { note("dead", dead); }
  void on_member_joined(const WorkerInfo& joined) override { note("joined", joined); }
  void on_member_left(const WorkerInfo& left) override { note("left", left); }
  [[nodiscard]] std::vector<std::string> notes() {
    stitch::base::MutexLock lock(mutex_);
    return notes_;
  }

 private:
  void note(const std::string& what, const WorkerInfo& info) {
    stitch::base::MutexLock lock(mutex_);
    notes_.push_back(what + " " + info.name + "/" + std::to_string(info.epoch));
  }
  stitch::base::Mutex mutex_;
  std::vector<std::string> notes_ STITCH_GUARDED_BY(mutex_);
};

const int kRecorder = stitch::rpc::register_extension(
    [](Agent&) -> std::unique_ptr<stitch::rpc::Extension> { return std::make_unique<Recorder>(); });

// Connections to a process that is stopped: its host accepts them, and nothing else happens.
class SilentEndpoint final : public stitch::transport::Endpoint {
 public:
  std::vector<std::string> listen(Accept) override { return {"silent:self"}; }
  std::shared_ptr<stitch::transport::Connection> connect(
      const std::string& address, stitch::transport::ConnectionEvents events) override {
    class Silent final : public stitch::transport::Connection {
     public:
      Silent(std::string address, stitch::transport::ConnectionEvents events)
          : address_(std::move(address)), events_(std::move(events)) {}
      [[nodiscard]] const stitch::transport::Hello& peer() const override { return none_; }
      void send(stitch::transport::Message, stitch::transport::SendDone done) override {
        done(Error(ErrorCode::disconnected, "the peer does not read"));
      }
      void close(const Error&) override { events_ = {}; }
      [[nodiscard]] std::string describe() const override { return address_; }

     private:
      const std::string address_;
      stitch::transport::ConnectionEvents events_;
      const stitch::transport::Hello none_{};
    };
    return std::make_shared<Silent>(address, std::move(events));
  }
  void close() override {}
  void join() override {}
};

// One worker, without a rendezvous: `listen`, then `start` among the members that are known.
class Node {
 public:
  Node(std::shared_ptr<stitch::transport::LoopbackNetwork> network, std::uint32_t id,
       std::uint64_t epoch)
      : network_(std::move(network)) {
    card_.info = {"w" + std::to_string(id), WorkerId(id), epoch};
    stitch::transport::EndpointOptions options;
    options.self.id = id;
    options.self.epoch = epoch;
    options.self.name = card_.info.name;
    options.self.world = 7;
    card_.addresses = peers_->listen(stitch::transport::make_loopback_endpoint(options, network_));
    static_cast<void>(peers_->listen(std::make_unique<SilentEndpoint>()));
  }
  ~Node() {
    if (agent_) static_cast<void>(agent_->shutdown(false, 1s));
  }
  [[nodiscard]] const MemberCard& card() const { return card_; }
  [[nodiscard]] Agent& agent() { return *agent_; }
  [[nodiscard]] std::vector<std::string> notes() {
    return static_cast<Recorder&>(agent_->extension(kRecorder)).notes();
  }
  void start(const std::vector<MemberCard>& cards) {
    stitch::Options options;
    options.name = card_.info.name;
    options.rank = static_cast<int>(card_.info.id.value());
    options.world_size = stitch::WorldSize::range(1, 8);
    options.store = stitch::transport::make_hash_store();
    options.num_threads = 2;
    options.rpc_timeout = 20s;
    options.heartbeat_timeout = 1500ms;
    auto loop = std::make_shared<stitch::base::EventLoop>("loop");
    agent_ = std::make_shared<Agent>(stitch::resolve_options(options), card_.info, loop,
                                     stitch::transport::make_trimmed_pool(1 << 20, loop));
    agent_->set_membership({card_, cards});
    std::vector<Member> members;
    for (const MemberCard& card : cards) members.push_back({card.info, card.addresses});
    agent_->start(std::move(peers_), members, nullptr);
  }
  void join(const std::vector<MemberCard>& others) {
    EXPECT_EQ(epoch_in_the_way(others), std::nullopt);
  }
  // Joins; else the last epoch of its name that the refusing member knows.
  std::optional<std::uint64_t> epoch_in_the_way(const std::vector<MemberCard>& others) {
    std::vector<MemberCard> cards;
    for (const MemberCard& each : others) {
      if (each.info.id != card_.info.id) cards.push_back(each);
    }
    cards.push_back(card_);
    start(cards);
    const auto refusal = agent_->join(stitch::rpc::Clock::now() + 20s);
    if (!refusal) return std::nullopt;
    return refusal->lives.at(0).card.info.epoch;
  }
  [[nodiscard]] std::string call(const std::string& name) {
    stitch::rpc::ExecutionContext context;
    context.runtime = agent_;
    const stitch::rpc::ExecutionContextScope scope(context);
    return stitch::rpc_sync<who_am_i>(name);
  }
  [[nodiscard]] std::string call(const WorkerInfo& info) {
    stitch::rpc::ExecutionContext context;
    context.runtime = agent_;
    const stitch::rpc::ExecutionContextScope scope(context);
    return stitch::rpc_sync<who_am_i>(info);
  }
  void end_abruptly() {
    static_cast<void>(agent_->shutdown(false, 1s));
    agent_.reset();
  }

 private:
  std::shared_ptr<stitch::transport::LoopbackNetwork> network_;
  MemberCard card_;
  std::unique_ptr<stitch::rpc::PeerTable> peers_ = std::make_unique<stitch::rpc::PeerTable>();
  std::shared_ptr<Agent> agent_;
};

class Membership : public ::testing::Test {
 protected:
  Membership() : first(network, 0, 1), second(network, 1, 1) {
    first.start(founders());
    second.start(founders());
  }
  [[nodiscard]] std::vector<MemberCard> founders() const { return {first.card(), second.card()}; }
  const std::shared_ptr<stitch::transport::LoopbackNetwork> network =
      std::make_shared<stitch::transport::LoopbackNetwork>();
  Node first;
  Node second;
};

// A store that has come back empty hands out epochs once more.
TEST_F(Membership, AProcessWithAnEpochThatIsUsedUpIsToldTheLastOne) {
  EXPECT_EQ(first.call("w1"), "w1");
  {
    Node twin(network, 1, 1);  // the death of the one before might not be known yet
    EXPECT_EQ(twin.epoch_in_the_way(founders()), 1u);
  }
  EXPECT_EQ(first.call("w1"), "w1");
  second.end_abruptly();
  EXPECT_TRUE(eventually([&] { return first.agent().live_members().size() == 1; }));
  {
    Node again(network, 1, 1);
    EXPECT_EQ(again.epoch_in_the_way({first.card()}), 1u);
  }
  {
    Node third(network, 1, 3);
    third.join({first.card()});
    EXPECT_EQ(first.call("w1"), "w1");
    third.end_abruptly();
  }
  EXPECT_TRUE(eventually([&] { return first.agent().live_members().size() == 1; }));
  {
    Node again(network, 1, 2);
    EXPECT_EQ(again.epoch_in_the_way({first.card()}), 3u);
  }
  Node last(network, 1, 4);
  last.join({first.card()});
  EXPECT_EQ(first.call("w1"), "w1");
}

// It asks again, because its sponsor has died before it answered.
TEST_F(Membership, AProcessThatAsksAgainWithItsOwnCardIsWelcome) {
  Node third(network, 2, 1);
  third.join(founders());
  EXPECT_FALSE(third.agent().join(stitch::rpc::Clock::now() + 20s));
  EXPECT_EQ(first.call("w2"), "w2");
}

// They become parts of texts and of the names of numbers.
TEST(MemberCards, AddressesThatCannotBeAreRefused) {
  const auto read_with_address = [](const std::string& address) {
    const MemberCard card{{"w", WorkerId(1), 1}, {"loopback:1", address}, "record"};
    stitch::base::Bytes bytes;
    stitch::base::ByteWriter out(bytes);
    card.write(out);
    stitch::base::ByteReader in(bytes.span(), "card");
    return MemberCard::read(in);
  };
  const std::string longest(256, 'a');
  EXPECT_EQ(read_with_address(longest).addresses.back(), longest);
  for (const std::string& address :
       {longest + 'a', std::string("tcp://a b"), std::string("tcp://\n"), std::string("tcp://\x80"),
        std::string("tcp://\x7f"), std::string(1, '\0')}) {
    EXPECT_EQ(error_of([&] { static_cast<void>(read_with_address(address)); }).code(),
              ErrorCode::protocol);
  }
}

// Tables of workers end there.
TEST(MemberCards, IdsThatAreTooLargeAreRefused) {
  const auto read_with_id = [](std::uint32_t id) {
    const MemberCard card{{"w", WorkerId(id), 1}, {"loopback:1"}, "record"};
    stitch::base::Bytes bytes;
    stitch::base::ByteWriter out(bytes);
    card.write(out);
    stitch::base::ByteReader in(bytes.span(), "card");
    return MemberCard::read(in);
  };
  EXPECT_EQ(read_with_id(65535).info.id, WorkerId(65535));
  const Error error = error_of([&] { static_cast<void>(read_with_id(65536)); });
  EXPECT_EQ(error.code(), ErrorCode::protocol);
  EXPECT_STREQ(error.what(), "card of a member has the id 65536; ids are below 65536");
}

TEST_F(Membership, AJoinFailsWhenNoMemberCanBeReached) {
  first.end_abruptly();
  second.end_abruptly();
  Node late(network, 2, 1);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(error_of([&] { late.join(founders()); }).code(), ErrorCode::disconnected);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 15s);
}

TEST_F(Membership, ACallToAWorkerThatDiedBeforeThisOneJoinedNamesItAndItsEpoch) {
  EXPECT_EQ(first.call("w1"), "w1");
  const WorkerInfo former = second.card().info;
  second.end_abruptly();
  EXPECT_TRUE(eventually([&] { return first.agent().live_members().size() == 1; }));
  Node third(network, 2, 1);
  third.join({first.card()});
  EXPECT_EQ(third.notes(), (std::vector<std::string>{"lost w1/1", "dead w1/1"}));
  for (const auto& error : {error_of([&] { static_cast<void>(third.call("w1")); }),
                            error_of([&] { static_cast<void>(third.call(former)); })}) {
    EXPECT_EQ(error.code(), ErrorCode::disconnected);
    EXPECT_NE(std::string(error.what()).find("worker \"w1\" (id 1) epoch 1 is gone: "),
              std::string::npos)
        << error.what();
  }
  EXPECT_EQ(error_of([&] { static_cast<void>(third.call("w9")); }).code(), ErrorCode::not_found);
  Node again(network, 1, 2);
  again.join({first.card(), third.card()});
  EXPECT_EQ(third.call("w1"), "w1");
  EXPECT_STREQ(error_of([&] { static_cast<void>(third.call(former)); }).what(),
               "worker \"w1\" epoch 1 is gone; it is now epoch 2");
}

TEST_F(Membership, AJoinerAsksAnotherWhenTheFirstIsStopped) {
  Node third(network, 2, 1);
  std::vector<MemberCard> cards = founders();
  cards[0].addresses = {"silent:first"};
  const auto start = std::chrono::steady_clock::now();
  third.join(cards);
  const auto took = std::chrono::steady_clock::now() - start;
  EXPECT_GE(took, 1400ms) << "the first was not asked";
  EXPECT_LT(took, 4s) << "the heartbeat timeout is 1.5 s";
  EXPECT_EQ(third.call("w1"), "w1");
  EXPECT_EQ(first.agent().live_members().size(), 3u);
}

TEST_F(Membership, AWorkerIsDeclaredDeadAndToldWhenTheJudgeHasLostItForGood) {
  EXPECT_EQ(first.call("w1"), "w1");
  first.agent().peers().end(second.card().info, Error(ErrorCode::disconnected, "the test ends it"),
                            false);
  EXPECT_TRUE(eventually([&] {
    try {
      static_cast<void>(second.call("w1"));
      return false;  // it has not been told yet
    } catch (const Error& told) {
      return told.code() == ErrorCode::disconnected;
    }
  }));
  const auto error = error_of([&] { static_cast<void>(second.call("w1")); });
  const std::string text = error.what();
  EXPECT_NE(text.find("this worker (epoch 1) was declared dead: "), std::string::npos) << text;
  EXPECT_NE(text.find("it runs, but the connection between these two is over"), std::string::npos)
      << text;
  EXPECT_NE(text.find("the test ends it"), std::string::npos) << text;
  EXPECT_EQ(first.notes(), (std::vector<std::string>{"lost w1/1", "dead w1/1"}));
  Node again(network, 1, 2);
  again.join({first.card()});
  EXPECT_EQ(first.call("w1"), "w1");
}

// It heard of it from a third worker, before the members were told.
TEST_F(Membership, ACallToALifeThatIsNotKnownYetSaysSo) {
  WorkerInfo next = second.card().info;
  ++next.epoch;
  const auto error = error_of([&] { static_cast<void>(first.call(next)); });
  EXPECT_EQ(error.code(), ErrorCode::disconnected);
  EXPECT_STREQ(error.what(),
               "worker \"w1\" epoch 2 is not known here yet; the last one known is epoch 1");
  EXPECT_EQ(error.worker(), "w1");
  second.end_abruptly();
  Node again(network, 1, 2);
  again.join({first.card()});
  EXPECT_EQ(first.call(next), "w1");
}

}  // namespace
}  // namespace membership_test
