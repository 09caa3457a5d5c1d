#include "stitch/transport/gpu/ipc_outbox.h"

#include <algorithm>
#include <utility>

namespace stitch::transport::gpu {

cuda::Status IpcOutbox::prepare(cuda::Stream stream) {
  if (unsupported()) return refused_;
  if (prepared_) return cuda::kSuccess;
  cuda::Status status = cuda::kSuccess;
  if (memory_ == nullptr) {
    void* memory = nullptr;
    status = cuda_.malloc(&memory, kPatternAt + kPatternBytes);
    if (status != cuda::kSuccess) return status;
    memory_ = static_cast<std::byte*>(memory);
  }
  status = cuda_.ipc_get_mem_handle(&handle_, memory_);
  if (status == cuda::kNotSupported || status == cuda::kInvalidDevice) {
    refused_ = status;
    (void)cuda_.free(memory_);
    memory_ = nullptr;
    return status;
  }
  if (status == cuda::kSuccess && pattern_ == nullptr)
    status = cuda_.host_alloc(&pattern_, kPatternBytes, cuda::kHostAllocPortable);
  if (status == cuda::kSuccess) {
    auto* const bytes = static_cast<unsigned char*>(pattern_);
    for (std::size_t i = 0; i < kPatternBytes; ++i) bytes[i] = pattern(i);
    status = cuda_.memcpy_async(memory_ + kPatternAt, pattern_, kPatternBytes, cuda::kHostToDevice,
                                stream);
  }
  if (status != cuda::kSuccess) return status;
  prepared_ = true;
  for (int i = static_cast<int>(kSlots); i > 0; --i) free_.push_back(i - 1);
  return cuda::kSuccess;
}

void IpcOutbox::take(Taken taken) {
  waiting_.push_back(std::move(taken));
  serve();
}

bool IpcOutbox::all_lent_since(Time time) const {
  return std::all_of(lent_.begin(), lent_.end(),
                     [time](const auto& since) { return since && *since <= time; });
}

void IpcOutbox::give_back(int slot) {
  lent_.at(static_cast<std::size_t>(slot)).reset();
  free_.push_back(slot);
  serve();
}

// Callbacks may take and give back; only the outermost call goes round.
void IpcOutbox::serve() {
  if (serving_) return;
  serving_ = true;
  while (!waiting_.empty() && !free_.empty()) {
    Taken taken = std::move(waiting_.front());
    waiting_.pop_front();
    const int slot = free_.back();
    free_.pop_back();
    taken(slot);
  }
  serving_ = false;
}

void IpcOutbox::free_memory() {
  if (pattern_ != nullptr) (void)cuda_.free_host(pattern_);
  pattern_ = nullptr;
  waiting_.clear();
  // Freed memory that another process has mapped is undefined: then it stays until this one ends.
  if (memory_ != nullptr && users_ == 0) (void)cuda_.free(memory_);
  memory_ = nullptr;
  prepared_ = false;
}

}  // namespace stitch::transport::gpu
