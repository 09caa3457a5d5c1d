#include "stitch/dist_autograd/graph_dot.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <deque>
#include <optional>
#include <set>
#include <sstream>
#include <unordered_map>

#include "stitch/dist_autograd/engine.h"
#include "stitch/dist_autograd/executor/plan.h"
#include "stitch/rpc/calls.h"

namespace stitch::dist_autograd {

namespace detail {

// One worker's part, and the workers that it told of the context.
struct GraphPart {
  std::string dot;
  std::uint64_t links = 0;  // sent by it
  std::vector<WorkerId> peers;
  std::optional<PassId> pass;  // the one that it shows; none when it shows none
  template <class Archive>
  void serialize(Archive& archive) {
    archive(dot, links, peers, pass);
  }
};

}  // namespace detail

namespace {

using detail::GraphPart;

// The colours of a worker: of lines and leaves (which have white text), of its nodes towards it on
// other workers, of its background. Every eighth worker has the same.
struct WorkerColours {
  const char* strong;
  const char* middle;
  const char* light;
};
const WorkerColours& colours_of(WorkerId worker) {
  static constexpr std::array<WorkerColours, 8> kColours{{{"#1f5fa8", "#b9d3f0", "#f2f7fd"},
                                                          {"#b3541e", "#f4cbb0", "#fdf5f0"},
                                                          {"#2c7a3f", "#bfe3c6", "#f2faf4"},
                                                          {"#7b3fa0", "#dfc6ee", "#f9f4fc"},
                                                          {"#a3152f", "#f2bcc6", "#fdf2f4"},
                                                          {"#0f7c80", "#b5e2e3", "#f0fafa"},
                                                          {"#8a6d00", "#eddf9f", "#fcfaee"},
                                                          {"#4d5968", "#ccd3db", "#f5f7f9"}}};
  return kColours[worker.value() % kColours.size()];
}

// Backslashes stay: "\n" is a new line in a label.
std::string in_quotes(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"') out += '\\';
    out += c;
  }
  return out + "\"";
}

std::string without_backslashes(std::string text) {
  std::replace(text.begin(), text.end(), '\\', '/');
  return text;
}

// "12.5 KiB", "3.4 ms": three digits are enough in a picture.
std::string rounded(double value, const char* unit) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), value < 100 ? "%.3g %s" : "%.0f %s", value, unit);
  return text.data();
}
std::string bytes_text(std::size_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes < 1024) return std::to_string(bytes) + " B";
  if (bytes < (std::size_t{1} << 20)) return rounded(value / 1024, "KiB");
  return rounded(value / (1 << 20), "MiB");
}
std::string time_text(std::chrono::nanoseconds time) {
  const auto value = static_cast<double>(time.count());
  if (value < 1e6) return rounded(value / 1e3, "us");
  if (value < 1e9) return rounded(value / 1e6, "ms");
  return rounded(value / 1e9, "s");
}

std::string link_name(const char* side, LinkId link) {
  return in_quotes(std::string(side) + " " + to_string(link));
}

// "Mul" for MulBackward0: what was computed.
std::string operation(const std::string& node) {
  const auto end = node.find("Backward");
  return end == std::string::npos || end == 0 ? node : node.substr(0, end);
}

std::string attributes(const std::string& label, const std::string& tooltip, const char* shape,
                       const std::string& fill, const std::string& line, const char* font,
                       bool root) {
  return " [label=" + in_quotes(label) + ", tooltip=" + in_quotes(tooltip) + ", shape=" + shape +
         ", fillcolor=\"" + fill + "\", color=\"" + line + "\", fontcolor=\"" + font + "\"" +
         (root ? ", penwidth=3" : "") + "];\n";
}

// Writes the part of one worker, with what `pass` did there; without one, its own last pass. If
// another one ended there last, nothing: parts of different passes do not make a picture.
class PartWriter {
 public:
  PartWriter(rpc::Agent& agent, const ContextState& context, const std::vector<at::Tensor>& roots,
             const std::optional<PassId>& pass)
      : agent_(agent), context_(context), plan_(edges_of(roots), context.sends()) {
    const auto last = context.last_pass();
    if (last && last->pass == pass.value_or(last->pass)) {
      pass_ = last->pass;
      for (const PassSummary::Sent& sent : last->sent) sent_.emplace(sent.link, sent.bytes);
      note_ =
          "\\nlast pass: " + std::to_string(last->nodes_run) + " nodes in " + time_text(last->took);
    }
    for (const Plan::Target& root : plan_.roots()) roots_.insert(root.node);
  }

  GraphPart write() {
    const WorkerColours own = colours_of(agent_.self().id);
    GraphPart part;
    part.pass = pass_;
    part.links = plan_.sends().size();
    part.dot = "  subgraph \"cluster_" + id() +
               "\" {\n    label=" + in_quotes(agent_.self().name + note_) +
               "; style=rounded; penwidth=1.5; color=\"" + own.strong + "\"; fontcolor=\"" +
               own.strong + "\"; bgcolor=\"" + own.light + "\";\n";
    std::string links;
    for (std::uint32_t i = 0; i < plan_.size(); ++i) {
      part.dot += "    " + name(i) + style(i);
      for (const Plan::Target& target : plan_.edges(i)) {
        if (target.node != Plan::kNone)
          part.dot +=
              "    " + name(i) + " -> " + name(target.node) + " [color=\"" + own.strong + "\"];\n";
      }
      if (plan_.kind(i) == NodeKind::recv) links += link(plan_.recv(i));
    }
    part.dot += "  }\n" + links;
    for (const WorkerInfo& peer : context_.peers()) part.peers.push_back(peer.id);
    return part;
  }

