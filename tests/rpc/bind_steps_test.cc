// A peer table and a peer whose side of the connections the test plays step by step.
#include "stitch/transport/stream/stream_endpoint.h"
#include "tests/support/world_test.h"

namespace bind_steps_test {
namespace {

using namespace std::chrono_literals;
using stitch::Error;
using stitch::ErrorCode;
using stitch::WorkerId;
using stitch::WorkerInfo;
using stitch::base::Mutex;
using stitch::base::MutexLock;
using stitch::rpc::Bind;
using stitch::rpc::Member;
using stitch::rpc::PeerTable;
using stitch::testing::eventually;
namespace base = stitch::base;
namespace rpc = stitch::rpc;
namespace transport = stitch::transport;

std::string worker_name(std::uint32_t id) { return "worker" + std::to_string(id); }

std::unique_ptr<transport::Endpoint> tcp_endpoint(std::uint32_t id) {
  transport::EndpointOptions options;
  options.self.id = id;
  options.self.name = worker_name(id);
  return transport::make_stream_endpoint(options, {.transports = {"tcp"}});
}

// One connection of the peer, whose BIND frames the test reads and writes.
class Line : public std::enable_shared_from_this<Line> {
 public:
  [[nodiscard]] transport::ConnectionEvents events() {
    const auto self = shared_from_this();
    return {.on_open =
                [self](const auto& connection) {
                  MutexLock lock(self->mutex_);
                  self->connection_ = connection;
                },
            .on_message =
                [self](const auto&, transport::Message message) {
                  const auto head = transport::peek_frame(message.frame);
                  MutexLock lock(self->mutex_);
                  if (head->kind == rpc::wire::kBind) {
                    self->steps_.push_back(Bind::decode(head->body));
                  } else {
                    ++self->others_;
                  }
                },
            .place = nullptr,
            .on_closed =
                [self](const auto&, const Error&) {
                  MutexLock lock(self->mutex_);
                  self->closed_ = true;
                }};
  }
  [[nodiscard]] bool open() const {
    MutexLock lock(mutex_);
    return connection_ != nullptr;
  }
  [[nodiscard]] bool closed() const {
    MutexLock lock(mutex_);
    return closed_;
  }
  [[nodiscard]] int others() const {
    MutexLock lock(mutex_);
    return others_;
  }
  // The n-th BIND that comes.
  [[nodiscard]] std::optional<Bind> step(std::size_t n) const {
    const auto read = [&]() -> std::optional<Bind> {
      MutexLock lock(mutex_);
      return n < steps_.size() ? std::optional(steps_[n]) : std::nullopt;
    };
    static_cast<void>(eventually([&] { return read().has_value() || closed(); }));
    return read();
  }
  void say(Bind::Step step, std::uint64_t generation, std::uint64_t token = 0,
           const std::string& reason = {}) const {
    Bind bind;
    bind.step = step;
    bind.generation = generation;
    bind.token = token;
    bind.reason = reason;
    send(bind.encode());
  }
  void send(transport::Message message) const {
    std::shared_ptr<transport::Connection> connection;
    {
      MutexLock lock(mutex_);
      connection = connection_;
    }
    connection->send(std::move(message), nullptr);
  }
  void close() const {
    std::shared_ptr<transport::Connection> connection;
    {
      MutexLock lock(mutex_);
      connection = connection_;
    }
    connection->close(Error(ErrorCode::disconnected, "closed by the test"));
  }

 private:
  mutable Mutex mutex_;
  std::shared_ptr<transport::Connection> connection_ STITCH_GUARDED_BY(mutex_);
  std::vector<Bind> steps_ STITCH_GUARDED_BY(mutex_);
  int others_ STITCH_GUARDED_BY(mutex_) = 0;
  bool closed_ STITCH_GUARDED_BY(mutex_) = false;
};
using LinePtr = std::shared_ptr<Line>;

// Worker 0 has a peer table; the test plays worker 1.
class BindSteps : public ::testing::Test {
 protected:
  BindSteps() {
    address_ = table.listen(tcp_endpoint(0)).front();
    const auto peer_address = peer_
                                  ->listen([this] {
                                    auto line = std::make_shared<Line>();
                                    MutexLock lock(mutex_);
                                    accepted_.push_back(line);
                                    return line->events();
                                  })
                                  .front();
    table.start({{{worker_name(0), WorkerId(0), 0}, {address_}},
                 {{worker_name(1), WorkerId(1), 0}, {peer_address}}},
                WorkerId(0),
                {.on_message =
                     [this](const auto&, const WorkerInfo&, transport::Message) {
                       MutexLock lock(mutex_);
                       ++delivered_;
                     },
                 .place = [](const auto&, const auto&, std::size_t) { return transport::Buffer{}; },
                 .on_lost =
                     [this](const WorkerInfo&, const Error& reason) {
                       MutexLock lock(mutex_);
                       lost_.emplace_back(reason.what());
                     },
                 .call_at = [this](auto when, auto task) { loop_.call_at(when, std::move(task)); },
                 .deadline = [](std::uint64_t) { return PeerTable::Clock::time_point::max(); }});
  }
  ~BindSteps() override {
    table.close();
    loop_.close();
    peer_->close();
    peer_->join();
  }

