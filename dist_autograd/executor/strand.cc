// One file, though long: what a slice does, in the order in which it does it.
#include "stitch/dist_autograd/executor/strand.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/base/thread_id.h"
#include "stitch/dist_autograd/graph/optimizers_step.h"
#include "stitch/rpc/future/execution_context.h"

namespace stitch::dist_autograd {

namespace {

// Gives this thread libtorch's intra-op thread count, as its own engine does for the threads it
// makes.
void prepare_thread() {
  thread_local const bool prepared = (at::init_num_threads(), true);
  static_cast<void>(prepared);
}

thread_local const Strand* running_strand = nullptr;

// The leaves that `node` may have saved: those that its edges lead to, past a view or a cast.
bool saved_leaf_has_version(const Node& node, std::string_view version, int depth) {
  for (const Edge& edge : node.next_edges()) {
    if (!edge.is_valid()) continue;
    if (auto* const leaf = dynamic_cast<AccumulateGrad*>(edge.function.get())) {
      if (std::to_string(leaf->variable._version()) == version) return true;
    } else if (depth > 0 && saved_leaf_has_version(*edge.function, version, depth - 1)) {
      return true;
    }
  }
  return false;
}

// Holds steps of optimizers off the leaves that a node may have saved: those that its edges lead
// to, past a view or a cast.
class HeldLeaves {
 public:
  HeldLeaves(const Plan& plan, std::uint32_t index) {
    if (const auto mutex_of = mutex_of_leaf.load()) [[unlikely]]
      hold(plan, index, mutex_of, 1);
  }
  ~HeldLeaves() {
    for (const auto& mutex : held_) mutex->unlock_shared();
  }
  HeldLeaves(const HeldLeaves&) = delete;
  HeldLeaves& operator=(const HeldLeaves&) = delete;

 private:
  template <class MutexOf>
  void hold(const Plan& plan, std::uint32_t index, MutexOf mutex_of, int depth) {
    for (const Plan::Target& edge : plan.edges(index)) {
      if (edge.node == Plan::kNone) continue;
      if (plan.kind(edge.node) != NodeKind::accumulate) {
        if (depth > 0 && plan.edges(edge.node).size() == 1)
          hold(plan, edge.node, mutex_of, depth - 1);
        continue;
      }
      auto mutex = mutex_of(static_cast<AccumulateGrad&>(plan.node(edge.node)).variable);
      if (!mutex || std::find(held_.begin(), held_.end(), mutex) != held_.end()) continue;
      mutex->lock_shared();
      held_.push_back(std::move(mutex));
    }
  }

