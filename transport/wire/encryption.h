#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace stitch::transport {

// The protection of network traffic, once both sides have proved that they know the secret.
enum class Encryption : std::uint8_t {
  off,  // none
  on,   // encrypted; changed, repeated, dropped or inserted records are detected
};
// "off", "on".
[[nodiscard]] std::string_view name_of(Encryption encryption) noexcept;
// Nothing for another name than these.
[[nodiscard]] std::optional<Encryption> encryption_named(std::string_view name) noexcept;

}  // namespace stitch::transport
