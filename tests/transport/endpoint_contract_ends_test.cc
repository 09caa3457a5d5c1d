// Opening, refusal and end of connections, for every endpoint.
#include "tests/support/plain_test.h"
#include "tests/transport/endpoint_contract.h"

namespace stitch::transport::endpoint_contract_ends_test {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

TEST_P(EndpointContract, ConnectingToItselfWorks) {
  auto endpoint = make(options(1, "self"));
  const auto in = std::make_shared<Recorder>();
  const auto out = std::make_shared<Recorder>();
  const auto addresses = endpoint->listen([&] { return in->events(); });
  endpoint->connect(addresses.front(), {1}, out->events())->send(make_message("me"), out->done());
  ASSERT_TRUE(in->wait_messages(1));
  EXPECT_EQ(in->take_texts().front(), "me");
}

TEST_P(EndpointContract, ConnectingToNothingReportsTheAddress) {
  auto endpoint = make(options(1, "alone"));
  const auto recorder = std::make_shared<Recorder>();
  const auto connection = endpoint->connect(GetParam().dead_address, {1}, recorder->events());
  connection->send(make_message("lost"), recorder->done());
  ASSERT_TRUE(recorder->wait_closed());
  EXPECT_EQ(recorder->closed_code(), ErrorCode::disconnected);
  EXPECT_NE(recorder->closed_text().find(GetParam().dead_address), std::string::npos)
      << recorder->closed_text();
  EXPECT_TRUE(recorder->wait_sends_done());
  ASSERT_TRUE(recorder->send_error().has_value());
  EXPECT_EQ(recorder->send_error()->code(), ErrorCode::disconnected);
  EXPECT_FALSE(recorder->open());
  EXPECT_TRUE(recorder->faults().empty());
}

TEST_P(EndpointContract, MalformedAddressesAreReportedLikeUnreachableOnes) {
  auto endpoint = make(options(1, "alone"));
  for (const std::string address :
       {"", "malformed", "uv://", "shm://", "uv://localhost", "uv://127.0.0.1",
        "uv://127.0.0.1:99999999999", "uv://[::1", "ibv://127.0.0.1:4", "loopback:", "loopback:x",
        "shm://no\nsuch", "tcp://", "tcp://127.0.0.1", "tcp://localhost:1"}) {
    const auto recorder = std::make_shared<Recorder>();
    endpoint->connect(address, {1}, recorder->events());
    ASSERT_TRUE(recorder->wait_closed()) << address;
    EXPECT_EQ(recorder->closed_code(), ErrorCode::disconnected) << address;
    EXPECT_NE(recorder->closed_text().find(address), std::string::npos) << recorder->closed_text();
  }
}

TEST_P(EndpointContract, ClosingAConnectionIsSeenByBothSides) {
  const auto pair = connected();
  pair->to_server->close(Error(ErrorCode::cancelled, "enough"));
  pair->to_server->close(Error(ErrorCode::internal, "second close does nothing"));
  ASSERT_TRUE(pair->client->wait_closed());
  ASSERT_TRUE(pair->server->wait_closed());
  EXPECT_EQ(pair->client->closed_code(), ErrorCode::cancelled);
  EXPECT_EQ(pair->client->closed_text(), "enough");
  EXPECT_EQ(pair->server->closed_code(), ErrorCode::disconnected);
  pair->to_server->send(make_message("late"), pair->client->done());
  EXPECT_TRUE(pair->client->wait_sends_done());
  ASSERT_TRUE(pair->client->send_error().has_value());
  EXPECT_EQ(pair->client->send_error()->code(), ErrorCode::cancelled);
}

TEST_P(EndpointContract, ClosingWhileSendingFiresEveryDoneOnce) {
  for (int round = 0; round < 5; ++round) {
    const auto pair = connected();
    std::atomic<bool> stop{false};
    std::vector<std::jthread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 300 || !stop; ++i) {
          Message message = make_message("m");
          if (i % 20 == 0) message.buffers.push_back(make_filled_buffer(200000, 1));
          pair->to_server->send(std::move(message), pair->client->done());
          if (i > 3000) break;
        }
      });
    }
    ASSERT_TRUE(pair->server->wait_messages(20));
    if (round % 2 == 0) {
      pair->to_server->close(Error(ErrorCode::cancelled, "in the middle"));
    } else {
      pair->server->connection()->close(Error(ErrorCode::cancelled, "in the middle"));
    }
    stop = true;
    threads.clear();
    ASSERT_TRUE(pair->client->wait_closed());
    ASSERT_TRUE(pair->server->wait_closed());
    ASSERT_TRUE(pair->client->wait_sends_done());
    EXPECT_EQ(pair->client->closed_code(),
              round % 2 == 0 ? ErrorCode::cancelled : ErrorCode::disconnected);
  }
}