  std::vector<std::shared_ptr<std::shared_mutex>> held_;
};

// What libtorch says of a saved tensor that has changed since, with what a user can do in place of
// the hint at anomaly mode where an optimizer has changed it.
std::string with_remedy(std::string text, const Node& node) {
  constexpr std::string_view kVersion = "is at version ", kHint = " Hint:";
  const auto at = text.find(kVersion), hint = text.find(kHint);
  if (at == std::string::npos || hint == std::string::npos || !optimizers_step_here) return text;
  const auto first = at + kVersion.size();
  const std::string version = text.substr(first, text.find(';', first) - first);
  if (!saved_leaf_has_version(node, version, 2)) return text;
  return text.substr(0, hint) +
         " An optimizer stepped it between forward and backward; StalePolicy::allow permits that, "
         "or return a copy";
}

// The current exception as an Error that names the node that threw it.
Error failure_of(const Node& node) {
  const std::string where = "node " + node.name() + ": ";
  try {
    throw;
  } catch (const Error& error) {
    return Error(error.code(), where + error.what())
        .with_worker(error.worker())
        .with_function(error.function())
        .with_remote(error.remote());
  } catch (const c10::Error& error) {
    return Error(ErrorCode::remote_exception,
                 where + with_remedy(error.what_without_backtrace(), node));
  } catch (...) {
    return Error(ErrorCode::remote_exception, where + describe(std::current_exception()));
  }
}

// Warns with the stack of the forward that made a node. Libtorch records it as the node is made,
// where anomaly mode is on in that process, whatever it is in that of the root.
void print_forward_stack(Node& node) {
  node.metadata()->print_stack(node.name());
  if (torch::autograd::AnomalyMode::is_enabled()) return;
  TORCH_WARN(
      "anomaly mode is off in this process: it came with the backward pass alone. The traceback "
      "above is empty unless it was on here during forward: turn it on in every process, by "
      "torch::autograd::AnomalyMode::set_enabled(true).");
}

}  // namespace

Strand::Strand(std::shared_ptr<const Plan> plan, RunFlags flags,
               std::shared_ptr<GradientStore> store, Executor executor,
               std::weak_ptr<StrandOwner> owner, at::ThreadLocalState state)
    : plan_(std::move(plan)),
      flags_(flags),
      store_(std::move(store)),
      executor_(std::move(executor)),
      owner_(std::move(owner)),
      thread_state_(std::move(state)),
      nodes_(plan_),
      slices_(plan_->devices()) {
  thread_state_.set_grad_mode(flags_.create_graph);
}

Strand::~Strand() = default;

void Strand::seed(std::size_t root, at::Tensor gradient) {
  const Plan::Target target = plan_->roots()[root];
  const at::AutoGradMode mode(flags_.create_graph);
  nodes_.put(target.node, target.input, std::move(gradient));
  base::MutexLock lock(mutex_);
  nodes_.reach_root(root);
}

void Strand::start() {
  {
    base::MutexLock lock(mutex_);
    if (started_) return;
    nodes_.start_roots();
    started_ = true;
  }
  schedule_ready();
}

// ---- what comes from other workers

void Strand::deliver(const std::vector<std::uint32_t>& nodes, std::vector<variable_list> gradients,
                     std::vector<Positions> unreached) {
  std::vector<Arrival> arrivals;
  arrivals.reserve(nodes.size());
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    Arrival& arrival = arrivals.emplace_back(Arrival{nodes[i], Reach::live});
    arrival.gradients = std::move(gradients[i]);
    if (i >= unreached.size()) continue;
    arrival.unreached = std::move(unreached[i]);
    if (arrival.unreached.all_below(plan_->node(nodes[i]).num_inputs()))
      arrival.reach = Reach::unreached;
  }
  post(std::move(arrivals));
}

void Strand::kill(std::vector<std::uint32_t> nodes) {
  std::vector<Arrival> arrivals;
  arrivals.reserve(nodes.size());
  for (const std::uint32_t node : nodes) arrivals.push_back({node, Reach::dead});
  post(std::move(arrivals));
}

void Strand::post(std::vector<Arrival> arrivals) {
  const std::size_t first = arrivals.empty() ? 0 : plan_->device_of(arrivals.front().node);
  std::optional<std::size_t> device;
  {
    base::MutexLock lock(mutex_);
    if (stop_ || ended_) return;
    if (inbox_.empty()) {
      inbox_ = std::move(arrivals);
    } else {
      for (Arrival& arrival : arrivals) inbox_.push_back(std::move(arrival));
    }
    if (!started_) return;
    device = device_to_wake(first);
    if (!device) return;
    slices_[*device].scheduled = true;
  }
  schedule(*device);
}

std::optional<std::size_t> Strand::device_to_wake(std::size_t device) const {
  if (!slices_[device].scheduled) return device;
  std::optional<std::size_t> idle;
  for (std::size_t i = 0; i < slices_.size(); ++i) {
    if (!slices_[i].scheduled) {
      if (!idle) idle = i;
    } else if (slices_[i].begun && !slices_[i].in_node) {
      return std::nullopt;  // it looks before it runs a node or ends
    }
  }
  return idle;  // where there is none, each looks after its node
}

