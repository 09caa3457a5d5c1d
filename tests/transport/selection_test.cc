// The transports that a worker uses, and its reports on those that it does not.
#include <semaphore>

#include "stitch/transport/selection/make_endpoints.h"
#include "stitch/transport/self_transfer.h"
#include "stitch/transport/stream/stream_endpoint.h"
#include "tests/support/plain_test.h"
#include "tests/transport/raw_peer.h"

namespace stitch::transport::selection_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// An endpoint that listens, or fails to, and never transfers anything.
class MuteEndpoint final : public Endpoint {
 public:
  explicit MuteEndpoint(
      std::string refusal, std::function<void()> ending = [] {})
      : refusal_(std::move(refusal)), ending_(std::move(ending)) {}
  ~MuteEndpoint() override { ending_(); }
  std::vector<std::string> listen(Accept) override {
    if (!refusal_.empty()) throw Error(ErrorCode::disconnected, refusal_);
    return {"mute://"};
  }
  std::shared_ptr<Connection> connect(const std::string&, Wanted, ConnectionEvents) override {
    return std::make_shared<MuteConnection>();
  }
  void close() override {}
  void join() override {}

 private:
  struct MuteConnection final : Connection {
    [[nodiscard]] const Hello& peer() const override { return hello_; }
    void send(Message, SendDone) override {}
    void close(const Error&) override {}
    [[nodiscard]] std::string describe() const override { return "mute"; }
    Hello hello_;
  };
  const std::string refusal_;
  const std::function<void()> ending_;
};

std::unique_ptr<Endpoint> make_stream(const std::string& transport) {
  EndpointOptions options;
  options.self.name = "self-transfer";
  return make_stream_endpoint(std::move(options), {{transport}, "127.0.0.1"});
}

TEST(Selection, ATransferThatSucceedsHasNoError) {
  for (const char* transport : {"shm", "tcp"})
    EXPECT_FALSE(try_self_transfer(make_stream(transport), milliseconds(5000))) << transport;
}

// An endpoint to which `stranger` connects before it connects to itself.
class VisitedEndpoint final : public Endpoint {
 public:
  using Stranger = std::function<void(const std::string& address)>;
  VisitedEndpoint(const std::string& transport, Stranger stranger)
      : stranger_(std::move(stranger)),
        endpoint_(make_stream_endpoint(self_transfer_options(), {{transport}, "127.0.0.1"})) {}
  std::vector<std::string> listen(Accept accept) override {
    return endpoint_->listen([this, accept = std::move(accept)] {
      ConnectionEvents events = accept();
      events.on_closed = [this, then = events.on_closed](const auto& connection, const Error& why) {
        if (then) then(connection, why);
        ended_.fetch_add(1);
      };
      return events;
    });
  }
  std::shared_ptr<Connection> connect(const std::string& address, Wanted whom,
                                      ConnectionEvents events) override {
    stranger_(address);
    EXPECT_TRUE(stitch::testing::eventually([&] { return ended_.load() > 0; }));
    return endpoint_->connect(address, whom, std::move(events));
  }
  void close() override { endpoint_->close(); }
  void join() override { endpoint_->join(); }

 private:
  const Stranger stranger_;
  std::atomic<int> ended_{0};  // of the connections that were accepted
  const std::unique_ptr<Endpoint> endpoint_;
};

TEST(Selection, AnotherPeerThatConnectsDuringATransferDoesNotMakeItFail) {
  for (const std::string transport : {"shm", "tcp"}) {
    const auto error_with = [&](VisitedEndpoint::Stranger stranger) {
      const auto error = try_self_transfer(
          std::make_unique<VisitedEndpoint>(transport, std::move(stranger)), milliseconds(9000));
      return error ? std::string(error->what()) : "";
    };
    EXPECT_EQ(error_with([](const std::string& address) { EXPECT_TRUE(connect_raw(address)); }), "")
        << transport;
    EXPECT_EQ(error_with([](const std::string& address) {
                const base::Descriptor socket = connect_raw(address);
                send_raw(socket.get(), "GET / HTTP/1.1\r\n\r\n");
              }),
              "")
        << transport;
    // A peer with the right protocol that is not this endpoint.
    EXPECT_EQ(
        error_with([&](const std::string& address) {
          const auto other = make_stream_endpoint(options(2), {{transport}, "127.0.0.1"});
          const auto recorder = std::make_shared<Recorder>();
          other->connect(address, {}, recorder->events())->send(make_message("nonsense"), nullptr);
          EXPECT_TRUE(recorder->wait_closed());
        }),
        "")
        << transport;
  }
}

TEST(Selection, ATransferThatFailsKeepsItsError) {
  const auto error =
      try_self_transfer(std::make_unique<MuteEndpoint>("no such device"), milliseconds(5000));
  ASSERT_TRUE(error);
  EXPECT_STREQ(error->what(), "no such device");
}

TEST(Selection, AnEndpointThatDoesNotAnswerIsEndedByAnotherThread) {
  std::atomic<bool> ended{false};
  std::binary_semaphore may_end{0};
  const auto start = steady_clock::now();
  const auto error = try_self_transfer(std::make_unique<MuteEndpoint>("",
                                                                      [&] {
                                                                        may_end.acquire();
                                                                        ended = true;
                                                                      }),
                                       milliseconds(20));
  EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(5));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::timeout);
  EXPECT_STREQ(error->what(),
               "nothing arrived within 20 ms; its threads are left to end by themselves");
  EXPECT_FALSE(ended);
  may_end.release();
  EXPECT_TRUE(stitch::testing::eventually([&] { return ended.load(); }));
}

TEST(Selection, AFailedTrialIsReportedOnceAndCounted) {
  static int round = 0;  // reports are remembered, also when tests are repeated
  const std::string name = "paper" + std::to_string(++round);
  const auto try_once = [&](const std::string& refusal) {
    return passes_once(name + " 127.0.0.1",
                       [&] { return std::make_unique<MuteEndpoint>(refusal); });
  };
  ::testing::internal::CaptureStderr();
  EXPECT_FALSE(try_once("no such device"));
  EXPECT_FALSE(try_once("no such device"));
  EXPECT_FALSE(try_once("permission denied"));
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "stitch: transport " + name +
                " is not used, it fails a transfer to itself: no such device\nstitch: transport " +
                name + " is not used, it fails a transfer to itself: permission denied\n");
  EXPECT_EQ(failed_trials().at(name), 3);
}

TEST(Selection, FailedTransportsAreLeftOutWithTheirReason) {
  EndpointOptions options;
  options.self.name = "worker0";
  TransportChoice choice;
  static int round = 0;  // reports are remembered, also when tests are repeated
  // Reserved for documentation: no host has it.
  const std::string address = "192.0.2." + std::to_string(round++ % 254 + 1);
  choice.bind_address = address;
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(make_endpoints(options, choice).size(), 1U);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("stitch: transport tcp is not used, it fails a transfer to itself: address "
                      "tcp://" +
                      address + " could not be bound: "),
            std::string::npos)
      << said;
  EXPECT_EQ(said.find("transport shm"), std::string::npos) << said;
  choice.transports = {"tcp"};
  const Error error =
      stitch::testing::error_of([&] { static_cast<void>(make_endpoints(options, choice)); });
  EXPECT_NE(
      std::string(error.what()).find("bind address " + address + "; tcp: address tcp://" + address),
      std::string::npos)
      << error.what();
}

}  // namespace
}  // namespace stitch::transport::selection_test
