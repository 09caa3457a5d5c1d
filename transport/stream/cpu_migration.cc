#include "stitch/transport/stream/cpu_migration.h"

#include <sched.h>

namespace stitch::transport {

bool migrate_to_other_cpu() noexcept {
  const int here = sched_getcpu();
  cpu_set_t allowed;
  if (here < 0 || sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return false;
  cpu_set_t others = allowed;
  CPU_CLR(static_cast<unsigned>(here), &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof(others), &others) != 0) return false;
  static_cast<void>(sched_setaffinity(0, sizeof(allowed), &allowed));
  return true;
}

}  // namespace stitch::transport
