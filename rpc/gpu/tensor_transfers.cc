#include "stitch/rpc/gpu/tensor_transfers.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "stitch/base/printable.h"
#include "stitch/rpc/future/current_streams.h"
#include "stitch/rpc/gpu/device_gate.h"
#include "stitch/rpc/gpu/sent_memory.h"
#include "stitch/transport/gpu/gpu_libraries.h"
#include "stitch/transport/gpu/lanes.h"

namespace stitch::rpc {

namespace {

using transport::gpu::DeviceMemory;
using transport::gpu::DeviceTransfers;
using transport::gpu::GpuLibraries;
using transport::gpu::Lanes;
using transport::gpu::PeerId;

// The memory of the source itself, if nothing else refers to it, and nothing that its stream was
// given behind the call still reads it: the receiver may change it.
std::optional<c10::Storage> given_away(const std::shared_ptr<const void>& kept,
                                       std::uint64_t bytes) {
  const auto& sent = *static_cast<const SentMemory*>(kept.get());
  const c10::Storage& storage = sent.bytes.storage();
  if (storage.use_count() != 1 || storage.nbytes() != bytes || sent.bytes.storage_offset() != 0)
    return std::nullopt;
  // Memory of from_blob() and the like belongs to who made it.
  if (storage.data_ptr().get_deleter() != c10::GetAllocator(c10::kCUDA)->raw_deleter())
    return std::nullopt;
  if (!sent.stream_is_idle()) return std::nullopt;
  return storage;
}

// Memory of libtorch that is used on `stream` first.
c10::Storage allocate_on(const DeviceBridge& bridge, int index, std::size_t bytes,
                         transport::gpu::cuda::Stream stream) {
  const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
  try {
    const c10::StreamGuard on(bridge.from_raw(stream, device.index()));
    const at::Tensor memory =
        at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions(at::kByte).device(device));
    return memory.storage();
  } catch (const std::exception& exception) {
    throw device_error("device " + device.str(), exception);
  }
}

}  // namespace

// The transfers of one message until the last has ended.
struct TensorTransfers::Arriving {
  explicit Arriving(const std::shared_ptr<Counter>& messages) : on_its_way(messages) {}

  const OnItsWay on_its_way;
  base::Mutex mutex;
  std::size_t missing STITCH_GUARDED_BY(mutex) = 0;
  std::optional<Error> error STITCH_GUARDED_BY(mutex);
  std::vector<c10::Storage> memory STITCH_GUARDED_BY(mutex);
  std::vector<std::shared_ptr<void>> acknowledgments STITCH_GUARDED_BY(mutex);
  Arrived then STITCH_GUARDED_BY(mutex);

  void put(std::size_t transfer, const c10::Storage& storage) {
    const base::MutexLock lock(mutex);
    memory[transfer] = storage;
  }
  // The last one calls `then`, which does not outlive that: it may own the worker, which must not
  // end on a lane.
  void end(std::optional<Error> why, std::shared_ptr<void> acknowledgment) {
    Arrived call;
    std::vector<c10::Storage> all;
    auto kept = std::make_shared<std::vector<std::shared_ptr<void>>>();
    {
      const base::MutexLock lock(mutex);
      if (why && !error) error = std::move(why);
      acknowledgments.push_back(std::move(acknowledgment));
      why = error;
      if (--missing > 0) return;
      call = std::move(then);
      all = std::move(memory);
      kept->swap(acknowledgments);
    }
    if (why) all.clear();
    if (call) call(std::move(all), why, std::move(kept));
  }
  // `then` is not called any more.
  void drop() {
    Arrived unused;
    const base::MutexLock lock(mutex);
    std::swap(unused, then);
  }
};

bool TensorTransfers::possible() noexcept {
  return cuda_device_count() > 0 && device_bridge() != nullptr &&
         GpuLibraries::of_process().cuda() != nullptr;
}

