#include "stitch/rpc/worker.h"

namespace {

struct Opaque {
  int* where = nullptr;
};
int take(Opaque opaque) { return *opaque.where; }

}  // namespace

int main() { return stitch::rpc_sync<take>("worker1", Opaque{}); }
