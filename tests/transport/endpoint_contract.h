#pragma once

#include <ostream>

#include "stitch/transport/endpoint.h"
#include "stitch/transport/loopback/loopback_endpoint.h"
#include "stitch/transport/stream/stream_endpoint.h"
#include "stitch/transport/tensorpipe/tensorpipe_endpoint.h"
#include "tests/support/plain_test.h"
#include "tests/transport/recorder.h"

// The contract of every endpoint, run over each of them. The tests are in
// endpoint_contract_test.cc (messages) and endpoint_contract_ends_test.cc (opening and closing).
namespace stitch::transport {

struct EndpointKind {
  const char* name;
  const char* dead_address;
};

inline void PrintTo(const EndpointKind& kind, std::ostream* out) { *out << kind.name; }

class EndpointContract : public ::testing::TestWithParam<EndpointKind> {
 protected:
  static EndpointOptions options(std::uint32_t id, const std::string& name) {
    EndpointOptions options;
    options.self.id = id;
    options.self.name = name;
    options.self.world = 1;
    options.self.epoch = 100 + id;
    const std::string kind = GetParam().name;
    if (kind.ends_with("_sealed")) {
      options.secret = SecretKey::from_random("of the contract");
      options.encryption = Encryption::on;
    }
    return options;
  }

  std::unique_ptr<Endpoint> make(EndpointOptions options) {
    const std::string kind = GetParam().name;
    if (kind == "loopback") return make_loopback_endpoint(std::move(options), network_);
    if (kind.starts_with("stream_")) {
      StreamOptions stream;
      stream.transports = {kind.substr(kind.find('_') + 1, 3)};
      return make_stream_endpoint(std::move(options), stream);
    }
    TensorPipeOptions tensorpipe;
    tensorpipe.transports = {kind == "tensorpipe_uv" ? "uv" : "tensorpipe-shm"};
    return make_tensorpipe_endpoint(std::move(options), tensorpipe);
  }

  // Two endpoints, the second connected to the first.
  struct Pair {
    std::shared_ptr<Recorder> server = std::make_shared<Recorder>();
    std::shared_ptr<Recorder> client = std::make_shared<Recorder>();
    std::unique_ptr<Endpoint> server_endpoint;
    std::unique_ptr<Endpoint> client_endpoint;
    std::shared_ptr<Connection> to_server;

    ~Pair() {
      to_server.reset();
      client_endpoint.reset();
      server_endpoint.reset();
      EXPECT_EQ(server->faults(), std::vector<std::string>{});
      EXPECT_EQ(client->faults(), std::vector<std::string>{});
      EXPECT_EQ(server->sends(), server->done_count());
      EXPECT_EQ(client->sends(), client->done_count());
      EXPECT_TRUE(client->closed().has_value());
      EXPECT_TRUE(server->closed().has_value() || !server->open());
    }
  };
  std::unique_ptr<Pair> make_pair(EndpointOptions server, EndpointOptions client) {
    auto pair = std::make_unique<Pair>();
    pair->server_endpoint = make(std::move(server));
    pair->client_endpoint = make(std::move(client));
    return pair;
  }
  std::unique_ptr<Pair> make_pair() {
    return make_pair(options(1, "server"), options(2, "client"));
  }
  static void join_pair(Pair& pair) {
    const auto addresses =
        pair.server_endpoint->listen([server = pair.server] { return server->events(); });
    ASSERT_FALSE(addresses.empty());
    pair.to_server = pair.client_endpoint->connect(addresses.front(), {1}, pair.client->events());
  }
  std::unique_ptr<Pair> connected() {
    auto pair = make_pair();
    join_pair(*pair);
    EXPECT_TRUE(pair->client->wait_open()) << pair->client->closed_text();
    EXPECT_TRUE(pair->server->wait_open());
    return pair;
  }

  const std::shared_ptr<LoopbackNetwork> network_ = std::make_shared<LoopbackNetwork>();
};

}  // namespace stitch::transport
