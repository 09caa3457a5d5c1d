// The time limits of the first connection of a pair, at a clock that the test moves on.
#include "stitch/rpc/peers/peer.h"
#include "stitch/rpc/peers/session.h"
#include "tests/support/world_test.h"

namespace first_connection_test {
namespace {

using namespace std::chrono_literals;
using stitch::Error;
using stitch::WorkerId;
using stitch::rpc::Bind;
using stitch::rpc::Peer;
using stitch::rpc::PeerConnection;
using stitch::rpc::PeerConnectionPtr;
using stitch::rpc::PeerLife;
using stitch::rpc::Session;
namespace transport = stitch::transport;

// Timers may fire so much early.
constexpr auto kEarly = 1ms;

class OpenConnection final : public transport::Connection {
 public:
  [[nodiscard]] const transport::Hello& peer() const override { return hello_; }
  void send(transport::Message, transport::SendDone done) override { done(std::nullopt); }
  void close(const Error&) override {}
  [[nodiscard]] std::string describe() const override { return "test:1"; }

 private:
  const transport::Hello hello_{};
};

class FirstConnection : public ::testing::Test {
 protected:
  FirstConnection() { life_.session = std::make_shared<Session>(Session::Events{}); }

  // This worker's attempt, once the handshake has succeeded.
  PeerConnectionPtr attempt() {
    Peer::Effects effects;
    peer_.connect(effects);
    const PeerConnectionPtr own = effects.connect;
    EXPECT_NE(own, nullptr);
    open(own);
    return own;
  }
  // An attempt for which nothing waits.
  PeerConnectionPtr tried() {
    Peer::Effects effects;
    peer_.try_to_connect(effects);
    EXPECT_NE(effects.connect, nullptr);
    return effects.connect;
  }
  Peer::Effects failed(const PeerConnectionPtr& connection, bool no_process_listens = false) {
    Peer::Effects effects;
    peer_.on_closed(connection, Error(stitch::ErrorCode::disconnected, "no route"),
                    no_process_listens, effects);
    return effects;
  }
  // The peer's; this worker has sent OFFER.
  PeerConnectionPtr offered() {
    auto connection = std::make_shared<PeerConnection>();
    open(connection);
    return connection;
  }
  Bind::Step answer(const PeerConnectionPtr& connection, Bind::Step step) {
    Peer::Effects effects;
    Bind bind;
    bind.step = step;
    peer_.on_bind(connection, bind, effects);
    timers_ = effects.timers;
    return effects.bind.step;
  }
  // Why `connection` is closed when that much more time has passed; empty if it is not.
  std::string closed_after(std::chrono::nanoseconds time, const PeerConnectionPtr& connection) {
    const auto open_connection = connection->connection;
    moved_on_ += time;
    Peer::Effects effects;
    peer_.on_timer(effects);
    for (const auto& [closed, reason] : effects.close) {
      if (closed == open_connection) return reason.what();
    }
    return "";
  }
  // How far off the timer is that was asked for last.
  [[nodiscard]] std::chrono::nanoseconds next_timer() const {
    return timers_.empty() ? 0ns : timers_.back() - now_();
  }

  PeerLife life_{{{"worker0", WorkerId(0), 1}, {"test:1"}}, nullptr};
  const Peer::Clock::time_point start_ = Peer::Clock::now();
  std::chrono::nanoseconds moved_on_{0};
  const Peer::Now now_ = [this] { return start_ + moved_on_; };
  Peer peer_{life_, WorkerId(1), {true}, 1s, 7, now_};

 private:
  void open(const PeerConnectionPtr& connection) {
    connection->peer = &life_;
    connection->connection = std::make_shared<OpenConnection>();
    Peer::Effects effects;
    peer_.on_open(connection, effects);
    timers_ = effects.timers;
  }

  std::vector<Peer::Clock::time_point> timers_;
};

TEST_F(FirstConnection, AnAttemptThatIsNotNeededCostsNothingWhenItFails) {
  for (int i = 0; i < 5; ++i) {
    const auto effects = failed(tried());
    EXPECT_FALSE(effects.connect) << "it is repeated";
    EXPECT_TRUE(effects.timers.empty()) << "it is repeated";
    EXPECT_FALSE(effects.lost);
    EXPECT_FALSE(peer_.lost());
    moved_on_ += 1s;
  }
  // A call that needs it then has the whole time.
  auto effects = failed(attempt());
  EXPECT_FALSE(effects.lost);
  EXPECT_FALSE(effects.timers.empty());
}

TEST_F(FirstConnection, AnAttemptIsLikeAnyOtherOnceItIsNeeded) {
  const auto own = tried();
  Peer::Effects effects;
  peer_.connect(effects);
  EXPECT_FALSE(effects.connect) << "there is one";
  effects = failed(own);
  EXPECT_FALSE(effects.timers.empty());
  moved_on_ += 2s;
  effects = {};
  peer_.on_timer(effects);
  ASSERT_TRUE(effects.connect);
  EXPECT_TRUE(failed(effects.connect).lost);
}

// A process listens before it makes its address known: one that does not has ended.
TEST_F(FirstConnection, WhereNoProcessListensThePeerIsLostAtOnce) {
  EXPECT_TRUE(failed(attempt(), true).lost);
}

TEST_F(FirstConnection, WhereNoProcessListensThePeerIsLostThoughNoCallNeedsIt) {
  EXPECT_TRUE(failed(tried(), true).lost);
}

// The worker with the lower id may be trying by itself so long.
TEST_F(FirstConnection, AnAttemptThatIsOpenAndGetsNoOfferIsGivenUpAfterFifteenSeconds) {
  const auto own = attempt();
  EXPECT_EQ(next_timer(), 15s);
  EXPECT_EQ(closed_after(15s - kEarly - 1ns, own), "");
  EXPECT_EQ(closed_after(1ns, own), "test:1 does not answer");
}

TEST_F(FirstConnection, AnAcceptedOfferThatIsNotConfirmedIsGivenUpAfterFiveSeconds) {
  const auto own = attempt();
  EXPECT_EQ(closed_after(10s, own), "");
  EXPECT_EQ(answer(own, Bind::Step::offer), Bind::Step::accept);
  EXPECT_EQ(next_timer(), 5s);
  EXPECT_EQ(closed_after(5s - kEarly - 1ns, own), "") << "the time counts from the offer";
  EXPECT_EQ(closed_after(1ns, own), "test:1 does not answer");
}

TEST_F(FirstConnection, AnOfferThatIsNotAnsweredIsTakenBackAfterFiveSeconds) {
  const auto connection = offered();
  EXPECT_EQ(next_timer(), 5s);
  EXPECT_EQ(closed_after(5s - kEarly - 1ns, connection), "");
  EXPECT_EQ(closed_after(1ns, connection), "the peer did not answer");
}

}  // namespace
}  // namespace first_connection_test
