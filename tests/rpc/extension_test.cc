// What extensions rely on: they are told of messages that are never sent, control frames arrive,
// and a message that cannot be handled fails its own call only.
#include <pthread.h>

#include <new>

#include "stitch/base/callback_scope.h"
#include "stitch/rpc/message/message.h"
#include "tests/support/world_test.h"

namespace extension_test {  // its functions are registered under their full names
namespace {

using namespace stitch::testing;
using stitch::rpc::Agent;
using stitch::rpc::InMessage;
using stitch::rpc::OutMessage;

constexpr std::uint16_t kTestFrame = 0x7e57;
constexpr std::uint16_t kWorkFrame = 0x7e58;  // brings work that may block

// What the extension below does on all workers of this process.
struct Steering {
  std::atomic<std::uint16_t> notes{0};               // the kind of messages that get an attachment
  std::atomic<bool> refuses{false};                  // throws for them
  std::atomic<std::size_t> adds{0};                  // bytes of a section to them
  std::atomic<std::uint16_t> runs_out_of_memory{0};  // when a message of that kind arrives
  std::atomic<bool> loses_callers{false};            // when a request arrives
  std::atomic<int> made{0};
  std::atomic<int> sent{0};
  std::atomic<int> unsent{0};
  std::atomic<int> frames{0};
  std::atomic<int> losses{0};
  std::function<void()> work = [] {};  // what a kWorkFrame brings
};
Steering* steering = nullptr;

class Noted final : public stitch::rpc::Attachment {
 public:
  Noted() { ++steering->made; }
  void on_sent(const std::optional<Error>& error) override {
    ++(error ? steering->unsent : steering->sent);
  }
};

class TestExtension final : public stitch::rpc::Extension {
 public:
  explicit TestExtension(Agent& agent) : agent_(agent) {
    agent.set_frame_handler(kTestFrame, [](const InMessage&) {
      if (steering != nullptr) ++steering->frames;
    });
    agent.set_frame_handler(kWorkFrame, [&agent](const InMessage&) {
      agent.post_where_read([] {
        if (steering != nullptr) steering->work();
      });
    });
  }
  void on_send(OutMessage& message, const WorkerInfo&) override {
    if (steering == nullptr || message.frame.kind() != steering->notes) return;
    static_cast<void>(message.attachment<Noted>());
    const std::vector<std::byte> bytes(steering->adds);
    if (!bytes.empty()) message.frame.add_section(kTestFrame, bytes);
    if (steering->refuses) throw Error(ErrorCode::invalid_argument, "refused by an extension");
  }
  void on_receive(InMessage& message) override {
    if (steering == nullptr) return;
    if (message.view.kind() == steering->runs_out_of_memory) throw std::bad_alloc();
    if (message.view.kind() == stitch::rpc::wire::kRequest && steering->loses_callers)
      agent_.peers().end(message.from, Error(ErrorCode::disconnected, "the test says so"), false,
                         true);
  }
  void on_peer_lost(const WorkerInfo&, const Error&) override {
    if (steering != nullptr) ++steering->losses;
  }

