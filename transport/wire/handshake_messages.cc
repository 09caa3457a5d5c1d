#include "stitch/transport/wire/handshake_messages.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "stitch/base/byte_io.h"
#include "stitch/base/printable.h"

namespace stitch::transport {

namespace {

constexpr std::uint32_t kGreetingMagic = 0x49485453;      // "STHI"
constexpr std::uint32_t kIntroductionMagic = 0x44495453;  // "STID"
constexpr std::uint32_t kAcceptanceMagic = 0x4b4f5453;    // "STOK"
constexpr std::uint32_t kRefusalMagic = 0x4f4e5453;       // "STNO", then a code, then text
constexpr std::size_t kMaxRefusalText = kRefusalBytes - 5;

constexpr std::uint16_t kAuthenticatedFlag = 1;
constexpr std::uint16_t kAcceptingFlag = 2;
constexpr std::uint16_t kEncryptionFlag = 4;
constexpr std::uint16_t kAesFlag = 8;
constexpr std::uint16_t kKnownFlags =
    kAuthenticatedFlag | kAcceptingFlag | kEncryptionFlag | kAesFlag;

[[nodiscard]] bool begins_with(std::span<const std::byte> bytes, std::uint32_t magic) noexcept {
  const auto wire = base::to_wire_order(magic);
  return bytes.size() >= sizeof(wire) && std::memcmp(bytes.data(), &wire, sizeof(wire)) == 0;
}

template <std::size_t N>
void read_into(base::ByteReader& reader, std::array<std::byte, N>& to) {
  const auto from = reader.take(N);
  std::copy(from.begin(), from.end(), to.begin());
}

}  // namespace

std::string_view name_of(Role role) noexcept {
  return role == Role::connecting ? "connecting" : "accepting";
}

std::string describe_peer(const Hello& peer) {
  return "peer \"" + base::printable(peer.name) + "\" (id " + std::to_string(peer.id) + ")";
}

base::Bytes encode(const Greeting& greeting) {
  std::uint16_t flags = 0;
  if (greeting.encryption == Encryption::on) flags |= kEncryptionFlag;
  if (greeting.authenticated) flags |= kAuthenticatedFlag;
  if (greeting.role == Role::accepting) flags |= kAcceptingFlag;
  if (greeting.aes) flags |= kAesFlag;
  base::Bytes bytes;
  base::ByteWriter writer(bytes);
  writer.write(kGreetingMagic);
  writer.write(greeting.version);
  writer.write(flags);
  writer.write(greeting.features);
  writer.write_bytes(greeting.nonce);
  writer.write_bytes(greeting.public_key);
  return bytes;
}

Greeting decode_greeting(std::span<const std::byte> bytes) {
  base::ByteReader reader(bytes, "hello");
  if (reader.read<std::uint32_t>() != kGreetingMagic) {
    throw Error(ErrorCode::protocol,
                "hello does not start with \"STHI\": the peer is not a stitch worker");
  }
  Greeting greeting;
  // The fields up to here have the same place in every version, so that another version can be
  // distinguished from another protocol.
  greeting.version = reader.read<std::uint16_t>();
  if (greeting.version != Hello::kVersion) {
    throw Error(ErrorCode::protocol,
                "peer speaks protocol version " + std::to_string(greeting.version) +
                    ", this worker speaks version " + std::to_string(Hello::kVersion));
  }
  const auto flags = reader.read<std::uint16_t>();
  if ((flags & ~kKnownFlags) != 0)
    throw Error(ErrorCode::protocol, "hello has unknown flags " + std::to_string(flags));
  greeting.authenticated = (flags & kAuthenticatedFlag) != 0;
  greeting.role = (flags & kAcceptingFlag) != 0 ? Role::accepting : Role::connecting;
  greeting.encryption = (flags & kEncryptionFlag) != 0 ? Encryption::on : Encryption::off;
  greeting.aes = (flags & kAesFlag) != 0;
  greeting.features = reader.read<std::uint64_t>();
  read_into(reader, greeting.nonce);
  read_into(reader, greeting.public_key);
  reader.expect_end();
  return greeting;
}

void check_greeting(const Greeting& self, const Greeting& peer) {
  if (self.version != peer.version) {
    throw Error(ErrorCode::protocol,
                "peer speaks protocol version " + std::to_string(peer.version) +
                    ", this worker speaks version " + std::to_string(self.version));
  }
  if (self.authenticated != peer.authenticated) {
    throw Error(ErrorCode::unauthenticated, self.authenticated
                                                ? "peer uses no secret, this worker demands one"
                                                : "peer demands a secret, this worker has none");
  }
  if (self.authenticated && self.nonce == peer.nonce)
    throw Error(ErrorCode::unauthenticated, "peer repeats the nonce of this worker back to it");
  if (self.role == peer.role) {
    throw Error(ErrorCode::protocol, "peer says that it is the " + std::string(name_of(peer.role)) +
                                         " side, which this worker is");
  }
  if (self.encryption != peer.encryption) {
    throw Error(ErrorCode::protocol,
                "peer has encryption \"" + std::string(name_of(peer.encryption)) +
                    "\", this worker \"" + std::string(name_of(self.encryption)) + "\"");
  }
}

base::Bytes Introduction::encode(const Hello& self, const Wanted& wanted) {
  if (self.name.size() > kMaxNameBytes) {
    throw Error(ErrorCode::invalid_argument, "worker name of " + std::to_string(self.name.size()) +
                                                 " characters exceeds the limit of " +
                                                 std::to_string(kMaxNameBytes));
  }
  base::Bytes bytes;
  base::ByteWriter writer(bytes);
  writer.write(kIntroductionMagic);
  writer.write(self.id);
  writer.write(self.world);
  writer.write(self.epoch);
  writer.write(wanted.id);
  writer.write(wanted.epoch);
  writer.write(static_cast<std::uint16_t>(self.name.size()));
  writer.write(std::uint16_t{0});
  bytes.append(self.name.data(), self.name.size());
  const std::size_t end = bytes.size();
  bytes.resize(kBytes - kProofBytes);
  std::memset(bytes.data() + end, 0, bytes.size() - end);
  return bytes;
}

Introduction::Decoded Introduction::decode(std::span<const std::byte> bytes) {
  base::ByteReader reader(bytes, "introduction");
  Decoded decoded;
  if (reader.read<std::uint32_t>() != kIntroductionMagic)
    throw Error(ErrorCode::protocol, "peer sent something else where its introduction was due");
  decoded.who.id = reader.read<std::uint32_t>();
  decoded.who.world = reader.read<std::uint64_t>();
  decoded.who.epoch = reader.read<std::uint64_t>();
  const auto& who = decoded.who;
  const bool of_a_store = who.id == Hello::kStoreId || who.id == Hello::kStoreClientId;
  if ((who.id >= Hello::kMaxWorkers && !of_a_store) || who.epoch > Hello::kMaxEpoch) {
    throw Error(ErrorCode::protocol, "introduction has id " + std::to_string(who.id) +
                                         " and epoch " + std::to_string(who.epoch) +
                                         "; ids are below " + std::to_string(Hello::kMaxWorkers) +
                                         ", epochs at most 2^62");
  }
  decoded.wanted.id = reader.read<std::uint32_t>();
  decoded.wanted.epoch = reader.read<std::uint64_t>();
  const auto name_bytes = reader.read<std::uint16_t>();
  if (const auto reserved = reader.read<std::uint16_t>(); reserved != 0) {
    throw Error(ErrorCode::protocol,
                "introduction has " + std::to_string(reserved) + " in its reserved field, not 0");
  }
  if (name_bytes > kMaxNameBytes || bytes.size() != kBytes) {
    throw Error(ErrorCode::protocol, "introduction of " + std::to_string(bytes.size()) +
                                         " bytes with a name of " + std::to_string(name_bytes) +
                                         ", not of " + std::to_string(kBytes) +
                                         " with one of at most " + std::to_string(kMaxNameBytes));
  }
  const auto name = reader.take(name_bytes);
  for (const std::byte filler : reader.take(kMaxNameBytes - name_bytes)) {
    if (filler != std::byte{0})
      throw Error(ErrorCode::protocol, "introduction has something behind its name");
  }
  decoded.who.name.assign(reinterpret_cast<const char*>(name.data()), name.size());
  for (const char c : decoded.who.name) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)
      throw Error(ErrorCode::protocol, "introduction has a control character in its name");
  }
  decoded.proved = bytes.first(bytes.size() - kProofBytes);
  decoded.proof = reader.take(kProofBytes);
  return decoded;
}

