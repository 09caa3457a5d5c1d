#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/base/recycler.h"
#include "stitch/rref/lifetime/effects.h"
#include "stitch/rref/lifetime/interval_set.h"
#include "stitch/rref/lifetime/life_set.h"
#include "stitch/rref/lifetime/rref_id.h"

namespace stitch::rref {

// The objects that this worker owns: one OwnedEntry per object, with everything that keeps it
// alive. An entry is deleted when no worker holds the object, no handle or message here refers to
// it, no message sent carries it, and its creation has ended (G2). Pure state, no I/O, not
// thread-safe: the owner of the table locks. What an event asks for is added to `effects`.
class OwnerTable {
 public:
  // A peer can make this worker remember so many objects that were never requested: by references
  // and REGs that name them first, and by UNMADE.
  static constexpr std::size_t kMaxUnrequested = 65'536;
  explicit OwnerTable(WorkerLife self, std::size_t max_unrequested = kMaxUnrequested)
      : self_(self), max_unrequested_(max_unrequested) {}

  enum class Value : std::uint8_t { pending, ready, failed };
  static constexpr std::size_t kValues = static_cast<std::size_t>(Value::failed) + 1;
  struct Status {
    Value value = Value::pending;
    bool requested = false;  // false: a placeholder, known from references only
    std::shared_ptr<void> object;
    std::optional<Error> failure;
    std::vector<WorkerLife> holders;
    std::uint32_t local = 0;
    std::uint32_t pins = 0;
    const std::string* made_by = nullptr;         // as given to add() or create()
    std::chrono::steady_clock::time_point since;  // when the entry was made
  };
  struct Counts {
    std::array<std::size_t, kValues> entries{};  // by Value
    std::size_t holders = 0, waiters = 0;
    // Runs of the numbers that are remembered as those of objects that have been requested.
    std::size_t runs_remembered = 0;
    [[nodiscard]] std::size_t in(Value value) const noexcept {
      return entries[static_cast<std::size_t>(value)];
    }
  };

  // A new object with one local reference. REQUIRES: `id` is a new id of this worker. A null object
  // is pending until resolve().
  // `made_by`, the name of the function that makes it or null, is not copied; for lists.
  void add(const RRefId& id, std::shared_ptr<void> object, const std::string* made_by = nullptr);
  // `creator` requests the object and is a holder from now on. False if this was requested before
  // (a repeated request). Throws Error(protocol) if the object was deleted already.
  // `made_by` as for add().
  [[nodiscard]] bool create(const RRefId& id, const WorkerLife& creator,
                            const std::string* made_by = nullptr);
  // The creation ended. False if it had ended before: the first outcome is kept, a later object is
  // destroyed.
  bool resolve(const RRefId& id, std::shared_ptr<void> object, const std::optional<Error>& failure,
               TableEffects& effects);

  // One more local reference, where there is an entry: a handle, or a message of this worker.
  void add_local(const RRefId& id);
  // The same for a message of `teller`. An id that has not been requested yet gets a placeholder.
  // False if there is no such object: it was deleted, never existed, or `teller` has named too many
  // that were never requested.
  [[nodiscard]] bool receive(const RRefId& id, const WorkerLife& teller);
  void drop_local(const RRefId& id, TableEffects& effects);
  void pin(const RRefId& id);
  void unpin(const RRefId& id, TableEffects& effects);

  // REG. False as for receive(): a third worker may have lent a reference to what does not exist.
  [[nodiscard]] bool add_holder(const RRefId& id, const WorkerLife& holder);
  // DROP. Throws Error(protocol) where the worker is no holder.
  void drop_holder(const RRefId& id, const WorkerLife& holder, TableEffects& effects);

