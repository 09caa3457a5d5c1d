#include "tests/dist_autograd/pass_simulation.h"

#include <algorithm>
#include <exception>

namespace stitch::dist_autograd::testing {

namespace {

constexpr std::size_t kMaxSteps = 20'000;

bool empty(const PassEffects& effects) {
  return effects.marks.empty() && effects.acks.empty() && effects.quiet.empty() &&
         effects.close_marking.empty() && effects.kill.empty() && !effects.fail &&
         !effects.succeed && !effects.settled && !effects.done && !effects.partial &&
         !effects.deliver && !effects.new_peer;
}

}  // namespace

// A worker's part of the graph; nodes have their numbers in the whole graph.
struct PassSimulation::Graph final : PassGraph {
  Graph(PassSimulation& owner, std::size_t self)
      : simulation(owner), worker(self), is_marked(owner.nodes_.size()) {
    for (std::size_t i = 0; i < owner.nodes_.size(); ++i) {
      if (owner.nodes_[i].worker == worker && owner.nodes_[i].kind == NodeKind::send)
        own_sends.push_back(static_cast<std::uint32_t>(i));
    }
  }

  std::uint32_t size() const override {
    return static_cast<std::uint32_t>(simulation.nodes_.size());
  }
  std::span<const std::uint32_t> sends() const override { return own_sends; }
  std::uint32_t find(std::uint64_t link) const override {
    const auto send = static_cast<std::uint32_t>(link);
    return std::find(own_sends.begin(), own_sends.end(), send) == own_sends.end() ? kNone : send;
  }
  WorkerId receiver(std::uint32_t send) const override {
    return WorkerId(static_cast<std::uint32_t>(simulation.nodes_[send].receiver));
  }
  const std::string& call(std::uint32_t) const override { return text; }

  void mark(std::uint32_t send, std::vector<LinkId>& reached) override { spread(send, reached); }
  void mark_roots(std::vector<LinkId>& reached) override {
    for (const std::size_t root : simulation.roots_) spread(root, reached);
  }
  void mark_used(const std::vector<bool>& delivered, std::vector<LinkId>& reached) override {
    std::vector<std::size_t> waiting;
    std::vector<bool> waits(is_marked.size());
    for (const std::size_t send : own_sends) {
      if (!delivered[send]) waiting.push_back(send);
    }
    while (!waiting.empty()) {
      const std::size_t node = waiting.back();
      waiting.pop_back();
      if (waits[node]) continue;
      waits[node] = true;
      const auto& edges = simulation.nodes_[node].edges;
      waiting.insert(waiting.end(), edges.begin(), edges.end());
    }
    std::vector<LinkId> all;
    if (worker == simulation.root_) mark_roots(all);
    for (const std::size_t send : own_sends) {
      if (delivered[send]) spread(send, all);
    }
    for (const LinkId& link : all) {
      const auto recv =
          std::find_if(simulation.nodes_.begin(), simulation.nodes_.end(), [&](const Node& node) {
            return node.kind == NodeKind::recv && node.pair == link.counter;
          });
      if (waits[static_cast<std::size_t>(recv - simulation.nodes_.begin())])
        reached.push_back(link);
    }
  }
  bool marked(std::uint32_t send) const override { return is_marked[send]; }

  void spread(std::size_t from, std::vector<LinkId>& reached) {
    if (is_marked[from]) return;
    is_marked[from] = true;
    const Node& node = simulation.nodes_[from];
    if (node.kind == NodeKind::recv) {
      const Node& send = simulation.nodes_[node.pair];
      reached.push_back({WorkerId(static_cast<std::uint32_t>(send.worker)), node.pair});
    }
    for (const std::size_t target : node.edges) spread(target, reached);
  }

