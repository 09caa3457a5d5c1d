// Between processes on one GPU: the source copies chunks into slots of its outbox, which the
// destination has mapped and copies out of. No device waits for another process: each side sends a
// frame when its host has seen the end of its copy.

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "stitch/transport/gpu/device_transfers_impl.h"

namespace stitch::transport::gpu {
namespace {

constexpr std::size_t kChunk = IpcOutbox::kSlotBytes;
constexpr std::size_t kSlotsOfATransfer = IpcOutbox::kSlots / 2;
constexpr std::chrono::seconds kSlotGrace(10);

std::size_t chunks_of(std::size_t bytes) { return bytes / kChunk + (bytes % kChunk != 0 ? 1 : 0); }

PairName name_of(std::uint32_t source, std::uint32_t destination) {
  return {source, destination, 0};
}

}  // namespace

// --- opening ---

PathState DeviceTransfers::Impl::ipc_state(PeerId peer, std::uint32_t device,
                                           std::uint32_t to_device) const {
  if (!options_.use_ipc) return PathState::closed;
  const auto at = ipc_out_.find({peer, device, to_device});
  return at == ipc_out_.end() ? PathState::untried : at->second;
}

// Lane of the source.
void DeviceTransfers::Impl::open_ipc(Lane& lane, PeerId peer, std::uint32_t to_device) {
  const auto device = static_cast<std::uint32_t>(lane.device());
  {
    const base::MutexLock lock(mutex_);
    if (closing_ || peers_[peer].lost ||
        !ipc_out_.emplace(std::tuple(peer, device, to_device), PathState::opening).second)
      return;
  }
  const cuda::Status status = lane.outbox().prepare(lane.copies_out());
  if (status != cuda::kSuccess) {
    (void)lane.error_of(status, "memory for other processes");
    const base::MutexLock lock(mutex_);
    ipc_out_[{peer, device, to_device}] = PathState::closed;
    return;
  }
  lane.outbox().add_user();
  lane.when_done(
      lane.copies_out(), [self = shared_from_this(), &lane, peer, device, to_device](cuda::Status) {
        IpcOfferFrame offer{name_of(device, to_device), {}};
        std::memcpy(offer.handle.data(), lane.outbox().handle().reserved, offer.handle.size());
        self->send_frame(peer, encode(offer));
      });
}

void DeviceTransfers::Impl::on_ipc_offer(PeerId from, const IpcOfferFrame& frame) {
  const auto device = static_cast<int>(frame.pair.destination_device);
  if (device >= lanes_.device_count() || !options_.use_ipc) {
    send_frame(from, encode(IpcReadyFrame{frame.pair, 1, "it is not used here"}));
    return;
  }
  {
    const base::MutexLock lock(mutex_);
    if (!ipc_offered_.insert({from, frame.pair.source_device, frame.pair.destination_device})
             .second)
      throw Error(ErrorCode::protocol, "second IPC_OFFER frame for device " +
                                           std::to_string(frame.pair.source_device) +
                                           " to device " + std::to_string(device));
  }
  Lane& lane = lanes_.lane(device);
  lane.post([self = shared_from_this(), &lane, from, frame] { self->map_ipc(lane, from, frame); });
}

// Lane of the destination: maps the memory, and looks whether it is the right one.
void DeviceTransfers::Impl::map_ipc(Lane& lane, PeerId from, const IpcOfferFrame& frame) {
  const IpcKey key{from, frame.pair.source_device, frame.pair.destination_device};
  const CudaApi& cuda = lanes_.cuda();
  cuda::IpcMemHandle handle{};
  std::memcpy(handle.reserved, frame.handle.data(), frame.handle.size());
  void* mapped = nullptr;
  {
    const base::MutexLock lock(mutex_);
    if (closing_ || peers_[from].lost) return;
  }
  void* host = nullptr;
  cuda::Status status = cuda.ipc_open_mem_handle(&mapped, handle, cuda::kIpcLazyPeerAccess);
  if (status == cuda::kSuccess)
    status = cuda.host_alloc(&host, IpcOutbox::kPatternBytes, cuda::kHostAllocPortable);
  if (status == cuda::kSuccess) {
    std::memset(host, 0, IpcOutbox::kPatternBytes);
    status = cuda.memcpy_async(host, static_cast<std::byte*>(mapped) + IpcOutbox::kPatternAt,
                               IpcOutbox::kPatternBytes, cuda::kDeviceToHost, lane.copies_in());
  }
  const auto end = [self = shared_from_this(), from, key, pair = frame.pair, mapped,
                    host](std::string why) {
    if (host != nullptr) (void)self->lanes_.cuda().free_host(host);
    bool gone = false;
    {
      const base::MutexLock lock(self->mutex_);
      gone = self->closing_ || self->peers_[from].lost.has_value();
      if (why.empty() && !gone) self->ipc_in_.emplace(key, static_cast<std::byte*>(mapped));
    }
    if ((gone || !why.empty()) && mapped != nullptr)
      (void)self->lanes_.cuda().ipc_close_mem_handle(mapped);
    if (gone && why.empty()) why = "it is not wanted any more";
    const auto failed = static_cast<std::uint8_t>(why.empty() ? 0 : 1);
    self->send_frame(from, encode(IpcReadyFrame{pair, failed, std::move(why)}));
  };
  if (status != cuda::kSuccess) return end(lane.error_of(status, "IPC").what());
  lane.when_done(lane.copies_in(), [end, host, &lane](cuda::Status done) {
    if (done != cuda::kSuccess) return end(lane.error_of(done, "IPC").what());
    const auto* const bytes = static_cast<const unsigned char*>(host);
    for (std::size_t i = 0; i < IpcOutbox::kPatternBytes; ++i) {
      if (bytes[i] != IpcOutbox::pattern(i)) return end("mapped memory has other bytes");
    }
    end("");
  });
}

void DeviceTransfers::Impl::on_ipc_ready(PeerId from, const IpcReadyFrame& frame) {
  {
    const base::MutexLock lock(mutex_);
    const auto at = ipc_out_.find({from, frame.pair.source_device, frame.pair.destination_device});
    if (at == ipc_out_.end() || at->second != PathState::opening) {
      throw Error(ErrorCode::protocol, "IPC_READY frame for memory that was not offered");
    }
    at->second = frame.failed != 0 ? PathState::closed : PathState::open;
  }
  if (frame.failed != 0) remove_ipc_user(static_cast<int>(frame.pair.source_device));
}

void DeviceTransfers::Impl::on_ipc_closed(PeerId from, const IpcClosedFrame& frame) {
  {
    const base::MutexLock lock(mutex_);
    const auto at = ipc_out_.find({from, frame.pair.source_device, frame.pair.destination_device});
    if (at == ipc_out_.end() || at->second != PathState::open) return;
    at->second = PathState::closed;
  }
  remove_ipc_user(static_cast<int>(frame.pair.source_device));
}

void DeviceTransfers::Impl::remove_ipc_user(int device) {
  Lane& lane = lanes_.lane(device);
  lane.post([&lane] { lane.outbox().remove_user(); });
}

// Unmaps what `peer` (none: all) has offered, once nothing reads it any more, and says so.
void DeviceTransfers::Impl::close_ipc(std::optional<PeerId> peer, bool tell) {
  std::vector<std::pair<IpcKey, std::byte*>> closed;
  std::vector<std::pair<int, int>> lent;  // device, slot
  {
    const base::MutexLock lock(mutex_);
    for (auto at = ipc_in_.begin(); at != ipc_in_.end();) {
      if (peer && std::get<0>(at->first) != *peer) {
        ++at;
        continue;
      }
      closed.emplace_back(*at);
      at = ipc_in_.erase(at);
    }
    for (auto at = ipc_lent_.begin(); peer && at != ipc_lent_.end();) {
      if (std::get<0>(*at) != *peer) {
        ++at;
        continue;
      }
      lent.emplace_back(std::get<1>(*at), std::get<2>(*at));
      at = ipc_lent_.erase(at);
    }
  }
  // A peer whose connection broke may live, and still copy out of its slots.
  for (const auto& [device, slot] : lent) {
    Lane& lane = lanes_.lane(device);
    lanes_.connector().post_at(Clock::now() + kSlotGrace, [&lane, slot = slot] {
      lane.post([&lane, slot] { lane.outbox().give_back(slot); });
    });
  }
  for (const auto& [key, mapped] : closed) {
    const auto& [from, source, destination] = key;
    Lane& lane = lanes_.lane(static_cast<int>(destination));
    if (!begin_call()) continue;
    lane.post([self = shared_from_this(), &lane, from = from, pair = name_of(source, destination),
               mapped = mapped, tell] {
      lane.when_done(lane.copies_in(), [self, from, pair, mapped, tell](cuda::Status) {
        (void)self->lanes_.cuda().ipc_close_mem_handle(mapped);
        if (tell) self->send_frame(from, encode(IpcClosedFrame{pair}));
        self->end_call();
      });
    });
  }
}

// --- destination ---

void DeviceTransfers::Impl::start_ipc(const IncomingPtr& transfer) {
  bool mapped = false;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->ended || !transfer->rts) return;
    mapped = ipc_in_.contains({transfer->from, transfer->rts->pair.source_device,
                               static_cast<std::uint32_t>(transfer->lane->device())});
  }
  if (!mapped) return retry(transfer);
  if (!allocate(transfer, transfer->lane->copies_in())) {
    return finish(transfer, transfer->no_memory);
  }
  {
    const base::MutexLock lock(mutex_);
    transfer->chunks.assign(chunks_of(transfer->bytes), false);
  }
  send_frame(transfer->from, encode(GrantFrame{transfer->id, 1}));
}

