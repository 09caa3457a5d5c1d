#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/transport/gpu/transfer_frames.h"

namespace stitch::transport::gpu {

struct Incoming;
struct Outgoing;
class Transfers;

// Transfers through pinned host memory: the destination grants slots of its ring one by one, the
// source copies a chunk for each grant through a slot of its own and sends it as a DATA frame.
// Owned by Transfers. Thread contract: any thread; its lock is held for nothing else.
class Staging {
 public:
  // Of a transfer at its source; guarded by the lock of Staging.
  struct Sent {
    std::uint64_t granted = 0;    // chunks
    std::uint64_t data_sent = 0;  // those that were sent
    std::uint64_t offset = 0;     // of the lane: of the next chunk to copy
  };
  // Of a transfer at its destination; guarded by the lock of Staging.
  struct Received {
    bool over = false;
    std::vector<std::byte*> granted{};  // slots that the source may fill
    std::vector<bool> chunks{};         // those that have arrived
    std::size_t asked = 0;              // of the lane: chunks for which a slot was asked for
    std::size_t written = 0;            // of the lane: chunks in the memory
  };

  explicit Staging(Transfers& transfers) : transfers_(transfers) {}

  // Lane. The transfer is announced by this path and asked for.
  void start(const std::shared_ptr<Incoming>& transfer);
  // The transfer has ended: its slots are free.
  void release(Incoming& transfer);
  // REQUIRES: the source has announced the transfer by this path. Throws Error(protocol) for more
  // than there are chunks or slots.
  void on_grant(const std::shared_ptr<Outgoing>& transfer, const GrantFrame& frame);
  // Throws Error(protocol) for bytes that have no place.
  void on_data(const std::shared_ptr<Incoming>& transfer, const DataFrame& frame);

 private:
  void ask_for_slot(const std::shared_ptr<Incoming>& transfer);
  void write_chunk(const std::shared_ptr<Incoming>& transfer, std::byte* slot, std::uint64_t offset,
                   std::size_t bytes);
  void send_chunk(const std::shared_ptr<Outgoing>& transfer);
  [[nodiscard]] std::shared_ptr<Transfers> kept() const;

  Transfers& transfers_;
  base::Mutex mutex_;
};

}  // namespace stitch::transport::gpu
