#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "stitch/dist_autograd/pass_protocol.h"

namespace stitch::dist_autograd::testing {

// One backward pass over several workers: real PassProtocol objects, an imagined graph and an
// imagined strand per worker, and a network that delivers every message once, in any order. Effects
// are performed some time after they were decided, as on other threads. Workers die, connections
// between live workers break, nodes throw and the root gives up at random points. Workers learn of
// a loss at different times, and what a lost worker sent may arrive before that, after it, or
// never. Everything follows from the seed. The first broken promise is kept in failure(); empty
// means that all held.
class PassSimulation {
 public:
  struct Options {
    std::size_t workers = 4;
    std::size_t nodes = 20;
    PassMode mode = PassMode::exact;
    bool all_used = false;  // every link leads from a root
    int deaths = 0;
    int cuts = 0;              // connections between two live workers that break
    bool node_throws = false;  // one of the nodes that run
    bool root_aborts = false;  // at a random point: cancelled, or timed out
    double self_links = 0.0;   // how many links lead to the worker itself
    bool liar = false;         // one of the other workers names, as taking part, some that do not
  };
  PassSimulation(std::uint64_t seed, Options options);
  ~PassSimulation();

  // Runs until nothing more happens, then looks at what is left.
  void run();
  [[nodiscard]] const std::string& failure() const { return failure_; }
  // What the run has exercised.
  [[nodiscard]] bool succeeded() const { return succeeded_; }
  [[nodiscard]] bool marked() const { return marked_; }
  [[nodiscard]] std::uint64_t gradients_sent() const { return gradients_sent_; }

 private:
  struct Graph;
  enum class NodeKind { plain, send, recv };
  struct Node {
    std::size_t worker = 0;
    NodeKind kind = NodeKind::plain;
    std::vector<std::size_t> edges;  // to earlier nodes of the same worker
    std::size_t pair = 0;            // recv: its send, whose number is also that of the link
    std::size_t receiver = 0;        // send
    bool used = false;               // a root leads to it
    std::size_t live_inputs = 0;     // of those, edges from used nodes, and the link
  };
  enum class Kind { mark, ack, quiet, close_marking, gradients, done, abort };
  struct Message {
    Kind kind = Kind::mark;
    std::size_t from = 0, to = 0;
    wire::Mark mark;
    wire::Ack ack;  // with gradients: what rides on them
    wire::Done done;
    std::vector<std::uint32_t> sends;
  };
  struct Task {  // effects that are decided but not performed
    std::size_t worker = 0;
    std::size_t from = 0;  // of the message that caused them
    PassEffects effects;
    std::vector<std::uint32_t> deliveries;
  };
  struct NodeState {
    std::size_t pending = 0, live_inputs = 0;
    bool planned = false, live = false, resolved = false, ran = false, received = false;
  };
  struct Worker {
    bool alive = true;
    bool context_failed = false;
    bool participant = false;  // the root, or it got a MARK or GRADIENTS
    bool said_done = false, failed = false;
    bool unreadable = false;                 // its context has failed without telling others
    std::unique_ptr<PassProtocol> protocol;  // once the pass is open here
    bool removed = false;                    // the pass has been taken out of its context
    // The strand.
    std::vector<std::pair<std::size_t, bool>> inbox;
    std::vector<std::size_t> ready;
    std::uint64_t taken = 0;
    std::size_t unresolved = 0;
    bool scheduled = false, stop = false;
    std::map<std::size_t, std::vector<std::uint32_t>> outbox;
  };

  void make_graph();
  void open(std::size_t at);
  void start();
  void begin();
  bool step();
  void deliver(std::size_t index);
  void handle(const Message& message);
  template <class Event>
  void apply(std::size_t at, std::size_t from, std::vector<std::uint32_t> deliveries, Event event);
  void perform(Task task);
  void check_mark(std::size_t at, const wire::Mark& mark);
  void check_settled();
  void say_done(std::size_t at, const wire::Done& done);
  void done_not_sent(std::size_t at);
  void finish(std::size_t at, bool well);
  void send(Message message);
  void written(std::size_t index);
  void lie(wire::Ack& ack);

  void post(std::size_t at, std::size_t node, bool live);
  void run_strand(std::size_t at);
  void run_node(std::size_t at, std::size_t node);
  void flush(std::size_t at, std::optional<std::uint64_t> quiet_at = std::nullopt);
  void arrive(std::size_t node, bool live);

  void abort(std::size_t at);
  void tell_abort(std::size_t at);
  void kill(std::size_t victim);
  void cut(std::size_t one, std::size_t other);
  void lose(std::size_t at, std::size_t peer);
  void check_lost(std::size_t at, std::size_t peer);
  void check_rest();
  [[nodiscard]] bool takes_part(std::size_t worker) const;
  [[nodiscard]] bool ran_partly(std::size_t worker) const;
  [[nodiscard]] bool gives_out_partial_sums(std::size_t worker) const;

  [[nodiscard]] WorkerInfo info(std::size_t worker) const {
    return {"w" + std::to_string(worker), WorkerId(static_cast<std::uint32_t>(worker)), 1};
  }
  [[nodiscard]] std::string name(std::size_t worker) const {
    return "worker " + std::to_string(worker);
  }
  void fail(const std::string& what) {
    if (failure_.empty()) failure_ = what;
  }
  std::size_t pick(std::size_t count) {
    return std::uniform_int_distribution<std::size_t>(0, count - 1)(random_);
  }
  bool chance(double p) { return std::bernoulli_distribution(p)(random_); }

  const Options options_;
  std::mt19937_64 random_;
  std::vector<Node> nodes_;
  std::vector<NodeState> states_;
  std::size_t root_ = 0;
  std::vector<std::size_t> roots_;
  std::vector<Worker> workers_;
  std::vector<Message> messages_;
  std::vector<Task> tasks_;
  std::vector<std::pair<std::size_t, std::size_t>> writes_;  // GRADIENTS: from, to
  std::set<std::pair<std::size_t, std::size_t>> lost_;       // (who, whom)
  std::vector<std::pair<std::size_t, std::size_t>> losses_;  // the same, to come
  std::set<std::pair<std::size_t, std::size_t>> cuts_;       // both ways
  std::size_t deaths_left_ = 0, cuts_left_ = 0, steps_ = 0, next_fault_ = 0;
  std::size_t throwing_node_ = 0;
  std::size_t liar_ = 0;  // no worker if it is the root
  bool lied_ = false;
  bool begin_pending_ = false;
  bool faulty_ = false;  // something has gone wrong that the pass has to fail for, or may
  bool succeeded_ = false;
  bool marked_ = false;  // a MARK was sent
  bool settled_ = false;
  std::uint64_t gradients_sent_ = 0;
  std::string failure_;
};

}  // namespace stitch::dist_autograd::testing
