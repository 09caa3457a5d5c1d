#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "stitch/transport/bytes.h"

namespace stitch::transport {

// The first thing each side says on a new connection: protocol version, feature bits, who it is.
struct Hello {
  std::uint16_t version = kVersion;
  std::uint64_t features = 0;  // bits of optional abilities; both sides use only what both have
  std::uint64_t world = 0;     // which group of workers; connections across groups are refused
  std::uint32_t id = 0;        // worker id
  std::uint64_t epoch = 0;     // which life of that worker
  std::string name;            // worker name
  std::array<std::byte, 32>
      nonce{};  // fresh on every connection; what the other side must prove the secret over
  bool authenticated = false;  // this side will prove, and demands proof of, the shared secret

  static constexpr std::uint16_t kVersion = 2;
  static constexpr std::size_t kMaxBytes = 512;
};

[[nodiscard]] Bytes encode(const Hello& hello);
// Throws Error(protocol): not ours, a version we do not speak (naming both), or malformed.
[[nodiscard]] Hello decode_hello(std::span<const std::byte> bytes);
// Checks a peer's hello against ours: same world (else `protocol`), same use of a secret (else
// `unauthenticated`).
void check_peer(const Hello& self, const Hello& peer);

// The proof that its sender knows `secret`, bound to both hellos and to the direction: a keyed hash
// (libsodium crypto_generichash) over "prover hello || verifier hello". 32 bytes.
[[nodiscard]] Bytes make_proof(const std::string& secret, const Hello& prover,
                               const Hello& verifier);
// Constant-time. Throws Error(unauthenticated) naming the peer.
void check_proof(std::span<const std::byte> proof, const std::string& secret, const Hello& prover,
                 const Hello& verifier);

}  // namespace stitch::transport
