#include "stitch/rpc/worker_info.h"

namespace stitch {

std::string to_string(const WorkerInfo& info) {
  return "worker \"" + info.name + "\" (id " + std::to_string(info.id.value()) + ")";
}

}  // namespace stitch
