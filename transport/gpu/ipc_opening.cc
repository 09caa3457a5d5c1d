// Between processes on one GPU: how memory is offered, mapped, tested and closed again. A source
// offers its outbox anew some time after it was refused or closed.

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/transport/gpu/device_transfers_impl.h"

namespace stitch::transport::gpu {
namespace {

// False: it is still mapped. Then its source is not told that it were not: it might free it.
bool unmap(const CudaApi& cuda, void* memory) {
  if (cuda.ipc_close_mem_handle(memory) == cuda::kSuccess) return true;
  (void)cuda.get_last_error();
  return false;
}

}  // namespace

PathState DeviceTransfers::Impl::ipc_state(Lane& lane, PeerId peer, std::uint32_t to_device) const {
  if (!options_.use_ipc || lane.outbox().unsupported()) return PathState::closed;
  // While peers hold all slots and do not give them back, none is waited for.
  if (lane.outbox().all_lent_since(Clock::now() - options_.stall_timeout)) return PathState::closed;
  const auto at = ipc_out_.find({peer, static_cast<std::uint32_t>(lane.device()), to_device});
  if (at == ipc_out_.end()) return PathState::untried;
  const IpcOut& memory = at->second;
  const bool again = memory.state == PathState::closed && !memory.mapped && memory.pause.over();
  return again ? PathState::untried : memory.state;
}

// Lane of the source.
void DeviceTransfers::Impl::open_ipc(Lane& lane, PeerId peer, std::uint32_t to_device) {
  const auto device = static_cast<std::uint32_t>(lane.device());
  PairName pair{device, to_device, 0};
  {
    const base::MutexLock lock(mutex_);
    if (closing_ || peers_[peer].lost || ipc_state(lane, peer, to_device) != PathState::untried)
      return;
    IpcOut& memory = ipc_out_[{peer, device, to_device}];
    memory.state = PathState::opening;
    pair.epoch = memory.offers++;
  }
  const cuda::Status status = lane.outbox().prepare(lane.copies_out());
  if (status != cuda::kSuccess) {
    const Error why = lane.error_of(status, "memory for other processes");
    const base::MutexLock lock(mutex_);
    return ipc_failed({peer, device, to_device}, why.what());
  }
  lane.outbox().add_user();
  lane.when_done(lane.copies_out(), [self = shared_from_this(), &lane, peer, pair](cuda::Status) {
    IpcOfferFrame offer{pair, {}};
    std::memcpy(offer.handle.data(), lane.outbox().handle().reserved, offer.handle.size());
    try {
      self->send_frame(peer, encode(offer));
    } catch (...) {  // without memory for it; it is offered again
      lane.outbox().remove_user();
      const base::MutexLock lock(self->mutex_);
      self->ipc_failed({peer, pair.source_device, pair.destination_device},
                       "no memory for a frame");
    }
  });
}

void DeviceTransfers::Impl::ipc_failed(const IpcKey& key, const char* why) {
  IpcOut& memory = ipc_out_[key];
  memory.state = PathState::closed;
  memory.mapped = false;
  memory.pause.failure(options_.reopen_backoff);
  path_failed(std::get<0>(key), static_cast<int>(std::get<1>(key)), Path::ipc, why);
}

void DeviceTransfers::Impl::on_ipc_offer(PeerId from, const IpcOfferFrame& frame) {
  const auto device = static_cast<int>(frame.pair.destination_device);
  if (device >= lanes_.device_count() || !options_.use_ipc) {
    send_frame(from, encode(IpcReadyFrame{frame.pair, 1, "it is not used here"}));
    return;
  }
  Lane* lane = nullptr;
  try {
    lane = &lanes_.lane(device);
  } catch (const Error& error) {  // no thread for it
    send_frame(from, encode(IpcReadyFrame{frame.pair, 1, error.what()}));
    return;
  }
  {
    const base::MutexLock lock(mutex_);
    const auto [at, first] =
        ipc_in_.try_emplace({from, frame.pair.source_device, frame.pair.destination_device});
    IpcIn& memory = at->second;
    if (!first && (!memory.closed || frame.pair.epoch <= memory.offer))
      throw Error(ErrorCode::protocol, "second IPC_OFFER frame for device " +
                                           std::to_string(frame.pair.source_device) +
                                           " to device " + std::to_string(device));
    memory.offer = frame.pair.epoch;
    memory.closed = false;
  }
  lane->post([self = shared_from_this(), lane, from, frame] { self->map_ipc(*lane, from, frame); });
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
  cuda::Status status = cuda::kLaunchFailure;
  if (!lane.failure()) status = cuda.ipc_open_mem_handle(&mapped, handle, cuda::kIpcLazyPeerAccess);
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
      const auto at = self->ipc_in_.find(key);
      gone = gone || at == self->ipc_in_.end();
      if (at != self->ipc_in_.end()) {
        at->second.closed = gone || !why.empty();
        if (!at->second.closed) at->second.mapped = static_cast<std::byte*>(mapped);
      }
    }
    if ((gone || !why.empty()) && mapped != nullptr && !unmap(self->lanes_.cuda(), mapped)) return;
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
  const IpcKey key{from, frame.pair.source_device, frame.pair.destination_device};
  {
    const base::MutexLock lock(mutex_);
    const auto at = ipc_out_.find(key);
    if (at == ipc_out_.end() || at->second.state != PathState::opening ||
        frame.pair.epoch + 1 != at->second.offers) {
      throw Error(ErrorCode::protocol, "IPC_READY frame for memory that was not offered");
    }
    if (frame.failed != 0) {
      ipc_failed(key, frame.text.c_str());
    } else {
      at->second.state = PathState::open;
      at->second.mapped = true;
    }
  }
  if (frame.failed != 0) remove_ipc_user(static_cast<int>(frame.pair.source_device));
}

