// One file, though long: where the tensors of a message go, and the steps that stage them.
#include "stitch/rpc/gpu/device_tensors.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdio>
#include <set>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/rpc/gpu/host_copy.h"
#include "stitch/rpc/gpu/stream_order.h"
#include "stitch/rpc/gpu/tensor_transfers.h"
#include "stitch/rpc/gpu/wire_cast.h"
#include "stitch/rpc/gpu/wire_device.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/message/tensor_codec.h"

namespace stitch::rpc {

namespace {

using c10::impl::VirtualGuardImpl;

// "argument 2 (tensor 3 of 4)".
std::string position(const OutMessage& message, std::size_t tensor) {
  const std::string number =
      "tensor " + std::to_string(tensor + 1) + " of " + std::to_string(message.tensors.size());
  if (message.frame.kind() != wire::kRequest) return number;
  for (const auto& placement : message.placements) {
    if (placement.tensor == tensor && placement.argument != 0)
      return "argument " + std::to_string(placement.argument) + " (" + number + ')';
  }
  return number;
}

// What has to be moved from a device for that tensor, or nearly.
std::size_t device_bytes(const at::Tensor& tensor, std::optional<at::ScalarType> cast) {
  if (!tensor.defined() || tensor.is_cpu()) return 0;
  const std::size_t element = cast ? c10::elementSize(*cast) : tensor.element_size();
  if (tensor.is_sparse()) {
    const at::Tensor plain = tensor.detach();
    const auto values = static_cast<std::size_t>(plain._values().numel());
    return plain._indices().nbytes() + values * element;
  }
  std::size_t bytes = element;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.stride(d) != 0 || tensor.size(d) == 0)
      bytes *= static_cast<std::size_t>(tensor.size(d));
  }
  return bytes;
}

[[noreturn]] void refuse(const std::string& text) {
  throw Error(ErrorCode::invalid_argument, text);
}

}  // namespace

void DeviceTensors::start(std::vector<Worker> workers, WorkerId self, TransferHooks hooks) {
  for (const auto& worker : workers) {
    if (worker.info.id != self) continue;
    own_ = worker.devices;
    if (own_.transfers)
      transfers_ = std::make_shared<TensorTransfers>(worker.info, std::move(hooks));
  }
  for (auto& worker : workers) add(std::move(worker));
}

void DeviceTensors::add(Worker worker) {
  auto peer =
      std::make_unique<Peer>(Peer{std::move(worker.info), std::move(worker.devices), {}, {}});
  peer->requests = map_between(own_, peer->devices, peer->info.name);
  peer->replies = map_between(peer->devices, own_, own_name_).inverse();
  peer->moves_cpu_tensors = peer->requests.moves_cpu_tensors() || peer->replies.moves_cpu_tensors();
  const std::uint32_t id = peer->info.id.value();
  const base::MutexLock lock(mutex_);
  const Peer* const known = peers_.at(id);
  if (known == nullptr || known->info.epoch <= peer->info.epoch)
    peers_.publish(id, std::move(peer));
}

std::optional<at::ScalarType> DeviceTensors::cast_of(const OutMessage& message, const Peer& peer,
                                                     const at::Tensor& tensor, c10::Device there,
                                                     bool placed) {
  if (!is_cast(tensor)) return std::nullopt;
  const std::uint16_t kind = message.frame.kind();
  if (kind == wire::kReply)
    return placed ? std::nullopt : peer.replies.cast(tensor.device(), there);
  if (!placed) return peer.requests.cast(tensor.device(), there);
  if (kind == wire::kRequest) return std::nullopt;
  // A gradient, on its way back to where its tensor was: of an argument or of a result.
  const auto cast = peer.replies.cast(tensor.device(), there);
  return cast ? cast : peer.requests.cast(tensor.device(), there);
}

