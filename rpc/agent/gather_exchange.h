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

// The barriers and all_gathers (gatherings) of one worker, each in log2 N rounds of N participants.
// In round r, participant p of the list that is sorted by name fetches from participant p - 2^r the
// values of that one and of the 2^r - 1 before it, modulo N; the last round fetches only the values
// that are left. (Dissemination: Hensgen, Finkel, Manber, Two Algorithms for Barrier
// Synchronization, 1988. With values: Bruck et al., Efficient Algorithms for All-to-All
// Communications, 1997.) All rounds are fetched at once; each fetch is answered when the rounds
// before it are complete. A gathering is over here when this worker has all values and all its
// readers have fetched: nothing of it is kept then. A failure is handed to every reader, so all
// participants hear of it. Owned by Agent. Thread contract: any thread; promises are completed, and
// values destroyed, without a lock.
class GatherExchange {
 public:
  using Clock = std::chrono::steady_clock;
  using Values = std::vector<OwnedObject>;
  // Names a gathering on all participants: a hash of their names and epochs, and how many
  // gatherings of them there were before, the ones that failed included.
  struct Key {
    std::uint64_t set = 0;
    std::uint64_t number = 0;
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  // The answer to a fetch: values, or why the gathering has failed.
  struct Given {
    std::optional<Error> failure{};
    Values values{};
  };
  struct Begun {
    Key key;
    std::vector<WorkerInfo> sources;  // by round
    // The values of all, this worker's first, then those of the participants before it.
    Future<Values> done;
  };

  explicit GatherExchange(WorkerInfo self) : self_(std::move(self)) {}
  // Begins this worker's next gathering among `lives`, sorted by name, itself among them. `what`:
  // "a barrier", "an all_gather of int"; the gathering fails where participants say different ones.
  [[nodiscard]] Begun begin(const std::vector<WorkerInfo>& lives, const std::string& what,
                            OwnedObject value) STITCH_EXCLUDES(mutex_);
  // The source of that round has given these values.
  void add(const Key& key, std::size_t round, Values values) STITCH_EXCLUDES(mutex_);
  // The gathering has failed here: its future and its readers get `why`, which is about no call.
  void fail(const Key& key, const Error& why) STITCH_EXCLUDES(mutex_);
  // Ends it, though readers have not fetched. True if this worker had all values: they are `done`.
  bool end(const Key& key) STITCH_EXCLUDES(mutex_);
  // Why the gathering has failed here, or the participant that this worker waits for; neither where
  // it has not come to that gathering or waits for none.
  using Standing = std::pair<std::optional<Error>, std::optional<WorkerInfo>>;
  [[nodiscard]] Standing standing(const Key& key) const STITCH_EXCLUDES(mutex_);

  struct Fetched {
    Future<Given> given;
    std::uint64_t wait = 0;  // for stop_waiting()
  };
  // Another participant asks for the values of a round.
  [[nodiscard]] Fetched fetch(const Key& key, std::size_t round, const std::string& what,
                              const WorkerInfo& from) STITCH_EXCLUDES(mutex_);
  // The caller of that fetch waits no more: it counts as one that has fetched.
  void stop_waiting(const Key& key, std::uint64_t wait) noexcept STITCH_EXCLUDES(mutex_);
  // That life fetches nothing any more.
  void on_lost(const WorkerInfo& life) noexcept STITCH_EXCLUDES(mutex_);
  // Ends everything, now and later: `why` names this worker.
  void close(const Error& why) STITCH_EXCLUDES(mutex_);

  // A gathering in which a participant here or elsewhere waits, for reports.
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
    std::vector<std::pair<WorkerInfo, std::size_t>> readers{};  // that have not fetched, and round
    std::size_t participants = 0;
    std::list<Fetch> waiting{};
    Promise<Values> done{};
    Clock::time_point since = Clock::now();
    [[nodiscard]] bool arrived() const noexcept { return !what.empty(); }
    [[nodiscard]] bool complete() const noexcept { return arrived() && round == sources.size(); }
    // How many values a round brings.
    [[nodiscard]] std::size_t count(std::size_t round) const noexcept;
    void forget(const WorkerInfo& reader, std::optional<std::size_t> round) noexcept;
  };
  using Gatherings = std::map<Key, Gathering>;
  // The gatherings of one set of lives.
  struct Set {
    std::uint64_t next = 0;                                   // number
    std::uint64_t used = 0;                                   // when, as uses_ counts
    std::optional<std::pair<std::uint64_t, Error>> failed{};  // the last that has: number, why
  };
  // So many sets are counted; the least recently used one begins anew beyond.
  static constexpr std::size_t kSetsKept = 4096;
  // What is done once the lock has been released.
  struct Effects {
    std::vector<std::pair<Promise<Given>, Given>> answers{};
    Gatherings over{};
    Gatherings failed{};
    Error why{};  // of those
    void carry_out();
  };

  [[nodiscard]] Given answer(const Gathering& gathering, const Fetch& fetch) const;
  // Answers the fetches that can be answered; takes the gathering out when it is over.
  void proceed(Gatherings::iterator at, Effects& effects) STITCH_REQUIRES(mutex_);
  // Its readers get `told`.
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
