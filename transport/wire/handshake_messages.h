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

// The messages with which a connection between workers opens; WIRE.md has them byte by byte.
namespace stitch::transport {

// Which end of a connection somebody is: the one that connected, or the one that listened.
enum class Role : std::uint8_t { connecting, accepting };
[[nodiscard]] std::string_view name_of(Role role) noexcept;

// The first thing each side says. It is said to anybody, so it tells nothing about who says it.
struct Greeting {
  std::uint16_t version = Hello::kVersion;
  Role role = Role::connecting;
  bool authenticated = false;               // proves, and demands proof of, the secret
  Encryption encryption = Encryption::off;  // of what follows the handshake over a network
  bool aes = false;                         // has AES instructions
  std::uint64_t features = 0;               // as Hello::features
  std::array<std::byte, 32> nonce{};        // fresh on every connection
  std::array<std::byte, 32> public_key{};   // of the X25519 agreement; 0 without a secret

  static constexpr std::size_t kBytes = 80;
};
[[nodiscard]] base::Bytes encode(const Greeting& greeting);
// Throws Error(protocol): not ours, a version we do not speak (naming both), or malformed.
[[nodiscard]] Greeting decode_greeting(std::span<const std::byte> bytes);
// Whether the two fit: opposite roles, the same encryption (else `protocol`), the same use of a
// secret, and a nonce that is not our own (else `unauthenticated`). The texts may go to a stranger.
void check_greeting(const Greeting& self, const Greeting& peer);

// Who a side is, and, with a secret, the proof that it knows it: 32 bytes, 0 without one. Said by
// the connecting side first. As long for every name.
struct Introduction {
  static constexpr std::size_t kProofBytes = Key::kBytes;
  static constexpr std::size_t kMaxNameBytes = 440;
  static constexpr std::size_t kBytes = 28 + kMaxNameBytes + kProofBytes;

  // Throws Error(invalid_argument) for a name that is too long.
  [[nodiscard]] static base::Bytes encode(
      const Hello& self);  // without the proof, which is appended
  struct Decoded {
    Hello who;
    std::span<const std::byte> proved;  // what the proof is about
    std::span<const std::byte> proof;
  };
  // Throws Error(protocol) when the bytes are none. Views the bytes.
  [[nodiscard]] static Decoded decode(std::span<const std::byte> bytes);
};
[[nodiscard]] bool is_introduction(std::span<const std::byte> bytes) noexcept;

// "I let you in": ends the handshake.
inline constexpr std::size_t kAcceptanceBytes = 4;
[[nodiscard]] base::Bytes encode_acceptance();
[[nodiscard]] bool is_acceptance(std::span<const std::byte> bytes) noexcept;

// Why a side does not let the other one in; as long for every text.
inline constexpr std::size_t kRefusalBytes = 5 + 400;
[[nodiscard]] base::Bytes encode_refusal(const Error& error);
[[nodiscard]] bool is_refusal(std::span<const std::byte> bytes) noexcept;
// The peer may have proved nothing: only known codes and printable text are kept. REQUIRES:
// is_refusal().
[[nodiscard]] Error decode_refusal(std::span<const std::byte> bytes);

// Each message has one size, so a size that was changed on its way is noticed at once, instead of
// making the reader wait for what never comes.
[[nodiscard]] constexpr bool is_handshake_size(std::size_t bytes) noexcept {
  return bytes == Greeting::kBytes || bytes == Introduction::kBytes || bytes == kAcceptanceBytes ||
         bytes == kRefusalBytes;
}

// "peer "name" (id 3)".
[[nodiscard]] std::string describe_peer(const Hello& peer);

}  // namespace stitch::transport
