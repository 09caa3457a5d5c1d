#include "stitch/transport/tensorpipe/tensorpipe_selection.h"

#include <algorithm>
#include <string>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/base/name_list.h"
#include "stitch/transport/ip_address.h"
#include "stitch/transport/self_transfer.h"

namespace stitch::transport {

namespace {

constexpr std::size_t kMaxAbstractName =
    100;  // of the 107 characters a unix socket's name can have

[[nodiscard]] bool passes(const TensorPipeOptions& options, const MakeEndpoint& make) {
  return passes_once(
      options.transports.front() + " " + options.channels.front() + " " + options.bind_address,
      [&] { return make(options); });
}

}  // namespace

TensorPipeOptions select_usable(TensorPipeOptions wanted, const MakeEndpoint& make) {
  base::check_names("transport", wanted.transports, {"tensorpipe-shm", "uv"});
  base::check_names("channel", wanted.channels, {"basic", "cma"});
  const std::string& bind = wanted.bind_address;
  check_bind_address(bind);
  TensorPipeOptions usable{{}, {}, bind};
  for (const auto& transport : wanted.transports) {
    if (passes({{transport}, {"basic"}, bind}, make)) usable.transports.push_back(transport);
  }
  if (usable.transports.empty()) {
    throw Error(ErrorCode::disconnected,
                "no transport passes a transfer from this worker to itself; tried: " +
                    base::join_names(wanted.transports) + ", bind address " + bind);
  }
  for (const auto& channel : wanted.channels) {
    if (passes({{usable.transports.front()}, {channel}, bind}, make))
      usable.channels.push_back(channel);
  }
  if (usable.channels.empty()) {
    throw Error(ErrorCode::disconnected,
                "no channel passes a transfer from this worker to itself; tried: " +
                    base::join_names(wanted.channels));
  }
  return usable;
}

std::string problem_with_address(const std::string& address,
                                 const std::vector<std::string>& transports) {
  const auto at = address.find("://");
  if (at == std::string::npos)
    return "it does not look like \"tensorpipe-shm://name\" or \"uv://127.0.0.1:4711\"";
  const std::string transport = address.substr(0, at);
  if (std::find(transports.begin(), transports.end(), transport) == transports.end()) {
    return "transport \"" + transport +
           "\" is not in use here; in use: " + base::join_names(transports);
  }
  const std::string rest = address.substr(at + 3);
  if (transport == "tensorpipe-shm" && (rest.empty() || rest.size() > kMaxAbstractName)) {
    return "its name is empty or longer than " + std::to_string(kMaxAbstractName) + " characters";
  }
  // TensorPipe aborts the process for an address that it cannot parse.
  if (transport == "uv" && !IpAddress::parse_with_port(rest))
    return "it is not a numeric address with a port";
  return {};
}

}  // namespace stitch::transport
