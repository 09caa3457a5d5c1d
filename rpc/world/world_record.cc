#include "stitch/rpc/world/world_record.h"

#include <algorithm>
#include <set>
#include <span>

#include "stitch/base/error.h"
#include "stitch/base/printable.h"
#include "stitch/transport/store/store.h"
#include "stitch/transport/wire/hello.h"

namespace stitch::rpc {

namespace {

constexpr char kMark[] = {'s', 't', 'i', 't', 'c', 'h'};
constexpr std::size_t kStringBytes = 4;  // at least
constexpr std::size_t kMaxText = 4096;

std::string text_of(const base::Bytes& bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

std::vector<std::string> read_strings(base::ByteReader& in) {
  std::vector<std::string> strings;
  const auto count = in.read_count(kStringBytes);
  for (std::uint32_t i = 0; i < count; ++i) strings.push_back(in.read_string());
  return strings;
}

void write_strings(base::ByteWriter& out, const std::vector<std::string>& strings) {
  out.write(static_cast<std::uint32_t>(strings.size()));
  for (const auto& each : strings) out.write_string(each);
}

// A text that may end up on a terminal.
std::string read_text(base::ByteReader& in) {
  std::string text = in.read_string();
  if (text.size() > kMaxText) text.resize(kMaxText);
  return base::printable(std::move(text));
}

}  // namespace

void write_mark(base::ByteWriter& out) {
  for (const char each : kMark) out.write(static_cast<std::uint8_t>(each));
  out.write(transport::Hello::kVersion);
}

void read_mark(base::ByteReader& in, const std::string& what) {
  for (const char each : kMark) {
    if (in.read<std::uint8_t>() != static_cast<std::uint8_t>(each))
      throw Error(ErrorCode::protocol, what + " is not of a worker of stitch");
  }
  const auto version = in.read<std::uint16_t>();
  if (version == transport::Hello::kVersion) return;
  throw Error(ErrorCode::protocol, what + " is of version " + std::to_string(version) +
                                       " of stitch's protocols; this worker has version " +
                                       std::to_string(transport::Hello::kVersion) +
                                       ": all workers of a world need the same");
}

std::string MemberClaim::encode() const {
  base::Bytes bytes;
  base::ByteWriter out(bytes);
  write_mark(out);
  out.write_string(record.encode());
  write_strings(out, addresses);
  return text_of(bytes);
}

MemberClaim MemberClaim::decode(const std::string& text) {
  base::ByteReader in(std::as_bytes(std::span(text)), "claim of a worker");
  read_mark(in, "the claim of another worker");
  MemberClaim claim;
  claim.record = MemberRecord::decode(in.read_string());
  claim.addresses = read_strings(in);
  in.expect_end();
  return claim;
}

const MemberCard* WorldRecord::find(const std::string& token) const {
  for (const auto& life : lives) {
    if (life.state == LifeState::alive && MemberRecord::token_of(life.card.record) == token)
      return &life.card;
  }
  return nullptr;
}

std::optional<Error> WorldRecord::failure_of(const std::string& token) const {
  if (std::ranges::find(failed_for, token) == failed_for.end()) return std::nullopt;
  return from_refusal_text(failure);
}

std::string WorldRecord::encode() const {
  const auto encoded = [this](bool verdicts) {
    base::Bytes bytes;
    base::ByteWriter out(bytes);
    write_mark(out);
    out.write(number);
    out.write_string(failure);
    write_strings(out, failed_for);
    out.write(static_cast<std::uint32_t>(lives.size()));
    for (const auto& life : lives) {
      const bool alive = life.state == LifeState::alive;
      out.write(life.state);
      out.write_string(verdicts ? life.verdict : std::string());
      (alive ? life.card : MemberCard{life.card.info, {}, {}}).write(out);
    }
    return text_of(bytes);
  };
  std::string text = encoded(true);
  if (text.size() > transport::Store::kMaxValueBytes) text = encoded(false);
  static_cast<void>(decode(text));
  return text;
}

WorldRecord WorldRecord::decode(const std::string& text) {
  constexpr std::size_t kLifeBytes = 29;  // at least
  base::ByteReader in(std::as_bytes(std::span(text)), "record of a world");
  read_mark(in, "the record of a world");
  WorldRecord record;
  record.number = in.read<std::uint64_t>();
  record.failure = read_text(in);
  record.failed_for = read_strings(in);
  const auto count = in.read_count(kLifeBytes);
  std::set<std::string> names;
  std::set<WorkerId> ids;
  for (std::uint32_t i = 0; i < count; ++i) {
    KnownLife life;
    life.state = in.read<LifeState>();
    if (life.state > LifeState::left)
      throw Error(ErrorCode::protocol, "record of a world has an unknown state of a life");
    life.verdict = read_text(in);
    life.card = MemberCard::read(in);
    const bool new_name = names.insert(life.card.info.name).second;
    if (!ids.insert(life.card.info.id).second || !new_name)
      throw Error(ErrorCode::protocol,
                  "record of a world has " + to_string(life.card.info) + " twice");
    record.lives.push_back(std::move(life));
  }
  in.expect_end();
  return record;
}

}  // namespace stitch::rpc
