#pragma once

#include <cstddef>
#include <cstdint>

namespace stitch::base {

// A 64-bit mixer with full avalanche: the finalizer of MurmurHash3.
[[nodiscard]] constexpr std::uint64_t mix_bits(std::uint64_t x) noexcept {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdU;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53U;
  return x ^ (x >> 33);
}

// A hash of several integers, of which each and their order count. For tables within a process: its
// value may change between versions.
template <class... Fields>
[[nodiscard]] constexpr std::size_t hash_of(Fields... fields) noexcept {
  std::uint64_t hash = 0;
  ((hash = mix_bits(hash + static_cast<std::uint64_t>(fields))), ...);
  return static_cast<std::size_t>(hash);
}

}  // namespace stitch::base