std::vector<DeviceTensors::Destination> DeviceTensors::destinations(const OutMessage& message,
                                                                    const Peer& peer) const {
  const DeviceMap& map = message.frame.kind() == wire::kReply ? peer.replies : peer.requests;
  std::vector<Destination> devices;
  auto placement = message.placements.begin();
  for (std::size_t i = 0; i < message.tensors.size(); ++i) {
    while (placement != message.placements.end() && placement->tensor < i) ++placement;
    const bool placed =
        placement != message.placements.end() && placement->tensor == i && placement->wanted;
    const at::Tensor& tensor = message.tensors[i];
    if (!tensor.defined()) {
      devices.push_back({c10::Device(c10::kCPU), std::nullopt});
      continue;
    }
    const c10::Device source = tensor.device();
    const auto is = [&] { return position(message, i) + " is on device " + source.str(); };
    if (!source.is_cpu() && !source.is_cuda()) {
      refuse(is() + ", which cannot be sent: known are tensors on the CPU and on CUDA devices");
    }
    try {
      expect_sendable(tensor);
    } catch (const Error& error) {
      throw error.with_prefix(position(message, i));
    }
    if (!placed) {
      const auto destination = map.destination(source);
      if (!destination) {
        refuse(is() + ", which no device map names for " + to_string(peer.info) + "; its map is " +
               map.text() + ", of " + std::to_string(own_.count) + " CUDA devices here and " +
               std::to_string(peer.devices.count) + " there");
      }
      // Its worker may have joined an elastic world at the same time as the map's.
      static_cast<void>(existing(peer, *destination, [&] {
        return is() + ", which the device map " + map.text() + " puts on";
      }));
      devices.push_back({*destination, cast_of(message, peer, tensor, *destination, placed)});
      continue;
    }
    const c10::Device wanted = existing(peer, *placement->wanted,
                                        [&] { return position(message, i) + " is to be put on"; });
    devices.push_back({wanted, cast_of(message, peer, tensor, wanted, placed)});
  }
  return devices;
}

template <class What>
c10::Device DeviceTensors::existing(const Peer& peer, c10::Device device, const What& what) {
  device = with_index(device);
  if ((!device.is_cpu() && !device.is_cuda()) || !peer.devices.has(device)) {
    refuse(what() + " device " + device.str() + " of " + to_string(peer.info) +
           ", which has the CPU and " + std::to_string(peer.devices.count) + " CUDA devices");
  }
  return device;
}

c10::Device DeviceTensors::existing_device(const WorkerInfo& of, c10::Device device,
                                           const std::string& what) const {
  return existing(*peers_.at(of.id.value()), device, [&] { return what; });
}

// The steps of stage(), of one message.
class DeviceTensors::Staging {
 public:
  Staging(DeviceTensors& owner, const OutMessage& message, const WorkerInfo& to)
      : owner_(owner), message_(message), to_(to), there_(owner.destinations(message, peer())) {
    for (std::size_t i = 0; i < there_.size(); ++i) {
      total_ += device_bytes(tensor(i), there_[i].cast);
      if (there_[i].cast) ++cast_;
    }
    few_bytes_ = total_ <= kInlineBytes;
    directly_ = !few_bytes_ && owner_.transfers_ && peer().devices.transfers;
  }

  StagedTensors run() {
    refuse_captures();
    if (!few_bytes_ && !directly_ && any_between_devices()) owner_.say_by_host(to_);
    try {
      write_section();
      order_streams();
      for (std::size_t i = 0; i < there_.size(); ++i) staged_.copies.push_back(start_copy(i));
      for (const auto& [index, stream] : streams_) gate_->add(stream);
      const bool there_now = few_bytes_ ? gate_->opens_within(kSpin) : gate_->open();
      if (!there_now) staged_.gate = std::move(gate_);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& exception) {
      throw device_error("tensors could not be copied from device " + touched_.str(), exception);
    }
    owner_.count(true, copied_, to_.id, bytes_, cast_);
    return std::move(staged_);
  }

 private:
  [[nodiscard]] const Peer& peer() const { return *owner_.peers_.at(to_.id.value()); }
  [[nodiscard]] const at::Tensor& tensor(std::size_t i) const { return message_.tensors[i]; }
  // Whether it is on a device here or there.
  [[nodiscard]] bool is_listed(std::size_t i) const {
    return tensor(i).defined() && !(tensor(i).is_cpu() && there_[i].device.is_cpu());
  }
  [[nodiscard]] bool is_dense_between_devices(std::size_t i) const {
    return tensor(i).defined() && tensor(i).is_cuda() && !tensor(i).is_sparse() &&
           !there_[i].device.is_cpu();
  }
  [[nodiscard]] bool any_between_devices() const {
    for (std::size_t i = 0; i < there_.size(); ++i) {
      if (is_dense_between_devices(i)) return true;
    }
    return false;
  }
  [[nodiscard]] bool goes_directly(std::size_t i) const {
    return directly_ && is_dense_between_devices(i) && tensor(i).numel() > 0;
  }
  [[nodiscard]] at::Tensor as_sent(std::size_t i) const {
    return there_[i].cast ? narrowed(tensor(i), *there_[i].cast) : tensor(i);
  }

