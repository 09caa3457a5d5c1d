// What a Session does with peers and connections that break the rules, or are slow.
#include <deque>

#include "stitch/base/byte_io.h"
#include "stitch/base/bytes.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/message/time_left.h"
#include "stitch/rpc/peers/bind_frame.h"
#include "stitch/rpc/peers/session.h"
#include "tests/support/plain_test.h"

namespace stitch::rpc::session_rules_test {
namespace {

using Outcome = std::optional<Error>;
using Clock = std::chrono::steady_clock;

transport::Message message_of(std::uint16_t kind, std::size_t bytes = 8) {
  transport::FrameBuilder frame(kind);
  frame.body().resize(frame.body().size() + bytes);
  frame.end_body();
  return std::move(frame).finish();
}

// What a request says of the time that its call has left.
std::int64_t time_in(const base::Bytes& frame) {
  std::int64_t left = 0;
  std::memcpy(&left, transport::peek_frame(frame)->body.data() + kTimeLeftOffset, sizeof(left));
  return base::to_wire_order(left);
}

// As it comes from a peer.
transport::Message numbered(std::uint64_t number, Session::Received received,
                            std::uint16_t kind = wire::kRequest) {
  transport::Message message = message_of(kind);
  transport::put_numbers(message.frame, {number, received});
  return message;
}

// Keeps what is sent until the test says what becomes of it, or passes it on at once.
class Held final : public transport::Connection {
 public:
  ~Held() override {
    while (!dones.empty()) finish(Error(ErrorCode::disconnected, "gone"));
  }
  [[nodiscard]] const transport::Hello& peer() const override { return hello_; }
  void send(transport::Message message, transport::SendDone done) override {
    kinds.push_back(transport::peek_frame(message.frame)->kind);
    numbers.push_back(*transport::numbers_of(message.frame));
    last = std::move(message.frame);
    if (passes_on) return done(std::nullopt);
    dones.push_back(std::move(done));
  }
  // The end of the oldest message that it holds.
  void finish(const Outcome& outcome) {
    transport::SendDone done = std::move(dones.front());
    dones.pop_front();
    done(outcome);
  }
  void close(const Error&) override {}
  [[nodiscard]] std::string describe() const override { return "held"; }
  [[nodiscard]] std::size_t count(std::uint16_t kind) const {
    return static_cast<std::size_t>(std::count(kinds.begin(), kinds.end(), kind));
  }

  bool passes_on = false;
  std::vector<std::uint16_t> kinds;
  std::vector<transport::FrameNumbers> numbers;
  std::deque<transport::SendDone> dones;
  base::Bytes last;  // the frame that it was given last; the session may hold its bytes

 private:
  transport::Hello hello_;
};

class Sessions : public ::testing::Test {
 protected:
  static constexpr std::size_t kLimit = std::size_t{1} << 20;
  [[nodiscard]] std::shared_ptr<Held> attach(std::uint64_t generation,
                                             const Session::Received& received = {}) {
    auto connection = std::make_shared<Held>();
    session.attach(connection, generation, received);
    return connection;
  }
  // Sends a request; its outcome, once told, is in outcomes.
  void send(std::size_t bytes = 8) {
    const std::size_t at = outcomes.size();
    outcomes.emplace_back();
    session.send(message_of(wire::kRequest, bytes),
                 [this, at](const Outcome& error) { outcomes[at].push_back(error); });
  }
  // Sends the request of a call that says it has `left`; its outcome likewise.
  void call(std::int64_t left) {
    const std::size_t at = outcomes.size();
    outcomes.emplace_back();
    transport::Message message = message_of(wire::kRequest, 32);
    put_time_left(message.frame, {left, 0});
    session.send(
        std::move(message), [this, at](const Outcome& error) { outcomes[at].push_back(error); }, 7);
  }

