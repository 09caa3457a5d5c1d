#pragma once

#include <map>
#include <set>
#include <vector>

#include "stitch/rref/lifetime/rref_id.h"

namespace stitch::rref {

// The lives of workers that are over, and what an owner has done about those that may have held its
// objects. A life is swept when every other worker that may have borrowed from it has said clean:
// it has registered, with this owner, all that it borrowed there. Sweeps that run at the same time
// end together, since a worker that is over may have borrowed from another one, and need not answer
// (PROTOCOL.md). Pure state, no I/O, not thread-safe: the owner of this locks.
class Sweeps {
 public:
  // That life is over. False if this was known.
  bool add(const WorkerLife& over) { return over_.try_emplace(over).second; }
  // Whether that life is over.
  [[nodiscard]] bool over(const WorkerLife& life) const { return over_.contains(life); }

  // `by` waits until `over` is swept. True if it is. REQUIRES: `over` is over, or will be.
  bool want(const WorkerLife& over, const WorkerLife& by);
  // Whether some worker waits for that life.
  [[nodiscard]] bool wanted(const WorkerLife& life) const { return wanted_.contains(life); }
  // `by` waits for nothing any more.
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
  // Starts the sweep of every life that is over and has not been swept. Asks all of `live` but
  // those that are over.
  [[nodiscard]] std::vector<Question> start(const std::vector<WorkerLife>& live);
  // A worker has joined: it is asked, too, since it may have met those that are over.
  [[nodiscard]] std::vector<Question> joined(const WorkerLife& life);
  // The answer of `by` to a question.
  void clean(const WorkerLife& over, const WorkerLife& by);

  struct Swept {
    WorkerLife over;
    std::set<WorkerLife> wanted_by;
  };
  // What the sweeps that have ended by now have swept: all that run, or none.
  [[nodiscard]] std::vector<Swept> finish();

  // Lives that are over, in the order of their ids.
  [[nodiscard]] std::vector<WorkerLife> unswept() const;

 private:
  enum class State { waiting, running, swept };
  struct Life {
    State state = State::waiting;
    std::set<WorkerLife> asked;  // and have not answered
  };
  [[nodiscard]] bool answered(const Life& life) const;

  std::map<WorkerLife, Life> over_;
  std::map<WorkerLife, std::set<WorkerLife>> wanted_;  // by life that is over
};

}  // namespace stitch::rref
