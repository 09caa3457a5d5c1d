// Tensors from a device to a device by each path in turn: latency of small ones, GB/s of large
// ones, beside what copies and NCCL reach on the same devices without stitch.
#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gpu_ceilings.h"
#include "handlers.h"
#include "measure.h"
#include "stitch/rpc/future/current_streams.h"
#include "stitch/rpc/gpu/device_bridge.h"
#include "stitch/transport/gpu/gpu_libraries.h"
#include "timing.h"
#include "world.h"

namespace stitch_bench {

namespace gpu_measure {
namespace {

using stitch::rpc::DeviceBridge;
using stitch::transport::gpu::GpuLibraries;
using stitch::transport::gpu::ProcessIdentity;

int devices() { return stitch::rpc::cuda_device_count(); }

// Where the tensors of a path begin and end.
struct Route {
  int from = 0;
  int to = 0;
  bool within_process = false;
};
// Nothing where the path needs more devices than there are, or NCCL.
std::optional<Route> route_of(const std::string& path) {
  if (path == "local") return Route{0, 0, true};
  if (path == "peer") return devices() > 1 ? std::optional(Route{0, 1, true}) : std::nullopt;
  if (path == "nccl") {
    if (GpuLibraries::of_process().nccl() == nullptr) return std::nullopt;
    return Route{0, devices() > 1 ? 1 : 0, false};
  }
  return Route{0, 0, false};  // staging
}

// Each worker passes for one on another host.
ProcessIdentity on_hosts_of_their_own(std::uint32_t worker) {
  ProcessIdentity identity = stitch::transport::gpu::this_process();
  identity.host[0] ^= worker + 1;
  return identity;
}

// Leaves the workers of this process no other path than that of the measure. Before a world is
// joined; once, and for good: it is a process of one measure.
void leave_only(const Side& side, bool one_device) {
  if (side.path() == "local") return;
  setenv("STITCH_GPU_PATHS", side.path().c_str(), 1);
  if (side.path() != "nccl" || !one_device) return;
  static DeviceBridge bridge = *stitch::rpc::device_bridge();
  bridge.identity = &on_hosts_of_their_own;
  stitch::rpc::set_device_bridge(&bridge);
}

// NCCL takes one GPU twice where it sees two hosts, which then have only sockets between them.
void show_nccl_two_hosts(int rank) {
  const std::string host = "stitch-bench-" + std::to_string(rank);
  setenv("NCCL_HOSTID", host.c_str(), 1);
  const std::pair<const char*, const char*> others[] = {
      {"NCCL_SOCKET_IFNAME", "lo"}, {"NCCL_NET", "Socket"},     {"NCCL_NET_PLUGIN", "none"},
      {"NCCL_IB_DISABLE", "1"},     {"NCCL_MNNVL_ENABLE", "0"}, {"NCCL_NVLS_ENABLE", "0"},
      {"NCCL_RAS_ENABLE", "0"}};
  for (const auto& [name, value] : others) setenv(name, value, 0);
}

std::string in_mib(int mib) { return std::to_string(mib) + "MiB"; }

// ---- ceilings

// Both processes: what NCCL reaches between them, by itself.
void measure_nccl(const Side& side, const Route& route) {
  const GpuLibraries& libraries = GpuLibraries::of_process();
  NcclPair::UniqueId id{};
  if (side.rank() == 0) {
    id = NcclPair::new_id(*libraries.nccl());
    std::string hex;
    for (const char each : id.internal) {
      char digits[3];
      std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned char>(each));
      hex += digits;
    }
    side.send_line(hex);
  } else {
    const std::string hex = side.receive_line();
    for (std::size_t i = 0; i < sizeof(id.internal); ++i)
      id.internal[i] = static_cast<char>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
  }
  const int device = side.rank() == 0 ? route.from : route.to;
  NcclPair pair(*libraries.cuda(), *libraries.nccl(), id, side.rank(), device);
  for (const int mib : side.settings().sizes_mib) {
    const std::size_t bytes = static_cast<std::size_t>(mib) << 20;
    const double one_way = pair.send_one_way(bytes);
    const double both_ways = pair.send_and_receive(bytes);
    if (side.rank() != 0) continue;
    side.result("floor.gpu.nccl_send." + in_mib(mib), one_way, "GB/s");
    side.result("floor.gpu.nccl_sendrecv." + in_mib(mib), both_ways, "GB/s");
  }
  side.meet();  // neither ends the communicator while the other uses it
}

// Those that a path is compared with. Rank 0.
void measure_copies(const Side& side, const Route& route) {
  const GpuCeilings ceilings(*GpuLibraries::of_process().cuda(), side.settings().seconds);
  for (const int mib : side.settings().sizes_mib) {
    const auto bytes = static_cast<std::size_t>(mib) << 20;
    const auto report = [&](const char* name, double rate) {
      side.result("floor.gpu." + std::string(name) + "." + in_mib(mib), rate, "GB/s");
    };
    if (side.path() == "local") report("device_copy", ceilings.device_copy(route.from, bytes));
    if (side.path() == "peer") {
      report("memcpy_peer", ceilings.peer_copy(route.from, route.to, bytes));
    }
    if (side.path() == "staging") {
      const double to_host = ceilings.to_host(route.from, bytes);
      const double from_host = ceilings.from_host(route.to, bytes);
      report("to_host", to_host);
      report("from_host", from_host);
      report("pinned_copy", std::min(to_host, from_host));
    }
  }
}

const char* ceiling_of(const std::string& path) {
  if (path == "local") return "device_copy";
  if (path == "peer") return "memcpy_peer";
  return path == "nccl" ? "nccl_send" : "pinned_copy";
}

// ---- calls

class Calls {
 public:
  Calls(const Side& side, const Route& route, stitch::Worker& self)
      : side_(side),
        self_(self),
        from_(c10::kCUDA, static_cast<c10::DeviceIndex>(route.from)),
        to_(c10::kCUDA, static_cast<c10::DeviceIndex>(route.to)),
        callee_(route.within_process ? stitch::WorkerId(0) : other(side)) {}

