#include "stitch/transport/wire/session_seal.h"

#include <sodium.h>

#include <array>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/error.h"
#include "stitch/base/random.h"
#include "stitch/transport/wire/aes_gcm.h"

namespace stitch::transport {

namespace {

constexpr std::size_t kNonceBytes = 12;
static_assert(kNonceBytes == crypto_aead_aes256gcm_NPUBBYTES);
static_assert(kNonceBytes == crypto_aead_chacha20poly1305_ietf_NPUBBYTES);
static_assert(SealedRecord::kTagBytes == crypto_aead_aes256gcm_ABYTES);
static_assert(SealedRecord::kTagBytes == crypto_aead_chacha20poly1305_ietf_ABYTES);
static_assert(SealedRecord::kHeaderBytes == sizeof(std::uint32_t) + crypto_shorthash_BYTES);
static_assert(Key::kBytes == crypto_aead_aes256gcm_KEYBYTES);
static_assert(Key::kBytes == crypto_aead_chacha20poly1305_ietf_KEYBYTES);
static_assert(Key::kBytes == crypto_kdf_KEYBYTES);
static_assert(Key::kBytes == crypto_scalarmult_BYTES);
static_assert(Key::kBytes == crypto_scalarmult_SCALARBYTES);

// The subkeys that crypto_kdf derives from a direction's key.
enum Subkey : std::uint64_t { kBytesKey = 1, kHeaderKey = 2, kNextKey = 3 };
constexpr char kKdfContext[] = "stitchrc";
static_assert(sizeof(kKdfContext) == crypto_kdf_CONTEXTBYTES + 1);

[[nodiscard]] unsigned char* raw(std::byte* at) { return reinterpret_cast<unsigned char*>(at); }
[[nodiscard]] const unsigned char* raw(const std::byte* at) {
  return reinterpret_cast<const unsigned char*>(at);
}

using Nonce = std::array<unsigned char, kNonceBytes>;
[[nodiscard]] Nonce nonce_of(std::uint64_t number) {
  Nonce nonce{};
  const auto wire = base::to_wire_order(number);
  std::memcpy(nonce.data(), &wire, sizeof(wire));
  return nonce;
}

}  // namespace

std::string_view name_of(Encryption encryption) noexcept {
  return encryption == Encryption::on ? "on" : "off";
}

std::optional<Encryption> encryption_named(std::string_view name) noexcept {
  for (const auto each : {Encryption::off, Encryption::on}) {
    if (name_of(each) == name) return each;
  }
  return std::nullopt;
}

bool has_aes_instructions() {
  base::start_sodium();
  return crypto_aead_aes256gcm_is_available() != 0;
}

SessionKeys derive_session_keys(const SecretKey& secret, std::string_view label,
                                std::span<const std::byte> transcript,
                                std::span<const std::byte> shared, Cipher cipher) {
  const std::string domain = std::string(label) + " session keys";
  const auto kind = std::array{static_cast<std::byte>(cipher)};
  const Key root = secret.hash(domain, {transcript, shared, kind});
  SessionKeys keys{cipher, {}, {}};
  crypto_kdf_derive_from_key(raw(keys.from_connecting.data()), Key::kBytes, 1, "stitchss",
                             raw(root.data()));
  crypto_kdf_derive_from_key(raw(keys.from_accepting.data()), Key::kBytes, 2, "stitchss",
                             raw(root.data()));
  return keys;
}

KeyAgreement::KeyAgreement(const Key& private_key) : private_(private_key) {
  crypto_scalarmult_base(raw(public_.data()), raw(private_.data()));
}

KeyAgreement::~KeyAgreement() = default;

Key KeyAgreement::shared_with(std::span<const std::byte> peer_public_key) const {
  Key shared;
  // A key of low order would make the result predictable; libsodium refuses it.
  if (peer_public_key.size() != Key::kBytes ||
      crypto_scalarmult(raw(shared.data()), raw(private_.data()), raw(peer_public_key.data())) !=
          0) {
    throw Error(ErrorCode::unauthenticated, "peer sent a public key that cannot be used");
  }
  return shared;
}

struct RecordCipher::State {
  std::optional<AesGcm> aes;  // with that cipher
  std::array<unsigned char, Key::kBytes> bytes_key{};
  std::array<unsigned char, crypto_shorthash_KEYBYTES> header_key{};

