// What agents tell each other beside calls: BIND, the numbers of a session, RECEIVED and SKIP,
// notices of membership; and what the store says of the world that runs.
#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "stitch/rpc/membership/membership_protocol.h"
#include "stitch/rpc/membership/notice.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/peers/bind_frame.h"
#include "stitch/rpc/peers/session.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz::sessions {

using rpc::Bind;
using rpc::KnownLife;
using rpc::LifeState;
using rpc::MemberCard;
using rpc::MembershipProtocol;
using rpc::Notice;
using rpc::Session;
using transport::Message;

enum Decoder : std::uint8_t {
  kBind,        // the body of BIND
  kNumbers,     // headers of frames, at a session that has sent some
  kNotice,      // the body of a frame of membership
  kMembership,  // notices and other events, at a worker of a world of four
  kDecoders
};

static bool run_bind(Bytes bytes) {
  return accepts([&] {
    const Bind bind = Bind::decode(bytes);
    require_printable(bind.reason, "the reason of a BIND");
    const Message again = bind.encode();
    const Message twice = Bind::decode(transport::FrameView(again).body()).encode();
    require(same(twice.frame.span(), again.frame.span()), "a BIND, written again");
  });
}

// Passes on at once, or never.
class Line final : public transport::Connection {
 public:
  explicit Line(bool passes_on) : passes_on_(passes_on) {}
  [[nodiscard]] const transport::Hello& peer() const override { return hello_; }
  void send(Message message, transport::SendDone done) override {
    require(transport::numbers_of(message.frame).has_value(), "a session sent no frame");
    if (passes_on_) return done(std::nullopt);
    held_.push_back(std::move(done));
  }
  void close(const Error&) override {}
  [[nodiscard]] std::string describe() const override { return "line"; }
  void end() {
    for (auto& done : held_) done(Error(ErrorCode::disconnected, "the line is cut"));
    held_.clear();
  }

 private:
  const bool passes_on_;
  transport::Hello hello_;
  std::deque<transport::SendDone> held_;
};

static Message frame_of(std::uint16_t kind, std::size_t bytes) {
  transport::FrameBuilder frame(kind);
  frame.body().resize(frame.body().size() + bytes);
  std::fill_n(frame.body().data() + transport::FrameBuilder::body_offset(), bytes, std::byte{1});
  frame.end_body();
  return std::move(frame).finish();
}

// How many messages the session has sent, over what; then frames: the kind and the three numbers,
// or raw bytes, or another connection.
static bool run_numbers(Choices choices) {
  const unsigned first = choices.byte();
  const unsigned sent = first % 32;
  unsigned told = 0;
  bool refused = false;
  unsigned delivered = 0;
  std::vector<std::shared_ptr<Line>> lines;
  Session session(Session::Events{
      .deadline = [](std::uint64_t) { return std::chrono::steady_clock::time_point::max(); },
      .on_close = [](const Error&) {},
      .on_unconnected = [] {}});
  const auto attach = [&](const Session::Received& received) {
    lines.push_back(std::make_shared<Line>((first & 32) != 0));
    session.attach(lines.back(), lines.size(), received);
  };
  attach({});
  for (unsigned i = 0; i < sent; ++i) {
    session.send(frame_of(rpc::wire::kRequest, i % 5 == 4 ? std::size_t{40} << 10 : 8),
                 [&told](const std::optional<Error>&) { ++told; });
  }
  while (!choices.empty()) {
    const unsigned step = choices.byte();
    try {
      if (step >= 0xf8) {
        const std::uint64_t small = choices.byte();
        attach({small, choices.byte()});
        continue;
      }
      Message message;
      if (step >= 0xf0) {
        message.frame = copy_of(choices.take(choices.byte()));
      } else {
        message = frame_of(static_cast<std::uint16_t>(step % 20), 0);
        base::Bytes numbers(24);
        std::fill_n(numbers.data(), 24, std::byte{0});
        const Bytes given = choices.take(24);
        std::copy(given.begin(), given.end(), numbers.data());
        base::ByteReader in(numbers.span(), "numbers");
        const auto number = in.read<std::uint64_t>();
        const auto small = in.read<std::uint64_t>();
        transport::put_numbers(message.frame, {number, {small, in.read<std::uint64_t>()}});
      }
      const auto before = session.progress();
      const auto arrival = session.receive(message);
      require(arrival != Session::Arrival::deliver || session.progress() >= before,
              "a session goes back");
      if (arrival == Session::Arrival::deliver) ++delivered;
      if (session.received_one()) session.acknowledge_now();
    } catch (const Error& error) {
      require_code(error, {ErrorCode::protocol});
      refused = true;
    }
  }
  const Error over(ErrorCode::disconnected, "the session is over");
  session.end(over, over);
  for (const auto& line : lines) line->end();
  require(told == sent, "the end of a message was not told once");
  return delivered > 0 && !refused;
}

