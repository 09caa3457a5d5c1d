// What the loopback endpoint does beyond the contract of all endpoints.
#include <ctime>

#include "stitch/transport/loopback/loopback_endpoint.h"
#include "tests/support/plain_test.h"
#include "tests/transport/line.h"

namespace stitch::transport::loopback_test {
namespace {

using std::chrono::milliseconds;

struct LoopbackLine : Line {
  explicit LoopbackLine(
      std::shared_ptr<LoopbackNetwork> between = std::make_shared<LoopbackNetwork>())
      : Line(make_loopback_endpoint(options(1), between),
             make_loopback_endpoint(options(2), between)),
        network(std::move(between)) {}

  std::shared_ptr<LoopbackNetwork> network;
};

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
  stranger->connect(addresses.front(), {1}, recorder->events());
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
  client->connect(addresses.front(), {1}, {})->send(make_message("hello"), nullptr);
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
}  // namespace stitch::transport::loopback_test
