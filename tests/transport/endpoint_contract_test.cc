// What every endpoint must do, whatever carries its bytes.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "stitch/transport/endpoint.h"
#include "stitch/transport/loopback_endpoint.h"
#include "stitch/transport/stream_endpoint.h"
#include "stitch/transport/tensorpipe_endpoint.h"
#include "tests/transport/recorder.h"

namespace stitch::transport {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

struct Kind {
  const char* name;
  const char* dead_address;
};

void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

class EndpointContract : public testing::TestWithParam<Kind> {
 protected:
  static EndpointOptions options(std::uint32_t id, const std::string& name) {
    EndpointOptions options;
    options.self.id = id;
    options.self.name = name;
    options.self.world = 1;
    options.self.epoch = 100 + id;
    return options;
  }

  std::unique_ptr<Endpoint> make(EndpointOptions options) {
    const std::string kind = GetParam().name;
    if (kind == "loopback") return make_loopback_endpoint(std::move(options), network_);
    if (kind.starts_with("stream_")) {
      StreamOptions stream;
      stream.transports = {kind.substr(kind.find('_') + 1)};
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
    pair.to_server = pair.client_endpoint->connect(addresses.front(), pair.client->events());
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

TEST_P(EndpointContract, IntroducesBothSides) {
  const auto pair = connected();
  EXPECT_EQ(pair->client->peer().name, "server");
  EXPECT_EQ(pair->client->peer().id, 1U);
  EXPECT_EQ(pair->client->peer().epoch, 101U);
  EXPECT_EQ(pair->server->peer().name, "client");
  EXPECT_EQ(pair->server->peer().id, 2U);
  EXPECT_EQ(pair->to_server->peer().name, "server");
  EXPECT_FALSE(pair->to_server->describe().empty());
}

TEST_P(EndpointContract, DeliversInOrderInBothDirections) {
  const auto pair = connected();
  const auto to_client = pair->server->connection();
  constexpr int kCount = 500;
  for (int i = 0; i < kCount; ++i) {
    pair->to_server->send(make_message("up" + std::to_string(i)), pair->client->done());
    to_client->send(make_message("down" + std::to_string(i)), pair->server->done());
  }
  ASSERT_TRUE(pair->server->wait_messages(kCount));
  ASSERT_TRUE(pair->client->wait_messages(kCount));
  const auto up = pair->server->take_texts();
  const auto down = pair->client->take_texts();
  ASSERT_EQ(up.size(), static_cast<std::size_t>(kCount));
  ASSERT_EQ(down.size(), static_cast<std::size_t>(kCount));
  for (int i = 0; i < kCount; ++i) {
    ASSERT_EQ(up[i], "up" + std::to_string(i));
    ASSERT_EQ(down[i], "down" + std::to_string(i));
  }
  EXPECT_TRUE(pair->client->wait_sends_done());
  EXPECT_TRUE(pair->server->wait_sends_done());
  EXPECT_EQ(pair->client->failed() + pair->server->failed(), 0U);
}

TEST_P(EndpointContract, SendsBeforeTheHandshakeArriveFirstAndInOrder) {
  auto pair = make_pair();
  join_pair(*pair);
  for (int i = 0; i < 100; ++i)
    pair->to_server->send(make_message(std::to_string(i)), pair->client->done());
  ASSERT_TRUE(pair->server->wait_messages(100));
  const auto texts = pair->server->take_texts();
  for (int i = 0; i < 100; ++i) ASSERT_EQ(texts[i], std::to_string(i));
}

TEST_P(EndpointContract, CarriesEmptyAndLargeFrames) {
  const auto pair = connected();
  std::vector<std::string> texts{
      "", "x", "", std::string(3 * kMiB + 5, 'y'), std::string(40 * kMiB, 'z'), "end"};
  for (const auto& text : texts) pair->to_server->send(make_message(text), pair->client->done());
  ASSERT_TRUE(pair->server->wait_messages(texts.size())) << pair->server->closed_text();
  // Large ones may come later than small ones that were sent after them; each kind keeps its order.
  const auto came = pair->server->take_texts();
  for (const bool large : {false, true}) {
    std::vector<std::string> of_sent, of_came;
    const auto other_kind = [large](const std::string& text) {
      return (text.size() > 32768) != large;
    };
    std::remove_copy_if(texts.begin(), texts.end(), std::back_inserter(of_sent), other_kind);
    std::remove_copy_if(came.begin(), came.end(), std::back_inserter(of_came), other_kind);
    EXPECT_TRUE(of_sent == of_came);
  }
}

TEST_P(EndpointContract, GivesFramesAlignedMemory) {
  const auto pair = connected();
  for (std::size_t size : {1, 63, 100, 5000})
    pair->to_server->send(make_message(std::string(size, 'a')), nullptr);
  ASSERT_TRUE(pair->server->wait_messages(4));
  for (const Message& message : pair->server->take_messages())
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(message.frame.data()) % 64, 0U);
}

TEST_P(EndpointContract, CarriesBuffersOfEverySizeBesideTheFrame) {
  const auto pair = connected();
  const std::vector<std::size_t> sizes{0, 1, 17, 4096, 0, kMiB + 3, 64 * kMiB, 2};
  Message message = make_message("with buffers");
  for (std::size_t i = 0; i < sizes.size(); ++i)
    message.buffers.push_back(make_filled_buffer(sizes[i], static_cast<unsigned char>(i)));
  const std::vector<Buffer> sent = message.buffers;
  pair->to_server->send(std::move(message), pair->client->done());
  pair->to_server->send(make_message("after"), pair->client->done());
  ASSERT_TRUE(pair->server->wait_messages(2)) << pair->server->closed_text();
  auto messages = pair->server->take_messages();
  if (text_of(messages[0]) == "after") std::swap(messages[0], messages[1]);
  ASSERT_EQ(messages[0].buffers.size(), sizes.size());
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    EXPECT_TRUE(is_filled(messages[0].buffers[i], sizes[i], static_cast<unsigned char>(i))) << i;
    EXPECT_NE(messages[0].buffers[i].data, sent[i].data);
  }
  EXPECT_EQ(text_of(messages[1]), "after");
  EXPECT_TRUE(pair->client->wait_sends_done());
  EXPECT_TRUE(pair->client->wait([&](Recorder&) { return sent[6].keep_alive.use_count() == 1; }));
}

TEST_P(EndpointContract, CarriesHundredsOfBuffersInOneMessage) {
  const auto pair = connected();
  Message message = make_message("many");
  for (std::size_t i = 0; i < 300; ++i)
    message.buffers.push_back(make_filled_buffer(i * 7, static_cast<unsigned char>(i)));
  pair->to_server->send(std::move(message), pair->client->done());
  ASSERT_TRUE(pair->server->wait_messages(1)) << pair->server->closed_text();
  const auto messages = pair->server->take_messages();
  ASSERT_EQ(messages[0].buffers.size(), 300U);
  for (std::size_t i = 0; i < 300; ++i)
    EXPECT_TRUE(is_filled(messages[0].buffers[i], i * 7, static_cast<unsigned char>(i))) << i;
}

TEST_P(EndpointContract, UsesTheReceiversAllocator) {
  std::atomic<int> allocations{0};
  EndpointOptions server = options(1, "server");
  server.allocator = [&](Device device, std::size_t bytes) {
    ++allocations;
    return allocate_buffer(device, bytes);
  };
  auto pair = make_pair(std::move(server), options(2, "client"));
  join_pair(*pair);
  Message message = make_message("m");
  message.buffers.push_back(make_filled_buffer(100000, 1));
  message.buffers.push_back(make_filled_buffer(3, 2));
  pair->to_server->send(std::move(message), pair->client->done());
  ASSERT_TRUE(pair->server->wait_messages(1));
  EXPECT_EQ(allocations, 2);
}

TEST_P(EndpointContract, AnAllocatorThatFailsBreaksOnlyItsConnection) {
  EndpointOptions server = options(1, "server");
  server.allocator = [](Device, std::size_t bytes) -> Buffer {
    throw Error(ErrorCode::overloaded, "no room for " + std::to_string(bytes) + " bytes");
  };
  auto pair = make_pair(std::move(server), options(2, "client"));
  join_pair(*pair);
  Message message = make_message("m");
  message.buffers.push_back(make_filled_buffer(100000, 1));
  pair->to_server->send(std::move(message), pair->client->done());
  ASSERT_TRUE(pair->server->wait_closed());
  EXPECT_EQ(pair->server->closed_code(), ErrorCode::overloaded);
  EXPECT_TRUE(pair->client->wait_closed());
}

TEST_P(EndpointContract, SeveralThreadsSendThousandsOfMessages) {
  const auto pair = connected();
  const auto to_client = pair->server->connection();
  constexpr int kThreads = 4;
  constexpr int kEach = 1000;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < kEach; ++i) {
          const std::string text = std::to_string(t) + ":" + std::to_string(i);
          Message message = make_message(text);
          if (i % 50 == 0)
            message.buffers.push_back(make_filled_buffer(20000 + i, static_cast<unsigned char>(t)));
          (t % 2 == 0 ? pair->to_server : to_client)
              ->send(std::move(message), (t % 2 == 0 ? pair->client : pair->server)->done());
        }
      });
    }
  }
  for (const auto& receiver : {pair->server, pair->client}) {
    ASSERT_TRUE(receiver->wait_messages(kEach * kThreads / 2))
        << receiver->received() << " " << receiver->closed_text();
    std::map<int, int> next;
    for (const Message& message : receiver->take_messages()) {
      const std::string text = text_of(message);
      const int thread = std::stoi(text);
      const int index = std::stoi(text.substr(text.find(':') + 1));
      ASSERT_EQ(index, next[thread]++);
      if (index % 50 == 0) {
        ASSERT_EQ(message.buffers.size(), 1U);
        ASSERT_TRUE(
            is_filled(message.buffers[0], 20000 + index, static_cast<unsigned char>(thread)));
      }
    }
    EXPECT_EQ(next.size(), 2U);
  }
  EXPECT_TRUE(pair->client->wait_sends_done());
  EXPECT_TRUE(pair->server->wait_sends_done());
}

