#pragma once

#include <map>
#include <set>
#include <vector>

#include "stitch/rref/lifetime/rref_id.h"

namespace stitch::rref {

// The lives that are over, and the sweeps of an owner: a departed holder may have forwarded its
// references, so the owner keeps their objects until all receivers have registered. A life is swept
// when every other worker has answered CLEAN: it has registered all references that it borrowed
// from that life. Sweeps that run at the same time end together, since a life that is over may have
// borrowed from another one and does not answer (PROTOCOL.md). Pure state of a Lifetime, which
// locks it. Not thread-safe.
class Sweeps {
 public:
  // A life is over. False when this was known.
  bool add(const WorkerLife& over) { return over_.try_emplace(over).second; }
  // Whether that life is over.
  [[nodiscard]] bool over(const WorkerLife& life) const { return over_.contains(life); }

  // `by` waits until the life `over` is swept. True when it is. REQUIRES: `over` is over, or will
  // be.
  bool want(const WorkerLife& over, const WorkerLife& by);
  // Whether some worker waits for that life.
  [[nodiscard]] bool wanted(const WorkerLife& life) const { return wanted_.contains(life); }
  // `by` waits for no life any more.
  void forget(const WorkerLife& by);
  // Whether a later life of that worker is over.
  [[nodiscard]] bool later_over(const WorkerLife& life) const;
  // Whether some worker waits for a life that is over and has not been swept.
  [[nodiscard]] bool wanted() const;
  // Whether a sweep is running.
  [[nodiscard]] bool running() const;

  struct Question {
    WorkerLife to;
    WorkerLife over;
  };
  // Starts the sweep of every life that is over and not swept. Returns the questions to all workers
  // of `live` whose lives are not over.
  [[nodiscard]] std::vector<Question> start(const std::vector<WorkerLife>& live);
  // A worker has joined, and is asked, too: it may have received references from lives that are
  // over.
  [[nodiscard]] std::vector<Question> joined(const WorkerLife& life);
  // The answer of `by` to a question.
  void clean(const WorkerLife& over, const WorkerLife& by);

  struct Swept {
    WorkerLife over;
    std::set<WorkerLife> wanted_by;
  };
  // The lives whose sweeps have ended: those of all running sweeps, or none.
  [[nodiscard]] std::vector<Swept> finish();

  // Lives that are over, in the order of their ids.
  [[nodiscard]] std::vector<WorkerLife> unswept() const;

 private:
  enum class State { waiting, running, swept };
  struct Life {
    State state = State::waiting;
    std::set<WorkerLife> asked;  // without an answer so far
  };
  [[nodiscard]] bool answered(const Life& life) const;

  std::map<WorkerLife, Life> over_;
  std::map<WorkerLife, std::set<WorkerLife>> wanted_;  // waiting workers, by life that is over
};

}  // namespace stitch::rref