void DeviceTransfers::Impl::on_ipc_closed(PeerId from, const IpcClosedFrame& frame) {
  const IpcKey key{from, frame.pair.source_device, frame.pair.destination_device};
  {
    const base::MutexLock lock(mutex_);
    const auto at = ipc_out_.find(key);
    if (at == ipc_out_.end() || !at->second.mapped) return;
    if (frame.failed != 0) {
      ipc_failed(key, frame.text.c_str());
    } else {
      at->second.state = PathState::closed;
      at->second.mapped = false;
      at->second.pause.failure(options_.reopen_backoff);
    }
  }
  remove_ipc_user(static_cast<int>(frame.pair.source_device));
}

void DeviceTransfers::Impl::ask_to_break_ipc(const OutgoingPtr& transfer, const Error& why) {
  IpcBreakFrame frame{{static_cast<std::uint32_t>(transfer->source.device),
                       static_cast<std::uint32_t>(transfer->to_device), 0},
                      why.what()};
  {
    const base::MutexLock lock(mutex_);
    const auto at =
        ipc_out_.find({transfer->to, frame.pair.source_device, frame.pair.destination_device});
    if (at == ipc_out_.end() || at->second.state != PathState::open) return;
    at->second.state = PathState::closed;  // and mapped, until the peer says otherwise
    frame.pair.epoch = at->second.offers - 1;
  }
  send_frame(transfer->to, encode(frame));
}

void DeviceTransfers::Impl::on_ipc_break(PeerId from, const IpcBreakFrame& frame) {
  const IpcKey key{from, frame.pair.source_device, frame.pair.destination_device};
  {
    const base::MutexLock lock(mutex_);
    const auto at = ipc_in_.find(key);
    if (at == ipc_in_.end() || at->second.mapped == nullptr || at->second.offer != frame.pair.epoch)
      return;  // it is closed already
  }
  Lane& lane = lanes_.lane(static_cast<int>(frame.pair.destination_device));
  lane.post([self = shared_from_this(), &lane, key, why = frame.text] {
    self->break_ipc(lane, key, why);
  });
}

