#include "tests/simulation/session_simulation.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/message/time_left.h"
#include "stitch/rpc/peers/session.h"
#include "stitch/transport/wire/record.h"

namespace stitch::rpc::session_simulation {

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

class World final : public simulation::History {
 public:
  explicit World(std::uint64_t number) : History(number) {
    for (std::size_t side = 0; side < 2; ++side) {
      sides_[side].session = std::make_shared<Session>(Session::Events{
          .deadline =
              [this](std::uint64_t call) {
                return unwanted_.contains(call) ? std::nullopt : std::optional(kNoDeadline);
              },
          .on_close =
              [this](const Error& why) {
                if (why.code() != ErrorCode::unimplemented) fail("closed: ", why.what());
                given_up_ = true;
              },
          .on_unconnected = [] {}});
    }
  }
  // What is still kept after a failure is told while there is something to note it.
  ~World() override {
    const Error over(ErrorCode::shutting_down, "the history is over");
    for (const Side& side : sides_) side.session->end(over, over);
  }

 private:
  void play() override {
    const int steps = 20 + pick(120);
    for (int i = 0; i < steps && !failed() && !given_up_; ++i) act();
    given_up_ = given_up_ || one_in(5);
    run_until_quiet(10'000, [this] {
      if (quiet()) return false;
      if (given_up_) end_sessions();
      settle();
      return true;
    });
    if (!failed()) check_end(given_up_);
    for (const Side& side : sides_) {
      const auto one = side.session->statistics();
      count("delivered", side.delivered.size());
      count("reconnects", one.reconnects);
      count("resent", one.resent);
      count("duplicates", one.duplicates_dropped);
    }
  }

  struct Queued {
    transport::Message message;  // a copy, so that reading after its end is found out
    transport::SendDone done;
    bool large;
  };
  // One side of a connection; the two share what is on the way.
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
    bool over = false;                  // this side has noticed the end
    simulation::Channel<Queued> queue;  // not passed on yet
    simulation::Channel<Queued> wire;   // passed on, not delivered
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

