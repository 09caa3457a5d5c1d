// Stitch's own endpoint among processes: peers that are killed, and a process that runs out of
// descriptors.
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "stitch/transport/stream/shm_memory.h"
#include "stitch/transport/stream/stream_endpoint.h"
#include "tests/support/disabled_test_process.h"
#include "tests/support/forked_child.h"
#include "tests/support/plain_test.h"
#include "tests/transport/raw_peer.h"

namespace stitch::transport::stream_process_test {
namespace {

using std::chrono::milliseconds;

constexpr const char* kAddressVariable = "TRANSPORT_TEST_ADDRESS";
constexpr const char* kTaskVariable = "TRANSPORT_TEST_TASK";

// A process that runs StreamProcess.DISABLED_`test` and is given an address and a task.
class Process : public testing::DisabledTestProcess {
 public:
  Process(const std::string& test, const std::string& address, const std::string& task)
      : DisabledTestProcess("StreamProcess.DISABLED_" + test,
                            {{kAddressVariable, address}, {kTaskVariable, task}}) {}
};

// What both peers below begin with: an endpoint that echoes, of which the addresses are sent over a
// control connection, in a process that may open 20 more descriptors.
class PoorPeer {
 public:
  PoorPeer(const char* address, const char* transport)
      : endpoint_(stream_endpoint(2, {transport})), control_(stream_endpoint(3, {"tcp"})) {
    const auto addresses = endpoint_->listen([] { return echo_events(); });
    connection_ = control_->connect(address, {1}, recorder_->events());
    EXPECT_TRUE(recorder_->wait_open());
    const base::Descriptor last(::dup(0));
    const rlimit few{static_cast<rlim_t>(last.get()) + 20, static_cast<rlim_t>(last.get()) + 20};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
    say(addresses[0]);
  }
  [[nodiscard]] Endpoint& endpoint() { return *endpoint_; }
  [[nodiscard]] Recorder& heard() { return *recorder_; }
  void say(const std::string& text) { connection_->send(make_message(text), nullptr); }
  // Returns when the control connection has been silent for long; usually killed before.
  void stay() {
    static_cast<void>(recorder_->wait([](Recorder&) { return false; }));
  }

