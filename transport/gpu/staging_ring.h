#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "stitch/base/unique_function.h"
#include "stitch/transport/gpu/cuda_api.h"

namespace stitch::transport::gpu {

// Slots of pinned host memory, through which the staged transfers of a device go in one direction.
// The memory is allocated when the first slot is taken. Owned by a Lane; used on its thread.
class StagingRing {
 public:
  static constexpr std::size_t kSlotBytes = std::size_t{2} << 20;
  static constexpr std::size_t kSlots = 8;
  using Taken = base::UniqueFunction<void(std::byte* slot)>;

  explicit StagingRing(const CudaApi& cuda) : cuda_(cuda) {}
  StagingRing(const StagingRing&) = delete;
  StagingRing& operator=(const StagingRing&) = delete;

  // Calls `taken` with a slot, now or when one is given back; in the order of the calls. With null
  // when pinned memory cannot be allocated.
  void take(Taken taken);
  void give_back(std::byte* slot);
  void free_memory();  // REQUIRES: no slot is taken

 private:
  void serve();

  const CudaApi& cuda_;
  std::byte* memory_ = nullptr;
  bool serving_ = false;
  std::vector<std::byte*> free_;
  std::deque<Taken> waiting_;
};

}  // namespace stitch::transport::gpu
