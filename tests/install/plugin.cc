// A library that uses stitch in a process whose program uses it, too.
#include <stitch/rpc/worker.h>

#include <string>

namespace {
int doubled(int x) { return 2 * x; }
}  // namespace

extern "C" int call_own_function(const char* worker) {
  if (stitch::current_worker().name != worker) return -1;
  return stitch::rpc_sync<doubled>(worker, stitch::user_data<int>());
}

extern "C" void call_unknown_worker() { static_cast<void>(stitch::rpc_sync<doubled>("absent", 1)); }
