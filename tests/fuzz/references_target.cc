// What peers say about references: ledgers and sections of messages; and what the tables of one
// worker make of it.
#include <memory>
#include <utility>
#include <vector>

#include "stitch/rref/agent/carried_sections.h"
#include "stitch/rref/lifetime/lifetime.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz::references_of_peers {

using rref::CarriedRef;
using rref::CarriedSections;
using rref::Effects;
using rref::Ledger;
using rref::LedgerOp;
using rref::Lifetime;
using rref::RRefId;
using rref::WorkerLife;

enum Decoder : std::uint8_t {
  kLedger,    // a ledger frame
  kSections,  // the sections of a message
  kTables,    // events of one worker's tables, as two peers cause them
  kDecoders
};

constexpr WorkerLife kSelf{0, 1};
constexpr WorkerLife kPeer{1, 1};

static RRefId id_of(std::uint64_t k) { return {kPeer, {2, 1}, k}; }

static bool run_ledger(Bytes frame) {
  return accepts([&] {
    Ledger ledger;
    const auto ops = Ledger::decode(frame);
    for (const LedgerOp& op : ops) ledger.push(op);
    // Settlements of consecutive tokens are merged, and a frame has a limit.
    require(ledger.unsent() <= ops.size(), "a ledger invented operations");
    base::Bytes again;
    if (ledger.unsent() == ops.size() && ops.size() <= Ledger::kMaxOps && ledger.encode(again))
      require(same(again.span(), frame), "a ledger frame, written again");
  });
}

// The sections of what was read, in order.
static std::vector<base::Bytes> encoded(const CarriedSections& carried) {
  std::vector<base::Bytes> list(4);
  list[0] = encode(std::span<const CarriedRef>(carried.refs));
  if (carried.create) list[1] = encode(*carried.create);
  if (carried.target) list[2] = encode(*carried.target);
  list[3] = encode(std::span<const rref::ReferredArgument>(carried.arguments));
  return list;
}

// Which sections there are, then each behind its length.
static bool run_sections(Choices choices) {
  const unsigned there = choices.byte();
  rref::CarriedBytes bytes;
  unsigned bit = 1;
  for (auto* const section : {&bytes.refs, &bytes.create, &bytes.target, &bytes.arguments}) {
    if ((there & bit) != 0) *section = choices.take(choices.word());
    bit *= 2;
  }
  return accepts([&] {
    const CarriedSections carried = CarriedSections::read(bytes);
    const auto once = encoded(carried);
    const auto twice = [&](const rref::CarriedBytes::Section& section, std::size_t at) {
      return section ? rref::CarriedBytes::Section(once[at].span()) : std::nullopt;
    };
    const auto again =
        encoded(CarriedSections::read({twice(bytes.refs, 0), twice(bytes.create, 1),
                                       twice(bytes.target, 2), twice(bytes.arguments, 3)}));
    for (std::size_t at = 0; at < once.size(); ++at)
      require(same(once[at].span(), again[at].span()), "sections about references, written again");
    // All but the flags of references has one form.
    require(!bytes.create || same(once[1].span(), *bytes.create), "a request to create");
    require(!bytes.target || same(once[2].span(), *bytes.target), "a request about an object");
    require(!bytes.arguments || same(once[3].span(), *bytes.arguments), "a list of arguments");
    return bytes.any();
  });
}

static RRefId read_id(Choices& choices) {
  const unsigned lives = choices.byte();
  return {{lives & 3, 1}, {(lives >> 2) & 3, 1}, choices.byte()};
}

// Steps of one worker's tables. What they ask for is performed at once.
class Tables {
 public:
  Tables() {
    static_cast<void>(tables_.add_object(std::make_shared<int>(1)));
    static_cast<void>(tables_.begin_create(kPeer));
  }

  // Whether the peer kept to the protocol.
  bool step(Choices& choices) {
    const unsigned kind = choices.byte();
    const WorkerLife peer{1 + ((kind >> 4) & 1), 1};
    try {
      switch (kind % 8) {
        case 0:
        case 1:
          carry_out(tables_.accept_ledger(peer, choices.take(choices.word())));
          break;
        case 2: {
          const CarriedRef carried{read_id(choices), choices.byte(), true, (kind & 32) != 0,
                                   (kind & 64) != 0};
          carry_out(tables_.receive(carried, peer));
          carry_out(tables_.message_done(carried.id, peer));
          break;
        }
        case 3:
          static_cast<void>(tables_.create(read_id(choices), peer));
          break;
        case 4:
        case 5:
          carry_out(tables_.register_kept());
          break;
        case 6:
          carry_out(tables_.peer_lost(peer, Error(ErrorCode::disconnected, "it is lost")));
          break;
        default:
          carry_out(tables_.member_over(peer, Error(ErrorCode::disconnected, "it is over")));
          break;
      }
    } catch (const Error& error) {
      // A life that is over may not create.
      require_code(error, {ErrorCode::protocol, ErrorCode::disconnected});
      kept_to_it_ = false;
    }
    return kept_to_it_;
  }

