// One file, though long: each message of a pass, and what it sends in return, side by side.
#include "stitch/dist_autograd/pass.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/name_list.h"
#include "stitch/dist_autograd/collected_work.h"
#include "stitch/dist_autograd/engine.h"
#include "stitch/dist_autograd/graph/tensor_bytes.h"
#include "stitch/dist_autograd/protocol/plan_graph.h"
#include "stitch/dist_autograd/protocol/received_gradients.h"
#include "stitch/rpc/agent/torch_state.h"
#include "stitch/rpc/future/thread_pool.h"
#include "stitch/rpc/message/archive.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/message/life_text.h"

namespace stitch::dist_autograd {

Pass::Pass(Engine& engine, std::shared_ptr<rpc::Agent> agent, std::shared_ptr<ContextState> context,
           PassId id, Settings settings, std::shared_ptr<AtSettled> at_settled)
    : engine_(engine),
      agent_(std::move(agent)),
      context_(std::move(context)),
      id_(id),
      settings_(settings),
      at_settled_(std::move(at_settled)),
      protocol_(agent_->self().id, id.root) {
  // Without the lock, which is taken ahead of the context's elsewhere: this is made under that one.
  lives_.note({"", id.root, id.epoch});
}

void Pass::prepare(std::vector<Edge> roots, LeafSet inputs) {
  std::call_once(prepared_, [&] {
    std::optional<LeafSet> only;
    if (settings_.run.only_inputs) only = std::move(inputs);
    plan_ = std::make_shared<const Plan>(std::move(roots), context_->sends(), std::move(only));
    // Nodes run under the same state on all workers, not under that of the thread that is here.
    at::ThreadLocalState fresh;
    rpc::Agent::in_fresh_state([&] { fresh = at::ThreadLocalState(); });
    strand_ = std::make_shared<Strand>(
        plan_, settings_.run, context_->gradients(),
        [this](c10::Device device, base::UniqueFunction<void()> slice) {
          execute(device, std::move(slice));
        },
        weak_from_this(), std::move(fresh));
    auto graph = make_pass_graph(plan_, context_->id(), agent_->self().id);
    base::MutexLock lock(mutex_);
    protocol_.set_graph(std::move(graph));
    built_ = true;
  });
}

// ---- messages

void Pass::on_mark(const WorkerInfo& from, const wire::Mark& mark) {
  guard([&] {
    note(from);
    const PassEffects effects =
        apply([&](PassProtocol& protocol) { return protocol.on_mark(from, mark); });
    if (effects.new_peer) check_new_peer(from);
  });
}

void Pass::on_ack(const WorkerInfo& from, const wire::Ack& ack) {
  guard([&] {
    note_participants(ack);
    apply([&](PassProtocol& protocol) { return protocol.on_ack(from, ack); });
  });
}

void Pass::on_quiet(const WorkerInfo& from, const wire::OlderPasses& older) {
  guard([&] {
    close_older(from, older);
    apply([&](PassProtocol& protocol) { return protocol.on_quiet(from); });
  });
}

void Pass::on_close_marking(const WorkerInfo& from, const wire::OlderPasses& older) {
  guard([&] {
    close_older(from, older);
    apply([&](PassProtocol& protocol) { return protocol.on_close_marking(from); });
  });
}

void Pass::on_done(const WorkerInfo& from) {
  guard([&] { apply([&](PassProtocol& protocol) { return protocol.on_done(from); }); });
}

void Pass::on_gradients(const WorkerInfo& from, const wire::Ack& ack,
                        const std::vector<wire::GradientEntry>& entries,
                        std::vector<at::Tensor> tensors) {
  guard([&] {
    note(from);
    note_participants(ack);
    ReceivedGradients received = match_gradients(*plan_, agent_->self().id, context_->id(), from,
                                                 entries, std::move(tensors));
    const PassEffects effects = apply(
        [&](PassProtocol& protocol) { return protocol.on_gradients(from, ack, received.sends); });
    if (effects.deliver)
      strand_->deliver(received.sends, std::move(received.gradients),
                       std::move(received.unreached));
    if (effects.new_peer) check_new_peer(from);
  });
}

void Pass::note(const WorkerInfo& life) {
  base::MutexLock lock(mutex_);
  lives_.note(life);
}

void Pass::note_participants(const wire::Ack& ack) {
  for (const WorkerId id : ack.participants) note(agent_->peers().find(id));
}

// Without this, what is remembered of ended passes would grow while the context lives: of the
// others of that root, this worker takes part in some only.
void Pass::close_older(const WorkerInfo& from, const wire::OlderPasses& older) {
  if (from.id != id_.root || from.epoch != id_.epoch) return;  // of its own passes only
  if (!older.valid_before(id_.counter))
    throw Error(ErrorCode::protocol, stitch::to_string(from) +
                                         " named older passes in no order, too many, or some that "
                                         "are not older");
  context_->close_older_passes(id_, older);
}

void Pass::check_new_peer(const WorkerInfo& from) {
  check_lost(from);
  // Without the root, no message may ever end this pass.
  if (const rpc::PeerLife* root = agent_->peers().life(WorkerInfo{"", id_.root, id_.epoch}))
    check_lost(root->info());
}

void Pass::check_lost(const WorkerInfo& peer) {
  if (const auto reason = agent_->peers().lost(peer)) on_peer_lost(peer, *reason);
}

void Pass::guard(const std::function<void()>& handle) {
  try {
    prepare();
    if (!root()) strand_->start();
    handle();
  } catch (...) {
    abort(found_here(to_error(std::current_exception())));
  }
}

// An error that arose on this worker, with its name.
Error Pass::found_here(const Error& error) const noexcept {
  return Error(error.code(),
               "backward failed on " + stitch::to_string(agent_->self()) + ": " + error.what())
      .with_worker(agent_->self().name)
      .with_function(error.function())
      .with_remote(!root());
}

// ---- the strand

void Pass::gradients_ready(RecvNode& node, variable_list gradients, const Positions& unreached) {
  require_context(node, context_->id());
  static_cast<void>(agent_->peers().find(node.sender()));  // throws if another life has its id
  const std::size_t bytes = bytes_of(gradients);
  sent_.push_back({node.link(), bytes});
  std::uint64_t gradient_link = 0;
  Positions differentiable;
  if (settings_.run.create_graph) {
    std::vector<at::Tensor> linked;
    for (std::uint32_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined() || !gradients[i].requires_grad()) continue;
      differentiable.add(i);
      linked.push_back(gradients[i]);
    }
    if (!linked.empty()) {
      const LinkId link = engine_.next_link();
      // Before the message leaves: a pass over the gradient must find its link here.
      context_->add_send(
          link, make_node<SendNode>(link, node.sender(), node.link_name().of_gradient(), linked));
      gradient_link = link.counter;
    }
  }
  if (!outbox_.fits(bytes, agent_->options().max_inflight_bytes)) flush();
  outbox_.add(node, std::move(gradients), unreached, bytes, gradient_link,
              std::move(differentiable));
}

