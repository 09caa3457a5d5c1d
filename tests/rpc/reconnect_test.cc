// Connections that break under traffic: the two workers go on over other ones, and every message
// arrives once.
#include <cstring>

#include "stitch/transport/loopback/loopback_endpoint.h"
#include "stitch/transport/stream/stream_endpoint.h"
#include "tests/support/world_test.h"
#include "tests/transport/relay.h"

namespace reconnect_test {
namespace {

using namespace stitch::testing;
using stitch::base::Mutex;
using stitch::base::MutexLock;
using stitch::rpc::Member;
using stitch::rpc::PeerTable;
namespace base = stitch::base;
namespace transport = stitch::transport;

constexpr std::uint16_t kNumber = 0x700;

transport::Message message_of(std::uint64_t number, std::size_t bytes_beside) {
  transport::FrameBuilder frame(kNumber);
  frame.body().append(&number, sizeof(number));
  frame.end_body();
  if (bytes_beside > 0) {
    transport::Buffer buffer = transport::allocate_buffer({}, bytes_beside);
    std::memset(buffer.data, static_cast<int>(number & 0x7f), bytes_beside);
    frame.set_inline_bytes(0);
    static_cast<void>(frame.add_buffer(std::move(buffer)));
  }
  return std::move(frame).finish();
}

std::string name_of(std::uint32_t id) { return "worker" + std::to_string(id); }

transport::EndpointOptions options_of(std::uint32_t id, bool sealed) {
  transport::EndpointOptions options;
  options.self.id = id;
  options.self.name = name_of(id);
  if (sealed) {
    static const auto key = transport::SecretKey::from_random("the secret of this test");
    options.secret = key;
  }
  return options;
}

// A peer table with what a worker has around it, that notes which numbers have come.
class Node {
 public:
  explicit Node(std::uint32_t id, std::chrono::milliseconds grace = 10s) : id_(id), table_(grace) {}
  ~Node() {
    table_.close();
    loop_.close();
  }
  std::vector<std::string> listen(std::unique_ptr<transport::Endpoint> endpoint) {
    return table_.listen(std::move(endpoint));
  }
  void start(const std::vector<Member>& members) {
    table_.start(
        members, WorkerId(id_),
        {.on_message = [this](const auto&, const WorkerInfo&,
                              transport::Message message) { note(message); },
         .place = [](const auto&, const auto&, std::size_t) { return transport::Buffer{}; },
         .on_lost =
             [this](const WorkerInfo&, const Error& reason) {
               MutexLock lock(mutex_);
               lost_.emplace_back(reason.what());
             },
         .call_at = [this](auto when, auto task) { loop_.call_at(when, std::move(task)); },
         .deadline = [](std::uint64_t) { return PeerTable::Clock::time_point::max(); }});
  }
  void send(std::uint32_t to, std::uint64_t number, std::size_t bytes_beside = 0) {
    table_.send(table_.find(WorkerId(to)), nullptr, message_of(number, bytes_beside),
                [this](const std::optional<Error>& error) { ++(error ? failed_ : passed_on_); });
  }
  // How often each number has come.
  [[nodiscard]] std::map<std::uint64_t, int> came() const {
    MutexLock lock(mutex_);
    return came_;
  }
  [[nodiscard]] std::vector<std::string> lost() const {
    MutexLock lock(mutex_);
    return lost_;
  }
  [[nodiscard]] std::string wrong() const {
    MutexLock lock(mutex_);
    return wrong_;
  }
  [[nodiscard]] int failed() const { return failed_; }
  [[nodiscard]] int passed_on() const { return passed_on_; }
  [[nodiscard]] PeerTable& table() { return table_; }
  [[nodiscard]] std::int64_t number(const std::string& name) const {
    std::map<std::string, std::int64_t> numbers;
    table_.debug_info(numbers);
    return numbers.at(name);
  }

 private:
  void note(const transport::Message& message) {
    const transport::FrameView view(message);
    std::uint64_t number = 0;
    std::memcpy(&number, view.body().data(), sizeof(number));
    MutexLock lock(mutex_);
    ++came_[number];
    for (const auto& each : view.buffers()) {
      const auto* bytes = static_cast<const unsigned char*>(each.buffer.data);
      if (std::any_of(bytes, bytes + each.buffer.bytes,
                      [number](unsigned char byte) { return byte != (number & 0x7f); }))
        wrong_ = "message " + std::to_string(number) + " came with other bytes";
    }
  }

