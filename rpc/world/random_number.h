#pragma once

#include <cstdint>

namespace stitch::rpc {

// From the system's cryptographic source. Any thread. Throws Error(internal) when there is none.
[[nodiscard]] std::uint64_t random_number();

}  // namespace stitch::rpc
