#include "stitch/dist_autograd/protocol/plan_graph.h"

#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "stitch/base/error.h"

namespace stitch::dist_autograd {

namespace {

class PlanGraph final : public PassGraph {
 public:
  PlanGraph(std::shared_ptr<const Plan> plan, const ContextId& context, WorkerId self)
      : plan_(std::move(plan)), context_(context), self_(self) {}

  std::uint32_t size() const override { return plan_->size(); }
  std::span<const std::uint32_t> sends() const override { return plan_->sends(); }
  std::uint32_t find(std::uint64_t link) const override { return plan_->find({self_, link}); }
  WorkerId receiver(std::uint32_t send) const override { return plan_->send(send).receiver().id; }
  const std::string& call(std::uint32_t send) const override {
    std::string& text = calls_[send];
    if (text.empty()) text = plan_->send(send).call();
    return text;
  }

  void mark(std::uint32_t send, std::vector<LinkId>& reached) override {
    spread(send);
    report(reached, nullptr);
  }
  void mark_used(const std::vector<bool>& delivered, std::vector<LinkId>& reached) override {
    // No delivery was dead so far: what a SendNode without gradients leads to waits, and no more.
    Marks waiting(*plan_);
    for (const Plan::Target& root : plan_->roots()) spread(root.node);
    for (const std::uint32_t send : plan_->sends()) {
      if (delivered[send]) {
        spread(send);
      } else {
        ignored_.clear();
        waiting.spread(send, ignored_);
      }
    }
    report(reached, &waiting);
  }
  bool marked(std::uint32_t send) const override { return marks_ && marks_->marked(send); }

 private:
  // Marks what `node` leads to.
  void spread(std::uint32_t node) {
    if (!marks_) marks_.emplace(*plan_);
    marks_->spread(node, recvs_);
  }
  // The links of the RecvNodes marked since the last call; with `among`, only of those in it.
  void report(std::vector<LinkId>& reached, const Marks* among) {
    const std::vector<std::uint32_t> recvs = std::exchange(recvs_, {});
    for (const std::uint32_t index : recvs) {
      if (among != nullptr && !among->marked(index)) continue;
      const RecvNode& node = plan_->recv(index);
      require_context(node, context_);
      reached.push_back({node.sender().id, node.link().counter});
    }
  }

  const std::shared_ptr<const Plan> plan_;
  const ContextId context_;
  const WorkerId self_;
  std::optional<Marks> marks_;        // once something is marked
  std::vector<std::uint32_t> recvs_;  // marked, not yet reported
  std::vector<std::uint32_t> ignored_;
  mutable std::map<std::uint32_t, std::string> calls_;  // those that were asked for
};

static_assert(PassGraph::kNone == Plan::kNone);

}  // namespace

void require_context(const RecvNode& node, const ContextId& context) {
  if (node.context() == context) return;
  throw Error(ErrorCode::invalid_argument,
              "the loss uses a result that was received under another context (" +
                  dist_autograd::to_string(node.context()) + ", from " +
                  stitch::to_string(node.sender()) + ")");
}

std::unique_ptr<PassGraph> make_pass_graph(std::shared_ptr<const Plan> plan,
                                           const ContextId& context, WorkerId self) {
  return std::make_unique<PlanGraph>(std::move(plan), context, self);
}

}  // namespace stitch::dist_autograd
