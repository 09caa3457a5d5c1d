#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "stitch/base/error.h"

namespace stitch::transport {

// Checks the size of something that a peer sends. Throws Error(protocol) when it exceeds the limit:
// "frame of 1001 bytes exceeds the limit of 1000 bytes", with " from <peer>" unless `peer` is
// empty. Any thread.
inline void check_size(std::string_view what, std::uint64_t bytes, std::uint64_t limit,
                       std::string_view peer = {}) {
  if (bytes <= limit) return;
  std::string text = std::string(what) + " of " + std::to_string(bytes) +
                     " bytes exceeds the limit of " + std::to_string(limit) + " bytes";
  if (!peer.empty()) text += " from " + std::string(peer);
  throw Error(ErrorCode::protocol, std::move(text));
}

}  // namespace stitch::transport
