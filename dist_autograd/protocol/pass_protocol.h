#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/dist_autograd/graph/ids.h"
#include "stitch/dist_autograd/protocol/messages.h"

namespace stitch::dist_autograd {

// The graph of a pass on this worker, as the protocol sees it. Nodes are numbered. Answers are
// constant, except that marked() grows with mark..(). Owned by the PassProtocol; not thread-safe.
class PassGraph {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
  virtual ~PassGraph() = default;

  // Every node's number is below this one.
  [[nodiscard]] virtual std::uint32_t size() const = 0;
  // All SendNodes.
  [[nodiscard]] virtual std::span<const std::uint32_t> sends() const = 0;
  // The SendNode of this worker's link with that counter, or kNone.
  [[nodiscard]] virtual std::uint32_t find(std::uint64_t link) const = 0;
  // The worker that got the tensors of a SendNode, and the call they belong to, in words.
  [[nodiscard]] virtual WorkerId receiver(std::uint32_t send) const = 0;
  [[nodiscard]] virtual const std::string& call(std::uint32_t send) const = 0;

  // Marks the nodes that are reachable from a SendNode, and appends the links of RecvNodes that
  // this call marks. Throws for a RecvNode of another context.
  virtual void mark(std::uint32_t send, std::vector<LinkId>& reached) = 0;
  // The same from all roots and from the SendNodes that are `delivered` (by node), after all nodes
  // have run that their gradients allow. Leaves out RecvNodes that have run: those that no SendNode
  // without gradients leads to.
  virtual void mark_used(const std::vector<bool>& delivered, std::vector<LinkId>& reached) = 0;
  [[nodiscard]] virtual bool marked(std::uint32_t send) const = 0;
};

// The effects of an event of the protocol: decided under the lock of the pass, carried out in this
// order without it.
struct PassEffects {
  std::vector<std::pair<WorkerId, wire::Mark>> marks;  // MARK to these
  std::vector<std::pair<WorkerId, wire::Ack>> acks;    // ACK to these
  std::vector<WorkerId> quiet;                         // QUIET to these
  std::vector<WorkerId> close_marking;                 // CLOSE_MARKING to these
  std::vector<std::uint32_t> kill;                     // SendNodes that get no gradient
  // Root, at most once, with the QUIETs: every link of every participant has got its gradient, so
  // all nodes have run, and none is left that could fail.
  bool settled = false;
  bool succeed = false;  // root: all workers are done
  bool done = false;     // other workers: done here, DONE to the root
  bool deliver = false;  // GRADIENTS: hand its gradients to the strand
  // The sender of this message is new to the pass. As the pass hears only of later losses, it
  // checks whether the sender or the root is lost already.
  bool new_peer = false;
};

// The protocol of one pass on one worker (PROTOCOL.md): events in, effects out, to the end of
// marking and of the pass. No I/O, no locks, no tensors. A pass that is not running ignores events.
// Events named on_...() are messages of `from`; they throw Error(protocol) for a message that no
// correct worker sends, and the caller must then fail the pass. Owned by its Pass, whose mutex
// guards it.
class PassProtocol {
 public:
  PassProtocol(WorkerId self, WorkerId root) : self_(self), root_(root) {}

  // The graph, once it has been built. REQUIRES: called once, before every event below.
  void set_graph(std::unique_ptr<PassGraph> graph);

  // Root: the roots are seeded.
  [[nodiscard]] PassEffects begin();

  [[nodiscard]] PassEffects on_mark(const WorkerInfo& from, const wire::Mark& mark);
  [[nodiscard]] PassEffects on_ack(const WorkerInfo& from, const wire::Ack& ack);
  [[nodiscard]] PassEffects on_quiet(const WorkerInfo& from);
  [[nodiscard]] PassEffects on_close_marking(const WorkerInfo& from);
  [[nodiscard]] PassEffects on_done(const WorkerInfo& from);
  // One GRADIENTS message, for these SendNodes, with the ACK that rides on it.
  [[nodiscard]] PassEffects on_gradients(const WorkerInfo& from, const wire::Ack& ack,
                                         std::span<const std::uint32_t> sends);

