// Who waits for whom in the simulated machine.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/gpu/double/fake_nccl.h"
#include "tests/gpu/double/machine.h"

namespace stitch::transport::gpu::test {
namespace {

// Operations, groups of NCCL in the background, and blocked hosts, by their addresses.
struct WaitsFor {
  struct Node {
    std::string text;
    std::vector<const void*> next;
    std::vector<std::string> reasons;  // of waiting for what is no node
  };
  std::map<const void*, Node> nodes;

  // Nodes of one cycle, or none.
  [[nodiscard]] std::vector<const void*> cycle() const {
    std::set<const void*> ended;
    for (const auto& [start, unused] : nodes) {
      std::vector<std::pair<const void*, std::size_t>> path{{start, 0}};
      std::set<const void*> on_path{start};
      while (!path.empty()) {
        auto& [at, next] = path.back();
        const Node& node = nodes.at(at);
        if (ended.contains(at) || next == node.next.size()) {
          ended.insert(at);
          on_path.erase(at);
          path.pop_back();
          continue;
        }
        const void* const to = node.next[next++];
        if (!nodes.contains(to)) continue;
        if (on_path.contains(to)) {
          std::vector<const void*> found;
          for (const auto& [step, unused_next] : path) {
            if (step == to || !found.empty()) found.push_back(step);
          }
          return found;
        }
        path.emplace_back(to, 0);
        on_path.insert(to);
      }
    }
    return {};
  }
};

// What stands between a rank and what its peer has to do: the peer's work, or its blocked hosts.
void wait_for_peer(const Machine& machine, const FakeComm& comm, bool wants_send,
                   WaitsFor::Node& node) {
  const FakeComm* const peer = comm.peer();
  const std::string missing = wants_send ? "send" : "recv";
  if (peer == nullptr) {
    node.reasons.push_back("the other rank of " + comm.name() + ", which was never made");
    return;
  }
  if (peer->destroyed || peer->aborted) {
    node.reasons.push_back(missing + " of " + peer->name() + ", which is gone");
    return;
  }
  for (const OpPtr& op : peer->kernels) {
    if (!op->nccl) continue;
    for (const NcclPiece& piece : op->nccl->pieces) {
      if (piece.send == wants_send && !piece.done) {
        node.next.push_back(op.get());
        return;
      }
    }
  }
  if (peer->group) {
    node.next.push_back(peer->group.get());
    return;
  }
  for (const BlockedHost* host : machine.blocked) {
    if (host->process == peer->process) node.next.push_back(host);
  }
  if (node.next.empty()) {
    node.reasons.push_back("a " + missing + " of " + peer->name() + " in process " +
                           std::to_string(peer->process) + ", which was not called");
  }
}

void add_operation(const Machine& machine, const Op& op, WaitsFor& graph) {
  WaitsFor::Node& node = graph.nodes[&op];
  node.text = op.what;
  for (const auto* others : {&op.after, &op.behind}) {
    for (const OpPtr& other : *others) {
      if (other->state != Op::State::done) node.next.push_back(other.get());
    }
  }
  if (op.state != Op::State::running) return;
  if (op.gate != 0 && !machine.gates.at(op.gate)) {
    node.reasons.push_back("gate " + std::to_string(op.gate) + ", which is closed");
  }
  if (!op.nccl) return;
  for (const bool send : {true, false}) {
    const NcclPiece* const piece = op.nccl->next(send);
    if (piece != nullptr && !piece->moving) wait_for_peer(machine, *op.nccl->comm, !send, node);
  }
}

void add_group(const Machine& machine, const NcclGroup& group, WaitsFor& graph) {
  WaitsFor::Node& node = graph.nodes[&group];
  node.text = "the launch of a group of NCCL (process " + std::to_string(group.process) + ")";
  for (const NcclPiece& piece : group.pieces) {
    const int direction = piece.send ? piece.comm->rank : 1 - piece.comm->rank;
    if (piece.comm->link->connected[direction]) continue;
    node.text += std::string(", which connects the first ") + (piece.send ? "send" : "recv") +
                 " of " + piece.comm->name();
    wait_for_peer(machine, *piece.comm, !piece.send, node);
  }
}

}  // namespace

std::string Machine::describe_unfinished() const {
  WaitsFor graph;
  for (const auto& [id, op] : unfinished) add_operation(*this, *op, graph);
  for (const auto& [handle, comm] : nccl->comms) {
    if (comm->group && !graph.nodes.contains(comm->group.get())) {
      add_group(*this, *comm->group, graph);
    }
  }
  for (const BlockedHost* host : blocked) {
    WaitsFor::Node& node = graph.nodes[host];
    node.text = "host " + host->host->name + " in " + host->what + " (process " +
                std::to_string(host->process) + ")";
    for (const OpPtr& op : host->waits_for()) node.next.push_back(op.get());
    if (host->group == nullptr) continue;
    node.next.push_back(host->group);
    for (const FakeComm* comm : host->group->inits) {
      if (comm->peer() == nullptr) {
        node.reasons.push_back("the other rank of " + comm->name() + ", which was never made");
      }
    }
  }
  if (graph.nodes.empty()) return "";

  std::string text;
  const auto line = [&](const void* at) {
    const WaitsFor::Node& node = graph.nodes.at(at);
    text += "  " + node.text;
    const char* separator = "\n    waits for ";
    for (const void* next : node.next) {
      if (!graph.nodes.contains(next)) continue;
      text += separator + graph.nodes.at(next).text;
      separator = "\n          and ";
    }
    for (const std::string& reason : node.reasons) {
      text += separator + reason;
      separator = "\n          and ";
    }
    text += "\n";
  };
  const std::vector<const void*> cycle = graph.cycle();
  if (!cycle.empty()) {
    text += "deadlock: a cycle of " + std::to_string(cycle.size()) + ":\n";
    for (const void* at : cycle) line(at);
  }
  constexpr std::size_t kShown = 20;
  std::size_t shown = 0;
  text += std::to_string(graph.nodes.size()) + " unfinished:\n";
  std::vector<std::pair<std::string, const void*>> others;  // by text: the same in every run
  for (const auto& [at, node] : graph.nodes) {
    if (std::find(cycle.begin(), cycle.end(), at) == cycle.end())
      others.emplace_back(node.text, at);
  }
  std::sort(others.begin(), others.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [unused, at] : others) {
    if (++shown <= kShown) line(at);
  }
  if (shown > kShown) text += "  and " + std::to_string(shown - kShown) + " more\n";
  return text + "seed " + std::to_string(options.seed);
}

}  // namespace stitch::transport::gpu::test
