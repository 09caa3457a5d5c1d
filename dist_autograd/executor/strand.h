#pragma once

#include <ATen/ThreadLocalState.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <functional>
#include <memory>
#include <queue>
#include <unordered_map>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"
#include "stitch/dist_autograd/executor/delivery_check.h"
#include "stitch/dist_autograd/executor/node_run.h"
#include "stitch/dist_autograd/executor/node_streams.h"
#include "stitch/dist_autograd/executor/plan.h"
#include "stitch/dist_autograd/graph/gradient_store.h"
#include "stitch/dist_autograd/graph/positions.h"

namespace stitch::dist_autograd {

// Runs a task later, on a thread of its choice, exactly once, also if its owner is gone by then.
using Executor = std::function<void(base::UniqueFunction<void()>)>;

// The pass a strand works for. Called on the strand: one call at a time, never under a lock.
class StrandOwner {
 public:
  virtual ~StrandOwner() = default;
  // A node is about to run: send now what should not wait for it. False: no node runs until
  // Strand::resume(), which may be called before this returns.
  [[nodiscard]] virtual bool before_node() { return true; }
  // A recv node has its complete gradients, some of them perhaps undefined; `unreached`: those of
  // tensors that the roots do not depend on, perhaps all. If this throws, the node has failed.
  virtual void gradients_ready(RecvNode& node, variable_list gradients,
                               const Positions& unreached) = 0;
  // Nothing is ready to run, and `taken` deliveries and kills have been processed so far.
  // `resolved`: every node of the plan has run or is known to be dead, so nothing will ever run
  // again. May be called more than once.
  virtual void went_quiet(std::uint64_t taken, bool resolved) = 0;
  // A node threw: nothing more will run. Called at most once; stopped() follows.
  virtual void failed(Error error) = 0;
  // Who gets the warnings of libtorch that nodes raise; null for the process's own handler. Lives
  // as long as this.
  virtual c10::WarningHandler* warning_handler() noexcept { return nullptr; }
  // After stop() or failed(): no node is running, all pending gradients have been dropped. Called
  // once.
  virtual void stopped() = 0;
};

// Runs the nodes of one pass on one worker, each once and only when its inputs are complete, one at
// a time: in slices that an Executor runs. All input enters through an inbox, so the state of nodes
// needs no lock. Each delivery to a node is live (the roots depend on it that way: a gradient,
// perhaps undefined), unreached (they do not, but on what came in the same message) or dead (no
// message will ever come that way). A node is what the best of its deliveries is. One that is not
// live does not run, as it would not in one process, and its edges are deliveries like those it
// got; an unreached recv node reports that, since its link waits for a message. Thread contract:
// deliver(), kill() and stop() from any thread; seed() before start(). Held by its pass and by its
// slices, which keep the pass alive while they run.
class Strand : public std::enable_shared_from_this<Strand> {
 public:
  Strand(std::shared_ptr<const Plan> plan, RunFlags flags, std::shared_ptr<GradientStore> store,
         Executor executor, std::weak_ptr<StrandOwner> owner, at::ThreadLocalState state = {});
  ~Strand();
  Strand(const Strand&) = delete;
  Strand& operator=(const Strand&) = delete;

  // The gradient of root number `root` of the plan. REQUIRES: before start().
  void seed(std::size_t root, at::Tensor gradient);
  // Lets nodes run. Deliveries that came earlier wait for it. A second call does nothing.
  void start();
  // The gradients of send nodes have arrived: element i of `gradients` is for nodes[i], and the
  // inputs in element i of `unreached`, where there is one, are unreached. REQUIRES: once per node,
  // or kill(node), not both.
  void deliver(const std::vector<std::uint32_t>& nodes, std::vector<variable_list> gradients,
               std::vector<Positions> unreached = {});
  // No gradient will come for these send nodes.
  void kill(std::vector<std::uint32_t> nodes);
  // Asks StrandOwner::before_node() again. Where it throws, it may be called again.
  void resume() STITCH_EXCLUDES(mutex_);
  // Ends the pass here: the running node finishes, no other starts. Before start() it takes effect
  // with start(). Where it throws, it may be called again.
  void stop() STITCH_EXCLUDES(mutex_);

