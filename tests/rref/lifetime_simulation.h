#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "stitch/rref/lifetime/lifetime.h"

namespace stitch::rref::test {

// A random walk over the lifetime protocol: real Lifetime objects, a simulated network that delays,
// reorders, duplicates and loses ledger frames and delays and reorders calls, workers that die at
// any point, of which others hear at different times, and that come back in a new life. Every life
// of a worker is a worker of its own here, with its own number. Deterministic for a seed. failure()
// is the first violation; empty if there is none.
class LifetimeSimulation {
 public:
  struct Options {
    std::size_t workers = 4;
    std::size_t objects = 3;
    int steps = 400;
    std::size_t deaths = 0;    // at any step, of any life
    std::size_t restarts = 0;  // of workers that have died
    std::size_t chains = 0;    // of workers that lend on what they were lent; some of them die then
    std::size_t cuts = 0;      // pairs of living workers that lose each other for good
    bool late_news = false;    // some hear of a new life after it has begun to call others
  };
  LifetimeSimulation(std::uint64_t seed, Options options);
  ~LifetimeSimulation();

  // Walks, then delivers and drops everything and checks that nothing is left.
  void run();
  [[nodiscard]] const std::string& failure() const { return failure_; }

 private:
  struct Object;
  struct Probe;
  enum class Kind { call, reply, create, created };
  struct Message {
    Kind kind = Kind::call;
    std::size_t from = 0, to = 0;
    std::vector<CarriedRef> carried;
    RRefId creation;
    bool failed = false;
  };
  struct Task {  // a message being processed at message.to
    Message message;
    std::vector<RRefId> handles;
  };
  struct Frame {
    std::size_t from = 0, to = 0;
    base::Bytes bytes;
  };

  void step(bool winding_down);
  void make_object();
  void start_creation();
  void send(std::size_t from, const std::vector<RRefId>& from_handles, Kind kind, std::size_t to);
  void deliver(std::size_t index);
  void work_on(std::size_t index);
  void finish(std::size_t index);
  void deliver_frame(std::size_t index);
  void flush(std::size_t from, std::size_t to);
  void drop_handle(std::size_t worker, std::size_t index);
  void kill(std::size_t victim);
  void restart(std::size_t dead);
  void lend_and_die();
  // All frames between this worker and others arrive, and what they are answered with.
  void talk(std::size_t worker);
  void lose_link(std::size_t a, std::size_t b);
  void tell_of_death();
  void tell_of_a_new_life();
  // The next piece of news of a death: first the loss of the link, then the verdict.
  void tell(std::size_t worker, std::size_t victim);
  void come_to_rest();
  void check_rest();

  void perform(std::size_t worker, Effects effects);
  void on_destroyed(Object& object);
  [[nodiscard]] bool in_use(const RRefId& id, std::string& where) const;
  [[nodiscard]] bool usable(std::size_t worker, const RRefId& id) const;
  void add_life(const WorkerLife& life);
  void fail(const std::string& what);
  std::size_t pick(std::size_t count) {
    return std::uniform_int_distribution<std::size_t>(0, count - 1)(random_);
  }
  bool chance(double p) { return std::bernoulli_distribution(p)(random_); }
  [[nodiscard]] bool alive(std::size_t worker) const { return lives_[worker] != nullptr; }
  [[nodiscard]] const WorkerLife& life(std::size_t worker) const { return names_[worker]; }
  [[nodiscard]] std::size_t lives() const { return lives_.size(); }
  // Messages from a worker that this one has lost are not accepted.
  [[nodiscard]] bool cut(std::size_t from, std::size_t at) const {
    return lost_.contains({at, from});
  }
  [[nodiscard]] bool knows(std::size_t worker, std::size_t other) const {
    return !unheard_.contains({worker, other});
  }
  [[nodiscard]] std::size_t number_of(const WorkerLife& life) const;

  Options options_;
  std::mt19937_64 random_;
  std::vector<WorkerLife> names_;
  std::vector<std::unique_ptr<Lifetime>> lives_;  // null: dead
  std::vector<std::vector<RRefId>> handles_;      // per worker
  std::vector<Message> messages_;
  std::vector<Task> tasks_;
  std::vector<Frame> frames_;
  std::vector<std::unique_ptr<Object>> objects_;
  std::map<RRefId, Object*> object_of_;
  std::set<std::pair<std::size_t, std::size_t>> unheard_;  // (worker, new life it does not know)
  bool unknown_ = false;                                   // there have been such
  std::set<std::pair<std::size_t, std::size_t>> lost_;     // (worker, worker it has lost)
  std::set<std::pair<std::size_t, std::size_t>> heard_;    // (worker, dead worker it knows of)
  // (worker, life that was over and followed by another before it joined): it never hears of it.
  std::set<std::pair<std::size_t, std::size_t>> passed_;
  std::vector<std::size_t> dead_;
  std::set<std::size_t> declared_;  // the dead of whose death some worker has heard
  bool losses_ = false;             // living workers have lost each other
  std::vector<int> waiting_;        // per worker: waiters not yet called
  std::string failure_;
};

}  // namespace stitch::rref::test
