// Workers that join a world which runs, come back, and leave it, over loopback.
#include <future>

#include "stitch/base/descriptor.h"
#include "stitch/rpc/agent/membership_hooks.h"
#include "stitch/rpc/membership/notice.h"
#include "stitch/transport/loopback/loopback_endpoint.h"
#include "stitch/transport/stream/stream_endpoint.h"
#include "stitch/transport/trimmed_pool.h"
#include "stitch/transport/wire/handshake_messages.h"
#include "tests/support/world_test.h"
#include "tests/transport/plain_socket.h"

namespace membership_test {
namespace {

using namespace stitch::testing;
using stitch::rpc::Agent;
using stitch::rpc::KnownLife;
using stitch::rpc::LifeState;
using stitch::rpc::Member;
using stitch::rpc::MemberCard;

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

// One worker, without a rendezvous: `listen`, then `start` among the members that are known.
class Node {
 public:
  // `tcp`: it can reach addresses of TCP, too, with a secret.
  Node(std::shared_ptr<stitch::transport::LoopbackNetwork> network, std::uint32_t id,
       std::uint64_t epoch, bool tcp = false)
      : network_(std::move(network)) {
    card_.info = {"w" + std::to_string(id), WorkerId(id), epoch};
    stitch::transport::EndpointOptions options;
    options.self.id = id;
    options.self.epoch = epoch;
    options.self.name = card_.info.name;
    options.self.world = 7;
    card_.addresses = peers_->listen(stitch::transport::make_loopback_endpoint(options, network_));
    if (!tcp) return;
    options.secret = stitch::transport::SecretKey::from_random("of the world");
    static_cast<void>(
        peers_->listen(stitch::transport::make_stream_endpoint(options, {{"tcp"}, "127.0.0.1"})));
  }
  ~Node() {
    if (agent_) static_cast<void>(agent_->shutdown(false, 1s));
  }
  [[nodiscard]] const MemberCard& card() const { return card_; }
  [[nodiscard]] Agent& agent() { return *agent_; }
  [[nodiscard]] std::vector<std::string> notes() {
    return static_cast<Recorder&>(agent_->extension(kRecorder)).notes();
  }
  void start(const std::vector<KnownLife>& lives) {
    Options options;
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
    agent_->set_membership({card_, lives});
    std::vector<Member> members;
    for (const KnownLife& life : lives) {
      if (life.state == LifeState::alive) members.push_back({life.card.info, life.card.addresses});
    }
    agent_->start(std::move(peers_), members, nullptr);
  }
  // Has `keeper` admit it, and starts with the lives that it is told of; else why not.
  std::optional<Error> join(Node& keeper) {
    std::promise<std::optional<Error>> admitted;
    keeper.agent().admit(card_, [&](const std::optional<Error>& refusal, bool here) {
      EXPECT_TRUE(here);
      admitted.set_value(refusal);
    });
    if (auto refusal = admitted.get_future().get()) return refusal;
    start(keeper.agent().known_lives());
    return std::nullopt;
  }
  // A worker by its name or its life.
  template <class To>
  [[nodiscard]] std::string call(const To& to) {
    stitch::rpc::ExecutionContext context;
    context.runtime = agent_;
    const stitch::rpc::ExecutionContextScope scope(context);
    return rpc_sync<who_am_i>(to);
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
  [[nodiscard]] std::vector<KnownLife> founders() const {
    return {{first.card()}, {second.card()}};
  }
  const std::shared_ptr<stitch::transport::LoopbackNetwork> network =
      std::make_shared<stitch::transport::LoopbackNetwork>();
  Node first;
  Node second;
};

TEST_F(Membership, AnEpochThatIsUsedUpIsRefused) {
  EXPECT_EQ(first.call("w1"), "w1");
  const auto refused = [&](std::uint64_t epoch) {
    Node twin(network, 1, epoch);
    const auto why = twin.join(first);
    return why ? std::string(why->what()) : std::string();
  };
  EXPECT_EQ(refused(1), "worker \"w1\" (id 1) cannot join: there is epoch 1 already");
  EXPECT_EQ(first.call("w1"), "w1");
  second.end_abruptly();
  EXPECT_TRUE(eventually([&] { return first.agent().live_members().size() == 1; }));
  EXPECT_EQ(refused(1), "worker \"w1\" (id 1) cannot join: there is epoch 1 already");
  Node last(network, 1, 2);
  EXPECT_EQ(last.join(first), std::nullopt);
  EXPECT_EQ(first.call("w1"), "w1");
}

// Without a secret, any process of the host may connect in the name of a member.
TEST_F(Membership, AStrangerInTheNameOfAMemberEndsNoWorker) {
  EXPECT_EQ(first.call("w1"), "w1");
  stitch::transport::EndpointOptions options;
  options.self.id = 1;
  options.self.epoch = 1;
  options.self.name = "w1";
  options.self.world = 7;
  const auto stranger = stitch::transport::make_loopback_endpoint(options, network);
  for (const WorkerInfo& about : {first.card().info, second.card().info}) {
    std::atomic<bool> closed{false};
    stitch::transport::ConnectionEvents events;
    events.on_open = [](const auto&) {};
    events.on_message = [](const auto&, stitch::transport::Message) {};
    events.on_closed = [&](const auto&, const Error&) { closed = true; };
    const auto connection = stranger->connect(first.card().addresses.front(), {0, 1}, events);
    stitch::transport::FrameBuilder dead(stitch::rpc::wire::kMembership);
    stitch::rpc::Notice{stitch::rpc::Notice::Step::dead, about, second.card().info, "a lie"}.write(
        dead.body());
    dead.end_body();
    connection->send(std::move(dead).finish(), nullptr);
    stitch::transport::FrameBuilder no_bind(stitch::rpc::wire::kRequest);  // after which it ends
    no_bind.end_body();
    connection->send(std::move(no_bind).finish(), nullptr);
    EXPECT_TRUE(eventually([&] { return closed.load(); }));
  }
  for (int i = 0; i < 20; ++i) {  // a probe may be under way
    EXPECT_EQ(first.call("w1"), "w1");
    EXPECT_EQ(second.call("w0"), "w0");
    std::this_thread::sleep_for(5ms);
  }
  EXPECT_EQ(first.agent().live_members().size(), 2U);
}

TEST_F(Membership, ACallToAWorkerThatDiedBeforeThisOneJoinedNamesItAndItsEpoch) {
  EXPECT_EQ(first.call("w1"), "w1");
  const WorkerInfo former = second.card().info;
  second.end_abruptly();
  EXPECT_TRUE(eventually([&] { return first.agent().live_members().size() == 1; }));
  Node third(network, 2, 1);
  EXPECT_EQ(third.join(first), std::nullopt);
  EXPECT_EQ(third.notes(), (std::vector<std::string>{"lost w1/1", "dead w1/1"}));
  for (const auto& error : {error_of([&] { static_cast<void>(third.call("w1")); }),
                            error_of([&] { static_cast<void>(third.call(former)); })}) {
    EXPECT_TRUE(has_text(error, ErrorCode::disconnected, "worker \"w1\" (id 1) epoch 1 is gone: "));
  }
  EXPECT_EQ(error_of([&] { static_cast<void>(third.call("w9")); }).code(), ErrorCode::not_found);
  Node again(network, 1, 2);
  EXPECT_EQ(again.join(first), std::nullopt);
  EXPECT_EQ(third.call("w1"), "w1");
  EXPECT_STREQ(error_of([&] { static_cast<void>(third.call(former)); }).what(),
               "worker \"w1\" epoch 1 is gone; it is now epoch 2");
}

// Answers every connection to a port with a refusal that claims to be overloaded.
class Squatter {
 public:
  Squatter() {
    address = "tcp://127.0.0.1:" + std::to_string(listener_.bind());
    listener_.listen();
    thread_ = std::jthread([this] {
      const auto refusal = stitch::transport::encode_refusal(
          Error(ErrorCode::overloaded, "too many connections are in their handshake"));
      std::string words("\1\0\0\0\0\0\0\0\x95\1\0\0\0\0\0\0", 16);
      words.append(reinterpret_cast<const char*>(refusal.data()), refusal.size());
      for (;;) {
        stitch::transport::Socket peer = listener_.accept();
        if (peer.file() < 0) return;
        ++visits;
        peer.send(words);
        static_cast<void>(peer.hung_up());
      }
    });
  }
  ~Squatter() { ::shutdown(listener_.file(), SHUT_RDWR); }
  std::string address;
  std::atomic<int> visits{0};

