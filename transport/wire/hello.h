#pragma once

#include <cstdint>
#include <string>

namespace stitch::transport {

// The identity of one end of a connection, and what the two ends have agreed on. The handshake
// exchanges and authenticates it (handshake_messages.h).
struct Hello {
  static constexpr std::uint16_t kVersion = 8;
  // Workers have ids below this one. A store that is served over an endpoint listens as kStoreId,
  // epoch 1, name "store", world 0; each of its clients connects as kStoreClientId.
  static constexpr std::uint32_t kMaxWorkers = 65'536;
  static constexpr std::uint32_t kStoreId = 0xFFFF'FFFE;
  static constexpr std::uint32_t kStoreClientId = 0xFFFF'FFFD;
  static constexpr std::uint64_t kMaxEpoch = std::uint64_t{1} << 62;

  std::uint16_t version = kVersion;
  std::uint64_t features = 0;  // bits of optional features; only those of both sides are used
  std::uint64_t world = 0;     // the group of workers; connections across groups are refused
  std::uint32_t id = 0;        // worker id
  std::uint64_t epoch = 0;     // differs for each start of that worker
  std::string name;            // worker name
  bool authenticated = false;  // both sides have proved that they know the secret
};

// Whom a connection is wanted to.
struct Wanted {
  std::uint32_t id = 0;
  std::uint64_t epoch = 0;  // 0: any life of it
  [[nodiscard]] bool is(const Hello& who) const noexcept {
    return id == who.id && (epoch == 0 || epoch == who.epoch);
  }
};

}  // namespace stitch::transport