  // A connection that worker 1 opens.
  [[nodiscard]] LinePtr connect() {
    auto line = std::make_shared<Line>();
    kept_.push_back(peer_->connect(address_, line->events()));
    EXPECT_TRUE(eventually([&] { return line->open(); }));
    return line;
  }
  // The n-th connection that worker 0 opens.
  [[nodiscard]] LinePtr accepted(std::size_t n) {
    const auto read = [&]() -> LinePtr {
      MutexLock lock(mutex_);
      return n < accepted_.size() && accepted_[n]->open() ? accepted_[n] : nullptr;
    };
    EXPECT_TRUE(eventually([&] { return read() != nullptr; }));
    return read();
  }
  [[nodiscard]] LinePtr bound(std::uint64_t token) {
    const LinePtr line = connect();
    EXPECT_EQ(line->step(0)->step, Bind::Step::offer);
    line->say(Bind::Step::accept, line->step(0)->generation, token);
    EXPECT_EQ(line->step(1)->step, Bind::Step::confirm);
    return line;
  }
  void send() {
    table.send(table.find(WorkerId(1)), nullptr, frame(),
               [this](const std::optional<Error>& error) {
                 MutexLock lock(mutex_);
                 ends_.push_back(error);
               });
  }
  [[nodiscard]] static transport::Message frame(std::uint64_t number = 0,
                                                std::uint64_t received = 0) {
    transport::FrameBuilder builder(0x700);
    builder.end_body();
    transport::Message message = std::move(builder).finish();
    transport::put_numbers(message.frame, {number, {received, 0}});
    return message;
  }
  [[nodiscard]] std::vector<std::string> lost() const {
    MutexLock lock(mutex_);
    return lost_;
  }
  [[nodiscard]] int delivered() const {
    MutexLock lock(mutex_);
    return delivered_;
  }
  [[nodiscard]] std::vector<std::optional<Error>> ends() const {
    MutexLock lock(mutex_);
    return ends_;
  }
  [[nodiscard]] std::int64_t reconnects() const {
    std::map<std::string, std::int64_t> numbers;
    table.debug_info(numbers);
    return numbers.at("rpc.reconnects");
  }

  PeerTable table{3s};