void DeviceTransfers::Impl::break_ipc(Lane& lane, const IpcKey& key, const std::string& why) {
  IpcIn memory;
  std::vector<IncomingPtr> left;
  {
    const base::MutexLock lock(mutex_);
    const auto at = ipc_in_.find(key);
    if (at == ipc_in_.end() || at->second.mapped == nullptr) return;
    for (const auto& [id, transfer] : incoming_) {
      if (id.first == std::get<0>(key) && transfer->wanted && transfer->rts &&
          transfer->rts->path == Path::ipc && transfer->lane == &lane &&
          transfer->rts->pair.source_device == std::get<1>(key))
        left.push_back(transfer);
    }
    memory = std::exchange(at->second, {at->second.offer, nullptr, false});
  }
  // Each by itself: what there is no memory for must not keep the others.
  for (const IncomingPtr& transfer : left) guarded(transfer, [&] { retry(transfer); });
  try {
    unmap_ipc(key, memory, true, why);
  } catch (...) {  // its source uses it no more; it is unmapped when the peer is lost
    const base::MutexLock lock(mutex_);
    const auto at = ipc_in_.find(key);
    if (at != ipc_in_.end()) at->second.mapped = memory.mapped;
  }
}

void DeviceTransfers::Impl::remove_ipc_user(int device) {
  Lane& lane = lanes_.lane(device);
  lane.post([&lane] { lane.outbox().remove_user(); });
}

void DeviceTransfers::Impl::unmap_ipc(const IpcKey& key, const IpcIn& memory, bool tell,
                                      const std::string& why) {
  const auto& [from, source, destination] = key;
  Lane& lane = lanes_.lane(static_cast<int>(destination));
  if (!begin_call()) return;
  const std::shared_ptr<void> ended(nullptr,
                                    [self = shared_from_this()](void*) { self->end_call(); });
  IpcClosedFrame closed{
      {source, destination, memory.offer}, static_cast<std::uint8_t>(why.empty() ? 0 : 1), why};
  lane.post(
      [self = shared_from_this(), &lane, key, memory, tell, closed = std::move(closed), ended] {
        lane.when_done(lane.copies_in(), [self, key, memory, tell, closed, ended](cuda::Status) {
          if (!unmap(self->lanes_.cuda(), memory.mapped)) return;
          {
            const base::MutexLock lock(self->mutex_);
            const auto at = self->ipc_in_.find(key);
            if (at != self->ipc_in_.end()) at->second.closed = true;
          }
          if (tell) self->send_frame(std::get<0>(key), encode(closed));
        });
      });
}

// Unmaps what `peer` (none: all) has offered, once nothing reads it any more, and says so.
void DeviceTransfers::Impl::close_ipc(std::optional<PeerId> peer, bool tell) {
  std::vector<std::pair<IpcKey, IpcIn>> mapped;
  std::vector<std::pair<int, int>> lent;  // device, slot
  {
    const base::MutexLock lock(mutex_);
    for (auto& [key, memory] : ipc_in_) {
      if (memory.mapped == nullptr || (peer && std::get<0>(key) != *peer)) continue;
      mapped.emplace_back(key, memory);
      memory.mapped = nullptr;
    }
    for (const auto& [holder, device, slot] : ipc_lent_) {
      if (!peer || holder == *peer) lent.emplace_back(device, slot);
    }
    std::erase_if(ipc_lent_, [&](const auto& each) { return !peer || std::get<0>(each) == *peer; });
  }
  // A peer whose connection broke may live, and still copy out of its slots, as may the peers of a
  // worker that shuts down, which reads no FREE any more: they stay lent, and no transfer of any
  // worker of the process is to wait for them.
  for (const auto& [device, slot] : lent) {
    Lane& lane = lanes_.lane(device);
    lane.post([&lane, slot = slot] { lane.outbox().lend(slot, Clock::time_point::min()); });
    lanes_.connector().post_at(base::deadline_after(options_.slot_grace), [&lane, slot = slot] {
      lane.post([&lane, slot] { lane.outbox().give_back(slot); });
    });
  }
  for (const auto& [key, memory] : mapped) unmap_ipc(key, memory, tell, "");
}

}  // namespace stitch::transport::gpu
