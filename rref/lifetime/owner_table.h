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

// The objects that this worker owns: one OwnedEntry per object, with all that keeps it alive. An
// entry is deleted when no worker holds the object, no handle or message here refers to it, no sent
// message carries it, and its creation has ended (G2). Pure state of a Lifetime, which locks it;
// events add their effects to `effects`. Not thread-safe.
class OwnerTable {
 public:
  // The limit of objects that a peer makes this worker remember though no worker has requested
  // them: references and REGs may name an object first, and UNMADE does.
  static constexpr std::size_t kMaxUnrequested = 65'536;
  explicit OwnerTable(WorkerLife self, std::size_t max_unrequested = kMaxUnrequested)
      : self_(self), max_unrequested_(max_unrequested) {}

  enum class Value : std::uint8_t { pending, ready, failed };
  static constexpr std::size_t kValues = static_cast<std::size_t>(Value::failed) + 1;
  struct Status {
    Value value = Value::pending;
    bool requested = false;  // false: a placeholder, which only references have named
    std::shared_ptr<void> object;
    std::optional<Error> failure;
    std::vector<WorkerLife> holders;
    std::uint32_t local = 0;
    std::uint32_t pins = 0;
    const std::string* made_by = nullptr;         // as given to add() or create()
    std::chrono::steady_clock::time_point since;  // the entry's beginning
  };
  struct Counts {
    std::array<std::size_t, kValues> entries{};  // by Value
    std::size_t holders = 0, waiters = 0;
    // Runs of the numbers of requested objects that this worker remembers.
    std::size_t runs_remembered = 0;
    [[nodiscard]] std::size_t in(Value value) const noexcept {
      return entries[static_cast<std::size_t>(value)];
    }
  };

  // Adds a new object with one local reference; a null object is pending until resolve(). REQUIRES:
  // `id` is a new id of this worker. `made_by`, the name of the creating function or null, is not
  // copied; lists show it.
  void add(const RRefId& id, std::shared_ptr<void> object, const std::string* made_by = nullptr);
  // `creator` requests the object and is a holder from now on. False for a repeated request. Throws
  // Error(protocol) when the object was deleted already. `made_by` as for add().
  [[nodiscard]] bool create(const RRefId& id, const WorkerLife& creator,
                            const std::string* made_by = nullptr);
  // The creation has ended. False when it had ended before: the first outcome counts, and a later
  // object is destroyed.
  bool resolve(const RRefId& id, std::shared_ptr<void> object, const std::optional<Error>& failure,
               TableEffects& effects);

  // One more handle, or message of this worker, refers to an object that has an entry.
  void add_local(const RRefId& id);
  // A message of `teller` refers to the object; one that is not requested yet gets a placeholder.
  // False without an object: it was deleted, never existed, or `teller` has named too many objects
  // that were never requested.
  [[nodiscard]] bool receive(const RRefId& id, const WorkerLife& teller);
  void drop_local(const RRefId& id, TableEffects& effects);
  void pin(const RRefId& id);
  void unpin(const RRefId& id, TableEffects& effects);

  // REG. False as for receive(): a third worker may have sent a reference to no object.
  [[nodiscard]] bool add_holder(const RRefId& id, const WorkerLife& holder);
  // DROP. Throws Error(protocol) unless the worker is a holder.
  void drop_holder(const RRefId& id, const WorkerLife& holder, TableEffects& effects);

  // Runs `waiter` after the creation has ended, or now if it has. REQUIRES: the caller keeps a
  // local reference until then.
  void when_resolved(const RRefId& id, Waiter waiter, TableEffects& effects);
  // A creator's life is lost: its placeholders will not be created, and their waiters get `why`.
  void creator_lost(const WorkerLife& creator, const Error& why, TableEffects& effects);
  // The former lives of the worker of `life` that are creators of placeholders.
  [[nodiscard]] std::set<WorkerLife> former_creators(const WorkerLife& life) const;
  // UNMADE: the creator never sent the request to create `id`. The creation has failed with `why`,
  // and the creator is a holder until DROP. Does nothing for a requested object. Throws
  // Error(protocol) beyond the limit of objects that were never requested.
  void not_requested(const RRefId& id, const Error& why, TableEffects& effects);
  // A life has been swept: no worker depends on its holds, and no live worker has a reference to an
  // object that it created and that has no entry here (G7).
  void drop_life(const WorkerLife& life, TableEffects& effects);
  // Whether other workers may have references to an object here.
  [[nodiscard]] bool lent() const;
  // This worker is leaving: handles here no longer count.
  void drop_all_handles(TableEffects& effects);
  // This worker is leaving: deletes all entries, referenced or not. Waiters get `why`.
  void clear(const Error& why, TableEffects& effects);

  [[nodiscard]] std::optional<Status> status(const RRefId& id) const;
  // Of all entries.
  [[nodiscard]] std::vector<std::pair<RRefId, Status>> list() const;
  // REQUIRES: contains(id).
  [[nodiscard]] bool pending(const RRefId& id) const {
    return entries_.at(id).value == Value::pending;
  }
  [[nodiscard]] bool contains(const RRefId& id) const { return entries_.contains(id); }
  // Whether the object was deleted here, or this worker is its creator and never made it.
  [[nodiscard]] bool deleted(const RRefId& id) const;
  [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }
  [[nodiscard]] Counts counts() const;

 private:
  // The fields that few entries need, so that a million entries do not pay for them.
  struct Rare {
    std::optional<Error> failure;
    std::vector<Waiter> waiters;         // calls that wait for the creation
    std::optional<WorkerLife> named_by;  // the peer that unrequested_ counts it for
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
  // The entry, or a new placeholder; null where receive() returns false.
  [[nodiscard]] OwnedEntry* find_or_add_placeholder(const RRefId& id, const WorkerLife& teller);
  // Counts one more for `teller`. False, and nothing is counted, at the limit.
  [[nodiscard]] bool count_unrequested(const WorkerLife& teller);
  void count_requested(OwnedEntry& entry);
  void finish(Map::iterator at, Value value, TableEffects& effects);
  // Deletes an entry that no reference keeps alive, which invalidates `at`.
  void erase_if_unused(Map::iterator at, TableEffects& effects);

  const WorkerLife self_;
  const std::size_t max_unrequested_;
  Map entries_;
  // By creator, without this worker: the numbers k that were requested, or never will be. A request
  // that was never sent, and that no other worker knows, leaves a gap until the creator's life has
  // been swept.
  std::unordered_map<WorkerLife, IntervalSet, WorkerLifeHash> seen_;
  // By peer: the entries that it has made this worker remember and that were never requested.
  std::unordered_map<WorkerLife, std::size_t, WorkerLifeHash> unrequested_;
};

}  // namespace stitch::rref
