#pragma once

#include <functional>
#include <string>
#include <vector>

#include "stitch/base/bytes.h"
#include "stitch/base/error.h"
#include "stitch/rpc/message/worker_info.h"

namespace stitch::rpc {

// What transfers between devices need of the worker that they belong to. Functions are called from
// any thread, and must not throw.
struct TransferHooks {
  // Sends a frame of transfers (wire::kTransfer). Errors are for it to report as the loss of the
  // peer.
  std::function<void(const WorkerInfo& to, base::Bytes frame)> send_frame;
  // Transfers that a message has named cannot be begun: ends the connection to the peer.
  std::function<void(const WorkerInfo& to, const Error& why)> give_up;
  // Whether bytes may leave the host as they are, as they do by NCCL.
  bool unsealed = true;
  // Options::gpu_paths.
  std::vector<std::string> paths = {};
};

}  // namespace stitch::rpc