  // Runs `waiter` when the creation has ended; immediately if it has. REQUIRES: the caller keeps a
  // local reference until then.
  void when_resolved(const RRefId& id, Waiter waiter, TableEffects& effects);
  // That life of a worker is lost: objects that it never requested will not be created, and those
  // who wait for them get `why`.
  void creator_lost(const WorkerLife& creator, const Error& why, TableEffects& effects);
  // The creators of placeholders that are former lives of the worker of `life`.
  [[nodiscard]] std::set<WorkerLife> former_creators(const WorkerLife& life) const;
  // The creator says that it never sent the request to create `id`: a creation that has failed with
  // `why`, of which it is a holder until it sends DROP, as of any other. Nothing if it has been
  // requested. Throws Error(protocol) if it has made this worker remember too many such.
  void not_requested(const RRefId& id, const Error& why, TableEffects& effects);
  // Nothing depends any more on what that life of a worker held, and no live worker has a reference
  // to an object of its making that has no entry here (G7).
  void drop_life(const WorkerLife& life, TableEffects& effects);
  // Whether other workers may have references to an object here.
  [[nodiscard]] bool lent() const;
  // This worker is leaving: handles here no longer count.
  void drop_all_handles(TableEffects& effects);
  // This worker is leaving: deletes every entry, referenced or not. Waiters get `why`.
  void clear(const Error& why, TableEffects& effects);

  [[nodiscard]] std::optional<Status> status(const RRefId& id) const;
  // Of all entries.
  [[nodiscard]] std::vector<std::pair<RRefId, Status>> list() const;
  // REQUIRES: contains(id).
  [[nodiscard]] bool pending(const RRefId& id) const {
    return entries_.at(id).value == Value::pending;
  }
  [[nodiscard]] bool contains(const RRefId& id) const { return entries_.contains(id); }
  // Whether it was here and has been deleted, or this worker is its creator and never made it.
  [[nodiscard]] bool deleted(const RRefId& id) const;
  [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }
  [[nodiscard]] Counts counts() const;

 private:
  // What most entries do not have: a million of them should not pay for it.
  struct Rare {
    std::optional<Error> failure;
    std::vector<Waiter> waiters;         // calls that wait for the creation
    std::optional<WorkerLife> named_by;  // the peer that made this worker remember it: unrequested_
    [[nodiscard]] static void* operator new(std::size_t bytes) {
      return base::take_recycled(bytes);
    }
    static void operator delete(void* at, std::size_t bytes) noexcept { base::recycle(at, bytes); }
  };
  struct OwnedEntry {
    Value value = Value::pending;
    bool requested = false;
    std::uint32_t local = 0;
    std::uint32_t pins = 0;
    std::shared_ptr<void> object;
    LifeSet holders;
    std::unique_ptr<Rare> rare;
    const std::string* made_by = nullptr;
    std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
    [[nodiscard]] Rare& more() {
      if (!rare) rare = std::make_unique<Rare>();
      return *rare;
    }
    [[nodiscard]] std::optional<Error> failure() const {
      return rare ? rare->failure : std::nullopt;
    }
  };
  using Map = std::unordered_map<RRefId, OwnedEntry, RRefIdHash>;

  [[nodiscard]] static Status status_of(const OwnedEntry& entry);
  // The entry, or a new placeholder; null as receive().
  [[nodiscard]] OwnedEntry* find_or_add_placeholder(const RRefId& id, const WorkerLife& teller);
  // False, counting nothing, if `teller` has as many already.
  [[nodiscard]] bool count_unrequested(const WorkerLife& teller);
  void count_requested(OwnedEntry& entry);
  void finish(Map::iterator at, Value value, TableEffects& effects);
  // Deletes an entry that nothing keeps alive. Invalidates `at` if it does.
  void erase_if_unused(Map::iterator at, TableEffects& effects);

  const WorkerLife self_;
  const std::size_t max_unrequested_;
  Map entries_;
  // Per creator but this worker: which k were requested, or never will be. A request that was never
  // sent and of which no other worker knows leaves a gap, until the creator's life has been swept.
  std::unordered_map<WorkerLife, IntervalSet, WorkerLifeHash> seen_;
  // Per peer: entries that it has made this worker remember, and that were never requested.
  std::unordered_map<WorkerLife, std::size_t, WorkerLifeHash> unrequested_;
};

}  // namespace stitch::rref
