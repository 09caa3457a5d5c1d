#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/base/published_table.h"
#include "stitch/base/unique_function.h"
#include "stitch/rpc/gpu/device_gate.h"
#include "stitch/rpc/gpu/device_map.h"
#include "stitch/rpc/gpu/gate_watch.h"
#include "stitch/rpc/gpu/transfer_hooks.h"
#include "stitch/rpc/gpu/transfer_section.h"
#include "stitch/rpc/message/message.h"
#include "stitch/rpc/message/worker_info.h"

namespace stitch::rpc {

class OutgoingTransfers;
class TensorTransfers;

// Tensors of a message that concern devices, ready to be encoded.
struct StagedTensors {
  std::vector<at::Tensor> copies;    // all of the message's tensors, on the CPU
  base::Bytes section;               // wire::kDevices; empty when all are on the CPU at both ends
  bool few_bytes = false;            // at most DeviceTensors::kInlineBytes come from devices
  std::unique_ptr<DeviceGate> gate;  // null: the copies have their bytes
  // Of those that go from device to device by themselves: undefined in `copies`. Null: none do.
  std::shared_ptr<OutgoingTransfers> transfers;
  base::Bytes transfer_section;  // wire::kTransfers
};

// Tensors on CUDA devices in the messages of one worker: where they are put at the receiver (device
// maps, on()), and how their bytes get there: few bytes inside the frame, others from device to
// device by TensorTransfers where both workers have them, else through host memory on both sides.
// Neither side waits for a device on a device: what the host carries leaves when the host has seen
// it, and a message is handled when the host has seen its tensors on their devices. Messages of CPU
// tensors do not come here. Part of its Agent. Thread contract: any thread once start() has been
// called; stage() is ordered after what the calling thread's current streams have then.
class DeviceTensors {
 public:
  // Up to so many bytes from devices travel inside the frame, if they come soon.
  static constexpr std::size_t kInlineBytes = std::size_t{64} << 10;
  // For so long a thread that sends or reads a message asks by itself whether a device is done.
  static constexpr std::chrono::microseconds kSpin{50};

  explicit DeviceTensors(std::string worker_name)
      : own_name_(std::move(worker_name)), watch_("gpu-" + own_name_) {}
  // `workers` are those of the world, `self` is one of them.
  struct Worker {
    WorkerInfo info;
    WorkerDevices devices;
  };
  void start(std::vector<Worker> workers, WorkerId self, TransferHooks hooks);
  // A worker that has joined, or come back. One that came before what is known here is not taken.
  void add(Worker worker) STITCH_EXCLUDES(mutex_);

  // The device of that worker, with its index; throws Error(invalid_argument) that begins with
  // `what` ("it cannot be made on") if the worker does not have it.
  [[nodiscard]] c10::Device existing_device(const WorkerInfo& of, c10::Device device,
                                            const std::string& what) const;

  // ---- sending
  [[nodiscard]] bool concerns(const OutMessage& message, WorkerId to) const {
    return !message.placements.empty() || peers_.at(to.value())->moves_cpu_tensors;
  }
  // Starts to copy what is on devices to the host. Throws Error(invalid_argument) naming the
  // argument and the tensor that has no place at the receiver or is on another kind of device,
  // before anything is copied; Error(overloaded) without memory.
  [[nodiscard]] StagedTensors stage(const OutMessage& message, const WorkerInfo& to);

  // ---- receiving
  // What a message says of its transfers; null: it has none. Throws Error(protocol) for what makes
  // no sense.
  using Announced = std::shared_ptr<const TransferSection>;
  [[nodiscard]] Announced announced(const InMessage& message) const;
  // Decodes the tensors of a message that has a section of devices and puts them there, then calls
  // `next` with message.arrival set: on this thread or on that of the watch, where it must not
  // wait. Without `failure` the message is complete (perhaps with arrival->error); with it the
  // message makes no sense (`protocol`), or the worker shuts down. What it throws itself instead:
  // `protocol`, or that there is no thread, memory or such a device; then `next` is not called.
  using Next = base::UniqueFunction<void(InMessage&& message, const std::optional<Error>& failure)>;
  void receive(const std::shared_ptr<InMessage>& message, const Announced& transfers, Next next);
  // In place of receive(): the message will not have its tensors, for that reason. Throws
  // Error(protocol) for transfers that were asked for already.
  void refuse_transfers(const WorkerInfo& from, const Announced& transfers, const Error& why);

  // A frame of transfers (wire::kTransfer). Throws Error(protocol) for one that no correct peer
  // sends.
  void on_transfer_frame(const InMessage& message);
  void on_peer_lost(const WorkerInfo& peer, const Error& why);

