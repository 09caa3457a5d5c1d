#include "tests/dist_autograd/local_world.h"

#include "tests/support/equal_gradients.h"

#include <algorithm>

namespace stitch::dist_autograd::testing {

// One pass over all parts. Stands in for the protocol: marks to the fixed point, kills the rest,
// then routes gradients.
class LocalPass : public std::enable_shared_from_this<LocalPass> {
 public:
  explicit LocalPass(LocalWorld& world);
  LocalWorld::Outcome run(const LocalWorld::Request& request);

 private:
  friend class LocalOwner;
  struct Side {
    std::shared_ptr<const Plan> plan;
    std::unique_ptr<Marks> marks;
    std::shared_ptr<StrandOwner> owner;
    std::shared_ptr<Strand> strand;
  };
  void mark(int part, std::uint32_t source);
  void route(RecvNode& node, variable_list gradients, const Positions& unreached);
  void finished(int part);
  void failed(const Error& error);
  void build(const LocalWorld::Request& request);

  LocalWorld& world_;
  std::vector<Side> sides_;
  base::Mutex mutex_;
  base::CondVar changed_;
  std::vector<bool> done_ STITCH_GUARDED_BY(mutex_);
  LocalWorld::Outcome outcome_ STITCH_GUARDED_BY(mutex_);
};

// Does not own the pass: a strand may still report that it has stopped after the pass is destroyed.
class LocalOwner final : public StrandOwner {
 public:
  LocalOwner(std::weak_ptr<LocalPass> pass, int part) : pass_(std::move(pass)), part_(part) {}
  void gradients_ready(RecvNode& node, variable_list gradients,
                       const Positions& unreached) override {
    if (const auto pass = pass_.lock()) pass->route(node, std::move(gradients), unreached);
  }
  void went_quiet(std::uint64_t, bool resolved) override {
    const auto pass = pass_.lock();
    if (pass && resolved) pass->finished(part_);
  }
  void failed(Error error) override {
    if (const auto pass = pass_.lock()) pass->failed(error);
  }
  void stopped() override {
    if (const auto pass = pass_.lock()) pass->finished(part_);
  }

