#pragma once

#include "tests/support/plain_test.h"
#include "tests/transport/recorder.h"

namespace stitch::transport {

// Worker 2 connected to worker 1, open. At its end both sides must have kept the contract, and
// every message of the client be accounted for.
struct Line {
  std::shared_ptr<Recorder> server = std::make_shared<Recorder>();
  std::shared_ptr<Recorder> client = std::make_shared<Recorder>();
  std::unique_ptr<Endpoint> server_endpoint;
  std::unique_ptr<Endpoint> client_endpoint;
  std::shared_ptr<Connection> to_server;

  Line(std::unique_ptr<Endpoint> of_server, std::unique_ptr<Endpoint> of_client)
      : server_endpoint(std::move(of_server)), client_endpoint(std::move(of_client)) {
    const auto addresses = server_endpoint->listen([server = server] { return server->events(); });
    to_server = client_endpoint->connect(addresses.front(), {1}, client->events());
    EXPECT_TRUE(client->wait_open());
    EXPECT_TRUE(server->wait_open());
  }
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;
  ~Line() {
    client_endpoint.reset();
    server_endpoint.reset();
    EXPECT_EQ(client->faults(), std::vector<std::string>{});
    EXPECT_EQ(server->faults(), std::vector<std::string>{});
    EXPECT_EQ(client->sends(), client->done_count());
  }
  void send(const std::string& text) { to_server->send(make_message(text), client->done()); }
};

}  // namespace stitch::transport
