#pragma once

#include <ATen/ThreadLocalState.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"
#include "stitch/dist_autograd/executor/node_run.h"
#include "stitch/dist_autograd/executor/node_table.h"
#include "stitch/dist_autograd/executor/plan.h"
#include "stitch/dist_autograd/graph/gradient_store.h"
#include "stitch/dist_autograd/graph/positions.h"
#include "stitch/rpc/future/runtime.h"

namespace stitch::dist_autograd {

// Runs a task later, on a thread of its choice for nodes of that device, exactly once, also if its
// owner is gone by then.
using Executor = std::function<void(c10::Device, base::UniqueFunction<void()>)>;

// The pass a strand works for. Called by its slices, and under their state of libtorch: one call at
// a time, never under a lock.
class StrandOwner {
 public:
  virtual ~StrandOwner() = default;
  // A node is about to run: what should not wait for it is to be sent now. False: no node begins
  // until Strand::resume(), which may be called before this returns. Not asked for a node that
  // becomes ready while another slice calls the owner.
  [[nodiscard]] virtual bool before_node() { return true; }
  // A recv node has its complete gradients, some of them perhaps undefined; `unreached`: those of
  // tensors that the roots do not depend on, perhaps all. If this throws, the node has failed.
  virtual void gradients_ready(RecvNode& node, variable_list gradients,
                               const Positions& unreached) = 0;
  // Nothing is ready to run on a device, while others have something, and gradients_ready() has
  // been called since the last of these calls: send what waits.
  virtual void partly_quiet() {}
  // Nothing runs or is ready to run, and `taken` deliveries and kills have been processed so far.
  // `resolved`: every node of the plan has run or is known to be dead, so nothing will ever run
  // again. May be called more than once.
  virtual void went_quiet(std::uint64_t taken, bool resolved) = 0;
  // A node threw: no other one begins. Called at most once; stopped() follows.
  virtual void failed(Error error) = 0;
  // The worker that is current in nodes and hooks; null: none is.
  [[nodiscard]] virtual std::shared_ptr<rpc::Runtime> worker() noexcept { return nullptr; }
  // Who gets the warnings of libtorch that nodes raise; null for the process's own handler. Lives
  // as long as this.
  virtual c10::WarningHandler* warning_handler() noexcept { return nullptr; }
  // After stop() or failed(): no node is running, all pending gradients have been dropped. Called
  // once.
  virtual void stopped() = 0;
};

// Runs the nodes of one pass on one worker, each once and only when its inputs are complete: those
// of the CPU one at a time, and so those of each device. Nodes of several devices run side by side,
// each device's in slices that the Executor runs for it, so what takes long on the CPU does not
// delay what is launched on a device. Thread contract: deliver(), kill() and stop() from any
// thread; seed() before start(). Held by its pass and by its slices, which keep the pass alive
// while they run. Its lock is held for moments only: not while a node runs, gradients are added or
// end, or the owner is called.
class Strand : public std::enable_shared_from_this<Strand> {
 public:
  Strand(std::shared_ptr<const Plan> plan, RunFlags flags, std::shared_ptr<GradientStore> store,
         Executor executor, std::weak_ptr<StrandOwner> owner, at::ThreadLocalState state = {});
  ~Strand();

  // The gradient of root number `root` of the plan. REQUIRES: before start().
  void seed(std::size_t root, at::Tensor gradient) STITCH_EXCLUDES(mutex_);
  // Lets nodes run. Deliveries that came earlier wait for it. A second call does nothing.
  void start() STITCH_EXCLUDES(mutex_);
  // The gradients of send nodes have arrived: element i of `gradients` is for nodes[i], and the
  // inputs in element i of `unreached`, where there is one, are unreached. REQUIRES: once per node,
  // or kill(node), not both.
  void deliver(const std::vector<std::uint32_t>& nodes, std::vector<variable_list> gradients,
               std::vector<Positions> unreached = {}) STITCH_EXCLUDES(mutex_);
  // No gradient will come for these send nodes.
  void kill(std::vector<std::uint32_t> nodes) STITCH_EXCLUDES(mutex_);
  // Asks StrandOwner::before_node() again.
  void resume() STITCH_EXCLUDES(mutex_);
  // Ends the pass here: running nodes finish, no other starts. Before start() it takes effect with
  // start().
  void stop() STITCH_EXCLUDES(mutex_);

  [[nodiscard]] std::uint64_t nodes_run() const noexcept {
    return nodes_run_.load(std::memory_order_relaxed);
  }
  // A thread that runs a node now (base::this_thread_id()), 0 for none.
  [[nodiscard]] int thread() const noexcept { return thread_.load(std::memory_order_relaxed); }
  // True inside a node, hook or callback of this strand.
  [[nodiscard]] bool running_on_this_thread() const noexcept;

 private:
  struct Arrival {
    std::uint32_t node;
    Reach reach;
    variable_list gradients{};
    Positions unreached{};
  };
  // The slices of one device: one at a time.
  struct Slices {
    bool scheduled = false;  // one is waiting for its thread, or has begun
    bool begun = false;
    bool in_node = false;  // it runs a node, or adds what has come
    int thread = 0;        // that runs a node
  };
  // Gradients of a recv node that has run.
  struct Leaving {
    std::uint32_t node;
    variable_list gradients;
    Positions unreached;
  };
  struct Failure {
    Error error;
    std::uint32_t node;  // that has failed, or Plan::kNone
  };

