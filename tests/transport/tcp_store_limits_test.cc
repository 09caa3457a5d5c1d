// Limits of a TCP store: its clients can neither exhaust its memory nor end it with an exception.
#include <future>

#include "stitch/base/byte_io.h"
#include "stitch/transport/store/framed_stream.h"
#include "stitch/transport/store/tcp_store.h"
#include "stitch/transport/store/tcp_store_protocol.h"
#include "tests/support/plain_test.h"
#include "tests/transport/plain_socket.h"

namespace stitch::transport::tcp_store_limits_test {
namespace {

using namespace std::chrono_literals;
using stitch::testing::error_of;

class TcpStoreLimits : public ::testing::Test {
 protected:
  std::shared_ptr<Store> client(const TcpStoreServer& server) {
    return make_tcp_store(loop_, {.port = server.port(), .connect_timeout = 20s});
  }
  base::EventLoop server_loop_{"store server"};
  base::EventLoop loop_{"store client"};
};

base::Bytes get_request(std::uint64_t id, std::string_view key) {
  base::Bytes bytes;
  base::ByteWriter writer(bytes);
  writer.write(id);
  writer.write(StoreOperation::get);
  writer.write_string(key);
  writer.write(std::int64_t{1} << 40);
  return bytes;
}

TEST_F(TcpStoreLimits, ValuesHaveABudget) {
  TcpStoreServer server(server_loop_, {.max_bytes = 100'000});
  const auto store = client(server);
  const std::string large(60'000, 'x');
  store->set("a", large);
  store->set("a", large);  // instead of the other one
  const auto full = error_of([&] { store->set("b", large); });
  EXPECT_EQ(full.code(), ErrorCode::overloaded);
  EXPECT_NE(std::string(full.what()).find("the limit is 100000 in tcp store at 127.0.0.1:"),
            std::string::npos)
      << full.what();
  EXPECT_EQ(error_of([&] { (void)store->compare_and_set("b", std::nullopt, large); }).code(),
            ErrorCode::overloaded);
  EXPECT_EQ(store->try_get("b"), std::nullopt);
  EXPECT_EQ(store->try_get("a"), large);
  EXPECT_TRUE(store->erase("a"));
  store->set("b", large);
  store->set("b", "");
  for (int i = 0; i < 100; ++i) EXPECT_EQ(store->add("n", 1), i + 1);
}

TEST_F(TcpStoreLimits, WaitsHaveABudget) {
  TcpStoreServer server(server_loop_, {.max_bytes = 1'000'000});
  const auto store = client(server);
  std::vector<std::string> keys(kMaxKeysOfAWait + 1, "k");
  const auto many = error_of([&] { store->wait(keys, 10ms); });
  EXPECT_EQ(many.code(), ErrorCode::out_of_range);
  EXPECT_NE(std::string(many.what()).find("a wait for 16385 keys, more than the 16384 allowed"),
            std::string::npos)
      << many.what();
  keys.pop_back();
  EXPECT_EQ(error_of([&] { store->wait(keys, 10ms); }).code(), ErrorCode::overloaded);
  keys.resize(1000);
  for (int round = 0; round < 20; ++round)  // ended waits free their share
    EXPECT_EQ(error_of([&] { store->wait(keys, 0ms); }).code(), ErrorCode::timeout);
}

TEST_F(TcpStoreLimits, UnreadRepliesHaveABudget) {
  TcpStoreServer server(server_loop_, {.max_bytes = std::size_t{32} << 20});
  Socket greedy = raw_client({}, server.port());
  for (std::uint64_t id = 1; id <= 1000; ++id) greedy.send_frame(get_request(id, "large"));
  const auto store = client(server);
  const std::string large(std::size_t{1} << 20, 'x');
  store->set("large", large);  // wakes a thousand waits for it: a gigabyte of replies
  EXPECT_EQ(store->get("large", 10s), large);
  EXPECT_TRUE(greedy.hung_up());
  store->set("k", "v");
  EXPECT_EQ(store->get("k", 10s), "v");
}

TEST_F(TcpStoreLimits, IncompleteFramesHaveABudget) {
  TcpStoreServer server(server_loop_, {.max_bytes = std::size_t{8} << 20});
  std::vector<Socket> halfway;
  const std::uint32_t announced = 8 << 20;
  const std::string start(reinterpret_cast<const char*>(&announced), sizeof(announced));
  for (int i = 0; i < 16; ++i) {
    halfway.push_back(raw_client({}, server.port()));
    halfway.back().send(start + std::string(std::size_t{1} << 20, 'x'));
  }
  int ended = 0;
  for (Socket& socket : halfway) {
    // The complete ones wait for further bytes.
    timeval limit{0, 200'000};
    socket.set_receive_timeout(limit);
    ended += socket.hung_up() ? 1 : 0;
  }
  EXPECT_GE(ended, 8);
  halfway.clear();
  const auto store = client(server);
  store->set("k", "v");
  EXPECT_EQ(store->get("k", 10s), "v");
}

TEST_F(TcpStoreLimits, ClientsAreCounted) {
  TcpStoreServer server(server_loop_, {.max_clients = 2});
  const auto first = client(server);
  auto second = client(server);
  const auto error = error_of([&] { (void)client(server); });
  EXPECT_EQ(error.code(), ErrorCode::overloaded);
  EXPECT_NE(std::string(error.what()).find("it has 2 clients already, the most it takes"),
            std::string::npos)
      << error.what();
  second.reset();
  std::shared_ptr<Store> third;
  while (third == nullptr) {  // the server notices a moment later
    try {
      third = client(server);
    } catch (const Error& still) {
      ASSERT_EQ(still.code(), ErrorCode::overloaded);
    }
  }
  third->set("k", "v");
  EXPECT_EQ(first->get("k", 10s), "v");
}

TEST_F(TcpStoreLimits, UnauthenticatedConnectionsCannotKeepClientsOut) {
  TcpStoreServer server(server_loop_, {.max_handshakes = 4});
  std::vector<Socket> strangers(64);
  for (Socket& stranger : strangers) stranger.connect(server.port());
  const auto store = client(server);
  store->set("k", "v");
  EXPECT_EQ(store->get("k", 10s), "v");
  for (std::size_t i = 0; i < 32; ++i) EXPECT_TRUE(strangers[i].hung_up());
}

}  // namespace
}  // namespace stitch::transport::tcp_store_limits_test