  [[nodiscard]] std::uint64_t nodes_run() const noexcept {
    return nodes_run_.load(std::memory_order_relaxed);
  }
  // The thread that runs a node now (base::this_thread_id()), 0 for none.
  [[nodiscard]] int thread() const noexcept { return thread_.load(std::memory_order_relaxed); }
  // True inside a node, hook or callback of this strand.
  [[nodiscard]] bool running_on_this_thread() const noexcept;

 private:
  enum class Reach : std::uint8_t { dead, unreached, live };
  struct Arrival {
    std::uint32_t node;
    Reach reach;
    variable_list gradients{};
    Positions unreached{};
  };
  struct State {
    std::uint32_t pending = 0;
    Reach reach = Reach::dead;
  };
  struct Ready {
    std::uint32_t rank;  // 3 recv, 2 leads to a recv, 1 leaf, 0 other
    std::uint64_t sequence;
    std::uint32_t node;
    friend bool operator<(const Ready& a, const Ready& b) {
      return a.rank != b.rank ? a.rank < b.rank : a.sequence < b.sequence;
    }
  };

  void post(std::vector<Arrival> arrivals) STITCH_EXCLUDES(mutex_);
  void schedule() STITCH_EXCLUDES(mutex_);
  void run_slice(StrandOwner& owner) STITCH_EXCLUDES(mutex_);
  enum class Next : std::uint8_t { go_on, leave, stop };
  [[nodiscard]] Next take_inbox(bool leave_if_empty) STITCH_EXCLUDES(mutex_);
  void take_arrivals();
  void publish_streams();
  void fail(StrandOwner& owner, Error error) STITCH_EXCLUDES(mutex_);
  void run(std::uint32_t node, StrandOwner& owner);
  void put(std::uint32_t node, std::uint32_t input, at::Tensor gradient);
  void arrive(const Plan::Target& target, Reach reach);
  void note_reach(const Plan::Target& target, Reach reach);
  [[nodiscard]] Positions unreached_inputs(std::uint32_t recv) const;
  void drop_everything();

  // Constant after construction.
  const std::shared_ptr<const Plan> plan_;
  const RunFlags flags_;
  const std::shared_ptr<GradientStore> store_;
  const Executor executor_;
  const std::weak_ptr<StrandOwner> owner_;
  at::ThreadLocalState thread_state_;

  // Touched only by the slice that runs (or before start()).
  std::vector<State> states_;
  std::vector<variable_list> slots_;
  DeviceInputs on_devices_;  // of slots_
  std::priority_queue<Ready> ready_;
  std::vector<std::uint32_t> not_live_;  // nodes whose edges are to be followed
  // Of recv nodes with several inputs: the live ones. Of send nodes: the unreached ones.
  std::unordered_map<std::uint32_t, Positions> reached_inputs_;
  std::unordered_map<std::uint32_t, Positions> unreached_tensors_;
  std::vector<c10::Stream> used_streams_;  // by nodes, since the strand was last quiet
  std::vector<Arrival> taken_now_;
  DeliveryCheck check_;
  std::uint32_t unresolved_ = 0;
  std::uint64_t taken_ = 0;

  std::atomic<std::uint64_t> nodes_run_{0};
  std::atomic<int> thread_{0};

  std::atomic<bool> news_{false};  // something is in the inbox, or stop() was called

  base::Mutex mutex_;
  std::vector<Arrival> inbox_ STITCH_GUARDED_BY(mutex_);
  bool started_ STITCH_GUARDED_BY(mutex_) = false;
  bool scheduled_ STITCH_GUARDED_BY(mutex_) = false;
  bool stop_ STITCH_GUARDED_BY(mutex_) = false;
  bool resumed_ STITCH_GUARDED_BY(mutex_) = false;  // since the inbox was last taken
  bool ended_ STITCH_GUARDED_BY(mutex_) = false;
};

}  // namespace stitch::dist_autograd