  PassSimulation& simulation;
  const std::size_t worker;
  std::vector<bool> is_marked;
  std::vector<std::uint32_t> own_sends;
  const std::string text = "a call";
};

PassSimulation::PassSimulation(std::uint64_t seed, Options options)
    : options_(options), random_(seed), workers_(options.workers) {
  make_graph();
}

PassSimulation::~PassSimulation() = default;

// As forward makes it: every edge leads to an earlier node, every link from a later recv node to an
// earlier send node.
void PassSimulation::make_graph() {
  std::vector<std::vector<std::size_t>> targets(options_.workers);  // by worker: plain and recv
  const auto some_of = [&](std::size_t worker, std::size_t at_least) {
    std::vector<std::size_t> edges;
    if (targets[worker].empty()) return edges;
    for (std::size_t i = at_least + pick(3); i > 0; --i)
      edges.push_back(targets[worker][pick(targets[worker].size())]);
    return edges;
  };
  while (nodes_.size() < options_.nodes) {
    const std::size_t at = pick(options_.workers);
    if (chance(0.5) || targets[at].empty()) {
      nodes_.push_back({at, NodeKind::plain, some_of(at, 0)});
    } else {
      const std::size_t to = chance(options_.self_links) ? at : pick(options_.workers);
      if (to == at && options_.self_links == 0.0) continue;
      nodes_.push_back({at, NodeKind::send, some_of(at, 1)});
      nodes_.back().receiver = to;
      nodes_.push_back({to, NodeKind::recv, {}, nodes_.size() - 1});
    }
    targets[nodes_.back().worker].push_back(nodes_.size() - 1);
  }
  root_ = nodes_.back().worker;
  if (options_.all_used) {
    // The ends of the graph so far are collected at the root.
    std::vector<bool> has_user(nodes_.size());
    for (const Node& node : nodes_) {
      for (const std::size_t target : node.edges) has_user[target] = true;
    }
    std::vector<std::size_t> ends;
    const std::size_t count = nodes_.size();
    for (std::size_t i = 0; i < count; ++i) {
      if (has_user[i] || nodes_[i].kind == NodeKind::send) continue;
      if (nodes_[i].worker == root_) {
        ends.push_back(i);
        continue;
      }
      nodes_.push_back({nodes_[i].worker, NodeKind::send, {i}});
      nodes_.back().receiver = root_;
      nodes_.push_back({root_, NodeKind::recv, {}, nodes_.size() - 1});
      ends.push_back(nodes_.size() - 1);
    }
    nodes_.push_back({root_, NodeKind::plain, ends});
  }
  roots_.push_back(nodes_.size() - 1);
  if (!options_.all_used && chance(0.3)) {
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (nodes_[i].worker == root_ && nodes_[i].kind != NodeKind::send && chance(0.2))
        roots_.push_back(i);
    }
  }

  for (const std::size_t root : roots_) nodes_[root].used = true;
  for (std::size_t i = nodes_.size(); i-- > 0;) {
    if (!nodes_[i].used) continue;
    const auto use = [&](std::size_t target) {
      nodes_[target].used = true;
      ++nodes_[target].live_inputs;
    };
    for (const std::size_t target : nodes_[i].edges) use(target);
    if (nodes_[i].kind == NodeKind::recv) use(nodes_[i].pair);
  }
  states_.resize(nodes_.size());
  throwing_node_ = nodes_.size();
  if (options_.node_throws) {
    throwing_node_ = pick(nodes_.size());
    while (!nodes_[throwing_node_].used) throwing_node_ = pick(nodes_.size());
  }
  liar_ = options_.liar ? pick(options_.workers) : root_;
  deaths_left_ = static_cast<std::size_t>(options_.deaths);
  cuts_left_ = static_cast<std::size_t>(options_.cuts);
  next_fault_ = pick(6 * options_.nodes);
}

// ---- running

void PassSimulation::run() {
  start();
  while (failure_.empty() && step()) {
    if (++steps_ > kMaxSteps) fail("it does not end");
  }
  if (failure_.empty()) check_rest();
}

