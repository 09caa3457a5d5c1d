#include "stitch/rref/serialized.h"

#include <atomic>
#include <typeindex>
#include <unordered_set>

#include "stitch/base/mutex.h"

namespace stitch::rref {
namespace {

struct Types {
  std::atomic<bool> any{false};
  base::Mutex mutex;
  std::unordered_set<std::type_index> noted STITCH_GUARDED_BY(mutex);
};

Types& types() {
  static Types types;
  return types;
}

}  // namespace

void note_one_at_a_time(const std::type_info& type) {
  Types& all = types();
  const base::MutexLock lock(all.mutex);
  all.noted.emplace(type);
  all.any.store(true);
}

bool runs_one_at_a_time(const std::type_info& type) {
  Types& all = types();
  if (!all.any.load()) return false;
  const base::MutexLock lock(all.mutex);
  return all.noted.contains(type);
}

}  // namespace stitch::rref
