#include "stitch/rref/parameter_lock.h"

#include <algorithm>
#include <unordered_map>

#include "stitch/rref/shared_parameter.h"

namespace stitch::rref {

namespace {

struct Table {
  base::Mutex mutex;
  // By the tensor's identity. An entry without holders is stale: its address may belong to another
  // tensor by now, for which any that is not held is as good.
  std::unordered_map<const void*, std::weak_ptr<SharedParameter>> by_parameter
      STITCH_GUARDED_BY(mutex);
  // Stale entries are taken out when the table has doubled: a constant cost for each new one.
  std::size_t sweep_at STITCH_GUARDED_BY(mutex) = 64;
};

Table& table() {
  static auto* const all =
      new Table;  // never destroyed: optimizers may outlive other static objects
  return *all;
}

}  // namespace

std::shared_ptr<SharedParameter> shared_parameter(const at::Tensor& parameter) {
  Table& all = table();
  base::MutexLock lock(all.mutex);
  auto& entry = all.by_parameter[parameter.unsafeGetTensorImpl()];
  auto shared = entry.lock();
  if (!shared) {
    shared = std::make_shared<SharedParameter>();
    entry = shared;
    if (all.by_parameter.size() >= all.sweep_at) {
      std::erase_if(all.by_parameter, [](const auto& each) { return each.second.expired(); });
      all.sweep_at = std::max<std::size_t>(64, 2 * all.by_parameter.size());
    }
  }
  return shared;
}

std::shared_ptr<SharedParameter> find_shared_parameter(const at::Tensor& parameter) {
  Table& all = table();
  base::MutexLock lock(all.mutex);
  const auto found = all.by_parameter.find(parameter.unsafeGetTensorImpl());
  return found == all.by_parameter.end() ? nullptr : found->second.lock();
}

std::shared_ptr<base::Mutex> parameter_lock(const at::Tensor& parameter) {
  auto shared = shared_parameter(parameter);
  auto* const mutex = &shared->mutex;
  return {std::move(shared), mutex};
}

}  // namespace stitch::rref