  ~State() {
    sodium_memzero(bytes_key.data(), bytes_key.size());
    sodium_memzero(header_key.data(), header_key.size());
  }
};

RecordCipher::RecordCipher(Cipher cipher, const Key& key) : cipher_(cipher) {
  base::start_sodium();
  if (cipher == Cipher::aes256_gcm && !has_aes_instructions())
    throw Error(ErrorCode::internal, "this processor has no AES instructions");
  use_key(key);
}

RecordCipher::~RecordCipher() = default;

void RecordCipher::use_key(const Key& key) {
  // The whole new state first: where that fails, the current one stays in use.
  auto next = std::make_unique<State>();
  crypto_kdf_derive_from_key(next->bytes_key.data(), next->bytes_key.size(), kBytesKey, kKdfContext,
                             raw(key.data()));
  crypto_kdf_derive_from_key(next->header_key.data(), next->header_key.size(), kHeaderKey,
                             kKdfContext, raw(key.data()));
  if (cipher_ == Cipher::aes256_gcm) next->aes.emplace(next->bytes_key);
  state_ = std::move(next);
  key_ = key;
}

void RecordCipher::next_record() {
  if (number_ == std::numeric_limits<std::uint64_t>::max())
    throw Error(ErrorCode::internal, "a session has no number left for another record");
  ++number_;  // first, so that the number is not used again if anything below fails
  if (number_ % SealedRecord::kRecordsPerKey != 0) return;
  Key next;
  crypto_kdf_derive_from_key(raw(next.data()), Key::kBytes, kNextKey, kKdfContext,
                             raw(key_.data()));
  use_key(next);
}

void RecordCipher::header_tag(std::uint32_t wire_size, std::byte* at) const {
  std::array<unsigned char, sizeof(number_) + sizeof(wire_size)> text;
  const auto number = base::to_wire_order(number_);
  std::memcpy(text.data(), &number, sizeof(number));
  std::memcpy(text.data() + sizeof(number), &wire_size, sizeof(wire_size));
  crypto_shorthash(raw(at), text.data(), text.size(), state_->header_key.data());
}

void Sealer::seal(const std::byte* plain, std::size_t bytes, std::byte* out) {
  const auto wire_size = base::to_wire_order(static_cast<std::uint32_t>(bytes));
  std::memcpy(out, &wire_size, sizeof(wire_size));
  header_tag(wire_size, out + sizeof(wire_size));
  std::byte* const body = out + SealedRecord::kHeaderBytes;
  const Nonce nonce = nonce_of(number_);
  unsigned char* const tag = raw(body + bytes);
  if (cipher_ == Cipher::aes256_gcm) {
    state_->aes->seal(nonce.data(), raw(plain), bytes, raw(body), tag);
  } else {
    crypto_aead_chacha20poly1305_ietf_encrypt_detached(raw(body), tag, nullptr, raw(plain), bytes,
                                                       nullptr, 0, nullptr, nonce.data(),
                                                       state_->bytes_key.data());
  }
  next_record();
}

std::size_t Opener::open_header(const std::byte* header) const {
  std::uint32_t wire_size = 0;
  std::memcpy(&wire_size, header, sizeof(wire_size));
  std::array<std::byte, crypto_shorthash_BYTES> expected;
  header_tag(wire_size, expected.data());
  if (sodium_memcmp(expected.data(), header + sizeof(wire_size), expected.size()) != 0) {
    throw Error(ErrorCode::unauthenticated,
                "sealed record " + std::to_string(number_) +
                    " does not begin as the peer sealed it: it was changed, repeated or left out");
  }
  return base::to_wire_order(wire_size);
}

void Opener::open(const std::byte* sealed, std::size_t bytes, std::byte* plain) {
  const Nonce nonce = nonce_of(number_);
  const unsigned char* const tag = raw(sealed + bytes);
  const bool good = cipher_ == Cipher::aes256_gcm
                        ? state_->aes->open(nonce.data(), raw(sealed), bytes, raw(plain), tag)
                        : crypto_aead_chacha20poly1305_ietf_decrypt_detached(
                              raw(plain), nullptr, raw(sealed), bytes, tag, nullptr, 0,
                              nonce.data(), state_->bytes_key.data()) == 0;
  if (!good) {
    throw Error(ErrorCode::unauthenticated,
                "sealed record " + std::to_string(number_) + " is not what the peer sealed");
  }
  next_record();
}

}  // namespace stitch::transport
