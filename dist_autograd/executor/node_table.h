#pragma once

#include <cstdint>
#include <memory>
#include <queue>
#include <unordered_map>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/dist_autograd/executor/delivery_check.h"
#include "stitch/dist_autograd/executor/node_streams.h"
#include "stitch/dist_autograd/executor/plan.h"
#include "stitch/dist_autograd/graph/positions.h"

namespace stitch::dist_autograd {

// What came to a node: live (the roots depend on it that way: a gradient, perhaps undefined),
// unreached (they do not, but on what came in the same message) or dead (no message will ever come
// that way). A node is what the best of its deliveries is.
enum class Reach : std::uint8_t { dead, unreached, live };

// What one pass knows of the nodes of its plan on this worker: the gradients that wait in their
// inputs, how many deliveries each still waits for, and which are ready, by the device that they
// belong to. A node that is not live does not run, as it would not in one process, and its edges
// are deliveries like those it got; an unreached recv node is ready all the same, to report that,
// since its link waits for a message. Thread contract: put() by several threads at once, each with
// those streams current that made its gradients; all else by one thread at a time. A node that is
// ready has all its gradients, so a delivery is counted after its gradient was put.
class NodeTable {
 public:
  explicit NodeTable(std::shared_ptr<const Plan> plan);

  // Adds a gradient to an input of a node. An undefined one changes nothing. It may take as long as
  // a device whose queue is full; where nodes belong to one device alone, one thread at a time.
  void put(std::uint32_t node, std::uint32_t input, at::Tensor gradient);
  // Root number `root` of the plan has its gradient.
  void reach_root(std::size_t root) { note_reach(plan_->roots()[root], Reach::live); }
  // Makes the roots ready for which nothing else is to come: once, ahead of all deliveries.
  void start_roots();
  // The one message, or kill, for a send node. `unreached`: those of its inputs.
  void on_message(std::uint32_t send, Reach reach, Positions unreached);
  // Counts one delivery to an input of a node, which may make nodes ready.
  void deliver(const Plan::Target& target, Reach reach);

  [[nodiscard]] bool has_ready(std::size_t device) const { return !ready_[device].empty(); }
  [[nodiscard]] bool has_ready() const;
  // Takes out the ready node of that device (Plan::device()) which is to run first. REQUIRES: there
  // is one.
  [[nodiscard]] std::uint32_t take_ready(std::size_t device);
  // Puts back one that was taken, and has not run.
  void make_ready(std::uint32_t node);
  struct Inputs {
    variable_list gradients;         // one for each input
    std::vector<ReadyInput> points;  // of those on devices
  };
  // The inputs of a node that is to run now.
  [[nodiscard]] Inputs take_inputs(std::uint32_t node);
  [[nodiscard]] bool live(std::uint32_t node) const { return states_[node].reach == Reach::live; }
  // The inputs of a recv node that no delivery has reached.
  [[nodiscard]] Positions unreached_inputs(std::uint32_t recv) const;
  // The inputs of a send node that its message did not reach; null for none.
  [[nodiscard]] const Positions* unreached_by_message(std::uint32_t send) const;
  void has_run() { --unresolved_; }
  // Whether each node has run, or is known to be dead.
  [[nodiscard]] bool resolved() const;

  // Everything that waits; no thread puts anything meanwhile. What it refers to may run code of the
  // user as it ends: no lock is to be held then.
  struct Dropped {
    std::vector<variable_list> slots;
    DeviceInputs on_devices;
  };
  [[nodiscard]] Dropped drop();

 private:
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
  using ReadyQueue = std::priority_queue<Ready>;

  void note_reach(const Plan::Target& target, Reach reach);
  void count(const Plan::Target& target, Reach reach);

  const std::shared_ptr<const Plan> plan_;
  // Of the inputs of node i: number i modulo kMutexes. None where nodes belong to one device.
  static constexpr std::size_t kMutexes = 32;
  const std::unique_ptr<base::Mutex[]> inputs_mutexes_;
  std::vector<variable_list> slots_;
  DeviceInputs on_devices_;  // of slots_

  std::vector<State> states_;
  std::vector<ReadyQueue> ready_;        // by device
  std::vector<std::uint32_t> not_live_;  // nodes whose edges are to be followed
  // Of recv nodes with several inputs: the live ones. Of send nodes: the unreached ones.
  std::unordered_map<std::uint32_t, Positions> reached_inputs_;
  std::unordered_map<std::uint32_t, Positions> unreached_tensors_;
  DeliveryCheck check_;
  std::uint32_t unresolved_ = 0;
};

}  // namespace stitch::dist_autograd
