// One file, though long: the world of a simulated history, its steps and its rules stand together.
#include "tests/rpc/session_simulation.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <deque>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "stitch/rpc/agent/session.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/message/time_left.h"
#include "stitch/transport/wire/record.h"

namespace stitch::rpc::test {

namespace {

static_assert(Session::kSmallBytes == transport::kSmallMessageBytes);
static_assert(Session::kSmallBuffers == transport::kSmallMessageBuffers);

constexpr std::uint16_t kText = 0x700;
constexpr auto kNoDeadline = std::chrono::steady_clock::time_point::max();

// What a request says of its time when it is first sent. Calls have no deadline.
constexpr std::int64_t kFirstTime = 7;

// Those that carry an id: the messages that the two sides send each other.
bool is_message(std::uint16_t kind) { return kind == kText || kind == wire::kRequest; }

transport::Message message_of(std::uint64_t id, bool large, bool request) {
  transport::FrameBuilder frame(request ? std::uint16_t{wire::kRequest} : kText);
  const std::array<std::uint64_t, 4> body{id, 0, kFirstTime, 0};
  frame.body().append(body.data(), sizeof(body));
  if (large) frame.body().resize(frame.body().size() + transport::kSmallMessageBytes);
  frame.end_body();
  return std::move(frame).finish();
}

}  // namespace

class SessionSimulation::World {
 public:
  explicit World(std::uint64_t seed) : random_(seed) {
    for (std::size_t side = 0; side < 2; ++side) {
      sides_[side].session = std::make_shared<Session>(Session::Events{
          .deadline =
              [this](std::uint64_t call) {
                return unwanted_.contains(call) ? std::nullopt : std::optional(kNoDeadline);
              },
          .on_close =
              [this](const Error& why) {
                if (why.code() != ErrorCode::unimplemented)
                  fail(std::string("closed: ") + why.what());
                given_up_ = true;
              },
          .on_unconnected = [] {}});
    }
  }

