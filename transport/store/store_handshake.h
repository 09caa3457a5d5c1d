#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "stitch/base/bytes.h"
#include "stitch/base/error.h"
#include "stitch/transport/wire/secret_key.h"
#include "stitch/transport/wire/session_seal.h"

namespace stitch::transport {

// One side of the handshake that opens a connection to a TCP store, without any I/O. The messages,
// in frames of FramedStream:
//
//   client   hello
//   server   answer: its hello
//            with a secret only:
//   client   proof                 (first, so that an attacker gets no proof of the server)
//   server   answer: its proof; everything after it is sealed, in both directions
//
// A hello is {u32 "STST", u16 version, u16 flags, 32 bytes hash of the job, 32 bytes public key}.
// The key is a fresh one of X25519, which serves as challenge, too; zeros without a secret. An
// answer is {u8 0, its content} or {u8 ErrorCode, u32 length, text}, then zeros up to its fixed
// size. Every message has a fixed size: a length changed in transit is detected immediately,
// instead of making the reader wait for bytes that never come.
//
// A proof is a hash keyed with the secret over both hellos and the X25519 secret, under a label for
// each role, so that neither can be used as the other; the keys of the session are derived from the
// same. The proofs cover the role and the flags of both hellos: these cannot be swapped, reflected,
// replayed or downgraded. Owned by its session. Not thread-safe.
class StoreHandshake {
 public:
  static constexpr std::uint16_t kVersion = 2;
  static constexpr std::size_t kHelloBytes = 72;
  static constexpr std::size_t kProofBytes = Key::kBytes;
  static constexpr std::size_t kAnswerBytes = 512;
  enum class Role : std::uint8_t { client, server };

  // `key`: null without a secret.
  StoreHandshake(Role role, const std::string& job, std::shared_ptr<const SecretKey> key);

  [[nodiscard]] base::Bytes hello() const;
  // Throws Error(protocol) for one that is malformed, of another version, role or job, and
  // Error(unauthenticated) when only one side has a secret; texts begin with "it", the server.
  void take_hello(std::span<const std::byte> bytes);
  // Whether proofs follow the hellos.
  [[nodiscard]] bool authenticated() const noexcept { return key_ != nullptr; }

  // REQUIRES for all of these: authenticated(), and the peer's hello was taken.
  [[nodiscard]] base::Bytes proof() const;
  // Throws Error(unauthenticated).
  void take_proof(std::span<const std::byte> bytes) const;
  [[nodiscard]] std::unique_ptr<Sealer> make_sealer() const;
  [[nodiscard]] std::unique_ptr<Opener> make_opener() const;

 private:
  [[nodiscard]] Key proof_of(Role role) const;
  [[nodiscard]] SessionKeys keys() const;

  const Role role_;
  const std::string job_;
  const std::shared_ptr<const SecretKey> key_;
  const std::optional<KeyAgreement> agreement_;  // with a secret
  const bool aes_;
  std::array<std::byte, 2 * kHelloBytes> transcript_{};  // the hello of the client, then the other
  Key shared_;
  Cipher cipher_ = Cipher::chacha20_poly1305;
};

[[nodiscard]] base::Bytes encode_answer(std::span<const std::byte> content);
[[nodiscard]] base::Bytes encode_refusal(ErrorCode code, const std::string& text);
// The first `expected` bytes of an answer's content. Throws the Error of a refusal, with one of the
// codes that it may have, or Error(protocol).
[[nodiscard]] std::span<const std::byte> decode_answer(std::span<const std::byte> answer,
                                                       std::size_t expected);

}  // namespace stitch::transport
