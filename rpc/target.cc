#include "stitch/rpc/target.h"

#include "stitch/rpc/peers/peer_table.h"

namespace stitch {

const WorkerInfo& Target::resolve(const rpc::PeerTable& peers) const {
  return std::visit([&](const auto& to) -> const WorkerInfo& { return peers.find(to); }, to_);
}

}  // namespace stitch