  void end() {
    carry_out(tables_.leave(Error(ErrorCode::shutting_down, "it leaves")));
    carry_out(tables_.close());
  }

 private:
  void carry_out(Effects effects) {
    if (effects.broken) {
      require_code(*effects.broken, {ErrorCode::protocol});
      kept_to_it_ = false;
    }
    for (auto& run : effects.run) run();
    effects.destroy.clear();
    for (const WorkerLife& peer : tables_.due()) {
      base::Bytes frame;
      require(tables_.encode_ledger(peer, frame), "nothing is due");
      require(!Ledger::decode(frame.span()).empty(), "a peer cannot read a ledger");
    }
  }

  Lifetime tables_{kSelf};
  bool kept_to_it_ = true;
};

static bool run_tables(Choices choices) {
  Tables tables;
  bool accepted = !choices.empty();
  while (!choices.empty()) accepted &= tables.step(choices);
  tables.end();
  return accepted;
}

static bool run(Bytes input) {
  Choices choices(input);
  switch (choices.byte() % kDecoders) {
    case kLedger:
      return run_ledger(choices.rest());
    case kSections:
      return run_sections(choices);
    default:
      return run_tables(choices);
  }
}

using Writer = base::ByteWriter;

static void put(Writer& out, Bytes bytes) {
  out.write(static_cast<std::uint16_t>(bytes.size()));
  out.write_bytes(bytes);
}

static base::Bytes frame_of(Ledger& ledger) {
  base::Bytes frame;
  require(ledger.encode(frame), "a ledger has nothing to say");
  return frame;
}

static void add_ledgers(Seeds& list) {
  Ledger ops;
  for (std::uint64_t i = 0; i < 5; ++i) ops.push(LedgerOp::make_settle(3 * i));
  ops.push(LedgerOp::make_reg(id_of(7)));
  ops.push(LedgerOp::make_drop(id_of(7)));
  ops.push(LedgerOp::make_unmade(id_of(8)));
  ops.push(LedgerOp::make_gone(id_of(9)));
  ops.push(LedgerOp::make_registered(id_of(10)));
  Ledger lives;
  for (const auto make :
       {&LedgerOp::make_sweep, &LedgerOp::make_clean, &LedgerOp::make_ask, &LedgerOp::make_swept})
    lives.push(make({3, 1}));
  list.push_back({"ledger-objects", seed_for(kLedger, frame_of(ops).span())});
  list.push_back({"ledger-lives", seed_for(kLedger, frame_of(lives).span())});
}

static void add_sections(Seeds& list) {
  CarriedSections carried;
  for (std::uint64_t i = 0; i < 3; ++i)
    carried.refs.push_back({id_of(i), i, i != 1, i == 1, i == 2});
  carried.create = rref::CreateRequest{id_of(9), std::chrono::seconds(5)};
  carried.target = rref::TargetRequest{2, rref::TargetUse::fetch};
  carried.arguments = {{0, 1, 77}, {3, 0, 78}};
  const auto sections = encoded(carried);
  base::Bytes seed;
  Writer out(seed);
  out.write(static_cast<std::uint8_t>(kSections));
  out.write(std::uint8_t{0x0f});
  for (const auto& section : sections) put(out, section.span());
  list.push_back({"sections", std::move(seed)});
  base::Bytes only;
  Writer to(only);
  to.write(static_cast<std::uint8_t>(kSections));
  to.write(std::uint8_t{1});
  put(to, sections[0].span());
  list.push_back({"sections-carried", std::move(only)});
}

// A peer gets a reference to an object here, and lets it go; it lends another one.
static void add_tables(Seeds& list) {
  base::Bytes seed;
  Writer out(seed);
  out.write(static_cast<std::uint8_t>(kTables));
  Ledger ledger;
  const RRefId created{kSelf, kPeer, 0};
  const auto put_id = [&](const RRefId& id) {
    out.write(static_cast<std::uint8_t>(id.owner.id | (id.creator.id << 2)));
    out.write(static_cast<std::uint8_t>(id.k));
  };
  out.write(std::uint8_t{3});
  put_id(created);
  out.write(std::uint8_t{2});
  put_id(RRefId{{2, 1}, {2, 1}, 4});
  out.write(std::uint8_t{9});
  ledger.push(LedgerOp::make_drop(created));
  out.write(std::uint8_t{0});
  put(out, frame_of(ledger).span());
  out.write(std::uint8_t{5});
  out.write(std::uint8_t{4});
  out.write(std::uint8_t{7});
  list.push_back({"tables", std::move(seed)});
}

static Seeds seeds() {
  Seeds list;
  add_ledgers(list);
  add_sections(list);
  add_tables(list);
  return list;
}

}  // namespace stitch::fuzz::references_of_peers

namespace stitch::fuzz {
const Target references{"references", references_of_peers::run, references_of_peers::seeds, 256};
}  // namespace stitch::fuzz