 private:
  stitch::transport::Socket listener_;
  std::jthread thread_;
};

// The refusal was taken for a sign of life.
TEST(Squatted, ADeadWorkersPortDoesNotKeepItAlive) {
  Squatter squatter;
  Node judge(std::make_shared<stitch::transport::LoopbackNetwork>(), 0, 1, true);
  MemberCard dead;
  dead.info = {"w1", WorkerId(1), 1};
  dead.addresses = {squatter.address};
  judge.start({{judge.card()}, {dead}});
  EXPECT_TRUE(eventually([&] { return judge.agent().live_members().size() == 1; }));
  EXPECT_GT(squatter.visits.load(), 1);
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
  EXPECT_TRUE(contains(text, "this worker (epoch 1) was declared dead: ")) << text;
  EXPECT_TRUE(contains(text, "it runs, but the connection between these two is over")) << text;
  EXPECT_TRUE(contains(text, "the test ends it")) << text;
  EXPECT_EQ(first.notes(), (std::vector<std::string>{"lost w1/1", "dead w1/1"}));
  Node again(network, 1, 2);
  EXPECT_EQ(again.join(first), std::nullopt);
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
  EXPECT_EQ(again.join(first), std::nullopt);
  EXPECT_EQ(first.call(next), "w1");
}

}  // namespace
}  // namespace membership_test