  // A GRADIENTS message is about to be sent to that worker. Returns the ACK to send with it; none
  // when the pass is over: do not send. `last`: the strand has nothing else to send or to run, and
  // has processed so many deliveries and kills.
  [[nodiscard]] std::optional<wire::Ack> sending_gradients(
      WorkerId to, std::optional<std::uint64_t> last = std::nullopt);
  // The worker whose GRADIENTS should leave last: they may carry the ACK that this one owes it.
  [[nodiscard]] std::optional<WorkerId> parent() const noexcept { return parent_; }
  // One has been written: its tensors may change from now on.
  [[nodiscard]] PassEffects gradients_written();
  // The strand has nothing to run and has sent what it had. `taken`: deliveries and kills that it
  // has processed so far; `resolved`: every node has run or is dead.
  [[nodiscard]] PassEffects strand_quiet(std::uint64_t taken, bool resolved);

  // The pass has failed. False when it is not running.
  bool fail();
  // It has been taken out of its context; nothing of it runs here.
  void end() { phase_ = Phase::ended; }

  [[nodiscard]] bool running() const noexcept {
    return phase_ == Phase::gradients || phase_ == Phase::marking || phase_ == Phase::closed;
  }
  // Whether QUIET, or at the root an ACK, may make it walk the graph.
  [[nodiscard]] bool may_mark() const noexcept {
    return missing_ != 0 && (phase_ == Phase::gradients || phase_ == Phase::marking);
  }
  [[nodiscard]] bool ended() const noexcept { return phase_ == Phase::ended; }
  // The workers that must be told of a failure. The root knows all
  // when it sends QUIET and, of those that marking has added, when that has ended.
  [[nodiscard]] std::set<WorkerId> concerned() const;
  // True when the pass cannot end without that worker.
  [[nodiscard]] bool needs(WorkerId worker) const;
  // The workers that this pass may be waiting for.
  [[nodiscard]] const std::set<WorkerId>& awaited() const noexcept {
    return phase_ == Phase::closed ? not_done_ : peers_;
  }

 private:
  [[nodiscard]] bool is_root() const noexcept { return self_ == root_; }
  [[nodiscard]] bool idle() const noexcept { return !parent_ && deficit_ == 0 && owed_.empty(); }
  void engage(WorkerId by, PassEffects& effects);
  void take_ack(const WorkerInfo& from, const wire::Ack& ack);
  void send_marks(const std::vector<LinkId>& reached, PassEffects& effects);
  void mark_used(PassEffects& effects);
  void advance(PassEffects& effects);
  void acknowledge(PassEffects& effects);
  void disengage(PassEffects& effects);
  [[nodiscard]] wire::Ack answer_parent();
  void end_gradients(PassEffects& effects);
  void close_marking(PassEffects& effects);

  // gradients: nodes run as if all links were used, and every GRADIENTS is acknowledged. marking:
  // MARKs spread, and are acknowledged. closed: nothing is acknowledged any more; it ends when all
  // has run. failed: the strand is being stopped. ended: done or failed here.
  enum class Phase : std::uint8_t { gradients, marking, closed, failed, ended };

  const WorkerId self_;
  const WorkerId root_;
  std::unique_ptr<PassGraph> graph_;
  Phase phase_ = Phase::gradients;
  std::set<WorkerId> peers_;  // sent to or received from

  // Dijkstra-Scholten: the worker to acknowledge to when everything this worker has
  // caused has ended.
  std::optional<WorkerId> parent_;
  std::uint64_t deficit_ = 0;                   // messages sent, not yet acknowledged
  std::map<WorkerId, std::uint64_t> deficits_;  // the same by receiver
  std::map<WorkerId, std::uint32_t> owed_;      // ACKs for GRADIENTS, but for the parent's first
  std::set<WorkerId> participants_;             // as the ACKs named them
  bool begun_ = false;                          // root: its own messages are counted
  std::set<WorkerId> not_done_;                 // root: those that have not said DONE
  bool heard_quiet_ = false;

  std::vector<bool> delivered_;      // by node: a GRADIENTS came for it
  std::size_t missing_ = 0;          // SendNodes for which none came
  std::uint64_t told_missing_ = 0;   // the value of missing_ that other workers know
  std::uint64_t below_missing_ = 0;  // the sum of what ACKs have told, not passed on yet
  std::uint64_t posted_ = 0;         // deliveries and kills handed to the strand
  bool quiet_ = false;               // the strand has processed all of them and is idle
  bool resolved_ = false;
  std::uint64_t writing_ = 0;  // GRADIENTS sent, not yet written
};

}  // namespace stitch::dist_autograd
