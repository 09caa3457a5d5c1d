#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/rref/lifetime/effects.h"
#include "stitch/rref/lifetime/interval_set.h"
#include "stitch/rref/lifetime/rref_id.h"

namespace stitch::rref {

// The objects this worker owns: one Entry per object, with everything that keeps it. An Entry goes
// when no worker holds it, no handle or message here refers to it, no message sent carries it, and
// its creation has ended (G2). Pure state, no I/O, not thread-safe: whoever owns it locks. What an
// event asks for is added to `effects`.
class OwnerTable {
 public:
  explicit OwnerTable(WorkerLife self) : self_(self) {}

  enum class Value : std::uint8_t { pending, ready, failed };
  struct Status {
    Value value = Value::pending;
    bool asked = false;  // its creation has been asked for; false: it is known from references only
    void* object = nullptr;
    std::optional<Error> failure;
    std::vector<WorkerLife> holders;
    std::uint32_t local = 0;
    std::uint32_t pins = 0;
  };
  struct Counts {
    std::size_t pending = 0, ready = 0, failed = 0, holders = 0, local = 0, pins = 0, waiters = 0;
  };

  // A new object with one local reference. REQUIRES: `id` is a new id of ours. A null object stays
  // pending until resolve().
  void add(const RRefId& id, std::shared_ptr<void> object);
  // `creator` asks for the object: it holds it from now on. False when this was asked before (a
  // repeated request). Throws Error(protocol) when the object was deleted already.
  [[nodiscard]] bool create(const RRefId& id, const WorkerLife& creator);
  // The creation ended. False, and a late object is destroyed, when it had ended before: the first
  // outcome stands.
  bool resolve(const RRefId& id, std::shared_ptr<void> object, const std::optional<Error>& failure,
               Effects& effects);

  // One more local reference: a handle, or a message being dealt with. An id not created yet gets a
  // placeholder. False when the object is gone.
  [[nodiscard]] bool add_local(const RRefId& id);
  void drop_local(const RRefId& id, Effects& effects);
  void pin(const RRefId& id);
  void unpin(const RRefId& id, Effects& effects);

  // REG and DROP. Throws Error(protocol) for a REG of an object that is gone: G3 rules it out for
  // peers that keep the rules.
  void add_holder(const RRefId& id, const WorkerLife& holder);
  void drop_holder(const RRefId& id, const WorkerLife& holder, Effects& effects);

  // Runs `waiter` when the creation has ended, at once when it has. REQUIRES: the caller keeps a
  // local reference until then.
  void when_resolved(const RRefId& id, Waiter waiter, Effects& effects);
  // That life of a worker is over: what it never asked for will never come, and those who wait for
  // it, now or later, get `why`.
  void creator_lost(const WorkerLife& creator, const Error& why, Effects& effects);
  // This worker is leaving: no handle here counts any more.
  void abandon(Effects& effects);
  // Every Entry goes, whoever refers to it: this worker is leaving. Waiters get `why`.
  void clear(const Error& why, Effects& effects);

  [[nodiscard]] std::optional<Status> status(const RRefId& id) const;
  [[nodiscard]] bool contains(const RRefId& id) const { return entries_.contains(id); }
  [[nodiscard]] std::vector<RRefId> ids() const;
  [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }
  [[nodiscard]] Counts counts() const;

 private:
  struct Entry {
    Value value = Value::pending;
    bool asked = false;
    std::uint32_t local = 0;
    std::uint32_t pins = 0;
    std::shared_ptr<void> object;
    std::optional<Error> failure;
    std::set<WorkerLife> holders;
    std::vector<Waiter> waiters;  // calls queued behind the creation
  };
  using Map = std::unordered_map<RRefId, Entry, RRefIdHash>;

  // The Entry, a new placeholder when its creation was not seen yet; null when the object is gone.
  [[nodiscard]] Entry* find_or_expect(const RRefId& id);
  void finish(Map::iterator at, Value value, Effects& effects);
  // Deletes an Entry that nothing keeps.
  void bury(Map::iterator at, Effects& effects);

  const WorkerLife self_;
  Map entries_;
  std::unordered_map<WorkerLife, IntervalSet, WorkerLifeHash>
      seen_;  // per creator: which k were created
  std::unordered_map<WorkerLife, Error, WorkerLifeHash> gone_creators_;
};

}  // namespace stitch::rref
