// One file, though long: the state of a strand is touched by its slices alone, which are here.
#include "stitch/dist_autograd/executor/strand.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <functional>
#include <new>
#include <optional>
#include <utility>

#include "stitch/base/demangle.h"
#include "stitch/base/thread_id.h"

namespace stitch::dist_autograd {

namespace {

// Gives this thread libtorch's intra-op thread count, as its own engine does for the threads it
// makes.
void prepare_thread() {
  thread_local const bool prepared = (at::init_num_threads(), true);
  static_cast<void>(prepared);
}

thread_local const Strand* running_strand = nullptr;

// The current exception as an Error that names the node that threw it.
Error failure_of(const Node& node) try {
  const std::string where = "node " + node.name() + ": ";
  try {
    throw;
  } catch (const Error& error) {
    return Error(error.code(), where + error.what())
        .with_worker(error.worker())
        .with_function(error.function())
        .with_remote(error.remote());
  } catch (const c10::Error& error) {
    return Error(ErrorCode::remote_exception, where + error.what_without_backtrace());
  } catch (...) {
    return Error(ErrorCode::remote_exception, where + describe(std::current_exception()));
  }
} catch (const std::bad_alloc&) {
  return to_error(std::current_exception());  // without saying where
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
      states_(plan_->size()),
      slots_(plan_->size()),
      check_(*plan_),
      unresolved_(plan_->untrimmed()) {
  thread_state_.set_grad_mode(flags_.create_graph);
  for (std::uint32_t i = 0; i < plan_->size(); ++i) states_[i].pending = plan_->pending(i);
  // start() must not fail: it would not deliver to some roots, or twice to others.
  std::vector<Ready> room;
  room.reserve(plan_->roots().size());
  ready_ = decltype(ready_)(std::less<Ready>(), std::move(room));
}

Strand::~Strand() = default;

void Strand::seed(std::size_t root, at::Tensor gradient) {
  const Plan::Target target = plan_->roots()[root];
  const at::AutoGradMode mode(flags_.create_graph);
  put(target.node, target.input, std::move(gradient));
  note_reach(target, Reach::live);
}

void Strand::start() {
  {
    base::MutexLock lock(mutex_);
    if (started_) return;
  }
  // A root with incoming edges waits for them like any other node; the others are ready now.
  for (const Plan::Target& root : plan_->roots()) {
    check_.starts(root.node);
    State& state = states_[root.node];
    if (state.pending != 0 || plan_->trimmed(root.node)) continue;
    state.pending = 1;  // several roots may meet in one node: it becomes ready once
    arrive(root, Reach::live);
    state.pending = Plan::kNone;
  }
  {
    base::MutexLock lock(mutex_);
    if (std::exchange(started_, true) || scheduled_) return;
    scheduled_ = true;
  }
  schedule();
}

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
  {
    base::MutexLock lock(mutex_);
    if (stop_ || ended_) return;
    if (inbox_.empty()) {
      inbox_ = std::move(arrivals);
    } else {
      for (Arrival& arrival : arrivals) inbox_.push_back(std::move(arrival));
    }
    news_.store(true, std::memory_order_release);
    if (!started_ || scheduled_) return;
    scheduled_ = true;
  }
  schedule();
}

void Strand::resume() {
  {
    base::MutexLock lock(mutex_);
    if (ended_) return;
    resumed_ = true;
    if (!started_ || scheduled_) return;
    scheduled_ = true;
  }
  schedule();
}

void Strand::stop() {
  {
    base::MutexLock lock(mutex_);
    if (ended_) return;
    stop_ = true;
    news_.store(true, std::memory_order_release);
    if (!started_ || scheduled_)
      return;  // start() will see it: until then another thread may be seeding
    scheduled_ = true;
  }
  schedule();
}

bool Strand::running_on_this_thread() const noexcept { return running_strand == this; }

// REQUIRES: scheduled_, which this call has set. It is taken back if this throws.
void Strand::schedule() {
  try {
    executor_([self = shared_from_this()] {
      const Strand* const outer = std::exchange(running_strand, self.get());
      if (const auto owner = self->owner_.lock()) self->run_slice(*owner);
      running_strand = outer;
    });
  } catch (...) {
    base::MutexLock lock(mutex_);
    scheduled_ = false;
    throw;
  }
}

// Moves the inbox to the slice. After `leave` another slice may run: this one must not touch
// anything.
Strand::Next Strand::take_inbox(bool leave_if_empty) {
  if (!leave_if_empty && !news_.load(std::memory_order_acquire)) return Next::go_on;
  base::MutexLock lock(mutex_);
  news_.store(false, std::memory_order_relaxed);
  if (stop_) {
    ended_ = true;
    return Next::stop;
  }
  if (!std::exchange(resumed_, false) && inbox_.empty() && leave_if_empty) {
    scheduled_ = false;
    return Next::leave;
  }
  taken_now_.swap(inbox_);
  return Next::go_on;
}

void Strand::run_slice(StrandOwner& owner) {
  std::optional<at::ThreadLocalStateGuard> guard;
  try {
    prepare_thread();
    guard.emplace(thread_state_);
  } catch (...) {
    fail(owner, to_error(std::current_exception()));  // no node runs then
  }
  // Not that of this thread: it may wait for another pass, or be one that reads messages.
  const torch_warnings::WarningHandlerGuard warnings(owner.warning_handler());
  bool leave_if_empty = false;
  Next next_step = Next::go_on;
  while ((next_step = take_inbox(leave_if_empty)) == Next::go_on) {
    leave_if_empty = false;
    try {
      take_arrivals();
      if (ready_.empty()) publish_streams();
    } catch (...) {
      fail(owner, to_error(std::current_exception()));
      continue;
    }
    if (ready_.empty()) {
      if (unresolved_ == 0) check_.resolved();
      owner.went_quiet(taken_, unresolved_ == 0);
      leave_if_empty = true;
      continue;
    }
    const std::uint32_t next = ready_.top().node;
    thread_.store(base::this_thread_id(), std::memory_order_relaxed);
    try {
      if (owner.before_node()) [[likely]] {
        ready_.pop();
        run(next, owner);
      } else {
        leave_if_empty = true;  // resume() makes the next slice
      }
    } catch (...) {
      Error error = failure_of(plan_->node(next));
      if (flags_.anomaly) {
        try {
          print_forward_stack(plan_->node(next));
        } catch (const std::bad_alloc&) {
          // It is not printed.
        }
      }
      fail(owner, std::move(error));
    }
    thread_.store(0, std::memory_order_relaxed);
  }
  if (next_step == Next::leave) return;
  drop_everything();
  owner.stopped();
}

void Strand::take_arrivals() {
  for (Arrival& arrival : taken_now_) {
    for (std::size_t i = 0; i < arrival.gradients.size(); ++i)
      put(arrival.node, static_cast<std::uint32_t>(i), std::move(arrival.gradients[i]));
    if (!arrival.unreached.empty() && arrival.reach == Reach::live)
      unreached_tensors_.emplace(arrival.node, std::move(arrival.unreached));
    ++taken_;
    check_.arrives(arrival.node);
    arrive({arrival.node, 0}, arrival.reach);
  }
  taken_now_.clear();
}

// Those who use the gradients wait for these alone, but a step that changes parameters on the
// default stream, or on one that begins after it, must not pass a node that still reads them.
void Strand::publish_streams() {
  for (const c10::Stream& stream : std::exchange(used_streams_, {}))
    order_streams(stream, default_stream(stream));
}

void Strand::fail(StrandOwner& owner, Error error) {
  {
    base::MutexLock lock(mutex_);
    stop_ = true;
    news_.store(true, std::memory_order_relaxed);
  }
  owner.failed(std::move(error));
}

void Strand::run(std::uint32_t index, StrandOwner& owner) {
  Node& node = plan_->node(index);
  NodeStreams streams(node);
  for (const c10::Stream& stream : streams.streams()) {
    if (std::find(used_streams_.begin(), used_streams_.end(), stream) == used_streams_.end())
      used_streams_.push_back(stream);
    // Nodes of earlier passes may still read what the leaf's gradient is added to.
    if (plan_->kind(index) == NodeKind::accumulate) order_streams(default_stream(stream), stream);
  }
  variable_list inputs = std::move(slots_[index]);
  inputs.resize(node.num_inputs());
  slots_[index] = {};
  on_devices_.wait_for(index, inputs);
  check_.runs(index);
  const GradientSink sink{*store_, plan_->inputs()};
  switch (plan_->kind(index)) {
    case NodeKind::accumulate:
      run_leaf(static_cast<AccumulateGrad&>(node), std::move(inputs), sink);
      break;
    case NodeKind::recv: {
      const bool live = states_[index].reach == Reach::live;
      variable_list gradients =
          live ? run_recv(plan_->recv(index), std::move(inputs), sink) : std::move(inputs);
      streams.leave_with(gradients);  // they are sent later, under the strand's own streams
      owner.gradients_ready(plan_->recv(index), std::move(gradients), unreached_inputs(index));
      break;
    }
    case NodeKind::plain:
    case NodeKind::send: {
      const bool send = plan_->kind(index) == NodeKind::send;
      variable_list outputs = send ? run_send(plan_->send(index), std::move(inputs), flags_, sink)
                                   : run_node(node, std::move(inputs), flags_, sink);
      const auto found = send ? unreached_tensors_.find(index) : unreached_tensors_.end();
      const auto edges = plan_->edges(index);
      for (std::uint32_t i = 0; i < edges.size(); ++i) {
        if (edges[i].node == Plan::kNone) continue;
        put(edges[i].node, edges[i].input, std::move(outputs[i]));
        const bool unreached = found != unreached_tensors_.end() && found->second.has(i);
        arrive(edges[i], unreached ? Reach::unreached : Reach::live);
      }
      break;
    }
  }
  --unresolved_;
  nodes_run_.fetch_add(1, std::memory_order_relaxed);
}

// Adds a gradient to an input of a node. An undefined one changes nothing.
void Strand::put(std::uint32_t node, std::uint32_t input, at::Tensor gradient) {
  if (!gradient.defined()) return;
  variable_list& slots = slots_[node];
  if (slots.size() <= input) slots.resize(plan_->node(node).num_inputs());
  if (is_on_device(gradient)) {
    on_devices_.add(plan_->node(node), node, input, slots[input], std::move(gradient));
  } else {
    accumulate(slots[input], std::move(gradient));
  }
}

void Strand::note_reach(const Plan::Target& target, Reach reach) {
  State& state = states_[target.node];
  state.reach = std::max(state.reach, reach);
  if (reach == Reach::live && plan_->kind(target.node) == NodeKind::recv &&
      plan_->node(target.node).num_inputs() > 1)
    reached_inputs_[target.node].add(target.input);
}

// The rest of those that are live.
Positions Strand::unreached_inputs(std::uint32_t recv) const {
  Positions unreached;
  const auto inputs = static_cast<std::uint32_t>(plan_->node(recv).num_inputs());
  if (inputs == 1 && states_[recv].reach == Reach::live) return unreached;
  const auto reached = reached_inputs_.find(recv);
  for (std::uint32_t i = 0; i < inputs; ++i) {
    if (reached == reached_inputs_.end() || !reached->second.has(i)) unreached.add(i);
  }
  return unreached;
}

// Counts one delivery. A node that is complete becomes ready where it is to run, or to report;
// otherwise its edges are followed, in a loop, not by recursion.
void Strand::arrive(const Plan::Target& at, Reach reach) {
  const auto count = [this](const Plan::Target& target, Reach how) {
    const std::uint32_t node = target.node;
    check_.delivers(node);
    note_reach(target, how);
    State& state = states_[node];
    if (--state.pending != 0) return;
    const NodeKind kind = plan_->kind(node);
    if (state.reach == Reach::dead || (state.reach == Reach::unreached && kind != NodeKind::recv)) {
      not_live_.push_back(node);
      return;
    }
    const std::uint32_t rank = kind == NodeKind::recv         ? 3
                               : plan_->leads_to_recv(node)   ? 2
                               : kind == NodeKind::accumulate ? 1
                                                              : 0;
    ready_.push({rank, plan_->node(node).sequence_nr(), node});
  };
  count(at, reach);
  while (!not_live_.empty()) {
    const std::uint32_t node = not_live_.back();
    not_live_.pop_back();
    --unresolved_;
    for (const Plan::Target& target : plan_->edges(node)) {
      if (target.node != Plan::kNone) count(target, states_[node].reach);
    }
  }
}

void Strand::drop_everything() {
  std::vector<Arrival> dropped;
  {
    base::MutexLock lock(mutex_);
    dropped.swap(inbox_);
  }
  slots_.clear();
  on_devices_.clear();
  taken_now_.clear();
  ready_ = {};
}

}  // namespace stitch::dist_autograd
