#include "stitch/dist_autograd/graph/gradient_store.h"

#include <utility>
#include <vector>

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
  const auto before = shard.on_devices.find(variable.unsafeGetTensorImpl());
  bool shared = false;
  if (before != shard.on_devices.end()) {
    const c10::Stream adding = current_stream(kept.device());
    before->second.ready.wait_on(adding);
    keep_for(kept, adding);
    shared = before->second.shared;
  }
  if (kept.defined() && !at::GradMode::is_enabled() && (shared || !may_change(kept))) {
    kept = kept.is_sparse() && !grad.is_sparse() ? grad + kept : kept + grad;
  } else {
    accumulate_leaf(variable, kept, grad, stealable);
  }
  if (!is_on_device(kept)) return;
  ReadyPoint ready(current_stream(kept.device()));
  ready.record();
  const bool first = before == shard.on_devices.end();
  shard.on_devices.insert_or_assign(variable.unsafeGetTensorImpl(),
                                    OnDevice{std::move(ready), first});
}

at::Tensor GradientStore::changed(Shard& shard, const at::Tensor& variable, const at::Tensor& kept,
                                  const Change& how) {
  const auto before = shard.on_devices.find(variable.unsafeGetTensorImpl());
  if (before != shard.on_devices.end()) {
    const c10::Stream changing = current_stream(kept.device());
    before->second.ready.wait_on(changing);
    keep_for(kept, changing);
  }
  at::Tensor result = how(kept);
  if (before != shard.on_devices.end()) shard.on_devices.erase(before);
  if (result.defined() && is_on_device(result)) {
    ReadyPoint ready(current_stream(result.device()));
    ready.record();
    shard.on_devices.emplace(variable.unsafeGetTensorImpl(), OnDevice{std::move(ready), false});
  }
  return result;
}

void GradientStore::change(const at::Tensor& variable, const Change& how) {
  Shard& shard = shard_of(variable);
  at::Tensor replaced;  // destroyed after unlocking
  base::MutexLock lock(shard.mutex);
  const auto found = shard.gradients.find(variable);
  if (found != shard.gradients.end()) replaced = found->second;
  at::Tensor result = changed(shard, variable, replaced, how);
  if (result.defined()) {
    shard.gradients.insert_or_assign(variable, std::move(result));
  } else if (found != shard.gradients.end()) {
    shard.gradients.erase(found);
  }
  lock.unlock();
}

void GradientStore::change_all(const Change& how) {
  for (Shard& shard : shards_) {
    std::vector<at::Tensor> variables;
    {
      base::MutexLock lock(shard.mutex);
      for (const auto& [variable, gradient] : shard.gradients) variables.push_back(variable);
    }
    for (const at::Tensor& variable : variables) change(variable, how);
  }
}

void GradientStore::hand_to_reader(Shard& shard, const at::Tensor& variable,
                                   const at::Tensor& gradient) {
  if (gradient.is_cpu()) return;
  const auto found = shard.on_devices.find(variable.unsafeGetTensorImpl());
  if (found == shard.on_devices.end()) return;
  const c10::Stream reader = current_stream(gradient.device());
  found->second.ready.wait_on(reader);
  keep_for(gradient, reader);
  found->second.shared = true;
}

at::Tensor GradientStore::find(const at::Tensor& variable) const {
  Shard& shard = shard_of(variable);
  base::MutexLock lock(shard.mutex);
  const auto found = shard.gradients.find(variable);
  if (found == shard.gradients.end()) return {};
  if (found->second.defined()) hand_to_reader(shard, variable, found->second);
  return found->second;
}

GradientMap GradientStore::snapshot() const {
  GradientMap all;
  for (Shard& shard : shards_) {
    base::MutexLock lock(shard.mutex);
    for (const auto& [variable, gradient] : shard.gradients) {
      if (gradient.defined()) hand_to_reader(shard, variable, gradient);
      all.emplace(variable, gradient);
    }
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
    shard.on_devices.clear();
    lock.unlock();
  }
}

}  // namespace stitch::dist_autograd