TEST_P(EndpointContract, ClosingFromACallbackWorks) {
  auto pair = make_pair();
  pair->server->handle = [](const std::shared_ptr<Connection>& connection, Message) {
    connection->close(Error(ErrorCode::cancelled, "seen enough"));
  };
  join_pair(*pair);
  for (int i = 0; i < 10; ++i) pair->to_server->send(make_message("m"), pair->client->done());
  ASSERT_TRUE(pair->server->wait_closed());
  ASSERT_TRUE(pair->client->wait_closed());
  EXPECT_EQ(pair->server->closed_text(), "seen enough");
  EXPECT_EQ(pair->server->received(), 1U);
}

TEST_P(EndpointContract, ACallbackThatThrowsEndsItsConnection) {
  auto pair = make_pair();
  pair->server->handle = [](const std::shared_ptr<Connection>&, Message) {
    throw std::runtime_error("oh no");
  };
  join_pair(*pair);
  pair->to_server->send(make_message("m"), pair->client->done());
  ASSERT_TRUE(pair->client->wait_closed());
  // The exception has left the recorder in the middle of a callback, which it reports as a fault.
  ASSERT_TRUE(pair->server->wait_closed());
  EXPECT_EQ(pair->server->closed_code(), ErrorCode::internal);
  EXPECT_NE(pair->server->closed_text().find("oh no"), std::string::npos);
  EXPECT_EQ(pair->server->faults().size(), 1U);
  pair->server = std::make_shared<Recorder>();
}

TEST_P(EndpointContract, TheEndOfThePeersEndpointIsSeen) {
  const auto pair = connected();
  pair->server_endpoint->close();
  ASSERT_TRUE(pair->client->wait_closed());
  EXPECT_EQ(pair->client->closed_code(), ErrorCode::disconnected);
  EXPECT_EQ(pair->server->wait_closed() ? pair->server->closed_code() : ErrorCode::internal,
            ErrorCode::shutting_down);
  pair->server_endpoint->join();
}

TEST_P(EndpointContract, AClosedEndpointTakesNothingNew) {
  auto endpoint = make(options(1, "gone"));
  endpoint->close();
  for (int joined = 0; joined < 2; ++joined) {
    const auto recorder = std::make_shared<Recorder>();
    endpoint->connect(GetParam().dead_address, {1}, recorder->events())
        ->send(make_message("m"), recorder->done());
    ASSERT_TRUE(recorder->wait_closed());
    ASSERT_TRUE(recorder->wait_sends_done());
    EXPECT_EQ(recorder->closed_code(), ErrorCode::shutting_down);
    EXPECT_THROW(static_cast<void>(endpoint->listen([] { return ConnectionEvents{}; })), Error);
    endpoint->join();
  }
}

TEST_P(EndpointContract, EndpointsMayEndWithMessagesInFlight) {
  const Buffer large = make_filled_buffer(kMiB, 1);
  for (int round = 0; round < 4; ++round) {
    auto pair = connected();
    const auto to_client = pair->server->connection();
    std::vector<std::jthread> threads;
    for (int t = 0; t < 2; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < 400; ++i) {
          Message message = make_message(std::string(1000, 'm'));
          if (i % 10 == 0) message.buffers.push_back(large);
          (t == 0 ? pair->to_server : to_client)
              ->send(std::move(message), (t == 0 ? pair->client : pair->server)->done());
        }
      });
    }
    ASSERT_TRUE(pair->server->wait_messages(5));
    (round % 2 == 0 ? pair->server_endpoint : pair->client_endpoint).reset();
    threads.clear();
  }
}

TEST_P(EndpointContract, EndpointsMayEndWhileConnecting) {
  for (int round = 0; round < 10; ++round) {
    auto pair = make_pair();
    join_pair(*pair);
    pair->to_server->send(make_message("m"), pair->client->done());
    (round % 2 == 0 ? pair->server_endpoint : pair->client_endpoint).reset();
  }
}

TEST_P(EndpointContract, OtherVersionsAreRefusedOnBothSides) {
  EndpointOptions client = options(2, "client");
  client.self.version = 9;
  auto pair = make_pair(options(1, "server"), std::move(client));
  join_pair(*pair);
  pair->to_server->send(make_message("m"), pair->client->done());
  ASSERT_TRUE(pair->server->wait_closed());
  ASSERT_TRUE(pair->client->wait_closed());
  EXPECT_EQ(pair->server->closed_code(), ErrorCode::protocol);
  EXPECT_EQ(pair->client->closed_code(), ErrorCode::protocol);
  EXPECT_NE(pair->server->closed_text().find("version 9"), std::string::npos)
      << pair->server->closed_text();
  EXPECT_NE(pair->client->closed_text().find("version"), std::string::npos)
      << pair->client->closed_text();
  EXPECT_FALSE(pair->server->open() || pair->client->open());
  EXPECT_TRUE(pair->client->wait_sends_done());
  EXPECT_EQ(pair->client->failed(), 1U);
}

TEST_P(EndpointContract, OtherWorldsAreRefusedOnBothSides) {
  EndpointOptions client = options(2, "client");
  client.self.world = 77;
  auto pair = make_pair(options(1, "server"), std::move(client));
  join_pair(*pair);
  ASSERT_TRUE(pair->server->wait_closed());
  ASSERT_TRUE(pair->client->wait_closed());
  EXPECT_EQ(pair->server->closed_code(), ErrorCode::protocol);
  EXPECT_EQ(pair->client->closed_code(), ErrorCode::protocol);
  for (const auto& side : {pair->server, pair->client})
    EXPECT_NE(side->closed_text().find("world 77"), std::string::npos) << side->closed_text();
}