// The root starts its strand before its protocol begins: the strand may run, and messages may come,
// before that.
void PassSimulation::start() {
  open(root_);
  for (const std::size_t root : roots_) states_[root].live = true;
  std::set<std::size_t> distinct(roots_.begin(), roots_.end());
  for (const std::size_t root : distinct) {
    if (states_[root].pending == 0) workers_[root_].ready.push_back(root);
  }
  workers_[root_].participant = true;
  workers_[root_].scheduled = true;
  begin_pending_ = true;
}

void PassSimulation::begin() {
  begin_pending_ = false;
  apply(root_, root_, {}, [](PassProtocol& protocol) { return protocol.begin(); });
}

// The plan: what the roots and the send nodes of this worker lead to.
void PassSimulation::open(std::size_t at) {
  Worker& worker = workers_[at];
  auto graph = std::make_unique<Graph>(*this, at);
  std::vector<std::size_t> stack(graph->own_sends.begin(), graph->own_sends.end());
  if (at == root_) stack.insert(stack.end(), roots_.begin(), roots_.end());
  while (!stack.empty()) {
    const std::size_t index = stack.back();
    stack.pop_back();
    if (std::exchange(states_[index].planned, true)) continue;
    ++worker.unresolved;
    stack.insert(stack.end(), nodes_[index].edges.begin(), nodes_[index].edges.end());
  }
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].worker != at || !states_[i].planned) continue;
    if (nodes_[i].kind == NodeKind::send) ++states_[i].pending;
    for (const std::size_t target : nodes_[i].edges) ++states_[target].pending;
  }
  worker.protocol = std::make_unique<PassProtocol>(info(at).id, info(root_).id, options_.mode);
  worker.protocol->set_graph(std::move(graph));
}

// Does one of the things that may happen next; false when there are none.
bool PassSimulation::step() {
  if (steps_ == next_fault_) {
    if (options_.root_aborts && workers_[root_].alive) {
      faulty_ = true;
      abort(root_);
    }
    if (deaths_left_ + cuts_left_ > 0) {
      next_fault_ += 1 + pick(2 * options_.nodes);
      if (pick(deaths_left_ + cuts_left_) < deaths_left_) {
        --deaths_left_;
        kill(pick(options_.workers));
      } else {
        --cuts_left_;
        const std::size_t one = pick(options_.workers);
        cut(one, (one + 1 + pick(options_.workers - 1)) % options_.workers);
      }
    }
  }
  std::vector<std::size_t> strands;
  for (std::size_t w = 0; w < workers_.size(); ++w) {
    if (workers_[w].alive && workers_[w].scheduled) strands.push_back(w);
  }
  // At equal chances, so that any of them may be slow for a while.
  std::vector<int> possible;
  if (!messages_.empty()) possible.push_back(0);
  if (!tasks_.empty()) possible.push_back(1);
  if (!strands.empty()) possible.push_back(2);
  if (!writes_.empty()) possible.push_back(3);
  if (!losses_.empty()) possible.push_back(4);
  if (begin_pending_ && workers_[root_].alive) possible.push_back(5);
  if (possible.empty()) return false;
  switch (possible[pick(possible.size())]) {
    case 0:
      deliver(pick(messages_.size()));
      break;
    case 1: {
      const std::size_t index = pick(tasks_.size());
      Task task = std::move(tasks_[index]);
      tasks_.erase(tasks_.begin() + static_cast<std::ptrdiff_t>(index));
      if (workers_[task.worker].alive) perform(std::move(task));
      break;
    }
    case 2:
      run_strand(strands[pick(strands.size())]);
      break;
    case 3:
      written(pick(writes_.size()));
      break;
    case 4: {
      const std::size_t index = pick(losses_.size());
      const auto [at, peer] = losses_[index];
      losses_.erase(losses_.begin() + static_cast<std::ptrdiff_t>(index));
      lose(at, peer);
      break;
    }
    default:
      begin();
  }
  return true;
}

