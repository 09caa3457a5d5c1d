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
// reorders, duplicates and loses ledger frames and delays and reorders calls. Deterministic for a
// seed. failure() is the first violation; empty if there is none.
class LifetimeSimulation {
 public:
  struct Options {
    std::size_t workers = 4;
    std::size_t objects = 3;
    int steps = 400;
    bool kill_one = false;  // one worker dies half-way; others are told at different times
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
  void tell_of_death();
  void come_to_rest();
  void check_rest();

  void perform(std::size_t worker, Effects effects);
  void on_destroyed(Object& object);
  [[nodiscard]] bool in_use(const RRefId& id, std::string& where) const;
  void fail(const std::string& what);
  std::size_t pick(std::size_t count) {
    return std::uniform_int_distribution<std::size_t>(0, count - 1)(random_);
  }
  bool chance(double p) { return std::bernoulli_distribution(p)(random_); }
  [[nodiscard]] bool alive(std::size_t worker) const { return lives_[worker] != nullptr; }
  [[nodiscard]] WorkerLife life(std::size_t worker) const {
    return {static_cast<std::uint32_t>(worker), 1 + worker};
  }
  // Messages from a worker that this one knows to be dead are not accepted.
  [[nodiscard]] bool cut(std::size_t from, std::size_t at) const {
    return heard_.contains({at, from});
  }

  Options options_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Lifetime>> lives_;
  std::vector<std::vector<RRefId>> handles_;  // per worker
  std::vector<Message> messages_;
  std::vector<Task> tasks_;
  std::vector<Frame> frames_;
  std::vector<std::unique_ptr<Object>> objects_;
  std::map<RRefId, Object*> object_of_;
  std::set<std::pair<std::size_t, std::size_t>> heard_;  // (worker, dead worker it knows of)
  std::vector<std::size_t> dead_;
  std::vector<int> waiting_;  // per worker: waiters not yet called
  std::string failure_;
};

}  // namespace stitch::rref::test