TEST_P(EndpointContract, SecretsMustAgree) {
  const std::vector<std::tuple<std::string, std::string, bool>> cases{
      {"swordfish", "swordfish", true},
      {"swordfish", "herring", false},
      {"swordfish", "", false},
      {"", "herring", false}};
  for (const auto& [first, second, opens] : cases) {
    EndpointOptions server = options(1, "server");
    EndpointOptions client = options(2, "client");
    server.secret = first.empty() ? nullptr : SecretKey::from_random(first);
    client.secret = second.empty() ? nullptr : SecretKey::from_random(second);
    auto pair = make_pair(std::move(server), std::move(client));
    join_pair(*pair);
    pair->to_server->send(make_message("m"), pair->client->done());
    if (opens) {
      ASSERT_TRUE(pair->server->wait_messages(1));
      EXPECT_TRUE(pair->server->peer().authenticated);
      continue;
    }
    ASSERT_TRUE(pair->server->wait_closed());
    ASSERT_TRUE(pair->client->wait_closed());
    EXPECT_EQ(pair->server->closed_code(), ErrorCode::unauthenticated)
        << pair->server->closed_text();
    EXPECT_EQ(pair->client->closed_code(), ErrorCode::unauthenticated)
        << pair->client->closed_text();
    EXPECT_FALSE(pair->server->open() || pair->client->open());
    EXPECT_EQ(pair->server->received(), 0U);
  }
}

TEST_P(EndpointContract, MessagesOverTheLimitsCloseOnlyTheirConnection) {
  for (const bool frame : {true, false}) {
    EndpointOptions server = options(1, "server");
    server.max_frame_bytes = 1000;
    server.max_buffer_bytes = 2000;
    auto server_endpoint = make(std::move(server));
    std::vector<std::shared_ptr<Recorder>> accepted{std::make_shared<Recorder>(),
                                                    std::make_shared<Recorder>()};
    std::atomic<std::size_t> next{0};
    const auto addresses = server_endpoint->listen([&] { return accepted.at(next++)->events(); });
    auto client_endpoint = make(options(2, "client"));
    const auto good = std::make_shared<Recorder>();
    const auto bad = std::make_shared<Recorder>();
    const auto good_connection = client_endpoint->connect(addresses.front(), {1}, good->events());
    ASSERT_TRUE(accepted[0]->wait_open());
    const auto bad_connection = client_endpoint->connect(addresses.front(), {1}, bad->events());
    Message fits = make_message(std::string(1000, 'f'));
    fits.buffers.push_back(make_filled_buffer(2000, 1));
    bad_connection->send(std::move(fits), bad->done());
    ASSERT_TRUE(accepted[1]->wait_messages(1)) << accepted[1]->closed_text();
    Message oversize = make_message(std::string(frame ? 1001 : 1, 'o'));
    if (!frame) oversize.buffers.push_back(make_filled_buffer(2001, 1));
    bad_connection->send(std::move(oversize), bad->done());
    ASSERT_TRUE(accepted[1]->wait_closed());
    EXPECT_EQ(accepted[1]->closed_code(), ErrorCode::protocol);
    EXPECT_NE(
        accepted[1]->closed_text().find(frame ? "frame of 1001 bytes" : "buffer of 2001 bytes"),
        std::string::npos)
        << accepted[1]->closed_text();
    EXPECT_NE(
        accepted[1]->closed_text().find(frame ? "limit of 1000 bytes" : "limit of 2000 bytes"),
        std::string::npos);
    ASSERT_TRUE(bad->wait_closed());
    EXPECT_EQ(bad->closed_code(), ErrorCode::disconnected);
    EXPECT_EQ(accepted[1]->received(), 1U);
    good_connection->send(make_message("still here"), good->done());
    ASSERT_TRUE(accepted[0]->wait_messages(1));
  }
}

TEST_P(EndpointContract, NamesThatAreTooLongAreRefusedWhenTheEndpointIsMade) {
  EXPECT_THROW(static_cast<void>(make(options(1, std::string(600, 'n')))), Error);
}

TEST_P(EndpointContract, CallbacksAreReleasedWhenTheConnectionEnds) {
  auto pair = connected();
  std::weak_ptr<Recorder> server = pair->server;
  std::weak_ptr<Recorder> client = pair->client;
  const auto connection = pair->to_server;  // a connection that outlives everything else
  pair.reset();
  EXPECT_TRUE(server.expired());
  EXPECT_TRUE(client.expired());
  connection->close(Error(ErrorCode::cancelled, "long gone"));
  bool failed = false;
  connection->send(make_message("m"),
                   [&](const std::optional<Error>& error) { failed = error.has_value(); });
  EXPECT_TRUE(failed);
}

}  // namespace
}  // namespace stitch::transport::endpoint_contract_ends_test
