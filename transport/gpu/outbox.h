#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "stitch/base/unique_function.h"
#include "stitch/transport/gpu/outbox_memory.h"

namespace stitch::transport::gpu {

// Slots of memory that other processes of the host map: the bytes of transfers to them are copied
// into a slot here and out of it there. The memory is allocated when first asked for, and kept
// where it cannot be offered: another attempt neither allocates nor frees, which waits for the
// device. Owned by a Lane; used on its thread.
class Outbox {
 public:
  static constexpr std::size_t kSlots = OutboxLayout::kSlots;
  using Time = std::chrono::steady_clock::time_point;
  using Taken = base::UniqueFunction<void(int slot)>;

  // Path::ipc or Path::shared.
  Outbox(Path path, const CudaApi& cuda) : path_(path), memory_(OutboxMemory::of(path, cuda)) {}
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;

  // Allocates the memory and queues the writing of its patterns on `stream`, the first time.
  [[nodiscard]] OutboxStep prepare(cuda::Stream stream);
  // CUDA has said that memory of this device cannot be shared so at all: it is not asked again.
  [[nodiscard]] bool unsupported() const noexcept { return !refused_.ok(); }
  [[nodiscard]] OutboxHandle handle() const { return memory_->handle(); }
  // Calls `taken` with a slot, now or when one is given back; in the order of the calls.
  // REQUIRES: prepare() has succeeded.
  void take(Taken taken);
  void give_back(int slot);
  // A peer may read the slot from then on, until it is given back.
  void lend(int slot, Time since) { lent_.at(static_cast<std::size_t>(slot)) = since; }
  // Whether peers have had all slots since then, or longer.
  [[nodiscard]] bool all_lent_since(Time time) const;
  [[nodiscard]] std::byte* slot(int number) const {
    return memory_->data() + static_cast<std::size_t>(number) * OutboxLayout::slot_bytes(path_);
  }
  // Processes that may have mapped the memory.
  void add_user() { ++users_; }
  void remove_user() { --users_; }
  void free_memory();  // REQUIRES: nothing of this process uses a slot

 private:
  void serve();

  const Path path_;
  const std::unique_ptr<OutboxMemory> memory_;
  bool prepared_ = false;
  OutboxStep refused_;
  int users_ = 0;
  bool serving_ = false;
  std::vector<int> free_;
  std::array<std::optional<Time>, kSlots> lent_;
  std::deque<Taken> waiting_;
};

}  // namespace stitch::transport::gpu
