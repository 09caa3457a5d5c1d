#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "stitch/dist_autograd/context_table.h"
#include "stitch/dist_autograd/messages.h"
#include "stitch/rpc/agent/agent.h"

namespace stitch::dist_autograd {

// How each worker that takes part in a context learns that the context has ended: RELEASE follows
// the ways on which calls carried the context's id, and HOLD replaces a way that ended in a lost
// worker (PROTOCOL.md, G9). One per Engine. Thread contract: any thread.
class ContextRelease {
 public:
  // REQUIRES: both outlive this.
  ContextRelease(rpc::Agent& agent, ContextTable& contexts) : agent_(agent), contexts_(contexts) {}

  // The context of a request, which told this worker of it. Null when it has ended. Throws
  // Error(protocol) for one that cannot exist.
  [[nodiscard]] std::shared_ptr<ContextState> join(const ContextId& id, const WorkerInfo& from);
  // Ends a context of this worker, here and on all participants. Its passes end with `cancelled`;
  // returns when none of their nodes runs here.
  void end_context(const std::shared_ptr<ContextState>& context);

  void on_release(const WorkerInfo& from, const wire::Release& release_of);
  void on_hold(const WorkerInfo& from, const wire::Hold& hold);
  // Ends the contexts whose home was lost; their passes end with `error`.
  void end_contexts_of(const WorkerInfo& lost, const Error& error);
  // Ends all contexts, for good, likewise.
  void end_all(const Error& error);
  // Sends HOLD to the homes of the contexts that this worker knows through `lost` only.
  void hold_contexts_told_by(const WorkerInfo& lost);

 private:
  // Of a context of this worker that has ended.
  [[nodiscard]] wire::Release release_of_own(const ContextId& id) const;
  // That `participant` takes part in a context of this worker, or has to hear that it is over.
  void hold_own(const WorkerInfo& participant, std::uint64_t counter);
  void end_here(const std::vector<std::shared_ptr<ContextState>>& contexts, const Error& error);
  void release(const std::vector<WorkerInfo>& peers, const wire::Release& release_of);
  void hold(WorkerId home, std::uint64_t epoch, std::vector<std::uint64_t> contexts);

  rpc::Agent& agent_;
  ContextTable& contexts_;
};

}  // namespace stitch::dist_autograd
