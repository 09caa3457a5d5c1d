#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/dist_autograd/context_state.h"
#include "stitch/rref/lifetime/interval_set.h"

namespace stitch::dist_autograd {

// The contexts that one worker takes part in, and the ids of those that have ended, so that a late
// message cannot revive one. The ids take little memory: every RELEASE of a home carries the
// counter below which all its contexts have ended. A context of this worker itself that is not in
// the table has ended. Thread contract: any thread; takes a context's lock under its own, never in
// the other order.
class ContextTable {
 public:
  ContextTable(WorkerId self, std::uint64_t epoch) : self_(self), epoch_(epoch) {}

  // A new context of this worker.
  [[nodiscard]] std::shared_ptr<ContextState> create() STITCH_EXCLUDES(mutex_);
  // The context, or null when it is unknown here or has ended, which has_ended() distinguishes.
  [[nodiscard]] std::shared_ptr<ContextState> find(const ContextId& id) const
      STITCH_EXCLUDES(mutex_);
  // True when a context has ended as far as this worker knows; false for one that is unknown here.
  [[nodiscard]] bool has_ended(const ContextId& id) const STITCH_EXCLUDES(mutex_);
  // A context of another worker, made known here by a message. Null when it has ended.
  [[nodiscard]] std::shared_ptr<ContextState> find_or_join(const ContextId& id)
      STITCH_EXCLUDES(mutex_);
  // The same, and stores `teller` before other threads see the context: its RELEASE may come at any
  // time. Throws Error(overloaded) when kMaxTold contexts of `teller` have not ended.
  static constexpr std::size_t kMaxTold = std::size_t{1} << 16;
  [[nodiscard]] std::shared_ptr<ContextState> find_or_join(const ContextId& id,
                                                           const WorkerInfo& teller)
      STITCH_EXCLUDES(mutex_);
  // Takes a context out for good, known or unknown. Null for an unknown one.
  [[nodiscard]] std::shared_ptr<ContextState> remove(const ContextId& id) STITCH_EXCLUDES(mutex_);
  // `teller`, which is not the home, makes no more calls under a context, and later messages of it
  // do not revive the context. Takes the context out if `teller` was the last teller.
  [[nodiscard]] std::shared_ptr<ContextState> remove_told_by(const ContextId& id,
                                                             const WorkerInfo& teller)
      STITCH_EXCLUDES(mutex_);
  // All contexts of that home below `counter` have ended. Takes out those that are still here: the
  // worker that would have sent their RELEASE has died.
  [[nodiscard]] std::vector<std::shared_ptr<ContextState>> raise_low_water(WorkerId home,
                                                                           std::uint64_t epoch,
                                                                           std::uint64_t counter)
      STITCH_EXCLUDES(mutex_);
  // All contexts of that home from counter `first` to `last` have ended. Those that are still here
  // stay until their RELEASE comes. REQUIRES: first <= last.
  void add_ended(WorkerId home, std::uint64_t epoch, std::uint64_t first, std::uint64_t last)
      STITCH_EXCLUDES(mutex_);
  // The counter below which all of this worker's own contexts have ended.
  [[nodiscard]] std::uint64_t low_water() const STITCH_EXCLUDES(mutex_);
  // The first counter of the run of ended own contexts that includes `counter`.
  [[nodiscard]] std::uint64_t ended_from(std::uint64_t counter) const STITCH_EXCLUDES(mutex_);
  // Takes out all contexts of a life of `home` that is over, and accepts no others of it.
  [[nodiscard]] std::vector<std::shared_ptr<ContextState>> remove_home(WorkerId home,
                                                                       std::uint64_t epoch)
      STITCH_EXCLUDES(mutex_);
  // Takes out everything.
  [[nodiscard]] std::vector<std::shared_ptr<ContextState>> remove_all() STITCH_EXCLUDES(mutex_);

  [[nodiscard]] std::vector<std::shared_ptr<ContextState>> all() const STITCH_EXCLUDES(mutex_);
  // The size of the memory of ended contexts, in intervals of counters.
  [[nodiscard]] std::size_t ended_remembered() const STITCH_EXCLUDES(mutex_);

 private:
  using Life = std::pair<WorkerId, std::uint64_t>;
  [[nodiscard]] std::shared_ptr<ContextState> find_or_make(const ContextId& id)
      STITCH_REQUIRES(mutex_);
  [[nodiscard]] bool ended(const ContextId& id) const STITCH_REQUIRES(mutex_);
  [[nodiscard]] rref::IntervalSet& ended_by_home(WorkerId home, std::uint64_t epoch)
      STITCH_REQUIRES(mutex_);
  [[nodiscard]] std::vector<std::shared_ptr<ContextState>> take_below(WorkerId home,
                                                                      std::uint64_t epoch,
                                                                      std::uint64_t counter)
      STITCH_REQUIRES(mutex_);
  [[nodiscard]] bool own(const ContextId& id) const noexcept {
    return id.home == self_ && id.epoch == epoch_;
  }

  const WorkerId self_;
  const std::uint64_t epoch_;

  mutable base::Mutex mutex_;
  bool closed_ STITCH_GUARDED_BY(mutex_) = false;
  std::uint64_t next_ STITCH_GUARDED_BY(mutex_) = 1;
  std::set<std::uint64_t> own_
      STITCH_GUARDED_BY(mutex_);  // counters of this worker's live contexts
  std::map<ContextId, std::shared_ptr<ContextState>> contexts_ STITCH_GUARDED_BY(mutex_);
  // Counters of ended contexts of other workers, by {home, teller}. The word of a teller that is
  // not the home counts for its own calls only.
  std::map<std::pair<Life, Life>, rref::IntervalSet> ended_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::dist_autograd
