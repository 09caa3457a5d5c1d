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

// Runs a task once, later, on a thread for nodes of that device, also when the strand's owner has
// ended by then.
using Executor = std::function<void(c10::Device, base::UniqueFunction<void()>)>;

// The pass that a strand works for. Slices of the strand call it, under their state of libtorch,
// one call at a time and never under a lock.
class StrandOwner {
 public:
  virtual ~StrandOwner() = default;
  // A node is about to run: the owner sends gradients that should not wait for it. False keeps
  // nodes from beginning until Strand::resume(), which may come before this returns. A node that
  // becomes ready while another slice calls the owner runs without this call.
  [[nodiscard]] virtual bool before_node() { return true; }
  // A recv node has all its gradients, perhaps undefined ones. `unreached`: the positions of
  // tensors that the roots do not depend on. An exception is the failure of the node.
  virtual void gradients_ready(RecvNode& node, variable_list gradients,
                               const Positions& unreached) = 0;
  // A device has no ready node, while other devices have, and gradients_ready() has been called
  // since the last of these calls: the owner sends gradients that wait.
  virtual void partly_quiet() {}
  // No node runs or is ready, and `taken` deliveries and kills have been processed so far.
  // `resolved`: every node of the plan has run or is dead, so no node will run again. May be called
  // more than once.
  virtual void went_quiet(std::uint64_t taken, bool resolved) = 0;
  // A node threw, and no other node begins. Called at most once; stopped() follows.
  virtual void failed(Error error) = 0;
  // The worker that is current in nodes and hooks; null: none is.
  [[nodiscard]] virtual std::shared_ptr<rpc::Runtime> worker() noexcept { return nullptr; }
  // The handler of warnings that nodes raise; null for the process's own. Lives as long as this.
  virtual c10::WarningHandler* warning_handler() noexcept { return nullptr; }
  // After stop() or failed(): no node runs, and pending gradients have been dropped. Called once.
  virtual void stopped() = 0;
};

// Runs the nodes of one pass on one worker, each once, when its inputs are complete. Each device,
// the CPU among them, runs one node at a time, in slices that the Executor runs for it; devices run
// side by side, so a slow node on the CPU does not delay launches on a device. Owned by its pass
// and by its slices, which keep the pass alive while they run. Thread contract: deliver(), kill()
// and stop() from any thread; seed() before start(). The lock is not held while a node runs,
// gradients are added or destroyed, or the owner is called.
class Strand : public std::enable_shared_from_this<Strand> {
 public:
  Strand(std::shared_ptr<const Plan> plan, RunFlags flags, std::shared_ptr<GradientStore> store,
         Executor executor, std::weak_ptr<StrandOwner> owner, at::ThreadLocalState state = {});
  ~Strand();

  // The gradient of root number `root` of the plan. REQUIRES: before start().
  void seed(std::size_t root, at::Tensor gradient) STITCH_EXCLUDES(mutex_);
  // Lets nodes run; earlier deliveries wait for this. A second call does nothing.
  void start() STITCH_EXCLUDES(mutex_);
  // Gradients of send nodes have arrived: element i of `gradients` is for nodes[i], and element i
  // of `unreached`, where there is one, has its unreached inputs. REQUIRES: each node is delivered
  // or killed, once.
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
  // The device whose slice is to take an arrival for a node of `device`; nothing where a running
  // slice will find the arrival.
  [[nodiscard]] std::optional<std::size_t> device_to_wake(std::size_t device) const
      STITCH_REQUIRES(mutex_);
  [[nodiscard]] bool any_scheduled() const STITCH_REQUIRES(mutex_);
  // Schedules a slice of each device with a ready node, or of one device if none has.
  void schedule_ready() STITCH_EXCLUDES(mutex_);
  // REQUIRES: scheduled, which the caller has set.
  void schedule(std::size_t device) noexcept STITCH_EXCLUDES(mutex_);
  void run_slice(StrandOwner& owner, std::size_t device) noexcept STITCH_EXCLUDES(mutex_);
  // Takes the inbox; `room` is a buffer for that, empty before and after.
  void take_arrivals(std::size_t device, std::vector<Arrival>& room) STITCH_REQUIRES(mutex_);
  // Schedules slices of other devices that have a ready node and no slice. True if the lock was
  // released.
  bool wake_others(std::size_t device) STITCH_REQUIRES(mutex_);
  void run_next(std::size_t device, StrandOwner& owner) STITCH_REQUIRES(mutex_);
  // Calls the owner until it knows all news. Does nothing while another slice calls the owner: that
  // slice looks for news after each call.
  void notify(StrandOwner& owner) STITCH_REQUIRES(mutex_);
  [[nodiscard]] bool notify_next(StrandOwner& owner) STITCH_REQUIRES(mutex_);
  void notify_failure(StrandOwner& owner) STITCH_REQUIRES(mutex_);
  void notify_stopped(StrandOwner& owner) STITCH_REQUIRES(mutex_);
  void notify_gradients(StrandOwner& owner) STITCH_REQUIRES(mutex_);
  void notify_quiet(StrandOwner& owner) STITCH_REQUIRES(mutex_);
  // Asks before_node(), unless another slice calls the owner.
  void ask_before_node(StrandOwner& owner) STITCH_REQUIRES(mutex_);
  // Has the owner send waiting gradients when a device has no ready node: here, or by the slice
  // that calls the owner now. True if the lock was released.
  bool tell_partly_quiet(StrandOwner& owner) STITCH_REQUIRES(mutex_);
  // Calls without the lock. An exception fails the pass; the error names `node`.
  template <class Call>
  void unlocked(Call&& call, const std::uint32_t& node = Plan::kNone) STITCH_REQUIRES(mutex_);
  // Publishes the number of a thread that runs a node, for thread().
  void note_thread() STITCH_REQUIRES(mutex_);
  void run(std::uint32_t index) STITCH_REQUIRES(mutex_);
  // Runs the node, adds its gradients to the inputs of the next nodes, and returns the gradients of
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