  // What is still kept after a failure is told while there is something to note it.
  ~World() {
    const Error over(ErrorCode::shutting_down, "the history is over");
    for (const Side& side : sides_) side.session->end(over, over);
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  std::string run() {
    const int steps = 20 + below(120);
    for (int i = 0; i < steps && failure_.empty() && !given_up_; ++i) step();
    given_up_ = given_up_ || below(5) == 0;
    for (int i = 0; i < 10'000 && failure_.empty() && !quiet(); ++i) {
      if (given_up_) end_sessions();
      settle();
    }
    if (failure_.empty()) check_end(given_up_);
    return failure_;
  }

  [[nodiscard]] Counts counts() const {
    Counts counts;
    for (const Side& side : sides_) {
      const auto one = side.session->statistics();
      counts.delivered += side.delivered.size();
      counts.reconnects += one.reconnects;
      counts.resent += one.resent;
      counts.duplicates += one.duplicates_dropped;
    }
    return counts;
  }

 private:
  struct Queued {
    transport::Message message;  // a copy, so that reading after its end is found out
    transport::SendDone done;
    bool large;
  };
  // One side of a connection; the two share what is on the way.
  struct Link;
  class Half final : public transport::Connection {
   public:
    Half(World& world, std::size_t side) : world_(world), side_(side) {}
    [[nodiscard]] const transport::Hello& peer() const override { return hello_; }
    void send(transport::Message message, transport::SendDone done) override {
      world_.sent(*this, std::move(message), std::move(done));
    }
    void close(const Error&) override { world_.break_link(); }
    [[nodiscard]] std::string describe() const override { return "simulated"; }

    World& world_;
    const std::size_t side_;
    bool over = false;         // this side has noticed the end
    std::deque<Queued> queue;  // not passed on yet
    std::deque<Queued> wire;   // passed on, not delivered
    transport::Hello hello_;
  };
  struct Sent {
    bool large = false;
    bool refused = false;  // by its connection, or not wanted: it is not to arrive
    int told = 0;
    bool failed = false;
    std::uint64_t call = 0;
    int given = 0;  // to how many connections, before they had ended
  };
  struct Side {
    std::shared_ptr<Session> session;
    std::shared_ptr<Half> half;  // null: it has no connection
    std::vector<Sent> messages;  // by id
    std::set<std::uint64_t> delivered;
    std::array<std::uint64_t, 2> last{};  // id + 1, of small messages and large ones
    std::uint64_t uses = 0;
    // A connection that has been taken into use; the session is yet to be told.
    std::shared_ptr<Half> to_attach;
    Session::Received received_by_peer{};
  };

  int below(int bound) { return static_cast<int>(random_() % static_cast<std::uint64_t>(bound)); }
  void fail(std::string what) {
    if (failure_.empty()) failure_ = std::move(what);
  }

  void step() {
    // A call is given up.
    if (last_call_ > 0 && below(8) == 0) unwanted_.insert(1 + random_() % last_call_);
    const auto side = static_cast<std::size_t>(below(2));
    const int what = below(100);
    if (what < 35) {
      send(side);
    } else if (what < 60) {
      pass_on(side);
    } else if (what < 80) {
      deliver(side);
    } else if (what < 84) {
      sides_[side].session->acknowledge_now();
    } else if (what < 87) {
      break_link();
    } else if (what < 91) {
      notice(side);
    } else if (what < 95) {
      attach(side);
    } else if (what < 97) {
      confirm();
    } else {
      connect(side);
    }
  }

  // What leads to quiescence.
  void settle() {
    settling_ = true;
    for (std::size_t side = 0; side < 2; ++side) {
      if (broken_) notice(side);
      attach(side);
      pass_on(side);
      deliver(side);
      sides_[side].session->acknowledge_now();
    }
    confirm();
    connect(static_cast<std::size_t>(below(2)));
  }

  void send(std::size_t from) {
    Side& side = sides_[from];
    const std::uint64_t id = side.messages.size();
    Sent sent;
    sent.large = below(3) == 0;
    if (below(8) == 0) {
      sent.call = ++last_call_;
      if (below(2) == 0) unwanted_.insert(sent.call);
    }
    side.messages.push_back(sent);
    side.session->send(
        message_of(id, sent.large, sent.call != 0),
        [this, &side, id](const std::optional<Error>& error) {
          Sent& told = side.messages[id];
          if (++told.told > 1) fail("the end of message " + std::to_string(id) + " was told twice");
          told.failed = error.has_value();
          // A callback may send.
          if (!error && below(16) == 0 && !ended_)
            send(static_cast<std::size_t>(&side - sides_.data()));
        },
        sent.call);
  }

  // A message is given to a connection.
  void sent(Half& half, transport::Message message, transport::SendDone done) {
    // Other threads may send at any moment, and go on to the next connection: here, while what is
    // kept is being sent again.
    if (continuing_ && below(4) == 0) {
      continuing_ = false;
      if (!replacing_ && below(4) == 0) {
        replace();
      } else {
        send(half.side_);
      }
      continuing_ = true;
    }
    if (half.over) {
      if (done) done(Error(ErrorCode::disconnected, "the connection has ended"));
      return;
    }
    const auto head = transport::peek_frame(message.frame);
    std::uint64_t id = 0;
    if (is_message(head->kind)) std::memcpy(&id, head->body.data(), sizeof(id));
    if (head->kind == wire::kRequest) check_time(half.side_, id, head->body);
    // What no connection has passed on yet may be refused by itself.
    if (is_message(head->kind) && sides_[half.side_].messages.at(id).told == 0 && below(200) == 0) {
      if (done) done(Error(ErrorCode::unimplemented, "this message is not carried here"));
      return;
    }
    Queued queued;
    queued.message.frame.append(message.frame.data(), message.frame.size());
    queued.large = message.frame.size() > transport::kSmallMessageBytes;
    queued.done = std::move(done);
    half.queue.push_back(std::move(queued));
  }

  // A request that is sent again says whether its call is over by then.
  void check_time(std::size_t from, std::uint64_t id, std::span<const std::byte> body) {
    Sent& sent = sides_[from].messages.at(id);
    if (sent.given++ == 0) return;
    std::int64_t left = 0;
    std::memcpy(&left, body.data() + kTimeLeftOffset, sizeof(left));
    if (left != (unwanted_.contains(sent.call) ? kCallIsOver : 0))
      fail("message " + std::to_string(id) + " was sent again with the time it had");
  }

  // The first small message, or the first large one.
  static std::optional<Queued> take(std::deque<Queued>& from, bool large) {
    const auto found = std::find_if(from.begin(), from.end(),
                                    [large](const Queued& each) { return each.large == large; });
    if (found == from.end()) return std::nullopt;
    Queued taken = std::move(*found);
    from.erase(found);
    return taken;
  }

  void pass_on(std::size_t from) {
    const auto half = sides_[from].half;
    if (!half || half->over) return;
    auto taken = take(half->queue, below(2) == 0);
    if (!taken) return;
    transport::SendDone done = std::move(taken->done);
    // What is written into a connection that has broken does not arrive.
    if (!broken_) half->wire.push_back(std::move(*taken));
    if (done) done(std::nullopt);
  }

  void deliver(std::size_t to) {
    Side& side = sides_[to];
    Side& from = sides_[1 - to];
    // What was on the way when a connection broke arrives or not, until this side notices.
    if (!side.half || side.half->over || !wires_[1 - to]) return;
    auto taken = take(wires_[1 - to]->wire, below(2) == 0);
    if (!taken) return;
    try {
      const auto arrival = side.session->receive(taken->message);
      if (arrival != Session::Arrival::unnumbered) static_cast<void>(side.session->received_one());
      if (arrival != Session::Arrival::unnumbered && below(8) == 0 &&
          side.session->receive(taken->message) != Session::Arrival::drop)
        return fail("a repetition was not dropped");
      if (arrival != Session::Arrival::deliver) return;
    } catch (const Error& error) {
      fail(std::string("refused: ") + error.what());
      return;
    }
    const auto head = transport::peek_frame(taken->message.frame);
    if (!head || !is_message(head->kind)) return fail("something else was delivered");
    std::uint64_t id = 0;
    std::memcpy(&id, head->body.data(), sizeof(id));
    if (!side.delivered.insert(id).second) fail("message " + std::to_string(id) + " came twice");
    const Sent& sent = from.messages.at(id);
    if (sent.failed) fail("message " + std::to_string(id) + " failed, and came");
    if (std::exchange(side.last[sent.large ? 1 : 0], id + 1) > id + 1) fail("out of order");
  }

  void break_link() { broken_ = true; }

  // One side learns that its connection has ended.
  void notice(std::size_t at) {
    Side& side = sides_[at];
    if (!broken_ || !side.half || side.half->over) return;
    const auto half = side.half;
    half->over = true;
    auto queue = std::move(half->queue);
    half->queue.clear();
    for (auto& each : queue) {
      if (each.done) each.done(Error(ErrorCode::disconnected, "the connection has ended"));
    }
    if (below(2) == 0) half->wire.clear();
    side.session->detach(half);
    side.half = nullptr;
  }

  // The side has lost its connection, and the other one accepts a new one from it. That one uses it
  // from now on, and loses the old one before, if it has not noticed; CONFIRM is on the way.
  void connect(std::size_t connecting) {
    const std::size_t accepting = 1 - connecting;
    if (ended_ || sides_[connecting].half || confirming_) return;
    if (sides_[accepting].half) {
      break_link();
      notice(accepting);
    }
    broken_ = false;
    std::array<std::shared_ptr<Half>, 2> halves;
    for (std::size_t i = 0; i < 2; ++i) wires_[i] = halves[i] = std::make_shared<Half>(*this, i);
    confirming_ = halves[connecting];
    confirmed_ = sides_[accepting].session->received();
    use(accepting, halves[accepting], sides_[connecting].session->received());
  }

  // CONFIRM arrives, or never does.
  void confirm() {
    const auto half = std::exchange(confirming_, nullptr);
    if (half && !(broken_ && below(2) == 0)) use(half->side_, half, confirmed_);
  }

  void use(std::size_t at, const std::shared_ptr<Half>& half, const Session::Received& received) {
    Side& side = sides_[at];
    ++side.uses;
    side.half = side.to_attach = half;
    side.received_by_peer = received;
    if (below(4) != 0) attach(at);
  }

  // Another thread tells the session, by then the connection may have ended.
  void attach(std::size_t at) {
    Side& side = sides_[at];
    const auto half = std::exchange(side.to_attach, nullptr);
    if (!half) return;
    const bool outer = std::exchange(continuing_, !settling_);
    side.session->attach(half, side.uses, side.received_by_peer);
    continuing_ = outer;
  }

  void replace() {
    replacing_ = true;
    break_link();
    for (std::size_t side = 0; side < 2; ++side) notice(side);
    confirm();
    for (std::size_t side = 0; side < 2; ++side) notice(side);
    connect(static_cast<std::size_t>(below(2)));
    confirm();
    replacing_ = false;
  }

  void end_sessions() {
    if (std::exchange(ended_, true)) return;
    const Error gone(ErrorCode::disconnected, "the peer is lost");
    for (std::size_t side = 0; side < 2; ++side) {
      const bool noticed = below(2) == 0;
      if (noticed) break_link();
      if (noticed) notice(side);
      sides_[side].session->end(gone, gone);
      // Its connection may still pass on what it has.
      for (int i = below(4); i > 0; --i) pass_on(side);
      for (int i = below(4); i > 0; --i) deliver(1 - side);
    }
    break_link();
    for (std::size_t side = 0; side < 2; ++side) notice(side);
  }

  [[nodiscard]] bool quiet() const {
    if (ended_) return true;
    for (const Side& side : sides_) {
      if (!side.half || !side.half->queue.empty() || !side.half->wire.empty()) return false;
      if (side.session->statistics().kept_messages != 0) return false;
    }
    return !broken_;
  }

  void check_end(bool given_up) {
    for (std::size_t at = 0; at < 2; ++at) {
      const Side& side = sides_[at];
      if (!quiet()) {
        return fail(std::to_string(side.session->statistics().kept_messages) +
                    " messages are still kept");
      }
      for (std::uint64_t id = 0; id < side.messages.size(); ++id) {
        const Sent& sent = side.messages[id];
        const bool came = sides_[1 - at].delivered.contains(id);
        const std::string name = "message " + std::to_string(id);
        if (sent.told != 1) return fail(name + " was told " + std::to_string(sent.told) + " times");
        if (came && sent.failed) return fail(name + " failed, and came");
        if (!given_up && came == sent.failed)
          return fail(name + (came ? " failed, and came" : " is lost"));
      }
    }
  }

  std::mt19937_64 random_;
  std::string failure_;
  std::array<Side, 2> sides_;
  std::array<std::shared_ptr<Half>, 2> wires_;  // of the last connection, by sender
  std::set<std::uint64_t> unwanted_;
  std::uint64_t last_call_ = 0;
  std::shared_ptr<Half> confirming_;  // of the connecting side
  Session::Received confirmed_{};
  bool broken_ = false;
  bool continuing_ = false;
  bool replacing_ = false;
  bool settling_ = false;
  bool given_up_ = false;
  bool ended_ = false;
};

SessionSimulation::SessionSimulation(std::uint64_t seed) : world_(std::make_unique<World>(seed)) {}
SessionSimulation::~SessionSimulation() = default;
std::string SessionSimulation::run() { return world_->run(); }
SessionSimulation::Counts SessionSimulation::counts() const { return world_->counts(); }

}  // namespace stitch::rpc::test
