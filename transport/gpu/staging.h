#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"
#include "stitch/transport/gpu/cuda_api.h"
#include "stitch/transport/gpu/transfer_frames.h"

namespace stitch::transport::gpu {

struct Incoming;
struct Outgoing;
class Transfers;

// Slots of pinned host memory, through which the staged transfers of a device go in one direction.
// The first take() allocates the memory. Owned by a Lane; used on its thread.
class StagingRing {
 public:
  static constexpr std::size_t kSlotBytes = std::size_t{2} << 20;
  static constexpr std::size_t kSlots = 8;
  using Taken = base::UniqueFunction<void(std::byte* slot)>;

  explicit StagingRing(const CudaApi& cuda) : cuda_(cuda) {}
  StagingRing(const StagingRing&) = delete;
  StagingRing& operator=(const StagingRing&) = delete;

  // Calls `taken` with a slot, now or when a slot is given back; in the order of the calls. With
  // null when pinned memory cannot be allocated.
  void take(Taken taken);
  void give_back(std::byte* slot);
  void free_memory();  // REQUIRES: no slot is taken

 private:
  void serve();

  const CudaApi& cuda_;
  std::byte* memory_ = nullptr;
  bool serving_ = false;
  std::vector<std::byte*> free_;
  std::deque<Taken> takers_;
};

// Transfers through pinned host memory: the destination grants slots of its ring one by one, the
// source copies a chunk for each grant through a slot of its own and sends the chunk as a DATA
// frame. Owned by Transfers. Thread contract: any thread; its lock is held for nothing else.
class Staging {
 public:
  // The part of an Outgoing; guarded by the lock of Staging.
  struct Sent {
    std::uint64_t granted = 0;    // chunks
    std::uint64_t data_sent = 0;  // chunks
    std::uint64_t offset = 0;     // of the lane: of the next chunk to copy
  };
  // The part of an Incoming; guarded by the lock of Staging.
  struct Received {
    bool over = false;
    std::vector<std::byte*> granted{};  // slots that the source may fill
    std::vector<bool> chunks{};         // whether each chunk has arrived
    std::size_t asked = 0;              // of the lane: chunks for which a slot was asked for
    std::size_t written = 0;            // of the lane: chunks in the memory
  };

  explicit Staging(Transfers& transfers) : transfers_(transfers) {}

  // Lane. REQUIRES: the source has announced the transfer by this path, and receive() was called.
  void start(const std::shared_ptr<Incoming>& transfer);
  // The transfer has ended: its slots are free.
  void release(Incoming& transfer);
  // REQUIRES: the source has announced the transfer by this path. Throws Error(protocol) for a
  // grant beyond its chunks or the slots of a transfer.
  void on_grant(const std::shared_ptr<Outgoing>& transfer, const GrantFrame& frame);
  // Throws Error(protocol) for bytes that are no chunk of the transfer, or had no grant.
  void on_data(const std::shared_ptr<Incoming>& transfer, const DataFrame& frame);

 private:
  void ask_for_slot(const std::shared_ptr<Incoming>& transfer);
  void write_chunk(const std::shared_ptr<Incoming>& transfer, std::byte* slot, std::uint64_t offset,
                   std::size_t bytes);
  void send_chunk(const std::shared_ptr<Outgoing>& transfer);

  Transfers& transfers_;
  base::Mutex mutex_;
};

}  // namespace stitch::transport::gpu