// Where gradients wait for a peer, nodes would make more of them than memory holds. This pass goes
// on once its own are written: then it has added one batch to what waits, at most.
bool Pass::before_node() {
  if (outbox_.due()) flush();
  if (!no_room_) [[likely]]
    return true;
  flush();  // others may wait for the rest
  base::MutexLock lock(mutex_);
  no_room_ = held_ = unwritten_ != 0;
  return !held_;
}

void Pass::gradients_left() noexcept {
  {
    base::MutexLock lock(mutex_);
    if (--unwritten_ != 0 || !std::exchange(held_, false)) return;
  }
  strand_->resume();
}

void Pass::partly_quiet() { flush(); }

void Pass::went_quiet(std::uint64_t taken, bool resolved) {
  flush(taken);
  // At the root this may begin the marking, which refuses results of other contexts.
  apply([&](PassProtocol& protocol) { return protocol.strand_quiet(taken, resolved); });
}

void Pass::failed(Error error) { abort(found_here(error)); }

void Pass::stopped() {
  std::optional<Error> error;
  {
    base::MutexLock lock(mutex_);
    error = error_;
  }
  agent_->drop_frames(this);  // no flush() comes after this
  if (error) finish(error);
}

void Pass::flush(std::optional<std::uint64_t> quiet_at) {
  std::vector<Outbox::PeerBatch> batches = outbox_.take();
  if (batches.empty()) return;
  {
    base::MutexLock lock(mutex_);
    const auto parent = protocol_.parent();
    std::stable_partition(batches.begin(), batches.end(),
                          [&](const auto& batch) { return batch.to != parent; });
  }
  for (Outbox::PeerBatch& batch : batches) {
    std::optional<wire::Ack> ack;
    {
      base::MutexLock lock(mutex_);
      ack = protocol_.sending_gradients(batch.to,
                                        &batch == &batches.back() ? quiet_at : std::nullopt);
    }
    if (!ack) return;
    engine_.count_gradients(batch.entries.size());
    rpc::OutMessage out = message(wire::kGradients, *ack, batch.entries, batch.tensors);
    if (!batch.placements.empty()) out.placements = std::move(batch.placements);
    send(batch.to, std::move(out), true);
  }
}

