#include "stitch/dist_autograd/control_frames.h"

#include <algorithm>
#include <string>
#include <utility>

#include "stitch/rpc/message/archive.h"
#include "stitch/rpc/message/frame_kinds.h"

namespace stitch::dist_autograd {

namespace {

constexpr std::size_t kMinTextBytes = 256;

}  // namespace

void send_abort(rpc::Agent& agent, const WorkerInfo& to, const wire::PassHeader& header,
                const Error& error) {
  const std::size_t limit = std::max(kMinTextBytes, agent.options().max_frame_bytes / 2);
  const std::string text = error.what();
  const Error sendable = text.size() <= limit ? error
                                              : Error(error.code(), text.substr(0, limit))
                                                    .with_worker(error.worker())
                                                    .with_function(error.function())
                                                    .with_remote(error.remote());
  rpc::OutMessage out(wire::kAbort);
  rpc::OutArchive archive(out);
  archive(header, sendable);
  send_while_possible(agent, to, std::move(out));
}

void send_while_possible(rpc::Agent& agent, const WorkerInfo& to,
                         rpc::OutMessage message) noexcept {
  try {
    agent.send_control(to, std::move(message));
  } catch (const Error&) {
    // The peer is lost or this worker has stopped, of which all are told.
  }
}

bool require_life(rpc::Agent& agent, WorkerId worker, std::uint64_t epoch, const char* what) {
  const rpc::Life* present = agent.peers().life(worker);
  if (present != nullptr && present->info().epoch == epoch) return true;
  // Below the first epoch known here it may have ended before this worker joined.
  if (present != nullptr && epoch != 0 && epoch < present->info().epoch) return false;
  throw Error(ErrorCode::protocol, std::string(what) + " is worker " +
                                       std::to_string(worker.value()) + " in epoch " +
                                       std::to_string(epoch) + ", which does not exist");
}

}  // namespace stitch::dist_autograd
