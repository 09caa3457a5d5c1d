// Which connection two workers use, and when a peer is lost.
#include "stitch/transport/loopback/loopback_endpoint.h"
#include "stitch/transport/selection/make_endpoints.h"
#include "tests/support/world_test.h"

namespace peer_table_test {
namespace {

using namespace stitch::testing;
using stitch::base::Mutex;
using stitch::base::MutexLock;
using stitch::rpc::Member;
using stitch::rpc::PeerTable;
namespace base = stitch::base;
namespace transport = stitch::transport;

constexpr std::uint16_t kText = 0x700;

transport::Message message_of(const std::string& text, std::uint16_t kind = kText) {
  transport::FrameBuilder frame(kind);
  frame.body().append(text.data(), text.size());
  frame.end_body();
  return std::move(frame).finish();
}
std::string text_of(const transport::Message& message) {
  const auto body = transport::FrameView(message).body();
  return std::string(reinterpret_cast<const char*>(body.data()), body.size());
}
std::string name_of(std::uint32_t id) { return "worker" + std::to_string(id); }

transport::EndpointOptions options_of(std::uint32_t id) {
  transport::EndpointOptions options;
  options.self.id = id;
  options.self.name = name_of(id);
  return options;
}

// A connection that is never established.
class NoConnection final : public transport::Connection {
 public:
  [[nodiscard]] const transport::Hello& peer() const override { return hello_; }
  void send(transport::Message, transport::SendDone) override {
    ADD_FAILURE() << "sent before BIND";
  }
  void close(const Error&) override {}
  [[nodiscard]] std::string describe() const override { return "nowhere"; }

 private:
  transport::Hello hello_;
};

// The attempts to connect, and how they end. Shared with the endpoint below.
struct Tries {
  std::atomic<int> begun{0};
  std::atomic<int> closed{0};
  std::function<std::optional<Error>(int)> fails;  // by the number of the attempt; set before start
  int cut = 0;  // number of connections that end with `protocol` once open; set before start
};

// Counts connections, and makes some fail as a real endpoint would.
class Watched final : public transport::Endpoint {
 public:
  Watched(std::unique_ptr<transport::Endpoint> inner, std::shared_ptr<Tries> tries,
          std::string scheme)
      : inner_(std::move(inner)), tries_(std::move(tries)), scheme_(std::move(scheme)) {}
  std::vector<std::string> listen(Accept accept) override {
    if (!scheme_.empty()) return {scheme_ + ":1"};
    return inner_->listen(std::move(accept));
  }
  std::shared_ptr<transport::Connection> connect(const std::string& address, transport::Wanted whom,
                                                 transport::ConnectionEvents events) override {
    const int number = tries_->begun++;
    if (auto error = tries_->fails ? tries_->fails(number) : std::nullopt) {
      auto connection = std::make_shared<NoConnection>();
      loop_.post([connection, events, error] { events.on_closed(connection, *error); });
      return connection;
    }
    if (number < tries_->cut) {
      events.on_open = [opened = events.on_open](const auto& connection) {
        opened(connection);
        connection->close(Error(ErrorCode::protocol, "the stream ended within sealed record 1"));
      };
    }
    events.on_closed = [tries = tries_, closed = events.on_closed](const auto& connection,
                                                                   const Error& error) {
      ++tries->closed;
      closed(connection, error);
    };
    return inner_->connect(address, whom, std::move(events));
  }
  void close() override { inner_->close(); }
  void join() override { inner_->join(); }