  void refuse_captures() const {
    if (!owner_.transfers_) return;
    std::set<c10::DeviceIndex> devices;
    for (const auto& each : message_.tensors) {
      if (each.defined() && each.is_cuda() && devices.insert(each.device().index()).second)
        owner_.transfers_->refuse_capture(each.device());
    }
  }

  // Writes the section of devices, and prepares transfers and copies.
  void write_section() {
    base::ByteWriter section(staged_.section);
    std::uint32_t listed = 0;
    for (std::size_t i = 0; i < there_.size(); ++i) listed += is_listed(i) ? 1 : 0;
    if (listed != 0) section.write(listed);
    for (std::size_t i = 0; i < there_.size(); ++i) {
      if (!is_listed(i)) continue;
      section.write(static_cast<std::uint32_t>(i));
      write_device(section, there_[i].device);
      write_device(section, tensor(i).device(), there_[i].cast.has_value());
      if (!tensor(i).is_cpu()) prepare(i);
    }
    staged_.few_bytes = few_bytes_;
    if (staged_.transfers) staged_.transfer_section = staged_.transfers->seal();
  }
  void prepare(std::size_t i) {
    touched_ = tensor(i).device();
    note_device_in_use(touched_);
    if (goes_directly(i)) {
      if (!staged_.transfers) staged_.transfers = owner_.transfers_->prepare();
      staged_.transfers->add(static_cast<std::uint32_t>(i), tensor(i), there_[i].device,
                             there_[i].cast);
    } else if (tensor(i).is_sparse()) {
      // Sent in full: the host cannot expand what has not arrived.
      const at::Tensor plain = as_sent(i).detach();
      prepare_part(plain._indices().contiguous());
      prepare_part(plain._values().contiguous());
    } else {
      prepare_part(as_sent(i));
    }
  }
  void prepare_part(const at::Tensor& part) {
    prepared_.push_back(prepare_copy(part));
    bytes_[touched_.index()] += prepared_.back().bytes();
    copied_ += prepared_.back().bytes();
  }

  // Few bytes are copied behind what computes them: the caller may change them by what it queues
  // next. Many are copied aside, so that they do not delay that.
  void order_streams() {
    for (const auto& [index, unused] : bytes_) {
      const c10::Device device(c10::kCUDA, index);
      touched_ = device;
      const c10::Stream current = VirtualGuardImpl(c10::kCUDA).getStream(device);
      const c10::Stream stream = few_bytes_ ? current : owner_.copy_stream(device, Direction::sent);
      order(current, stream);
      streams_.emplace(index, stream);
    }
  }

  // The tensor as it is encoded: undefined where it goes directly.
  [[nodiscard]] at::Tensor start_copy(std::size_t i) {
    if (goes_directly(i)) return {};
    if (!tensor(i).defined()) return tensor(i);
    if (tensor(i).is_cpu()) return as_sent(i);
    at::Tensor host;
    if (tensor(i).is_sparse()) {
      const at::Tensor indices = start_next_copy();
      host = make_coo(indices, start_next_copy(), tensor(i));
    } else {
      host = start_next_copy();
    }
    if (tensor(i).requires_grad()) host.set_requires_grad(true);
    return host;
  }
  [[nodiscard]] at::Tensor start_next_copy() {
    const PreparedCopy& source = prepared_[next_++];
    touched_ = source.dense.device();
    const c10::StreamGuard on(streams_.at(source.dense.device().index()));
    gate_->keep(source.dense);
    return copy_to_host(source);
  }

  DeviceTensors& owner_;
  const OutMessage& message_;
  const WorkerInfo& to_;
  const at::NoGradGuard no_grad_;
  const std::vector<Destination> there_;  // by tensor
  std::size_t total_ = 0;                 // bytes on devices
  std::size_t cast_ = 0;                  // tensors that travel as a narrower type
  bool few_bytes_ = false;
  bool directly_ = false;  // dense tensors between devices, by TensorTransfers
  // Two for a sparse tensor on a device, one for a dense one, in order.
  std::vector<PreparedCopy> prepared_;
  std::size_t next_ = 0;                           // of these
  std::size_t copied_ = 0;                         // their bytes
  std::map<c10::DeviceIndex, std::size_t> bytes_;  // the same by device
  std::map<c10::DeviceIndex, c10::Stream> streams_;
  std::unique_ptr<DeviceGate> gate_ = std::make_unique<DeviceGate>();
  c10::Device touched_{c10::kCPU};  // the last device that was asked for something
  StagedTensors staged_;
};