  void act() {
    // A call is given up.
    if (last_call_ > 0 && one_in(8)) unwanted_.insert(1 + pick(last_call_));
    const auto side = pick(std::size_t{2});
    const int what = pick(100);
    if (what < 35) return send(side);
    if (what < 60) return pass_on(side);
    if (what < 80) return deliver(side);
    if (what < 84) return sides_[side].session->acknowledge_now();
    if (what < 87) return break_link();
    if (what < 91) return notice(side);
    if (what < 95) return attach(side);
    if (what < 97) return confirm();
    connect(side);
  }
  // Each of these leads to quiescence.
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
    connect(pick(std::size_t{2}));
  }
  void send(std::size_t from) {
    Side& side = sides_[from];
    const std::uint64_t id = side.messages.size();
    Sent sent;
    sent.large = one_in(3);
    if (one_in(8)) {
      sent.call = ++last_call_;
      if (one_in(2)) unwanted_.insert(sent.call);
    }
    side.messages.push_back(sent);
    note(from, " sends ", sent.large ? "large" : "small", " message ", id);
    side.session->send(
        message_of(id, sent.large, sent.call != 0),
        [this, &side, id](const std::optional<Error>& error) {
          Sent& told = side.messages[id];
          if (++told.told > 1) fail("the end of message ", id, " was told twice");
          told.failed = error.has_value();
          note("message ", id, error ? " fails" : " is sent");
          // A callback may send.
          if (!error && one_in(16) && !ended_)
            send(static_cast<std::size_t>(&side - sides_.data()));
        },
        sent.call);
  }
  // A message is given to a connection.
  void sent(Half& half, transport::Message message, transport::SendDone done) {
    // Other threads may send at any moment, and go on to the next connection: here, while what is
    // kept is being sent again.
    if (continuing_ && one_in(4)) {
      continuing_ = false;
      if (!replacing_ && one_in(4)) {
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
    if (is_message(head->kind) && sides_[half.side_].messages.at(id).told == 0 && one_in(200)) {
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
      fail("message ", id, " was sent again with the time it had");
  }
  // The first small message, or the first large one.
  static std::optional<Queued> take(simulation::Channel<Queued>& from, bool large) {
    return from.take_first([large](const Queued& each) { return each.large == large; });
  }
  void pass_on(std::size_t from) {
    const auto half = sides_[from].half;
    if (!half || half->over) return;
    auto taken = take(half->queue, one_in(2));
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
    auto taken = take(wires_[1 - to]->wire, one_in(2));
    if (!taken) return;
    try {
      const auto arrival = side.session->receive(taken->message);
      if (arrival != Session::Arrival::unnumbered) static_cast<void>(side.session->received_one());
      if (arrival != Session::Arrival::unnumbered && one_in(8) &&
          side.session->receive(taken->message) != Session::Arrival::drop)
        return fail("a repetition was not dropped");
      if (arrival != Session::Arrival::deliver) return;
    } catch (const Error& error) {
      fail("refused: ", error.what());
      return;
    }
    const auto head = transport::peek_frame(taken->message.frame);
    if (!head || !is_message(head->kind)) return fail("something else was delivered");
    std::uint64_t id = 0;
    std::memcpy(&id, head->body.data(), sizeof(id));
    note("message ", id, " comes to ", to);
    if (!side.delivered.insert(id).second) fail("message ", id, " came twice");
    const Sent& sent = from.messages.at(id);
    if (sent.failed) fail("message ", id, " failed, and came");
    if (std::exchange(side.last[sent.large ? 1 : 0], id + 1) > id + 1) fail("out of order");
  }
  void break_link() { broken_ = true; }

  // One side learns that its connection has ended.
  void notice(std::size_t at) {
    Side& side = sides_[at];
    if (!broken_ || !side.half || side.half->over) return;
    const auto half = side.half;
    half->over = true;
    note(at, " notices the end of its connection");
    auto queue = std::move(half->queue);
    half->queue.clear();
    for (auto& each : queue) {
      if (each.done) each.done(Error(ErrorCode::disconnected, "the connection has ended"));
    }
    if (one_in(2)) half->wire.clear();
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
    note(connecting, " connects");
    std::array<std::shared_ptr<Half>, 2> halves;
    for (std::size_t i = 0; i < 2; ++i) wires_[i] = halves[i] = std::make_shared<Half>(*this, i);
    confirming_ = halves[connecting];
    confirmed_ = sides_[accepting].session->received();
    use(accepting, halves[accepting], sides_[connecting].session->received());
  }
  // CONFIRM arrives, or never does.
  void confirm() {
    const auto half = std::exchange(confirming_, nullptr);
    if (half && !(broken_ && one_in(2))) use(half->side_, half, confirmed_);
  }
  void use(std::size_t at, const std::shared_ptr<Half>& half, const Session::Received& received) {
    Side& side = sides_[at];
    ++side.uses;
    side.half = side.to_attach = half;
    side.received_by_peer = received;
    if (pick(4) != 0) attach(at);
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
    connect(pick(std::size_t{2}));
    confirm();
    replacing_ = false;
  }
  void end_sessions() {
    if (std::exchange(ended_, true)) return;
    const Error gone(ErrorCode::disconnected, "the peer is lost");
    for (std::size_t side = 0; side < 2; ++side) {
      const bool noticed = one_in(2);
      if (noticed) break_link();
      if (noticed) notice(side);
      sides_[side].session->end(gone, gone);
      // Its connection may still pass on what it has.
      for (int i = pick(4); i > 0; --i) pass_on(side);
      for (int i = pick(4); i > 0; --i) deliver(1 - side);
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
        return fail(side.session->statistics().kept_messages, " messages are still kept");
      }
      for (std::uint64_t id = 0; id < side.messages.size(); ++id) {
        const Sent& sent = side.messages[id];
        const bool came = sides_[1 - at].delivered.contains(id);
        const std::string name = "message " + std::to_string(id);
        if (sent.told != 1) return fail(name, " was told ", sent.told, " times");
        if (came && sent.failed) return fail(name, " failed, and came");
        if (!given_up && came == sent.failed)
          return fail(name, (came ? " failed, and came" : " is lost"));
      }
    }
  }
  std::array<Side, 2> sides_;
  std::array<std::shared_ptr<Half>, 2> wires_;  // of the last connection, by sender
  std::set<std::uint64_t> unwanted_;
  std::uint64_t last_call_ = 0;
  std::shared_ptr<Half> confirming_;  // of the connecting side
  Session::Received confirmed_{};
  bool broken_ = false, continuing_ = false, replacing_ = false, settling_ = false;
  bool given_up_ = false, ended_ = false;
};

}  // namespace

simulation::Outcome run(std::uint64_t number) { return World(number).run(); }

}  // namespace stitch::rpc::session_simulation
