#include "stitch/transport/store/store_handshake.h"

#include <sodium.h>

#include <algorithm>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/printable.h"
#include "stitch/base/random.h"

namespace stitch::transport {

namespace {

constexpr std::uint32_t kHandshakeMagic = 0x54535453;  // "STST"
constexpr std::uint16_t kServerFlag = 1;
constexpr std::uint16_t kSecretFlag = 2;
constexpr std::uint16_t kAesFlag = 4;
constexpr std::uint16_t kKnownFlags = kServerFlag | kSecretFlag | kAesFlag;

std::array<std::byte, Key::kBytes> hash_of(const std::string& job) {
  base::start_sodium();
  std::array<std::byte, Key::kBytes> hash{};
  crypto_generichash(reinterpret_cast<unsigned char*>(hash.data()), hash.size(),
                     reinterpret_cast<const unsigned char*>(job.data()), job.size(), nullptr, 0);
  return hash;
}

std::optional<KeyAgreement> agreement_for(const std::shared_ptr<const SecretKey>& key) {
  if (key == nullptr) return std::nullopt;
  return std::optional<KeyAgreement>(std::in_place);
}

base::Bytes padded(base::Bytes answer) {
  const std::size_t size = answer.size();
  answer.resize(StoreHandshake::kAnswerBytes);
  std::fill(answer.data() + size, answer.data() + answer.size(), std::byte{0});
  return answer;
}

void expect_zeros(base::ByteReader& reader) {
  for (const std::byte byte : reader.take(reader.remaining())) {
    if (byte != std::byte{0})
      throw Error(ErrorCode::protocol, "answer of a tcp store has something behind its end");
  }
}

}  // namespace

StoreHandshake::StoreHandshake(Role role, const std::string& job,
                               std::shared_ptr<const SecretKey> key)
    : role_(role),
      job_(job),
      key_(std::move(key)),
      agreement_(agreement_for(key_)),
      aes_(key_ != nullptr && has_aes_instructions()) {
  const base::Bytes own = hello();
  std::copy_n(own.data(), kHelloBytes,
              transcript_.begin() + (role_ == Role::server ? kHelloBytes : 0));
}

base::Bytes StoreHandshake::hello() const {
  base::Bytes bytes;
  base::ByteWriter writer(bytes);
  writer.write(kHandshakeMagic);
  writer.write(kVersion);
  const int flags = (role_ == Role::server ? kServerFlag : 0) |
                    (authenticated() ? kSecretFlag : 0) | (aes_ ? kAesFlag : 0);
  writer.write(static_cast<std::uint16_t>(flags));
  writer.write_bytes(hash_of(job_));
  writer.write_bytes(agreement_ ? agreement_->public_key().span() : Key().span());
  return bytes;
}

void StoreHandshake::take_hello(std::span<const std::byte> bytes) {
  base::ByteReader reader(bytes, "hello of a tcp store's connection");
  if (reader.read<std::uint32_t>() != kHandshakeMagic)
    throw Error(ErrorCode::protocol, "it and this client do not speak the protocol of tcp stores");
  if (const auto version = reader.read<std::uint16_t>(); version != kVersion) {
    const bool client = role_ == Role::client;
    throw Error(ErrorCode::protocol,
                "it speaks version " + std::to_string(client ? version : kVersion) +
                    ", this client version " + std::to_string(client ? kVersion : version));
  }
  const auto flags = reader.read<std::uint16_t>();
  if ((flags & ~kKnownFlags) != 0)
    throw Error(ErrorCode::protocol, "a hello has unknown flags " + std::to_string(flags));
  if (((flags & kServerFlag) != 0) == (role_ == Role::server)) {
    throw Error(ErrorCode::protocol, role_ == Role::server ? "it talks to clients of stores only"
                                                           : "it is a client itself");
  }
  const auto job = reader.take(Key::kBytes);
  const auto ours = hash_of(job_);
  if (!std::equal(job.begin(), job.end(), ours.begin())) {
    // With a secret the name is not disclosed, as the peer is not authenticated yet.
    constexpr std::size_t kShown = 256;
    if (role_ == Role::client) throw Error(ErrorCode::protocol, "it answers for another job");
    throw Error(ErrorCode::protocol, authenticated()
                                         ? std::string("it serves another job")
                                         : "it serves job \"" + job_.substr(0, kShown) + '"');
  }
  const bool secret = (flags & kSecretFlag) != 0;
  if (secret != authenticated()) {
    throw Error(ErrorCode::unauthenticated, secret == (role_ == Role::server)
                                                ? "it has no secret and this client demands one"
                                                : "it demands a secret and this client has none");
  }
  const auto public_key = reader.take(Key::kBytes);
  reader.expect_end();
  std::copy(bytes.begin(), bytes.end(),
            transcript_.begin() + (role_ == Role::server ? 0 : kHelloBytes));
  if (!agreement_) return;
  shared_ = agreement_->shared_with(public_key);
  if (aes_ && (flags & kAesFlag) != 0) cipher_ = Cipher::aes256_gcm;
}

Key StoreHandshake::proof_of(Role role) const {
  return key_->hash(role == Role::server ? "stitch store proof of the server"
                                         : "stitch store proof of the client",
                    {transcript_, shared_.span()});
}

base::Bytes StoreHandshake::proof() const {
  const Key proof = proof_of(role_);
  base::Bytes bytes;
  bytes.append(proof.data(), Key::kBytes);
  return bytes;
}

void StoreHandshake::take_proof(std::span<const std::byte> bytes) const {
  if (!proof_of(role_ == Role::server ? Role::client : Role::server).equals(bytes))
    throw Error(ErrorCode::unauthenticated, "the secrets differ");
}

SessionKeys StoreHandshake::keys() const {
  return derive_session_keys(*key_, "stitch store", transcript_, shared_.span(), Encryption::on,
                             cipher_);
}

std::unique_ptr<Sealer> StoreHandshake::make_sealer() const {
  const SessionKeys both = keys();
  return std::make_unique<Sealer>(
      both.encryption, both.cipher,
      role_ == Role::client ? both.from_connecting : both.from_accepting);
}

std::unique_ptr<Opener> StoreHandshake::make_opener() const {
  const SessionKeys both = keys();
  return std::make_unique<Opener>(
      both.encryption, both.cipher,
      role_ == Role::client ? both.from_accepting : both.from_connecting);
}

base::Bytes encode_answer(std::span<const std::byte> content) {
  base::Bytes bytes;
  base::ByteWriter writer(bytes);
  writer.write(std::uint8_t{0});
  writer.write_bytes(content);
  return padded(std::move(bytes));
}

base::Bytes encode_refusal(ErrorCode code, const std::string& text) {
  constexpr std::size_t kMaxText =
      StoreHandshake::kAnswerBytes - sizeof(std::uint8_t) - sizeof(std::uint32_t);
  base::Bytes bytes;
  base::ByteWriter writer(bytes);
  writer.write(static_cast<std::uint8_t>(code));
  writer.write_string(std::string_view(text).substr(0, kMaxText));
  return padded(std::move(bytes));
}

std::span<const std::byte> decode_answer(std::span<const std::byte> answer, std::size_t expected) {
  base::ByteReader reader(answer, "answer of a tcp store");
  const auto status = reader.read<std::uint8_t>();
  if (status == 0) {
    const auto content = reader.take(expected);
    expect_zeros(reader);
    return content;
  }
  const std::string text = base::printable(reader.read_string());
  expect_zeros(reader);
  auto code = static_cast<ErrorCode>(status);
  if (code != ErrorCode::unauthenticated && code != ErrorCode::overloaded)
    code = ErrorCode::protocol;
  throw Error(code, text);
}

}  // namespace stitch::transport
