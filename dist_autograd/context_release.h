#pragma once

#include <memory>
#include <vector>

#include "stitch/dist_autograd/context_table.h"
#include "stitch/dist_autograd/protocol/messages.h"
#include "stitch/rpc/agent/agent.h"

namespace stitch::dist_autograd {

// How each worker that takes part in a context learns that the context has ended: RELEASE follows
// the ways on which calls carried the context's id. A worker takes part as long as one that told it
// of the context lives (PROTOCOL.md, G9). One per Engine. Thread contract: any thread.
class ContextRelease {
 public:
  // REQUIRES: both outlive this.
  ContextRelease(rpc::Agent& agent, ContextTable& contexts) : agent_(agent), contexts_(contexts) {}

  // The context of a request, which told this worker of it. Null when it has ended. Throws
  // Error(protocol) for one that cannot exist.
  [[nodiscard]] std::shared_ptr<ContextState> join(const ContextId& id, const WorkerInfo& from);
  // Ends a context of this worker, here and on all participants. Its passes end with `cancelled`;
  // returns when none of their nodes runs here.
  void end_context(const std::shared_ptr<ContextState>& context) noexcept;

  void on_release(const WorkerInfo& from, const wire::Release& release_of) noexcept;
  // Ends the contexts whose home was lost; their passes end with `error`.
  void end_contexts_of(const WorkerInfo& lost, const Error& error) noexcept;
  // Likewise those of which no worker but `lost` has told this one.
  void end_contexts_told_by(const WorkerInfo& lost, const Error& error) noexcept;
  // Ends all contexts, for good, likewise.
  void end_all(const Error& error) noexcept;

 private:
  // Of a context of this worker that has ended.
  [[nodiscard]] wire::Release release_of_own(const ContextId& id) const;
  void end_here(ContextState& context, const Error& error, const WorkerInfo& told);
  void release(const std::vector<WorkerInfo>& peers, const wire::Release& release_of);

  rpc::Agent& agent_;
  ContextTable& contexts_;
};

}  // namespace stitch::dist_autograd
