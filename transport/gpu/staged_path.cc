// Through pinned host memory: the destination grants slots of its ring one by one, the source
// copies a chunk for each grant through a slot of its own and sends it as a DATA frame.

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "stitch/transport/gpu/device_transfers_impl.h"

namespace stitch::transport::gpu {
namespace {

constexpr std::size_t kChunk = StagingRing::kSlotBytes;
constexpr std::size_t kSlotsOfATransfer = StagingRing::kSlots / 2;

std::size_t chunks_of(std::size_t bytes) { return bytes / kChunk + (bytes % kChunk != 0 ? 1 : 0); }

}  // namespace

// --- destination ---

void DeviceTransfers::Impl::start_staged(const IncomingPtr& transfer) {
  if (transfer->bytes == 0) return finish(transfer, std::nullopt);
  if (!allocate(transfer, transfer->lane->copies_in())) {
    return finish(transfer, transfer->no_memory);
  }
  const std::size_t chunks = chunks_of(transfer->bytes);
  {
    const base::MutexLock lock(mutex_);
    transfer->chunks.assign(chunks, false);
  }
  transfer->written = 0;  // what came by another path does not count
  for (std::size_t i = 0; i < std::min(chunks, kSlotsOfATransfer); ++i) ask_for_slot(transfer);
}

void DeviceTransfers::Impl::ask_for_slot(const IncomingPtr& transfer) {
  ++transfer->asked;
  transfer->lane->incoming().take(on_lane(transfer, [self = shared_from_this(),
                                                     transfer](std::byte* slot) {
    if (slot == nullptr) {
      return self->finish(transfer, Error(ErrorCode::overloaded,
                                          "pinned host memory for device transfers cannot be "
                                          "allocated"));
    }
    {
      const base::MutexLock lock(self->mutex_);
      if (transfer->ended) {
        transfer->lane->post([lane = transfer->lane, slot] { lane->incoming().give_back(slot); });
        return;
      }
      transfer->granted.push_back(slot);
    }
    self->send_frame(transfer->from, encode(GrantFrame{transfer->id, 1}));
  }));
}

void DeviceTransfers::Impl::on_data(PeerId from, const DataFrame& frame) {
  IncomingPtr transfer;
  std::byte* slot = nullptr;
  {
    const base::MutexLock lock(mutex_);
    transfer = find_incoming(from, frame.id);
    if (transfer == nullptr || transfer->ended) return;
    const std::uint64_t chunk = frame.offset / kChunk;
    if (transfer->granted.empty() || frame.offset % kChunk != 0 ||
        chunk >= transfer->chunks.size() || transfer->chunks[chunk] ||
        frame.bytes.size() != std::min(kChunk, transfer->bytes - frame.offset)) {
      throw Error(ErrorCode::protocol, "DATA frame has " + std::to_string(frame.bytes.size()) +
                                           " bytes at " + std::to_string(frame.offset) +
                                           " of transfer " + std::to_string(frame.id) +
                                           ", which has no room for them");
    }
    transfer->chunks[chunk] = true;
    slot = transfer->granted.back();
    transfer->granted.pop_back();
  }
  std::memcpy(slot, frame.bytes.data(), frame.bytes.size());
  transfer->lane->post(on_lane(transfer, [self = shared_from_this(), transfer, slot,
                                          offset = frame.offset, bytes = frame.bytes.size()] {
    self->write_chunk(transfer, slot, offset, bytes);
  }));
}

void DeviceTransfers::Impl::write_chunk(const IncomingPtr& transfer, std::byte* slot,
                                        std::uint64_t offset, std::size_t bytes) {
  Lane& lane = *transfer->lane;
  bool ended = false;
  {
    const base::MutexLock lock(mutex_);
    ended = transfer->ended;
  }
  if (ended) return lane.incoming().give_back(slot);
  const cuda::Status status =
      lanes_.cuda().memcpy_async(static_cast<std::byte*>(transfer->memory.data) + offset, slot,
                                 bytes, cuda::kHostToDevice, lane.copies_in());
  if (status != cuda::kSuccess) {
    lane.incoming().give_back(slot);
    return finish(transfer, lane.error_of(status, "received bytes cannot be copied to it"));
  }
  lane.when_done(lane.copies_in(), on_lane(transfer, [self = shared_from_this(), transfer, &lane,
                                                      slot](cuda::Status done) {
                   lane.incoming().give_back(slot);
                   if (done != cuda::kSuccess) {
                     return self->finish(
                         transfer, lane.error_of(done, "received bytes cannot be copied to it"));
                   }
                   const std::size_t chunks = chunks_of(transfer->bytes);
                   if (++transfer->written == chunks) {
                     self->finish(transfer, std::nullopt);
                   } else if (transfer->asked < chunks) {
                     self->ask_for_slot(transfer);
                   }
                 }));
}

// --- source ---

void DeviceTransfers::Impl::on_grant(PeerId from, const GrantFrame& frame) {
  OutgoingPtr transfer;
  {
    const base::MutexLock lock(mutex_);
    transfer = find_outgoing(from, frame.id);
    if (transfer == nullptr) return;
    const std::uint64_t granted = transfer->granted + frame.chunks;
    if (!transfer->announced || transfer->path != Path::staging ||
        granted > chunks_of(transfer->source.bytes) ||
        granted > transfer->data_sent + kSlotsOfATransfer) {
      throw Error(ErrorCode::protocol, "GRANT frame of " + std::to_string(frame.chunks) +
                                           " chunks for transfer " + std::to_string(frame.id) +
                                           ", which has none left to send or no slots for them");
    }
    transfer->granted = granted;
  }
  transfer->lane->post(
      on_lane(transfer, [self = shared_from_this(), transfer, chunks = frame.chunks] {
        for (std::uint32_t i = 0; i < chunks; ++i) self->send_chunk(transfer);
      }));
}

void DeviceTransfers::Impl::send_chunk(const OutgoingPtr& transfer) {
  const std::uint64_t offset = transfer->offset;
  const std::size_t bytes = std::min(kChunk, transfer->source.bytes - offset);
  transfer->offset += bytes;
  transfer->lane->outgoing().take(on_lane(transfer, [self = shared_from_this(), transfer, offset,
                                                     bytes](std::byte* slot) {
    Lane& lane = *transfer->lane;
    bool ended = false;
    {
      const base::MutexLock lock(self->mutex_);
      ended = transfer->ended;
    }
    if (slot == nullptr) {
      return self->cancel(transfer, Error(ErrorCode::overloaded,
                                          "pinned host memory for device transfers cannot be "
                                          "allocated"));
    }
    if (ended) return lane.outgoing().give_back(slot);
    const auto* const from = static_cast<const std::byte*>(transfer->source.data) + offset;
    const cuda::Status status =
        self->lanes_.cuda().memcpy_async(slot, from, bytes, cuda::kDeviceToHost, lane.copies_out());
    if (status != cuda::kSuccess) {
      lane.outgoing().give_back(slot);
      return self->cancel(transfer, lane.error_of(status, "the bytes to send cannot be copied"));
    }
    lane.when_done(lane.copies_out(), self->on_lane(transfer, [self, transfer, &lane, slot, offset,
                                                               bytes](cuda::Status done) {
      if (done != cuda::kSuccess) {
        lane.outgoing().give_back(slot);
        return self->cancel(transfer, lane.error_of(done, "the bytes to send cannot be copied"));
      }
      base::Bytes frame = encode(DataFrame{transfer->id, offset, {slot, bytes}});
      lane.outgoing().give_back(slot);
      {
        const base::MutexLock lock(self->mutex_);
        ++transfer->data_sent;  // first: its destination may grant the next one at once
      }
      self->send_frame(transfer->to, std::move(frame));
    }));
  }));
}

}  // namespace stitch::transport::gpu
