#include "stitch/transport/handshake.h"

#include <sodium.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "stitch/transport/byte_io.h"

namespace stitch::transport {

namespace {

constexpr std::uint32_t kProofMagic = 0x46505453;   // "STPF", then the proof
constexpr std::uint32_t kAcceptMagic = 0x4b4f5453;  // "STOK"
constexpr std::uint32_t kRefusalMagic =
    0x4f4e5453;  // "STNO", then the error code as one byte, then text
constexpr std::size_t kMaxRefusalText = 400;

[[nodiscard]] Bytes make_message(std::uint32_t magic) {
  Bytes message;
  ByteWriter(message).write(magic);
  return message;
}

[[nodiscard]] Bytes make_refusal(const Error& error) {
  Bytes message = make_message(kRefusalMagic);
  ByteWriter(message).write(static_cast<std::uint8_t>(error.code()));
  const std::string_view text = std::string_view(error.what()).substr(0, kMaxRefusalText);
  message.append(text.data(), text.size());
  return message;
}

// What a peer says when it refuses us. The peer has proved nothing yet: only known codes and
// printable text are kept.
[[nodiscard]] Error read_refusal(ByteReader& reader) {
  auto code = static_cast<ErrorCode>(reader.read<std::uint8_t>());
  if (code != ErrorCode::unauthenticated && code != ErrorCode::shutting_down &&
      code != ErrorCode::overloaded)
    code = ErrorCode::protocol;
  const auto bytes = reader.take(std::min(reader.remaining(), kMaxRefusalText));
  std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c < 0x20 || c == 0x7f; }, '?');
  return Error(code, "connection refused by the peer: " + text).with_remote(true);
}

}  // namespace

Handshake::Handshake(Hello self, std::string secret)
    : secret_(std::move(secret)), self_(std::move(self)) {
  static const int started = sodium_init();
  if (started < 0) throw Error(ErrorCode::internal, "libsodium could not be initialised");
  self_.authenticated = !secret_.empty();
  randombytes_buf(self_.nonce.data(), self_.nonce.size());
}

Bytes Handshake::greeting() const { return encode(self_); }

Bytes Handshake::refuse(const Error& error) {
  state_ = State::refused;
  error_ = error;
  return make_refusal(error);
}

void Handshake::take_hello(std::span<const std::byte> message, std::vector<Bytes>& answer) {
  peer_ = decode_hello(message);
  check_peer(self_, peer_);
  if (self_.authenticated) {
    Bytes proof = make_message(kProofMagic);
    const Bytes bytes = make_proof(secret_, self_, peer_);
    proof.append(bytes.data(), bytes.size());
    answer.push_back(std::move(proof));
    state_ = State::proof;
  } else {
    answer.push_back(make_message(kAcceptMagic));
    state_ = State::verdict;
  }
}

std::vector<Bytes> Handshake::receive(std::span<const std::byte> message) {
  std::vector<Bytes> answer;
  try {
    ByteReader reader(message, "handshake message");
    const auto magic = reader.read<std::uint32_t>();
    if (magic == kRefusalMagic) {
      peer_refused_ = true;
      if (state_ != State::refused) error_ = read_refusal(reader);
      state_ = State::refused;
      return answer;
    }
    switch (state_) {
      case State::hello:
        take_hello(message, answer);
        break;
      case State::proof:
        if (magic != kProofMagic)
          throw Error(ErrorCode::unauthenticated,
                      "peer sent something else where the proof of its secret was due");
        check_proof(message.subspan(sizeof(magic)), secret_, peer_, self_);
        answer.push_back(make_message(kAcceptMagic));
        state_ = State::verdict;
        break;
      case State::verdict:
        if (magic != kAcceptMagic || reader.remaining() != 0)
          throw Error(ErrorCode::protocol, "peer sent something else where its verdict was due");
        state_ = State::open;
        break;
      case State::open:
      case State::refused:
        break;
    }
  } catch (...) {
    if (state_ == State::refused) return {};
    answer.clear();
    answer.push_back(refuse(to_error(std::current_exception())));
  }
  return answer;
}

}  // namespace stitch::transport
