// Strangers that do not know the secret against workers that do, over real sockets: what they can
// read, repeat, change and cut off. Nothing they do opens a connection of theirs or delivers a
// message that was not sent.
#include "stitch/transport/stream/stream_endpoint.h"
#include "tests/support/plain_test.h"
#include "tests/transport/relay.h"

namespace stitch::transport::transcript_attack_test {
namespace {

using std::chrono::milliseconds;

constexpr const char* kSecret = "the secret of this test";

EndpointOptions with_secret(std::uint32_t id, Encryption encryption = Encryption::on) {
  static const auto key = SecretKey::from_random(kSecret);
  EndpointOptions self = options(id);
  self.secret = key;
  self.encryption = encryption;
  return self;
}

bool is_refusal_of_strangers(ErrorCode code) {
  return code == ErrorCode::unauthenticated || code == ErrorCode::protocol;
}

// A worker that listens over TCP, and a Recorder for each connection that comes.
class Listening {
 public:
  explicit Listening(EndpointOptions self)
      : endpoint_(make_stream_endpoint(std::move(self), {{"tcp"}, "127.0.0.1"})) {
    address = endpoint_
                  ->listen([this] {
                    base::MutexLock lock(mutex_);
                    accepted_.push_back(std::make_shared<Recorder>());
                    return accepted_.back()->events();
                  })
                  .front();
  }
  [[nodiscard]] std::size_t accepted() const {
    base::MutexLock lock(mutex_);
    return accepted_.size();
  }
  [[nodiscard]] std::shared_ptr<Recorder> recorder(std::size_t index) const {
    EXPECT_TRUE(wait_until([&] { return accepted() > index; }));
    base::MutexLock lock(mutex_);
    return accepted_.at(index);
  }
  [[nodiscard]] Endpoint& endpoint() { return *endpoint_; }
  std::string address;

