#include "stitch/dist_autograd/plan_graph.h"

#include <map>
#include <utility>

#include "stitch/base/error.h"

namespace stitch::dist_autograd {

namespace {

class PlanGraph final : public PassGraph {
 public:
  PlanGraph(std::shared_ptr<const Plan> plan, const ContextId& context, WorkerId self, bool mark)
      : plan_(std::move(plan)), context_(context), self_(self) {
    if (mark) marks_.emplace(*plan_);
  }

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
    recvs_.clear();
    marks_->spread(send, recvs_);
    for (const std::uint32_t index : recvs_) {
      const RecvNode& node = plan_->recv(index);
      require_context(node, context_);
      reached.push_back({node.sender().id, node.link().counter});
    }
  }
  void mark_roots(std::vector<LinkId>& reached) override {
    for (const Plan::Target& root : plan_->roots()) mark(root.node, reached);
  }
  bool marked(std::uint32_t send) const override { return marks_->marked(send); }

 private:
  const std::shared_ptr<const Plan> plan_;
  const ContextId context_;
  const WorkerId self_;
  std::optional<Marks> marks_;
  std::vector<std::uint32_t> recvs_;                    // of one mark()
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
                                           const ContextId& context, WorkerId self, bool mark) {
  return std::make_unique<PlanGraph>(std::move(plan), context, self, mark);
}

}  // namespace stitch::dist_autograd