 private:
  std::weak_ptr<LocalPass> pass_;
  const int part_;
};

LocalPass::LocalPass(LocalWorld& world) : world_(world), done_(world.parts_.size(), false) {}

void LocalPass::build(const LocalWorld::Request& request) {
  const Executor pooled = [&world = world_](c10::Device, base::UniqueFunction<void()> task) {
    base::MutexLock lock(world.mutex_);
    world.queue_.push_back(std::move(task));
    world.work_.notify_one();
  };
  const Executor& executor = request.executor ? request.executor : pooled;
  for (std::size_t i = 0; i < world_.parts_.size(); ++i) {
    std::vector<Edge> roots;
    if (static_cast<int>(i) == request.part) {
      for (const at::Tensor& root : request.roots)
        roots.push_back(torch::autograd::impl::gradient_edge(root));
    }
    Side side;
    side.plan = std::make_shared<Plan>(std::move(roots), world_.parts_[i].sends);
    side.marks = std::make_unique<Marks>(*side.plan);
    side.owner = std::make_shared<LocalOwner>(weak_from_this(), static_cast<int>(i));
    side.strand = std::make_shared<Strand>(side.plan, request.flags, world_.parts_[i].gradients,
                                           executor, side.owner);
    sides_.push_back(std::move(side));
  }
}

void LocalPass::failed(const Error& error) {
  {
    base::MutexLock lock(mutex_);
    if (!outcome_.error) outcome_.error = error;
  }
  for (Side& side : sides_) side.strand->stop();
}

void LocalPass::mark(int part, std::uint32_t source) {
  Side& side = sides_[static_cast<std::size_t>(part)];
  std::vector<std::uint32_t> recvs;
  side.marks->spread(source, recvs);
  for (const std::uint32_t recv : recvs) {
    const LinkId link = side.plan->recv(recv).link();
    const int sender = static_cast<int>(link.sender.value());
    mark(sender, sides_[static_cast<std::size_t>(sender)].plan->find(link));
  }
}

void LocalPass::route(RecvNode& node, variable_list gradients, const Positions& unreached) {
  {
    base::MutexLock lock(mutex_);
    ++outcome_.gradients_sent;
    outcome_.links_sent.push_back(node.link());
  }
  Side& side = sides_[node.link().sender.value()];
  std::vector<variable_list> arrived;
  arrived.push_back(std::move(gradients));
  side.strand->deliver({side.plan->find(node.link())}, std::move(arrived), {unreached});
}

void LocalPass::finished(int part) {
  base::MutexLock lock(mutex_);
  done_[static_cast<std::size_t>(part)] = true;
  changed_.notify_all();
}

LocalWorld::Outcome LocalPass::run(const LocalWorld::Request& request) {
  build(request);
  Side& root_side = sides_[static_cast<std::size_t>(request.part)];
  for (const Plan::Target& root : root_side.plan->roots()) mark(request.part, root.node);
  for (std::size_t i = 0; i < request.roots.size(); ++i) {
    root_side.strand->seed(i, i < request.seeds.size() && request.seeds[i].defined()
                                  ? request.seeds[i]
                                  : at::ones_like(request.roots[i]));
  }
  for (Side& side : sides_) side.strand->start();
  for (Side& side : sides_) {
    std::vector<std::uint32_t> unused;
    for (const std::uint32_t send : side.plan->sends()) {
      if (!side.marks->marked(send)) unused.push_back(send);
    }
    side.strand->kill(std::move(unused));
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  base::MutexLock lock(mutex_);
  for (;;) {
    bool all = true;
    for (const bool done : done_) all = all && done;
    if (all) break;
    if (!changed_.wait_until(mutex_, deadline)) {
      outcome_.error = Error(ErrorCode::timeout, "local pass did not end");
      break;
    }
  }
  for (Side& side : sides_) outcome_.nodes_run += side.strand->nodes_run();
  return outcome_;
}

LocalWorld::LocalWorld(int parts, int threads) : parts_(static_cast<std::size_t>(parts)) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { serve(); });
}

LocalWorld::~LocalWorld() {
  {
    base::MutexLock lock(mutex_);
    closed_ = true;
    work_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

void LocalWorld::serve() {
  base::MutexLock lock(mutex_);
  for (;;) {
    while (queue_.empty() && !closed_) work_.wait(mutex_);
    if (queue_.empty()) return;
    auto task = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    task();
    lock.lock();
  }
}

at::Tensor LocalWorld::cut(const at::Tensor& tensor, int from) {
  return cut(std::vector<at::Tensor>{tensor}, from)[0];
}

std::vector<at::Tensor> LocalWorld::cut(const std::vector<at::Tensor>& tensors, int from) {
  const LinkId link{WorkerId(static_cast<std::uint32_t>(from)), next_link_++};
  parts_[static_cast<std::size_t>(from)].sends.push_back(
      make_node<SendNode>(link, WorkerInfo{}, LinkName{}, tensors));
  std::vector<at::Tensor> received;
  for (const at::Tensor& tensor : tensors) received.push_back(tensor.detach().clone());
  RecvNode::attach(link, WorkerInfo{}, ContextId{}, LinkName{}, received);
  return received;
}

LocalWorld::Outcome LocalWorld::backward(const Request& request) {
  return std::make_shared<LocalPass>(*this)->run(request);
}

std::vector<at::Tensor> stock_gradients(const std::vector<at::Tensor>& roots,
                                        const std::vector<at::Tensor>& leaves,
                                        const std::vector<at::Tensor>& seeds, bool retain_graph,
                                        bool create_graph) {
  return torch::autograd::grad(roots, leaves, seeds, retain_graph, create_graph,
                               /*allow_unused=*/true);
}

::testing::AssertionResult same_gradient(const at::Tensor& got, const at::Tensor& expected) {
  if (got.defined() != expected.defined()) {
    return ::testing::AssertionFailure() << (got.defined() ? "a gradient where none was expected"
                                                           : "no gradient where one was expected");
  }
  return stitch::testing::equal_gradients(got, expected);
}

}  // namespace stitch::dist_autograd::testing
