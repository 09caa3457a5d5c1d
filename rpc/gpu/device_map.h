#pragma once

#include <c10/core/Device.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace stitch::rpc {

// "cpu", "cuda:1"; "cuda" is cuda:0. Throws Error(invalid_argument) for any other text.
[[nodiscard]] c10::Device parse_device(const std::string& text);
// cuda:0 for a CUDA device without a number.
[[nodiscard]] c10::Device with_index(c10::Device device);

// Where tensors of one worker go at another: {device there -> device here}, one-to-one. CPU tensors
// stay on the CPU unless the map says otherwise. A value. Thread contract: as a value.
class DeviceMap {
 public:
  DeviceMap() = default;
  // `text`: device of the sender -> device of the receiver. Throws Error(invalid_argument) naming
  // what is no device, or the two devices that would go to one.
  explicit DeviceMap(const std::map<std::string, std::string>& text);
  // Each CUDA device to the one with the same number, where both workers have it.
  [[nodiscard]] static DeviceMap same_index(int devices_of_sender, int devices_of_receiver);

  // Nothing when the map does not name the device; the CPU for the CPU.
  [[nodiscard]] std::optional<c10::Device> destination(c10::Device source) const;
  // For replies: from the receiver back to the sender.
  [[nodiscard]] DeviceMap inverse() const;
  // Whether it puts CPU tensors on a device.
  [[nodiscard]] bool moves_cpu_tensors() const;
  // (device of the sender, device of the receiver), ascending.
  [[nodiscard]] const std::vector<std::pair<c10::Device, c10::Device>>& entries() const noexcept {
    return entries_;
  }
  // "cuda:0=cuda:1, cpu=cuda:0"; "nothing" when it is empty.
  [[nodiscard]] std::string text() const;

 private:
  void sort();
  std::vector<std::pair<c10::Device, c10::Device>> entries_;
};

// Options::device_maps: by the name of the peer, what it gets from here.
using DeviceMaps = std::map<std::string, DeviceMap>;
[[nodiscard]] DeviceMaps parse_device_maps(
    const std::map<std::string, std::map<std::string, std::string>>& text);

// A worker's CUDA devices and maps, as all workers of the world know them.
struct WorkerDevices {
  int count = 0;
  DeviceMaps maps{};
  bool transfers = false;  // it takes part in transfers between devices (TensorTransfers)

  [[nodiscard]] bool has(c10::Device device) const noexcept {
    return device.is_cpu() || device.index() < count;
  }
};
// Where tensors of requests go: the caller's map, or same_index() where it names none for `to`.
[[nodiscard]] DeviceMap map_between(const WorkerDevices& from, const WorkerDevices& to,
                                    const std::string& to_name);
// Throws Error(invalid_argument) for a map that names a worker that is not there, or a device that
// one of its two workers does not have; names both workers.
void check_device_maps(const std::map<std::string, const WorkerDevices*>& workers);

}  // namespace stitch::rpc
