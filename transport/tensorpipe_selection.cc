#include "stitch/transport/tensorpipe_selection.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "stitch/transport/ip_address.h"
#include "stitch/transport/mutex.h"
#include "stitch/transport/self_transfer.h"

namespace stitch::transport {

namespace {

constexpr std::chrono::seconds kTrialTime{5};
constexpr std::size_t kMaxAbstractName = 100;  // of the 107 characters a unix socket's name can have

[[nodiscard]] std::string list(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

// Refuses unknown names and drops repeated ones.
void check_names(const std::string& what, std::vector<std::string>& names, const std::vector<std::string>& known) {
  std::vector<std::string> unique;
  for (const std::string& name : names) {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      throw Error(ErrorCode::invalid_argument, what + " \"" + name + "\" is unknown; known are: " + list(known));
    }
    if (std::find(unique.begin(), unique.end(), name) == unique.end()) unique.push_back(name);
  }
  if (unique.empty()) throw Error(ErrorCode::invalid_argument, "no " + what + " is named; known are: " + list(known));
  names = std::move(unique);
}

// Successes are remembered, they are facts about this process and host. A failure may pass, when an address appears.
[[nodiscard]] bool passes(const TensorPipeOptions& options, const MakeEndpoint& make) {
  static Mutex mutex;
  static std::set<std::string> passed;  // guarded by mutex
  const std::string key = options.transports.front() + " " + options.channels.front() + " " + options.bind_address;
  {
    MutexLock lock(mutex);
    if (passed.contains(key)) return true;
  }
  if (!passes_self_transfer(make(options), kTrialTime)) return false;
  MutexLock lock(mutex);
  passed.insert(key);
  return true;
}

}  // namespace

TensorPipeOptions select_usable(TensorPipeOptions wanted, const MakeEndpoint& make) {
  check_names("transport", wanted.transports, {"shm", "uv"});
  check_names("channel", wanted.channels, {"basic", "cma"});
  const std::string& bind = wanted.bind_address;
  if (!IpAddress::parse(bind, 0)) {
    throw Error(ErrorCode::invalid_argument, "bind address \"" + bind + "\" is not a numeric IPv4 or IPv6 address");
  }
  TensorPipeOptions usable{{}, {}, bind};
  for (const auto& transport : wanted.transports) {
    if (passes({{transport}, {"basic"}, bind}, make)) usable.transports.push_back(transport);
  }
  if (usable.transports.empty()) {
    throw Error(ErrorCode::disconnected,
                "no transport passes a transfer from this worker to itself; tried: " + list(wanted.transports) + ", bind address " + bind);
  }
  for (const auto& channel : wanted.channels) {
    if (passes({{usable.transports.front()}, {channel}, bind}, make)) usable.channels.push_back(channel);
  }
  if (usable.channels.empty()) {
    throw Error(ErrorCode::disconnected, "no channel passes a transfer from this worker to itself; tried: " + list(wanted.channels));
  }
  return usable;
}

std::string problem_with_address(const std::string& address, const std::vector<std::string>& transports) {
  const auto at = address.find("://");
  if (at == std::string::npos) return "it does not look like \"shm://name\" or \"uv://127.0.0.1:4711\"";
  const std::string transport = address.substr(0, at);
  if (std::find(transports.begin(), transports.end(), transport) == transports.end()) {
    return "transport \"" + transport + "\" is not in use here; in use: " + list(transports);
  }
  const std::string rest = address.substr(at + 3);
  if (transport == "shm" && (rest.empty() || rest.size() > kMaxAbstractName)) {
    return "its name is empty or longer than " + std::to_string(kMaxAbstractName) + " characters";
  }
  // TensorPipe ends the process over an address that it cannot parse.
  if (transport == "uv" && !IpAddress::parse_with_port(rest)) return "it is not a numeric address with a port";
  return {};
}

}  // namespace stitch::transport