// ---- effects

void Pass::carry_out(PassEffects& effects) {
  const bool settled = effects.settled && at_settled_;
  if (settled) at_settled_->announce();
  for (const auto& [to, mark] : effects.marks) send(to, message(wire::kMark, mark));
  for (const auto& [to, ack] : effects.acks) send(to, message(wire::kAck, ack));
  if (!effects.quiet.empty() || !effects.close_marking.empty()) {
    const wire::OlderPasses older = context_->older_passes(id_);
    for (const WorkerId to : effects.quiet) send(to, message(wire::kQuiet, older));
    for (const WorkerId to : effects.close_marking) send(to, message(wire::kCloseMarking, older));
  }
  if (!effects.kill.empty()) strand_->kill(std::move(effects.kill));
  if (settled) run_at_settled();
  if (effects.succeed || effects.done) finish(std::nullopt);
  if (effects.done) send_done();
}

void Pass::run_at_settled() noexcept {
  bool running = false;
  {
    base::MutexLock lock(mutex_);
    running = !error_;
  }
  // This may be a slice of the strand, where grad mode is off, and it may outlast the pass.
  const torch_warnings::WarningHandlerGuard warnings(nullptr);
  rpc::Agent::in_fresh_state([&] { at_settled_->run(running); });
}

wire::PassHeader Pass::header() const { return {context_->id(), id_, settings_.to_wire()}; }

template <class... Parts>
rpc::OutMessage Pass::message(std::uint16_t kind, const Parts&... parts) const {
  rpc::OutMessage out(kind);
  rpc::OutArchive archive(out);
  archive(header(), parts...);
  return out;
}

void Pass::send(WorkerId to, rpc::OutMessage message, bool carries_gradients) {
  const WorkerInfo& peer = agent_->peers().find(to);
  const auto sent = [self = shared_from_this(), to,
                     carries_gradients](const std::optional<Error>& error) {
    if (carries_gradients) self->gradients_left();
    if (error) {
      const WorkerInfo& peer = self->agent_->peers().find(to);
      self->abort(Error(error->code(),
                        "backward cannot reach " + stitch::to_string(peer) + ": " + error->what())
                      .with_worker(peer.name));
    } else if (carries_gradients) {
      self->apply([](PassProtocol& protocol) { return protocol.gradients_written(); });
    }
  };
  try {
    {
      base::MutexLock lock(mutex_);
      if (carries_gradients) ++unwritten_;
      lives_.note(peer);
    }
    if (carries_gradients) {
      if (!agent_->send_frame(peer, std::move(message), sent, this)) no_room_ = true;
    } else {
      agent_->send_control(peer, std::move(message), sent);
    }
  } catch (...) {
    sent(to_error(std::current_exception()));
  }
}

