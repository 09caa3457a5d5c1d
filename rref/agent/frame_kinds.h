#pragma once

#include <cstdint>

// Frame and section kinds of this layer: 0x100 to 0x10f.
namespace stitch::rref::wire {

inline constexpr std::uint16_t kLedgerFrame = 0x100;       // operations on references
inline constexpr std::uint16_t kCarriedSection = 0x100;    // the references in this message
inline constexpr std::uint16_t kCreateSection = 0x102;     // keep this request's result under an id
inline constexpr std::uint16_t kTargetSection = 0x103;     // the carried object a request is about
inline constexpr std::uint16_t kArgumentsSection = 0x104;  // arguments that references stand for

}  // namespace stitch::rref::wire

namespace stitch::rref {

// What a request with a target section wants of the target, the object it is about.
enum class TargetUse : std::uint8_t {
  call = 1,   // a method of it is called
  fetch = 2,  // a copy of it is sent back
  await = 3,  // the answer is sent when it has been created
};

}  // namespace stitch::rref
