#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "stitch/base/bytes.h"
#include "stitch/base/error.h"
#include "stitch/transport/wire/hello.h"
#include "stitch/transport/wire/secret_key.h"
#include "stitch/transport/wire/session_seal.h"

// The messages of the handshake that opens a connection between workers; WIRE.md has them byte by
// byte.
namespace stitch::transport {

// The two ends of a connection: the one that connected, and the one that listened.
enum class Role : std::uint8_t { connecting, accepting };
[[nodiscard]] std::string_view name_of(Role role) noexcept;

// The first message of each side. Any peer gets it, so it does not identify the sender.
struct Greeting {
  std::uint16_t version = Hello::kVersion;
  Role role = Role::connecting;
  bool authenticated = false;               // has a secret, and requires it of the peer
  Encryption encryption = Encryption::off;  // of what follows the handshake over a network
  bool aes = false;                         // has AES instructions
  std::uint64_t features = 0;               // as Hello::features
  std::array<std::byte, 32> nonce{};        // fresh on every connection
  std::array<std::byte, 32> public_key{};   // of the X25519 agreement; 0 without a secret

  static constexpr std::size_t kBytes = 80;
};
[[nodiscard]] base::Bytes encode(const Greeting& greeting);
// Throws Error(protocol): another protocol, another version (naming both), or malformed.
[[nodiscard]] Greeting decode_greeting(std::span<const std::byte> bytes);
// Throws unless the two are compatible: opposite roles, the same encryption (else `protocol`), the
// same use of a secret, and a nonce that is not our own (else `unauthenticated`). The texts may be
// sent to an unauthenticated peer.
void check_greeting(const Greeting& self, const Greeting& peer);

// The identity of a side, whom it speaks to and, with a secret, the proof that it knows it: 32
// bytes, 0 without one. The connecting side sends it first. Its size does not depend on the name.
struct Introduction {
  static constexpr std::size_t kProofBytes = Key::kBytes;
  static constexpr std::size_t kMaxNameBytes = 440;
  static constexpr std::size_t kBytes = 40 + kMaxNameBytes + kProofBytes;

  // Without the proof, which is appended. Throws Error(invalid_argument) for a name that is too
  // long.
  [[nodiscard]] static base::Bytes encode(const Hello& self, const Wanted& wanted = {});
  struct Decoded {
    Hello who;
    Wanted wanted;
    std::span<const std::byte> proved;  // what the proof is about
    std::span<const std::byte> proof;
  };
  // Throws Error(protocol) when the bytes are none. Views the bytes.
  [[nodiscard]] static Decoded decode(std::span<const std::byte> bytes);
};
[[nodiscard]] bool is_introduction(std::span<const std::byte> bytes) noexcept;

// The connecting side accepts the other, which ends the handshake: the proof that it has seen all
// of it, 0 without a secret.
inline constexpr std::size_t kAcceptanceBytes = 4 + Key::kBytes;
[[nodiscard]] base::Bytes encode_acceptance(const Key& proof);
// The proof. Throws Error(protocol) when the bytes are no acceptance. Views the bytes.
[[nodiscard]] std::span<const std::byte> decode_acceptance(std::span<const std::byte> bytes);

// The reason for which a side refuses the other. Its size does not depend on the text.
inline constexpr std::size_t kRefusalBytes = 5 + 400;
[[nodiscard]] base::Bytes encode_refusal(const Error& error);
[[nodiscard]] bool is_refusal(std::span<const std::byte> bytes) noexcept;
// The peer may be unauthenticated: only known codes and printable text are kept. REQUIRES:
// is_refusal().
[[nodiscard]] Error decode_refusal(std::span<const std::byte> bytes);

// Each message has a fixed size, so that a size changed in transit is detected immediately, instead
// of making the reader wait for bytes that never come.
[[nodiscard]] constexpr bool is_handshake_size(std::size_t bytes) noexcept {
  return bytes == Greeting::kBytes || bytes == Introduction::kBytes || bytes == kAcceptanceBytes ||
         bytes == kRefusalBytes;
}

// "peer "name" (id 3)".
[[nodiscard]] std::string describe_peer(const Hello& peer);

}  // namespace stitch::transport
