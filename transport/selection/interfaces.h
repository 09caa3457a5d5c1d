#pragma once

#include <string>
#include <vector>

namespace stitch::transport {

struct Interface {
  std::string name;     // "eth0"
  std::string address;  // "192.168.1.7" or an IPv6 address without scope
  bool up = true;
  bool loopback = false;
};

// The up and down interfaces of this host. Any thread.
[[nodiscard]] std::vector<Interface> list_interfaces();

// The address to listen on. `wanted`: interface name prefixes as in NCCL_SOCKET_IFNAME ("eth,ib",
// "=eth0" exact, "^docker" excludes), or empty. With `loopback_world` it is 127.0.0.1 unless
// `wanted` selects another; without it never a loopback or link-local address. Throws
// Error(invalid_argument) listing every interface tried and why it was rejected.
[[nodiscard]] std::string choose_address(const std::vector<Interface>& interfaces,
                                         const std::string& wanted, bool loopback_world);

// The value of STITCH_SOCKET_IFNAME, else NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, TP_SOCKET_IFNAME,
// and which of them it is of; both are empty when none is set.
struct WantedInterfaces {
  std::string names;
  std::string variable;
};
[[nodiscard]] WantedInterfaces wanted_interfaces_from_environment();

}  // namespace stitch::transport
