#pragma once

#include <cstddef>
#include <cstdint>

namespace stitch::rpc {

// Frame kinds and section kinds of this layer; the layers above take theirs from kFirstUpper* on.
namespace wire {
enum FrameKind : std::uint16_t {
  kRequest = 1,      // CallHeader, arguments
  kReply = 2,        // call id, result
  kErrorReply = 3,   // call id, error
  kCancel = 4,       // call id
  kLeave = 5,        // graceful shutdown
  kBind = 6,         // which connection the two workers use (PeerTable)
  kHeartbeat = 7,    // digests of what the sender knows of the members (PeerTable)
  kMembership = 8,   // a Notice (rpc/membership/)
  kReceived = 9,     // empty: up to which numbers everything has arrived (Session)
  kSkip = 10,        // empty: the message of this number will not come (Session)
  kAskRoom = 16,     // how many one-way requests there were: when they are handled is to be told
  kGiveRoom = 17,    // how many one-way requests, and their bytes, have been handled
  kTransfer = 0x20,  // a frame of transfers between devices (transport/gpu/PROTOCOL.md)
  kFirstUpperFrame = 0x100,
};
// Whether frames of this kind are part of what the program does: graceful shutdown waits for them.
// A message waits for its transfers.
[[nodiscard]] constexpr bool is_work(std::uint16_t kind) noexcept {
  return kind != kLeave && kind != kMembership && kind != kTransfer;
}
// A frame of membership may be so long where max_frame_bytes is less, too: it may have all lives of
// a world (rpc/membership/PROTOCOL.md), and a worker that cannot take it in would not know them.
inline constexpr std::size_t kMaxMembershipBytes = std::size_t{16} << 20;
[[nodiscard]] constexpr std::size_t max_frame_bytes(std::uint16_t kind,
                                                    std::size_t option) noexcept {
  return kind == kMembership && option < kMaxMembershipBytes ? kMaxMembershipBytes : option;
}
enum SectionKind : std::uint16_t {
  kTensors = 1,  // descriptors of the tensors of the message
  kDevices =
      2,  // of the tensors that are not on the CPU of both ends: where they are there and here
  kTransfers = 3,  // of the tensors whose bytes come by transfers between devices
  kFirstUpperSection = 0x100,
};
}  // namespace wire

}  // namespace stitch::rpc
