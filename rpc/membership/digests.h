#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace stitch::rpc {

// What a worker knows of the members, in 16 numbers: of the workers whose id is i modulo 16, number
// i is the sum over their last lives of a hash of id, epoch and whether it is over. Two workers
// whose numbers differ tell each other these lives only.
inline constexpr std::size_t kDigests = 16;
using Digests = std::array<std::uint64_t, kDigests>;

}  // namespace stitch::rpc