bool is_introduction(std::span<const std::byte> bytes) noexcept {
  return begins_with(bytes, kIntroductionMagic);
}

base::Bytes encode_acceptance(const Key& proof) {
  base::Bytes bytes;
  base::ByteWriter writer(bytes);
  writer.write(kAcceptanceMagic);
  writer.write_bytes(proof.span());
  return bytes;
}

std::span<const std::byte> decode_acceptance(std::span<const std::byte> bytes) {
  if (bytes.size() != kAcceptanceBytes || !begins_with(bytes, kAcceptanceMagic))
    throw Error(ErrorCode::protocol, "peer sent something else where its acceptance was due");
  return bytes.subspan(sizeof(kAcceptanceMagic));
}

base::Bytes encode_refusal(const Error& error) {
  base::Bytes bytes;
  base::ByteWriter writer(bytes);
  writer.write(kRefusalMagic);
  writer.write(static_cast<std::uint8_t>(error.code()));
  const std::string_view text = std::string_view(error.what()).substr(0, kMaxRefusalText);
  bytes.append(text.data(), text.size());
  const std::size_t end = bytes.size();
  bytes.resize(kRefusalBytes);
  std::memset(bytes.data() + end, 0, bytes.size() - end);
  return bytes;
}

bool is_refusal(std::span<const std::byte> bytes) noexcept {
  return bytes.size() > sizeof(kRefusalMagic) && begins_with(bytes, kRefusalMagic);
}

Error decode_refusal(std::span<const std::byte> bytes) {
  base::ByteReader reader(bytes.subspan(sizeof(kRefusalMagic)), "refusal");
  auto code = static_cast<ErrorCode>(reader.read<std::uint8_t>());
  if (code != ErrorCode::unauthenticated && code != ErrorCode::shutting_down &&
      code != ErrorCode::overloaded && code != ErrorCode::disconnected)
    code = ErrorCode::protocol;
  const auto said = reader.take(std::min(reader.remaining(), kMaxRefusalText));
  std::string text(reinterpret_cast<const char*>(said.data()), said.size());
  text.resize(std::min(text.size(), text.find('\0')));
  // ASCII only, be char signed or not: bytes from 0x80 on may be control characters, too.
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return Error(code, "connection refused by the peer: " + text).with_remote(true);
}

}  // namespace stitch::transport