std::string TensorTransfers::why_not() {
  if (device_bridge() == nullptr)
    return "the program does not link stitch::torch_cuda, the bridge to libtorch's CUDA streams";
  return GpuLibraries::of_process().why_no_cuda();
}

TensorTransfers::TensorTransfers(const WorkerInfo& self, TransferHooks hooks)
    : self_(self),
      hooks_(std::move(hooks)),
      bridge_(*device_bridge()),
      cuda_(*GpuLibraries::of_process().cuda()) {
  DeviceTransfers::Options options;
  options.self = peer_id(self_);
  options.lanes = Lanes::of_process();
  const auto may_use = [&](const char* path) {
    return hooks_.paths.empty() ||
           std::find(hooks_.paths.begin(), hooks_.paths.end(), path) != hooks_.paths.end();
  };
  options.use_nccl = may_use("nccl");
  options.nccl_between_hosts = hooks_.unsealed;
  options.use_peer = may_use("peer");
  if (bridge_.identity != nullptr) options.identity = bridge_.identity(self_.id.value());
  options.send_frame = [this](PeerId to, base::Bytes frame) {
    hooks_.send_frame(worker_of(to), std::move(frame));
  };
  options.allocate = [this](int device, std::size_t bytes, transport::gpu::cuda::Stream stream) {
    const c10::Storage memory = allocate_on(bridge_, device, bytes, stream);
    return DeviceMemory{const_cast<void*>(memory.data_ptr().get()),
                        std::make_shared<c10::Storage>(memory)};
  };
  options.why_no_nccl = GpuLibraries::of_process().why_no_nccl();
  options.say = [this](PeerId to, const std::string& text) {
    std::fprintf(stderr, "stitch: %s to %s: %s\n", to_string(self_).c_str(),
                 to_string(worker_of(to)).c_str(), base::printable(text).c_str());
  };
  transfers_ = std::make_unique<DeviceTransfers>(std::move(options));
}

PeerId TensorTransfers::peer_id(const WorkerInfo& worker) {
  const base::MutexLock lock(mutex_);
  const auto [at, added] = ids_.try_emplace({worker.id, worker.epoch}, workers_.size() + 1);
  if (added) workers_.push_back(worker);
  return at->second;
}

WorkerInfo TensorTransfers::worker_of(PeerId peer) const {
  const base::MutexLock lock(mutex_);
  return workers_.at(peer - 1);
}

std::shared_ptr<OutgoingTransfers> TensorTransfers::prepare() {
  return std::make_shared<OutgoingTransfers>(*this);
}

void TensorTransfers::receive(const WorkerInfo& from, const TransferSection& section,
                              Arrived then) {
  const PeerId peer = peer_id(from);
  const auto arriving = std::make_shared<Arriving>(messages_);
  {
    const base::MutexLock lock(arriving->mutex);
    arriving->missing = section.transfers.size();
    arriving->memory.resize(section.transfers.size());
    arriving->then = std::move(then);
  }
  std::size_t asked = 0;
  try {
    for (; asked < section.transfers.size(); ++asked)
      receive_one(from, peer, section.transfers[asked], asked, arriving);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::protocol) {
      arriving->drop();
      throw;
    }
    for (; asked < section.transfers.size(); ++asked) {
      transfers_->refuse(peer, section.transfers[asked].id, error);  // their source must not wait
      arriving->end(error, nullptr);
    }
  }
}

void TensorTransfers::refuse(const WorkerInfo& from, const TransferSection& section,
                             const Error& why) {
  const PeerId peer = peer_id(from);
  for (const auto& each : section.transfers) transfers_->refuse(peer, each.id, why);
}