void Pass::send_done() {
  try {
    agent_->send_control(agent_->peers().find(id_.root), message(wire::kDone),
                         [self = shared_from_this()](const std::optional<Error>& error) {
                           if (error) self->done_not_sent(*error);
                         });
  } catch (...) {
    done_not_sent(to_error(std::current_exception()));
  }
}

// ---- ends

// Ends the pass on this worker: takes it out of its context and, at the root, completes the future.
void Pass::finish(const std::optional<Error>& error) {
  bool awaited = false;
  base::EventLoop::TimerId timer = 0;
  if (!error) {
    context_->set_last_pass(
        {id_, std::move(sent_), strand_->nodes_run(), rpc::Clock::now() - opened_});
  }
  context_->close_pass(id_);
  agent_->events().record(error ? "pass failed" : "pass ended", id_.root.value(), id_.epoch,
                          id_.counter);
  if (error) context_->gradients()->clear();  // no reader gets them
  {
    base::MutexLock lock(mutex_);
    protocol_.end();
    if (error) error_ = error;
    awaited = promise_.has_value();
    timer = std::exchange(timer_, 0);
    changed_.notify_all();
  }
  wake_driver();
  if (timer != 0) agent_->loop().cancel(timer);
  if (!awaited) return;
  if (driven_) {
    complete();
  } else {
    // Callbacks run where the future completes: not under the strand's state, without grad mode.
    rpc::Agent::in_fresh_state([this] { complete(); });
  }
}

void Pass::complete() {
  std::optional<Promise<void>> promise;
  std::optional<Error> error;
  {
    base::MutexLock lock(mutex_);
    promise = std::exchange(promise_, std::nullopt);
    error = error_;
  }
  if (!promise) return;
  if (error) {
    promise->set_error(*error);
  } else {
    promise->set_value();
  }
}

// ---- the thread that runs the nodes: in backward(), or the reader of what makes them ready

void Pass::begin(std::vector<at::Tensor> gradients, Promise<void> done,
                 rpc::Clock::time_point deadline) {
  done.on_cancel([weak = weak_from_this()] {
    if (const auto pass = weak.lock())
      pass->abort(Error(ErrorCode::cancelled, "backward was cancelled"));
  });
  std::optional<Error> over;
  {
    base::MutexLock lock(mutex_);
    begun_ = rpc::Clock::now();
    if (!protocol_.running()) over = error_;
    if (!over) promise_ = done;
    if (!over && deadline != rpc::Clock::time_point::max()) {
      timer_ = agent_->loop().call_at(deadline, [weak = weak_from_this()] {
        if (const auto pass = weak.lock()) pass->expire();
      });
    }
  }
  if (over) {
    done.set_error(*over);
    strand_->start();
    return;
  }
  guard([&] {
    for (std::size_t i = 0; i < gradients.size(); ++i) strand_->seed(i, std::move(gradients[i]));
    strand_->start();
    apply([](PassProtocol& protocol) { return protocol.begin(); });
  });
  strand_->start();  // also after an error: a pass that was aborted ends on its strand
}

void Pass::begin_and_drive(std::vector<at::Tensor> gradients, Promise<void> done,
                           rpc::Clock::time_point deadline) {
  std::optional<rpc::FreshTorchState> fresh;  // for the messages that this thread handles
  if (!rpc::has_fresh_torch_state()) fresh.emplace();
  CollectedWork work(*this);
  driven_ = true;
  begin(std::move(gradients), std::move(done), deadline);
  for (;;) {
    driver_wanted_.clear();
    work.run();
    {
      base::MutexLock lock(mutex_);
      if (protocol_.ended()) return;
    }
    const BlockingRegion blocking;
    if (!agent_->poll(driver_wanted_, rpc::Clock::time_point::max())) return;
  }
}

void Pass::execute(c10::Device device, base::UniqueFunction<void()> slice) {
  // What a node of a device has made ready on the CPU does not wait for a user-function thread:
  // all of them may wait for this pass.
  const bool on_device_thread =
      plan_->devices() > 1 && agent_->serves_here() && !agent_->pool().on_pool_thread();
  if (!device.is_cpu() || on_device_thread)
    return agent_->post_for_device(device, std::move(slice));
  if (!CollectedWork::take(*this, slice)) agent_->post_where_read(std::move(slice));
}

