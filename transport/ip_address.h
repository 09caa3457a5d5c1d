#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace stitch::transport {

// A numeric IPv4 or IPv6 address with a port, in the form that socket calls take. A value.
struct IpAddress {
  sockaddr_storage address{};
  socklen_t bytes = 0;

  // "127.0.0.1", "::1". Nothing when `host` is not a numeric address.
  [[nodiscard]] static std::optional<IpAddress> parse(const std::string& host, std::uint16_t port);
  // "127.0.0.1:4711", "[::1]:4711". Nothing when either part is missing or invalid, or the port
  // is 0.
  [[nodiscard]] static std::optional<IpAddress> parse_with_port(std::string_view text);

  // "127.0.0.1:4711", "[::1]:4711".
  [[nodiscard]] std::string text() const;
  [[nodiscard]] std::uint16_t port() const noexcept;
  void set_port(std::uint16_t port) noexcept;

  // Whether only processes of this host can listen there: 127.0.0.0/8 or ::1.
  [[nodiscard]] bool is_loopback() const noexcept;

  // Binds a socket here and closes it again. Throws Error(disconnected) naming `name` when that
  // fails.
  void check_bindable(const std::string& name) const;
};

// Throws Error(invalid_argument) unless `address` is a numeric address.
void check_bind_address(const std::string& address);

}  // namespace stitch::transport
