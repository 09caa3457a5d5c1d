#include "stitch/rpc/gpu/device_map.h"

#include <algorithm>
#include <array>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/base/name_list.h"
#include "stitch/rpc/message/parse_device.h"

namespace stitch::rpc {

namespace {

struct CastSuffix {
  const char* text;
  c10::ScalarType type;
};
constexpr std::array<CastSuffix, 2> kCastSuffixes{
    {{"/bf16", c10::ScalarType::BFloat16}, {"/fp16", c10::ScalarType::Half}}};

DeviceMap::Entry parse_entry(const std::string& from, const std::string& to) {
  const std::string suffix = to.find('/') == std::string::npos ? "" : to.substr(to.find('/'));
  DeviceMap::Entry entry{parse_device(from), parse_device(to.substr(0, to.size() - suffix.size()))};
  if (suffix.empty()) return entry;
  for (const auto& known : kCastSuffixes) {
    if (suffix == known.text) entry.cast = known.type;
  }
  if (!entry.cast) {
    throw Error(ErrorCode::invalid_argument, "\"" + suffix +
                                                 "\" is nothing that tensors are cast to on their "
                                                 "way; known are /bf16 and /fp16");
  }
  if (entry.from.is_cpu() && entry.to.is_cpu()) {
    throw Error(ErrorCode::invalid_argument, "what stays on the CPU is not cast on its way");
  }
  return entry;
}

}  // namespace

c10::Device with_index(c10::Device device) {
  return device.is_cuda() && !device.has_index() ? c10::Device(c10::kCUDA, 0) : device;
}

DeviceMap::DeviceMap(const std::map<std::string, std::string>& text) {
  for (const auto& [from, to] : text) {
    const Entry entry = [&from = from, &to = to] {
      try {
        return parse_entry(from, to);
      } catch (const Error& error) {
        throw error.with_prefix("entry \"" + from + '=' + to + '"');
      }
    }();
    for (const Entry& other : entries_) {
      if (other.from == entry.from) {
        throw Error(ErrorCode::invalid_argument,
                    "a device map names " + entry.from.str() + " twice");
      }
      if (other.to != entry.to) continue;
      throw Error(ErrorCode::invalid_argument,
                  "a device map has both " + other.from.str() + " and " + entry.from.str() +
                      " go to " + entry.to.str() +
                      "; it must be one-to-one, since replies go back by it");
    }
    entries_.push_back(entry);
  }
  sort();
}

void DeviceMap::sort() {
  std::sort(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) {
    const auto key = [](c10::Device device) {
      return std::pair(static_cast<int>(device.type()), static_cast<int>(device.index()));
    };
    return key(a.from) < key(b.from);
  });
}

DeviceMap DeviceMap::same_index(int devices_of_sender, int devices_of_receiver) {
  DeviceMap map;
  for (int i = 0; i < std::min(devices_of_sender, devices_of_receiver); ++i) {
    const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(i));
    map.entries_.push_back({device, device});
  }
  return map;
}

std::optional<c10::Device> DeviceMap::destination(c10::Device source) const {
  for (const Entry& entry : entries_) {
    if (entry.from == source) return entry.to;
  }
  return source.is_cpu() ? std::optional(source) : std::nullopt;
}

std::optional<c10::ScalarType> DeviceMap::cast(c10::Device source, c10::Device destination) const {
  for (const Entry& entry : entries_) {
    if (entry.from == source && entry.to == destination) return entry.cast;
  }
  return std::nullopt;
}

DeviceMap DeviceMap::inverse() const {
  DeviceMap map;
  for (const Entry& entry : entries_) map.entries_.push_back({entry.to, entry.from, entry.cast});
  map.sort();
  return map;
}

bool DeviceMap::moves_cpu_tensors() const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [](const auto& entry) { return entry.from.is_cpu() && !entry.to.is_cpu(); });
}

std::string DeviceMap::Entry::destination_text() const {
  for (const auto& known : kCastSuffixes) {
    if (cast == known.type) return to.str() + known.text;
  }
  return to.str();
}

std::string DeviceMap::text() const {
  std::vector<std::string> parts;
  for (const Entry& entry : entries_)
    parts.push_back(entry.from.str() + '=' + entry.destination_text());
  return parts.empty() ? "nothing" : base::join_names(parts);
}

DeviceMaps parse_device_maps(
    const std::map<std::string, std::map<std::string, std::string>>& text) {
  DeviceMaps maps;
  for (const auto& [peer, map] : text) {
    try {
      maps.emplace(peer, DeviceMap(map));
    } catch (const Error& error) {
      throw error.with_prefix("device_maps of worker \"" + peer + "\"");
    }
  }
  return maps;
}

DeviceMap map_between(const WorkerDevices& from, const WorkerDevices& to,
                      const std::string& to_name) {
  const auto found = from.maps.find(to_name);
  return found != from.maps.end() ? found->second : DeviceMap::same_index(from.count, to.count);
}

void check_device_maps(const std::map<std::string, const WorkerDevices*>& workers,
                       bool more_may_come) {
  const auto check = [](const std::string& owner, const std::string& peer, const DeviceMap& map,
                        const std::string& name, const WorkerDevices& worker, c10::Device device) {
    if (worker.has(device)) return;
    throw Error(ErrorCode::invalid_argument,
                "device_maps of worker \"" + owner + "\" for worker \"" + peer + "\" (" +
                    map.text() + ") name " + device.str() + ", which worker \"" + name +
                    "\" does not have: it has " + std::to_string(worker.count) + " CUDA devices");
  };
  for (const auto& [owner, devices] : workers) {
    for (const auto& [peer, map] : devices->maps) {
      const auto found = workers.find(peer);
      if (found == workers.end() && !more_may_come) {
        std::vector<std::string> names;
        for (const auto& [name, unused] : workers) names.push_back(name);
        throw Error(ErrorCode::invalid_argument, "device_maps of worker \"" + owner +
                                                     "\" name worker \"" + peer +
                                                     "\"; workers are " + base::join_names(names));
      }
      for (const auto& entry : map.entries()) {
        check(owner, peer, map, owner, *devices, entry.from);
        if (found != workers.end()) check(owner, peer, map, peer, *found->second, entry.to);
      }
    }
  }
}

}  // namespace stitch::rpc