  // The path has to pass its test first, and bytes go by staging meanwhile.
  void wait_until_open() const {
    const at::Tensor tensor = random_bytes(std::int64_t{1} << 20);
    const auto limit = after(60);
    while (sent_by_path() == 0) {
      if (Clock::now() > limit)
        throw std::runtime_error("the path " + side_.path() + " has not opened within 60 s");
      check(tensor);
    }
  }

  void latency(std::int64_t bytes, const std::string& name) const {
    const at::Tensor tensor = random_bytes(bytes);
    const auto times = time_each_us(side_.settings().seconds, 20, [&] { take_there(tensor); });
    report_latency(side_, key("call." + name), times);
  }

  void bandwidth(int mib) const {
    const at::Tensor tensor = random_bytes(static_cast<std::int64_t>(mib) << 20);
    check(tensor);
    const auto times =
        time_each_us(side_.settings().seconds, least_repetitions(mib), [&] { take_there(tensor); });
    report_rate("send." + in_mib(mib), mib, times);
    if (side_.path() != "local") return;
    // The memory itself, since nothing else refers to it.
    const auto handed_over = time_each_us(side_.settings().seconds, least_repetitions(mib), [&] {
      at::Tensor given = at::empty_like(tensor);
      stitch::rpc_async<&take>(callee_, std::move(given)).get();
    });
    report_rate("hand_over." + in_mib(mib), mib, handed_over);
  }

  void counts() const {
    for (const auto& [name, bytes] : self_.debug_info()) {
      if (name.starts_with("gpu.sent_bytes."))
        side_.result(side_.path() + "." + name, static_cast<double>(bytes), "bytes");
    }
  }

 private:
  [[nodiscard]] std::string key(const std::string& what) const {
    return "gpu." + side_.path() + "." + what;
  }
  [[nodiscard]] at::Tensor random_bytes(std::int64_t count) const {
    return at::randint(0, 256, {count}, at::TensorOptions().dtype(at::kByte).device(from_));
  }
  // One way: the answer is empty.
  void take_there(const at::Tensor& tensor) const {
    stitch::rpc_sync<&take>(callee_, stitch::on(to_, tensor));
  }
  void check(const at::Tensor& tensor) const {
    const at::Tensor back = stitch::rpc_sync<&echo>(callee_, stitch::on(to_, tensor));
    if (!at::equal(back.cpu(), tensor.cpu()))
      throw std::runtime_error("what came back is not what was sent");
  }
  void report_rate(const std::string& what, int mib, const std::vector<double>& times) const {
    side_.result(key(what), mib * kMiB / 1e9 / (median(times) * 1e-6), "GB/s",
                 "floor.gpu." + std::string(ceiling_of(side_.path())) + "." + in_mib(mib));
  }
  [[nodiscard]] std::int64_t sent_by_path() const {
    std::int64_t messages = 0;
    for (const auto& [name, number] : self_.debug_info()) {
      if (name.starts_with("gpu.sent_messages." + side_.path() + ".")) messages += number;
    }
    return messages;
  }

  const Side& side_;
  stitch::Worker& self_;
  const c10::Device from_;
  const c10::Device to_;
  const stitch::WorkerId callee_;
};

// What both processes do first. Nothing: the path cannot be measured here.
std::optional<Route> prepare(const Side& side) {
  if (side.path() == "nccl" && devices() == 1) show_nccl_two_hosts(side.rank());
  const auto route = route_of(side.path());
  if (!route) return std::nullopt;
  leave_only(side, route->from == route->to);
  if (side.path() == "nccl") measure_nccl(side, *route);
  return route;
}

void first(Side& side) {
  const auto route = prepare(side);
  if (!route) {
    std::fprintf(stderr, "gpu %s: not measured: there is %s", side.path().c_str(),
                 side.path() == "peer" ? "one device" : "no NCCL");
    return;
  }
  measure_copies(side, *route);
  stitch::Worker self = join_world(side);
  const Calls calls(side, *route, self);
  calls.wait_until_open();
  if (side.path() == "local") {  // up to 64 KiB travel in the message, whatever the path
    calls.latency(1, "1B");
    for (const std::int64_t kib : {1, 16, 64})
      calls.latency(kib << 10, std::to_string(kib) + "KiB");
  }
  for (const std::int64_t kib : {128, 1024}) calls.latency(kib << 10, std::to_string(kib) + "KiB");
  for (const int mib : side.settings().sizes_mib) calls.bandwidth(mib);
  calls.counts();
  finish(side);
}

void second(Side& side) {
  if (prepare(side)) serve(side);
}

}  // namespace
}  // namespace gpu_measure

Measure gpu() {
  using namespace gpu_measure;
  return {.name = "gpu",
          .about =
              "tensors on GPUs by each path: local, peer, nccl, staging; --sizes MiB "
              "and small ones, beside plain copies and NCCL; needs a CUDA device",
          .needs_device = true,
          .paths = {"local", "peer", "nccl", "staging"},
          .first = &first,
          .second = &second};
}

bool has_device() { return why_no_device().empty(); }

std::string why_no_device() {
  using namespace gpu_measure;
  if (devices() == 0) return "libtorch sees none here";
  if (stitch::rpc::device_bridge() == nullptr)
    return "this program is built with a libtorch without CUDA";
  return GpuLibraries::of_process().why_no_cuda();
}

}  // namespace stitch_bench