  std::vector<Error> closed;
  std::vector<std::vector<Outcome>> outcomes;
  std::optional<Clock::time_point> deadline = Clock::time_point::max();  // of all calls
  Session session{Session::Events{.deadline = [this](std::uint64_t) { return deadline; },
                                  .on_close = [this](const Error& why) { closed.push_back(why); },
                                  .on_unconnected = [] {}},
                  kLimit};
};

TEST_F(Sessions, RefuseAcknowledgmentsOfWhatWasNotSent) {
  const auto connection = attach(1);
  for (int i = 0; i < 3; ++i) send();
  for (const std::uint64_t claimed : {std::uint64_t{4}, std::uint64_t{63}, std::uint64_t{64},
                                      std::uint64_t{1} << 62, ~std::uint64_t{0}}) {
    for (const std::size_t stream : {0, 1}) {
      Session::Received received{};
      received[stream] = claimed;
      EXPECT_THROW(static_cast<void>(session.receive(numbered(1, received))), Error) << claimed;
      EXPECT_THROW(session.attach(connection, 2, received), Error) << claimed;
    }
  }
  EXPECT_EQ(session.statistics().kept_messages, 3u) << "none is taken for received";
  EXPECT_EQ(session.receive(numbered(1, {3, 0})), Session::Arrival::deliver);
  session.acknowledge_now();
  EXPECT_EQ(session.statistics().kept_messages, 0u);
  while (!connection->dones.empty()) connection->finish(std::nullopt);
}

TEST_F(Sessions, FreeWhatALargeMessageAcknowledgesWhenItsFrameHasCome) {
  const auto connection = attach(1);
  connection->passes_on = true;
  for (int i = 0; i < 3; ++i) send(std::size_t{64} << 10);
  ASSERT_EQ(session.statistics().kept_messages, 3u);
  const transport::Message next = numbered(1, {0, 2});
  session.acknowledged_ahead(next.frame);
  EXPECT_EQ(session.statistics().kept_messages, 1u);
  // What no session says is refused later, when the message has come.
  session.acknowledged_ahead(numbered(1, {0, 4}).frame);
  session.acknowledged_ahead(numbered(1, {9, 1}).frame);
  session.acknowledged_ahead(base::Bytes());
  EXPECT_EQ(session.statistics().kept_messages, 1u);
  EXPECT_EQ(session.receive(next), Session::Arrival::deliver);
  EXPECT_THROW(static_cast<void>(session.receive(numbered(2, {0, 4}))), Error);
}

TEST_F(Sessions, GiveUpAPeerThatReadsAndNeverAcknowledges) {
  const auto connection = attach(1);
  connection->passes_on = true;
  constexpr std::size_t kBytes = std::size_t{16} << 10;
  while (closed.empty() && outcomes.size() < 1000) send(kBytes);
  ASSERT_EQ(closed.size(), 1u);
  EXPECT_EQ(closed[0].code(), ErrorCode::overloaded);
  EXPECT_GE(session.statistics().kept_bytes, kLimit);
  EXPECT_LE(session.statistics().kept_bytes, kLimit * 3 / 2);
}

TEST_F(Sessions, DoNotGiveUpAPeerBecauseOfWhatATransportHolds) {
  const auto connection = attach(1);
  for (int i = 0; i < 300; ++i) send(std::size_t{16} << 10);
  EXPECT_TRUE(closed.empty());
  EXPECT_GT(session.statistics().kept_bytes, 4 * kLimit);
  // Nor one that acknowledges.
  connection->passes_on = true;
  while (!connection->dones.empty()) connection->finish(std::nullopt);
  for (std::uint64_t number = 1; number <= 300; ++number) {
    EXPECT_EQ(session.receive(numbered(number, {outcomes.size(), 0})), Session::Arrival::deliver);
    send(std::size_t{16} << 10);
  }
  EXPECT_TRUE(closed.empty());
}

TEST_F(Sessions, QueueOneReceivedAtATimeForAPeerThatDoesNotRead) {
  const auto connection = attach(1);
  std::uint64_t number = 0;
  const auto receive = [&](std::uint64_t count) {
    while (count-- > 0) {
      static_cast<void>(session.receive(numbered(++number, {})));
      static_cast<void>(session.received_one());
    }
  };
  receive(10'000);
  EXPECT_EQ(connection->count(wire::kReceived), 1u);
  EXPECT_LT(connection->numbers.back().received[0], 1000u);
  connection->finish(std::nullopt);
  EXPECT_EQ(connection->count(wire::kReceived), 2u) << "it was due meanwhile";
  EXPECT_EQ(connection->numbers.back().received[0], 10'000u);
  connection->finish(std::nullopt);
  EXPECT_EQ(connection->count(wire::kReceived), 2u) << "nothing has come since";
  receive(256);
  connection->finish(Error(ErrorCode::disconnected, "cut"));
  EXPECT_EQ(connection->count(wire::kReceived), 3u);
}

TEST_F(Sessions, AcknowledgeWhatCameWhileTheyCouldNotSend) {
  static_cast<void>(session.receive(numbered(1, {})));
  EXPECT_TRUE(session.received_one());
  session.acknowledge_now();  // the time has come, and there is no connection
  const auto connection = attach(1);
  ASSERT_EQ(connection->count(wire::kReceived), 1u);
  EXPECT_EQ(connection->numbers.back().received[0], 1u);
  connection->finish(std::nullopt);
}

TEST_F(Sessions, AskOnceForAnAcknowledgmentAndNotForHeartbeats) {
  const auto connection = attach(1);
  EXPECT_EQ(session.receive(numbered(0, {}, wire::kHeartbeat)), Session::Arrival::unnumbered);
  EXPECT_FALSE(session.received_one());
  static_cast<void>(session.receive(numbered(1, {})));
  EXPECT_TRUE(session.received_one());
  static_cast<void>(session.receive(numbered(2, {})));
  EXPECT_FALSE(session.received_one()) << "it was asked for";
  session.acknowledge_now();
  ASSERT_EQ(connection->count(wire::kReceived), 1u);
  EXPECT_EQ(connection->numbers.back().received[0], 2u);
  static_cast<void>(session.receive(numbered(3, {})));
  EXPECT_TRUE(session.received_one());
  connection->finish(std::nullopt);
}

TEST_F(Sessions, SendOneHeartbeatAtATimeAndKeepNone) {
  session.beat({7});
  const auto connection = attach(1);
  session.beat({8});
  session.beat({9});
  EXPECT_EQ(connection->count(wire::kHeartbeat), 1u) << "the one before has not been written";
  connection->finish(std::nullopt);
  session.beat({10});
  EXPECT_EQ(connection->count(wire::kHeartbeat), 2u);
  connection->finish(std::nullopt);
  EXPECT_EQ(session.statistics().kept_messages, 0u);
}

TEST_F(Sessions, GiveUpThePeerWhenATransportRefusesWhatAnotherHasPassedOn) {
  const auto first = attach(1);
  send();
  first->finish(std::nullopt);
  session.detach(first);
  const auto second = attach(2);
  second->finish(Error(ErrorCode::unimplemented, "not carried here"));
  EXPECT_EQ(closed.size(), 1u);
  EXPECT_EQ(outcomes[0].size(), 1u);
  EXPECT_FALSE(outcomes[0][0]);
}

// An hour and a second, in ns, as requests say it.
constexpr std::int64_t kHour = std::chrono::nanoseconds(std::chrono::hours(1)).count();
constexpr std::int64_t kSecond = std::chrono::nanoseconds(std::chrono::seconds(1)).count();

TEST_F(Sessions, SayHowMuchTimeIsLeftWhenARequestIsSentAgain) {
  auto connection = attach(1);
  call(kHour);
  EXPECT_EQ(time_in(connection->last), kHour);
  std::uint64_t generation = 1;
  const auto time_said_again = [&](std::optional<Clock::time_point> until) {
    connection->finish(Error(ErrorCode::disconnected, "cut"));
    session.detach(connection);
    deadline = until;
    connection = attach(++generation);
    EXPECT_EQ(connection->kinds, std::vector<std::uint16_t>{wire::kRequest});
    return time_in(connection->last);
  };
  const std::int64_t left = time_said_again(Clock::now() + std::chrono::minutes(30));
  EXPECT_LE(left, kHour / 2);
  EXPECT_GT(left, kHour / 4);
  EXPECT_EQ(time_said_again(Clock::time_point::max()), 0) << "without a limit";
  EXPECT_LT(time_said_again(Clock::now() - std::chrono::seconds(1)), 0) << "it has passed";
  EXPECT_LT(time_said_again(std::nullopt), 0) << "the call has been cancelled";
  EXPECT_TRUE(outcomes[0].empty()) << "the peer may have it";
  connection->finish(std::nullopt);
  ASSERT_EQ(outcomes[0].size(), 1u);
  EXPECT_FALSE(outcomes[0][0]);
}

TEST_F(Sessions, DoNotChangeARequestThatATransportMayStillRead) {
  const auto former = attach(1);
  call(kHour);
  session.detach(former);  // it has not let go of the message yet
  deadline = Clock::now() + std::chrono::seconds(1);
  const auto connection = attach(2);
  EXPECT_EQ(time_in(former->last), kHour);
  EXPECT_LE(time_in(connection->last), kSecond);
  former->finish(Error(ErrorCode::disconnected, "cut"));
  EXPECT_LE(time_in(connection->last), kSecond);
  connection->finish(std::nullopt);
}

TEST_F(Sessions, DropTheConnectionsThatAreNotUsedAnyMore) {
  std::vector<std::weak_ptr<Held>> all;
  for (std::uint64_t generation = 1; generation <= 100; ++generation) {
    const auto connection = attach(generation);
    connection->passes_on = true;
    send();
    session.detach(connection);
    all.push_back(connection);
  }
  const auto last = attach(101);
  EXPECT_LE(std::count_if(all.begin(), all.end(), [](const auto& each) { return !each.expired(); }),
            1);
  EXPECT_EQ(session.statistics().reconnects, 100u);
  while (!last->dones.empty()) last->finish(std::nullopt);
}

// ---- BIND

TEST(BindFrames, AreReadAsTheyWereWritten) {
  Bind bind;
  bind.step = Bind::Step::confirm;
  bind.generation = 7;
  bind.token = ~std::uint64_t{0};
  bind.received = {11, std::uint64_t{1} << 40};
  bind.reason = std::string(1000, 'x') + "\n";
  const auto message = bind.encode();
  const Bind read = Bind::decode(transport::peek_frame(message.frame)->body);
  EXPECT_EQ(read.step, bind.step);
  EXPECT_EQ(read.generation, bind.generation);
  EXPECT_EQ(read.token, bind.token);
  EXPECT_EQ(read.received, bind.received);
  EXPECT_EQ(read.reason, std::string(400, 'x'));
}

TEST(BindFrames, ThatEndTooEarlyOrNameNoStepAreRefused) {
  Bind bind;
  bind.reason = "a\nb\x1b[2Jc";
  const auto message = bind.encode();
  const auto body = transport::peek_frame(message.frame)->body;
  EXPECT_EQ(Bind::decode(body).reason, "a?b?[2Jc");
  for (std::size_t bytes = 0; bytes < body.size(); ++bytes)
    EXPECT_THROW(static_cast<void>(Bind::decode(body.first(bytes))), Error) << bytes;
  std::vector<std::byte> wrong(body.begin(), body.end());
  for (const int step : {0, 5, 255}) {
    wrong[0] = static_cast<std::byte>(step);
    EXPECT_THROW(static_cast<void>(Bind::decode(wrong)), Error) << step;
  }
  wrong[0] = std::byte{4};
  for (std::size_t at = 33; at < 41; ++at) wrong[at] = std::byte{0xff};  // the length of the reason
  EXPECT_THROW(static_cast<void>(Bind::decode(wrong)), Error);
}

}  // namespace
}  // namespace stitch::rpc::session_rules_test