void DeviceTransfers::Impl::on_ipc_slot(PeerId from, const IpcSlotFrame& frame) {
  IncomingPtr transfer;
  const std::byte* bytes = nullptr;
  {
    const base::MutexLock lock(mutex_);
    transfer = find_incoming(from, frame.id);
    if (transfer != nullptr && !transfer->ended && transfer->rts) {
      const auto at =
          ipc_in_.find({from, frame.device, static_cast<std::uint32_t>(transfer->lane->device())});
      const std::uint64_t chunk = frame.offset / kChunk;
      if (at == ipc_in_.end() || transfer->rts->path != Path::ipc ||
          frame.slot >= IpcOutbox::kSlots || frame.offset % kChunk != 0 ||
          chunk >= transfer->chunks.size() || transfer->chunks[chunk]) {
        throw Error(ErrorCode::protocol, "SLOT frame for slot " + std::to_string(frame.slot) +
                                             " with the bytes at " + std::to_string(frame.offset) +
                                             " of transfer " + std::to_string(frame.id) +
                                             ", which has no room for them");
      }
      transfer->chunks[chunk] = true;
      bytes = at->second + frame.slot * kChunk;
    }
  }
  const IpcFreeFrame freed{frame.id, frame.device, frame.slot};
  if (bytes == nullptr) return send_frame(from, encode(freed));  // it has ended here
  transfer->lane->post(
      on_lane(transfer, [self = shared_from_this(), transfer, bytes, freed, offset = frame.offset] {
        self->copy_from_slot(transfer, bytes, offset, freed);
      }));
}