 private:
  const std::unique_ptr<transport::Endpoint> inner_;
  const std::shared_ptr<Tries> tries_;
  const std::string scheme_;
  base::EventLoop loop_{"tries"};
};

// A peer table with what a worker has around it.
class Node {
 public:
  Node(std::uint32_t id, std::shared_ptr<transport::LoopbackNetwork> network) : id_(id) {
    addresses_ = table_.listen(std::make_unique<Watched>(
        transport::make_loopback_endpoint(options_of(id), std::move(network)), tries, ""));
  }
  // An endpoint whose address is known to the other workers, where every attempt fails.
  std::shared_ptr<Tries> add_useless_endpoint(
      const std::shared_ptr<transport::LoopbackNetwork>& network, const std::string& scheme,
      Error error) {
    auto useless = std::make_shared<Tries>();
    useless->fails = [error](int) { return error; };
    static_cast<void>(table_.listen(std::make_unique<Watched>(
        transport::make_loopback_endpoint(options_of(id_), network), useless, scheme)));
    return useless;
  }
  void start(const std::vector<Member>& members) {
    table_.start(
        members, WorkerId(id_),
        {.on_message =
             [this](const auto&, const WorkerInfo& from, transport::Message message) {
               MutexLock lock(mutex_);
               heard_.push_back(from.name + ": " + text_of(message));
             },
         .place = [](const auto&, const auto&, std::size_t) { return transport::Buffer{}; },
         .on_lost =
             [this](const WorkerInfo& peer, const Error& reason) {
               MutexLock lock(mutex_);
               lost_.push_back(peer.name + ": " + reason.what());
             },
         .call_at = [this](auto when, auto task) { loop_.call_at(when, std::move(task)); },
         .deadline =
             [this](std::uint64_t call) {
               return call != unwanted ? std::optional(PeerTable::Clock::time_point::max())
                                       : std::nullopt;
             }});
  }
  ~Node() {
    table_.close();
    loop_.close();
  }
  void send(std::uint32_t to, const std::string& text, std::uint64_t call = 0) {
    table_.send(
        table_.find(WorkerId(to)), nullptr, message_of(text),
        [this](const std::optional<Error>& error) {
          MutexLock lock(mutex_);
          if (error) failures_.push_back(*error);
        },
        call);
  }
  [[nodiscard]] std::vector<std::string> heard() {
    MutexLock lock(mutex_);
    return heard_;
  }
  [[nodiscard]] std::vector<std::string> lost() {
    MutexLock lock(mutex_);
    return lost_;
  }
  [[nodiscard]] std::vector<Error> failures() {
    MutexLock lock(mutex_);
    return failures_;
  }
  // What debug_info() says of failed attempts to connect to worker1, by address.
  [[nodiscard]] std::map<std::string, std::int64_t> connect_failures() const {
    std::map<std::string, std::int64_t> numbers, failures;
    table_.debug_info(numbers);
    const std::string key = "rpc.peer.worker1.connect_failures.";
    for (const auto& [name, number] : numbers)
      if (name.starts_with(key)) failures.emplace(name.substr(key.size()), number);
    return failures;
  }
  [[nodiscard]] Member member() const { return {{name_of(id_), WorkerId(id_), 0}, addresses_}; }
  [[nodiscard]] PeerTable& table() { return table_; }
  [[nodiscard]] base::EventLoop& loop() { return loop_; }

  const std::shared_ptr<Tries> tries = std::make_shared<Tries>();
  std::atomic<std::uint64_t> unwanted{0};

 private:
  const std::uint32_t id_;
  base::EventLoop loop_{"node"};
  std::vector<std::string> addresses_;
  Mutex mutex_;
  std::vector<std::string> heard_ STITCH_GUARDED_BY(mutex_);
  std::vector<std::string> lost_ STITCH_GUARDED_BY(mutex_);
  std::vector<Error> failures_ STITCH_GUARDED_BY(mutex_);
  PeerTable table_{3s};
};

class PeerTables : public ::testing::Test {
 protected:
  PeerTables() { members = {nodes[0]->member(), nodes[1]->member()}; }
  void start() {
    for (auto& node : nodes) node->start(members);
  }
  [[nodiscard]] static std::vector<std::string> from(std::uint32_t id,
                                                     const std::vector<std::string>& texts) {
    std::vector<std::string> lines;
    for (const auto& text : texts) lines.push_back(name_of(id) + ": " + text);
    return lines;
  }
  // The endpoint of a program that is no worker, or of a defective worker.
  [[nodiscard]] std::unique_ptr<transport::Endpoint> raw(std::uint32_t id) {
    return transport::make_loopback_endpoint(options_of(id), network);
  }