void Pass::wait_until_quiet() {
  prepare();
  if (strand_->running_on_this_thread()) return;
  const BlockingRegion blocking;
  base::MutexLock lock(mutex_);
  while (!protocol_.ended()) changed_.wait(mutex_);
}

Pass::Progress Pass::progress() {
  Progress progress;
  progress.opened = opened_;
  base::MutexLock lock(mutex_);
  const auto& awaited = protocol_.awaited();
  progress.awaited.assign(awaited.begin(), awaited.end());
  if (!built_) return progress;
  progress.nodes_run = strand_->nodes_run();
  progress.thread = strand_->thread();
  return progress;
}

// ---- failing: on this worker, and how the others hear of it

void Pass::abort(const Error& error) noexcept {
  const auto self = shared_from_this();  // the failure may take it out of its context
  std::set<WorkerId> told;
  ContextState::FailEffects effects;
  {
    base::MutexLock lock(mutex_);
    if (!protocol_.running()) return;
    told = protocol_.concerned();
    // Under the lock, so that a pass that succeeds here has not failed its context.
    effects = context_->fail(error);
    error_ = effects.error;
    protocol_.fail();
  }
  engine_.spread_failure(*context_, header(), std::move(told), std::move(effects));
  stop_strand();
}

void Pass::stop_strand() noexcept {
  prepare();
  if (!root()) strand_->start();  // the root's is started by begin(), which may be seeding it
  strand_->stop();
}

void Pass::on_peer_lost(const WorkerInfo& peer, const Error& reason) {
  const rpc::PeerLife* const present = agent_->peers().life(peer.id);
  {
    base::MutexLock lock(mutex_);
    if (!protocol_.needs(peer.id)) return;
    if (present != nullptr && lives_.is_former(peer, present->info().epoch)) return;
  }
  const Error gone =
      rpc::life_gone(peer, std::string(": ") + reason.what(), rpc::LifeName::with_id);
  abort(Error(gone.code(), std::string("backward cannot go on: ") + gone.what())
            .with_worker(peer.name));
}

void Pass::expire() {
  const Progress found = progress();
  std::vector<std::string> waiting;
  for (const WorkerId id : found.awaited)
    waiting.push_back(stitch::to_string(agent_->peers().find(id)));
  rpc::Clock::time_point begun;
  {
    base::MutexLock lock(mutex_);
    begun = begun_;
  }
  agent_->dumps().on_timeout("backward timed out", engine_.table_of({shared_from_this()}));
  const auto ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(rpc::Clock::now() - begun).count();
  abort(Error(ErrorCode::timeout,
              "backward timed out after " + std::to_string(ms) + " ms" +
                  (waiting.empty() ? std::string() : "; not done: " + base::join_names(waiting))));
}

void Pass::done_not_sent(const Error& error) {
  std::set<WorkerId> told;
  {
    base::MutexLock lock(mutex_);
    told = protocol_.concerned();
  }
  engine_.fail_context(*context_, header(), found_here(error), std::move(told));
}

// ---- settings

std::uint8_t PassSettings::to_wire() const {
  using Header = wire::PassHeader;
  return static_cast<std::uint8_t>(
      (run.retain_graph ? Header::kRetainGraph : 0) |
      (run.create_graph ? Header::kCreateGraph : 0) | (run.anomaly ? Header::kAnomaly : 0) |
      (run.only_inputs ? Header::kOnlyInputs : 0) | (run.allow_nan ? Header::kAllowNaN : 0));
}

PassSettings PassSettings::from_wire(std::uint8_t flags) {
  using Header = wire::PassHeader;
  return {{(flags & Header::kRetainGraph) != 0, (flags & Header::kCreateGraph) != 0,
           (flags & Header::kAnomaly) != 0, (flags & Header::kOnlyInputs) != 0,
           (flags & Header::kAllowNaN) != 0}};
}

}  // namespace stitch::dist_autograd
