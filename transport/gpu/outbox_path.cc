// Between processes of one host, through device memory (Path::ipc) or host memory (Path::shared):
// the source copies chunks into slots of its outbox, which the destination has mapped and copies
// out of. No device waits for another process: each side sends a frame when its host has seen the
// end of its copy.

#include <algorithm>
#include <string>
#include <utility>

#include "stitch/transport/gpu/device_transfers_impl.h"

namespace stitch::transport::gpu {
namespace {

constexpr std::size_t kSlotsOfATransfer = Outbox::kSlots / 2;

// A chunk fills a slot, but for the last one.
constexpr std::size_t chunk_bytes(Path path) { return OutboxLayout::slot_bytes(path); }
std::size_t chunks_of(Path path, std::size_t bytes) {
  const std::size_t chunk = chunk_bytes(path);
  return bytes / chunk + (bytes % chunk != 0 ? 1 : 0);
}

// One clock for all processes of a host.
std::uint64_t on_host_clock(std::chrono::steady_clock::time_point time) {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count());
}

}  // namespace

// --- destination ---

void DeviceTransfers::Impl::start_by_slots(const IncomingPtr& transfer) {
  bool mapped = false;
  Path path = Path::ipc;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->ended || !transfer->rts || !by_slots(transfer->rts->path)) return;
    path = transfer->rts->path;
    const auto at = peer_outboxes_.find({transfer->from, path, transfer->rts->pair.source_device,
                                         static_cast<std::uint32_t>(transfer->lane->device())});
    mapped = at != peer_outboxes_.end() && at->second.mapped != nullptr;
  }
  if (!mapped) return retry(transfer);
  if (!allocate(transfer, transfer->lane->copies_in())) {
    return finish(transfer, transfer->no_memory);
  }
  {
    const base::MutexLock lock(mutex_);
    transfer->chunks.assign(chunks_of(path, transfer->bytes), false);
  }
  send_frame(transfer->from, encode(GrantFrame{transfer->id, 1}));
}

void DeviceTransfers::Impl::on_slot(PeerId from, const SlotFrame& frame) {
  IncomingPtr transfer;
  const std::byte* bytes = nullptr;
  {
    const base::MutexLock lock(mutex_);
    transfer = find_incoming(from, frame.id);
    if (transfer != nullptr && !transfer->ended && transfer->rts) {
      const auto at = peer_outboxes_.find(
          {from, frame.path, frame.device, static_cast<std::uint32_t>(transfer->lane->device())});
      const std::uint64_t chunk = frame.offset / chunk_bytes(frame.path);
      if (at == peer_outboxes_.end() || transfer->rts->path != frame.path ||
          frame.device != transfer->rts->pair.source_device || frame.slot >= Outbox::kSlots ||
          frame.offset % chunk_bytes(frame.path) != 0 || chunk >= transfer->chunks.size() ||
          transfer->chunks[chunk]) {
        throw Error(ErrorCode::protocol, "SLOT frame for slot " + std::to_string(frame.slot) +
                                             " with the bytes at " + std::to_string(frame.offset) +
                                             " of transfer " + std::to_string(frame.id) +
                                             ", which has no room for them");
      }
      // Not while the break of the memory is being told: the transfer is asked for again.
      if (at->second.mapped != nullptr) {
        transfer->chunks[chunk] = true;
        bytes = at->second.mapped + frame.slot * chunk_bytes(frame.path);
      }
    }
  }
  const FreeFrame freed{frame.path, frame.id, frame.device, frame.slot};
  if (bytes == nullptr)
    return send_frame(from, encode(freed));  // it has ended here, or is asked for again
  transfer->lane->post(
      on_lane(transfer, [self = shared_from_this(), transfer, bytes, slot = frame] {
        self->copy_from_slot(transfer, bytes, slot);
      }));
}

void DeviceTransfers::Impl::copy_from_slot(const IncomingPtr& transfer, const std::byte* from,
                                           const SlotFrame& slot) {
  const FreeFrame freed{slot.path, slot.id, slot.device, slot.slot};
  Lane& lane = *transfer->lane;
  const std::uint64_t offset = slot.offset;
  bool unwanted = false;
  {
    const base::MutexLock lock(mutex_);
    unwanted = transfer->ended || transfer->retried;
  }
  if (unwanted) return send_frame(transfer->from, encode(freed));
  const std::size_t size = std::min<std::size_t>(chunk_bytes(slot.path), transfer->bytes - offset);
  const cuda::Status status = lanes_.cuda().memcpy_async(
      static_cast<std::byte*>(transfer->memory.data) + offset, from, size,
      slot.path == Path::ipc ? cuda::kDeviceToDevice : cuda::kHostToDevice, lane.copies_in());
  const auto failed = [self = shared_from_this(), transfer, &lane, path = freed.path,
                       source = freed.device](cuda::Status why) {
    const Error error = lane.error_of(why, "received bytes cannot be copied to it");
    if (lane.failure()) return self->finish(transfer, error);
    self->break_outbox(lane,
                       {transfer->from, path, source, static_cast<std::uint32_t>(lane.device())},
                       error.what());
  };
  if (status != cuda::kSuccess) {
    send_frame(transfer->from, encode(freed));
    return failed(status);
  }
  lane.when_done(lane.copies_in(),
                 on_lane(transfer, [self = shared_from_this(), transfer, failed, freed,
                                    until = slot.until](cuda::Status done) {
                   self->send_frame(transfer->from, encode(freed));
                   bool retried = false;
                   {
                     const base::MutexLock lock(self->mutex_);
                     retried = transfer->retried;
                   }
                   if (retried) return;
                   if (done != cuda::kSuccess) return failed(done);
                   // Its source may count this process as lost, and have used the slot again.
                   if (on_host_clock(Clock::now()) >= until) return self->retry(transfer);
                   if (++transfer->written == transfer->chunks.size())
                     self->finish(transfer, std::nullopt);
                 }));
}