// ---- messages

void PassSimulation::send(Message message) {
  const std::size_t at = message.from;
  const Kind kind = message.kind;
  if (lost_.contains({at, message.to})) {  // sending fails, and that is reported
    if (kind != Kind::abort) abort(at);
    return;
  }
  if (at == liar_ && at != root_ && !message.ack.participants.empty()) lie(message.ack);
  if (kind == Kind::gradients) writes_.emplace_back(at, message.to);
  // Not read by a worker that has lost this one.
  if (workers_[message.to].alive && !lost_.contains({message.to, at}))
    messages_.push_back(std::move(message));
}

void PassSimulation::written(std::size_t index) {
  const auto [from, to] = writes_[index];
  writes_.erase(writes_.begin() + static_cast<std::ptrdiff_t>(index));
  if (!workers_[from].alive) return;
  if (lost_.contains({from, to})) {
    abort(from);
  } else {
    apply(from, from, {}, [](PassProtocol& protocol) { return protocol.gradients_written(); });
  }
}

void PassSimulation::deliver(std::size_t index) {
  const Message message = std::move(messages_[index]);
  messages_.erase(messages_.begin() + static_cast<std::ptrdiff_t>(index));
  if (workers_[message.to].alive) handle(message);
}

void PassSimulation::handle(const Message& message) {
  Worker& worker = workers_[message.to];
  const bool opens = message.kind == Kind::mark || message.kind == Kind::gradients;
  if (!worker.protocol && opens) {
    if (worker.context_failed) {
      send({Kind::abort, message.to, message.from, {}, {}, {}, {}});
      return;
    }
    open(message.to);
    worker.scheduled = true;
  }
  if (message.kind == Kind::abort) {
    if (worker.protocol) abort(message.to);
    worker.context_failed = true;
    return;
  }
  if (!worker.protocol) {  // of a pass that is refused or unknown here
    if (message.kind == Kind::quiet || message.kind == Kind::close_marking)
      send({Kind::abort, message.to, message.from, {}, {}, {}, {}});
    return;
  }
  // A message that finds no pass is dropped; one that found it just before finds it ended.
  if (worker.removed && chance(0.5)) return;
  if (opens && worker.protocol->running()) worker.participant = true;
  const WorkerInfo from = info(message.from);
  apply(message.to, message.from, message.sends, [&](PassProtocol& protocol) {
    switch (message.kind) {
      case Kind::mark:
        return protocol.on_mark(from, message.mark);
      case Kind::ack:
        return protocol.on_ack(from, message.ack);
      case Kind::quiet:
        return protocol.on_quiet(from);
      case Kind::close_marking:
        return protocol.on_close_marking(from);
      case Kind::gradients:
        return protocol.on_gradients(from, message.ack, message.sends);
      default:
        return protocol.on_done(from, message.done);
    }
  });
}

// ---- effects

template <class Event>
void PassSimulation::apply(std::size_t at, std::size_t from, std::vector<std::uint32_t> deliveries,
                           Event event) {
  PassProtocol& protocol = *workers_[at].protocol;
  const bool running = protocol.running();
  PassEffects effects;
  try {
    effects = event(protocol);
  } catch (const std::exception& error) {
    fail(name(at) + " refuses what a correct worker sent: " + error.what());
  }
  if (!running && !empty(effects)) fail(name(at) + " acts after the end of the pass");
  if (!empty(effects)) tasks_.push_back({at, from, std::move(effects), std::move(deliveries)});
}