void Strand::take_arrivals(std::size_t device, std::vector<Arrival>& room) {
  if (inbox_.empty() || stop_) return;
  room.swap(inbox_);
  news_ = true;
  ++running_;
  slices_[device].in_node = true;
  mutex_.unlock();
  std::optional<Error> failure;
  try {
    for (Arrival& arrival : room) {
      for (std::size_t i = 0; i < arrival.gradients.size(); ++i)
        nodes_.put(arrival.node, static_cast<std::uint32_t>(i), std::move(arrival.gradients[i]));
    }
  } catch (...) {
    failure = to_error(std::current_exception());
    for (Arrival& arrival : room) arrival.gradients.clear();
  }
  mutex_.lock();
  slices_[device].in_node = false;
  --running_;
  for (Arrival& arrival : room) {
    if (failure) break;
    ++taken_;
    nodes_.on_message(arrival.node, arrival.reach, std::move(arrival.unreached));
  }
  room.clear();
  if (failure) fail(std::move(*failure), Plan::kNone);
}

// ---- slices

void Strand::resume() {
  {
    base::MutexLock lock(mutex_);
    if (ended_) return;
    resumed_ = true;
    held_ = false;
    if (!started_) return;
  }
  schedule_ready();
}

void Strand::schedule_ready() {
  std::vector<std::size_t> devices;
  devices.reserve(plan_->devices());
  {
    base::MutexLock lock(mutex_);
    for (std::size_t i = 0; i < slices_.size(); ++i) {
      if (nodes_.has_ready(i) && !slices_[i].scheduled) devices.push_back(i);
    }
    if (devices.empty() && !any_scheduled()) devices.push_back(0);
    for (const std::size_t device : devices) slices_[device].scheduled = true;
  }
  for (const std::size_t device : devices) schedule(device);
}

void Strand::stop() {
  {
    base::MutexLock lock(mutex_);
    if (ended_) return;
    stop_ = true;
    // start() will see it: until then another thread may be seeding.
    if (!started_ || any_scheduled()) return;
    slices_.front().scheduled = true;
  }
  schedule(0);
}

bool Strand::any_scheduled() const {
  return std::any_of(slices_.begin(), slices_.end(),
                     [](const Slices& slices) { return slices.scheduled; });
}

bool Strand::running_on_this_thread() const noexcept { return running_strand == this; }

void Strand::schedule(std::size_t device) noexcept {
  executor_(plan_->device(device), [self = shared_from_this(), device] {
    const Strand* const outer = std::exchange(running_strand, self.get());
    if (const auto owner = self->owner_.lock()) self->run_slice(*owner, device);
    running_strand = outer;
  });
}

void Strand::run_slice(StrandOwner& owner, std::size_t device) noexcept {
  prepare_thread();
  const at::ThreadLocalStateGuard state(thread_state_);
  rpc::ExecutionContext of_worker;
  of_worker.runtime = owner.worker();
  const rpc::ExecutionContextScope current(std::move(of_worker));
  // Not that of this thread: it may wait for another pass, or be one that reads messages.
  const torch_warnings::WarningHandlerGuard warnings(owner.warning_handler());
  std::vector<Arrival> room;
  base::MutexLock lock(mutex_);
  slices_[device].begun = true;
  news_ = true;
  for (;;) {
    take_arrivals(device, room);
    notify(owner);
    if (wake_others(device)) continue;
    if (!stop_ && !inbox_.empty()) continue;
    if (!stop_ && !held_ && nodes_.has_ready(device)) {
      run_next(device, owner);
    } else if (!tell_partly_quiet(owner)) {
      break;
    }
  }
  slices_[device].scheduled = slices_[device].begun = false;
}

bool Strand::wake_others(std::size_t device) {
  if (slices_.size() == 1 || stop_ || held_) return false;
  bool released = false;
  for (std::size_t i = 0; i < slices_.size(); ++i) {
    if (i == device || slices_[i].scheduled || !nodes_.has_ready(i)) continue;
    slices_[i].scheduled = true;
    released = true;
    unlocked([&] { schedule(i); });
  }
  return released;
}