  const std::uint32_t id_;
  base::EventLoop loop_{"node"};
  mutable Mutex mutex_;
  std::map<std::uint64_t, int> came_ STITCH_GUARDED_BY(mutex_);
  std::vector<std::string> lost_ STITCH_GUARDED_BY(mutex_);
  std::string wrong_ STITCH_GUARDED_BY(mutex_);
  std::atomic<int> failed_{0};
  std::atomic<int> passed_on_{0};
  PeerTable table_;
};

Member member_of(std::uint32_t id, std::vector<std::string> addresses) {
  return {{name_of(id), WorkerId(id), 0}, std::move(addresses)};
}

std::unique_ptr<transport::Endpoint> stream_endpoint(std::uint32_t id, bool sealed,
                                                     std::vector<std::string> transports) {
  return transport::make_stream_endpoint(options_of(id, sealed),
                                         {.transports = std::move(transports)});
}

// Both send `count` messages to each other, some large, from two threads each; all arrive once.
void exchange_everything(Node& a, Node& b, std::uint64_t count, std::uint64_t seed) {
  std::vector<std::jthread> threads;
  for (Node* const from : {&a, &b}) {
    for (std::uint64_t half = 0; half < 2; ++half) {
      threads.emplace_back([=, first = &a] {
        std::mt19937_64 random(seed * 4 + half);
        const std::uint32_t to = from == first ? 1 : 0;
        for (std::uint64_t i = half; i < count; i += 2) {
          const std::size_t beside = random() % 8 == 0 ? 1 + random() % (std::size_t{1} << 18) : 0;
          from->send(to, i, beside);
          if (random() % 4 == 0) std::this_thread::sleep_for(100us);
        }
      });
    }
  }
  threads.clear();
  for (Node* const at : {&a, &b}) {
    EXPECT_TRUE(eventually([&] { return at->came().size() == count; }, 60s))
        << at->came().size() << " of " << count << " came; "
        << at->table().condition(at->table().find(WorkerId(at == &a ? 1 : 0)));
  }
  for (Node* const at : {&a, &b}) {
    for (const auto& [number, times] : at->came()) ASSERT_EQ(times, 1) << "message " << number;
    EXPECT_TRUE(eventually([&] { return at->passed_on() == static_cast<int>(count); }));
    EXPECT_EQ(at->failed(), 0);
    EXPECT_EQ(at->wrong(), "");
    EXPECT_TRUE(at->lost().empty()) << at->lost().front();
    EXPECT_TRUE(eventually([&] { return at->number("rpc.kept_messages") == 0; }))
        << at->number("rpc.kept_messages") << " are kept";
    EXPECT_EQ(at->number("rpc.connections"), 1);
  }
}

// Over TCP, cut after random numbers of bytes, `sealed` or not; with `half_open`, one side is not
// told that a connection has ended.
void exchange_over_cut_connections(std::uint64_t seed, bool sealed, bool half_open) {
  Node a(0);
  Node b(1);
  const auto at_a = a.listen(stream_endpoint(0, sealed, {"tcp"}));
  const auto at_b = b.listen(stream_endpoint(1, sealed, {"tcp"}));
  transport::Relay to_a(at_a.front());
  transport::Relay to_b(at_b.front());
  std::mt19937_64 random(seed);
  for (transport::Relay* relay : {&to_a, &to_b}) {
    if (half_open) relay->keep_target_after_cut();
    relay->change_by([cuts = 12, next = 5'000 + random() % 400'000, passed = std::uint64_t{0},
                      own = std::mt19937_64(random())](bool, std::size_t, char&) mutable {
      if (cuts == 0 || ++passed < next) return true;
      --cuts;
      passed = 0;
      next = own() % 4 == 0 ? own() % 2'000 : own() % 1'000'000;
      return false;
    });
  }
  const std::vector<Member> members{member_of(0, {to_a.address()}), member_of(1, {to_b.address()})};
  a.start(members);
  b.start(members);
  exchange_everything(a, b, 1000, seed);
  EXPECT_GT(a.number("rpc.reconnects") + b.number("rpc.reconnects"), 0) << "seed " << seed;
}

TEST(Reconnect, EveryMessageArrivesOnceOverTcpThatIsCutAnywhere) {
  for (std::uint64_t seed = 0; seed < 3; ++seed) exchange_over_cut_connections(seed, false, false);
}

TEST(Reconnect, EveryMessageArrivesOnceOverSealedTcpThatIsCutAnywhere) {
  for (std::uint64_t seed = 3; seed < 6; ++seed) exchange_over_cut_connections(seed, true, false);
}

TEST(Reconnect, AConnectionThatOnlyOneSideHasLostIsReplaced) {
  for (std::uint64_t seed = 6; seed < 9; ++seed) exchange_over_cut_connections(seed, false, true);
}

// Passes everything on; close_all() ends all connections and the listener.
class Breakable final : public transport::Endpoint {
 public:
  explicit Breakable(std::unique_ptr<transport::Endpoint> inner) : inner_(std::move(inner)) {}
  std::vector<std::string> listen(Accept accept) override {
    return inner_->listen(std::move(accept));
  }
  std::shared_ptr<transport::Connection> connect(const std::string& address, transport::Wanted whom,
                                                 transport::ConnectionEvents events) override {
    return inner_->connect(address, whom, std::move(events));
  }
  void close() override { inner_->close(); }
  void join() override { inner_->join(); }