// --- source ---

bool DeviceTransfers::Impl::still_by_slots(const Outgoing& transfer) const {
  const base::MutexLock lock(mutex_);
  return !transfer.ended && !transfer.retried;
}

void DeviceTransfers::Impl::begin_by_slots(const OutgoingPtr& transfer) {
  if (!still_by_slots(*transfer)) return;
  Path path = Path::ipc;
  {
    const base::MutexLock lock(mutex_);
    path = transfer->path;
  }
  const std::size_t chunks = chunks_of(path, transfer->source.bytes);
  for (std::size_t i = 0; i < std::min(chunks, kSlotsOfATransfer); ++i) fill_slot(transfer, path);
}

void DeviceTransfers::Impl::fill_slot(const OutgoingPtr& transfer, Path path) {
  const std::uint64_t offset = transfer->offset;
  const std::size_t bytes =
      std::min<std::size_t>(chunk_bytes(path), transfer->source.bytes - offset);
  transfer->offset += bytes;
  {
    const base::MutexLock lock(mutex_);
    if (!transfer->slot_wanted) transfer->slot_wanted = Clock::now();
  }
  transfer->lane->outbox(path).take(
      on_lane(transfer, [self = shared_from_this(), transfer, path, offset, bytes](int slot) {
        Lane& lane = *transfer->lane;
        Outbox& outbox = lane.outbox(path);
        {
          const base::MutexLock lock(self->mutex_);
          transfer->slot_wanted.reset();
        }
        if (!self->still_by_slots(*transfer)) return outbox.give_back(slot);
        const auto* const from = static_cast<const std::byte*>(transfer->source.data) + offset;
        const cuda::Status status = self->lanes_.cuda().memcpy_async(
            outbox.slot(slot), from, bytes,
            path == Path::ipc ? cuda::kDeviceToDevice : cuda::kDeviceToHost, lane.copies_out());
        const auto failed = [self, transfer, &lane, &outbox, slot](cuda::Status why) {
          outbox.give_back(slot);
          const Error error = lane.error_of(why, "the bytes to send cannot be copied");
          if (lane.failure()) return self->cancel(transfer, error);
          self->ask_to_break_outbox(transfer, error);
        };
        if (status != cuda::kSuccess) return failed(status);
        lane.when_done(
            lane.copies_out(), self->on_lane(transfer, [self, transfer, &lane, &outbox, path, slot,
                                                        offset, failed](cuda::Status done) {
              if (done != cuda::kSuccess) return failed(done);
              bool ended_now = false;
              {
                const base::MutexLock lock(self->mutex_);
                ended_now = transfer->ended || transfer->retried || self->peers_[transfer->to].lost;
                if (!ended_now)
                  self->lent_slots_[{transfer->to, path, lane.device(), slot}] = transfer->id;
              }
              if (ended_now) return outbox.give_back(slot);
              const auto now = Clock::now();
              outbox.lend(slot, now);
              self->send_frame(
                  transfer->to,
                  encode(SlotFrame{path, transfer->id, static_cast<std::uint32_t>(lane.device()),
                                   static_cast<std::uint32_t>(slot), offset,
                                   on_host_clock(now + self->options_.slot_grace)}));
            }));
      }));
}

void DeviceTransfers::Impl::on_free(PeerId from, const FreeFrame& frame) {
  OutgoingPtr transfer;
  {
    const base::MutexLock lock(mutex_);
    const auto lent = lent_slots_.find(
        {from, frame.path, static_cast<int>(frame.device), static_cast<int>(frame.slot)});
    if (lent == lent_slots_.end() || lent->second != frame.id) {
      if (closing_) return;  // close_outboxes() has it come back
      throw Error(ErrorCode::protocol, "FREE frame for slot " + std::to_string(frame.slot) +
                                           " of device " + std::to_string(frame.device) +
                                           ", which is not lent for transfer " +
                                           std::to_string(frame.id));
    }
    lent_slots_.erase(lent);
    transfer = find_outgoing(from, frame.id);
  }
  Lane& lane = lanes_.lane(static_cast<int>(frame.device));
  lane.post([self = shared_from_this(), &lane, transfer, path = frame.path,
             slot = static_cast<int>(frame.slot)] {
    if (transfer != nullptr && self->still_by_slots(*transfer) &&
        transfer->offset < transfer->source.bytes)
      self->fill_slot(transfer, path);
    lane.outbox(path).give_back(slot);
  });
}

}  // namespace stitch::transport::gpu
