#include "stitch/rpc/worker.h"

namespace {

// Its serialize() looks like any other.
struct Watches {
  std::weak_ptr<int> number;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(number);
  }
};
int take(Watches watches) { return watches.number.expired() ? 0 : 1; }

}  // namespace

int main() { return stitch::rpc_sync<take>("worker1", Watches{}); }
