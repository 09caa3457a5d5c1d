#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "stitch/dist_autograd/context_state.h"
#include "stitch/dist_autograd/executor/plan.h"
#include "stitch/dist_autograd/executor/strand.h"
#include "stitch/dist_autograd/messages.h"
#include "stitch/dist_autograd/outbox.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/future/future.h"

namespace stitch::dist_autograd {

class Engine;

// One backward pass on one worker: builds the plan, runs it on a strand, and talks with the same
// pass on other workers until it has ended everywhere. PROTOCOL.md has the protocol, its guarantees
// and why they hold; the names here are those there. Owned by its context until it ends here;
// messages, timers and the strand that are still under way share it. Thread contract: any thread.
// No lock is held while messages are sent, nodes run or the future completes.
class Pass final : public StrandOwner, public std::enable_shared_from_this<Pass> {
 public:
  struct Settings {
    RunFlags run;
    bool fast = false;
    [[nodiscard]] std::uint8_t to_wire() const;
    [[nodiscard]] static Settings from_wire(std::uint8_t flags);
  };

  Pass(Engine& engine, std::shared_ptr<rpc::Agent> agent, std::shared_ptr<ContextState> context,
       PassId id, Settings settings);

  // Builds the plan. Every path into the pass calls it first; only the first call counts. `roots`:
  // on the root worker.
  void prepare(std::vector<Edge> roots = {});
  // On the root worker only, after prepare(): starts the pass with the checked gradients of the
  // roots. `done` completes when the pass has ended everywhere, or with the first error once
  // nothing of it runs here any more.
  void begin(std::vector<at::Tensor> gradients, Promise<void> done, rpc::Clock::time_point deadline)
      STITCH_EXCLUDES(mutex_);

  // Messages. Whatever is wrong with them ends the pass with an error; nothing is thrown.
  void on_mark(const WorkerInfo& from, const wire::Mark& mark);
  void on_ack(const WorkerInfo& from, const wire::Ack& ack);
  void on_settle(const WorkerInfo& from);
  void on_gradients(const WorkerInfo& from, std::vector<wire::GradientEntry> entries,
                    std::vector<at::Tensor> tensors);
  void on_done(const WorkerInfo& from, const wire::Done& done);
  // Ends the pass when that worker has had to do with it.
  void on_peer_lost(const WorkerInfo& peer, const Error& reason);

  // Ends the pass everywhere with this error, unless it has ended or failed already. Its context
  // has failed then, too.
  void abort(const Error& error);
  // Waits until no node of it runs here. Returns at once when this thread is running one.
  void wait_until_quiet();

  [[nodiscard]] const PassId& id() const noexcept { return id_; }
  // True on the worker that called backward().
  [[nodiscard]] bool root() const noexcept { return id_.root == agent_->self().id; }

 private:
  // StrandOwner
  void gradients_ready(RecvNode& node, variable_list gradients) override;
  void before_node() override;
  void went_quiet(std::uint64_t taken, bool resolved) override;
  void failed(Error error) override;
  void stopped() override;

  // What must happen once the lock is released, decided under it.
  struct Actions {
    std::vector<std::pair<WorkerId, wire::Mark>> marks;
    std::vector<std::pair<WorkerId, wire::Ack>> acks;
    std::vector<WorkerId> settle;
    std::vector<std::uint32_t> kill;
    bool succeed = false;            // root: all workers are done
    std::optional<wire::Done> done;  // elsewhere: this worker is done
    std::optional<Error> error;
  };
  using MarksByPeer = std::map<WorkerId, wire::Mark>;

  // pass_control.cc: what the protocol decides
  void spread(std::uint32_t source, MarksByPeer& marks) STITCH_REQUIRES(mutex_);
  void send_marks(MarksByPeer marks, Actions& actions) STITCH_REQUIRES(mutex_);
  void advance(Actions& actions) STITCH_REQUIRES(mutex_);
  void disengage(Actions& actions) STITCH_REQUIRES(mutex_);
  void settle(Actions& actions) STITCH_REQUIRES(mutex_);
  [[nodiscard]] wire::Done unused_links() const STITCH_REQUIRES(mutex_);
  [[nodiscard]] Error unused_error() const STITCH_REQUIRES(mutex_);
  [[nodiscard]] bool running() const STITCH_REQUIRES(mutex_) {
    return phase_ == Phase::open || phase_ == Phase::settled;
  }