static bool run_notice(Bytes bytes) {
  return accepts([&] {
    const Notice notice = Notice::read(bytes);
    require_printable(notice.text, "the text of a notice");
    require_printable(notice.about.name, "the name that a notice is about");
    require_printable(notice.by.name, "the name of who says a notice");
    for (const KnownLife& life : notice.lives)
      require_printable(life.verdict, "the verdict of a life in a notice");
    base::Bytes again;
    notice.write(again);
    require(again.size() <= bytes.size() && Notice::read(again.span()) == notice,
            "a notice, written again");
  });
}

static MemberCard card_of(std::uint32_t id) {
  return {{"worker" + std::to_string(id), WorkerId(id), 1}, {"tcp://127.0.0.1:1"}, "record"};
}

// Steps of one member: whom they come from, and what.
static bool run_membership(Choices choices) {
  const MembershipProtocol::Time start{};
  auto now = start + std::chrono::hours(1);
  MembershipProtocol member(card_of(1), {});
  std::vector<KnownLife> lives;
  for (const std::uint32_t id : {0U, 2U, 3U}) lives.push_back({card_of(id)});
  member.start(lives);
  bool accepted = !choices.empty();
  std::uint64_t ticket = 0;
  while (!choices.empty() && !member.fenced()) {
    const unsigned step = choices.byte();
    const std::uint32_t peer = std::array{0U, 2U, 3U, 9U}[(step >> 3) & 3];
    WorkerInfo from = card_of(peer).info;
    if ((step & 64) != 0) ++from.epoch;
    MembershipProtocol::Effects effects;
    try {
      switch (step % 8) {
        case 0:
        case 1:
          effects = member.on_notice(from, Notice::read(choices.take(choices.word())), now);
          break;
        case 2:
          effects = member.on_heartbeat(from, rpc::Digests{choices.byte(), choices.byte()}, now);
          break;
        case 3:
          effects = member.on_link_lost(from, Error(ErrorCode::disconnected, "it is cut"), now);
          break;
        case 4:
          effects = member.on_probe(from, (step & 128) != 0, now);
          break;
        case 5: {
          const Notice notice = Notice::read(choices.take(choices.word()));
          if (!notice.lives.empty()) effects = member.admit(++ticket, notice.lives[0].card, now);
          break;
        }
        default: {
          now += std::chrono::milliseconds(10 * (1 + choices.byte()));
          std::vector<MembershipProtocol::Link> links;
          for (const auto& card : member.live_cards()) {
            if (card.info.id != member.self().id)
              links.push_back({card.info.id, card.info.epoch, now});
          }
          effects = member.on_tick(now, links);
          break;
        }
      }
    } catch (const Error& error) {
      require_code(error, {ErrorCode::protocol});
      accepted = false;
    }
    // What it says can be read.
    for (const auto& [to, notice] : effects.send) {
      base::Bytes bytes;
      notice.write(bytes);
      // Throws what ends the fuzzer, if it cannot. Long texts are cut.
      require(Notice::read(bytes.span()).step == notice.step, "a notice that is sent is another");
    }
  }
  static_cast<void>(member.digests());
  for (const KnownLife& life : member.lives()) touch(std::as_bytes(std::span(life.verdict)));
  return accepted;
}

