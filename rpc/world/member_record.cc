#include "stitch/rpc/world/member_record.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <string_view>

#include "stitch/base/error.h"
#include "stitch/base/random.h"
#include "stitch/rpc/future/current_streams.h"
#include "stitch/rpc/gpu/tensor_transfers.h"
#include "stitch/transport/selection/make_endpoints.h"
#include "stitch/transport/self_transfer.h"
#include "stitch/transport/stream/stream_endpoint.h"

namespace stitch::rpc {

namespace {

// "net:[4026531840]"; empty where /proc is not mounted.
std::string namespace_of_this_process(const char* kind) {
  char text[128] = {};
  const std::string path = std::string("/proc/self/ns/") + kind;
  return readlink(path.c_str(), text, sizeof(text) - 1) < 0 ? "" : text;
}

// Made anew each time: a forked child shares the random number, and differs by its process id and
// the namespace of that.
std::string process_token() {
  static const std::string number = std::to_string(base::random_number());
  return std::to_string(getpid()) + '-' + namespace_of_this_process("pid") + '-' + number;
}

// As many digits as the largest has: texts are sorted as numbers are.
std::string sixteen_digits(std::uint64_t number) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text(16, '0');
  for (auto at = text.rbegin(); at != text.rend(); ++at, number >>= 4) *at = kDigits[number & 15];
  return text;
}

// By time: workers that start one after another get ids in that order.
std::string new_token() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return sixteen_digits(static_cast<std::uint64_t>(now.count())) +
         sixteen_digits(base::random_number());
}

// Before the name of a host whose kernel does not say which one it is.
constexpr std::string_view kHostName = "name:";

// Names one kernel and one network namespace.
std::string host_token() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  if (boot.empty()) {
    char name[256] = {};
    if (gethostname(name, sizeof(name) - 1) == 0) boot = std::string(kHostName) + name;
  }
  return boot + namespace_of_this_process("net");
}

// As make_endpoints() finds it out.
bool shared_memory_passes() {
  const transport::TransportChoice choice;
  try {
    return transport::passes_once(std::string(kSharedMemory) + ' ' + choice.bind_address, [&] {
      return transport::make_stream_endpoint(transport::self_transfer_options(),
                                             {{kSharedMemory}, choice.bind_address});
    });
  } catch (const Error&) {
    return false;  // it is tried again, and reported, when a worker asks for it
  }
}

// Names a host and a user on it, who is another one in another user namespace, and without a secret
// where processes do not see each other. Empty for a worker that cannot or may not use shared
// memory.
std::string memory_token(const Options& options, bool has_secret) {
  const auto& names = options.transports;
  const bool wanted =
      names.empty() || std::find(names.begin(), names.end(), kSharedMemory) != names.end();
  const std::string users = namespace_of_this_process("user");
  if (!wanted || options.world_size == 1 || users.empty() || !shared_memory_passes()) return {};
  return host_token() + users + ':' + std::to_string(geteuid()) +
         (has_secret ? "" : namespace_of_this_process("pid"));
}

bool prefers_memory(const Options& options) {
  const auto& names = options.transports;
  const auto first = std::find_if(names.begin(), names.end(),
                                  [](const std::string& name) { return name != kLoopback; });
  return names.empty() || (first != names.end() && *first == kSharedMemory);
}

}  // namespace

MemberRecord describe_this_worker(const Options& options, bool has_secret) {
  return {
      new_token(),
      options.name,
      options.rank,
      options.world_size,
      process_token(),
      host_token(),
      memory_token(options, has_secret),
      prefers_memory(options),
      options.transports.empty() ||
          std::ranges::find(options.transports, kLoopback) != options.transports.end(),
      {cuda_device_count(), parse_device_maps(options.device_maps), TensorTransfers::possible()},
      {options.max_inflight_bytes, options.max_inflight_calls, options.max_frame_bytes}};
}

bool on_same_host(const MemberRecord& self, const MemberRecord& other) {
  return self.process == other.process ||
         (self.host == other.host && !self.host.empty() && !self.host.starts_with(kHostName));
}

bool is_host_address(const std::string& address) {
  const auto at = address.find("://");
  const std::string place = at == std::string::npos ? std::string() : address.substr(at + 3);
  return place.starts_with("127.") || place.starts_with("[::1]");
}

bool within_reach(const std::string& address, const MemberRecord& self, const MemberRecord& other) {
  if (address.starts_with("shm:")) return !self.memory.empty() && self.memory == other.memory;
  const bool needs_host = address.starts_with("tensorpipe-shm:") || is_host_address(address);
  return !needs_host || self.host == other.host;
}

}  // namespace stitch::rpc
