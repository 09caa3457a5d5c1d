#include "stitch/dist_autograd/graph/gradient_store.h"

#include "stitch/dist_autograd/graph/compat.h"

namespace stitch::dist_autograd {

namespace {

// In-place addition would change a gradient that a reader holds or a message in flight shares.
bool may_change(const at::Tensor& kept) {
  if (kept.use_count() != 1 || kept.is_inference()) return false;
  return kept.layout() != c10::kStrided || (kept.has_storage() && kept.storage().use_count() == 1);
}

}  // namespace

void GradientStore::accumulate(const at::Tensor& variable, at::Tensor&& grad,
                               std::size_t references) {
  if (!grad.defined()) return;
  const std::size_t stealable = owns_memory(grad) ? references : 0;
  Shard& shard = shard_of(variable);
  base::MutexLock lock(shard.mutex);
  at::Tensor& kept = shard.gradients[variable];
  if (kept.defined() && !at::GradMode::is_enabled() && !may_change(kept)) {
    kept = kept.is_sparse() && !grad.is_sparse() ? grad + kept : kept + grad;
    return;
  }
  accumulate_leaf(variable, kept, grad, stealable);
}

at::Tensor GradientStore::find(const at::Tensor& variable) const {
  Shard& shard = shard_of(variable);
  base::MutexLock lock(shard.mutex);
  const auto found = shard.gradients.find(variable);
  return found == shard.gradients.end() ? at::Tensor() : found->second;
}

GradientMap GradientStore::snapshot() const {
  GradientMap all;
  for (Shard& shard : shards_) {
    base::MutexLock lock(shard.mutex);
    all.insert(shard.gradients.begin(), shard.gradients.end());
  }
  return all;
}

std::size_t GradientStore::size() const {
  std::size_t count = 0;
  for (Shard& shard : shards_) {
    base::MutexLock lock(shard.mutex);
    count += shard.gradients.size();
  }
  return count;
}

void GradientStore::clear() {
  for (Shard& shard : shards_) {
    GradientMap dropped;  // destroyed after unlocking: a gradient may own a whole graph
    base::MutexLock lock(shard.mutex);
    dropped.swap(shard.gradients);
    lock.unlock();
  }
}

}  // namespace stitch::dist_autograd
