#include "stitch/transport/store/listen_addresses.h"

#include <netdb.h>
#include <netinet/in.h>

#include <cstddef>
#include <cstring>
#include <memory>

#include "stitch/base/error.h"

namespace stitch::transport {

namespace {

// The port has the same place in both families.
static_assert(offsetof(sockaddr_in, sin_port) == offsetof(sockaddr_in6, sin6_port));

bool is_loopback(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET)
    return (ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24) == 127;
  const auto& six = reinterpret_cast<const sockaddr_in6&>(address);
  return IN6_IS_ADDR_LOOPBACK(&six.sin6_addr);
}

sockaddr_storage any_address(int family) {
  sockaddr_storage any{};
  any.ss_family = static_cast<sa_family_t>(family);
  return any;
}

}  // namespace

std::vector<sockaddr_storage> listen_addresses(const std::string& host, const std::string& store) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* found = nullptr;
  const bool literal = ::getaddrinfo(host.c_str(), nullptr, &hints, &found) == 0;
  if (!literal) {
    hints.ai_flags = 0;
    if (const int status = ::getaddrinfo(host.c_str(), nullptr, &hints, &found); status != 0) {
      throw Error(ErrorCode::disconnected, store + " cannot listen: host \"" + host +
                                               "\" cannot be resolved: " + ::gai_strerror(status));
    }
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owned(found, &::freeaddrinfo);
  std::vector<sockaddr_storage> addresses;
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    sockaddr_storage address{};
    std::memcpy(&address, each->ai_addr, each->ai_addrlen);
    if (literal || host == "localhost" || !is_loopback(address)) addresses.push_back(address);
  }
  if (!literal && host != "localhost") {
    addresses.push_back(any_address(AF_INET6));
    addresses.push_back(any_address(AF_INET));
  }
  return addresses;
}

void set_port(sockaddr_storage& address, std::uint16_t port) {
  reinterpret_cast<sockaddr_in&>(address).sin_port = htons(port);
}

std::uint16_t port_of(const sockaddr_storage& address) {
  return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

}  // namespace stitch::transport