 private:
  const std::unique_ptr<Endpoint> endpoint_;
  const std::unique_ptr<Endpoint> control_;
  const std::shared_ptr<Recorder> recorder_ = std::make_shared<Recorder>();
  std::shared_ptr<Connection> connection_;
};

// Containers of one network, each with users of the same numbers.
TEST(StreamProcess, WithoutASecretSharedMemoryIsForProcessesThatSeeEachOther) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  check_peer_user(ends[0], false);
  constexpr int kMayNot = 77;
  testing::ForkedChild child([&] {
    if (::unshare(CLONE_NEWPID) != 0) return kMayNot;
    return testing::ForkedChild([&] {  // sees no process outside
             check_peer_user(ends[0], true);
             const Error error = testing::error_of([&] { check_peer_user(ends[0], false); });
             return error.code() == ErrorCode::unauthenticated ? 0 : 2;
           })
        .wait();
  });
  const int status = child.wait();
  for (const int end : ends) ::close(end);
  if (status == kMayNot) GTEST_SKIP() << "only root may make a namespace of processes";
  EXPECT_EQ(status, 0);
}

TEST(StreamProcess, DISABLED_PoorEcho) {
  const char* address = std::getenv(kAddressVariable);
  const char* transport = std::getenv(kTaskVariable);
  if (address == nullptr || transport == nullptr)
    GTEST_SKIP() << "runs only as the peer of another test";
  PoorPeer(address, transport).stay();
}

TEST(StreamProcess, RunningOutOfDescriptorsPasses) {
  for (const std::string transport : {"shm", "tcp"}) {
    SCOPED_TRACE(transport);
    const auto control = stream_endpoint(1, {"tcp"});
    const auto in = std::make_shared<Recorder>();
    const auto control_addresses = control->listen([&] { return in->events(); });
    const Process poor("PoorEcho", control_addresses[0], transport);
    ASSERT_TRUE(wait_until([&] { return in->received() == 1 || in->closed().has_value(); }));
    const auto texts = in->take_texts();
    ASSERT_EQ(texts.size(), 1U) << in->closed_text();
    const std::string& address = texts.front();

    const auto client = stream_endpoint(4, {transport});
    const auto first = std::make_shared<Recorder>();
    const auto before = client->connect(address, {2}, first->events());
    before->send(make_message("1"), nullptr);
    ASSERT_TRUE(first->wait_messages(1)) << first->closed_text();
    for (int round = 1; round <= 3; ++round) {
      // More strangers than it has descriptors for: they wait in the kernel's backlog.
      std::vector<base::Descriptor> strangers;
      for (int i = 0; i < 60; ++i) strangers.push_back(connect_raw(address));
      const std::size_t done = first->received();
      before->send(make_message("still there"), nullptr);
      EXPECT_TRUE(first->wait_messages(done + 1)) << "an open connection suffers";
      strangers.clear();
      bool opened = false;
      for (int attempt = 0; attempt < 50 && !opened; ++attempt) {
        const auto late = std::make_shared<Recorder>();
        const auto connection = client->connect(address, {2}, late->events());
        connection->send(make_message("late"), nullptr);
        opened = wait_until([&] { return late->received() == 1 || late->closed().has_value(); }) &&
                 late->received() == 1;
        connection->close(Error(ErrorCode::cancelled, "enough"));
        if (!opened) std::this_thread::sleep_for(milliseconds(20));
      }
      EXPECT_TRUE(opened) << "round " << round;
    }
  }
}

// Connects to the address that it is sent three times, and sends the outcome.
TEST(StreamProcess, DISABLED_PoorClient) {
  const char* address = std::getenv(kAddressVariable);
  const char* transport = std::getenv(kTaskVariable);
  if (address == nullptr || transport == nullptr)
    GTEST_SKIP() << "runs only as the peer of another test";
  PoorPeer peer(address, transport);
  ASSERT_TRUE(peer.heard().wait_messages(1));
  std::vector<std::shared_ptr<Recorder>> own(3);
  const std::string target = peer.heard().take_texts().front();
  std::string result = "open";
  for (auto& each : own) {
    each = std::make_shared<Recorder>();
    peer.endpoint().connect(target, {4}, each->events());
    if (!each->wait_open()) result = each->closed_text();
  }
  peer.say(result);
  peer.stay();
}

// Strangers have every descriptor that they can get; it can connect to its own peers all the same.
TEST(StreamProcess, StrangersDoNotKeepItFromConnecting) {
  for (const std::string transport : {"shm", "tcp"}) {
    SCOPED_TRACE(transport);
    const auto control = stream_endpoint(1, {"tcp"});
    const auto in = std::make_shared<Recorder>();
    const auto control_addresses = control->listen([&] { return in->events(); });
    const Process poor("PoorClient", control_addresses[0], transport);
    ASSERT_TRUE(wait_until([&] { return in->received() == 1 || in->closed().has_value(); }));
    const auto texts = in->take_texts();
    ASSERT_EQ(texts.size(), 1U) << in->closed_text();
    std::vector<base::Descriptor> strangers;
    for (int i = 0; i < 80; ++i) strangers.push_back(connect_raw(texts.front()));
    const auto target = stream_endpoint(4, {transport});
    const auto addresses = target->listen([] { return echo_events(); });
    in->connection()->send(make_message(addresses[0]), nullptr);
    ASSERT_TRUE(in->wait_messages(2));
    EXPECT_EQ(in->take_texts().front(), "open");
  }
}

}  // namespace
}  // namespace stitch::transport::stream_process_test
