#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "stitch/rpc/agent/shutdown_protocol.h"
#include "tests/rpc/shutdown_simulation.h"

namespace stitch::rpc::test {

using Protocol = ShutdownProtocol;
using Step = Protocol::Step;
using Time = Protocol::Time;
using Duration = Protocol::Clock::duration;
using std::chrono::microseconds;
using std::chrono::milliseconds;

// How late a worker's own thread may run.
inline constexpr milliseconds kSlack{40};
// What has happened so long ago, every worker has learned of.
inline constexpr milliseconds kKnownAfter{400};
inline constexpr milliseconds kLongestDelay{30};
inline constexpr milliseconds kSlowDelay{150};  // so that POLL is repeated

// Its name, whichever life it is.
inline WorkerInfo worker_named(WorkerId id) { return {"w" + std::to_string(id.value()), id, 1}; }

// What a message of the application starts.
struct Work {
  enum class Kind : std::uint8_t { notify, call, reply } kind = Kind::notify;
  int depth = 0;           // how many more messages it may cause, one after the other
  std::uint64_t call = 0;  // of a call and a reply
  unsigned excepted = 0;   // bit n: leader n need not have known of it, see rule 1
};

// Workers are known by their ids, slots here; each node is one life of a worker. A former life has
// died before the next one begins.
class ShutdownSimulation::World {
 public:
  World(std::uint64_t seed, Wrong wrong);
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  std::string run();
  [[nodiscard]] const Counts& counts() const { return counts_; }

 private:
  static constexpr std::size_t kMaxNodes = 9;
  struct Event {
    Time at;
    std::uint64_t number;
    std::function<void()> action;
    bool operator<(const Event& other) const {
      return std::pair(at, number) > std::pair(other.at, other.number);
    }
  };
  struct Handler {
    Work work;
    std::size_t caller = 0;
    int steps = 0;    // messages that it will send
    int waiting = 0;  // for answers
    bool hangs = false;
  };
  struct Call {
    std::size_t to = 0;
    std::uint64_t handler = 0;  // 0: the program made it
    unsigned excepted = 0;
  };
  using Lives = std::vector<std::size_t>;  // the present one in each slot
  struct Node {
    std::size_t slot = 0;
    std::uint64_t epoch = 1;
    std::optional<Protocol> protocol;
    std::optional<Time> begin;
    Time deadline{};
    bool dead = false;
    bool ended = false;
    bool go_received = false;
    bool closing = false;                     // what is lost is not said any more
    Lives known;                              // as this one knows them
    std::map<std::size_t, Time> known_since;  // lives that have come back
    std::set<std::size_t> learning;           // lives that have come back
    std::set<std::size_t> lost;
    std::map<std::size_t, Time> lost_at;
    std::set<std::size_t> loss_told;  // to the protocol
    std::uint64_t sent = 0;
    std::uint64_t received = 0;
    std::uint64_t served = 0;
    std::map<std::uint64_t, Call> calls;
    std::map<std::uint64_t, Handler> handlers;
    std::uint64_t events = 0;  // as GracefulShutdown counts them
    bool waits = false;
    std::uint64_t wakes = 0;
    // As a leader.
    std::set<std::size_t> polled;
    std::set<std::size_t> told;
    bool heard_of_loss = false;
    std::uint64_t last_round = 0;
  };
  struct Link {  // from one life to another
    Duration delay{};
    std::array<Time, 2> last{};  // arrival, of small messages and large ones
    std::optional<Time> passes_until;
    bool noticing = false;  // that it is over
  };
  struct Packet {
    std::size_t from = 0;
    std::size_t to = 0;
    Work work;
  };

