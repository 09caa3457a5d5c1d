#include "stitch/transport/gpu/staging.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "stitch/transport/gpu/transfers.h"

namespace stitch::transport::gpu {
namespace {

constexpr std::size_t kChunk = StagingRing::kSlotBytes;
constexpr std::size_t kSlotsOfATransfer = StagingRing::kSlots / 2;

std::size_t chunks_of(std::size_t bytes) { return bytes / kChunk + (bytes % kChunk != 0 ? 1 : 0); }

Error no_pinned_memory() {
  return Error(ErrorCode::overloaded,
               "pinned host memory for device transfers cannot be allocated");
}

}  // namespace

void StagingRing::take(Taken taken) {
  takers_.push_back(std::move(taken));
  serve();
}

void StagingRing::give_back(std::byte* slot) {
  free_.push_back(slot);
  serve();
}

// Callbacks may take and give back; only the outermost call goes round.
void StagingRing::serve() {
  if (serving_) return;
  serving_ = true;
  while (!takers_.empty()) {
    if (memory_ == nullptr) {
      void* memory = nullptr;
      if (cuda_.host_alloc(&memory, kSlots * kSlotBytes, cuda::kHostAllocPortable) ==
          cuda::kSuccess) {
        memory_ = static_cast<std::byte*>(memory);
        for (std::size_t i = kSlots; i > 0; --i) free_.push_back(memory_ + (i - 1) * kSlotBytes);
      } else {
        (void)cuda_.get_last_error();
      }
    }
    if (memory_ != nullptr && free_.empty()) break;
    Taken taken = std::move(takers_.front());
    takers_.pop_front();
    std::byte* slot = nullptr;
    if (memory_ != nullptr) {
      slot = free_.back();
      free_.pop_back();
    }
    taken(slot);
  }
  serving_ = false;
}

void StagingRing::free_memory() {
  if (memory_ != nullptr) (void)cuda_.free_host(memory_);
  takers_.clear();
}

// --- Staging at the destination ---

void Staging::start(const IncomingPtr& transfer) {
  if (transfer->bytes == 0) return transfers_.incoming().finish(transfer, std::nullopt);
  if (!transfers_.incoming().allocate(transfer, transfer->lane->copies_in()))
    return transfers_.incoming().finish(transfer, transfer->no_memory);
  const std::size_t chunks = chunks_of(transfer->bytes);
  {
    const base::MutexLock lock(mutex_);
    transfer->staged.chunks.assign(chunks, false);
  }
  for (std::size_t i = 0; i < std::min(chunks, kSlotsOfATransfer); ++i) ask_for_slot(transfer);
}

void Staging::ask_for_slot(const IncomingPtr& transfer) {
  ++transfer->staged.asked;
  transfer->lane->incoming().take([this, self = transfers_.self(), transfer](std::byte* slot) {
    if (slot == nullptr) return transfers_.incoming().finish(transfer, no_pinned_memory());
    {
      const base::MutexLock lock(mutex_);
      if (transfer->staged.over) {
        transfer->lane->post([lane = transfer->lane, slot] { lane->incoming().give_back(slot); });
        return;
      }
      transfer->staged.granted.push_back(slot);
    }
    transfers_.send_frame(transfer->from, encode(GrantFrame{transfer->id, 1}));
  });
}

void Staging::release(Incoming& transfer) {
  const base::MutexLock lock(mutex_);
  transfer.staged.over = true;
  for (std::byte* const slot : transfer.staged.granted) {
    transfer.lane->post([lane = transfer.lane, slot] { lane->incoming().give_back(slot); });
  }
  transfer.staged.granted.clear();
}

void Staging::on_data(const IncomingPtr& transfer, const DataFrame& frame) {
  std::byte* slot = nullptr;
  {
    const base::MutexLock lock(mutex_);
    Received& staged = transfer->staged;
    if (staged.over) return;
    const std::uint64_t chunk = frame.offset / kChunk;
    if (staged.granted.empty() || frame.offset % kChunk != 0 || chunk >= staged.chunks.size() ||
        staged.chunks[chunk] ||
        frame.bytes.size() != std::min(kChunk, transfer->bytes - frame.offset)) {
      throw Error(ErrorCode::protocol, "DATA frame has " + std::to_string(frame.bytes.size()) +
                                           " bytes at " + std::to_string(frame.offset) +
                                           " of transfer " + std::to_string(frame.id) +
                                           ", which has no room for them");
    }
    staged.chunks[chunk] = true;
    slot = staged.granted.back();
    staged.granted.pop_back();
  }
  std::memcpy(slot, frame.bytes.data(), frame.bytes.size());
  transfer->lane->post(
      [this, self = transfers_.self(), transfer, slot, offset = frame.offset,
       bytes = frame.bytes.size()] { write_chunk(transfer, slot, offset, bytes); });
}

void Staging::write_chunk(const IncomingPtr& transfer, std::byte* slot, std::uint64_t offset,
                          std::size_t bytes) {
  Lane& lane = *transfer->lane;
  bool over = false;
  {
    const base::MutexLock lock(mutex_);
    over = transfer->staged.over;
  }
  if (over) return lane.incoming().give_back(slot);
  const auto failed = [this, transfer, &lane](cuda::Status status) {
    transfers_.incoming().finish(transfer,
                                 lane.error_of(status, "received bytes cannot be copied to it"));
  };
  const cuda::Status status = transfers_.lanes().cuda().memcpy_async(
      static_cast<std::byte*>(transfer->memory.data) + offset, slot, bytes, cuda::kHostToDevice,
      lane.copies_in());
  if (status != cuda::kSuccess) {
    lane.incoming().give_back(slot);
    return failed(status);
  }
  lane.when_done(lane.copies_in(), [this, self = transfers_.self(), transfer, &lane, slot,
                                    failed](cuda::Status done) {
    lane.incoming().give_back(slot);
    if (done != cuda::kSuccess) return failed(done);
    const std::size_t chunks = chunks_of(transfer->bytes);
    if (++transfer->staged.written == chunks) {
      transfers_.incoming().finish(transfer, std::nullopt);
    } else if (transfer->staged.asked < chunks) {
      ask_for_slot(transfer);
    }
  });
}

// --- Staging at the source ---

void Staging::on_grant(const OutgoingPtr& transfer, const GrantFrame& frame) {
  {
    const base::MutexLock lock(mutex_);
    Sent& staged = transfer->staged;
    const std::uint64_t granted = staged.granted + frame.chunks;
    if (granted > chunks_of(transfer->source.bytes) ||
        granted > staged.data_sent + kSlotsOfATransfer) {
      throw Error(ErrorCode::protocol, "GRANT frame of " + std::to_string(frame.chunks) +
                                           " chunks for transfer " + std::to_string(frame.id) +
                                           ", which has none left to send or no slots for them");
    }
    staged.granted = granted;
  }
  transfer->lane->post([this, self = transfers_.self(), transfer, chunks = frame.chunks] {
    for (std::uint32_t i = 0; i < chunks; ++i) send_chunk(transfer);
  });
}

void Staging::send_chunk(const OutgoingPtr& transfer) {
  const std::uint64_t offset = transfer->staged.offset;
  const std::size_t bytes = std::min(kChunk, transfer->source.bytes - offset);
  transfer->staged.offset += bytes;
  transfer->lane->outgoing().take(
      [this, self = transfers_.self(), transfer, offset, bytes](std::byte* slot) {
        if (slot == nullptr) return transfers_.outgoing().cancel(transfer, no_pinned_memory());
        Lane& lane = *transfer->lane;
        const auto failed = [this, transfer, &lane, slot](cuda::Status status) {
          lane.outgoing().give_back(slot);
          transfers_.outgoing().cancel(transfer,
                                       lane.error_of(status, "the bytes to send cannot be copied"));
        };
        const auto* const from = static_cast<const std::byte*>(transfer->source.data) + offset;
        const cuda::Status status = transfers_.lanes().cuda().memcpy_async(
            slot, from, bytes, cuda::kDeviceToHost, lane.copies_out());
        if (status != cuda::kSuccess) return failed(status);
        lane.when_done(lane.copies_out(), [this, self, transfer, &lane, slot, offset, bytes,
                                           failed](cuda::Status done) {
          if (done != cuda::kSuccess) return failed(done);
          base::Bytes frame = encode(DataFrame{transfer->id, offset, {slot, bytes}});
          lane.outgoing().give_back(slot);
          {
            const base::MutexLock lock(mutex_);
            ++transfer->staged.data_sent;  // first: its destination may grant the next one at once
          }
          transfers_.send_frame(transfer->to, std::move(frame));
        });
      });
}

}  // namespace stitch::transport::gpu
