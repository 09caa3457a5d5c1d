#include "stitch/rpc/world/member_record.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <span>

#include "stitch/base/byte_io.h"
#include "stitch/base/error.h"
#include "stitch/base/random.h"
#include "stitch/rpc/future/current_streams.h"
#include "stitch/rpc/message/worker_info.h"
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

// Names one kernel and one network namespace.
std::string host_token() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  if (boot.empty()) {
    char name[256] = {};
    if (gethostname(name, sizeof(name) - 1) == 0) boot = name;
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

// Names a host and a user on it, who is another one in another user namespace. Empty for a worker
// that cannot or may not use shared memory.
std::string memory_token(const Options& options) {
  const auto& names = options.transports;
  const bool wanted =
      names.empty() || std::find(names.begin(), names.end(), kSharedMemory) != names.end();
  const std::string users = namespace_of_this_process("user");
  if (!wanted || options.world_size == 1 || users.empty() || !shared_memory_passes()) return {};
  return host_token() + users + ':' + std::to_string(geteuid());
}

bool prefers_memory(const Options& options) {
  const auto& names = options.transports;
  const auto first = std::find_if(names.begin(), names.end(),
                                  [](const std::string& name) { return name != kLoopback; });
  return names.empty() || (first != names.end() && *first == kSharedMemory);
}

WorkerDevices read_devices(base::ByteReader& in) {
  constexpr std::size_t kStringBytes = 8;  // at least
  WorkerDevices devices;
  const auto count = in.read<std::uint32_t>();
  if (count > static_cast<std::uint32_t>(kMaxDevices)) {
    throw Error(ErrorCode::protocol, "member entry has " + std::to_string(count) +
                                         " CUDA devices; at most " + std::to_string(kMaxDevices));
  }
  devices.count = static_cast<int>(count);
  const auto maps = in.read_count(kStringBytes);
  for (std::uint32_t i = 0; i < maps; ++i) {
    std::string peer = in.read_string();
    if (!is_worker_name(peer))
      throw Error(ErrorCode::protocol,
                  "member entry has a device map for what is no worker's name");
    std::map<std::string, std::string> text;
    const auto entries = in.read_count(2 * kStringBytes);
    for (std::uint32_t k = 0; k < entries; ++k) {
      std::string source = in.read_string();
      text[std::move(source)] = in.read_string();
    }
    try {
      devices.maps.insert_or_assign(std::move(peer), DeviceMap(text));
    } catch (const Error& error) {
      throw Error(ErrorCode::protocol, std::string("member entry: ") + error.what());
    }
  }
  return devices;
}

}  // namespace

std::string MemberRecord::encode() const {
  base::Bytes bytes;
  base::ByteWriter out(bytes);
  out.write_string(name);
  out.write(rank);
  out.write(world_size);
  out.write(founders);
  out.write_string(process);
  out.write_string(host);
  out.write_string(memory);
  out.write(static_cast<std::uint8_t>(prefers_memory));
  out.write(static_cast<std::uint32_t>(devices.count));
  out.write(static_cast<std::uint32_t>(devices.maps.size()));
  for (const auto& [peer, map] : devices.maps) {
    out.write_string(peer);
    out.write(static_cast<std::uint32_t>(map.entries().size()));
    for (const auto& [source, destination] : map.entries()) {
      out.write_string(source.str());
      out.write_string(destination.str());
    }
  }
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

MemberRecord MemberRecord::decode(const std::string& text) {
  base::ByteReader in(std::as_bytes(std::span(text)), "member entry");
  MemberRecord record;
  record.name = in.read_string();
  record.rank = in.read<std::int64_t>();
  record.world_size = in.read<std::int64_t>();
  record.founders = in.read<std::int64_t>();
  record.process = in.read_string();
  record.host = in.read_string();
  record.memory = in.read_string();
  record.prefers_memory = in.read<std::uint8_t>() != 0;
  record.devices = read_devices(in);
  in.expect_end();
  return record;
}

MemberRecord describe_this_worker(const Options& options) {
  return {options.name,
          options.rank,
          options.world_size.max(),
          options.world_size.min(),
          process_token(),
          host_token(),
          memory_token(options),
          prefers_memory(options),
          {cuda_device_count(), parse_device_maps(options.device_maps)}};
}

bool within_reach(const std::string& address, const MemberRecord& self, const MemberRecord& other) {
  if (address.starts_with("shm:")) return !self.memory.empty() && self.memory == other.memory;
  return !address.starts_with("tensorpipe-shm:") || self.host == other.host;
}

}  // namespace stitch::rpc
