#include "stitch/rpc/membership/notice.h"

#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/printable.h"

namespace stitch::rpc {

namespace {

// A text of a peer, which is kept, told to others, and may end up on a terminal.
std::string read_text(base::ByteReader& in, std::size_t most) {
  std::string text = in.read_string();
  if (text.size() > most) text.resize(most);
  return base::printable(std::move(text));
}

}  // namespace

void Notice::write(base::Bytes& bytes) const {
  base::ByteWriter out(bytes);
  out.write(step);
  write_info(out, about);
  write_info(out, by);
  out.write_string(text);
  out.write(static_cast<std::uint32_t>(lives.size()));
  for (const KnownLife& life : lives) {
    out.write(life.state);
    out.write_string(life.verdict);
    life.card.write(out);
  }
}

Notice Notice::read(std::span<const std::byte> bytes) {
  constexpr std::size_t kMinLifeBytes = 1 + 4 + 4 + 4 + 8 + 4 + 4;
  constexpr std::size_t kMaxText = 4096;
  base::ByteReader in(bytes, "notice of membership");
  const auto wrong = [](const std::string& what) {
    return Error(ErrorCode::protocol, "notice of membership: " + what);
  };
  Notice notice;
  notice.step = in.read<Step>();
  if (notice.step < Step::suspect || notice.step > Step::list)
    throw wrong("step " + std::to_string(static_cast<int>(notice.step)) + " is unknown");
  notice.about = read_info(in);
  notice.by = read_info(in);
  notice.text = read_text(in, kMaxText);
  const auto count = in.read_count(kMinLifeBytes);
  for (std::uint32_t i = 0; i < count; ++i) {
    KnownLife life;
    life.state = in.read<LifeState>();
    if (life.state > LifeState::left) throw wrong("the state of a life is unknown");
    life.verdict = read_text(in, KnownLife::kMaxVerdict);
    life.card = MemberCard::read(in);
    notice.lives.push_back(std::move(life));
  }
  in.expect_end();
  if (notice.step == Step::member && notice.lives.size() != 1)
    throw wrong("one card was expected, not " + std::to_string(notice.lives.size()));
  return notice;
}

namespace {
const std::string kTaken = std::string(to_string(ErrorCode::already_exists)) + ": ";
}  // namespace

std::string to_refusal_text(const Error& why) {
  return (why.code() == ErrorCode::already_exists ? kTaken : "") + why.what();
}

Error from_refusal_text(const std::string& text) {
  if (text.starts_with(kTaken)) return Error(ErrorCode::already_exists, text.substr(kTaken.size()));
  return Error(ErrorCode::invalid_argument, text);
}

}  // namespace stitch::rpc
