#include "stitch/dist_autograd/pass.h"

#include <utility>

#include "stitch/base/name_list.h"
#include "stitch/dist_autograd/engine.h"
#include "stitch/rpc/future/thread_pool.h"

namespace stitch::dist_autograd {

std::uint8_t Pass::Settings::to_wire() const {
  using Header = wire::PassHeader;
  return static_cast<std::uint8_t>((run.retain_graph ? Header::kRetainGraph : 0) |
                                   (run.create_graph ? Header::kCreateGraph : 0) |
                                   (run.anomaly ? Header::kAnomaly : 0) |
                                   (fast ? Header::kFast : 0));
}

Pass::Settings Pass::Settings::from_wire(std::uint8_t flags) {
  using Header = wire::PassHeader;
  return {{(flags & Header::kRetainGraph) != 0, (flags & Header::kCreateGraph) != 0,
           (flags & Header::kAnomaly) != 0},
          (flags & Header::kFast) != 0};
}

Pass::Pass(Engine& engine, std::shared_ptr<rpc::Agent> agent, std::shared_ptr<ContextState> context,
           PassId id, Settings settings)
    : engine_(engine),
      agent_(std::move(agent)),
      context_(std::move(context)),
      id_(id),
      settings_(settings) {}

void Pass::prepare(std::vector<Edge> roots) {
  std::call_once(prepared_, [&] {
    plan_ = std::make_shared<const Plan>(std::move(roots), context_->sends());
    strand_ = std::make_shared<Strand>(
        plan_, settings_.run, context_->gradients(),
        [agent = agent_](base::UniqueFunction<void()> task) { agent->post(std::move(task)); },
        weak_from_this());
    {
      base::MutexLock lock(mutex_);
      if (!settings_.fast) marks_.emplace(*plan_);
      delivered_.assign(plan_->size(), false);
    }
  });
}

void Pass::guard(const std::function<void()>& handle) {
  try {
    prepare();
    if (!root()) strand_->start();
    handle();
  } catch (const Error& error) {
    abort(found_here(error));
  } catch (...) {
    abort(found_here(to_error(std::current_exception())));
  }
}

// An error that arose on this worker, with its name.
Error Pass::found_here(const Error& error) const {
  return Error(error.code(),
               "backward failed on " + stitch::to_string(agent_->self()) + ": " + error.what())
      .with_worker(agent_->self().name)
      .with_function(error.function())
      .with_remote(!root());
}

void Pass::require_own(const RecvNode& node) const {
  if (node.context() == context_->id()) return;
  throw Error(ErrorCode::invalid_argument,
              "the loss uses a result that was received under another context (" +
                  dist_autograd::to_string(node.context()) + ", from " +
                  stitch::to_string(node.sender()) + ")");
}

variable_list Pass::unpack(const WorkerInfo& from, const wire::GradientEntry& entry,
                           std::uint32_t index, std::vector<at::Tensor>& tensors,
                           std::size_t& next) const {
  const SendNode& node = plan_->send(index);
  const auto wrong = [&](const char* what) {
    return Error(ErrorCode::protocol,
                 "gradients for " + node.call() + " from " + stitch::to_string(from) + ": " + what);
  };
  if (node.receiver().id != from.id) throw wrong("it was sent to another worker");
  if (entry.defined.size() != node.num_inputs())
    throw wrong("their number is not that of the tensors sent");
  variable_list gradients(entry.defined.size());
  std::vector<at::Tensor> linked;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (!entry.defined[i]) continue;
    if (next == tensors.size() || !tensors[next].defined()) throw wrong("tensors are missing");
    gradients[i] = std::move(tensors[next++]);
    if (!node.input_metadata(i).is_same_shape(gradients[i]))
      throw wrong("a shape differs from that of the tensor sent");
    if (gradients[i].requires_grad()) gradients[i].set_requires_grad(false);
    if (entry.gradient_link != 0 && i < entry.differentiable.size() && entry.differentiable[i])
      linked.push_back(gradients[i]);
  }
  if (!linked.empty())
    RecvNode::attach({from.id, entry.gradient_link}, from, context_->id(),
                     "gradient of " + node.call(), linked);
  return gradients;
}

