#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace stitch::rpc {

// cuda:0 for a CUDA device without a number.
[[nodiscard]] c10::Device with_index(c10::Device device);

// Where tensors of one worker go at another: {device there -> device here}, one-to-one. CPU tensors
// stay on the CPU unless the map says otherwise. An entry may say that float32 tensors between its
// two devices travel as a narrower type. A value. Thread contract: as a value.
class DeviceMap {
 public:
  struct Entry {
    c10::Device from;
    c10::Device to;
    std::optional<c10::ScalarType> cast{};  // bfloat16 or half
    // "cuda:1", "cuda:1/bf16".
    [[nodiscard]] std::string destination_text() const;
  };
  DeviceMap() = default;
  // `text`: device of the sender -> device of the receiver, with "/bf16" or "/fp16" behind it for a
  // cast. Throws Error(invalid_argument) naming the entry that has no device or an unknown cast, or
  // the two devices that would go to one.
  explicit DeviceMap(const std::map<std::string, std::string>& text);
  // Each CUDA device to the one with the same number, where both workers have it.
  [[nodiscard]] static DeviceMap same_index(int devices_of_sender, int devices_of_receiver);

  // Nothing when the map does not name the device; the CPU for the CPU.
  [[nodiscard]] std::optional<c10::Device> destination(c10::Device source) const;
  // What float32 tensors from `source` to `destination` travel as, where an entry says so.
  [[nodiscard]] std::optional<c10::ScalarType> cast(c10::Device source,
                                                    c10::Device destination) const;
  // For replies: from the receiver back to the sender, with the same casts.
  [[nodiscard]] DeviceMap inverse() const;
  // Whether it puts CPU tensors on a device.
  [[nodiscard]] bool moves_cpu_tensors() const;
  // By device of the sender, ascending.
  [[nodiscard]] const std::vector<Entry>& entries() const noexcept { return entries_; }
  // "cuda:0=cuda:1/bf16, cpu=cuda:0"; "nothing" when it is empty.
  [[nodiscard]] std::string text() const;

 private:
  void sort();
  std::vector<Entry> entries_;
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
// one of its two workers does not have; names both workers. With `more_may_come` a worker that is
// not there may come later: then what it has is not known yet.
void check_device_maps(const std::map<std::string, const WorkerDevices*>& workers,
                       bool more_may_come = false);

}  // namespace stitch::rpc