void TensorTransfers::receive_one(const WorkerInfo& from, PeerId peer,
                                  const TransferSection::Transfer& transfer, std::size_t place,
                                  const std::shared_ptr<Arriving>& arriving) {
  note_device_in_use(transfer.to);
  const std::string what = std::to_string(transfer.bytes) +
                           " bytes of its tensors did not arrive on device " + transfer.to.str() +
                           " of " + to_string(self_) + " from " + to_string(from);
  transfers_->receive(
      peer, transfer.id, transfer.to.index(), transfer.bytes,
      [bridge = &bridge_, arriving, place](int device, std::size_t bytes,
                                           transport::gpu::cuda::Stream stream) {
        const c10::Storage memory = allocate_on(*bridge, device, bytes, stream);
        arriving->put(place, memory);
        return DeviceMemory{const_cast<void*>(memory.data_ptr().get()),
                            std::make_shared<c10::Storage>(memory)};
      },
      [arriving, what](std::optional<Error> error, std::shared_ptr<void> acknowledgment) {
        if (error) error = error->with_prefix(what);
        arriving->end(std::move(error), std::move(acknowledgment));
      },
      [arriving, place, bytes = transfer.bytes](const std::shared_ptr<const void>& kept) {
        const auto storage = given_away(kept, bytes);
        if (storage) arriving->put(place, *storage);
        return storage.has_value();
      });
}

void TensorTransfers::on_frame(const WorkerInfo& from, std::span<const std::byte> frame) {
  transfers_->on_frame(peer_id(from), frame);
}

void TensorTransfers::on_peer_lost(const WorkerInfo& peer, const Error& why) {
  transfers_->on_peer_lost(peer_id(peer), why);
}

void TensorTransfers::stop() { transfers_->shutdown(std::chrono::steady_clock::now()); }

std::size_t TensorTransfers::under_way() const {
  return messages_->load() + transfers_->under_way();
}

void TensorTransfers::debug_info(std::map<std::string, std::int64_t>& numbers) const {
  const auto counters = transfers_->counters();
  for (const auto& each : counters.paths) {
    const std::string tail = std::string(short_name(each.path)) + '.' + worker_of(each.peer).name +
                             ".cuda:" + std::to_string(each.device);
    const std::string head = each.sent ? "gpu.sent_" : "gpu.received_";
    numbers[head + "messages." + tail] += static_cast<std::int64_t>(each.messages);
    numbers[head + "bytes." + tail] += static_cast<std::int64_t>(each.bytes);
  }
  for (const auto& each : counters.failures) {
    numbers["gpu.path_failures." + std::string(short_name(each.path)) + '.' +
            worker_of(each.peer).name + ".cuda:" + std::to_string(each.device)] +=
        static_cast<std::int64_t>(each.failures);
  }
  numbers.emplace("gpu.nccl_version", counters.nccl_version);
  for (const auto& [peer, version] : counters.peers_nccl)
    numbers["gpu.nccl_version." + worker_of(peer).name] = version;
  for (int device = 0; device < cuda_device_count(); ++device) {
    const std::string tail = ".cuda:" + std::to_string(device);
    const auto is_in = [&](const std::vector<int>& devices) {
      return std::find(devices.begin(), devices.end(), device) == devices.end() ? 0 : 1;
    };
    numbers.emplace("gpu.nccl_given_up" + tail, is_in(counters.without_nccl));
    numbers.emplace("gpu.held" + tail, is_in(counters.held));
    numbers.emplace("gpu.lost" + tail, is_in(counters.lost));
    const auto found = counters.communicators.find(device);
    numbers.emplace("gpu.communicators" + tail, found == counters.communicators.end()
                                                    ? 0
                                                    : static_cast<std::int64_t>(found->second));
  }
  numbers.emplace("gpu.paths_paused", static_cast<std::int64_t>(counters.paused));
  numbers.emplace("gpu.transfers_sending", static_cast<std::int64_t>(counters.outgoing));
  numbers.emplace("gpu.transfers_receiving", static_cast<std::int64_t>(counters.incoming));
  numbers.emplace("gpu.transfer_retries", static_cast<std::int64_t>(counters.retries));
  numbers.emplace("gpu.broken_communicators", static_cast<std::int64_t>(counters.breaks));
}

}  // namespace stitch::rpc
