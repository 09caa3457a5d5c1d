#include "stitch/dist_autograd/graph_dot.h"

#include <deque>
#include <set>

#include "stitch/dist_autograd/engine.h"
#include "stitch/dist_autograd/executor/plan.h"
#include "stitch/rpc/calls.h"

namespace stitch::dist_autograd {

namespace detail {

// One worker's part, and the workers that it told of the context.
struct GraphPart {
  std::string dot;
  std::vector<WorkerId> peers;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(dot, peers);
  }
};

}  // namespace detail

namespace {

using detail::GraphPart;

std::string in_quotes(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

std::string link_name(const char* side, LinkId link) {
  return in_quotes(std::string(side) + " " + to_string(link));
}

GraphPart describe(rpc::Agent& agent, const ContextState& context,
                   const std::vector<at::Tensor>& roots) {
  GraphPart part;
  std::vector<Edge> edges;
  for (const at::Tensor& root : roots) edges.push_back(torch::autograd::impl::gradient_edge(root));
  const Plan plan(std::move(edges), context.sends());
  const std::string self = std::to_string(agent.self().id.value());
  const auto name = [&](std::uint32_t index) {
    switch (plan.kind(index)) {
      case NodeKind::send:
        return link_name("send", plan.send(index).link());
      case NodeKind::recv:
        return link_name("recv", plan.recv(index).link());
      default:
        return in_quotes(self + "." + std::to_string(index));
    }
  };
  std::string links;
  part.dot =
      "  subgraph \"cluster_" + self + "\" {\n    label=" + in_quotes(agent.self().name) + ";\n";
  for (std::uint32_t i = 0; i < plan.size(); ++i) {
    std::string label = plan.node(i).name();
    if (plan.kind(i) == NodeKind::send) label += ": " + plan.send(i).call();
    part.dot += "    " + name(i) + " [label=" + in_quotes(label) +
                (plan.kind(i) == NodeKind::plain ? "" : ", shape=box") + "];\n";
    for (const Plan::Target& target : plan.edges(i)) {
      if (target.node != Plan::kNone)
        part.dot += "    " + name(i) + " -> " + name(target.node) + ";\n";
    }
    if (plan.kind(i) == NodeKind::recv)
      links +=
          "  " + name(i) + " -> " + link_name("send", plan.recv(i).link()) + " [style=dashed];\n";
  }
  part.dot += "  }\n" + links;
  for (const WorkerInfo& peer : context.peers()) part.peers.push_back(peer.id);
  return part;
}

}  // namespace

namespace detail {

// Called on each worker.
GraphPart graph_part(WorkerId home, std::uint64_t epoch, std::uint64_t counter) {
  const auto agent = rpc::current_agent();
  const auto context = Engine::of(*agent).contexts().find({home, epoch, counter});
  return context ? describe(*agent, *context, {}) : GraphPart{};
}

}  // namespace detail

std::string collect_graph(const std::shared_ptr<rpc::Agent>& agent, const ContextState& context,
                          const std::vector<at::Tensor>& roots) {
  rpc::ExecutionContext plain = rpc::ExecutionContext::current();
  plain.runtime = agent;
  plain.autograd_context = nullptr;  // the question itself must not be recorded
  const rpc::ExecutionContextScope scope(std::move(plain));
  std::set<WorkerId> seen{agent->self().id};
  GraphPart part = describe(*agent, context, roots);
  std::string dot =
      "digraph " + in_quotes("context " + to_string(context.id())) + " {\n" + part.dot;
  std::deque<WorkerId> next(part.peers.begin(), part.peers.end());
  next.push_back(context.id().home);
  for (; !next.empty(); next.pop_front()) {
    if (!seen.insert(next.front()).second) continue;
    part = rpc_sync<detail::graph_part>(next.front(), context.id().home, context.id().epoch,
                                        context.id().counter);
    dot += part.dot;
    next.insert(next.end(), part.peers.begin(), part.peers.end());
  }
  return dot + "}\n";
}

}  // namespace stitch::dist_autograd
