#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "stitch/dist_autograd/at_settled.h"
#include "stitch/dist_autograd/context_state.h"
#include "stitch/dist_autograd/executor/node_run.h"
#include "stitch/dist_autograd/executor/plan.h"
#include "stitch/dist_autograd/executor/strand.h"
#include "stitch/dist_autograd/executor/warning_collector.h"
#include "stitch/dist_autograd/protocol/messages.h"
#include "stitch/dist_autograd/protocol/outbox.h"
#include "stitch/dist_autograd/protocol/pass_lives.h"
#include "stitch/dist_autograd/protocol/pass_protocol.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/future/future.h"

namespace stitch::dist_autograd {

// The settings of a pass, which the root's worker decides. MARK and GRADIENTS carry them as flags,
// because either may open the pass on another worker. A plain value.
struct PassSettings {
  RunFlags run;
  [[nodiscard]] std::uint8_t to_wire() const;
  // Ignores unknown flags, so that to_wire() differs from `flags`.
  [[nodiscard]] static PassSettings from_wire(std::uint8_t flags);
};

class Engine;

// One backward pass on one worker: builds the plan, runs it on a strand, and carries out the
// effects of the protocol (pass_protocol.h): messages, and the end of the pass. Owned by its
// context until the pass ends here; messages, timers and the strand share it. Thread contract: any
// thread. No lock is held while messages are sent, nodes run or the future completes.
class Pass final : public StrandOwner, public std::enable_shared_from_this<Pass> {
 public:
  using Settings = PassSettings;

  Pass(Engine& engine, std::shared_ptr<rpc::Agent> agent, std::shared_ptr<ContextState> context,
       PassId id, Settings settings, std::shared_ptr<AtSettled> at_settled = nullptr);

  // Builds the plan. Every path into the pass calls it first; only the first call counts. `roots`
  // and `inputs` (with Settings::run.only_inputs): on the root worker.
  void prepare(std::vector<Edge> roots = {}, LeafSet inputs = {});
  // On the root worker only, after prepare(): starts the pass with the checked gradients of the
  // roots. `done` completes when the pass has ended on all workers, or with the first error when no
  // node of the pass runs here any more.
  void begin(std::vector<at::Tensor> gradients, Promise<void> done, rpc::Clock::time_point deadline)
      STITCH_EXCLUDES(mutex_);
  // As begin(), and this thread runs ready nodes and reads messages, until the pass has ended here
  // or another thread reads; the pass then goes on without this thread. REQUIRES: this thread
  // handles no message.
  void begin_and_drive(std::vector<at::Tensor> gradients, Promise<void> done,
                       rpc::Clock::time_point deadline) STITCH_EXCLUDES(mutex_);
  // Keeps the warnings of nodes that run here for the thread that waits for the pass. REQUIRES:
  // before begin().
  void collect_warnings() noexcept { collects_warnings_ = true; }
  // Gives the warnings to this thread's handler. REQUIRES: the future of the pass has completed.
  void replay_warnings() { warnings_.replay(); }
  // Wakes the thread in begin_and_drive(): work has come, or the pass has ended. Any thread.
  void wake_driver() noexcept { driver_wanted_.set(); }

  // Messages. An invalid one ends the pass with an error; nothing is thrown.
  void on_mark(const WorkerInfo& from, const wire::Mark& mark);
  void on_ack(const WorkerInfo& from, const wire::Ack& ack);
  void on_quiet(const WorkerInfo& from, const wire::OlderPasses& older);
  void on_close_marking(const WorkerInfo& from, const wire::OlderPasses& older);
  void on_gradients(const WorkerInfo& from, const wire::Ack& ack,
                    const std::vector<wire::GradientEntry>& entries,
                    std::vector<at::Tensor> tensors);
  void on_done(const WorkerInfo& from);
  // Whether QUIET, or at the root an ACK, may take long: then it belongs on the thread pool.
  [[nodiscard]] bool may_take_long() const STITCH_EXCLUDES(mutex_) {
    if (at_settled_) return true;
    base::MutexLock lock(mutex_);
    return protocol_.may_mark();
  }
  // The settings of the pass as flags, equal in all its MARKs and GRADIENTS.
  [[nodiscard]] std::uint8_t flags() const { return settings_.to_wire(); }
  // Ends the pass if it needs that life of a worker.
  void on_peer_lost(const WorkerInfo& peer, const Error& reason);

  // Ends the pass on all workers with this error, unless it has ended or failed already. Its
  // context has failed then, too.
  void abort(const Error& error) noexcept STITCH_EXCLUDES(mutex_);
  // Waits until no node of it runs here. Returns immediately when this thread is running one.
  void wait_until_quiet();

  [[nodiscard]] const PassId& id() const noexcept { return id_; }
  [[nodiscard]] const ContextId& context_id() const noexcept { return context_->id(); }
  // For reports: since when it is open here, for which workers it waits now, how many nodes have
  // run, and the thread that runs one.
  struct Progress {
    rpc::Clock::time_point opened;
    std::vector<WorkerId> awaited;
    std::uint64_t nodes_run = 0;
    int thread = 0;
  };
  [[nodiscard]] Progress progress() STITCH_EXCLUDES(mutex_);
  // Whether `header` is of this pass.
  [[nodiscard]] bool is(const wire::PassHeader& header) const noexcept {
    return id_ == header.pass && context_->id() == header.context;
  }
  // True on the worker that called backward().
  [[nodiscard]] bool root() const noexcept { return id_.root == agent_->self().id; }