void DeviceTransfers::Impl::copy_from_slot(const IncomingPtr& transfer, const std::byte* bytes,
                                           std::uint64_t offset, const IpcFreeFrame& freed) {
  Lane& lane = *transfer->lane;
  bool ended = false;
  {
    const base::MutexLock lock(mutex_);
    ended = transfer->ended;
  }
  if (ended) return send_frame(transfer->from, encode(freed));
  const std::size_t size = std::min<std::size_t>(kChunk, transfer->bytes - offset);
  const cuda::Status status =
      lanes_.cuda().memcpy_async(static_cast<std::byte*>(transfer->memory.data) + offset, bytes,
                                 size, cuda::kDeviceToDevice, lane.copies_in());
  if (status != cuda::kSuccess) {
    send_frame(transfer->from, encode(freed));
    return finish(transfer, lane.error_of(status, "received bytes cannot be copied to it"));
  }
  lane.when_done(lane.copies_in(), on_lane(transfer, [self = shared_from_this(), transfer, &lane,
                                                      freed](cuda::Status done) {
                   self->send_frame(transfer->from, encode(freed));
                   if (done != cuda::kSuccess) {
                     return self->finish(
                         transfer, lane.error_of(done, "received bytes cannot be copied to it"));
                   }
                   if (++transfer->written == transfer->chunks.size())
                     self->finish(transfer, std::nullopt);
                 }));
}