void Pass::gradients_ready(RecvNode& node, variable_list gradients) {
  require_own(node);
  std::uint64_t gradient_link = 0;
  std::vector<bool> differentiable;
  if (settings_.run.create_graph) {
    std::vector<at::Tensor> linked;
    for (const at::Tensor& gradient : gradients) {
      differentiable.push_back(gradient.defined() && gradient.requires_grad());
      if (differentiable.back()) linked.push_back(gradient);
    }
    if (!linked.empty()) {
      const LinkId link = engine_.next_link();
      // Before the message leaves, so that whoever uses the gradient finds its link here.
      context_->add_send(
          link, make_node<SendNode>(link, node.sender(), "gradient of " + node.call(), linked),
          true);
      gradient_link = link.counter;
    }
  }
  outbox_.add(node, std::move(gradients), gradient_link, std::move(differentiable));
}

void Pass::before_node() {
  if (outbox_.due()) flush();
}

void Pass::went_quiet(std::uint64_t taken, bool resolved) {
  flush();
  Actions actions;
  {
    base::MutexLock lock(mutex_);
    quiet_ = taken == posted_;
    resolved_ = resolved_ || resolved;
    advance(actions);
  }
  perform(std::move(actions));
}

void Pass::failed(Error error) { abort(found_here(error)); }

void Pass::stopped() {
  std::optional<Error> error;
  {
    base::MutexLock lock(mutex_);
    error = error_;
  }
  finish(error);
}

void Pass::flush() {
  for (Outbox::Parcel& parcel : outbox_.take()) {
    try {
      rpc::OutMessage out = message(wire::kGradients);
      rpc::OutArchive archive(out);
      archive(parcel.entries, parcel.tensors);
      {
        base::MutexLock lock(mutex_);
        if (!running()) return;
        peers_.insert(parcel.to.id);
        ++writing_;
        if (settings_.fast) {
          ++deficit_;
          ++deficits_[parcel.to.id];
        }
      }
      engine_.count_gradients(parcel.entries.size());
      send(parcel.to.id, std::move(out), true);
    } catch (...) {
      abort(found_here(to_error(std::current_exception())));
      return;
    }
  }
}

rpc::OutMessage Pass::message(std::uint16_t kind) const {
  rpc::OutMessage out(kind);
  rpc::OutArchive archive(out);
  archive(header());
  return out;
}

wire::PassHeader Pass::header() const { return {context_->id(), id_, settings_.to_wire()}; }

void Pass::send(WorkerId to, rpc::OutMessage message, bool carries_gradients) {
  const WorkerInfo& peer = agent_->peers().find(to);
  const auto sent = [self = shared_from_this(), peer,
                     carries_gradients](const std::optional<Error>& error) {
    if (error) {
      self->abort(Error(error->code(),
                        "backward cannot reach " + stitch::to_string(peer) + ": " + error->what())
                      .with_worker(peer.name));
    } else if (carries_gradients) {
      Actions actions;
      {
        base::MutexLock lock(self->mutex_);
        --self->writing_;
        self->advance(actions);
      }
      self->perform(std::move(actions));
    }
  };
  try {
    if (carries_gradients) {
      agent_->send_frame(peer, std::move(message), sent);
    } else {
      agent_->send_control(peer, std::move(message), sent);
    }
  } catch (...) {
    sent(to_error(std::current_exception()));
  }
}

void Pass::perform(Actions actions) {
  for (auto& [to, mark] : actions.marks) {
    rpc::OutMessage out = message(wire::kMark);
    rpc::OutArchive archive(out);
    archive(mark);
    send(to, std::move(out));
  }
  for (auto& [to, ack] : actions.acks) {
    rpc::OutMessage out = message(wire::kAck);
    rpc::OutArchive archive(out);
    archive(ack);
    send(to, std::move(out));
  }
  for (const WorkerId to : actions.settle) send(to, message(wire::kSettle));
  if (!actions.kill.empty()) strand_->kill(std::move(actions.kill));
  if (actions.error) abort(*actions.error);
  if (actions.succeed) finish(std::nullopt);
  if (actions.done) {
    finish(std::nullopt);
    try {
      rpc::OutMessage out = message(wire::kDone);
      rpc::OutArchive archive(out);
      archive(*actions.done);
      agent_->send_control(agent_->peers().find(id_.root), std::move(out),
                           [self = shared_from_this()](const std::optional<Error>& error) {
                             if (error) self->done_not_sent(*error);
                           });
    } catch (...) {
      done_not_sent(to_error(std::current_exception()));
    }
  }
}

