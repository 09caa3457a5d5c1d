#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "stitch/base/unique_function.h"
#include "stitch/transport/gpu/cuda_api.h"

namespace stitch::transport::gpu {

// Slots of device memory that other processes on the same GPU map: the bytes of transfers to them
// are copied into a slot here and out of it there. Behind the slots lies a pattern that does not
// change, by which a process that has mapped the memory sees that it reads the right one. The
// memory is allocated when first asked for, and kept where it cannot be offered: another attempt
// neither allocates nor frees, which waits for the device. Owned by a Lane; used on its thread.
class IpcOutbox {
 public:
  static constexpr std::size_t kSlotBytes = std::size_t{8} << 20;
  static constexpr std::size_t kSlots = 8;
  static constexpr std::size_t kPatternBytes = 65536;
  static constexpr std::size_t kPatternAt = kSlots * kSlotBytes;
  using Time = std::chrono::steady_clock::time_point;
  using Taken = base::UniqueFunction<void(int slot)>;

  explicit IpcOutbox(const CudaApi& cuda) : cuda_(cuda) {}
  IpcOutbox(const IpcOutbox&) = delete;
  IpcOutbox& operator=(const IpcOutbox&) = delete;

  // What the byte at that place of the pattern is.
  [[nodiscard]] static unsigned char pattern(std::size_t at) {
    return static_cast<unsigned char>(at * 13 + at / 241 + 7);
  }
  // Allocates the memory and queues the writing of its pattern on `stream`, the first time.
  [[nodiscard]] cuda::Status prepare(cuda::Stream stream);
  // CUDA has said that it cannot share memory of this device at all: it is not asked again.
  [[nodiscard]] bool unsupported() const noexcept { return refused_ != cuda::kSuccess; }
  [[nodiscard]] const cuda::IpcMemHandle& handle() const noexcept { return handle_; }
  // Calls `taken` with a slot, now or when one is given back; in the order of the calls.
  // REQUIRES: prepare() has succeeded.
  void take(Taken taken);
  void give_back(int slot);
  // A peer may read the slot from then on, until it is given back.
  void lend(int slot, Time since) { lent_.at(static_cast<std::size_t>(slot)) = since; }
  // Whether peers have had all slots since then, or longer.
  [[nodiscard]] bool all_lent_since(Time time) const;
  [[nodiscard]] std::byte* slot(int number) const {
    return memory_ + static_cast<std::size_t>(number) * kSlotBytes;
  }
  // Processes that may have mapped the memory. It is not freed while there are any.
  void add_user() { ++users_; }
  void remove_user() { --users_; }
  void free_memory();  // REQUIRES: nothing of this process uses a slot

 private:
  void serve();

  const CudaApi& cuda_;
  std::byte* memory_ = nullptr;
  bool prepared_ = false;
  cuda::Status refused_ = cuda::kSuccess;
  void* pattern_ = nullptr;  // pinned
  cuda::IpcMemHandle handle_{};
  int users_ = 0;
  bool serving_ = false;
  std::vector<int> free_;
  std::array<std::optional<Time>, kSlots> lent_;
  std::deque<Taken> waiting_;
};

}  // namespace stitch::transport::gpu