static bool run(Bytes input) {
  Choices choices(input);
  switch (choices.byte() % kDecoders) {
    case kBind:
      return run_bind(choices.rest());
    case kNumbers:
      return run_numbers(choices);
    case kNotice:
      return run_notice(choices.rest());
    default:
      return run_membership(choices);
  }
}

using Writer = base::ByteWriter;

static Notice notice_of(Notice::Step step) {
  Notice notice{step, card_of(2).info, card_of(0).info, "a reason", {}};
  if (step == Notice::Step::member) notice.lives = {{card_of(9)}};
  if (step == Notice::Step::list) {
    notice.lives = {{card_of(0)},
                    {card_of(2), LifeState::dead, "worker 2 was declared dead"},
                    {card_of(3), LifeState::left, ""}};
  }
  return notice;
}

static void add_numbers(Seeds& list) {
  base::Bytes seed;
  Writer out(seed);
  out.write(static_cast<std::uint8_t>(kNumbers));
  out.write(static_cast<std::uint8_t>(32 + 9));
  const auto frame = [&](std::uint16_t kind, std::uint64_t number, std::uint64_t small,
                         std::uint64_t large) {
    out.write(static_cast<std::uint8_t>(kind));
    out.write(number);
    out.write(small);
    out.write(large);
  };
  frame(rpc::wire::kReply, 1, 2, 0);
  frame(rpc::wire::kSkip, 3, 2, 0);
  frame(rpc::wire::kReply, 2, 5, 1);
  frame(rpc::wire::kReply, transport::FrameNumbers::kLarge | 1, 5, 1);
  frame(rpc::wire::kReceived, 0, 8, 1);
  out.write(std::uint8_t{0xf8});
  out.write(std::uint8_t{8});
  out.write(std::uint8_t{1});
  list.push_back({"numbers", std::move(seed)});
}

static void add_notices(Seeds& list) {
  base::Bytes all;
  Writer out(all);
  out.write(static_cast<std::uint8_t>(kMembership));
  for (auto step = Notice::Step::suspect; step <= Notice::Step::list;
       step = static_cast<Notice::Step>(static_cast<int>(step) + 1)) {
    base::Bytes bytes;
    notice_of(step).write(bytes);
    list.push_back(
        {"notice-" + std::to_string(static_cast<int>(step)), seed_for(kNotice, bytes.span())});
    // What follows a verdict about worker 2 comes from others.
    out.write(static_cast<std::uint8_t>(step == Notice::Step::member ? 5 : 0));
    out.write(static_cast<std::uint16_t>(bytes.size()));
    out.write_bytes(bytes.span());
  }
  out.write(std::uint8_t{2});
  out.write(std::uint8_t{7});
  out.write(std::uint8_t{3 + 8});
  out.write(std::uint8_t{6});
  out.write(std::uint8_t{200});
  out.write(std::uint8_t{4 + 8});
  list.push_back({"membership", std::move(all)});
}

static base::Bytes bind_seed(const Bind& bind) {
  const Message message = bind.encode();
  return seed_for(kBind, transport::FrameView(message).body());
}

static Seeds seeds() {
  Seeds list;
  Bind bind;
  bind.step = Bind::Step::confirm;
  bind.generation = 2;
  bind.token = 77;
  bind.received = {5, 6};
  list.push_back({"bind", bind_seed(bind)});
  bind.step = Bind::Step::gone;
  bind.reason = "it shuts down";
  list.push_back({"bind-gone", bind_seed(bind)});
  add_numbers(list);
  add_notices(list);
  return list;
}

}  // namespace stitch::fuzz::sessions

namespace stitch::fuzz {
// A session keeps what it has sent: up to 31 messages of at most 40 KiB.
const Target session{"session", sessions::run, sessions::seeds, 256, std::size_t{4} << 20};
}  // namespace stitch::fuzz
