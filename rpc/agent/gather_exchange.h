#pragma once

#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/rpc/future/future.h"
#include "stitch/rpc/message/sendable.h"
#include "stitch/rpc/message/worker_info.h"

namespace stitch::rpc {

// The barriers and all_gathers (gatherings) of one worker, each in log2 N rounds of N participants,
// sorted by name. In round r, participant p fetches from participant p - 2^r its value and those of
// the 2^r - 1 participants before it, modulo N; the last round fetches only the missing values.
// (Dissemination: Hensgen, Finkel, Manber, Two Algorithms for Barrier Synchronization, 1988. With
// values: Bruck et al., Efficient Algorithms for All-to-All Communications, 1997.) A worker fetches
// all rounds at once; a fetch is answered when the rounds before it are complete. A gathering ends
// here when this worker has all values and its readers, the workers that fetch from it, have
// fetched. A failure goes to every reader, so it reaches all participants. Owned by Agent. Thread
// contract: any thread; promises are completed, and values destroyed, without a lock.
class GatherExchange {
 public:
  using Clock = std::chrono::steady_clock;
  using Values = std::vector<OwnedObject>;
  // The name of a gathering at all participants: a hash of their names and epochs, and the number
  // of their earlier gatherings, failed ones included.
  struct Key {
    std::uint64_t set = 0;
    std::uint64_t number = 0;
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  // The answer to a fetch: values, or the error of a gathering that has failed.
  struct Given {
    std::optional<Error> failure{};
    Values values{};
  };
  struct Begun {
    Key key;
    std::vector<WorkerInfo> sources;  // by round
    // All values: this worker's first, then those of the participants before it, backwards.
    Future<Values> done;
  };

  explicit GatherExchange(WorkerInfo self) : self_(std::move(self)) {}
  // Begins this worker's next gathering among `lives`, which are sorted by name and include this
  // worker. The gathering fails unless all participants say the same `what`: "a barrier", "an
  // all_gather of int".
  [[nodiscard]] Begun begin(const std::vector<WorkerInfo>& lives, const std::string& what,
                            OwnedObject value) STITCH_EXCLUDES(mutex_);
  // The source of that round has given these values.
  void add(const Key& key, std::size_t round, Values values) STITCH_EXCLUDES(mutex_);
  // Fails the gathering here: its future and its readers get `why`, which names no call.
  void fail(const Key& key, const Error& why) STITCH_EXCLUDES(mutex_);
  // Ends the gathering before its readers have fetched. True when this worker had all values, with
  // which `done` is then complete.
  bool end(const Key& key) STITCH_EXCLUDES(mutex_);
  // The error of a gathering that has failed here, or the participant that this worker waits for;
  // neither where this worker has not begun that gathering or waits for no participant.
  using Standing = std::pair<std::optional<Error>, std::optional<WorkerInfo>>;
  [[nodiscard]] Standing standing(const Key& key) const STITCH_EXCLUDES(mutex_);

  struct Fetched {
    Future<Given> given;
    std::uint64_t wait = 0;  // for stop_waiting()
  };
  // Another participant asks for the values of a round.
  [[nodiscard]] Fetched fetch(const Key& key, std::size_t round, const std::string& what,
                              const WorkerInfo& from) STITCH_EXCLUDES(mutex_);
  // The caller of that fetch has given up, which counts as a fetch.
  void stop_waiting(const Key& key, std::uint64_t wait) noexcept STITCH_EXCLUDES(mutex_);
  // A reader is lost: its fetches count as done.
  void on_lost(const WorkerInfo& life) noexcept STITCH_EXCLUDES(mutex_);
  // Fails all gatherings, now and later, with `why`, which names this worker.
  void close(const Error& why) STITCH_EXCLUDES(mutex_);

  // A gathering that is under way, for reports.
  struct Listed {
    Key key;
    std::size_t participants = 0;  // 0: this worker has not arrived
    std::string awaited;           // the participant that this worker waits for
    std::size_t readers = 0;       // participants that wait for this worker
    Clock::time_point since;
  };
  [[nodiscard]] std::vector<Listed> list() const STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t size() const STITCH_EXCLUDES(mutex_);

 private:
  struct Fetch {
    WorkerInfo from;
    std::size_t round = 0;
    std::string what;
    std::uint64_t number = 0;
    Promise<Given> promise{};
  };
  struct Gathering {
    std::string what{};                     // empty until this worker has arrived
    Values values{};                        // of the rounds before `round`
    std::size_t round = 0;                  // the first that is missing
    std::map<std::size_t, Values> later{};  // of rounds after it
    std::vector<WorkerInfo> sources{};      // by round
    std::vector<std::pair<WorkerInfo, std::size_t>> readers{};  // that have not fetched; round
    std::size_t participants = 0;
    std::list<Fetch> waiting{};
    Promise<Values> done{};
    Clock::time_point since = Clock::now();
    [[nodiscard]] bool arrived() const noexcept { return !what.empty(); }
    [[nodiscard]] bool complete() const noexcept { return arrived() && round == sources.size(); }
    // The number of values that a round brings.
    [[nodiscard]] std::size_t count(std::size_t round) const noexcept;
    void forget(const WorkerInfo& reader, std::optional<std::size_t> round) noexcept;
  };
  using Gatherings = std::map<Key, Gathering>;
  // The gatherings of one set of lives.
  struct Set {
    std::uint64_t next = 0;                                   // number
    std::uint64_t used = 0;                                   // the last use, as uses_ counts
    std::optional<std::pair<std::uint64_t, Error>> failed{};  // the last failure: number, error
  };
  // The number of sets that are remembered; beyond it, the least recently used set is forgotten.
  static constexpr std::size_t kSetsKept = 4096;
  // Actions for after the lock.
  struct Effects {
    std::vector<std::pair<Promise<Given>, Given>> answers{};
    Gatherings over{};
    Gatherings failed{};
    Error why{};  // of those
    void carry_out();
  };

  [[nodiscard]] Given answer(const Gathering& gathering, const Fetch& fetch) const;
  // Answers the fetches whose rounds are complete; takes out a gathering that has ended.
  void proceed(Gatherings::iterator at, Effects& effects) STITCH_REQUIRES(mutex_);
  // Fails a gathering with `why` here and `told` at its readers.
  void fail(Gatherings::iterator at, const Error& why, const Error& told, Effects& effects)
      STITCH_REQUIRES(mutex_);

  const WorkerInfo self_;
  mutable base::Mutex mutex_;
  std::optional<Error> closed_ STITCH_GUARDED_BY(mutex_);              // here
  std::optional<Error> answer_when_closed_ STITCH_GUARDED_BY(mutex_);  // to the others then
  std::map<std::uint64_t, Set> sets_ STITCH_GUARDED_BY(mutex_);
  Gatherings gatherings_ STITCH_GUARDED_BY(mutex_);
  std::uint64_t fetches_ STITCH_GUARDED_BY(mutex_) = 0;
  std::uint64_t uses_ STITCH_GUARDED_BY(mutex_) = 0;
};

}  // namespace stitch::rpc
