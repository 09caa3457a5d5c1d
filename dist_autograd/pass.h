#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "stitch/dist_autograd/context_state.h"
#include "stitch/dist_autograd/messages.h"
#include "stitch/dist_autograd/outbox.h"
#include "stitch/dist_autograd/plan.h"
#include "stitch/dist_autograd/strand.h"
#include "stitch/rpc/agent.h"
#include "stitch/rpc/future.h"

namespace stitch::dist_autograd {

class Engine;

// One backward pass on one worker: builds the plan, runs it on a strand, and talks with the same pass on other workers until
// it has ended everywhere. PROTOCOL.md has the protocol, its guarantees and why they hold; the names here are those there.
// Owned by its context until it ends here; messages, timers and the strand that are still under way share it.
// Thread contract: any thread. No lock is held while messages are sent, nodes run or the future completes.
class Pass final : public StrandOwner, public std::enable_shared_from_this<Pass> {
 public:
  struct Settings {
    RunFlags run;
    bool fast = false;
    [[nodiscard]] std::uint8_t to_wire() const;
    [[nodiscard]] static Settings from_wire(std::uint8_t flags);
  };

  Pass(Engine& engine, std::shared_ptr<Agent> agent, std::shared_ptr<ContextState> context, PassId id, Settings settings);

  // On the root worker only: starts the pass. `roots` and `gradients` have been checked. `done` completes when the pass has
  // ended everywhere, or with the first error once nothing of it runs here any more.
  void begin(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& gradients, Promise<void> done, Clock::time_point deadline);

  // Messages. Whatever is wrong with them ends the pass with an error; nothing is thrown.
  void on_mark(const WorkerInfo& from, const wire::Mark& mark);
  void on_ack(const WorkerInfo& from, const wire::Ack& ack);
  void on_settle(const WorkerInfo& from);
  void on_gradients(const WorkerInfo& from, std::vector<wire::GradientEntry> entries, std::vector<at::Tensor> tensors);
  void on_done(const WorkerInfo& from, const wire::Done& done);
  void on_abort(const WorkerInfo& from, const Error& error);
  // Ends the pass when that worker has had to do with it.
  void on_peer_lost(const WorkerInfo& peer, const Error& reason);

  // Ends the pass everywhere with this error, unless it has ended or failed already.
  void abort(const Error& error);
  // Waits until no node of it runs here. Returns at once when this thread is running one.
  void wait_until_quiet();

  [[nodiscard]] const PassId& id() const noexcept { return id_; }
  [[nodiscard]] bool root() const noexcept;

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
    bool succeed = false;              // root: all workers are done
    std::optional<WorkerId> done_to;   // elsewhere: this worker is done
    wire::Done done;
    std::optional<Error> error;
  };
  void prepare(std::vector<Edge> roots);
  void guard(const char* what, const std::function<void()>& handle);
  void spread(std::uint32_t source, std::map<WorkerId, wire::Mark>& marks) STITCH_REQUIRES(mutex_);
  void send_marks(std::map<WorkerId, wire::Mark> marks, Actions& actions) STITCH_REQUIRES(mutex_);
  void engage(const WorkerInfo& from, Actions& actions) STITCH_REQUIRES(mutex_);
  void advance(Actions& actions) STITCH_REQUIRES(mutex_);
  void disengage(Actions& actions) STITCH_REQUIRES(mutex_);
  void settle(Actions& actions) STITCH_REQUIRES(mutex_);
  [[nodiscard]] wire::Done summary() const STITCH_REQUIRES(mutex_);
  [[nodiscard]] Error unused_error() const STITCH_REQUIRES(mutex_);
  [[nodiscard]] bool running() const STITCH_REQUIRES(mutex_) { return phase_ == Phase::open || phase_ == Phase::settled; }
  void perform(Actions actions) STITCH_EXCLUDES(mutex_);
  void flush();
  void send(WorkerId to, OutMessage message, bool counted = false);
  [[nodiscard]] OutMessage message(std::uint16_t kind) const;
  void finish(const std::optional<Error>& error);
  void expire();
  [[nodiscard]] Error on_this_worker(const Error& error, const char* prefix) const;

  // Constant after construction.
  Engine& engine_;
  const std::shared_ptr<Agent> agent_;
  const std::shared_ptr<ContextState> context_;
  const PassId id_;
  const Settings settings_;

  // Constant after prepare(), which every path calls first.
  std::once_flag prepared_;
  std::shared_ptr<const Plan> plan_;
  std::shared_ptr<Strand> strand_;

  // Only on the strand.
  Outbox outbox_;

  // open: nodes run, it is not known yet which links the loss uses. settled: it is. ended: done or failed here.
  enum class Phase : std::uint8_t { open, settled, aborted, ended };

  mutable Mutex mutex_;
  CondVar changed_;
  Phase phase_ STITCH_GUARDED_BY(mutex_) = Phase::open;
  bool stopped_ STITCH_GUARDED_BY(mutex_) = false;  // the strand has dropped everything
  std::optional<Error> error_ STITCH_GUARDED_BY(mutex_);
  std::optional<Promise<void>> promise_ STITCH_GUARDED_BY(mutex_);
  transport::EventLoop::TimerId timer_ STITCH_GUARDED_BY(mutex_) = 0;
  std::set<WorkerId> peers_ STITCH_GUARDED_BY(mutex_);  // sent to or received from

  // Dijkstra-Scholten: who is to be told when everything this worker has caused has ended.
  std::optional<WorkerId> parent_ STITCH_GUARDED_BY(mutex_);
  std::uint64_t deficit_ STITCH_GUARDED_BY(mutex_) = 0;            // messages sent, not yet acked
  std::map<WorkerId, std::uint32_t> owed_ STITCH_GUARDED_BY(mutex_);  // acks to send when quiet, parent's apart
  std::set<WorkerId> participants_ STITCH_GUARDED_BY(mutex_);      // reported from below
  bool ending_ STITCH_GUARDED_BY(mutex_) = false;                  // root: all acks are in
  std::set<WorkerId> not_done_ STITCH_GUARDED_BY(mutex_);          // root: who has not said DONE
  bool idle_ STITCH_GUARDED_BY(mutex_) = false;                    // settled, resolved, nothing being written
  wire::Done unused_ STITCH_GUARDED_BY(mutex_);                    // root: from all

  std::optional<Marks> marks_ STITCH_GUARDED_BY(mutex_);
  std::vector<bool> delivered_ STITCH_GUARDED_BY(mutex_);  // by node
  std::uint64_t posted_ STITCH_GUARDED_BY(mutex_) = 0;     // arrivals handed to the strand
  bool quiet_ STITCH_GUARDED_BY(mutex_) = false;           // and all worked in, nothing to run, nothing in the outbox
  bool resolved_ STITCH_GUARDED_BY(mutex_) = false;
  std::uint64_t writing_ STITCH_GUARDED_BY(mutex_) = 0;    // messages with gradients not yet written
};

}  // namespace stitch::dist_autograd
