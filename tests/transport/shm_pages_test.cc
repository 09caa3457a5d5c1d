// The memory of shared-memory rings.
#include "stitch/transport/stream/stream_endpoint.h"
#include "tests/support/plain_test.h"
#include "tests/transport/raw_peer.h"

namespace stitch::transport::shm_pages_test {
namespace {

using std::chrono::milliseconds;

// Pages of shared memory in this process, in KiB: those of a ring count for each of its two ends.
long shared_kib() {
  std::ifstream file("/proc/self/status");
  for (std::string word; file >> word;) {
    long kib = 0;
    if (word == "RssShmem:" && file >> kib) return kib;
  }
  return -1;
}

TEST(StreamEndpoint, GivesBackThePagesOfARingThatIsNotUsedAnyMore) {
  constexpr long kRings = 4096;  // both of them, for both ends
  int mode = 0;
  if (std::ifstream("/proc/sys/vm/overcommit_memory") >> mode && mode == 2)
    GTEST_SKIP() << "the system counts pages: they are kept";
  const auto server = make_stream_endpoint(options(1), StreamOptions{{"shm"}, "127.0.0.1"});
  const auto client = make_stream_endpoint(options(2), StreamOptions{{"shm"}, "127.0.0.1"});
  const auto there = std::make_shared<Recorder>();
  there->handle = [](const std::shared_ptr<Connection>& connection, Message message) {
    connection->send(std::move(message), nullptr);
  };
  const auto addresses = server->listen([there] { return there->events(); });
  const auto here = std::make_shared<Recorder>();
  std::atomic<std::size_t> wrong{0};
  here->handle = [&](const std::shared_ptr<Connection>&, const Message& message) {
    const std::byte* const data = message.frame.data();
    for (std::size_t i = 0; i < message.frame.size(); ++i)
      wrong += data[i] == static_cast<std::byte>(i % 251) ? 0 : 1;
  };
  const long before = shared_kib();
  ASSERT_GE(before, 0);
  const auto connection = client->connect(addresses[0], {1}, here->events());
  ASSERT_TRUE(here->wait_open());
  ASSERT_TRUE(there->wait_open());
  for (std::size_t round = 1; round <= 3; ++round) {
    for (int i = 0; i < 4; ++i) {
      Message message;
      message.frame.resize(700'000);
      for (std::size_t k = 0; k < message.frame.size(); ++k)
        message.frame.data()[k] = static_cast<std::byte>(k % 251);
      connection->send(std::move(message), nullptr);
    }
    ASSERT_TRUE(here->wait_messages(4 * round));
    const long used = shared_kib() - before;
    EXPECT_GT(used, kRings * 3 / 4);
    for (int call = 0; call < 4; ++call) {
      connection->trim();
      there->connection()->trim();
    }
    EXPECT_GT(shared_kib() - before, used - kRings / 8) << "so soon after";
    EXPECT_TRUE(wait_until(
        [&] {
          connection->trim();
          there->connection()->trim();
          return shared_kib() - before < kRings / 8;
        },
        milliseconds(20000)))
        << shared_kib() - before << " KiB";
  }
  EXPECT_EQ(wrong.load(), 0u);
}

}  // namespace
}  // namespace stitch::transport::shm_pages_test