  // ---- chance and time
  int below(int bound) { return static_cast<int>(random_() % static_cast<std::uint64_t>(bound)); }
  bool one_in(int n) { return below(n) == 0; }
  microseconds up_to(Duration longest) {
    return microseconds(
        below(static_cast<int>(std::chrono::duration_cast<microseconds>(longest).count()) + 1));
  }
  // Short ones are as likely as long ones.
  microseconds of_any_size(microseconds shortest, Duration longest);
  void at(Time time, std::function<void()> action) {
    events_.push({time, ++event_number_, std::move(action)});
  }
  void after(Duration delay, std::function<void()> action) { at(now_ + delay, std::move(action)); }
  // The next thing that a thread does; another may come in between.
  void next(std::function<void()> action) {
    if (one_in(2)) return action();
    after(up_to(one_in(16) ? microseconds(5000) : microseconds(200)), std::move(action));
  }
  void fail(const std::string& what);
  [[nodiscard]] bool running(std::size_t at) const { return !nodes_[at].dead && !nodes_[at].ended; }
  [[nodiscard]] Link& link(std::size_t from, std::size_t to) {
    return links_[from * kMaxNodes + to];
  }
  [[nodiscard]] WorkerId id_of(std::size_t node) const {
    return WorkerId(static_cast<std::uint32_t>(nodes_[node].slot));
  }
  [[nodiscard]] WorkerInfo info_of(std::size_t node) const {
    WorkerInfo info = worker_named(id_of(node));
    info.epoch = nodes_[node].epoch;
    return info;
  }
  // "w1", "w1 epoch 2".
  [[nodiscard]] std::string name_of(std::size_t node) const;
  // The last life in a slot.
  [[nodiscard]] std::size_t present(std::size_t slot) const;
  std::size_t any_slot() { return static_cast<std::size_t>(below(static_cast<int>(slots_))); }

  void set_up();
  std::size_t add_node(std::size_t slot);
  void will_begin(std::size_t node, Time when);
  void will_work(std::size_t node, Time from);

  // ---- connections, lives
  void carry(std::size_t from, std::size_t to, bool large, std::function<void()> arrive);
  void end_link(std::size_t from, std::size_t to, bool silently);
  void notice(std::size_t at_node, std::size_t peer);
  void die(std::size_t at_node, bool returns);
  void cut(std::size_t a, std::size_t b);
  void come_back(std::size_t slot);
  void learn(std::size_t at_node, std::size_t joiner);
  void start_when_known(std::size_t joiner);

  // ---- the application
  void send_work(std::size_t from, Handler* handler, int depth, std::uint64_t handler_id = 0);
  void transmit(std::size_t from, std::size_t to, Work work);
  void arrive(std::uint64_t number);
  void handle_on(std::size_t at_node, std::uint64_t id);
  void answered(std::size_t at_node, std::uint64_t id);

  // ---- what GracefulShutdown does
  void begin(std::size_t at_node);
  void loop(std::size_t at_node);
  void wait(std::size_t at_node, std::uint64_t seen);
  void wake(std::size_t at_node);
  void read_status(std::size_t at_node, std::function<void(const Protocol::Status&)> then);
  // `lives`: those to which the sends are.
  void carry_out(std::size_t at_node, const Protocol::Effects& effects, const Lives& lives);
  void send(std::size_t from, std::size_t to, const Protocol::Message& said);
  void receive(std::size_t from, std::size_t to, const Protocol::Message& said);
  void end(std::size_t at_node);

  // ---- the rules
  void begins_round(std::size_t leader, const Protocol::Effects& effects, const Lives& lives);
  void said_go(std::size_t leader, const Protocol::Effects& effects, const Lives& lives);
  void check_end_of(std::size_t at_node);
  void check_error(std::size_t at_node, const std::string& text);
  [[nodiscard]] bool over() const;
  void check_end();

  std::mt19937_64 random_;
  const Wrong wrong_;
  std::string failure_;
  Counts counts_;
  Time now_{};
  std::priority_queue<Event> events_;
  std::uint64_t event_number_ = 0;
  std::uint64_t last_id_ = 0;
  std::size_t slots_ = 0;
  std::vector<Node> nodes_;
  std::array<Link, kMaxNodes * kMaxNodes> links_;
  std::map<std::uint64_t, Packet> packets_;  // on their way
  bool flaky_ = false;                       // messages of the shutdown may fail to be sent
  bool all_in_time_ = false;                 // all live ones call shutdown, and nothing hangs
  bool short_limits_ = false;
  bool hanging_limits_ = false;
  bool some_only_ = false;
  int hangs_left_ = 0;
  std::optional<std::size_t> hanging_;
  Time hanging_since_{};
};

}  // namespace stitch::rpc::test
