#include "stitch/transport/gpu/staging_ring.h"

#include <utility>

namespace stitch::transport::gpu {

void StagingRing::take(Taken taken) {
  waiting_.push_back(std::move(taken));
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
  while (!waiting_.empty()) {
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
    Taken taken = std::move(waiting_.front());
    waiting_.pop_front();
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
  memory_ = nullptr;
  free_.clear();
  waiting_.clear();
}

}  // namespace stitch::transport::gpu
