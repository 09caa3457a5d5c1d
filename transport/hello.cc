#include "stitch/transport/hello.h"

#include <sodium.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "stitch/transport/byte_io.h"
#include "stitch/transport/error.h"

namespace stitch::transport {

namespace {

constexpr std::size_t kFixedBytes = 72;       // everything but the name
constexpr std::uint32_t kMagic = 0x49485453;  // "STHI"
constexpr std::uint16_t kAuthenticatedFlag = 1;
constexpr std::size_t kProofBytes = crypto_generichash_BYTES;
static_assert(kProofBytes == 32);

void start_sodium() {
  static const int started = sodium_init();
  if (started < 0) throw Error(ErrorCode::internal, "libsodium could not be initialised");
}

[[nodiscard]] const unsigned char* raw(const std::byte* at) {
  return reinterpret_cast<const unsigned char*>(at);
}

[[nodiscard]] std::string name_peer(const Hello& hello) {
  return "peer \"" + hello.name + "\" (id " + std::to_string(hello.id) + ")";
}

}  // namespace

Bytes encode(const Hello& hello) {
  if (kFixedBytes + hello.name.size() > Hello::kMaxBytes) {
    throw Error(ErrorCode::invalid_argument, "worker name of " + std::to_string(hello.name.size()) +
                                                 " characters exceeds the limit of " +
                                                 std::to_string(Hello::kMaxBytes - kFixedBytes));
  }
  Bytes bytes;
  ByteWriter writer(bytes);
  writer.write(kMagic);
  writer.write(hello.version);
  writer.write(hello.authenticated ? kAuthenticatedFlag : std::uint16_t{0});
  writer.write(hello.features);
  writer.write(hello.world);
  writer.write(hello.epoch);
  writer.write(hello.id);
  writer.write(static_cast<std::uint16_t>(hello.name.size()));
  writer.write(std::uint16_t{0});
  writer.write_bytes(hello.nonce);
  bytes.append(hello.name.data(), hello.name.size());
  return bytes;
}

Hello decode_hello(std::span<const std::byte> bytes) {
  if (bytes.size() > Hello::kMaxBytes) {
    throw Error(ErrorCode::protocol, "hello of " + std::to_string(bytes.size()) +
                                         " bytes exceeds the limit of " +
                                         std::to_string(Hello::kMaxBytes) + " bytes");
  }
  ByteReader reader(bytes, "hello");
  if (reader.read<std::uint32_t>() != kMagic)
    throw Error(ErrorCode::protocol,
                "hello does not start with \"STHI\": the peer is not a stitch worker");
  Hello hello;
  // The fields up to here have the same place in every version, so that strangers can be told apart
  // from other versions.
  hello.version = reader.read<std::uint16_t>();
  if (hello.version != Hello::kVersion) {
    throw Error(ErrorCode::protocol,
                "peer speaks protocol version " + std::to_string(hello.version) +
                    ", this worker speaks version " + std::to_string(Hello::kVersion));
  }
  const auto flags = reader.read<std::uint16_t>();
  if ((flags & ~kAuthenticatedFlag) != 0)
    throw Error(ErrorCode::protocol, "hello has unknown flags " + std::to_string(flags));
  hello.authenticated = (flags & kAuthenticatedFlag) != 0;
  hello.features = reader.read<std::uint64_t>();
  hello.world = reader.read<std::uint64_t>();
  hello.epoch = reader.read<std::uint64_t>();
  hello.id = reader.read<std::uint32_t>();
  const auto name_bytes = reader.read<std::uint16_t>();
  if (const auto reserved = reader.read<std::uint16_t>(); reserved != 0) {
    throw Error(ErrorCode::protocol,
                "hello has " + std::to_string(reserved) + " in its reserved field, not 0");
  }
  const auto nonce = reader.take(hello.nonce.size());
  std::copy(nonce.begin(), nonce.end(), hello.nonce.begin());
  if (name_bytes != reader.remaining()) {
    throw Error(ErrorCode::protocol, "hello announces a name of " + std::to_string(name_bytes) +
                                         " bytes, " + std::to_string(reader.remaining()) +
                                         " arrived");
  }
  const auto name = reader.take(name_bytes);
  hello.name.assign(reinterpret_cast<const char*>(name.data()), name.size());
  for (char& c : hello.name) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)
      throw Error(ErrorCode::protocol, "hello has a control character in its name");
  }
  return hello;
}

void check_peer(const Hello& self, const Hello& peer) {
  if (self.version != peer.version) {
    throw Error(ErrorCode::protocol,
                name_peer(peer) + " speaks protocol version " + std::to_string(peer.version) +
                    ", this worker speaks version " + std::to_string(self.version));
  }
  if (self.world != peer.world) {
    throw Error(ErrorCode::protocol, name_peer(peer) + " belongs to world " +
                                         std::to_string(peer.world) + ", worker \"" + self.name +
                                         "\" to world " + std::to_string(self.world));
  }
  if (self.authenticated != peer.authenticated) {
    throw Error(ErrorCode::unauthenticated,
                self.authenticated
                    ? name_peer(peer) + " uses no secret, worker \"" + self.name + "\" demands one"
                    : name_peer(peer) + " demands a secret, worker \"" + self.name + "\" has none");
  }
  // A mirror would answer our challenge with our own proof.
  if (self.authenticated && self.nonce == peer.nonce) {
    throw Error(ErrorCode::unauthenticated,
                name_peer(peer) + " repeats the nonce of worker \"" + self.name + "\" back to it");
  }
}

Bytes make_proof(const std::string& secret, const Hello& prover, const Hello& verifier) {
  start_sodium();
  unsigned char key[crypto_generichash_KEYBYTES];
  crypto_generichash(key, sizeof(key), reinterpret_cast<const unsigned char*>(secret.data()),
                     secret.size(), nullptr, 0);
  // Each hello says how long its name is, so that no two pairs of hellos give the same bytes.
  const Bytes first = encode(prover);
  const Bytes second = encode(verifier);
  Bytes proof(kProofBytes);
  crypto_generichash_state state;
  crypto_generichash_init(&state, key, sizeof(key), kProofBytes);
  crypto_generichash_update(&state, raw(first.data()), first.size());
  crypto_generichash_update(&state, raw(second.data()), second.size());
  crypto_generichash_final(&state, reinterpret_cast<unsigned char*>(proof.data()), kProofBytes);
  sodium_memzero(key, sizeof(key));
  sodium_memzero(&state, sizeof(state));
  return proof;
}

void check_proof(std::span<const std::byte> proof, const std::string& secret, const Hello& prover,
                 const Hello& verifier) {
  const Bytes expected = make_proof(secret, prover, verifier);
  if (proof.size() != expected.size() ||
      sodium_memcmp(proof.data(), expected.data(), expected.size()) != 0) {
    throw Error(
        ErrorCode::unauthenticated,
        name_peer(prover) + " does not know the secret of worker \"" + verifier.name + "\"");
  }
}

}  // namespace stitch::transport