void Strand::run_next(std::size_t device, StrandOwner& owner) {
  const std::uint32_t node = nodes_.take_ready(device);
  slices_[device].in_node = true;
  ++running_;  // also while the owner is asked: it is neither quiet nor stopped
  if (gave_gradients_) ask_before_node(owner);
  if (held_ && !stop_) nodes_.make_ready(node);
  if (!held_ && !stop_) {
    slices_[device].thread = base::this_thread_id();
    note_thread();
    run(node);
    slices_[device].thread = 0;
    note_thread();
  }
  --running_;
  slices_[device].in_node = false;
}

void Strand::note_thread() {
  int thread = 0;
  for (const Slices& slices : slices_) {
    if (thread == 0) thread = slices.thread;
  }
  thread_.store(thread, std::memory_order_relaxed);
}

void Strand::run(std::uint32_t index) {
  NodeTable::Inputs inputs = nodes_.take_inputs(index);
  const bool live = nodes_.live(index);
  mutex_.unlock();
  variable_list gradients;
  std::optional<Error> failure;
  try {
    gradients = run_alone(index, std::move(inputs), live);
  } catch (...) {
    failure = failure_of(plan_->node(index));
  }
  inputs = {};
  mutex_.lock();
  news_ = true;
  if (failure) {
    fail(std::move(*failure), index);
  } else {
    has_run(index, std::move(gradients));
  }
}

variable_list Strand::run_alone(std::uint32_t index, NodeTable::Inputs inputs, bool live) {
  Node& node = plan_->node(index);
  const NodeKind kind = plan_->kind(index);
  NodeStreams streams(node);
  if (!streams.streams().empty()) {
    base::MutexLock lock(mutex_);
    note_streams(streams.streams());
  }
  // Nodes of earlier passes may still read what the leaf's gradient is added to.
  if (kind == NodeKind::accumulate) {
    for (const c10::Stream& stream : streams.streams())
      order_streams(default_stream(stream), stream);
  }
  wait_for(inputs.points, inputs.gradients);
  if (kind == NodeKind::accumulate) {
    run_leaf(static_cast<AccumulateGrad&>(node), std::move(inputs.gradients), *store_);
    return {};
  }
  if (kind == NodeKind::recv) {
    variable_list gradients = std::move(inputs.gradients);
    if (live) gradients = run_recv(plan_->recv(index), std::move(gradients));
    // They are sent later, under the strand's own streams: the default ones, on any thread.
    streams.leave_with(gradients);
    return gradients;
  }
  const HeldLeaves held(*plan_, index);
  variable_list outputs = kind == NodeKind::send
                              ? run_send(plan_->send(index), std::move(inputs.gradients), flags_)
                              : run_node(node, std::move(inputs.gradients), flags_);
  const auto edges = plan_->edges(index);
  for (std::uint32_t i = 0; i < edges.size(); ++i) {
    if (edges[i].node != Plan::kNone)
      nodes_.put(edges[i].node, edges[i].input, std::move(outputs[i]));
  }
  return {};
}

void Strand::has_run(std::uint32_t index, variable_list gradients) {
  const NodeKind kind = plan_->kind(index);
  if (kind == NodeKind::recv) {
    leaving_.push_back({index, std::move(gradients), nodes_.unreached_inputs(index)});
  } else if (kind != NodeKind::accumulate) {
    const Positions* const unreached =
        kind == NodeKind::send ? nodes_.unreached_by_message(index) : nullptr;
    const auto edges = plan_->edges(index);
    for (std::uint32_t i = 0; i < edges.size(); ++i) {
      if (edges[i].node == Plan::kNone) continue;
      nodes_.deliver(edges[i], unreached && unreached->has(i) ? Reach::unreached : Reach::live);
    }
  }
  nodes_.has_run();
  nodes_run_.fetch_add(1, std::memory_order_relaxed);
}

