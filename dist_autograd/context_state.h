#pragma once

#include <functional>
#include <memory>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "stitch/dist_autograd/gradient_store.h"
#include "stitch/dist_autograd/ids.h"
#include "stitch/dist_autograd/send_node.h"
#include "stitch/transport/mutex.h"

namespace stitch::dist_autograd {

class Pass;

// One context on one worker: the links that left it, the gradients that accumulated, the passes
// that run, whom it told the id. Shared by the table of contexts, by everything that runs under it,
// and by its passes. After end() it is empty and stays so. Thread contract: any thread. Nodes,
// gradients and passes are destroyed outside the lock.
class ContextState {
 public:
  explicit ContextState(ContextId id) : id_(id) {}
  ContextState(const ContextState&) = delete;
  ContextState& operator=(const ContextState&) = delete;

  [[nodiscard]] const ContextId& id() const noexcept { return id_; }
  [[nodiscard]] const std::shared_ptr<GradientStore>& gradients() const noexcept {
    return gradients_;
  }
  [[nodiscard]] bool ended() const STITCH_EXCLUDES(mutex_);

  // Keeps a send node under its link. `of_gradients`: it stands for gradients of a pass with
  // create_graph. False after end().
  bool add_send(LinkId link, NodePtr node, bool of_gradients) STITCH_EXCLUDES(mutex_);
  // The message of that link never left.
  void remove_send(LinkId link) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::vector<NodePtr> sends() const STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t send_count() const STITCH_EXCLUDES(mutex_);
  [[nodiscard]] bool has_gradient_links() const STITCH_EXCLUDES(mutex_);

  // Remembers that `peer` has been told the id. False after end(): then it must not be told.
  bool add_peer(const WorkerInfo& peer) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::vector<WorkerInfo> peers() const STITCH_EXCLUDES(mutex_);

  // The pass of that id; made by `make` when it is new. Null when the context or that pass has
  // ended here.
  [[nodiscard]] std::shared_ptr<Pass> open_pass(PassId id,
                                                const std::function<std::shared_ptr<Pass>()>& make)
      STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::shared_ptr<Pass> find_pass(PassId id) const STITCH_EXCLUDES(mutex_);
  // The pass has ended here: what still comes for it is ignored.
  void close_pass(PassId id) STITCH_EXCLUDES(mutex_);
  // This worker has heard that the pass failed. True the first time: then it is to be passed on.
  [[nodiscard]] bool note_abort(PassId id) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::vector<std::shared_ptr<Pass>> passes() const STITCH_EXCLUDES(mutex_);

  // Ends the context here. The first call returns its passes, to be aborted, and the peers, to be
  // told.
  struct Ending {
    bool first = false;
    std::vector<std::shared_ptr<Pass>> passes;
    std::vector<WorkerInfo> peers;
  };
  Ending end() STITCH_EXCLUDES(mutex_);

 private:
  struct Send {
    NodePtr node;
    bool of_gradients = false;
  };
  const ContextId id_;
  const std::shared_ptr<GradientStore> gradients_ = std::make_shared<GradientStore>();

  mutable Mutex mutex_;
  bool ended_ STITCH_GUARDED_BY(mutex_) = false;
  std::unordered_map<LinkId, Send> sends_ STITCH_GUARDED_BY(mutex_);
  std::size_t gradient_links_ STITCH_GUARDED_BY(mutex_) = 0;
  std::unordered_map<WorkerId, WorkerInfo> peers_ STITCH_GUARDED_BY(mutex_);
  std::unordered_map<PassId, std::shared_ptr<Pass>> passes_ STITCH_GUARDED_BY(mutex_);
  std::unordered_set<PassId> past_passes_ STITCH_GUARDED_BY(mutex_);
  std::unordered_set<PassId> aborted_passes_ STITCH_GUARDED_BY(mutex_);
};

// What the ambient of a thread carries: the current context, and the call it is part of, in words
// for error texts.
struct Carried {
  std::shared_ptr<ContextState> context;
  std::string call;
};

}  // namespace stitch::dist_autograd