 private:
  Agent& agent_;
};

[[maybe_unused]] const int registered =
    stitch::rpc::register_extension([](Agent& agent) -> std::unique_ptr<stitch::rpc::Extension> {
      return std::make_unique<TestExtension>(agent);
    });

class Extensions : public ::testing::Test {
 protected:
  Extensions() { steering = &steering_; }
  ~Extensions() override { steering = nullptr; }
  // All attachments were told, once.
  void expect_told(int sent, int unsent) {
    EXPECT_TRUE(eventually([&] { return steering_.sent + steering_.unsent >= steering_.made; }));
    EXPECT_EQ(steering_.sent, sent);
    EXPECT_EQ(steering_.unsent, unsent);
  }
  Steering steering_;
};

int same(int i) { return i; }
std::int64_t elements(const at::Tensor& tensor) { return tensor.numel(); }
std::string text_of(std::size_t bytes) { return std::string(bytes, 'x'); }

TEST_F(Extensions, AreToldThatAMessageWasSent) {
  Cluster cluster(2);
  steering_.notes = stitch::rpc::wire::kRequest;
  EXPECT_EQ(rpc_sync<same>("worker1", 1), 1);
  expect_told(1, 0);
}

TEST_F(Extensions, AMessageThatAnotherExtensionRefusesIsTakenBack) {
  Cluster cluster(2);
  steering_.notes = stitch::rpc::wire::kRequest;
  steering_.refuses = true;
  EXPECT_EQ(error_of([] { rpc_sync<same>("worker1", 1); }).code(), ErrorCode::invalid_argument);
  expect_told(0, 1);
  EXPECT_EQ(error_of([] { notify<same>("worker1", 1); }).code(), ErrorCode::invalid_argument);
  expect_told(0, 2);
}

TEST_F(Extensions, AMessageThatGrowsOverTheFrameLimitIsTakenBack) {
  Cluster cluster(2, {.max_frame_bytes = 64 << 10});
  steering_.notes = stitch::rpc::wire::kRequest;
  steering_.adds = 65 << 10;
  EXPECT_EQ(error_of([] { rpc_sync<same>("worker1", 1); }).code(), ErrorCode::out_of_range);
  expect_told(0, 1);
}

TEST_F(Extensions, AMessageOverTheOverloadLimitIsTakenBack) {
  Cluster cluster(2, {.max_inflight_bytes = 64 << 10});
  steering_.notes = stitch::rpc::wire::kRequest;
  EXPECT_EQ(error_of([] { rpc_sync<elements>("worker1", at::zeros({1 << 20})); }).code(),
            ErrorCode::overloaded);
  expect_told(0, 1);
}

TEST_F(Extensions, AReplyThatCannotBeSentIsTakenBack) {
  Cluster cluster(2, {.max_frame_bytes = 64 << 10});
  steering_.notes = stitch::rpc::wire::kReply;
  steering_.adds = 60 << 10;
  EXPECT_EQ(error_of([] { rpc_sync<text_of>("worker1", std::size_t{10} << 10); }).code(),
            ErrorCode::out_of_range);
  expect_told(0, 1);
}

TEST_F(Extensions, AMessageToAWorkerThatIsGoneIsTakenBack) {
  Cluster cluster(2);
  EXPECT_EQ(rpc_sync<same>("worker1", 1), 1);
  cluster[1].shutdown({.graceful = false});
  EXPECT_TRUE(eventually([&] { return steering_.losses == 1; }));
  steering_.notes = stitch::rpc::wire::kRequest;
  EXPECT_EQ(error_of([] { rpc_sync<same>("worker1", 1); }).code(), ErrorCode::disconnected);
  expect_told(0, 1);
}

OutMessage frame_of(std::size_t bytes) {
  OutMessage message(kTestFrame);
  message.frame.body().append(std::string(bytes, 'x').data(), bytes);
  return message;
}

TEST_F(Extensions, ControlFramesPassTheOverloadLimit) {
  Cluster cluster(2, {.max_inflight_bytes = 128});
  const auto agent = cluster[0].agent();
  const auto& to = agent->peers().find("worker1");
  EXPECT_EQ(error_of([&] { agent->send_frame(to, frame_of(200)); }).code(), ErrorCode::overloaded);
  for (int i = 0; i < 10; ++i) agent->send_control(to, frame_of(200));
  EXPECT_TRUE(eventually([&] { return steering_.frames == 10; }));
  EXPECT_TRUE(eventually([&] { return cluster[0].debug_info().at("rpc.control_bytes") == 0; }));
}

Gate gate;
void stop_reading() { gate.pass(); }
STITCH_INLINE(stop_reading);

// Over shared memory, where a message is counted until it is in the ring.
std::unique_ptr<Cluster> shm_cluster() {
  return std::make_unique<Cluster>(2, [](Options& options) { options.transports = {"shm"}; });
}

std::string thread_name() {
  std::array<char, 16> name{};
  pthread_getname_np(pthread_self(), name.data(), name.size());
  return name.data();
}

TEST_F(Extensions, TheThreadThatReadsAFrameDoesWhatItBrings) {
  const auto cluster = shm_cluster();
  std::atomic<int> done{0}, by_pollers{0};
  std::atomic<bool> within_delivery{false};
  steering_.work = [&] {
    if (thread_name() == "stitch-poll") ++by_pollers;
    if (stitch::base::CallbackScope::on_this_thread()) within_delivery = true;
    ++done;
  };
  const auto agent = (*cluster)[0].agent();
  const auto& to = agent->peers().find("worker1");
  int sent = 0;
  EXPECT_TRUE(eventually([&] {
    agent->send_control(to, OutMessage(kWorkFrame));
    ++sent;
    return by_pollers > 0;
  }));
  EXPECT_TRUE(eventually([&] { return done == sent; }));
  EXPECT_FALSE(within_delivery);
}

TEST_F(Extensions, WhatAFrameBringsMayWaitForMessages) {
  const auto cluster = shm_cluster();
  gate.close();
  std::atomic<int> answers{0};
  steering_.work = [&] {
    {
      const stitch::BlockingRegion blocking;
      gate.pass();
    }
    const WorkerScope scope((*cluster)[1]);
    answers += rpc_sync<same>("worker0", 1);
  };
  const auto agent = (*cluster)[0].agent();
  const auto& to = agent->peers().find("worker1");
  for (int i = 0; i < 2; ++i) agent->send_control(to, OutMessage(kWorkFrame));
  ASSERT_TRUE(gate.wait_for_arrival());
  EXPECT_EQ(rpc_sync<same>("worker1", 7), 7);
  gate.open();
  EXPECT_TRUE(eventually([&] { return answers == 2; }));
}

TEST_F(Extensions, APeerThatDoesNotReadControlFramesIsGivenUp) {
  const auto cluster = shm_cluster();
  gate.close();
  const auto waiting = rpc_async<stop_reading>("worker1");
  ASSERT_TRUE(gate.wait_for_arrival());
  const auto agent = (*cluster)[0].agent();
  const auto& to = agent->peers().find("worker1");
  constexpr std::size_t kBytes = 256 << 10;
  std::optional<Error> refusal;
  std::size_t accepted = 0;
  while (!refusal && accepted <= 2 * stitch::rpc::Sender::kMaxControlBytes / kBytes) {
    try {
      agent->send_control(to, frame_of(kBytes));
      ++accepted;
    } catch (const Error& error) {
      refusal = error;
    }
  }
  ASSERT_TRUE(refusal) << accepted << " frames were accepted";
  EXPECT_EQ(refusal->code(), ErrorCode::overloaded);
  EXPECT_STREQ(refusal->what(),
               "worker \"worker1\" (id 1) does not read: control messages of 64 MiB wait for it");
  EXPECT_TRUE(eventually([&] { return steering_.losses >= 1; })) << "every extension is told";
  EXPECT_EQ(error_of([&] { waiting.get(); }).code(), ErrorCode::disconnected);
  gate.open();
  for (int rank = 0; rank < 2; ++rank) (*cluster)[rank].shutdown({.graceful = false});
}

TEST_F(Extensions, ARequestOrReplyThatCannotBeHandledFailsItsOwnCallOnly) {
  Cluster cluster(2);
  for (const auto kind : {stitch::rpc::wire::kRequest, stitch::rpc::wire::kReply}) {
    steering_.runs_out_of_memory = kind;
    const Error error = error_of([] { rpc_sync<same>("worker1", 1); });
    EXPECT_EQ(error.code(), ErrorCode::internal) << error.what();
    EXPECT_EQ(error.remote(), kind == stitch::rpc::wire::kRequest);
    EXPECT_TRUE(contains(error.what(), "bad_alloc")) << error.what();
    steering_.runs_out_of_memory = 0;
    EXPECT_EQ(rpc_sync<same>("worker1", 2), 2);
  }
  EXPECT_EQ(steering_.losses, 0);
}

TEST_F(Extensions, AOneWayCallThatFailsBeforeItRunsGivesItsRoomBack) {
  Cluster cluster(2);
  steering_.runs_out_of_memory = stitch::rpc::wire::kRequest;
  for (int i = 0; i < 100; ++i) notify<same>("worker1", i);
  EXPECT_TRUE(
      eventually([&] { return cluster[1].debug_info().at("rpc.messages_received") >= 100; }));
  steering_.runs_out_of_memory = 0;
  const auto agent = cluster[0].agent();
  const auto& to = agent->peers().find("worker1");
  // It asks for the room.
  EXPECT_TRUE(eventually([&] { return agent->outgoing_calls().unhandled() == 0; }));
  EXPECT_EQ(agent->sender().flow(to).budget.numbers().bytes, 0U);
}

std::atomic<int> runs{0};
void count_run() { ++runs; }

// Nothing else would stop the handler: no CANCEL comes from a caller that is lost.
TEST_F(Extensions, ARequestThatArrivesWhileItsCallerIsLostIsNotRun) {
  Cluster cluster(2);
  runs = 0;
  steering_.loses_callers = true;
  const auto call = rpc_async<count_run>({.to = "worker1", .timeout = 0s});
  EXPECT_EQ(error_of([&] { call.get(); }).code(), ErrorCode::disconnected);
  EXPECT_TRUE(eventually([&] { return cluster[1].debug_info().at("rpc.calls_served") == 0; }));
  EXPECT_EQ(runs, 0);
  for (int rank = 0; rank < 2; ++rank) cluster[rank].shutdown({.graceful = false});
}

}  // namespace
}  // namespace extension_test