 private:
  mutable base::Mutex mutex_;
  std::vector<std::shared_ptr<Recorder>> accepted_;
  std::unique_ptr<Endpoint> endpoint_;
};

// One short session of two workers, of which a relay may change what it likes.
struct Session {
  std::shared_ptr<Recorder> client = std::make_shared<Recorder>();
  std::shared_ptr<Recorder> server;
  std::vector<std::string> heard_by_server;
  std::vector<std::string> heard_by_client;
  bool over = false;  // both sides have ended it by themselves
};

const std::string kQuestion = "how much is the loss?";
const std::string kAnswer = "more than before";

// Sends the question, receives the answer, and then both sides close; unless the relay prevents it.
Session hold_session(Listening& server, std::size_t number, Endpoint& client,
                     const std::string& address) {
  Session session;
  const auto connection = client.connect(address, {1}, session.client->events());
  session.server = server.recorder(number);
  connection->send(make_message(kQuestion), nullptr);
  const auto ended = [](const Recorder& side) { return side.closed().has_value(); };
  const auto settled = [&](Recorder& side) {
    return wait_until([&] { return side.received() > 0 || ended(side) || ended(*session.client); });
  };
  if (settled(*session.server) && session.server->received() > 0) {
    if (const auto back = session.server->connection()) back->send(make_message(kAnswer), nullptr);
    static_cast<void>(settled(*session.client));
  }
  session.over = wait_until([&] { return ended(*session.server) && ended(*session.client); },
                            milliseconds(session.client->received() > 0 ? 0 : 5000));
  connection->close(Error(ErrorCode::cancelled, "the session is over"));
  EXPECT_TRUE(session.client->wait_closed());
  EXPECT_TRUE(session.server->wait_closed());
  session.heard_by_server = session.server->take_texts();
  session.heard_by_client = session.client->take_texts();
  return session;
}

// Only what was sent was delivered, and the side that received changed bytes reports that.
void expect_unharmed(const Session& session, bool to_server) {
  for (const auto& text : session.heard_by_server) EXPECT_EQ(text, kQuestion);
  for (const auto& text : session.heard_by_client) EXPECT_EQ(text, kAnswer);
  EXPECT_LE(session.server->received(), 1U);
  EXPECT_LE(session.client->received(), 1U);
  const auto& victim = to_server ? session.server : session.client;
  EXPECT_TRUE(is_refusal_of_strangers(victim->closed_code())) << victim->closed_text();
}

TEST(TranscriptAttacks, AByteChangedAtAnyPositionOfASessionEndsIt) {
  Listening server(with_secret(1));
  const auto client = make_stream_endpoint(with_secret(2), {{"tcp"}, "127.0.0.1"});
  Relay relay(server.address);
  std::size_t number = 0;
  const Session good = hold_session(server, number++, *client, relay.address());
  ASSERT_EQ(good.heard_by_client, std::vector<std::string>{kAnswer});
  ASSERT_FALSE(good.over);
  const std::array<std::size_t, 2> lengths{relay.carried(true).size(), relay.carried(false).size()};
  ASSERT_GT(lengths[0], 600U);
  EXPECT_EQ(relay.carried(true).find(kQuestion), std::string::npos);
  for (const bool from_connecting : {true, false}) {
    const std::size_t length = lengths[from_connecting ? 0 : 1];
    for (std::size_t at = 0; at < length; ++at) {
      SCOPED_TRACE((from_connecting ? "to the server, byte " : "to the client, byte ") +
                   std::to_string(at));
      relay.change_by([=](bool from, std::size_t index, char& byte) {
        if (from == from_connecting && index == at) byte = static_cast<char>(byte ^ 0x01);
        return true;
      });
      const Session session = hold_session(server, number++, *client, relay.address());
      EXPECT_TRUE(session.over);
      expect_unharmed(session, from_connecting);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

// Worker 2 calls worker 3 at an address where a stranger listens, who passes all on to worker 1.
TEST(TranscriptAttacks, AConnectionThatWasWantedToAnotherWorkerOpensNowhere) {
  for (const Encryption encryption : {Encryption::on, Encryption::off}) {
    Listening server(with_secret(1, encryption));
    const auto client = make_stream_endpoint(with_secret(2, encryption), {{"tcp"}, "127.0.0.1"});
    Relay relay(server.address);
    const auto in_client = std::make_shared<Recorder>();
    const auto connection = client->connect(relay.address(), {3}, in_client->events());
    connection->send(make_message("for worker 3"), in_client->done());
    const auto in_server = server.recorder(0);
    for (const auto& seen : {in_client, in_server}) {
      ASSERT_TRUE(seen->wait_closed());
      EXPECT_EQ(seen->closed_code(), ErrorCode::disconnected);
      EXPECT_NE(seen->closed_text().find("worker id 3, epoch 0 is wanted"), std::string::npos)
          << seen->closed_text();
      EXPECT_FALSE(seen->open());
      EXPECT_EQ(seen->received(), 0U);
    }
  }
}

TEST(ExpectedPeer, IsComparedBeforeAnythingIsSent) {
  Listening server(with_secret(1));
  const auto client = make_stream_endpoint(with_secret(2), {{"tcp"}, "127.0.0.1"});
  const auto in_client = std::make_shared<Recorder>();
  ConnectionEvents events = in_client->events();
  events.check_peer = [](const Hello& peer) {
    EXPECT_EQ(peer.name, "worker1");
    throw Error(ErrorCode::unauthenticated, "worker \"other\" is wanted");
  };
  const auto connection = client->connect(server.address, {1}, std::move(events));
  connection->send(make_message("for another worker"), in_client->done());
  const auto in_server = server.recorder(0);
  for (const auto& seen : {in_client, in_server}) {
    ASSERT_TRUE(seen->wait_closed());
    EXPECT_EQ(seen->closed_code(), ErrorCode::unauthenticated);
    EXPECT_FALSE(seen->open());
  }
  EXPECT_EQ(in_server->received(), 0U);
  EXPECT_NE(in_server->closed_text().find("worker \"other\" is wanted"), std::string::npos);
}

TEST(ExpectedPeer, OurOwnIdIsRefusedFromTheNetwork) {
  EndpointOptions self = with_secret(1);
  self.refuse_own_id = true;
  Listening server(std::move(self));
  const auto client = make_stream_endpoint(with_secret(1), {{"tcp"}, "127.0.0.1"});
  const auto in_client = std::make_shared<Recorder>();
  const auto connection = client->connect(server.address, {1}, in_client->events());
  const auto in_server = server.recorder(0);
  ASSERT_TRUE(in_server->wait_closed());
  EXPECT_EQ(in_server->closed_code(), ErrorCode::unauthenticated);
  EXPECT_NE(in_server->closed_text().find("has the id of this worker itself"), std::string::npos)
      << in_server->closed_text();
  ASSERT_TRUE(in_client->wait_closed());
}

// These were parsed, with a timer for each message, as long as a stranger kept sending.
TEST(RefusedStrangers, AreNotReadFromForLong) {
  Listening server(with_secret(1));
  RawPeer stranger(server.address);
  const auto seen = server.recorder(0);
  static_cast<void>(stranger.read_message());  // its greeting
  stranger.write_message("GET / HTTP/1.1");
  static_cast<void>(stranger.read_message());  // its refusal
  // A silent one has a second to read the reason: the time of fifty messages.
  const std::string more = record_text(RecordKind::message, 0, 4, "STHI");
  int sent = 0;
  while (sent < 500 && ::send(stranger.socket(), more.data(), more.size(), MSG_NOSIGNAL) > 0) {
    ++sent;
    std::this_thread::sleep_for(milliseconds(20));
  }
  EXPECT_LT(sent, 40);
  EXPECT_TRUE(wait_hung_up(stranger.socket()));
  ASSERT_TRUE(seen->wait_closed());
  EXPECT_EQ(seen->closed_code(), ErrorCode::protocol) << seen->closed_text();
}

}  // namespace
}  // namespace stitch::transport::transcript_attack_test
