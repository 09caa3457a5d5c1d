// Messages, for every endpoint.
#include "tests/transport/endpoint_contract.h"
#include "tests/support/plain_test.h"

namespace stitch::transport::endpoint_contract_test {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

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

// A worker binds before it knows its world, and others connect as soon as they know that.
TEST_P(EndpointContract, APeerThatConnectsBeforeItListensWaits) {
  EndpointOptions unknown = options(1, "server");
  const Hello self = std::exchange(unknown.self, {});
  auto pair = make_pair(std::move(unknown), options(2, "client"));
  const auto bound = pair->server_endpoint->bind();
  ASSERT_FALSE(bound.empty());
  pair->to_server = pair->client_endpoint->connect(bound.front(), {1}, pair->client->events());
  pair->to_server->send(make_message("early"), pair->client->done());
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // nothing tells that it waits
  EXPECT_FALSE(pair->client->open());
  pair->server_endpoint->become(self, {bound.front()});
  EXPECT_EQ(pair->server_endpoint->listen([server = pair->server] { return server->events(); }),
            std::vector<std::string>{bound.front()});
  EXPECT_TRUE(pair->client->wait_open()) << pair->client->closed_text();
  EXPECT_EQ(pair->client->peer().name, "server");
  EXPECT_TRUE(pair->server->wait_messages(1));
}

TEST_P(EndpointContract, CarriesEmptyAndLargeFrames) {
  const auto pair = connected();
  std::vector<std::string> texts{
      "", "x", "", std::string(3 * kMiB + 5, 'y'), std::string(40 * kMiB, 'z'), "end"};
  for (const auto& text : texts) pair->to_server->send(make_message(text), pair->client->done());
  ASSERT_TRUE(pair->server->wait_messages(texts.size())) << pair->server->closed_text();
  // Small messages may overtake large ones; each kind keeps its order.
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

// TensorPipe cannot throw away what it reads: there the connection ends.
TEST_P(EndpointContract, AMessageWhoseBuffersHaveNoMemoryComesWithoutThem) {
  EndpointOptions server = options(1, "server");
  server.allocator = [](Device device, std::size_t bytes) -> Buffer {
    if (bytes > 3 * kMiB)
      throw Error(ErrorCode::overloaded, "no room for " + std::to_string(bytes) + " bytes");
    return allocate_buffer(device, bytes);
  };
  auto pair = make_pair(std::move(server), options(2, "client"));
  join_pair(*pair);
  const auto send = [&](const std::string& text, const std::vector<std::size_t>& sizes) {
    Message message = make_message(text);
    for (const std::size_t bytes : sizes) message.buffers.push_back(make_filled_buffer(bytes, 1));
    pair->to_server->send(std::move(message), pair->client->done());
  };
  send("small", {100});
  send("too large", {kMiB, 5 * kMiB, 7, 4 * kMiB});
  send("large", {2 * kMiB});
  if (std::string(GetParam().name).starts_with("tensorpipe")) {
    ASSERT_TRUE(pair->server->wait_closed());
    EXPECT_EQ(pair->server->closed_code(), ErrorCode::overloaded);
    return;
  }
  ASSERT_TRUE(pair->server->wait_messages(3)) << pair->server->closed_text();
  const auto messages = pair->server->take_messages();
  EXPECT_FALSE(lacks_buffers(messages[0]));
  EXPECT_TRUE(lacks_buffers(messages[1]));
  EXPECT_EQ(text_of(messages[1]), "too large");
  ASSERT_EQ(messages[1].buffers.size(), 4U);
  for (const Buffer& buffer : messages[1].buffers) EXPECT_EQ(buffer.data, nullptr);
  EXPECT_EQ(messages[1].buffers[1].bytes, 5 * kMiB);
  EXPECT_EQ(text_of(messages[2]), "large");
  EXPECT_TRUE(is_filled(messages[2].buffers[0], 2 * kMiB, 1));
  EXPECT_TRUE(pair->client->wait_sends_done());
  EXPECT_EQ(pair->client->failed(), 0U);
}

// A part of a message is a sign of life.
TEST_P(EndpointContract, SaysWhenSomethingOfThePeerLastArrived) {
  const auto pair = connected();
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  const auto before = std::chrono::steady_clock::now();
  EXPECT_LT(pair->server->connection()->heard(), before);
  pair->to_server->send(make_message("m"), pair->client->done());
  ASSERT_TRUE(pair->server->wait_messages(1));
  // It is noted a moment after the message has been delivered, by a coarse clock.
  const auto heard = [&] { return pair->server->connection()->heard(); };
  while (heard() < before - std::chrono::milliseconds(20) &&
         std::chrono::steady_clock::now() < before + std::chrono::seconds(20))
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_GE(heard(), before - std::chrono::milliseconds(20));
}

TEST_P(EndpointContract, SeveralThreadsSendThousandsOfMessages) {
  const auto pair = connected();
  const auto to_client = pair->server->connection();
  constexpr int kThreads = 4;
  constexpr int kEach = 1000;
  {
    testing::on_each(kThreads, [&](int t) {
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
  // Senders hold a lock that the callbacks take, too: callbacks inside send() would deadlock here.
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
    client->connect(addresses.front(), {1}, recorders.back()->events())
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

INSTANTIATE_TEST_SUITE_P(
    Endpoints, EndpointContract,
    ::testing::Values(EndpointKind{"loopback", "loopback:999999"},
                      EndpointKind{"tensorpipe_shm", "tensorpipe-shm://stitch_without_listener"},
                      EndpointKind{"tensorpipe_uv", "uv://127.0.0.1:1"},
                      EndpointKind{"stream_shm", "shm://stitch_without_listener"},
                      EndpointKind{"stream_tcp", "tcp://127.0.0.1:1"},
                      EndpointKind{"stream_tcp_sealed", "tcp://127.0.0.1:1"}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace stitch::transport::endpoint_contract_test
