#include "stitch/transport/selection/interfaces.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string_view>
#include <system_error>
#include <tuple>

#include "stitch/base/error.h"

namespace stitch::transport {

namespace {

// One entry of the list of wanted interfaces.
struct Pattern {
  std::string name;
  bool exact = false;
  bool exclude = false;

  bool matches(const std::string& interface) const {
    return exact ? interface == name : interface.starts_with(name);
  }
};

std::vector<Pattern> parse_patterns(std::string_view wanted) {
  std::vector<Pattern> patterns;
  const bool exclude_all = wanted.starts_with('^');  // as NCCL reads "^docker,lo"
  while (!wanted.empty()) {
    const std::size_t comma = std::min(wanted.find(','), wanted.size());
    std::string_view entry = wanted.substr(0, comma);
    wanted.remove_prefix(std::min(comma + 1, wanted.size()));
    while (entry.starts_with(' ')) entry.remove_prefix(1);
    while (entry.ends_with(' ')) entry.remove_suffix(1);
    Pattern pattern;
    pattern.exclude = exclude_all;
    for (; entry.starts_with('^') || entry.starts_with('='); entry.remove_prefix(1)) {
      (entry[0] == '^' ? pattern.exclude : pattern.exact) = true;
    }
    pattern.name = entry;
    if (!pattern.name.empty()) patterns.push_back(std::move(pattern));
  }
  return patterns;
}

bool is_ipv6(const std::string& address) { return address.find(':') != std::string::npos; }

bool is_link_local(const std::string& address) {
  if (!is_ipv6(address)) return address.starts_with("169.254.");
  in6_addr parsed{};
  return inet_pton(AF_INET6, address.c_str(), &parsed) == 1 && IN6_IS_ADDR_LINKLOCAL(&parsed);
}

// Bridges and virtual interfaces for containers and virtual machines of this host, which other
// hosts can rarely reach.
bool is_virtual(const std::string& name) {
  static constexpr std::array<std::string_view, 8> kPrefixes{"docker", "br-", "veth", "virbr",
                                                             "vmnet",  "cni", "lxc",  "podman"};
  return std::any_of(kPrefixes.begin(), kPrefixes.end(),
                     [&](std::string_view prefix) { return name.starts_with(prefix); });
}

// The rank of `interface` among the wanted ones, 0 when there is no list; nothing when it is not
// wanted.
std::optional<std::size_t> place(const Interface& interface, const std::vector<Pattern>& patterns) {
  bool any_included = false;
  std::optional<std::size_t> found;
  for (std::size_t index = 0; index < patterns.size(); ++index) {
    const Pattern& pattern = patterns[index];
    any_included = any_included || !pattern.exclude;
    if (!pattern.matches(interface.name)) continue;
    if (pattern.exclude) return std::nullopt;
    if (!found) found = index;
  }
  return any_included ? found : 0;
}

}  // namespace

std::vector<Interface> list_interfaces() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) {
    throw Error(ErrorCode::internal,
                "network interfaces cannot be listed: " + std::generic_category().message(errno));
  }
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owned(list, &::freeifaddrs);
  std::vector<Interface> interfaces;
  std::vector<Interface> without_address;
  for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
    Interface interface;
    interface.name = each->ifa_name;
    interface.up = (each->ifa_flags & IFF_UP) != 0 && (each->ifa_flags & IFF_RUNNING) != 0;
    interface.loopback = (each->ifa_flags & IFF_LOOPBACK) != 0;
    std::array<char, INET6_ADDRSTRLEN> text{};
    const int family = each->ifa_addr == nullptr ? AF_UNSPEC : each->ifa_addr->sa_family;
    if (family == AF_INET) {
      inet_ntop(family, &reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr,
                text.data(), text.size());
    } else if (family == AF_INET6) {
      inet_ntop(family, &reinterpret_cast<const sockaddr_in6*>(each->ifa_addr)->sin6_addr,
                text.data(), text.size());
    }
    interface.address = text.data();
    (interface.address.empty() ? without_address : interfaces).push_back(std::move(interface));
  }
  for (Interface& bare : without_address) {
    const bool known = std::any_of(interfaces.begin(), interfaces.end(),
                                   [&](const Interface& other) { return other.name == bare.name; });
    if (!known) interfaces.push_back(std::move(bare));
  }
  return interfaces;
}

std::string choose_address(const std::vector<Interface>& interfaces, const std::string& wanted,
                           bool loopback_world) {
  const std::vector<Pattern> patterns = parse_patterns(wanted);
  if (loopback_world) {
    // A list that only excludes other interfaces allows it.
    const bool only_excludes = std::all_of(patterns.begin(), patterns.end(),
                                           [](const Pattern& pattern) { return pattern.exclude; });
    const Interface loopback{"lo", "127.0.0.1", true, true};
    if (only_excludes && place(loopback, patterns)) return loopback.address;
  }

  using Rank = std::tuple<std::size_t, bool,
                          bool>;  // rank in `wanted`, virtual, IPv6: the smallest is chosen
  std::optional<Rank> best_rank;
  const Interface* best = nullptr;
  std::string passed_over;
  for (const Interface& interface : interfaces) {
    const auto wanted_place = place(interface, patterns);
    std::string reason;
    if (!wanted_place) {
      reason = "is not wanted";
    } else if (!interface.up) {
      reason = "is down";
    } else if (interface.address.empty()) {
      reason = "has no address";
    } else if (interface.loopback && !loopback_world) {
      reason = "is loopback, which other hosts cannot reach";
    } else if (is_link_local(interface.address)) {
      reason = "is link-local";
    } else {
      const Rank rank{*wanted_place, is_virtual(interface.name), is_ipv6(interface.address)};
      if (best_rank && *best_rank <= rank) continue;
      best_rank = rank;
      best = &interface;
      continue;
    }
    passed_over += (passed_over.empty() ? "" : "; ") + interface.name +
                   (interface.address.empty() ? "" : " " + interface.address) + ' ' + reason;
  }
  if (best != nullptr) return best->address;
  throw Error(
      ErrorCode::invalid_argument,
      "address to listen on cannot be chosen" +
          (wanted.empty() ? std::string() : " among the wanted interfaces \"" + wanted + '"') +
          ": " + (passed_over.empty() ? "this host has no network interface" : passed_over));
}

WantedInterfaces wanted_interfaces_from_environment() {
  for (const char* variable :
       {"STITCH_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}) {
    if (const char* value = std::getenv(variable); value != nullptr && *value != '\0')
      return {value, variable};
  }
  return {};
}

}  // namespace stitch::transport