 private:
  static std::vector<Edge> edges_of(const std::vector<at::Tensor>& roots) {
    std::vector<Edge> edges;
    for (const at::Tensor& root : roots)
      edges.push_back(torch::autograd::impl::gradient_edge(root));
    return edges;
  }
  [[nodiscard]] std::string id() const { return std::to_string(agent_.self().id.value()); }

  [[nodiscard]] std::string name(std::uint32_t index) const {
    switch (plan_.kind(index)) {
      case NodeKind::send:
        return link_name("send", plan_.send(index).link());
      case NodeKind::recv:
        return link_name("recv", plan_.recv(index).link());
      default:
        return in_quotes(id() + "." + std::to_string(index));
    }
  }

  // A send and a recv node have the colour of the worker at the other end.
  [[nodiscard]] std::string style(std::uint32_t index) const {
    const WorkerColours own = colours_of(agent_.self().id);
    const std::string kind = plan_.node(index).name();
    const bool root = roots_.contains(index);
    switch (plan_.kind(index)) {
      case NodeKind::send: {
        const SendNode& node = plan_.send(index);
        const WorkerColours peer = colours_of(node.receiver().id);
        return attributes("send " + to_string(node.link()) + "\\nto " + node.receiver().name,
                          kind + ": " + without_backslashes(node.call()), "invhouse", peer.middle,
                          peer.strong, "#222222", root);
      }
      case NodeKind::recv: {
        const RecvNode& node = plan_.recv(index);
        const WorkerColours peer = colours_of(node.sender().id);
        return attributes("recv " + to_string(node.link()) + "\\nfrom " + node.sender().name,
                          kind + ": " + without_backslashes(node.call()), "house", peer.middle,
                          peer.strong, "#222222", root);
      }
      case NodeKind::accumulate: {
        std::ostringstream label;
        label << "leaf " << static_cast<const AccumulateGrad&>(plan_.node(index)).variable.sizes();
        return attributes(label.str(), kind, "ellipse", own.strong, own.strong, "white", root);
      }
      default:
        return attributes(operation(kind), kind, "box", "white", own.strong, "#222222", root);
    }
  }

  // Grey when the pass sent no gradient over it. Without a say in the layout: so workers stand
  // side by side.
  [[nodiscard]] std::string link(const RecvNode& node) const {
    const auto sent = sent_.find(node.link());
    std::string line = "  " + link_name("recv", node.link()) + " -> " +
                       link_name("send", node.link()) +
                       " [style=dashed, constraint=false, color=\"";
    if (sent == sent_.end()) return line + "#b0b0b0\"];\n";
    const WorkerColours peer = colours_of(node.sender().id);
    return line + peer.strong + "\", penwidth=2, fontcolor=\"" + peer.strong + "\", label=\" " +
           bytes_text(sent->second) + "\"];\n";
  }

  rpc::Agent& agent_;
  const ContextState& context_;
  const Plan plan_;
  std::unordered_map<LinkId, std::size_t> sent_;
  std::set<std::uint32_t> roots_;
  std::optional<PassId> pass_;
  std::string note_;
};

constexpr const char* kStyle =
    "  graph [fontname=\"Helvetica\", fontsize=13, labelloc=t, pad=0.3, nodesep=0.25, "
    "ranksep=0.35, bgcolor=white];\n"
    "  node [fontname=\"Helvetica\", fontsize=11, style=\"rounded,filled\", height=0.3, "
    "margin=\"0.12,0.05\"];\n"
    "  edge [fontname=\"Helvetica\", fontsize=10, arrowsize=0.6];\n";

}  // namespace

namespace detail {

// Called on each worker.
GraphPart graph_part(ContextId id, std::optional<PassId> pass) {
  const auto agent = rpc::current_agent();
  const auto context = Engine::of(*agent).contexts().find(id);
  return context ? PartWriter(*agent, *context, {}, pass).write() : GraphPart{};
}

}  // namespace detail

std::string collect_graph(const std::shared_ptr<rpc::Agent>& agent, const ContextState& context,
                          const std::vector<at::Tensor>& roots) {
  rpc::ExecutionContext plain = rpc::ExecutionContext::current();
  plain.runtime = agent;
  plain.autograd_context = nullptr;  // the question itself must not be recorded
  const rpc::ExecutionContextScope scope(std::move(plain));
  std::set<WorkerId> seen{agent->self().id};
  GraphPart part = PartWriter(*agent, context, roots, std::nullopt).write();
  std::optional<PassId> pass = part.pass;
  std::string parts = part.dot;
  std::uint64_t links = part.links;
  std::size_t workers = 1;
  std::deque<WorkerId> next(part.peers.begin(), part.peers.end());
  next.push_back(context.id().home);
  for (; !next.empty(); next.pop_front()) {
    if (!seen.insert(next.front()).second) continue;
    try {
      part = rpc_sync<detail::graph_part>(next.front(), context.id(), pass);
    } catch (const Error& error) {  // it has left or died: the picture says so
      parts += "  " + in_quotes("no answer from " + std::to_string(next.front().value())) +
               " [shape=note, label=" + in_quotes(error.what()) + "];\n";
      continue;
    }
    if (!part.dot.empty()) ++workers;
    if (!pass) pass = part.pass;
    parts += part.dot;
    links += part.links;
    next.insert(next.end(), part.peers.begin(), part.peers.end());
  }
  const std::string title = "context " + to_string(context.id());
  return "digraph " + in_quotes(title) + " {\n" + kStyle + "  label=" +
         in_quotes(title + ": " + std::to_string(workers) + " workers, " + std::to_string(links) +
                   " links") +
         ";\n" + parts + "}\n";
}

}  // namespace stitch::dist_autograd
