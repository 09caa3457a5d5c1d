#pragma once

#include <cstdint>
#include <string>

namespace stitch::transport {

// The identity of one end of a connection, and what the two ends have agreed on. The handshake
// exchanges and authenticates it (handshake_messages.h).
struct Hello {
  std::uint16_t version = kVersion;
  std::uint64_t features = 0;  // bits of optional features; only those of both sides are used
  std::uint64_t world = 0;     // the group of workers; connections across groups are refused
  std::uint32_t id = 0;        // worker id
  std::uint64_t epoch = 0;     // differs for each start of that worker
  std::string name;            // worker name
  bool authenticated = false;  // both sides have proved that they know the secret

  static constexpr std::uint16_t kVersion = 7;
};

}  // namespace stitch::transport
