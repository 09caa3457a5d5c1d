#include "stitch/dist_optim/parameter_lock.h"

#include <algorithm>
#include <unordered_map>

namespace stitch::optim {

namespace {

struct Locks {
  base::Mutex mutex;
  // By the tensor's identity. An entry without holders is stale: its address may belong to another
  // tensor by now, for which any unheld mutex is as good.
  std::unordered_map<const void*, std::weak_ptr<base::Mutex>> by_parameter STITCH_GUARDED_BY(mutex);
  // Stale entries are taken out when the table has doubled: a constant cost for each new one.
  std::size_t sweep_at STITCH_GUARDED_BY(mutex) = 64;
};

Locks& locks() {
  static auto* const all =
      new Locks;  // never destroyed: optimizers may outlive other static objects
  return *all;
}

}  // namespace

std::shared_ptr<base::Mutex> parameter_lock(const at::Tensor& parameter) {
  Locks& all = locks();
  base::MutexLock lock(all.mutex);
  auto& entry = all.by_parameter[parameter.unsafeGetTensorImpl()];
  auto mutex = entry.lock();
  if (!mutex) {
    mutex = std::make_shared<base::Mutex>();
    entry = mutex;
    if (all.by_parameter.size() >= all.sweep_at) {
      std::erase_if(all.by_parameter, [](const auto& each) { return each.second.expired(); });
      all.sweep_at = std::max<std::size_t>(64, 2 * all.by_parameter.size());
    }
  }
  return mutex;
}

}  // namespace stitch::optim
