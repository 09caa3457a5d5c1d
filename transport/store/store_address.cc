#include "stitch/transport/store/store_address.h"

#include <netdb.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "stitch/base/errno_text.h"
#include "stitch/base/error.h"

namespace stitch::transport {

namespace {

// A client that looks for the store may have this port itself for a moment.
constexpr std::chrono::milliseconds kPortWait{200};
constexpr std::chrono::milliseconds kPortPause{10};

// Empty when this host does not have that address. Otherwise throws when it cannot be bound.
base::Descriptor listen_if_here(const IpAddress& ip) {
  const auto give_up = std::chrono::steady_clock::now() + kPortWait;
  for (;;) {
    base::Descriptor socket =
        listening_socket(reinterpret_cast<const sockaddr*>(&ip.address), ip.bytes, true);
    if (socket || errno == EADDRNOTAVAIL || errno == EAFNOSUPPORT) return socket;
    const int error = errno;
    if (error != EADDRINUSE || std::chrono::steady_clock::now() >= give_up) {
      throw Error(ErrorCode::disconnected,
                  "address " + ip.text() + " could not be bound: " + base::errno_text(error));
    }
    std::this_thread::sleep_for(kPortPause);
  }
}

}  // namespace

std::string store_name(const std::string& host, std::uint16_t port) {
  const bool v6 = host.find(':') != std::string::npos;
  return "tcp store at " + (v6 ? '[' + host + ']' : host) + ':' + std::to_string(port);
}

std::vector<IpAddress> store_addresses(const std::string& host, std::uint16_t port) {
  if (const auto literal = IpAddress::parse(host, port)) return {*literal};
  if (host == "localhost")
    return {*IpAddress::parse("127.0.0.1", port), *IpAddress::parse("::1", port)};
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int status = ::getaddrinfo(host.c_str(), nullptr, &hints, &found); status != 0) {
    throw Error(ErrorCode::disconnected,
                "host \"" + host + "\" cannot be resolved: " + ::gai_strerror(status));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owned(found, &::freeaddrinfo);
  std::vector<IpAddress> addresses;
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    if (each->ai_family != AF_INET && each->ai_family != AF_INET6) continue;
    IpAddress ip;
    std::memcpy(&ip.address, each->ai_addr, each->ai_addrlen);
    ip.bytes = each->ai_addrlen;
    ip.set_port(port);
    addresses.push_back(ip);
  }
  if (addresses.empty())
    throw Error(ErrorCode::disconnected, "host \"" + host + "\" has no address of the internet");
  return addresses;
}

std::vector<ListeningSocket> listen_for_store(const std::string& host, std::uint16_t port) {
  std::vector<ListeningSocket> sockets;
  const auto listen = [&](IpAddress ip) {
    ip.set_port(port);
    base::Descriptor socket = listen_if_here(ip);
    if (!socket) return;
    ip = bound_address(socket.get());
    port = ip.port();
    sockets.push_back({std::move(socket), "tcp://" + ip.text()});
  };
  const bool chosen = host == "localhost" || IpAddress::parse(host, port);
  for (const IpAddress& ip : store_addresses(host, port)) {
    if (chosen || !ip.is_loopback()) listen(ip);
  }
  if (!sockets.empty()) return sockets;
  if (chosen) throw Error(ErrorCode::disconnected, "this host does not have the address " + host);
  // The name may stand for an address that only other hosts see, or for 127.0.1.1 in /etc/hosts.
  for (const char* any : {"::", "0.0.0.0"}) {
    if (sockets.empty()) listen(*IpAddress::parse(any, port));
  }
  return sockets;
}

}  // namespace stitch::transport
