#include "stitch/rpc/worker.h"

namespace {

// Its serialize() looks like any other.
struct Shares {
  std::shared_ptr<int> number;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(number);
  }
};
int take(Shares shares) { return *shares.number; }

}  // namespace

int main() { return stitch::rpc_sync<take>("worker1", Shares{}); }
