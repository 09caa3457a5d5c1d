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
      void close(const Error&) override {}
      [[nodiscard]] std::string describe() const override { return address_; }

     private:
      const std::string address_;
      const stitch::transport::ConnectionEvents events_;
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

TEST_F(Membership, ANewWorkerIsKnownToAllBeforeItMakesACall) {
  EXPECT_EQ(first.call("w1"), "w1");
  Node third(network, 2, 1);
  third.join(founders());
  for (Node* each : {&first, &second, &third}) {
    EXPECT_EQ(each->agent().live_members().size(), 3u);
    for (const char* name : {"w0", "w1", "w2"}) EXPECT_EQ(each->call(name), name);
  }
  EXPECT_EQ(second.notes(), std::vector<std::string>{"joined w2/1"});
}

TEST_F(Membership, AWorkerThatCameBackUnderItsNameIsReachableAndItsFormerLifeIsNot) {
  EXPECT_EQ(first.call("w1"), "w1");
  const WorkerInfo former = second.card().info;
  second.end_abruptly();
  Node again(network, 1, 2);
  again.join({first.card()});
  EXPECT_EQ(first.call("w1"), "w1");
  EXPECT_EQ(again.call("w0"), "w0");
  const auto error = error_of([&] { static_cast<void>(first.call(former)); });
  EXPECT_EQ(error.code(), ErrorCode::disconnected);
  EXPECT_STREQ(error.what(), "worker \"w1\" epoch 1 is gone; it is now epoch 2");
  EXPECT_EQ(first.notes(), (std::vector<std::string>{"lost w1/1", "dead w1/1", "joined w1/2"}));
}

TEST_F(Membership, ASecondWorkerUnderTheNameOfALiveOneIsRefused) {
  Node twin(network, 1, 2);
  const auto error = error_of([&] { twin.join(founders()); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_STREQ(error.what(), "worker \"w1\" is still alive in epoch 1");
  EXPECT_EQ(first.call("w1"), "w1");
}

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
  EXPECT_EQ(error_of([&] { static_cast<void>(third.call("w9")); }).code(),
            ErrorCode::invalid_argument);
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

// The events of a dump that it writes.
std::string events_of(Agent& agent) {
  const stitch::testing::TemporaryFolder folder;
  std::ifstream in(agent.dumps().write(folder.path()), std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  const auto begin = text.find("{\"name\": \"events\"");
  EXPECT_NE(begin, std::string::npos) << text;
  return begin == std::string::npos ? "" : text.substr(begin);
}
int times(const std::string& what, const std::string& text) {
  int found = 0;
  for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

TEST_F(Membership, ADumpTellsWhoJoinedLeftOrDiedAndThatTheWorkerWasFenced) {
  Node third(network, 2, 1);
  third.join(founders());
  EXPECT_EQ(first.call("w1"), "w1");
  EXPECT_FALSE(third.agent().shutdown(true, 10s).has_value());
  first.agent().peers().end(second.card().info, Error(ErrorCode::disconnected, "the test ends it"),
                            false);
  EXPECT_TRUE(eventually([&] { return second.agent().fenced(); }));
  EXPECT_TRUE(eventually([&] { return times("dead w1/1", first.notes().back()) == 1; }));
  const std::string seen = events_of(first.agent());
  EXPECT_EQ(times("\"member joined\", \"w2\", 1", seen), 1) << seen;
  EXPECT_EQ(times("\"member left\", \"w2\", 1", seen), 1) << seen;
  EXPECT_EQ(times("\"member declared dead\", \"w1\", 1", seen), 1) << seen;
  EXPECT_EQ(times("\"this worker fenced\"", seen), 0) << seen;
  const std::string own = events_of(second.agent());
  EXPECT_EQ(times("\"this worker fenced\", \"w1\", 1", own), 1) << own;
}

TEST_F(Membership, AWorkerLeavesWhileTheWorldGoesOn) {
  Node third(network, 2, 1);
  third.join(founders());
  EXPECT_EQ(first.call("w1"), "w1");
  EXPECT_FALSE(second.agent().shutdown(true, 10s).has_value());
  EXPECT_TRUE(eventually([&] { return first.notes().size() == 3; }));
  EXPECT_EQ(first.notes(), (std::vector<std::string>{"joined w2/1", "lost w1/1", "left w1/1"}));
  const auto error = error_of([&] { static_cast<void>(first.call("w1")); });
  EXPECT_EQ(error.code(), ErrorCode::disconnected);
  EXPECT_NE(std::string(error.what()).find("has left"), std::string::npos) << error.what();
  EXPECT_EQ(first.call("w2"), "w2");
  EXPECT_EQ(first.agent().live_members().size(), 2u);
}

TEST_F(Membership, AWorkerThatEndsWithoutAWordIsDeclaredDead) {
  Node third(network, 2, 1);
  third.join(founders());
  EXPECT_EQ(third.call("w1"), "w1");
  second.end_abruptly();
  // The third has the connection, the first decides, both hear of it once.
  for (Node* each : {&first, &third}) {
    EXPECT_TRUE(eventually([&] { return each->agent().live_members().size() == 2; }));
    EXPECT_TRUE(eventually([&] {
      const auto notes = each->notes();
      return !notes.empty() && notes.back() == "dead w1/1";
    }));
  }
  EXPECT_EQ(third.call("w0"), "w0");
}

}  // namespace
}  // namespace membership_test
