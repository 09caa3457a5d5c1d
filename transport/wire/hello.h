#pragma once

#include <cstdint>
#include <string>

namespace stitch::transport {

// Who is at one end of a connection, and what the two ends have agreed on. How it is said, and
// proved, is the handshake's (handshake_messages.h).
struct Hello {
  std::uint16_t version = kVersion;
  std::uint64_t features = 0;  // bits of optional abilities; both sides use only what both have
  std::uint64_t world = 0;     // which group of workers; connections across groups are refused
  std::uint32_t id = 0;        // worker id
  std::uint64_t epoch = 0;     // which life of that worker
  std::string name;            // worker name
  bool authenticated = false;  // this side has proved the shared secret, and demanded proof of it

  static constexpr std::uint16_t kVersion = 2;
};

}  // namespace stitch::transport
