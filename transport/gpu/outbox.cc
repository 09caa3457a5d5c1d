#include "stitch/transport/gpu/outbox.h"

#include <algorithm>
#include <utility>

namespace stitch::transport::gpu {

OutboxStep Outbox::prepare(cuda::Stream stream) {
  if (unsupported()) return refused_;
  if (prepared_) return {};
  OutboxStep step = memory_->prepare(stream);
  if (step.unsupported) {
    refused_ = step;
    memory_->free_memory(false);
  }
  if (!step.ok()) return step;
  prepared_ = true;
  for (int i = static_cast<int>(kSlots); i > 0; --i) free_.push_back(i - 1);
  return step;
}

void Outbox::take(Taken taken) {
  waiting_.push_back(std::move(taken));
  serve();
}

bool Outbox::all_lent_since(Time time) const {
  return std::all_of(lent_.begin(), lent_.end(),
                     [time](const auto& since) { return since && *since <= time; });
}

void Outbox::give_back(int slot) {
  lent_.at(static_cast<std::size_t>(slot)).reset();
  free_.push_back(slot);
  serve();
}

// Callbacks may take and give back; only the outermost call goes round.
void Outbox::serve() {
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

void Outbox::free_memory() {
  waiting_.clear();
  memory_->free_memory(users_ > 0);
  prepared_ = false;
}

}  // namespace stitch::transport::gpu