 private:
  const std::unique_ptr<transport::Endpoint> inner_;
};

TEST(Reconnect, TrafficMovesFromSharedMemoryToTcpWhenThatFails) {
  Node a(0);
  Node b(1);
  std::vector<transport::Endpoint*> shared;
  std::array<Node*, 2> nodes{&a, &b};
  std::vector<Member> members;
  for (std::uint32_t id = 0; id < 2; ++id) {
    auto shm = std::make_unique<Breakable>(stream_endpoint(id, false, {"shm"}));
    shared.push_back(shm.get());
    auto addresses = nodes[id]->listen(std::move(shm));
    for (auto& each : nodes[id]->listen(stream_endpoint(id, false, {"tcp"})))
      addresses.push_back(std::move(each));
    members.push_back(member_of(id, std::move(addresses)));
  }
  a.start(members);
  b.start(members);
  std::jthread breaks([&] {
    EXPECT_TRUE(eventually([&] { return b.came().size() > 100; }));
    shared[0]->close();  // as if the memory of one side were gone
  });
  exchange_everything(a, b, 1000, 1);
  EXPECT_EQ(a.number("rpc.reconnects"), 1);
  EXPECT_EQ(b.number("rpc.reconnects"), 1);
}

// How long after the last message from worker 1 worker 0 takes it for lost.
std::chrono::steady_clock::duration time_to_lose(Node& a, const std::function<void()>& cut) {
  const auto begun = std::chrono::steady_clock::now();
  cut();
  EXPECT_TRUE(eventually([&] { return a.lost().size() == 1; }));
  return std::chrono::steady_clock::now() - begun;
}

TEST(Reconnect, APeerWhoseProcessIsGoneIsLostAtOnce) {
  for (const char* transport : {"shm", "tcp"}) {
    Node a(0);
    Node b(1);
    auto endpoint = std::make_unique<Breakable>(stream_endpoint(1, false, {transport}));
    Breakable* const of_b = endpoint.get();
    const std::vector<Member> members{
        member_of(0, a.listen(stream_endpoint(0, false, {transport}))),
        member_of(1, b.listen(std::move(endpoint)))};
    a.start(members);
    b.start(members);
    a.send(1, 1);
    ASSERT_TRUE(eventually([&] { return b.came().size() == 1; }));
    // It says nothing, as if it were killed: its connections end, and nothing listens there.
    EXPECT_LT(time_to_lose(a, [&] { of_b->close(); }), 5s)
        << transport << ": the grace time is 10 s";
    EXPECT_TRUE(contains(a.lost().at(0), "no process listens at its addresses any more"))
        << a.lost().at(0);
    a.send(1, 2);
    EXPECT_EQ(a.failed(), 1);
  }
}

TEST(Reconnect, APeerThatDoesNotComeBackIsLostWhenTheGraceTimeHasPassed) {
  for (const auto grace : {0ms, 500ms}) {
    Node a(0, grace);
    Node b(1, grace);
    auto relay =
        std::make_unique<transport::Relay>(b.listen(stream_endpoint(1, false, {"tcp"})).front());
    std::atomic<bool> cut{false};
    relay->change_by([&](bool, std::size_t, char&) { return !cut.load(); });
    // No worker can connect to the first one, so that the relay alone decides.
    static_cast<void>(a.listen(stream_endpoint(0, false, {"tcp"})));
    const std::vector<Member> members{member_of(0, {"ib:1"}), member_of(1, {relay->address()})};
    a.start(members);
    b.start(members);
    a.send(1, 1);
    ASSERT_TRUE(eventually([&] { return b.came().size() == 1; }));
    const auto took = time_to_lose(a, [&] {
      cut = true;
      a.send(1, 2);
    });
    EXPECT_GE(took, grace);
    if (grace == 0ms) {
      EXPECT_EQ(a.table().failed_tries(), 0u) << "no other connection is tried";
    }
    EXPECT_LT(took, grace + 5s);
    EXPECT_TRUE(eventually([&] { return a.failed() + a.passed_on() == 2; }));
    EXPECT_TRUE(eventually([&] { return b.lost().size() == 1; }));
  }
}

}  // namespace
}  // namespace reconnect_test
