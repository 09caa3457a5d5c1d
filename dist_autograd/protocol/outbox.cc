#include "stitch/dist_autograd/protocol/outbox.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace stitch::dist_autograd {

void Outbox::add(const RecvNode& node, variable_list gradients, const Positions& unreached,
                 std::size_t bytes, std::uint64_t gradient_link, Positions differentiable) {
  bytes_ += bytes;
  if (batches_.empty()) since_ = std::chrono::steady_clock::now();
  auto batch = std::find_if(batches_.begin(), batches_.end(),
                            [&](const PeerBatch& each) { return each.to == node.sender().id; });
  if (batch == batches_.end()) {
    batches_.emplace_back().to = node.sender().id;
    batch = std::prev(batches_.end());
  }
  wire::GradientEntry& entry = batch->entries.emplace_back();
  entry.link = node.link().counter;
  entry.gradient_link = gradient_link;
  entry.count = static_cast<std::uint32_t>(gradients.size());
  entry.differentiable = std::move(differentiable);
  for (std::uint32_t i = 0; i < entry.count; ++i) {
    if (!gradients[i].defined()) {
      entry.add_undefined(i, unreached.has(i));
      continue;
    }
    if (const auto origin = node.origin(i))
      batch->placements.push_back({static_cast<std::uint32_t>(batch->tensors.size()), 0, *origin});
    batch->tensors.push_back(std::move(gradients[i]));
  }
}

bool Outbox::due() const {
  return !batches_.empty() &&
         (bytes_ >= kFlushBytes || std::chrono::steady_clock::now() - since_ >= kFlushDelay);
}

std::vector<Outbox::PeerBatch> Outbox::take() {
  bytes_ = 0;
  return std::exchange(batches_, {});
}

}  // namespace stitch::dist_autograd
