// Threads that wait for a message and move it themselves: Endpoint::help of stitch's own endpoint.
#include <limits>

#include "stitch/transport/stream/stream_endpoint.h"
#include "tests/support/plain_test.h"
#include "tests/transport/raw_peer.h"

namespace stitch::transport::stream_help_test {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

// A client connected to a server that answers every message with itself.
struct Echo {
  explicit Echo(const std::string& transport,
                std::function<void(const std::shared_ptr<Connection>&, Message)> on_message)
      : server(stream_endpoint(1, {transport})), client(stream_endpoint(2, {transport})) {
    in->handle = [](const std::shared_ptr<Connection>& from, Message message) {
      from->send(std::move(message), nullptr);
    };
    out->handle = std::move(on_message);
    const auto addresses = server->listen([recorder = in] { return recorder->events(); });
    connection = client->connect(addresses.front(), {1}, out->events());
    EXPECT_TRUE(out->wait_open()) << out->closed_text();
    EXPECT_TRUE(in->wait_open());
  }
  ~Echo() {
    connection.reset();
    client.reset();
    server.reset();
    EXPECT_EQ(in->faults(), std::vector<std::string>{});
    EXPECT_EQ(out->faults(), std::vector<std::string>{});
  }
  const std::shared_ptr<Recorder> in = std::make_shared<Recorder>();
  const std::shared_ptr<Recorder> out = std::make_shared<Recorder>();
  std::unique_ptr<Endpoint> server;
  std::unique_ptr<Endpoint> client;
  std::shared_ptr<Connection> connection;
};

// Waits as the layers above do: helps as long as that seems to pay off, then sleeps; true when
// help() brought it.
bool await(Endpoint& endpoint, base::AwaitedFlag& done, bool& helped) {
  helped = false;
  return wait_until([&] {
    if (endpoint.help(done, Clock::now() + kTestTimeout)) helped = true;
    return done.is_set();
  });
}

class StreamHelp : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Stream, StreamHelp, ::testing::Values("shm", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(StreamHelp, AWaitingThreadGetsItsMessageItself) {
  base::AwaitedFlag done;
  std::atomic<int> here{0};
  const auto waiter = std::this_thread::get_id();
  Echo echo(GetParam(), [&](const std::shared_ptr<Connection>&, const Message&) {
    if (std::this_thread::get_id() == waiter) here.fetch_add(1);
    done.set();
  });
  int helped_times = 0;
  for (int i = 0; i < 500; ++i) {
    done.clear();
    echo.connection->send(make_message(std::to_string(i)), nullptr);
    bool helped = false;
    ASSERT_TRUE(await(*echo.client, done, helped)) << i;
    helped_times += helped ? 1 : 0;
  }
  EXPECT_GT(helped_times, 0);
  EXPECT_GT(here.load(), 0) << "no callback ran on the thread that waited";
  EXPECT_EQ(echo.out->received(), 500U);
}

TEST_P(StreamHelp, ReturnsInTimeWhenNothingComes) {
  Echo echo(GetParam(), [](const std::shared_ptr<Connection>&, const Message&) {});
  base::AwaitedFlag never;
  for (int i = 0; i < 100; ++i) {
    const auto begin = Clock::now();
    EXPECT_FALSE(echo.client->help(never, begin + milliseconds(i % 10)));
    EXPECT_FALSE(echo.server->help(never, begin));
    EXPECT_FALSE(echo.client->help(never, Clock::time_point::min()));
    EXPECT_LT(Clock::now() - begin, seconds(15));
  }
  // Messages are moved by the endpoint's own thread afterwards.
  echo.connection->send(make_message("m"), nullptr);
  EXPECT_TRUE(echo.out->wait_messages(1));
}

TEST_P(StreamHelp, DoesNothingInsideACallback) {
  base::AwaitedFlag never;
  std::atomic<int> calls{0};
  Endpoint* client = nullptr;
  Echo echo(GetParam(), [&](const std::shared_ptr<Connection>&, const Message&) {
    const auto begin = Clock::now();
    EXPECT_FALSE(client->help(never, begin + kTestTimeout));
    EXPECT_LT(Clock::now() - begin, seconds(15));
    calls.fetch_add(1);
  });
  client = echo.client.get();
  for (int i = 0; i < 50; ++i) echo.connection->send(make_message("m"), nullptr);
  base::AwaitedFlag done;
  EXPECT_TRUE(wait_until([&] {
    static_cast<void>(client->help(done, Clock::now() + milliseconds(1)));
    return calls.load() == 50;
  }));
}

TEST_P(StreamHelp, SeveralThreadsHelpWhileTrafficFlowsBothWays) {
  constexpr std::size_t kThreads = 4;
  constexpr int kRounds = 300;
  std::array<base::AwaitedFlag, kThreads> done{};
  std::atomic<int> unasked{0};
  Echo echo(GetParam(), [&](const std::shared_ptr<Connection>&, const Message& message) {
    const std::string text = text_of(message);
    if (text[0] == 'p') {
      unasked.fetch_add(1);
    } else {
      done[static_cast<std::size_t>(text[0] - '0')].set();
    }
  });
  std::atomic<bool> stop{false};
  // Messages that no thread waits for: small and large, from the other side.
  std::thread pusher([&] {
    const auto back = echo.in->connection();
    for (int i = 0; !stop.load(); ++i) {
      back->send(make_message("push" + std::string(i % 20 == 0 ? 100'000 : 10, 'p')),
                 echo.in->done());
      if (i % 50 == 0) static_cast<void>(echo.in->wait_sends_done());
    }
  });
  std::vector<std::thread> threads;
  std::atomic<int> failed{0};
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kRounds && failed.load() == 0; ++i) {
        done[t].clear();
        const std::size_t bytes = i % 30 == 0 ? 50'000 : static_cast<std::size_t>(i);
        echo.connection->send(make_message(std::to_string(t) + std::string(bytes, 'x')),
                              echo.out->done());
        bool helped = false;
        if (!await(*echo.client, done[t], helped)) failed.fetch_add(1);
        // Some help the other side, too.
        base::AwaitedFlag never;
        if (i % 10 == 0)
          static_cast<void>(echo.server->help(never, Clock::now() + milliseconds(1)));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  stop = true;
  pusher.join();
  EXPECT_EQ(failed.load(), 0);
  EXPECT_GT(unasked.load(), 0);
  EXPECT_TRUE(echo.out->wait_sends_done());
  EXPECT_TRUE(echo.in->wait_sends_done());
}

TEST_P(StreamHelp, AnEndpointMayCloseWhileThreadsHelp) {
  for (int round = 0; round < 20; ++round) {
    Echo echo(GetParam(), [](const std::shared_ptr<Connection>& from, Message message) {
      from->send(std::move(message), nullptr);
    });
    for (int i = 0; i < 10; ++i) echo.connection->send(make_message("round and round"), nullptr);
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; ++t) {
      threads.emplace_back([&] {
        base::AwaitedFlag never;
        while (!stop.load())
          static_cast<void>(echo.client->help(never, Clock::now() + milliseconds(100)));
      });
    }
    EXPECT_TRUE(wait_until([&] { return echo.out->received() > 50; }, seconds(10)))
        << "only " << echo.out->received() << " came";
    echo.client->close();
    echo.client->join();
    EXPECT_TRUE(echo.out->closed().has_value());
    stop = true;
    for (auto& thread : threads) thread.join();
    base::AwaitedFlag never;
    EXPECT_FALSE(echo.client->help(never, Clock::time_point::max()));
  }
}

}  // namespace
}  // namespace stitch::transport::stream_help_test