void PassSimulation::perform(Task task) {
  const std::size_t at = task.worker;
  PassEffects& effects = task.effects;
  for (auto& [to, mark] : effects.marks) {
    check_mark(at, mark);
    send({Kind::mark, at, to.value(), std::move(mark), {}, {}, {}});
  }
  for (auto& [to, ack] : effects.acks)
    send({Kind::ack, at, to.value(), {}, std::move(ack), {}, {}});
  for (const WorkerId to : effects.quiet) send({Kind::quiet, at, to.value(), {}, {}, {}, {}});
  for (const WorkerId to : effects.close_marking)
    send({Kind::close_marking, at, to.value(), {}, {}, {}, {}});
  for (const std::uint32_t node : effects.kill) {
    if (nodes_[node].used) fail(name(at) + " kills a node that the loss uses");
    post(at, node, false);
  }
  if (effects.settled) check_settled();
  if (effects.fail) {
    const bool unused = std::any_of(nodes_.begin(), nodes_.end(), [&](const Node& node) {
      return node.kind == NodeKind::send && workers_[node.worker].participant &&
             !states_[static_cast<std::size_t>(&node - nodes_.data())].received;
    });
    if (!unused) fail("the root reports unused results, but all were used");
    faulty_ = true;
    abort(at);
  }
  if (effects.succeed) {
    const bool unused = std::any_of(nodes_.begin(), nodes_.end(), [&](const Node& node) {
      return node.kind == NodeKind::send && workers_[node.worker].participant && !node.used;
    });
    if (unused != effects.found_unused) fail("the root is wrong about unused results");
    const bool at_once = options_.mode != PassMode::eager && !unused && !marked_;
    if (settled_ != at_once) fail("the root is wrong about whether all was settled by gradients");
  }
  if (effects.succeed || effects.done) {
    const bool writing = std::any_of(writes_.begin(), writes_.end(), [&](const auto& write) {
      return write.first == at && workers_[write.second].alive;
    });
    if (writing) fail(name(at) + " is done, but its gradients have not been written");
    workers_[at].unreadable = effects.partial.has_value();
    finish(at, true);
  }
  if (effects.done) say_done(at, *effects.done);
  if (effects.deliver) {
    for (const std::uint32_t node : task.deliveries) {
      if (std::exchange(states_[node].received, true)) fail("a gradient is delivered twice");
      post(at, node, true);
    }
  }
  if (effects.new_peer) {
    check_lost(at, task.from);
    check_lost(at, root_);
  }
}

void PassSimulation::check_mark(std::size_t at, const wire::Mark& mark) {
  marked_ = true;
  for (const std::uint64_t send : mark.links) {
    if (!nodes_[send].used) fail(name(at) + " marks a link that the loss does not use");
    if (options_.mode == PassMode::exact && states_[send].received)
      fail(name(at) + " marks a link that has got its gradient");
  }
}

// All nodes of all participants have run, and no gradient is in flight.
void PassSimulation::check_settled() {
  if (std::exchange(settled_, true)) fail("the root is told twice that all is settled");
  for (std::size_t w = 0; w < workers_.size(); ++w) {
    if (workers_[w].participant && workers_[w].unresolved != 0)
      fail("all is settled, but nodes of " + name(w) + " have not run");
  }
  for (const Message& message : messages_) {
    if (message.kind == Kind::gradients && workers_[message.to].participant)
      fail("all is settled, but gradients are in flight");
  }
}

void PassSimulation::say_done(std::size_t at, const wire::Done& done) {
  workers_[at].said_done = true;
  if (lost_.contains({at, root_})) {
    done_not_sent(at);
  } else {
    send({Kind::done, at, root_, {}, {}, done, {}});
  }
}

void PassSimulation::done_not_sent(std::size_t at) {
  workers_[at].context_failed = true;
  tell_abort(at);
}

void PassSimulation::finish(std::size_t at, bool well) {
  Worker& worker = workers_[at];
  if (std::exchange(worker.removed, true)) fail(name(at) + " ends twice");
  worker.protocol->end();
  if (well && gives_out_partial_sums(at)) fail(name(at) + " is done, but its sums are partial");
  if (!well || at != root_) return;
  succeeded_ = true;
  for (std::size_t w = 0; w < workers_.size(); ++w) {
    if (w == root_ || !workers_[w].alive || !workers_[w].participant) continue;
    if (!workers_[w].said_done) fail("the root has succeeded, but " + name(w) + " is not done");
  }
  for (const Message& message : messages_) {
    if (message.kind == Kind::gradients && workers_[message.to].alive)
      fail("the root has succeeded, but gradients are in flight");
  }
}

