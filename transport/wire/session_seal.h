#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "stitch/transport/wire/encryption.h"
#include "stitch/transport/wire/secret_key.h"

namespace stitch::transport {

// Both sides use the first one where both processors have AES instructions.
enum class Cipher : std::uint8_t { aes256_gcm, chacha20_poly1305 };
// Whether this processor has the instructions that libsodium's AES-256-GCM needs.
[[nodiscard]] bool has_aes_instructions();

// The two keys of a session, one for each direction.
struct SessionKeys {
  Cipher cipher = Cipher::chacha20_poly1305;
  Key from_connecting;
  Key from_accepting;
};

// Keys from the secret and all handshake messages: sides that have not seen the same messages have
// different keys. `label` is different for each protocol; `shared` is the X25519 secret of the
// session, empty where there is none.
[[nodiscard]] SessionKeys derive_session_keys(const SecretKey& secret, std::string_view label,
                                              std::span<const std::byte> transcript,
                                              std::span<const std::byte> shared, Cipher cipher);

// One side of an X25519 key agreement, which keeps sessions secret when the shared secret becomes
// known later (forward secrecy).
class KeyAgreement {
 public:
  explicit KeyAgreement(const Key& private_key);  // 32 random bytes
  ~KeyAgreement();
  KeyAgreement(const KeyAgreement&) = delete;
  KeyAgreement& operator=(const KeyAgreement&) = delete;
  // To be sent to the other side.
  [[nodiscard]] const Key& public_key() const noexcept { return public_; }
  // The secret that both sides compute. Throws Error(unauthenticated) for a public key that no
  // honest side has (one of low order), or one of another size.
  [[nodiscard]] Key shared_with(std::span<const std::byte> peer_public_key) const;

 private:
  Key private_;
  Key public_;
};

// A sealed record: a header of 12 bytes, the bytes whose size it has, and a tag of 16.
//
//   u32 size, little-endian; SipHash-2-4 of {number of the record, size}; bytes; tag
//
// The bytes are encrypted by an AEAD, with the number of the record as nonce: records count from 0
// in each direction and carry no number, so one that was repeated, dropped or moved does not open.
// The header has a tag of its own so that a changed size is detected immediately, instead of
// making the reader wait for bytes that never come. After each kRecordsPerKey records a direction
// changes to a new key, derived from the old one, which is wiped.
struct SealedRecord {
  static constexpr std::size_t kHeaderBytes = 12;
  static constexpr std::size_t kTagBytes = 16;
  static constexpr std::size_t kOverhead = kHeaderBytes + kTagBytes;
  static constexpr std::uint64_t kRecordsPerKey = std::uint64_t{1} << 20;
};

// The common part of Sealer and Opener: the keys of one direction and the number of its next
// record. Not thread-safe.
class RecordCipher {
 public:
  RecordCipher(Cipher cipher, const Key& key);
  ~RecordCipher();
  RecordCipher(const RecordCipher&) = delete;
  RecordCipher& operator=(const RecordCipher&) = delete;
  // The number of records sealed or opened.
  [[nodiscard]] std::uint64_t records() const noexcept { return number_; }

 protected:
  struct State;
  void header_tag(std::uint32_t wire_size, std::byte* at) const;
  void next_record();

  const Cipher cipher_;
  Key key_;
  std::uint64_t number_ = 0;
  std::unique_ptr<State> state_;

 private:
  // Strong guarantee: when it throws, the previous key is still in use.
  void use_key(const Key& key);
};

class Sealer : public RecordCipher {
 public:
  using RecordCipher::RecordCipher;
  // Writes bytes + SealedRecord::kOverhead bytes to `out`. `plain` may be out + kHeaderBytes, else
  // it does not overlap. REQUIRES: bytes < 2^32.
  void seal(const std::byte* plain, std::size_t bytes, std::byte* out);
};

class Opener : public RecordCipher {
 public:
  using RecordCipher::RecordCipher;
  // The size of the record that begins with these kHeaderBytes. Throws Error(unauthenticated) when
  // the header is not that of the peer's next record; nothing can be opened then.
  [[nodiscard]] std::size_t open_header(const std::byte* header) const;
  // Opens the next record: `sealed` is what follows the header, bytes + kTagBytes. Writes `bytes`
  // bytes to `plain`, which may be `sealed`, else it does not overlap. Throws
  // Error(unauthenticated) when it is not what the peer sealed; `plain` has none of it then.
  void open(const std::byte* sealed, std::size_t bytes, std::byte* plain);
};

}  // namespace stitch::transport
