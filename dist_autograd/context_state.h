#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/base/recycler.h"
#include "stitch/dist_autograd/graph/gradient_store.h"
#include "stitch/dist_autograd/graph/ids.h"
#include "stitch/dist_autograd/graph/optimizers_step.h"
#include "stitch/dist_autograd/graph/send_node.h"
#include "stitch/dist_autograd/protocol/messages.h"
#include "stitch/rref/lifetime/interval_set.h"

namespace stitch::dist_autograd {

class Pass;

// The work of a pass on one worker, for graph_dot and reports.
struct PassSummary {
  struct Sent {
    LinkId link;  // the link whose gradients were sent
    std::size_t bytes = 0;
  };
  PassId pass;
  std::vector<Sent> sent;
  std::uint64_t nodes_run = 0;
  std::chrono::nanoseconds took{0};  // from the worker's first message of the pass to its end there
};

// One context on one worker: the links of messages sent, the accumulated gradients, the running
// passes, the workers that were told the id and those that told it to this worker. Shared by the
// table of contexts, by code that runs under it, and by its passes. After end() it is empty and
// stays so. After fail() it still records, but its gradients cannot be read any more: leaves add to
// them as they run, so a pass that did not finish leaves partial sums. Thread contract: any thread.
// Nodes, gradients and passes are destroyed outside the lock.
class ContextState {
 public:
  explicit ContextState(ContextId id) : id_(id) {}

  [[nodiscard]] const ContextId& id() const noexcept { return id_; }
  [[nodiscard]] const std::shared_ptr<GradientStore>& gradients() const noexcept {
    return gradients_;
  }
  // optimizer_steps when the context reached this worker.
  [[nodiscard]] std::uint64_t steps_before() const noexcept { return steps_before_; }
  [[nodiscard]] bool ended() const STITCH_EXCLUDES(mutex_);
  // The error of the pass that failed first, as far as this worker knows.
  [[nodiscard]] std::optional<Error> failure() const STITCH_EXCLUDES(mutex_);
  // Throws Error(cancelled) after end(), and failure() after fail().
  void throw_if_unusable() const STITCH_EXCLUDES(mutex_);

  // Keeps a send node under its link. False after end().
  bool add_send(LinkId link, NodePtr node) STITCH_EXCLUDES(mutex_);
  // The message of that link was never sent.
  void remove_send(LinkId link) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::vector<NodePtr> sends() const STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t send_count() const STITCH_EXCLUDES(mutex_);

  // Remembers a peer that gets the id from this worker. False after end(): it must not get the id.
  bool add_peer(const WorkerInfo& peer) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::vector<WorkerInfo> peers() const STITCH_EXCLUDES(mutex_);
  // Remembers a worker from which this one has the id: it will send RELEASE, too.
  void add_teller(WorkerId worker, std::uint64_t epoch) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] bool told_by(WorkerId worker, std::uint64_t epoch) const STITCH_EXCLUDES(mutex_);
  // A teller is lost. True when it was the last one.
  [[nodiscard]] bool remove_teller(WorkerId worker, std::uint64_t epoch) STITCH_EXCLUDES(mutex_);

  // The number of a new pass that this worker starts. It counts as open until close_pass(), which
  // is called also when no pass could be made.
  [[nodiscard]] std::uint64_t next_pass() STITCH_EXCLUDES(mutex_);
  // The pass of that id; made by `make` when it is new. Null when that pass has ended here. Throws
  // as throw_if_unusable() instead of making one, or Error(overloaded) beyond kMaxPasses.
  static constexpr std::size_t kMaxPasses = 4096;
  [[nodiscard]] std::shared_ptr<Pass> open_pass(PassId id,
                                                const std::function<std::shared_ptr<Pass>()>& make)
      STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::shared_ptr<Pass> find_pass(PassId id) const STITCH_EXCLUDES(mutex_);
  // Whether the pass has ended here, or its root has said that it has ended.
  [[nodiscard]] bool has_ended(PassId id) const STITCH_EXCLUDES(mutex_);
  // The pass has ended here: later messages for it are ignored.
  void close_pass(PassId id) noexcept STITCH_EXCLUDES(mutex_);
  // The passes that the root of `id` began earlier, as QUIET names them. REQUIRES: this worker is
  // the root.
  [[nodiscard]] wire::OlderPasses older_passes(PassId id) const STITCH_EXCLUDES(mutex_);
  // Takes older_passes() of the root of `id`: passes that have ended there and are not open here
  // will not be opened. REQUIRES: older.valid_before(id.counter).
  void close_older_passes(PassId id, const wire::OlderPasses& older) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::vector<std::shared_ptr<Pass>> passes() const STITCH_EXCLUDES(mutex_);
  // The pass that ended here last, without an error.
  void set_last_pass(PassSummary summary) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::optional<PassSummary> last_pass() const STITCH_EXCLUDES(mutex_);
  // The size of the memory of ended passes, in intervals of counters.
  [[nodiscard]] std::size_t past_passes_remembered() const STITCH_EXCLUDES(mutex_);

  // A pass of the context has failed. `error` becomes failure() unless there is one. The first call
  // returns the passes, to be aborted, and the peers, to be told.
  struct FailEffects {
    bool first = false;
    Error error;  // the failure; the error given when the context has ended
    std::vector<std::shared_ptr<Pass>> passes;
    std::vector<WorkerInfo> peers;
  };
  [[nodiscard]] FailEffects fail(const Error& error) noexcept STITCH_EXCLUDES(mutex_);

  // Ends the context here. The first call returns its passes, to be aborted, and the peers, to be
  // told.
  struct EndEffects {
    bool first = false;
    std::vector<std::shared_ptr<Pass>> passes;
    std::vector<WorkerInfo> peers;
  };
  EndEffects end() noexcept STITCH_EXCLUDES(mutex_);

 private:
  using Life = std::pair<WorkerId, std::uint64_t>;
  void check_usable() const STITCH_REQUIRES(mutex_);
  [[nodiscard]] bool is_past(PassId id) const STITCH_REQUIRES(mutex_);
  const ContextId id_;
  const std::uint64_t steps_before_ = optimizer_steps;
  const std::shared_ptr<GradientStore> gradients_ = std::make_shared<GradientStore>();

  mutable base::Mutex mutex_;
  bool ended_ STITCH_GUARDED_BY(mutex_) = false;
  std::optional<Error> failure_ STITCH_GUARDED_BY(mutex_);
  std::unordered_map<LinkId, NodePtr, std::hash<LinkId>, std::equal_to<>,
                     base::RecyclingAllocator<std::pair<const LinkId, NodePtr>>>
      sends_ STITCH_GUARDED_BY(mutex_);
  std::unordered_map<WorkerId, WorkerInfo> peers_ STITCH_GUARDED_BY(mutex_);
  std::vector<Life> tellers_ STITCH_GUARDED_BY(mutex_);
  static constexpr std::uint64_t kFirstPass = 1;
  std::uint64_t next_pass_ STITCH_GUARDED_BY(mutex_) = kFirstPass;
  std::unordered_map<PassId, std::shared_ptr<Pass>> passes_ STITCH_GUARDED_BY(mutex_);
  std::optional<PassSummary> last_pass_ STITCH_GUARDED_BY(mutex_);
  // By root, whose passes that are open there are the gaps.
  std::map<Life, rref::IntervalSet> past_passes_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::dist_autograd
