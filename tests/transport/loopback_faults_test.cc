// Faults that the loopback endpoint injects.
#include <ctime>

#include "stitch/transport/loopback/loopback_endpoint.h"
#include "tests/support/plain_test.h"
#include "tests/transport/line.h"

namespace stitch::transport::loopback_faults_test {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

struct LoopbackLine : Line {
  explicit LoopbackLine(
      std::shared_ptr<LoopbackNetwork> between = std::make_shared<LoopbackNetwork>())
      : Line(make_loopback_endpoint(options(1), between),
             make_loopback_endpoint(options(2), between)),
        network(std::move(between)) {}

  std::shared_ptr<LoopbackNetwork> network;
};

TEST(LoopbackFaults, ADroppedMessageIsLostForTheReceiverOnly) {
  for (std::uint64_t k = 0; k < 5; ++k) {
    LoopbackLine line;
    line.network->set_judge([k](std::uint32_t, std::uint32_t, std::uint64_t sequence,
                                const Message&) { return Fate{.drop = sequence == k}; });
    std::vector<std::string> expected;
    for (std::uint64_t i = 0; i < 5; ++i) {
      line.send(std::to_string(i));
      if (i != k) expected.push_back(std::to_string(i));
    }
    ASSERT_TRUE(line.server->wait_messages(4));
    EXPECT_EQ(line.server->take_texts(), expected);
    ASSERT_TRUE(line.client->wait_sends_done());
    EXPECT_EQ(line.client->failed(), 0U);
  }
}

TEST(LoopbackFaults, AFailedMessageBreaksTheConnectionAtBothEnds) {
  for (std::uint64_t k = 0; k < 5; ++k) {
    LoopbackLine line;
    line.network->set_judge([k](std::uint32_t, std::uint32_t, std::uint64_t sequence,
                                const Message&) { return Fate{.fail = sequence == k}; });
    for (std::uint64_t i = 0; i < 5; ++i) line.send(std::to_string(i));
    ASSERT_TRUE(line.client->wait_closed());
    ASSERT_TRUE(line.server->wait_closed());
    EXPECT_EQ(line.client->closed_code(), ErrorCode::disconnected);
    EXPECT_EQ(line.server->closed_code(), ErrorCode::disconnected);
    ASSERT_TRUE(line.client->wait_sends_done());
    EXPECT_EQ(line.client->failed(), 5 - k);
    EXPECT_LE(line.server->received(), k);
  }
}

TEST(LoopbackFaults, ADuplicatedMessageArrivesThatOften) {
  LoopbackLine line;
  line.network->set_judge([](std::uint32_t, std::uint32_t, std::uint64_t sequence, const Message&) {
    return Fate{.copies = sequence == 1 ? 3 : 1};
  });
  for (int i = 0; i < 3; ++i) line.send(std::to_string(i));
  ASSERT_TRUE(line.server->wait_messages(5));
  EXPECT_EQ(line.server->take_texts(), (std::vector<std::string>{"0", "1", "1", "1", "2"}));
  ASSERT_TRUE(line.client->wait_sends_done());
  EXPECT_EQ(line.client->done_count(), 3U);
}

TEST(LoopbackFaults, ADelayedMessageIsOvertaken) {
  LoopbackLine line;
  const auto start = std::chrono::steady_clock::now();
  line.network->set_judge([](std::uint32_t, std::uint32_t, std::uint64_t sequence, const Message&) {
    return Fate{.delay = sequence == 0   ? milliseconds(400)
                         : sequence == 1 ? milliseconds(200)
                                         : milliseconds(0)};
  });
  for (int i = 0; i < 4; ++i) line.send(std::to_string(i));
  ASSERT_TRUE(line.server->wait_messages(4));
  EXPECT_GE(std::chrono::steady_clock::now() - start, milliseconds(400));
  EXPECT_EQ(line.server->take_texts(), (std::vector<std::string>{"2", "3", "1", "0"}));
}

TEST(LoopbackFaults, ADelayedMessageDoesNotOutliveItsConnection) {
  LoopbackLine line;
  line.network->set_judge([](std::uint32_t, std::uint32_t, std::uint64_t, const Message&) {
    return Fate{.delay = std::chrono::hours(1)};
  });
  line.send("never");
  ASSERT_TRUE(line.client->wait_sends_done());
  line.to_server->close(Error(ErrorCode::cancelled, "done waiting"));
  ASSERT_TRUE(line.server->wait_closed());
  EXPECT_EQ(line.server->received(), 0U);
}

TEST(LoopbackFaults, TheJudgeSeesWhoSendsWhatToWhomButNoHandshakes) {
  LoopbackLine line;
  base::Mutex mutex;
  std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint64_t, std::string>> seen;
  EXPECT_EQ(line.network->messages(), 0U);
  line.network->set_judge(
      [&](std::uint32_t from, std::uint32_t to, std::uint64_t sequence, const Message& message) {
        base::MutexLock lock(mutex);
        seen.emplace_back(from, to, sequence, text_of(message));
        return Fate{};
      });
  line.send("up");
  line.server->connection()->send(make_message("down"), nullptr);
  ASSERT_TRUE(line.client->wait_messages(1));
  base::MutexLock lock(mutex);
  ASSERT_EQ(seen.size(), 2U);
  EXPECT_EQ(seen[0], std::make_tuple(2U, 1U, std::uint64_t{0}, std::string("up")));
  EXPECT_EQ(seen[1], std::make_tuple(1U, 2U, std::uint64_t{1}, std::string("down")));
  EXPECT_EQ(line.network->messages(), 2U);
}

TEST(LoopbackFaults, MessagesSentBeforeTheHandshakeAreJudgedInTheOrderOfSending) {
  auto network = std::make_shared<LoopbackNetwork>();
  network->set_judge([](std::uint32_t, std::uint32_t, std::uint64_t sequence, const Message&) {
    return Fate{.drop = sequence == 1};
  });
  auto server = make_loopback_endpoint(options(1), network);
  auto client = make_loopback_endpoint(options(2), network);
  const auto in = std::make_shared<Recorder>();
  const auto out = std::make_shared<Recorder>();
  const auto addresses = server->listen([&] { return in->events(); });
  const auto connection = client->connect(addresses.front(), out->events());
  for (int i = 0; i < 3; ++i) connection->send(make_message(std::to_string(i)), out->done());
  ASSERT_TRUE(in->wait_messages(2));
  EXPECT_EQ(in->take_texts(), (std::vector<std::string>{"0", "2"}));
}

TEST(Loopback, TheSenderMayChangeItsBytesOnceSendReturns) {
  LoopbackLine line;
  Buffer buffer = make_filled_buffer(100000, 7);
  Message message = make_message("m");
  message.buffers.push_back(buffer);
  line.to_server->send(std::move(message), line.client->done());
  std::memset(buffer.data, 0, buffer.bytes);
  ASSERT_TRUE(line.server->wait_messages(1));
  EXPECT_TRUE(is_filled(line.server->take_messages()[0].buffers[0], 100000, 7));
}

TEST(Loopback, NetworksAreIndependent) {
  auto here = std::make_shared<LoopbackNetwork>();
  auto there = std::make_shared<LoopbackNetwork>();
  auto server = make_loopback_endpoint(options(1), here);
  auto stranger = make_loopback_endpoint(options(2), there);
  const auto addresses = server->listen([] { return ConnectionEvents{}; });
  const auto recorder = std::make_shared<Recorder>();
  stranger->connect(addresses.front(), recorder->events());
  ASSERT_TRUE(recorder->wait_closed());
  EXPECT_EQ(recorder->closed_text(), "connect to \"" + addresses.front() +
                                         "\" failed: no endpoint of this network listens there");
}

TEST(Loopback, WorkersOfAProcessShareANetworkUnlessGivenAnother) {
  EXPECT_EQ(LoopbackNetwork::process_wide(), LoopbackNetwork::process_wide());
  auto server = make_loopback_endpoint(options(1), nullptr);
  auto client = make_loopback_endpoint(options(2), LoopbackNetwork::process_wide());
  const auto in = std::make_shared<Recorder>();
  const auto addresses = server->listen([&] { return in->events(); });
  client->connect(addresses.front(), {})->send(make_message("hello"), nullptr);
  EXPECT_TRUE(in->wait_messages(1));
}

TEST(Loopback, AnIdleNetworkUsesNoCpu) {
  LoopbackLine line;
  std::vector<std::unique_ptr<Endpoint>> endpoints;
  for (std::uint32_t i = 3; i < 20; ++i)
    endpoints.push_back(make_loopback_endpoint(options(i), line.network));
  const auto used = [] {
    timespec time{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  const double before = used();
  std::this_thread::sleep_for(milliseconds(300));
  EXPECT_LT(used() - before, 0.1);
}

}  // namespace
}  // namespace stitch::transport::loopback_faults_test