 private:
  // StrandOwner
  void gradients_ready(RecvNode& node, variable_list gradients,
                       const Positions& unreached) override;
  [[nodiscard]] bool before_node() override STITCH_EXCLUDES(mutex_);
  void partly_quiet() override STITCH_EXCLUDES(mutex_);
  void went_quiet(std::uint64_t taken, bool resolved) override;
  void failed(Error error) override;
  void stopped() override;
  std::shared_ptr<rpc::Runtime> worker() noexcept override { return agent_; }
  c10::WarningHandler* warning_handler() noexcept override {
    return collects_warnings_ ? &warnings_ : nullptr;
  }

  // Runs `handle` with the plan built; what it throws ends the pass.
  void guard(const std::function<void()>& handle) STITCH_EXCLUDES(mutex_);
  // Gives the protocol an event, a call of `event(PassProtocol&)`, and carries out its effects, all
  // but `deliver` and `new_peer`, which the caller finds in the result.
  template <class Event>
  PassEffects apply(Event event) STITCH_EXCLUDES(mutex_) {
    PassEffects effects;
    {
      base::MutexLock lock(mutex_);
      effects = event(protocol_);
    }
    carry_out(effects);
    return effects;
  }
  void carry_out(PassEffects& effects) STITCH_EXCLUDES(mutex_);
  // The first message of `from` has come: `from` or the root may have been lost before, when
  // on_peer_lost() came too early to end the pass.
  void check_new_peer(const WorkerInfo& from) STITCH_EXCLUDES(mutex_);
  void check_lost(const WorkerInfo& peer) STITCH_EXCLUDES(mutex_);

  void note(const WorkerInfo& life) STITCH_EXCLUDES(mutex_);
  // Throws for a worker that does not exist.
  void note_participants(const wire::Ack& ack) STITCH_EXCLUDES(mutex_);
  void close_older(const WorkerInfo& from, const wire::OlderPasses& older);
  // Sends the gradients in the outbox. `quiet_at`: the strand is going quiet, after so many
  // deliveries and kills.
  void flush(std::optional<std::uint64_t> quiet_at = std::nullopt) STITCH_EXCLUDES(mutex_);
  void send_done() STITCH_EXCLUDES(mutex_);
  // DONE will not reach the root, so the pass must fail.
  void done_not_sent(const Error& error) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] wire::PassHeader header() const;
  template <class... Parts>
  [[nodiscard]] rpc::OutMessage message(std::uint16_t kind, const Parts&... parts) const;
  void send(WorkerId to, rpc::OutMessage message, bool carries_gradients = false)
      STITCH_EXCLUDES(mutex_);
  // A message with gradients has been written, or never will be.
  void gradients_left() noexcept STITCH_EXCLUDES(mutex_);
  void run_at_settled() noexcept STITCH_EXCLUDES(mutex_);
  void finish(const std::optional<Error>& error) STITCH_EXCLUDES(mutex_);
  // Completes the future of a pass that has ended.
  void complete() STITCH_EXCLUDES(mutex_);
  void expire() STITCH_EXCLUDES(mutex_);
  void stop_strand() noexcept STITCH_EXCLUDES(mutex_);
  // Runs a slice of the strand on the thread of its device; a slice of the CPU runs on this thread
  // if that collects work of the pass.
  void execute(c10::Device device, base::UniqueFunction<void()> slice);
  [[nodiscard]] Error found_here(const Error& error) const noexcept;

  // Constant after construction.
  Engine& engine_;
  const std::shared_ptr<rpc::Agent> agent_;
  const std::shared_ptr<ContextState> context_;
  const PassId id_;
  const Settings settings_;
  const std::shared_ptr<AtSettled> at_settled_;  // null, or on the root worker

  // Constant after prepare(), which every path calls first.
  std::once_flag prepared_;
  std::shared_ptr<const Plan> plan_;
  std::shared_ptr<Strand> strand_;

  const rpc::Clock::time_point opened_ = rpc::Clock::now();

  // Only where the strand calls its owner.
  Outbox outbox_;
  std::vector<PassSummary::Sent> sent_;
  bool no_room_ = false;  // too much waits for a peer to which it has sent gradients

  base::AwaitedFlag driver_wanted_;
  bool collects_warnings_ = false;  // constant once nodes may run
  WarningCollector warnings_;
  bool driven_ = false;  // by begin_and_drive(); constant once nodes may run

  mutable base::Mutex mutex_;
  base::CondVar changed_;
  PassProtocol protocol_ STITCH_GUARDED_BY(mutex_);
  PassLives lives_ STITCH_GUARDED_BY(mutex_);
  bool built_ STITCH_GUARDED_BY(mutex_) = false;  // the plan and the strand are there
  std::optional<Error> error_ STITCH_GUARDED_BY(mutex_);
  std::optional<Promise<void>> promise_ STITCH_GUARDED_BY(mutex_);
  rpc::Clock::time_point begun_ STITCH_GUARDED_BY(mutex_);
  std::size_t unwritten_ STITCH_GUARDED_BY(mutex_) = 0;  // messages with gradients
  bool held_ STITCH_GUARDED_BY(mutex_) = false;          // the strand, until there are none
  base::EventLoop::TimerId timer_ STITCH_GUARDED_BY(mutex_) = 0;
};

}  // namespace stitch::dist_autograd