  // ---- what waits for devices
  // As GateWatch::then().
  void when_open(std::unique_ptr<DeviceGate> gate, GateWatch::Then next) {
    watch_.then(std::move(gate), std::move(next));
  }
  // `gate` (a new one for null) with what is queued on the streams and on this thread's current
  // ones of their devices; null when all of it has ended.
  [[nodiscard]] static std::unique_ptr<DeviceGate> gate_of(
      const StreamSet& streams, std::unique_ptr<DeviceGate> gate = nullptr);
  // Before stop(): fails the transfers that are under way. May wait for a device that hangs.
  [[nodiscard]] bool has_transfers() const noexcept { return transfers_ != nullptr; }
  void stop_transfers();
  // Ends all waiting with `shutting_down`. False when the thread is busy at `deadline`.
  bool stop(std::chrono::steady_clock::time_point deadline) { return watch_.stop(deadline); }
  // Messages that wait for a device, and what TensorTransfers::under_way() counts: a worker that
  // leaves waits for them.
  [[nodiscard]] std::size_t waiting() const;

  void debug_info(std::map<std::string, std::int64_t>& numbers) const STITCH_EXCLUDES(mutex_);

 private:
  struct Peer {
    WorkerInfo info;
    WorkerDevices devices;
    DeviceMap requests;  // also for frames of extensions
    DeviceMap replies;
    bool moves_cpu_tensors = false;
  };
  enum class Path : std::uint8_t { inlined, host };
  struct Count {
    std::int64_t messages = 0;
    std::int64_t bytes = 0;
  };
  struct Destination {
    c10::Device device;
    std::optional<at::ScalarType> cast;  // what it travels as in place of its own type
  };
  // Sent or not, path, peer, device here.
  using CountKey = std::tuple<bool, Path, std::uint32_t, std::int8_t>;

  [[nodiscard]] std::vector<Destination> destinations(const OutMessage& message,
                                                      const Peer& peer) const;
  template <class What>
  static c10::Device existing(const Peer& peer, c10::Device device, const What& what);
  [[nodiscard]] static std::optional<at::ScalarType> cast_of(const OutMessage& message,
                                                             const Peer& peer,
                                                             const at::Tensor& tensor,
                                                             c10::Device there, bool placed);
  [[nodiscard]] Error no_such_device(const std::string& what, c10::Device device) const;
  // That a message's tensors take the longer way, and why.
  void say_by_host(const WorkerInfo& to) STITCH_EXCLUDES(mutex_);
  class Staging;    // stage() of one message
  struct Received;  // what has come by transfers, for place()
  void receive_transfers(const std::shared_ptr<InMessage>& message, const Announced& transfers,
                         Next next);
  void place(const std::shared_ptr<InMessage>& message, Next next,
             const std::shared_ptr<Received>& received, const std::optional<Error>& stopped);
  static void put_received(InMessage& message, const Received& received);
  // Throws Error(protocol) unless the sections of devices and transfers fit the tensors.
  static void check_arrival(const InMessage& message, const std::vector<ArrivedTensor>& tensors,
                            const std::set<std::uint32_t>& cast, bool transferred);
  // `received` is put in place by then; those in `cast` become float32 again.
  void put_on_devices(InMessage& message, DeviceGate& gate, const Received& received,
                      const std::set<std::uint32_t>& cast);
  // The error text of a tensor that a device has refused.
  [[nodiscard]] std::string not_put(const InMessage& message, const ArrivedTensor& tensor,
                                    std::size_t bytes) const;
  [[nodiscard]] at::Tensor put_on_device(const at::Tensor& host, c10::Device device, bool cast,
                                         DeviceGate& gate);
  [[nodiscard]] at::Tensor to_device(const at::Tensor& tensor, c10::Device device,
                                     DeviceGate& gate);
  // `cast`: those that travelled as a narrower type.
  [[nodiscard]] std::vector<ArrivedTensor> read_section(const InMessage& message,
                                                        std::set<std::uint32_t>& cast) const;
  // What is sent waits for what the caller computes; what is received must not.
  enum class Direction : std::uint8_t { sent, received };
  [[nodiscard]] c10::Stream copy_stream(c10::Device device, Direction direction)
      STITCH_EXCLUDES(mutex_);
  void finish_arrival(const std::shared_ptr<InMessage>& message, Next& next,
                      const std::optional<Error>& error);
  void count(bool sent, std::size_t total, WorkerId peer,
             const std::map<c10::DeviceIndex, std::size_t>& bytes, std::size_t cast)
      STITCH_EXCLUDES(mutex_);

  const std::string own_name_;
  base::PublishedTable<Peer> peers_;  // by id
  WorkerDevices own_;                 // constant after start()
  GateWatch watch_;
  mutable base::Mutex mutex_;  // before that of peers_
  std::map<std::pair<c10::DeviceIndex, Direction>, c10::Stream> copy_streams_
      STITCH_GUARDED_BY(mutex_);
  std::set<std::string> said_ STITCH_GUARDED_BY(mutex_);  // workers, by say_by_host()
  std::map<CountKey, Count> counts_ STITCH_GUARDED_BY(mutex_);
  std::array<std::int64_t, 2> cast_tensors_ STITCH_GUARDED_BY(mutex_){};  // received, sent
  std::shared_ptr<TensorTransfers> transfers_;  // null: there are none; constant after start()
};

}  // namespace stitch::rpc
