#pragma once

#include <atomic>
#include <cstdint>

#include "stitch/dist_autograd/context_release.h"
#include "stitch/dist_autograd/context_table.h"
#include "stitch/dist_autograd/graph/ids.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/future/execution_context.h"
#include "stitch/rpc/message/message.h"

namespace stitch::dist_autograd {

// How calls and replies become part of the graph. A message of a context carries a section: the
// context's id, and when some of its tensors require grad, the link they make and which they are.
// One per Engine. Thread contract: any thread.
class Recording {
 public:
  // REQUIRES: all outlive this.
  Recording(rpc::Agent& agent, ContextTable& contexts, ContextRelease& release)
      : agent_(agent), contexts_(contexts), release_(release) {}

  // Adds the section to a request or reply that is about to leave, and keeps a SendNode over its
  // tensors that require grad. See rpc::Extension.
  void on_send(rpc::OutMessage& message, const WorkerInfo& to);
  // Makes the context of an arrived message current in `execution` (requests) and gives its tensors
  // a RecvNode. Throws Error(protocol) for an invalid section.
  void on_decode(rpc::InMessage& message, rpc::ExecutionContext& execution);

  // The id of a new link of this worker.
  [[nodiscard]] LinkId next_link() noexcept {
    return {agent_.self().id, next_link_.fetch_add(1, std::memory_order_relaxed)};
  }

 private:
  rpc::Agent& agent_;
  ContextTable& contexts_;
  ContextRelease& release_;
  std::atomic<std::uint64_t> next_link_{1};
};

}  // namespace stitch::dist_autograd