TEST_P(EndpointContract, CallbacksMaySendAndCallersMaySendUnderALock) {
  // Senders hold a lock that the callbacks need as well: whoever ran callbacks inside send() would
  // deadlock here.
  auto pair = make_pair();
  std::mutex mutex;
  std::atomic<int> pongs{0};
  pair->server->handle = [&](const std::shared_ptr<Connection>& connection, Message message) {
    connection->send(std::move(message), [](const std::optional<Error>&) {});
  };
  pair->client->handle = [&](const std::shared_ptr<Connection>&, Message) {
    std::lock_guard lock(mutex);
    ++pongs;
  };
  join_pair(*pair);
  constexpr int kCount = 2000;
  for (int i = 0; i < kCount; ++i) {
    std::lock_guard lock(mutex);
    pair->to_server->send(make_message("ping"), [](const std::optional<Error>&) {});
  }
  ASSERT_TRUE(pair->client->wait_messages(kCount));
  EXPECT_EQ(pongs, kCount);
  pair->client_endpoint->join();
  pair->server_endpoint->join();
}

TEST_P(EndpointContract, OneEndpointHoldsManyConnections) {
  auto server = make(options(1, "server"));
  std::vector<std::shared_ptr<Recorder>> accepted;
  std::mutex mutex;
  const auto addresses = server->listen([&] {
    auto recorder = std::make_shared<Recorder>();
    recorder->handle = [](const std::shared_ptr<Connection>& connection, Message message) {
      connection->send(std::move(message), nullptr);
    };
    std::lock_guard lock(mutex);
    accepted.push_back(recorder);
    return recorder->events();
  });
  auto client = make(options(2, "client"));
  std::vector<std::shared_ptr<Recorder>> recorders;
  for (int i = 0; i < 10; ++i) {
    recorders.push_back(std::make_shared<Recorder>());
    client->connect(addresses.front(), recorders.back()->events())
        ->send(make_message(std::to_string(i)), recorders.back()->done());
  }
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(recorders[i]->wait_messages(1));
    EXPECT_EQ(recorders[i]->take_texts().front(), std::to_string(i));
  }
  client->close();
  client->join();
  server->join();
  for (const auto& recorder : recorders) {
    EXPECT_TRUE(recorder->closed().has_value());
    EXPECT_TRUE(recorder->faults().empty());
  }
  EXPECT_EQ(accepted.size(), 10U);
}

