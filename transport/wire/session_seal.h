#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "stitch/transport/wire/encryption.h"
#include "stitch/transport/wire/secret_key.h"

namespace stitch::transport {

// Both sides use the first one where both processors have AES instructions.
enum class Cipher : std::uint8_t { aes256_gcm, chacha20_poly1305 };
// Whether this processor has what libsodium's AES-256-GCM needs.
[[nodiscard]] bool has_aes_instructions();

// The two keys of a session, one for each direction.
struct SessionKeys {
  Encryption encryption = Encryption::on;
  Cipher cipher = Cipher::chacha20_poly1305;
  Key from_connecting;
  Key from_accepting;
};

// Keys from the secret and everything that the two sides have said, so that sides which have not
// heard the same words have different keys. `label` tells the protocol; `shared` is the X25519
// secret of the session, empty where there is none.
[[nodiscard]] SessionKeys derive_session_keys(const SecretKey& secret, std::string_view label,
                                              std::span<const std::byte> transcript,
                                              std::span<const std::byte> shared,
                                              Encryption encryption, Cipher cipher);

// One side's part of an X25519 agreement, which makes sessions stay secret when the shared secret
// gets known later.
class KeyAgreement {
 public:
  KeyAgreement();  // takes a fresh pair
  ~KeyAgreement();
  KeyAgreement(const KeyAgreement&) = delete;
  KeyAgreement& operator=(const KeyAgreement&) = delete;
  // What the other side is to be told.
  [[nodiscard]] const Key& public_key() const noexcept { return public_; }
  // What both sides have in common. Throws Error(unauthenticated) for a public key that no honest
  // side has, or one of another size.
  [[nodiscard]] Key shared_with(std::span<const std::byte> peer_public_key) const;

 private:
  Key private_;
  Key public_;
};

// A sealed record: a header of 12 bytes, as many bytes as it says, and a tag of 16.
//
//   u32 size, little-endian; SipHash-2-4 of {number of the record, size}; bytes; tag
//
// The tag is that of an AEAD over the bytes, with the number of the record as nonce: records count
// from 0 in each direction and carry no number, so one that was repeated, left out or moved does
// not open. `on`: the bytes are encrypted; `integrity`: they are the additional data of an empty
// text. The header's own tag is there so that a changed size is noticed at once, instead of making
// the reader wait for bytes that never come. After each kRecordsPerKey records a direction goes on
// with a new key, made from the old one, which is forgotten.
struct SealedRecord {
  static constexpr std::size_t kHeaderBytes = 12;
  static constexpr std::size_t kTagBytes = 16;
  static constexpr std::size_t kOverhead = kHeaderBytes + kTagBytes;
  static constexpr std::uint64_t kRecordsPerKey = std::uint64_t{1} << 20;
};

// What Sealer and Opener have in common: the keys of one direction and the number of its next
// record. Not thread-safe.
class RecordCipher {
 public:
  RecordCipher(Encryption encryption, Cipher cipher, const Key& key);
  ~RecordCipher();
  RecordCipher(const RecordCipher&) = delete;
  RecordCipher& operator=(const RecordCipher&) = delete;
  // How many records have been sealed or opened.
  [[nodiscard]] std::uint64_t records() const noexcept { return number_; }

 protected:
  struct State;
  void header_tag(std::uint32_t wire_size, std::byte* at) const;
  void next_record();

  const Encryption encryption_;
  const Cipher cipher_;
  Key key_;
  std::uint64_t number_ = 0;
  std::unique_ptr<State> state_;

 private:
  // Strong guarantee: when it throws, the key before it is still in use.
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
  // How many bytes the record has that begins with these kHeaderBytes. Throws
  // Error(unauthenticated) when the header is not the next one of the peer's; nothing can be opened
  // then.
  [[nodiscard]] std::size_t open_header(const std::byte* header) const;
  // Opens the next record: `sealed` has what follows the header, bytes + kTagBytes. Writes `bytes`
  // bytes to `plain`, which may be `sealed`, else it does not overlap. Throws
  // Error(unauthenticated) when it is not what the peer sealed; nothing of it is in `plain` then.
  void open(const std::byte* sealed, std::size_t bytes, std::byte* plain);
};

}  // namespace stitch::transport