void Strand::note_streams(const std::vector<c10::Stream>& streams) {
  for (const c10::Stream& stream : streams) {
    if (std::find(used_streams_.begin(), used_streams_.end(), stream) == used_streams_.end())
      used_streams_.push_back(stream);
  }
}

void Strand::fail(Error error, std::uint32_t node) {
  if (ended_) return;
  stop_ = true;
  if (std::exchange(failed_, true)) return;
  failure_.emplace(Failure{std::move(error), node});
}

// ---- calls of the owner

void Strand::notify(StrandOwner& owner) {
  if (owner_called_) return;
  owner_called_ = true;
  while (notify_next(owner)) {
  }
  owner_called_ = false;
}

bool Strand::notify_next(StrandOwner& owner) {
  if (failure_) {
    notify_failure(owner);
  } else if (stop_) {
    if (running_ != 0 || ended_) return false;
    notify_stopped(owner);
  } else if (!leaving_.empty()) {
    notify_gradients(owner);
  } else if (news_ && running_ == 0 && inbox_.empty() && !nodes_.has_ready()) {
    notify_quiet(owner);
  } else if (std::exchange(send_wanted_, false) && std::exchange(unsent_, false)) {
    unlocked([&] { owner.partly_quiet(); });
  } else {
    return false;
  }
  return true;
}

template <class Call>
void Strand::unlocked(Call&& call, const std::uint32_t& node) {
  mutex_.unlock();
  std::optional<Error> failure;
  try {
    call();
  } catch (...) {
    failure =
        node == Plan::kNone ? to_error(std::current_exception()) : failure_of(plan_->node(node));
  }
  mutex_.lock();
  if (failure) fail(std::move(*failure), node);
}

void Strand::notify_failure(StrandOwner& owner) {
  Failure failure = std::move(*failure_);
  failure_.reset();
  unlocked([&] {
    if (flags_.anomaly && failure.node != Plan::kNone) {
      print_forward_stack(plan_->node(failure.node));
    }
    owner.failed(std::move(failure.error));
  });
}

void Strand::notify_stopped(StrandOwner& owner) {
  ended_ = true;
  std::vector<Arrival> arrivals = std::exchange(inbox_, {});
  std::vector<Leaving> leaving = std::exchange(leaving_, {});
  NodeTable::Dropped dropped = nodes_.drop();
  unlocked([&] {
    arrivals.clear();
    leaving.clear();
    dropped = {};
    owner.stopped();
  });
}

void Strand::notify_gradients(StrandOwner& owner) {
  telling_.swap(leaving_);
  gave_gradients_ = unsent_ = true;
  std::uint32_t node = Plan::kNone;
  const auto tell_all = [&] {
    for (Leaving& each : telling_) {
      node = each.node;
      owner.gradients_ready(plan_->recv(node), std::move(each.gradients), each.unreached);
    }
  };
  unlocked(tell_all, node);
  telling_.clear();
}

// Those who use the gradients wait for these alone, but a step that changes parameters on the
// default stream, or on one that begins after it, must not pass a node that still reads them.
void Strand::notify_quiet(StrandOwner& owner) {
  const std::vector<c10::Stream> streams = std::exchange(used_streams_, {});
  const std::uint64_t taken = taken_;
  const bool resolved = nodes_.resolved();
  news_ = unsent_ = false;
  unlocked([&] {
    for (const c10::Stream& stream : streams) order_streams(stream, default_stream(stream));
    owner.went_quiet(taken, resolved);
  });
}

bool Strand::tell_partly_quiet(StrandOwner& owner) {
  if (stop_ || !unsent_) return false;
  send_wanted_ = true;
  if (owner_called_) return false;
  notify(owner);
  return true;
}

void Strand::ask_before_node(StrandOwner& owner) {
  if (owner_called_) return;
  owner_called_ = true;
  resumed_ = false;
  bool go = true;
  unlocked([&] { go = owner.before_node(); });
  held_ = !go && !resumed_;
  while (notify_next(owner)) {
  }
  owner_called_ = false;
}

}  // namespace stitch::dist_autograd