void Pass::done_not_sent(const Error& error) {
  std::set<WorkerId> told;
  {
    base::MutexLock lock(mutex_);
    told = concerned();
  }
  const Error unsaid = found_here(error);
  engine_.spread_failure(*context_, header(), context_->fail(unsaid), std::move(told));
}

// Whom this pass must tell that it has failed. The root knows everybody once marking has ended.
std::set<WorkerId> Pass::concerned() const {
  std::set<WorkerId> workers = peers_;
  workers.insert(participants_.begin(), participants_.end());
  workers.insert(id_.root);
  return workers;
}

void Pass::abort(const Error& error) {
  std::set<WorkerId> told;
  ContextState::Failing failing;
  {
    base::MutexLock lock(mutex_);
    if (!running()) return;
    phase_ = Phase::aborted;
    // Under the lock, so that a pass that ends well here has not failed its context.
    failing = context_->fail(error);
    error_ = failing.error;
    told = concerned();
  }
  engine_.spread_failure(*context_, header(), std::move(failing), std::move(told));
  prepare();
  if (!root()) strand_->start();  // the root's is started by begin(), which may be seeding it
  strand_->stop();
}

void Pass::on_peer_lost(const WorkerInfo& peer, const Error& reason) {
  bool concerned = false;
  {
    base::MutexLock lock(mutex_);
    concerned = running() && (peers_.contains(peer.id) || participants_.contains(peer.id) ||
                              id_.root == peer.id);
  }
  if (!concerned) return;
  abort(Error(ErrorCode::disconnected,
              "backward cannot go on: " + stitch::to_string(peer) + " is gone: " + reason.what())
            .with_worker(peer.name));
}

void Pass::check_lost(WorkerId peer) {
  if (const auto reason = agent_->peers().lost(peer))
    on_peer_lost(agent_->peers().find(peer), *reason);
}

void Pass::expire() {
  std::vector<std::string> waiting;
  rpc::Clock::time_point begun;
  {
    base::MutexLock lock(mutex_);
    begun = begun_;
    for (const WorkerId id : phase_ == Phase::settled ? not_done_ : peers_) {
      waiting.push_back(stitch::to_string(agent_->peers().find(id)));
    }
  }
  const auto ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(rpc::Clock::now() - begun).count();
  abort(Error(ErrorCode::timeout,
              "backward timed out after " + std::to_string(ms) + " ms" +
                  (waiting.empty() ? std::string() : "; not done: " + base::join_names(waiting))));
}

void Pass::wait_until_quiet() {
  prepare();
  if (strand_->running_on_this_thread()) return;
  const rpc::BlockingRegion blocking;
  base::MutexLock lock(mutex_);
  while (phase_ != Phase::ended) changed_.wait(mutex_);
}

// Ends the pass on this worker: it is taken out of its context, and at the root the future
// completes.
void Pass::finish(const std::optional<Error>& error) {
  std::optional<Promise<void>> promise;
  base::EventLoop::TimerId timer = 0;
  context_->close_pass(id_);
  if (error) context_->gradients()->clear();  // nobody will see them
  {
    base::MutexLock lock(mutex_);
    phase_ = Phase::ended;
    promise = std::exchange(promise_, std::nullopt);
    timer = std::exchange(timer_, 0);
    changed_.notify_all();
  }
  if (timer != 0) agent_->loop().cancel(timer);
  if (!promise) return;
  // Callbacks run where the future completes: not under the strand's state, where grad mode is off.
  agent_->in_fresh_state([&] {
    if (error) {
      promise->set_error(*error);
    } else {
      promise->set_value();
    }
  });
}

}  // namespace stitch::dist_autograd
