// More strangers connect than an endpoint can hold: few are kept, and its own peers and connections
// are not affected.
#include <sys/resource.h>

#include "stitch/transport/stream/half_open.h"
#include "stitch/transport/stream/stream_endpoint.h"
#include "tests/support/plain_test.h"
#include "tests/transport/raw_peer.h"

namespace stitch::transport::stream_flood_test {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

// An endpoint that listens, with a Recorder for each connection that comes.
struct Besieged {
  explicit Besieged(const std::string& transport)
      : endpoint(make_stream_endpoint(options(1), {{transport}, "127.0.0.1"})) {
    address = endpoint
                  ->listen([this] {
                    base::MutexLock lock(mutex);
                    accepted.push_back(std::make_shared<Recorder>());
                    accepted.back()->handle = [](const std::shared_ptr<Connection>& from,
                                                 Message message) {
                      from->send(std::move(message), nullptr);
                    };
                    return accepted.back()->events();
                  })
                  .front();
  }
  ~Besieged() { endpoint.reset(); }
  [[nodiscard]] std::size_t count() const {
    base::MutexLock lock(mutex);
    return accepted.size();
  }
  [[nodiscard]] std::shared_ptr<Recorder> recorder(std::size_t index) const {
    base::MutexLock lock(mutex);
    return accepted.at(index);
  }
  // Of those accepted, how many have not ended.
  [[nodiscard]] std::size_t living() const {
    base::MutexLock lock(mutex);
    return static_cast<std::size_t>(
        std::count_if(accepted.begin(), accepted.end(),
                      [](const auto& each) { return !each->closed().has_value(); }));
  }
  mutable base::Mutex mutex;
  std::vector<std::shared_ptr<Recorder>> accepted;
  std::unique_ptr<Endpoint> endpoint;
  std::string address;
};

// Each of them takes a descriptor here and, until it is dropped, one in the endpoint.
std::size_t strangers_that_fit() {
  constexpr std::size_t kMany = 3000;
  constexpr std::size_t kOthers = HalfOpen::kMaxSilent + 250;
  rlimit limit{};
  EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  if (limit.rlim_cur < kMany + kOthers) {
    limit.rlim_cur = limit.rlim_max;
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  }
  return std::min<std::size_t>(kMany, limit.rlim_cur - std::min<rlim_t>(limit.rlim_cur, kOthers));
}

class StreamFlood : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Stream, StreamFlood, ::testing::Values("shm", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(StreamFlood, ThousandsOfHalfOpenConnectionsHaveAFewPlaces) {
  const std::size_t wanted = strangers_that_fit();
  ASSERT_GE(wanted, 500U) << "this process may have too few descriptors";
  Besieged server(GetParam());
  const auto client = make_stream_endpoint(options(2), {{GetParam()}, "127.0.0.1"});
  const auto good = std::make_shared<Recorder>();
  const auto connection = client->connect(server.address, {1}, good->events());
  ASSERT_TRUE(good->wait_open()) << good->closed_text();
  std::vector<base::Descriptor> strangers;
  for (std::size_t i = 0; i < wanted; ++i) {
    strangers.push_back(connect_raw(server.address));
    ASSERT_TRUE(strangers.back()) << i;
    if (i % 500 != 0) continue;
    const std::size_t before = good->received();
    connection->send(make_message("still there"), nullptr);
    ASSERT_TRUE(good->wait_messages(before + 1)) << good->closed_text();
    // And a new peer connects in between.
    const auto late = std::make_shared<Recorder>();
    const auto own = client->connect(server.address, {1}, late->events());
    EXPECT_TRUE(late->wait_open()) << late->closed_text();
    own->close(Error(ErrorCode::cancelled, "enough"));
  }
  ASSERT_TRUE(wait_until([&] { return server.count() >= wanted; }));
  EXPECT_TRUE(wait_until([&] { return server.living() <= HalfOpen::kMaxSilent + 2; }))
      << server.living() << " connections are kept";
  EXPECT_TRUE(wait_hung_up(strangers.front().get(), seconds(5)));
  EXPECT_TRUE(wait_hung_up(strangers[wanted / 2].get(), seconds(5)));
}

TEST_P(StreamFlood, SilentConnectionsDoNotPushOutOthers) {
  Besieged server(GetParam());
  RawPeer spoken(server.address);
  ASSERT_TRUE(spoken.write_message(RawPeer::hello()));
  ASSERT_TRUE(wait_until([&] { return server.count() == 1; }));
  const std::string answer = spoken.read_message();
  EXPECT_FALSE(answer.empty());
  std::vector<base::Descriptor> strangers;
  for (std::size_t i = 0; i < HalfOpen::kMaxSilent + 20; ++i)
    strangers.push_back(connect_raw(server.address));
  ASSERT_TRUE(wait_until([&] { return server.count() == strangers.size() + 1; }));
  std::this_thread::sleep_for(HalfOpen::kGrace);
  strangers.push_back(connect_raw(server.address));
  ASSERT_TRUE(wait_until([&] { return server.count() == strangers.size() + 1; }));
  ASSERT_TRUE(server.recorder(1)->wait_closed());
  EXPECT_EQ(server.recorder(1)->closed_code(), ErrorCode::overloaded)
      << server.recorder(1)->closed_text();
  EXPECT_FALSE(server.recorder(0)->closed().has_value());
  EXPECT_FALSE(server.recorder(strangers.size())->closed().has_value());
}

TEST(StreamFloodTcp, APushedOutPeerIsSentTheReason) {
  Besieged server("tcp");
  const base::Descriptor first = connect_raw(server.address);
  ASSERT_TRUE(wait_until([&] { return server.count() == 1; }));
  std::vector<base::Descriptor> strangers;
  for (std::size_t i = 0; i < HalfOpen::kMaxSilent; ++i)
    strangers.push_back(connect_raw(server.address));
  ASSERT_TRUE(wait_until([&] { return server.count() == strangers.size() + 1; }));
  std::this_thread::sleep_for(HalfOpen::kGrace);
  strangers.push_back(connect_raw(server.address));
  ASSERT_TRUE(server.recorder(0)->wait_closed());
  std::string heard;
  std::array<char, 4096> some;
  for (ssize_t count = 1; count > 0;) {
    count = ::recv(first.get(), some.data(), some.size(), 0);
    if (count > 0) heard.append(some.data(), static_cast<std::size_t>(count));
  }
  const auto refusal = heard.find("STNO");
  ASSERT_NE(refusal, std::string::npos);
  EXPECT_EQ(heard.at(refusal + 4), static_cast<char>(ErrorCode::overloaded));
}

TEST(HalfOpen, ManyThatComeAtTheSameMomentAreKept) {
  const EndpointOptions own = options(1);
  const auto thread = std::make_shared<base::TaskThread>();
  const auto poller = Poller::start("test");
  const auto budget = std::make_shared<ReceiveBudget>(own.max_receiving_bytes);
  std::vector<std::shared_ptr<StreamConnection>> connections;
  HalfOpen half_open;
  const auto add = [&](HalfOpen::Clock::time_point now) {
    connections.push_back(std::make_shared<StreamConnection>(
        own, "stranger", std::nullopt, ConnectionEvents{}, thread, poller, budget, nullptr));
    half_open.add(
        connections.back(), [](const Error&) {}, now);
  };
  const HalfOpen::Clock::time_point begin{};
  for (std::size_t i = 0; i < HalfOpen::kMax; ++i) add(begin);
  EXPECT_EQ(half_open.dropped(), 0);
  add(begin);
  EXPECT_EQ(half_open.dropped(), 1) << "there is a limit all the same";
  add(begin + HalfOpen::kGrace);
  EXPECT_EQ(half_open.dropped(),
            static_cast<std::int64_t>(2 + HalfOpen::kMax - HalfOpen::kMaxSilent))
      << "those past the grace period make room";
  poller->join();
  thread->join();
}

// The handshake may take longer; the first record may not.
TEST_P(StreamFlood, ASilentConnectionIsClosedSooner) {
  Besieged server(GetParam());
  const auto begin = Clock::now();
  const base::Descriptor silent = connect_raw(server.address);
  RawPeer spoken(server.address);
  ASSERT_TRUE(spoken.write_message(RawPeer::hello()));
  ASSERT_TRUE(wait_until([&] { return server.count() == 2; }));
  ASSERT_TRUE(server.recorder(0)->wait_closed());
  EXPECT_LT(Clock::now() - begin, seconds(8));
  EXPECT_EQ(server.recorder(0)->closed_code(), ErrorCode::disconnected);
  EXPECT_FALSE(server.recorder(1)->closed().has_value());
}

TEST_P(StreamFlood, APausedConnectionIsNotReadAndGoesOn) {
  const auto server = make_stream_endpoint(options(1), {{GetParam()}, "127.0.0.1"});
  const auto in = std::make_shared<Recorder>();
  const auto address = server->listen([&] { return in->events(); }).front();
  const auto client = make_stream_endpoint(options(2), {{GetParam()}, "127.0.0.1"});
  const auto out = std::make_shared<Recorder>();
  const auto connection = client->connect(address, {1}, out->events());
  ASSERT_TRUE(in->wait_open());
  const auto accepted = in->connection();
  constexpr std::size_t kCount = 20;
  for (int round = 0; round < 3; ++round) {
    accepted->pause_reading(true);
    const std::size_t before = in->received();
    // More than all buffers between the two hold.
    for (std::size_t i = 0; i < kCount; ++i)
      connection->send(make_message(std::string(1'000'000, 'p')), out->done());
    std::this_thread::sleep_for(milliseconds(100));
    EXPECT_LT(in->received(), before + 2);
    EXPECT_LT(out->done_count(), out->sends());
    // The other direction continues.
    const std::size_t back = out->received();
    accepted->send(make_message("back"), nullptr);
    EXPECT_TRUE(out->wait_messages(back + 1));
    accepted->pause_reading(false);
    ASSERT_TRUE(in->wait_messages(before + kCount)) << in->closed_text();
    EXPECT_TRUE(out->wait_sends_done());
  }
  // What a peer sent before it ended is delivered, and its end is seen.
  accepted->pause_reading(true);
  const std::size_t before = in->received();
  connection->send(make_message("the last one"), out->done());
  EXPECT_TRUE(out->wait_sends_done());
  client->join();
  ASSERT_TRUE(in->wait_closed());
  if (std::string(GetParam()) == "shm") {
    EXPECT_EQ(in->received(), before + 1);
  }
}

}  // namespace
}  // namespace stitch::transport::stream_flood_test
