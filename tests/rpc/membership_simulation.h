#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "stitch/rpc/membership/membership_protocol.h"

namespace stitch::rpc::testing {

// A history of one world: real MembershipProtocol objects over a simulated network and clock, with
// faults at random times. Deterministic for a seed. failure() is the first violation; empty if
// there is none.
class MembershipSimulation {
 public:
  struct Options {
    int workers = 4;
    int deaths = 0;       // processes that are killed
    int restarts = 0;     // of those
    int stops = 0;        // processes that do not run for a while, long enough to be noticed
    int short_stops = 0;  // the same, too short for that
    int pauses = 0;       // the same, long enough for that, but over before it is declared dead
    int partitions = 0;   // a part of the workers cannot reach the others for a while
    int cuts = 0;         // one connection ends
    int blocks = 0;  // two workers, neither of them the first, cannot reach each other any more
    int joins = 0;
    int leaves = 0;
    int together = 0;    // so many leave at about the same time
    int duplicates = 0;  // a second worker starts under the name of a live one
    int isolations =
        0;            // one worker is cut off from all others for a while, as by its network card
    int returns = 0;  // the worker that decides dies and comes back; two others lose each other
    int freezes = 0;  // processes that stop and never go on
    // Processes that are killed, or stop and never go on, before they can have connected to others:
    // right after the start, or after they have joined.
    int early = 0;
    int quiet = 0;     // not 0: no worker calls another
    int slow = 0;      // pairs of workers whose first connection takes long
    int failing = 0;   // pairs of workers whose first connection fails for a while
    int strained = 0;  // pairs where that takes long, and probes of the one by the other, too
  };
  MembershipSimulation(std::uint64_t seed, Options options);
  ~MembershipSimulation();

  void run();
  [[nodiscard]] const std::string& failure() const { return failure_; }
  // How often each thing has happened, for tests that want to know that it did.
  struct Counts {
    int verdicts = 0, fenced = 0, welcomed = 0, left = 0, refused = 0;
  };
  [[nodiscard]] const Counts& counts() const { return counts_; }

 private:
  using Time = MembershipProtocol::Time;
  using Effects = MembershipProtocol::Effects;
  using Ms = std::chrono::milliseconds;
  struct Node;
  struct Frame {
    enum class Kind { work, heartbeat, notice } kind = Kind::work;
    Notice notice{};
    std::uint64_t digest = 0;
  };
  struct Link;  // between two lives

  void at(Time when, std::function<void()> event);
  void advance_to(Time end);
  [[nodiscard]] Ms delay() { return Ms(pick(20) == 0 ? pick(200) : pick(10)); }
  [[nodiscard]] int pick(int count) {
    return std::uniform_int_distribution<int>(0, count - 1)(random_);
  }
  [[nodiscard]] Time later(int milliseconds) { return now_ + Ms(pick(milliseconds)); }

  Node& add_node(std::uint32_t id, std::uint64_t epoch, bool member);
  [[nodiscard]] Node* node_of(const WorkerInfo& info);
  [[nodiscard]] Node* random_running();
  [[nodiscard]] bool reaches(const Node& a, const Node& b) const;
  [[nodiscard]] Link& link(const Node& a, const Node& b);
  void schedule_tick(Node& node);
  void tick(Node& node);
  void schedule_work(Node& node);
  void send(Node& from, Node& to, Frame frame);
  void connect(Node& from, Node& to);
  void give_up(Node& from, Node& to, const std::string& why, Ms after);
  void deliver(Node& from, Node& to);
  void handle(Node& from, Node& to, const Frame& frame);
  void lose(Node& at, Node& other, const std::string& why, bool tell);
  void end_link(Node& a, Node& b, const std::string& why);
  void perform(Node& node, Effects effects);
  void probe(Node& node, Node& about, Ms limit);
  void wait_for_answer(Node& node, Node& about, Ms left, Time deadline);
  void report(Node& node, Node& about, Ms after, std::optional<bool> answered, Time deadline);
  [[nodiscard]] std::vector<MembershipProtocol::Link> links_of(Node& node);
  void end_process(Node& node);
  void ask_to_join(Node& joiner, std::size_t first);
  void inject();
  void kill(bool restart);
  void stop(int milliseconds);
  void stop(Node& victim, int milliseconds);
  void freeze(Node& victim);
  void fail_early(Node& victim);
  void pause();
  void partition();
  void isolate();
  void replace_judge();
  void check_verdict(const Node& at, const MembershipProtocol::Event& event, const Node& subject);
  void check_welcome(const Node& sponsor, const Notice& welcome);
  void check_noticed(const Node& victim);
  void check_noticed_by(Time deadline, const Node& victim, bool again);
  void check_rest();
  [[nodiscard]] static bool alive_at(const Node& node, const WorkerInfo& info);
  [[nodiscard]] bool decides(const Node& node);
  void fail(const std::string& what);

  const Options options_;
  std::mt19937_64 random_;
  Time now_{};
  std::uint64_t order_ = 0;
  struct Event {
    Time when;
    std::uint64_t order;
    std::function<void()> run;
    friend bool operator<(const Event& a, const Event& b) {
      return std::tie(a.when, a.order) > std::tie(b.when, b.order);
    }
  };
  std::priority_queue<Event> events_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::map<std::pair<std::size_t, std::size_t>, std::unique_ptr<Link>> links_;
  std::set<std::pair<std::size_t, std::size_t>> blocked_;
  std::map<std::pair<std::size_t, std::size_t>, Ms> slow_;  // how long a first connection takes
  std::map<std::pair<std::size_t, std::size_t>, Time> failing_;  // until when one fails
  // How long a probe of the second by the first takes.
  std::map<std::pair<std::size_t, std::size_t>, Ms> strained_;
  std::set<std::size_t> apart_;  // one side of a partition
  std::set<std::pair<std::uint32_t, std::uint64_t>> declared_;
  bool as_judge_ = false;  // the worker that is told of a probe decides
  // The lives whose judge had no connection to them any more when it declared them dead.
  std::set<std::pair<std::uint32_t, std::uint64_t>> out_of_touch_;
  std::set<std::pair<std::uint32_t, std::uint64_t>> at_fault_;  // were paused or isolated
  std::uint32_t next_id_ = 0;
  int early_joins_ = 0;  // of the next workers to join, so many fail early
  bool calm_ = false;    // no faults any more
  Counts counts_;
  std::string failure_;
};

}  // namespace stitch::rpc::testing