StagedTensors DeviceTensors::stage(const OutMessage& message, const WorkerInfo& to) {
  return Staging(*this, message, to).run();
}

// Once for this worker, or for that peer.
void DeviceTensors::say_by_host(const WorkerInfo& to) {
  const bool own = !transfers_;
  {
    base::MutexLock lock(mutex_);
    if (!said_.insert(own ? own_name_ : to.name).second) return;
  }
  const std::string line =
      "stitch: worker \"" + own_name_ + '"' + (own ? "" : " to " + to_string(to)) +
      ": tensors go from device to device through the message and host "
      "memory: " +
      (own ? TensorTransfers::why_not() : "that worker takes no part in transfers between devices");
  std::fprintf(stderr, "%s\n", line.c_str());
}

void DeviceTensors::on_transfer_frame(const InMessage& message) {
  if (!transfers_)
    throw Error(ErrorCode::protocol, "frame of device transfers, of which this worker has none");
  const auto& buffers = message.view.buffers();
  const bool beside = message.view.body().empty() && !buffers.empty();
  transfers_->on_frame(message.from,
                       beside ? std::span(static_cast<const std::byte*>(buffers[0].buffer.data),
                                          buffers[0].buffer.bytes)
                              : message.view.body());
}

// What arrives goes from the transfers to the watch: asked in that order, neither misses it.
std::size_t DeviceTensors::waiting() const {
  const std::size_t under_way = transfers_ ? transfers_->under_way() : 0;
  return under_way + watch_.waiting();
}

void DeviceTensors::stop_transfers() { transfers_->stop(); }

void DeviceTensors::on_peer_lost(const WorkerInfo& peer, const Error& why) {
  if (transfers_) transfers_->on_peer_lost(peer, why);
}

std::unique_ptr<DeviceGate> DeviceTensors::gate_of(const StreamSet& streams,
                                                   std::unique_ptr<DeviceGate> gate) {
  if (!gate) gate = std::make_unique<DeviceGate>();
  gate->add_all(streams);
  for (const auto& stream : streams.streams()) {
    const c10::Stream current = VirtualGuardImpl(c10::kCUDA).getStream(stream.device());
    if (current != stream) gate->add(current);
  }
  return gate->open() ? nullptr : std::move(gate);
}

c10::Stream DeviceTensors::copy_stream(c10::Device device, Direction direction) {
  base::MutexLock lock(mutex_);
  const auto found = copy_streams_.find({device.index(), direction});
  if (found != copy_streams_.end()) return found->second;
  constexpr bool kHighPriority = true;
  return copy_streams_
      .emplace(std::pair(device.index(), direction),
               VirtualGuardImpl(c10::kCUDA).getStreamFromGlobalPool(device, kHighPriority))
      .first->second;
}

void DeviceTensors::count(bool sent, std::size_t total, WorkerId peer,
                          const std::map<c10::DeviceIndex, std::size_t>& bytes, std::size_t cast) {
  if (bytes.empty() && cast == 0) return;
  const Path path = total <= kInlineBytes ? Path::inlined : Path::host;
  base::MutexLock lock(mutex_);
  cast_tensors_[sent] += static_cast<std::int64_t>(cast);
  for (const auto& [index, size] : bytes) {
    Count& counted = counts_[{sent, path, peer.value(), index}];
    ++counted.messages;
    counted.bytes += static_cast<std::int64_t>(size);
  }
}

void DeviceTensors::debug_info(std::map<std::string, std::int64_t>& numbers) const {
  if (own_.count > 0) numbers.emplace("gpu.waiting", static_cast<std::int64_t>(watch_.waiting()));
  if (transfers_) transfers_->debug_info(numbers);
  base::MutexLock lock(mutex_);
  numbers.emplace("gpu.sent_cast", cast_tensors_[1]);
  numbers.emplace("gpu.received_cast", cast_tensors_[0]);
  for (const auto& [key, counted] : counts_) {
    const auto& [sent, path, peer, index] = key;
    const std::string tail = std::string(path == Path::inlined ? "inline." : "host.") +
                             peers_.at(peer)->info.name + ".cuda:" + std::to_string(index);
    const std::string head = sent ? "gpu.sent_" : "gpu.received_";
    numbers.emplace(head + "messages." + tail, counted.messages);
    numbers.emplace(head + "bytes." + tail, counted.bytes);
  }
}

}  // namespace stitch::rpc
