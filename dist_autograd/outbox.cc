#include "stitch/dist_autograd/outbox.h"

#include <utility>

namespace stitch::dist_autograd {

void Outbox::add(const RecvNode& node, variable_list gradients, std::uint64_t gradient_link,
                 std::vector<bool> differentiable) {
  if (parcels_.empty()) since_ = std::chrono::steady_clock::now();
  Parcel& parcel = parcels_[node.sender().id];
  parcel.to = node.sender();
  wire::GradientEntry& entry = parcel.entries.emplace_back();
  entry.link = node.link().counter;
  entry.gradient_link = gradient_link;
  entry.differentiable = std::move(differentiable);
  for (at::Tensor& gradient : gradients) {
    entry.defined.push_back(gradient.defined());
    if (!gradient.defined()) continue;
    if (gradient.layout() == c10::kStrided) bytes_ += gradient.nbytes();
    parcel.tensors.push_back(std::move(gradient));
  }
}

bool Outbox::due() const {
  return !parcels_.empty() &&
         (bytes_ >= kEnough || std::chrono::steady_clock::now() - since_ >= kPatience);
}

std::vector<Outbox::Parcel> Outbox::take() {
  std::vector<Parcel> parcels;
  for (auto& [to, parcel] : parcels_) parcels.push_back(std::move(parcel));
  parcels_.clear();
  bytes_ = 0;
  return parcels;
}

}  // namespace stitch::dist_autograd
