#include "stitch/dist_autograd/outbox.h"

#include <utility>

namespace stitch::dist_autograd {

void Outbox::add(const RecvNode& node, variable_list gradients, std::uint64_t gradient_link,
                 std::vector<bool> differentiable) {
  if (batches_.empty()) since_ = std::chrono::steady_clock::now();
  PeerBatch& batch = batches_[node.sender().id];
  batch.to = node.sender();
  wire::GradientEntry& entry = batch.entries.emplace_back();
  entry.link = node.link().counter;
  entry.gradient_link = gradient_link;
  entry.differentiable = std::move(differentiable);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    at::Tensor& gradient = gradients[i];
    entry.defined.push_back(gradient.defined());
    if (!gradient.defined()) continue;
    if (const auto origin = node.origin(i))
      batch.placements.push_back({static_cast<std::uint32_t>(batch.tensors.size()), 0, *origin});
    if (gradient.layout() == c10::kStrided) bytes_ += gradient.nbytes();
    batch.tensors.push_back(std::move(gradient));
  }
}

bool Outbox::due() const {
  return !batches_.empty() &&
         (bytes_ >= kFlushBytes || std::chrono::steady_clock::now() - since_ >= kFlushDelay);
}

std::vector<Outbox::PeerBatch> Outbox::take() {
  std::vector<PeerBatch> batches;
  for (auto& [to, batch] : batches_) batches.push_back(std::move(batch));
  batches_.clear();
  bytes_ = 0;
  return batches;
}

}  // namespace stitch::dist_autograd
