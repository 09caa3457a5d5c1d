// Which transports a worker uses, and what it says of those that it does not.
#include "stitch/transport/selection.h"

#include <gtest/gtest.h>

#include <atomic>
#include <semaphore>

#include "stitch/transport/self_transfer.h"
#include "stitch/transport/stream_endpoint.h"
#include "tests/support/eventually.h"

namespace stitch::transport {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// An endpoint that listens, or says why it cannot, and never carries anything.
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
  std::shared_ptr<Connection> connect(const std::string&, ConnectionEvents) override {
    return std::make_shared<MuteConnection>();
  }
  void close() override {}
  void join() override {}

 private:
  struct MuteConnection final : Connection {
    [[nodiscard]] const Hello& peer() const override { return nobody; }
    void send(Message, SendDone) override {}
    void close(const Error&) override {}
    [[nodiscard]] std::string describe() const override { return "mute"; }
    Hello nobody;
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

TEST(Selection, ATransferThatFailsKeepsItsError) {
  const auto error =
      try_self_transfer(std::make_unique<MuteEndpoint>("no such device"), milliseconds(5000));
  ASSERT_TRUE(error);
  EXPECT_STREQ(error->what(), "no such device");
}

TEST(Selection, AnEndpointThatDoesNotAnswerIsEndedElsewhere) {
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

TEST(Selection, AFailedTrialIsSaidOnceAndCounted) {
  const auto try_once = [](const std::string& refusal) {
    return passes_once("paper 127.0.0.1", [&] { return std::make_unique<MuteEndpoint>(refusal); });
  };
  ::testing::internal::CaptureStderr();
  EXPECT_FALSE(try_once("no such device"));
  EXPECT_FALSE(try_once("no such device"));
  EXPECT_FALSE(try_once("permission denied"));
  EXPECT_EQ(
      ::testing::internal::GetCapturedStderr(),
      "stitch: transport paper is not used, it fails a transfer to itself: no such device\n"
      "stitch: transport paper is not used, it fails a transfer to itself: permission denied\n");
  EXPECT_EQ(failed_trials().at("paper"), 3);
}

TEST(Selection, WhatFailsIsLeftOutWithItsReason) {
  EndpointOptions options;
  options.self.name = "worker0";
  TransportChoice choice;
  choice.bind_address = "192.0.2.1";  // for documentation: no host has it
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(make_endpoints(options, choice).size(), 1U);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("stitch: transport tcp is not used, it fails a transfer to itself: address "
                      "tcp://192.0.2.1 could not be bound: "),
            std::string::npos)
      << said;
  EXPECT_EQ(said.find("transport shm"), std::string::npos) << said;
  choice.transports = {"tcp"};
  try {
    static_cast<void>(make_endpoints(options, choice));
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_NE(
        std::string(error.what()).find("bind address 192.0.2.1; tcp: address tcp://192.0.2.1"),
        std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace stitch::transport
