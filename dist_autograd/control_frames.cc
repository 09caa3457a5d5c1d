#include "stitch/dist_autograd/control_frames.h"

#include <algorithm>
#include <string>
#include <utility>

#include "stitch/rpc/message/archive.h"
#include "stitch/rpc/message/frame_kinds.h"

namespace stitch::dist_autograd {

void send_abort(rpc::Agent& agent, const WorkerInfo& to, const wire::PassHeader& header,
                const Error& error) {
  rpc::OutMessage out(wire::kAbort);
  rpc::OutArchive archive(out);
  archive(header, agent.sender().sendable(to, error));
  agent.send_while_possible(to, std::move(out));
}

bool require_life(rpc::Agent& agent, WorkerId worker, std::uint64_t epoch, const char* what) {
  const rpc::PeerLife* present = agent.peers().life(worker);
  if (present != nullptr && present->info().epoch == epoch) return true;
  // Below the first epoch known here it may have ended before this worker joined.
  if (present != nullptr && epoch != 0 && epoch < present->info().epoch) return false;
  // A third worker may have made it up, or told the sender of it before this one.
  throw Error(ErrorCode::disconnected, std::string(what) + " is worker " +
                                           std::to_string(worker.value()) + " in epoch " +
                                           std::to_string(epoch) + ", which is not known here");
}

}  // namespace stitch::dist_autograd
