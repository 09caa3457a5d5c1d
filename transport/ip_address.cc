#include "stitch/transport/ip_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstddef>
#include <system_error>

#include "stitch/base/error.h"

namespace stitch::transport {

std::optional<IpAddress> IpAddress::parse(const std::string& host, std::uint16_t port) {
  IpAddress ip;
  auto* v4 = reinterpret_cast<sockaddr_in*>(&ip.address);
  if (inet_pton(AF_INET, host.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    ip.bytes = sizeof(sockaddr_in);
    return ip;
  }
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&ip.address);
  if (inet_pton(AF_INET6, host.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    ip.bytes = sizeof(sockaddr_in6);
    return ip;
  }
  return std::nullopt;
}

std::optional<IpAddress> IpAddress::parse_with_port(std::string_view text) {
  const auto colon = text.rfind(':');
  if (colon == std::string_view::npos) return std::nullopt;
  std::string_view host = text.substr(0, colon);
  const std::string_view digits = text.substr(colon + 1);
  const bool brackets = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (brackets) host = host.substr(1, host.size() - 2);
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (error != std::errc{} || end != digits.data() + digits.size() || port == 0)
    return std::nullopt;
  auto ip = parse(std::string(host), port);
  if (ip && brackets != (ip->address.ss_family == AF_INET6)) return std::nullopt;
  return ip;
}

namespace {
// The port has the same place in both families.
static_assert(offsetof(sockaddr_in, sin_port) == offsetof(sockaddr_in6, sin6_port));
}  // namespace

std::string IpAddress::text() const {
  char host[INET6_ADDRSTRLEN] = {};
  if (address.ss_family == AF_INET6) {
    inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6&>(address).sin6_addr, host,
              sizeof(host));
    return '[' + std::string(host) + "]:" + std::to_string(port());
  }
  inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(address).sin_addr, host, sizeof(host));
  return std::string(host) + ':' + std::to_string(port());
}

std::uint16_t IpAddress::port() const noexcept {
  return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

void IpAddress::set_port(std::uint16_t port) noexcept {
  reinterpret_cast<sockaddr_in&>(address).sin_port = htons(port);
}

void IpAddress::check_bindable(const std::string& name) const {
  const int fd = ::socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  const bool bound = fd >= 0 && ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
                     ::bind(fd, reinterpret_cast<const sockaddr*>(&address), bytes) == 0;
  const int error = errno;
  if (fd >= 0) ::close(fd);
  if (!bound)
    throw Error(ErrorCode::disconnected, "address " + name + " could not be bound: " +
                                             std::system_category().message(error));
}

void check_bind_address(const std::string& address) {
  if (IpAddress::parse(address, 0)) return;
  throw Error(ErrorCode::invalid_argument,
              "bind address \"" + address + "\" is not a numeric IPv4 or IPv6 address");
}

bool IpAddress::is_loopback() const noexcept {
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    return ntohl(v4.sin_addr.s_addr) >> 24 == 127;
  }
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
  return address.ss_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr);
}

}  // namespace stitch::transport