// ---- strands

void PassSimulation::post(std::size_t at, std::size_t node, bool live) {
  Worker& worker = workers_[at];
  if (worker.stop) return;
  worker.inbox.emplace_back(node, live);
  worker.scheduled = true;
}

void PassSimulation::run_strand(std::size_t at) {
  Worker& worker = workers_[at];
  if (worker.stop) {
    worker.scheduled = false;
    worker.inbox.clear();
    worker.ready.clear();
    finish(at, false);
    return;
  }
  for (const auto& [node, live] : std::exchange(worker.inbox, {})) {
    ++worker.taken;
    if (live) ++states_[node].live_inputs;
    arrive(node, live);
  }
  if (worker.ready.empty()) {
    flush(at, worker.taken);
    worker.scheduled = false;
    if (worker.stop) {  // a gradient could not be sent
      worker.scheduled = true;
      return;
    }
    apply(at, at, {}, [&](PassProtocol& protocol) {
      return protocol.strand_quiet(worker.taken, worker.unresolved == 0);
    });
    return;
  }
  const std::size_t index = pick(worker.ready.size());
  const std::size_t node = worker.ready[index];
  worker.ready.erase(worker.ready.begin() + static_cast<std::ptrdiff_t>(index));
  if (chance(0.3)) flush(at);
  if (!worker.stop) run_node(at, node);
}

void PassSimulation::run_node(std::size_t at, std::size_t node) {
  NodeState& state = states_[node];
  if (std::exchange(state.ran, true)) fail("a node runs twice");
  if (!nodes_[node].used) fail("a node runs that no root leads to");
  if (state.live_inputs != nodes_[node].live_inputs)
    fail("a node runs before its gradient is complete");
  if (node == throwing_node_) {
    faulty_ = true;
    abort(at);
    return;
  }
  if (nodes_[node].kind == NodeKind::recv) {
    const std::size_t send = nodes_[node].pair;
    workers_[at].outbox[nodes_[send].worker].push_back(static_cast<std::uint32_t>(send));
  }
  for (const std::size_t target : nodes_[node].edges) {
    ++states_[target].live_inputs;
    arrive(target, true);
  }
  --workers_[at].unresolved;
}

void PassSimulation::flush(std::size_t at, std::optional<std::uint64_t> quiet_at) {
  PassProtocol& protocol = *workers_[at].protocol;
  auto outbox = std::exchange(workers_[at].outbox, {});
  std::vector<std::pair<std::size_t, std::vector<std::uint32_t>>> batches(outbox.begin(),
                                                                          outbox.end());
  std::stable_partition(batches.begin(), batches.end(), [&](const auto& batch) {
    return info(batch.first).id != protocol.parent();
  });
  for (auto& [to, sends] : batches) {
    const bool last = sends.data() == batches.back().second.data();
    auto ack = protocol.sending_gradients(info(to).id, last ? quiet_at : std::nullopt);
    if (!ack) return;
    gradients_sent_ += sends.size();
    send({Kind::gradients, at, to, {}, std::move(*ack), {}, std::move(sends)});
  }
}

void PassSimulation::arrive(std::size_t node, bool live) {
  NodeState& state = states_[node];
  Worker& worker = workers_[nodes_[node].worker];
  state.live |= live;
  if (state.pending == 0) {
    fail("more deliveries come to a node than its plan has edges");
    return;
  }
  if (--state.pending != 0) return;
  if (state.live) {
    worker.ready.push_back(node);
    return;
  }
  --worker.unresolved;
  for (const std::size_t target : nodes_[node].edges) arrive(target, false);
}

}  // namespace stitch::dist_autograd::testing
