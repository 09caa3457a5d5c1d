// One file, though long: the workers of a pass, what goes wrong there and what must hold.
#include "tests/simulation/pass_simulation.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <map>
#include <set>
#include <vector>

#include "tests/simulation/pass_graph.h"

namespace stitch::dist_autograd::pass_simulation {
namespace {

bool empty(const PassEffects& effects) {
  return effects.marks.empty() && effects.acks.empty() && effects.quiet.empty() &&
         effects.close_marking.empty() && effects.kill.empty() && !effects.succeed &&
         !effects.settled && !effects.done && !effects.deliver && !effects.new_peer;
}

class World final : public PassHistory {
 public:
  World(std::uint64_t number, const Options& options)
      : PassHistory(number, options), workers_(options.workers) {
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

 private:
  enum class Kind { mark, ack, quiet, close_marking, gradients, done, abort };
  static constexpr const char* kNames[] = {"MARK",      "ACK",  "QUIET", "CLOSE_MARKING",
                                           "GRADIENTS", "DONE", "ABORT"};
  struct Message {
    Kind kind = Kind::mark;
    std::size_t from = 0, to = 0;
    wire::Mark mark{};
    wire::Ack ack{};  // with gradients: what rides on them
    std::vector<std::uint32_t> sends{};
  };
  struct Task {  // effects that are decided but not performed
    std::size_t worker = 0;
    std::size_t from = 0;  // of the message that caused them
    PassEffects effects;
    std::vector<std::uint32_t> deliveries;
  };
  struct NodeState {
    std::size_t pending = 0, live_inputs = 0;
    bool live = false, ran = false, received = false;
  };
  struct Worker {
    bool alive = true;
    bool context_failed = false;
    bool participant = false;  // the root, or it got a MARK or GRADIENTS
    bool said_done = false, failed = false;
    std::unique_ptr<PassProtocol> protocol;  // once the pass is open here
    bool removed = false;                    // the pass has been taken out of its context
    // The strand.
    std::vector<std::pair<std::size_t, bool>> inbox;
    std::vector<std::size_t> ready;
    std::uint64_t taken = 0;
    std::size_t unresolved = 0;
    bool scheduled = false, stop = false;
    std::map<std::size_t, std::vector<std::uint32_t>> outbox;
  };

  // ---- running

  void play() override {
    start();
    run_until_quiet(20'000, [this] {
      const bool more = act();
      ++steps_;
      return more;
    });
    if (!failed()) check_rest();
  }
  // The root starts its strand before its protocol begins: the strand may run, and messages may
  // come, before that.
  void start() {
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
  void begin() {
    begin_pending_ = false;
    apply(root_, root_, {}, [](PassProtocol& protocol) { return protocol.begin(); });
  }
  // The plan: what the roots and the send nodes of this worker lead to.
  void open(std::size_t at) {
    Worker& worker = workers_[at];
    auto graph = std::make_unique<Graph>(*this, at);
    std::vector<std::size_t> stack(graph->own_sends.begin(), graph->own_sends.end());
    if (at == root_) stack.insert(stack.end(), roots_.begin(), roots_.end());
    const std::vector<bool> planned = reached_from(std::move(stack));
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (!planned[i]) continue;
      ++worker.unresolved;
      if (nodes_[i].kind == NodeKind::send) ++states_[i].pending;
      for (const std::size_t target : nodes_[i].edges) ++states_[target].pending;
    }
    worker.protocol = std::make_unique<PassProtocol>(info(at).id, info(root_).id);
    worker.protocol->set_graph(std::move(graph));
  }

  // Does one of the things that may happen next; false when there are none.
  bool act() {
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
    // At equal chances, so that any of them may be slow for a while.
    std::vector<std::function<void()>> possible;
    const auto one_of = [&](const auto& these, auto what) {
      if (!these.empty()) possible.push_back([this, &these, what] { what(pick(these.size())); });
    };
    std::vector<std::size_t> strands;
    for (std::size_t w = 0; w < workers_.size(); ++w) {
      if (workers_[w].alive && workers_[w].scheduled) strands.push_back(w);
    }
    one_of(messages_, [this](std::size_t i) { deliver(messages_.take(i)); });
    one_of(tasks_, [this](std::size_t i) { perform(tasks_.take(i)); });
    one_of(strands, [&](std::size_t i) { run_strand(strands[i]); });
    one_of(writes_, [this](std::size_t i) { written(writes_.take(i)); });
    one_of(losses_, [this](std::size_t i) {
      const auto [at, peer] = losses_.take(i);
      lose(at, peer);
    });
    if (begin_pending_ && workers_[root_].alive) possible.emplace_back([this] { begin(); });
    if (possible.empty()) return false;
    possible[pick(possible.size())]();
    return true;
  }

