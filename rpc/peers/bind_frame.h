#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "stitch/transport/endpoint.h"

namespace stitch::rpc {

// The body of BIND, by which two workers agree on the connection that they use (PROTOCOL.md,
// section 6).
struct Bind {
  enum class Step : std::uint8_t {
    offer = 1,  // of the accepting side: it would use this connection
    accept,     // of the connecting side: it wants to, and has no other one
    confirm,    // of the accepting side: it is used from now on
    gone,       // the other side is lost to the sender, or has left, or the sender shuts down
  };
  Step step = Step::offer;
  std::uint64_t generation = 0;  // connections used so far, this one included in `confirm`;
                                 // `accept` repeats that of `offer`
  std::uint64_t token = 0;       // accept, confirm: of the session; the first `accept` chooses it
  std::array<std::uint64_t, transport::FrameNumbers::kStreams> received{};  // accept, confirm
  std::string reason{};                                                     // gone

  [[nodiscard]] transport::Message encode() const;
  // Throws Error(protocol).
  [[nodiscard]] static Bind decode(std::span<const std::byte> body);
};

}  // namespace stitch::rpc