// --- source ---

void DeviceTransfers::Impl::begin_ipc(const OutgoingPtr& transfer) {
  const std::size_t chunks = chunks_of(transfer->source.bytes);
  for (std::size_t i = 0; i < std::min(chunks, kSlotsOfATransfer); ++i) fill_slot(transfer);
}

void DeviceTransfers::Impl::fill_slot(const OutgoingPtr& transfer) {
  const std::uint64_t offset = transfer->offset;
  const std::size_t bytes = std::min<std::size_t>(kChunk, transfer->source.bytes - offset);
  transfer->offset += bytes;
  transfer->lane->outbox().take(on_lane(transfer, [self = shared_from_this(), transfer, offset,
                                                   bytes](int slot) {
    Lane& lane = *transfer->lane;
    bool ended = false;
    {
      const base::MutexLock lock(self->mutex_);
      ended = transfer->ended;
    }
    if (ended) return lane.outbox().give_back(slot);
    const auto* const from = static_cast<const std::byte*>(transfer->source.data) + offset;
    const cuda::Status status = self->lanes_.cuda().memcpy_async(
        lane.outbox().slot(slot), from, bytes, cuda::kDeviceToDevice, lane.copies_out());
    if (status != cuda::kSuccess) {
      lane.outbox().give_back(slot);
      return self->cancel(transfer, lane.error_of(status, "the bytes to send cannot be copied"));
    }
    lane.when_done(lane.copies_out(), self->on_lane(transfer, [self, transfer, &lane, slot,
                                                               offset](cuda::Status done) {
      if (done != cuda::kSuccess) {
        lane.outbox().give_back(slot);
        return self->cancel(transfer, lane.error_of(done, "the bytes to send cannot be copied"));
      }
      bool ended_now = false;
      {
        const base::MutexLock lock(self->mutex_);
        ended_now = transfer->ended || self->peers_[transfer->to].lost.has_value();
        if (!ended_now) self->ipc_lent_.emplace(transfer->to, lane.device(), slot);
      }
      if (ended_now) return lane.outbox().give_back(slot);
      self->send_frame(transfer->to,
                       encode(IpcSlotFrame{transfer->id, static_cast<std::uint32_t>(lane.device()),
                                           static_cast<std::uint32_t>(slot), offset}));
    }));
  }));
}

void DeviceTransfers::Impl::on_ipc_free(PeerId from, const IpcFreeFrame& frame) {
  OutgoingPtr transfer;
  {
    const base::MutexLock lock(mutex_);
    if (ipc_lent_.erase({from, static_cast<int>(frame.device), static_cast<int>(frame.slot)}) ==
        0) {
      throw Error(ErrorCode::protocol, "FREE frame for slot " + std::to_string(frame.slot) +
                                           " of device " + std::to_string(frame.device) +
                                           ", which is not lent");
    }
    transfer = find_outgoing(from, frame.id);
  }
  Lane& lane = lanes_.lane(static_cast<int>(frame.device));
  lane.post([self = shared_from_this(), &lane, transfer, slot = static_cast<int>(frame.slot)] {
    if (transfer != nullptr && transfer->offset < transfer->source.bytes) self->fill_slot(transfer);
    lane.outbox().give_back(slot);
  });
}

}  // namespace stitch::transport::gpu