  // ---- messages

  void send(Message message) {
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
  void written(const std::pair<std::size_t, std::size_t>& way) {
    const auto [from, to] = way;
    if (!workers_[from].alive) return;
    if (lost_.contains({from, to})) {
      abort(from);
    } else {
      apply(from, from, {}, [](PassProtocol& protocol) { return protocol.gradients_written(); });
    }
  }
  void deliver(const Message& message) {
    note(kNames[static_cast<std::size_t>(message.kind)], " of ", message.from, " comes to ",
         message.to);
    if (workers_[message.to].alive) handle(message);
  }
  void handle(const Message& message) {
    Worker& worker = workers_[message.to];
    const bool opens = message.kind == Kind::mark || message.kind == Kind::gradients;
    if (!worker.protocol && opens) {
      if (worker.context_failed) {
        send({Kind::abort, message.to, message.from});
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
        send({Kind::abort, message.to, message.from});
      return;
    }
    // A message that finds no pass is dropped; one that found it just before finds it ended.
    if (worker.removed && chance(0.5)) return;
    if (opens && worker.protocol->running()) worker.participant = true;
    const WorkerInfo from = info(message.from);
    apply(message.to, message.from, message.sends, [&](PassProtocol& protocol) {
      if (message.kind == Kind::mark) return protocol.on_mark(from, message.mark);
      if (message.kind == Kind::ack) return protocol.on_ack(from, message.ack);
      if (message.kind == Kind::quiet) return protocol.on_quiet(from);
      if (message.kind == Kind::close_marking) return protocol.on_close_marking(from);
      if (message.kind == Kind::done) return protocol.on_done(from);
      return protocol.on_gradients(from, message.ack, message.sends);
    });
  }

  // ---- effects

  template <class Event>
  void apply(std::size_t at, std::size_t from, std::vector<std::uint32_t> deliveries, Event event) {
    PassProtocol& protocol = *workers_[at].protocol;
    const bool running = protocol.running();
    PassEffects effects;
    try {
      effects = event(protocol);
    } catch (const std::exception& error) {
      fail(name(at), " refuses what a correct worker sent: ", error.what());
    }
    if (!running && !empty(effects)) fail(name(at), " acts after the end of the pass");
    if (!empty(effects)) tasks_.push_back({at, from, std::move(effects), std::move(deliveries)});
  }
  void perform(Task task) {
    const std::size_t at = task.worker;
    if (!workers_[at].alive) return;
    PassEffects& effects = task.effects;
    for (auto& [to, mark] : effects.marks) {
      check_mark(at, mark);
      send({Kind::mark, at, to.value(), std::move(mark)});
    }
    for (auto& [to, ack] : effects.acks) send({Kind::ack, at, to.value(), {}, std::move(ack)});
    for (const WorkerId to : effects.quiet) send({Kind::quiet, at, to.value()});
    for (const WorkerId to : effects.close_marking) send({Kind::close_marking, at, to.value()});
    for (const std::uint32_t node : effects.kill) {
      if (nodes_[node].used) fail(name(at), " kills a node that the loss uses");
      post(at, node, false);
    }
    if (effects.settled) check_settled();
    if (effects.succeed) {
      const bool unused = std::any_of(nodes_.begin(), nodes_.end(), [&](const Node& node) {
        return node.kind == NodeKind::send && workers_[node.worker].participant && !node.used;
      });
      const bool at_once = !unused && !marked_;
      if (settled_ != at_once) fail("the root is wrong about whether all was settled by gradients");
    }
    if (effects.succeed || effects.done) {
      const bool writing = std::any_of(writes_.begin(), writes_.end(), [&](const auto& write) {
        return write.first == at && workers_[write.second].alive;
      });
      if (writing) fail(name(at), " is done, but its gradients have not been written");
      finish(at, true);
    }
    if (effects.done) say_done(at);
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
  void check_mark(std::size_t at, const wire::Mark& mark) {
    if (!std::exchange(marked_, true)) count("marked");
    for (const std::uint64_t send : mark.links) {
      if (!nodes_[send].used) fail(name(at), " marks a link that the loss does not use");
      if (states_[send].received) fail(name(at), " marks a link that has got its gradient");
    }
  }
  // All nodes of all participants have run, and no gradient is in flight.
  void check_settled() {
    if (std::exchange(settled_, true)) fail("the root is told twice that all is settled");
    for (std::size_t w = 0; w < workers_.size(); ++w) {
      if (workers_[w].participant && workers_[w].unresolved != 0)
        fail("all is settled, but nodes of ", name(w), " have not run");
    }
    for (const Message& message : messages_) {
      if (message.kind == Kind::gradients && workers_[message.to].participant)
        fail("all is settled, but gradients are in flight");
    }
  }
  void say_done(std::size_t at) {
    workers_[at].said_done = true;
    if (lost_.contains({at, root_})) {
      done_not_sent(at);
    } else {
      send({Kind::done, at, root_});
    }
  }
  void done_not_sent(std::size_t at) {
    workers_[at].context_failed = true;
    tell_abort(at);
  }
  void finish(std::size_t at, bool well) {
    Worker& worker = workers_[at];
    if (std::exchange(worker.removed, true)) fail(name(at), " ends twice");
    worker.protocol->end();
    note(name(at), well ? " ends" : " fails");
    if (well && gives_out_partial_sums(at)) fail(name(at), " is done, but its sums are partial");
    if (!well || at != root_) return;
    succeeded_ = true;
    count("succeeded");
    for (std::size_t w = 0; w < workers_.size(); ++w) {
      if (w == root_ || !workers_[w].alive || !workers_[w].participant) continue;
      if (!workers_[w].said_done) fail("the root has succeeded, but ", name(w), " is not done");
    }
    for (const Message& message : messages_) {
      if (message.kind == Kind::gradients && workers_[message.to].alive)
        fail("the root has succeeded, but gradients are in flight");
    }
  }

  // ---- strands

  void post(std::size_t at, std::size_t node, bool live) {
    Worker& worker = workers_[at];
    if (worker.stop) return;
    worker.inbox.emplace_back(node, live);
    worker.scheduled = true;
  }
  void run_strand(std::size_t at) {
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
  void run_node(std::size_t at, std::size_t node) {
    NodeState& state = states_[node];
    note(name(at), " runs node ", node);
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
  void flush(std::size_t at, std::optional<std::uint64_t> quiet_at = {}) {
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
      count("gradients sent", sends.size());
      send({Kind::gradients, at, to, {}, std::move(*ack), std::move(sends)});
    }
  }
  void arrive(std::size_t node, bool live) {
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

  // ---- what goes wrong, and what must hold
  void abort(std::size_t at) {
    Worker& worker = workers_[at];
    if (!worker.protocol->fail()) return;
    worker.failed = true;
    worker.context_failed = true;
    tell_abort(at);
    worker.stop = true;
    worker.scheduled = true;
  }
  void tell_abort(std::size_t at) {
    for (const WorkerId to : workers_[at].protocol->concerned()) {
      if (to.value() != at) send({Kind::abort, at, to.value()});
    }
  }
  void kill(std::size_t victim) {
    Worker& worker = workers_[victim];
    if (!worker.alive) return;
    faulty_ |= takes_part(victim);
    note(name(victim), " dies");
    worker.alive = false;
    std::erase_if(messages_, [&](const Message& message) { return message.to == victim; });
    std::erase_if(tasks_, [&](const Task& task) { return task.worker == victim; });
    for (std::size_t w = 0; w < workers_.size(); ++w) {
      if (workers_[w].alive) losses_.emplace_back(w, victim);
    }
  }
  // The connection of two live workers breaks.
  void cut(std::size_t one, std::size_t other) {
    if (!workers_[one].alive || !workers_[other].alive) return;
    faulty_ |= takes_part(one) && takes_part(other);
    note(name(one), " and ", name(other), " lose each other");
    cuts_.insert({one, other});
    cuts_.insert({other, one});
    losses_.emplace_back(one, other);
    losses_.emplace_back(other, one);
  }
  void lie(wire::Ack& ack) {
    for (std::size_t w = 0; w < workers_.size(); ++w) {
      if (takes_part(w) || w == root_ || !chance(0.5)) continue;
      ack.participants.push_back(info(w).id);
      faulty_ = lied_ = true;
    }
  }
  // Messages that the peer sent and that have not been read yet are lost. MARK and GRADIENTS may
  // have been read and wait for a thread: they are handled later. A DONE may not have been written
  // yet.
  void lose(std::size_t at, std::size_t peer) {
    if (!workers_[at].alive) return;
    lost_.emplace(at, peer);
    std::erase_if(messages_, [&](const Message& message) {
      if (message.from != peer || message.to != at) return false;
      return (message.kind != Kind::mark && message.kind != Kind::gradients) || chance(0.5);
    });
    const auto unwritten = std::find_if(messages_.begin(), messages_.end(), [&](const Message& m) {
      return m.kind == Kind::done && m.from == at && m.to == peer;
    });
    if (unwritten != messages_.end() && chance(0.5)) {
      messages_.erase(unwritten);
      done_not_sent(at);
    }
    check_lost(at, peer);
  }
  void check_lost(std::size_t at, std::size_t peer) {
    const Worker& worker = workers_[at];
    if (lost_.contains({at, peer}) && worker.protocol && worker.protocol->needs(info(peer).id))
      abort(at);
  }
  // Some of the worker's nodes that the loss uses have run, others have not.
  bool ran_partly(std::size_t worker) const {
    bool some = false, all = true;
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (nodes_[i].worker != worker || !nodes_[i].used) continue;
      some |= states_[i].ran;
      all &= states_[i].ran;
    }
    return some && !all;
  }
  // Whether a reader would get them there.
  bool gives_out_partial_sums(std::size_t worker) const {
    return !workers_[worker].context_failed && ran_partly(worker);
  }
  void check_rest() {
    const bool root_alive = workers_[root_].alive;
    bool any_failed = false;
    for (std::size_t w = 0; w < workers_.size(); ++w) {
      const Worker& worker = workers_[w];
      if (!worker.alive || !worker.protocol) continue;
      any_failed |= worker.failed;
      if (!worker.removed) fail("at rest, the pass has not ended on ", name(w));
      if (gives_out_partial_sums(w)) fail("the sums of ", name(w), " are partial");
    }
    if (!root_alive) return;
    if (any_failed && succeeded_) fail("the root has succeeded, but another worker has failed");
    if (lied_ && succeeded_) fail("the root has succeeded without one that was named");
    if (!succeeded_) {
      if (!faulty_) fail("the pass has failed for no reason");
      for (std::size_t w = 0; w < workers_.size(); ++w) {
        if (!workers_[w].alive || !workers_[w].protocol || workers_[w].context_failed) continue;
        // The sums of a worker that was done are complete.
        if (!workers_[w].said_done || !cuts_.contains({w, root_}))
          fail("the pass has failed, but ", name(w), " has not heard of it");
      }
      return;
    }
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (workers_[nodes_[i].worker].alive && nodes_[i].used && !states_[i].ran)
        fail("the pass has succeeded without a node it needs");
    }
  }
  [[nodiscard]] WorkerInfo info(std::size_t worker) const {
    return {"w" + std::to_string(worker), WorkerId(static_cast<std::uint32_t>(worker)), 1};
  }
  [[nodiscard]] std::string name(std::size_t worker) const {
    return "worker " + std::to_string(worker);
  }
  std::vector<NodeState> states_;
  std::vector<Worker> workers_;
  simulation::Channel<Message> messages_;
  simulation::Channel<Task> tasks_;
  simulation::Channel<std::pair<std::size_t, std::size_t>> writes_;  // GRADIENTS: from, to
  std::set<std::pair<std::size_t, std::size_t>> lost_;               // (who, whom)
  simulation::Channel<std::pair<std::size_t, std::size_t>> losses_;  // the same, to come
  std::set<std::pair<std::size_t, std::size_t>> cuts_;               // both ways
  std::size_t deaths_left_ = 0, cuts_left_ = 0, steps_ = 0, next_fault_ = 0;
  std::size_t throwing_node_ = 0;
  std::size_t liar_ = 0;  // no worker if it is the root
  bool lied_ = false;
  bool begin_pending_ = false;
  bool faulty_ = false;  // something has gone wrong that the pass has to fail for, or may
  bool succeeded_ = false;
  bool marked_ = false;  // a MARK was sent
  bool settled_ = false;
};

}  // namespace

simulation::Outcome run(std::uint64_t number, const Options& options) {
  return World(number, options).run();
}

}  // namespace stitch::dist_autograd::pass_simulation