 private:
  std::unique_ptr<transport::Endpoint> peer_ = tcp_endpoint(1);
  std::string address_;
  base::EventLoop loop_{"bind_steps"};
  std::vector<std::shared_ptr<transport::Connection>> kept_;
  mutable Mutex mutex_;
  std::vector<LinePtr> accepted_ STITCH_GUARDED_BY(mutex_);
  std::vector<std::string> lost_ STITCH_GUARDED_BY(mutex_);
  std::vector<std::optional<Error>> ends_ STITCH_GUARDED_BY(mutex_);
  int delivered_ STITCH_GUARDED_BY(mutex_) = 0;
};

constexpr std::uint64_t kToken = 5;

TEST_F(BindSteps, AnAcceptanceNeedsTheTokenAndThePresentGeneration) {
  const LinePtr first = bound(kToken);
  for (const auto& [generation, token] :
       {std::pair<std::uint64_t, std::uint64_t>{1, 6}, {0, kToken}, {2, kToken}, {1, 0}}) {
    const LinePtr stranger = connect();
    ASSERT_EQ(stranger->step(0)->generation, 1u);
    stranger->say(Bind::Step::accept, generation, token);
    EXPECT_TRUE(eventually([&] { return stranger->closed(); })) << generation << ", " << token;
    EXPECT_FALSE(first->closed());
  }
  first->send(frame(1));
  EXPECT_TRUE(eventually([&] { return delivered() == 1; }));

  const auto before = std::chrono::steady_clock::now();
  const LinePtr second = connect();
  ASSERT_EQ(second->step(0)->generation, 1u);
  second->say(Bind::Step::accept, 1, kToken);
  ASSERT_EQ(second->step(1)->step, Bind::Step::confirm);
  EXPECT_EQ(second->step(1)->generation, 2u);
  EXPECT_EQ(second->step(1)->received[0], 1u);
  EXPECT_TRUE(eventually([&] { return first->closed(); }));
  ASSERT_EQ(table.links().size(), 1u);
  // Its clock ticks every few milliseconds.
  EXPECT_GE(table.links()[0].heard, before - 20ms) << "silence counts from the new connection on";
  EXPECT_TRUE(lost().empty());
}

TEST_F(BindSteps, AConfirmationNeedsTheGenerationThatFollowsTheOffer) {
  send();
  const LinePtr wrong = accepted(0);
  wrong->say(Bind::Step::offer, 0);
  ASSERT_EQ(wrong->step(0)->step, Bind::Step::accept);
  wrong->say(Bind::Step::confirm, ~std::uint64_t{0}, wrong->step(0)->token);
  EXPECT_TRUE(eventually([&] { return wrong->closed(); }));
  const LinePtr absurd = accepted(1);
  absurd->say(Bind::Step::offer, ~std::uint64_t{0} - 1);
  EXPECT_TRUE(eventually([&] { return absurd->closed(); }));
  const LinePtr right = accepted(2);
  right->say(Bind::Step::offer, 3);
  ASSERT_EQ(right->step(0)->step, Bind::Step::accept);
  right->say(Bind::Step::confirm, 4, right->step(0)->token);
  EXPECT_TRUE(eventually([&] { return right->others() == 1; })) << "what has waited";
  EXPECT_TRUE(lost().empty());
}

TEST_F(BindSteps, GoneWhileConnectingLosesThePeer) {
  send();
  accepted(0)->say(Bind::Step::gone, 0, 0, "it has given up");
  EXPECT_TRUE(eventually([&] { return lost().size() == 1; }));
  EXPECT_NE(lost()[0].find("it has given up"), std::string::npos) << lost()[0];
  EXPECT_TRUE(eventually([&] { return ends().size() == 1; }));
  EXPECT_TRUE(ends()[0]);
}

TEST_F(BindSteps, AFalseAcknowledgmentLosesThePeer) {
  const LinePtr line = bound(kToken);
  line->send(frame(1, 1));
  EXPECT_TRUE(eventually([&] { return lost().size() == 1; }));
  EXPECT_NE(lost()[0].find("acknowledges message 1, which it was not sent"), std::string::npos)
      << lost()[0];
  EXPECT_EQ(delivered(), 0);
}

TEST_F(BindSteps, AnOfferOutlivesAnotherConnectionOfThePeer) {
  const LinePtr first = connect();
  ASSERT_EQ(first->step(0)->step, Bind::Step::offer);
  const LinePtr question = connect();  // as one that asks whether worker 0 is there
  const LinePtr silent = connect();
  EXPECT_TRUE(eventually([&] { return question->closed(); })) << "the newer one is the spare";
  first->say(Bind::Step::accept, 0, kToken);
  ASSERT_EQ(first->step(1)->step, Bind::Step::confirm);
  EXPECT_TRUE(eventually([&] { return silent->closed(); }));
  EXPECT_FALSE(first->closed());
}

TEST_F(BindSteps, AnOfferThatIsNotAnsweredMakesRoomForTheSpare) {
  const LinePtr silent = connect();
  ASSERT_EQ(silent->step(0)->step, Bind::Step::offer);
  const LinePtr spare = connect();
  ASSERT_EQ(spare->step(0)->step, Bind::Step::offer) << "after a while";
  EXPECT_TRUE(eventually([&] { return silent->closed(); }));
  spare->say(Bind::Step::accept, 0, kToken);
  EXPECT_EQ(spare->step(1)->step, Bind::Step::confirm);
}

// A connection that is open and dead leaves time for another one.
TEST_F(BindSteps, AnOfferThatIsNotAnsweredDoesNotUseUpTheGraceTime) {
  const LinePtr first = bound(kToken);
  const LinePtr silent = connect();
  ASSERT_EQ(silent->step(0)->step, Bind::Step::offer);
  first->close();
  const LinePtr own = accepted(0);
  own->say(Bind::Step::offer, 1);
  ASSERT_EQ(own->step(0)->step, Bind::Step::accept);
  EXPECT_EQ(own->step(0)->token, kToken);
  own->say(Bind::Step::confirm, 2, kToken);
  EXPECT_TRUE(eventually([&] { return reconnects() == 1; }));
  EXPECT_TRUE(lost().empty());
}

TEST_F(BindSteps, AnAttemptWithoutAnOfferDoesNotUseUpTheGraceTime) {
  const LinePtr first = bound(kToken);
  first->close();
  const LinePtr silent = accepted(0);  // is open; no offer comes
  const LinePtr second = connect();
  EXPECT_TRUE(eventually([&] { return silent->closed(); }));
  ASSERT_EQ(second->step(0)->step, Bind::Step::offer);
  second->say(Bind::Step::accept, 1, kToken);
  EXPECT_TRUE(eventually([&] { return reconnects() == 1; }));
  EXPECT_TRUE(lost().empty());
}

TEST_F(BindSteps, ShutdownWhileAConnectionIsReplacedFailsWhatWaits) {
  const LinePtr first = bound(kToken);
  first->close();
  const LinePtr silent = accepted(0);
  send();
  EXPECT_TRUE(ends().empty());
  const auto begun = std::chrono::steady_clock::now();
  table.close();
  EXPECT_LT(std::chrono::steady_clock::now() - begun, 2s) << "the grace time is 3 s";
  ASSERT_EQ(ends().size(), 1u);
  EXPECT_TRUE(ends()[0]);
  EXPECT_TRUE(lost().empty());
}

}  // namespace
}  // namespace bind_steps_test