  // pass.cc: how it is done
  void guard(const std::function<void()>& handle) STITCH_EXCLUDES(mutex_);
  void perform(Actions actions) STITCH_EXCLUDES(mutex_);
  void flush() STITCH_EXCLUDES(mutex_);
  // Ends the pass when a worker that has just entered it was lost before: on_peer_lost() has
  // passed.
  void check_lost(WorkerId peer) STITCH_EXCLUDES(mutex_);
  // The root will not hear that this worker is done, so the pass must fail.
  void done_not_sent(const Error& error) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::set<WorkerId> concerned() const STITCH_REQUIRES(mutex_);
  [[nodiscard]] wire::PassHeader header() const;
  [[nodiscard]] rpc::OutMessage message(std::uint16_t kind) const;
  void send(WorkerId to, rpc::OutMessage message, bool carries_gradients = false)
      STITCH_EXCLUDES(mutex_);
  void finish(const std::optional<Error>& error) STITCH_EXCLUDES(mutex_);
  void expire() STITCH_EXCLUDES(mutex_);
  [[nodiscard]] Error found_here(const Error& error) const;
  // Throws when the node belongs to another context.
  void require_own(const RecvNode& node) const;
  // The gradients of one entry; moves its tensors out of `tensors`, from `next` on.
  [[nodiscard]] variable_list unpack(const WorkerInfo& from, const wire::GradientEntry& entry,
                                     std::uint32_t index, std::vector<at::Tensor>& tensors,
                                     std::size_t& next) const;

  // Constant after construction.
  Engine& engine_;
  const std::shared_ptr<rpc::Agent> agent_;
  const std::shared_ptr<ContextState> context_;
  const PassId id_;
  const Settings settings_;

  // Constant after prepare(), which every path calls first.
  std::once_flag prepared_;
  std::shared_ptr<const Plan> plan_;
  std::shared_ptr<Strand> strand_;

  // Only on the strand.
  Outbox outbox_;

  // open: nodes run, it is not known yet which links the loss uses. settled: it is. ended: done or
  // failed here.
  enum class Phase : std::uint8_t { open, settled, aborted, ended };

  mutable base::Mutex mutex_;
  base::CondVar changed_;
  Phase phase_ STITCH_GUARDED_BY(mutex_) = Phase::open;
  std::optional<Error> error_ STITCH_GUARDED_BY(mutex_);
  std::optional<Promise<void>> promise_ STITCH_GUARDED_BY(mutex_);
  rpc::Clock::time_point begun_ STITCH_GUARDED_BY(mutex_);
  base::EventLoop::TimerId timer_ STITCH_GUARDED_BY(mutex_) = 0;
  std::set<WorkerId> peers_ STITCH_GUARDED_BY(mutex_);  // sent to or received from

  // Dijkstra-Scholten: who is to be told when everything this worker has caused has ended.
  std::optional<WorkerId> parent_ STITCH_GUARDED_BY(mutex_);
  std::uint64_t deficit_ STITCH_GUARDED_BY(mutex_) = 0;  // messages sent, not yet acked
  std::map<WorkerId, std::uint64_t> deficits_ STITCH_GUARDED_BY(mutex_);  // by receiver
  std::map<WorkerId, std::uint32_t> owed_
      STITCH_GUARDED_BY(mutex_);  // acks to send when quiet, parent's apart
  std::set<WorkerId> participants_ STITCH_GUARDED_BY(mutex_);  // reported from below
  bool begun_marking_ STITCH_GUARDED_BY(mutex_) = false;       // root: its own marks are counted
  std::set<WorkerId> not_done_ STITCH_GUARDED_BY(mutex_);      // root: who has not said DONE
  wire::Done unused_ STITCH_GUARDED_BY(mutex_);                // root: from all

  std::optional<Marks> marks_ STITCH_GUARDED_BY(mutex_);
  std::vector<bool> delivered_ STITCH_GUARDED_BY(mutex_);  // by node
  std::uint64_t posted_ STITCH_GUARDED_BY(mutex_) = 0;     // arrivals handed to the strand
  bool quiet_ STITCH_GUARDED_BY(mutex_) =
      false;  // and all worked in, nothing to run, nothing in the outbox
  bool resolved_ STITCH_GUARDED_BY(mutex_) = false;
  std::uint64_t writing_ STITCH_GUARDED_BY(mutex_) = 0;  // messages with gradients not yet written
};

}  // namespace stitch::dist_autograd