TEST_P(EndpointContract, ConnectingToItselfWorks) {
  auto endpoint = make(options(1, "self"));
  const auto in = std::make_shared<Recorder>();
  const auto out = std::make_shared<Recorder>();
  const auto addresses = endpoint->listen([&] { return in->events(); });
  endpoint->connect(addresses.front(), out->events())->send(make_message("me"), out->done());
  ASSERT_TRUE(in->wait_messages(1));
  EXPECT_EQ(in->take_texts().front(), "me");
}

TEST_P(EndpointContract, ConnectingToNothingReportsTheAddress) {
  auto endpoint = make(options(1, "alone"));
  const auto recorder = std::make_shared<Recorder>();
  const auto connection = endpoint->connect(GetParam().dead_address, recorder->events());
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

TEST_P(EndpointContract, NonsenseAddressesAreReportedLikeDeadOnes) {
  auto endpoint = make(options(1, "alone"));
  for (const std::string address :
       {"", "nonsense", "uv://", "shm://", "uv://localhost", "uv://127.0.0.1",
        "uv://127.0.0.1:99999999999", "uv://[::1", "ibv://127.0.0.1:4", "loopback:", "loopback:x",
        "shm://no\nsuch", "tcp://", "tcp://127.0.0.1", "tcp://localhost:1"}) {
    const auto recorder = std::make_shared<Recorder>();
    endpoint->connect(address, recorder->events());
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
  // The recorder was left in the middle of a callback: that is this test's doing.
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
    endpoint->connect(GetParam().dead_address, recorder->events())
        ->send(make_message("m"), recorder->done());
    ASSERT_TRUE(recorder->wait_closed());
    ASSERT_TRUE(recorder->wait_sends_done());
    EXPECT_EQ(recorder->closed_code(), ErrorCode::shutting_down);
    EXPECT_THROW(static_cast<void>(endpoint->listen([] { return ConnectionEvents{}; })), Error);
    endpoint->join();
  }
}

TEST_P(EndpointContract, EndpointsGoWithTrafficUnderway) {
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

TEST_P(EndpointContract, EndpointsGoWhileConnecting) {
  for (int round = 0; round < 10; ++round) {
    auto pair = make_pair();
    join_pair(*pair);
    pair->to_server->send(make_message("m"), pair->client->done());
    (round % 2 == 0 ? pair->server_endpoint : pair->client_endpoint).reset();
  }
}

TEST_P(EndpointContract, OtherVersionsAreRefusedOnBothSides) {
  EndpointOptions client = options(2, "client");
  client.self.version = 2;
  auto pair = make_pair(options(1, "server"), std::move(client));
  join_pair(*pair);
  pair->to_server->send(make_message("m"), pair->client->done());
  ASSERT_TRUE(pair->server->wait_closed());
  ASSERT_TRUE(pair->client->wait_closed());
  EXPECT_EQ(pair->server->closed_code(), ErrorCode::protocol);
  EXPECT_EQ(pair->client->closed_code(), ErrorCode::protocol);
  EXPECT_NE(pair->server->closed_text().find("version 2"), std::string::npos)
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
    server.secret = first;
    client.secret = second;
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
    const auto good_connection = client_endpoint->connect(addresses.front(), good->events());
    ASSERT_TRUE(accepted[0]->wait_open());
    const auto bad_connection = client_endpoint->connect(addresses.front(), bad->events());
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

TEST_P(EndpointContract, NamesThatAreTooLongAreRefusedAtOnce) {
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

INSTANTIATE_TEST_SUITE_P(Endpoints, EndpointContract,
                         testing::Values(Kind{"loopback", "loopback:999999"},
                                         Kind{"tensorpipe_shm",
                                              "tensorpipe-shm://stitch_nobody_listens_here"},
                                         Kind{"tensorpipe_uv", "uv://127.0.0.1:1"},
                                         Kind{"stream_shm", "shm://stitch_nobody_listens_here"},
                                         Kind{"stream_tcp", "tcp://127.0.0.1:1"}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace stitch::transport