  std::shared_ptr<transport::LoopbackNetwork> network =
      std::make_shared<transport::LoopbackNetwork>();
  std::vector<std::unique_ptr<Node>> nodes = [this] {
    std::vector<std::unique_ptr<Node>> two;
    for (std::uint32_t id = 0; id < 2; ++id) two.push_back(std::make_unique<Node>(id, network));
    return two;
  }();
  std::vector<Member> members;
};

const Error kNoDescriptors(ErrorCode::disconnected,
                           "connect to \"loopback:2\" failed: Too many open files");

TEST_F(PeerTables, AShortageOfResourcesWhileConnectingIsRetried) {
  nodes[0]->tries->fails = [](int number) {
    return number < 4 ? std::optional(kNoDescriptors) : std::nullopt;
  };
  start();
  for (const char* text : {"a", "b", "c"}) nodes[0]->send(1, text);
  EXPECT_TRUE(contains(nodes[0]->table().condition(members[1].info), "worker is not connected"));
  EXPECT_TRUE(eventually([&] { return nodes[1]->heard() == from(0, {"a", "b", "c"}); }));
  EXPECT_EQ(nodes[0]->table().failed_tries(), 4u);
  const std::string condition = nodes[0]->table().condition(members[1].info);
  EXPECT_TRUE(condition.starts_with("worker was last heard ")) << condition;
  EXPECT_TRUE(nodes[0]->lost().empty());
  EXPECT_TRUE(nodes[0]->failures().empty());
}

TEST_F(PeerTables, APeerThatCannotBeReachedIsLostAfterTheReconnectTimeout) {
  nodes[0]->tries->fails = [](int) { return kNoDescriptors; };
  start();
  const auto begun = std::chrono::steady_clock::now();
  nodes[0]->send(1, "a");
  nodes[0]->send(1, "b");
  EXPECT_TRUE(eventually([&] { return nodes[0]->lost().size() == 1; }));
  const auto took = std::chrono::steady_clock::now() - begun;
  EXPECT_GE(took, 2900ms);
  ASSERT_EQ(nodes[0]->failures().size(), 2u);
  EXPECT_STREQ(nodes[0]->failures()[0].what(), kNoDescriptors.what());
  EXPECT_EQ(nodes[0]->table().condition(members[1].info), "worker is gone");
  nodes[0]->send(1, "c");
  ASSERT_EQ(nodes[0]->failures().size(), 3u);
  EXPECT_EQ(nodes[0]->failures()[2].code(), ErrorCode::disconnected);
}

// A stranger can refuse in a worker's place.
TEST_F(PeerTables, ARefusalIsAnAttemptThatFailed) {
  nodes[0]->tries->fails = [](int number) {
    constexpr std::array kCodes{ErrorCode::unauthenticated, ErrorCode::protocol,
                                ErrorCode::shutting_down, ErrorCode::overloaded};
    return number >= 4 ? std::nullopt
                       : std::optional(Error(kCodes.at(static_cast<std::size_t>(number)), "refused")
                                           .with_remote(true));
  };
  start();
  nodes[0]->send(1, "a");
  EXPECT_TRUE(eventually([&] { return nodes[1]->heard() == from(0, {"a"}); }));
  EXPECT_EQ(nodes[0]->tries->begun, 5);
  EXPECT_TRUE(nodes[0]->lost().empty());
  EXPECT_TRUE(nodes[0]->failures().empty());
}

TEST_F(PeerTables, APeerThatRefusesAlwaysIsLostWithItsReason) {
  nodes[0]->tries->fails = [](int) {
    return Error(ErrorCode::unauthenticated, "the secrets differ");
  };
  start();
  nodes[0]->send(1, "a");
  EXPECT_TRUE(eventually([&] { return nodes[0]->lost().size() == 1; }));
  EXPECT_EQ(nodes[0]->failures().at(0).code(), ErrorCode::unauthenticated);
}

TEST_F(PeerTables, AConnectionCutOnceOpenIsNotARefusal) {
  nodes[0]->tries->cut = 2;
  start();
  nodes[0]->send(1, "a");
  EXPECT_TRUE(eventually([&] { return nodes[1]->heard() == from(0, {"a"}); }));
  EXPECT_EQ(nodes[0]->tries->begun, 3);
  EXPECT_TRUE(nodes[0]->lost().empty());
}

TEST_F(PeerTables, TheAddressesOfAPeerAreTriedInTurn) {
  for (const auto code : {ErrorCode::disconnected, ErrorCode::unauthenticated}) {
    SCOPED_TRACE(static_cast<int>(code));
    Node a(0, network);
    Node b(1, network);
    const auto shm = a.add_useless_endpoint(network, "shm", Error(code, "shm is out of reach"));
    auto with_shm = b.member();
    with_shm.addresses.insert(with_shm.addresses.begin(), {"ib:4", "shm:3"});
    const std::vector<Member> world{a.member(), with_shm};
    a.start(world);
    b.start(world);
    a.send(1, "a");
    EXPECT_TRUE(eventually([&] { return b.heard() == from(0, {"a"}); }));
    EXPECT_EQ(shm->begun, 1);
    EXPECT_TRUE(a.lost().empty());
    EXPECT_EQ(a.connect_failures(), (std::map<std::string, std::int64_t>{{"shm:3", 1}}));
  }
}

TEST_F(PeerTables, TheErrorNamesAllAddressesThatWereTried) {
  nodes[0]->tries->fails = [](int) { return kNoDescriptors; };
  static_cast<void>(nodes[0]->add_useless_endpoint(
      network, "shm", Error(ErrorCode::unauthenticated, "shm belongs to another user")));
  members[1].addresses.insert(members[1].addresses.begin(), "shm:3");
  start();
  nodes[0]->send(1, "a");
  EXPECT_TRUE(eventually([&] { return nodes[0]->lost().size() == 1; }));
  const std::string text = nodes[0]->lost().at(0);
  for (const char* part :
       {"shm:3", "loopback:2", "Too many open files", "shm belongs to another user"})
    EXPECT_TRUE(contains(text, part)) << text;
  const auto failures = nodes[0]->connect_failures();
  EXPECT_EQ(failures.size(), 2U);
  EXPECT_EQ(failures.at("shm:3"), failures.at("loopback:2"));
  EXPECT_EQ(failures.at("loopback:2"), nodes[0]->tries->begun);
}

TEST_F(PeerTables, AnAddressWithoutATransportDoesNotLoseThePeer) {
  members[1].addresses = {"ib:4"};
  start();
  nodes[0]->send(1, "a");
  ASSERT_EQ(nodes[0]->failures().size(), 1u);
  EXPECT_STREQ(nodes[0]->failures()[0].what(),
               "worker \"worker1\" (id 1) cannot be reached: no transport here for its addresses "
               "ib:4");
  EXPECT_TRUE(nodes[0]->lost().empty());
}

TEST_F(PeerTables, OfTwoSimultaneousConnectionsTheOneOfTheLowerIdIsKept) {
  for (int round = 0; round < 50; ++round) {
    const auto own = std::make_shared<transport::LoopbackNetwork>();
    Node a(0, own);
    Node b(1, own);
    const std::vector<Member> world{a.member(), b.member()};
    a.start(world);
    b.start(world);
    std::vector<std::string> texts;
    for (int i = 0; i < 20; ++i) texts.push_back(std::to_string(i));
    {
      std::jthread first([&] {
        for (const auto& text : texts) a.send(1, text);
      });
      std::jthread second([&] {
        for (const auto& text : texts) b.send(0, text);
      });
    }
    EXPECT_TRUE(eventually([&] {
      return a.heard() == from(1, texts) && b.heard() == from(0, texts);
    })) << "round "
        << round;
    EXPECT_TRUE(eventually([&] {
      return a.tries->begun - a.tries->closed + b.tries->begun - b.tries->closed == 1;
    })) << "one connection is left";
    if (a.tries->begun > 0 && b.tries->begun > 0) {
      EXPECT_EQ(a.tries->closed, 0) << "round " << round;
    }
    EXPECT_EQ(a.table().connections() + b.table().connections(), 2u);
    EXPECT_TRUE(a.lost().empty() && b.lost().empty());
    EXPECT_TRUE(a.failures().empty() && b.failures().empty());
  }
}

// What a connection that the test opened to `node` reports.
struct Outcome {
  std::atomic<bool> open{false};
  std::atomic<bool> closed{false};
  std::atomic<int> messages{0};
  std::string reason;  // once closed
  [[nodiscard]] transport::ConnectionEvents events() {
    return {.on_open = [this](const auto&) { open = true; },
            .on_message = [this](const auto&, transport::Message) { ++messages; },
            .place = nullptr,
            .on_closed =
                [this](const auto&, const Error& error) {
                  if (!closed) reason = error.what();  // of the first attempt
                  closed = true;
                }};
  }
};

TEST_F(PeerTables, AnotherWorkerAtThePeersAddressIsRefusedBeforeItIsOpen) {
  Outcome outcome;
  const auto other = raw(0);
  members[1].addresses = other->listen([&] { return outcome.events(); });
  start();
  nodes[0]->send(1, "a");
  EXPECT_TRUE(eventually([&] { return nodes[0]->lost().size() == 1; }));
  const std::string who =
      "worker id 1, epoch 0 is wanted, worker \"worker0\" (id 0, epoch 0) answers";
  EXPECT_EQ(nodes[0]->failures().at(0).code(), ErrorCode::disconnected);
  EXPECT_TRUE(contains(nodes[0]->lost().at(0), who)) << nodes[0]->lost().at(0);
  EXPECT_EQ(nodes[0]->table().connections(), 0u);
  EXPECT_TRUE(eventually([&] { return outcome.closed.load(); }));
  EXPECT_TRUE(contains(outcome.reason, who)) << outcome.reason;
  EXPECT_FALSE(outcome.open);
  EXPECT_EQ(outcome.messages, 0);
}

TEST_F(PeerTables, AnotherEpochOfThePeerIsRefusedBeforeItIsOpen) {
  auto options = options_of(1);
  options.self.epoch = 7;
  std::atomic<int> opened{0};
  Outcome outcome;
  const auto later = transport::make_loopback_endpoint(options, network);
  members[1].addresses = later->listen([&] {
    auto events = outcome.events();
    events.on_closed = nullptr;  // of each attempt
    events.on_open = [&](const auto& connection) {
      ++opened;
      connection->close(Error(ErrorCode::disconnected, "closed by the test"));
    };
    return events;
  });
  start();
  nodes[0]->send(1, "a");
  EXPECT_TRUE(eventually([&] { return nodes[0]->lost().size() == 1; }));
  const std::string text = nodes[0]->lost().at(0);
  EXPECT_TRUE(contains(text, "worker \"worker1\" (id 1, epoch 7) is not in this world")) << text;
  EXPECT_EQ(nodes[0]->failures().at(0).code(), ErrorCode::disconnected);
  EXPECT_EQ(nodes[0]->table().connections(), 0u);
  EXPECT_EQ(opened, 0);
  EXPECT_EQ(outcome.messages, 0);
}

TEST_F(PeerTables, ASecondConnectionCannotTakeTheNameOfAPeerThatIsConnected) {
  start();
  nodes[0]->send(1, "a");
  ASSERT_TRUE(eventually([&] { return nodes[1]->heard().size() == 1; }));
  for (const std::uint32_t claimed : {1, 5}) {
    Outcome outcome;
    const auto impostor = raw(claimed);
    const auto connection = impostor->connect(members[0].addresses[0], {0}, outcome.events());
    EXPECT_TRUE(eventually([&] { return outcome.closed.load(); }));
    EXPECT_EQ(outcome.messages, claimed == 1 ? 1 : 0) << "an offer at most, without the token";
  }
  nodes[0]->send(1, "b");
  nodes[1]->send(0, "c");
  EXPECT_TRUE(eventually([&] { return nodes[1]->heard() == from(0, {"a", "b"}); }));
  EXPECT_TRUE(eventually([&] { return nodes[0]->heard() == from(1, {"c"}); }));
  EXPECT_TRUE(nodes[0]->lost().empty());
}

TEST_F(PeerTables, AMessageBeforeBindClosesTheConnection) {
  start();
  Outcome outcome;
  const auto hasty = raw(1);
  const auto connection = hasty->connect(members[0].addresses[0], {0}, outcome.events());
  connection->send(message_of("before BIND"), nullptr);
  EXPECT_TRUE(eventually([&] { return outcome.closed.load(); }));
  EXPECT_TRUE(nodes[0]->heard().empty());
  EXPECT_TRUE(nodes[0]->lost().empty());
  nodes[1]->send(0, "a");
  EXPECT_TRUE(eventually([&] { return nodes[0]->heard() == from(1, {"a"}); }));
}

TEST_F(PeerTables, AConnectionOpenedBeforeStartIsAnsweredAtStart) {
  nodes[1]->start(members);
  nodes[1]->send(0, "early");
  std::this_thread::sleep_for(20ms);  // it should be open by then
  EXPECT_TRUE(nodes[0]->heard().empty());
  nodes[0]->start(members);
  EXPECT_TRUE(eventually([&] { return nodes[0]->heard() == from(1, {"early"}); }));
}

TEST_F(PeerTables, APeerThatIsGivenUpIsLostWithTheReason) {
  start();
  nodes[0]->send(1, "a");
  ASSERT_TRUE(eventually([&] { return nodes[1]->heard().size() == 1; }));
  nodes[0]->table().give_up(members[1].info, Error(ErrorCode::overloaded, "it does not read"));
  EXPECT_TRUE(eventually([&] { return nodes[0]->lost() == from(1, {"it does not read"}); }));
}

TEST_F(PeerTables, OnlyTheWorkerItselfMayConnectUnderItsName) {
  start();
  nodes[0]->send(0, "to myself");
  EXPECT_TRUE(eventually([&] { return nodes[0]->heard() == from(0, {"to myself"}); }));

  // Over the network, its own name is used by an impostor.
  const auto make = [](std::uint32_t id) {
    transport::TransportChoice tcp;
    tcp.transports = {"tcp"};
    return std::move(transport::make_endpoints(options_of(id), tcp).front());
  };
  Node node(0, network);
  auto addresses = node.table().listen(make(0));
  node.start({node.member(), members[1]});
  Outcome outcome;
  const auto impostor = make(0);
  const auto connection = impostor->connect(addresses.front(), {0}, outcome.events());
  EXPECT_TRUE(eventually([&] { return outcome.closed.load(); }));
  EXPECT_EQ(outcome.messages, 0) << "no BIND for it";
}

}  // namespace
}  // namespace peer_table_test
