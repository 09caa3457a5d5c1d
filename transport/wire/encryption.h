#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace stitch::transport {

// How what travels over a network is protected, once both sides have proved the secret.
enum class Encryption : std::uint8_t {
  off = 0,        // not at all
  integrity = 1,  // readable, but nothing can be changed, repeated, left out or put in
  on = 2,         // not readable either
};
[[nodiscard]] std::string_view name_of(Encryption encryption) noexcept;
// Nothing for a name that is none of "off", "integrity", "on".
[[nodiscard]] std::optional<Encryption> encryption_named(std::string_view name) noexcept;

}  // namespace stitch::transport
