// Behaviour of TensorPipe's endpoint only: addresses, processes that die, foreign connections.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "stitch/transport/ip_address.h"
#include "stitch/transport/tensorpipe/tensorpipe_endpoint.h"
#include "tests/support/plain_test.h"
#include "tests/transport/plain_socket.h"
#include "tests/transport/recorder.h"

namespace stitch::transport::tensorpipe_endpoint_test {
namespace {

using stitch::testing::error_of;

TensorPipeOptions over(std::vector<std::string> transports,
                       std::vector<std::string> channels = {"basic"}) {
  TensorPipeOptions tensorpipe;
  tensorpipe.transports = std::move(transports);
  tensorpipe.channels = std::move(channels);
  return tensorpipe;
}

TEST(TensorPipeEndpoint, EveryAddressItReturnsCanBeConnectedTo) {
  auto server = make_tensorpipe_endpoint(options(1), {});
  auto client = make_tensorpipe_endpoint(options(2), {});
  const auto in = std::make_shared<Recorder>();
  const auto addresses = server->listen([&] { return std::make_shared<Recorder>()->events(); });
  ASSERT_EQ(addresses.size(), 2U);
  EXPECT_TRUE(addresses[0].starts_with("tensorpipe-shm://")) << addresses[0];
  EXPECT_TRUE(addresses[1].starts_with("uv://127.0.0.1:")) << addresses[1];
  for (const auto& address : addresses) {
    const auto out = std::make_shared<Recorder>();
    const auto connection = client->connect(address, {1}, out->events());
    EXPECT_TRUE(out->wait_open()) << out->closed_text();
    EXPECT_EQ(connection->describe(), address);
  }
}

TEST(TensorPipeEndpoint, PeersWithDifferentTransportsMeetOnACommonOne) {
  auto server =
      make_tensorpipe_endpoint(options(1), over({"tensorpipe-shm", "uv"}, {"cma", "basic"}));
  auto client = make_tensorpipe_endpoint(options(2), over({"uv"}));
  const auto in = std::make_shared<Recorder>();
  const auto addresses = server->listen([&] { return in->events(); });
  const auto wrong = std::make_shared<Recorder>();
  client->connect(addresses[0], {1}, wrong->events());
  ASSERT_TRUE(wrong->wait_closed());
  EXPECT_EQ(wrong->closed_text(),
            "connect to \"" + addresses[0] +
                "\" failed: transport \"tensorpipe-shm\" is not in use here; in use: uv");
  const auto out = std::make_shared<Recorder>();
  Message message = make_message("over uv");
  message.buffers.push_back(make_filled_buffer(50000, 3));
  client->connect(addresses[1], {1}, out->events())->send(std::move(message), out->done());
  ASSERT_TRUE(in->wait_messages(1)) << out->closed_text();
  EXPECT_TRUE(is_filled(in->take_messages()[0].buffers[0], 50000, 3));
}

TEST(TensorPipeEndpoint, UnknownNamesAreRefusedWithTheKnownOnes) {
  Error error =
      error_of([] { static_cast<void>(make_tensorpipe_endpoint(options(1), over({"ibv"}))); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_STREQ(error.what(), "transport \"ibv\" is unknown; known are: tensorpipe-shm, uv");
  error = error_of([] {
    static_cast<void>(make_tensorpipe_endpoint(options(1), over({"tensorpipe-shm"}, {"xth"})));
  });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_STREQ(error.what(), "channel \"xth\" is unknown; known are: basic, cma");
  error = error_of([] { static_cast<void>(make_tensorpipe_endpoint(options(1), over({}))); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  TensorPipeOptions tensorpipe;
  tensorpipe.bind_address = "localhost";
  error = error_of([&] { static_cast<void>(make_tensorpipe_endpoint(options(1), tensorpipe)); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
}

TEST(TensorPipeEndpoint, AnAddressOfAnotherHostIsNotUsed) {
  TensorPipeOptions tensorpipe = over({"uv"});
  tensorpipe.bind_address = "192.0.2.1";  // reserved for documentation: no host has it
  const Error error =
      error_of([&] { static_cast<void>(make_tensorpipe_endpoint(options(1), tensorpipe)); });
  EXPECT_EQ(error.code(), ErrorCode::disconnected);
  EXPECT_STREQ(error.what(),
               "no transport passes a transfer from this worker to itself; tried: uv, bind address "
               "192.0.2.1");
  tensorpipe.transports = {"uv", "tensorpipe-shm"};
  auto endpoint = make_tensorpipe_endpoint(options(1), tensorpipe);
  const auto addresses = endpoint->listen([] { return ConnectionEvents{}; });
  ASSERT_EQ(addresses.size(), 1U);
  EXPECT_TRUE(addresses[0].starts_with("tensorpipe-shm://"));
}

TEST(TensorPipeEndpoint, SpeaksIpv6) {
  try {
    IpAddress::parse("::1", 0)->check_bindable("::1");
  } catch (const Error&) {
    GTEST_SKIP() << "this host has no IPv6";
  }
  TensorPipeOptions tensorpipe = over({"uv"});
  tensorpipe.bind_address = "::1";
  auto server = make_tensorpipe_endpoint(options(1), tensorpipe);
  auto client = make_tensorpipe_endpoint(options(2), over({"uv"}));
  const auto in = std::make_shared<Recorder>();
  const auto addresses = server->listen([&] { return in->events(); });
  EXPECT_TRUE(addresses[0].starts_with("uv://[::1]:")) << addresses[0];
  client->connect(addresses[0], {1}, {})->send(make_message("six"), nullptr);
  EXPECT_TRUE(in->wait_messages(1));
}

TEST(TensorPipeEndpoint, CarriesBuffersOverEveryChannel) {
  for (const std::string transport : {"tensorpipe-shm", "uv"}) {
    for (const std::string channel : {"basic", "cma"}) {
      auto server = make_tensorpipe_endpoint(options(1), over({transport}, {channel}));
      auto client = make_tensorpipe_endpoint(options(2), over({transport}, {channel}));
      const auto in = std::make_shared<Recorder>();
      const auto out = std::make_shared<Recorder>();
      const auto addresses = server->listen([&] { return in->events(); });
      const std::vector<std::size_t> sizes{0, 1, 20000, 0, std::size_t{8} << 20};
      Message message = make_message("m");
      for (const std::size_t size : sizes) message.buffers.push_back(make_filled_buffer(size, 5));
      client->connect(addresses[0], {1}, out->events())->send(std::move(message), out->done());
      ASSERT_TRUE(in->wait_messages(1))
          << transport << " " << channel << ": " << out->closed_text();
      const auto messages = in->take_messages();
      for (std::size_t i = 0; i < sizes.size(); ++i)
        EXPECT_TRUE(is_filled(messages[0].buffers[i], sizes[i], 5))
            << transport << " " << channel << i;
      EXPECT_TRUE(out->wait_sends_done());
    }
  }
}

TEST(TensorPipeEndpoint, RefusesToSendDeviceMemory) {
  auto endpoint = make_tensorpipe_endpoint(options(1), over({"uv"}));
  const auto in = std::make_shared<Recorder>();
  const auto out = std::make_shared<Recorder>();
  const auto addresses = endpoint->listen([&] { return in->events(); });
  const auto connection = endpoint->connect(addresses[0], {1}, out->events());
  int elsewhere = 0;
  Message message = make_message("m");
  message.buffers.push_back(
      Buffer{Device{DeviceType::cuda, 1}, &elsewhere, sizeof(elsewhere), nullptr});
  connection->send(std::move(message), out->done());
  ASSERT_TRUE(out->wait_sends_done());
  EXPECT_EQ(out->send_error()->code(), ErrorCode::unimplemented);
  connection->send(make_message("still open"), out->done());
  EXPECT_TRUE(in->wait_messages(1));
}

TEST(TensorPipeEndpoint, AHandshakeThatIsNotAnsweredTimesOut) {
  Socket silent;
  const std::string address = "uv://127.0.0.1:" + std::to_string(silent.bind());
  silent.listen();
  EndpointOptions impatient = options(1);
  impatient.handshake_timeout = std::chrono::milliseconds(100);
  auto endpoint = make_tensorpipe_endpoint(impatient, over({"uv"}));
  const auto recorder = std::make_shared<Recorder>();
  endpoint->connect(address, {1}, recorder->events())->send(make_message("m"), recorder->done());
  ASSERT_TRUE(recorder->wait_closed());
  EXPECT_EQ(recorder->closed_code(), ErrorCode::disconnected);
  EXPECT_EQ(recorder->closed_text(),
            "connection " + address + " did not finish its handshake within 100 ms");
  EXPECT_TRUE(recorder->wait_sends_done());
}

TEST(TensorPipeEndpoint, ConnectionsThatAreClosedImmediatelyDoNotStopIt) {
  auto server = make_tensorpipe_endpoint(options(1), over({"uv"}));
  const auto addresses = server->listen([] { return ConnectionEvents{}; });
  const auto port =
      static_cast<std::uint16_t>(std::stoi(addresses[0].substr(addresses[0].rfind(':') + 1)));
  auto client = make_tensorpipe_endpoint(options(2), over({"uv"}));
  for (int round = 0; round < 3; ++round) {
    Socket().connect(port);
    // The first attempts may come while the listener is being opened again.
    bool opened = false;
    for (int attempt = 0; attempt < 200 && !opened; ++attempt) {
      const auto recorder = std::make_shared<Recorder>();
      client->connect(addresses[0], {1}, recorder->events());
      opened = recorder->wait_open();
      if (!opened) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    EXPECT_TRUE(opened) << "round " << round;
  }
}

}  // namespace
}  // namespace stitch::transport::tensorpipe_endpoint_test