  void post(std::vector<Arrival> arrivals) STITCH_EXCLUDES(mutex_);
  // For which device a slice is to take an arrival for a node of `device`; nothing where one looks
  // for it anyway.
  [[nodiscard]] std::optional<std::size_t> device_to_wake(std::size_t device) const
      STITCH_REQUIRES(mutex_);
  [[nodiscard]] bool any_scheduled() const STITCH_REQUIRES(mutex_);
  // Schedules a slice of each device that has something ready, or one if there is none at all.
  void schedule_ready() STITCH_EXCLUDES(mutex_);
  // REQUIRES: scheduled, which the caller has set.
  void schedule(std::size_t device) noexcept STITCH_EXCLUDES(mutex_);
  void run_slice(StrandOwner& owner, std::size_t device) noexcept STITCH_EXCLUDES(mutex_);
  // `room` is used for it, and empty before and after.
  void take_arrivals(std::size_t device, std::vector<Arrival>& room) STITCH_REQUIRES(mutex_);
  // Runs what is ready on other devices, which have no slice. True if the lock was released.
  bool wake_others(std::size_t device) STITCH_REQUIRES(mutex_);
  void run_next(std::size_t device, StrandOwner& owner) STITCH_REQUIRES(mutex_);
  // Calls the owner as long as there is something to tell. Does nothing where another slice does:
  // that one looks again after each call.
  void notify(StrandOwner& owner) STITCH_REQUIRES(mutex_);
  [[nodiscard]] bool notify_next(StrandOwner& owner) STITCH_REQUIRES(mutex_);
  void notify_failure(StrandOwner& owner) STITCH_REQUIRES(mutex_);
  void notify_stopped(StrandOwner& owner) STITCH_REQUIRES(mutex_);
  void notify_gradients(StrandOwner& owner) STITCH_REQUIRES(mutex_);
  void notify_quiet(StrandOwner& owner) STITCH_REQUIRES(mutex_);
  // Asks before_node(), unless another slice calls the owner.
  void ask_before_node(StrandOwner& owner) STITCH_REQUIRES(mutex_);
  // Has what waits sent, where nothing is ready on a device: here, or by the slice that calls the
  // owner now. True if the lock was released.
  bool tell_partly_quiet(StrandOwner& owner) STITCH_REQUIRES(mutex_);
  // Calls without the lock. What is thrown fails the pass; `node` is what it is about by then.
  template <class Call>
  void unlocked(Call&& call, const std::uint32_t& node = Plan::kNone) STITCH_REQUIRES(mutex_);
  // Of a thread that runs a node.
  void note_thread() STITCH_REQUIRES(mutex_);
  void run(std::uint32_t index) STITCH_REQUIRES(mutex_);
  // Runs the node, adds its gradients to the inputs of the next ones and returns the rest: those of
  // a recv node.
  [[nodiscard]] variable_list run_alone(std::uint32_t index, NodeTable::Inputs inputs, bool live)
      STITCH_EXCLUDES(mutex_);
  // Counts what run_alone() has added as delivered.
  void has_run(std::uint32_t index, variable_list gradients) STITCH_REQUIRES(mutex_);
  void note_streams(const std::vector<c10::Stream>& streams) STITCH_REQUIRES(mutex_);
  void fail(Error error, std::uint32_t node) STITCH_REQUIRES(mutex_);

  // Constant after construction.
  const std::shared_ptr<const Plan> plan_;
  const RunFlags flags_;
  const std::shared_ptr<GradientStore> store_;
  const Executor executor_;
  const std::weak_ptr<StrandOwner> owner_;
  at::ThreadLocalState thread_state_;

  std::atomic<std::uint64_t> nodes_run_{0};
  std::atomic<int> thread_{0};

  base::Mutex mutex_;
  NodeTable nodes_;                                       // all but NodeTable::put() under mutex_
  std::vector<Slices> slices_ STITCH_GUARDED_BY(mutex_);  // by device
  std::vector<Arrival> inbox_ STITCH_GUARDED_BY(mutex_);
  std::vector<Leaving> leaving_ STITCH_GUARDED_BY(mutex_);
  std::vector<Leaving> telling_;  // of the slice that calls the owner
  std::vector<c10::Stream> used_streams_ STITCH_GUARDED_BY(mutex_);  // since it was last quiet
  std::optional<Failure> failure_ STITCH_GUARDED_BY(mutex_);         // to be told
  std::uint64_t taken_ STITCH_GUARDED_BY(mutex_) = 0;
  int running_ STITCH_GUARDED_BY(mutex_) = 0;  // slices that run a node, or add what has come
  bool owner_called_ STITCH_GUARDED_BY(mutex_) = false;    // by a slice, now
  bool gave_gradients_ STITCH_GUARDED_BY(mutex_) = false;  // to the owner, ever
  bool unsent_ STITCH_GUARDED_BY(mutex_) = false;          // since it was last told to send
  bool send_wanted_ STITCH_GUARDED_BY(mutex_) = false;     // by a slice that found it called
  bool news_ STITCH_GUARDED_BY(mutex_) = false;            // since the owner was told of quiet
  bool held_ STITCH_GUARDED_BY(mutex_) = false;            // until resume()
  bool resumed_ STITCH_GUARDED_BY(mutex_) = false;         // since before_node() was asked
  bool started_ STITCH_GUARDED_BY(mutex_) = false;
  bool stop_ STITCH_GUARDED_BY(mutex_) = false;
  bool failed_ STITCH_GUARDED_BY(mutex_) = false;
  bool ended_ STITCH_GUARDED_BY(mutex_) = false;
};

}  // namespace stitch::dist_autograd
