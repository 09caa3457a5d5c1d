#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "stitch/dist_autograd/protocol/pass_protocol.h"
#include "tests/simulation/pass_simulation.h"

namespace stitch::dist_autograd::pass_simulation {

enum class NodeKind { plain, send, recv };
struct Node {
  std::size_t worker = 0;
  NodeKind kind = NodeKind::plain;
  std::vector<std::size_t> edges;  // to earlier nodes of the same worker
  std::size_t pair = 0;            // recv: its send, whose number is also that of the link
  std::size_t receiver = 0;        // send
  bool used = false;               // a root leads to it
  std::size_t live_inputs = 0;     // of those, edges from used nodes, and the link
};

// A history with an imagined graph over all workers.
class PassHistory : public simulation::History {
 protected:
  // As forward makes it: every edge leads to an earlier node, every link from a later recv node to
  // an earlier send node.
  PassHistory(std::uint64_t number, const Options& options) : History(number), options_(options) {
    std::vector<std::vector<std::size_t>> targets(options_.workers);  // by worker: plain and recv
    const auto some_of = [&](std::size_t worker, std::size_t at_least) {
      std::vector<std::size_t> edges;
      if (targets[worker].empty()) return edges;
      for (std::size_t i = at_least + pick(std::size_t{3}); i > 0; --i)
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
  }
  // The nodes of a worker that these lead to, these included.
  [[nodiscard]] std::vector<bool> reached_from(std::vector<std::size_t> these) const {
    std::vector<bool> reached(nodes_.size());
    while (!these.empty()) {
      const std::size_t node = these.back();
      these.pop_back();
      if (reached[node]) continue;
      reached[node] = true;
      these.insert(these.end(), nodes_[node].edges.begin(), nodes_[node].edges.end());
    }
    return reached;
  }
  // Whether the pass needs the worker. Without a node that the loss uses it gets no message.
  [[nodiscard]] bool takes_part(std::size_t worker) const {
    return std::any_of(nodes_.begin(), nodes_.end(),
                       [&](const Node& node) { return node.worker == worker && node.used; });
  }
  // A worker's part of the graph; nodes have their numbers in the whole graph.
  struct Graph final : PassGraph {
    Graph(PassHistory& owner, std::size_t self)
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
    void mark_used(const std::vector<bool>& delivered, std::vector<LinkId>& reached) override {
      std::vector<std::size_t> waiting;
      for (const std::size_t send : own_sends) {
        if (!delivered[send]) waiting.push_back(send);
      }
      const std::vector<bool> waits = simulation.reached_from(std::move(waiting));
      std::vector<LinkId> all;
      if (worker == simulation.root_) {
        for (const std::size_t root : simulation.roots_) spread(root, all);
      }
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
    PassHistory& simulation;
    const std::size_t worker;
    std::vector<bool> is_marked;
    std::vector<std::uint32_t> own_sends;
    const std::string text = "a call";
  };

  const Options options_;
  std::vector<Node> nodes_;
  std::size_t root_ = 0;
  std::vector<std::size_t> roots_;
};

}  // namespace stitch::dist_autograd::pass_simulation
