#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stitch/base/bytes.h"
#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/base/recycler.h"
#include "stitch/rref/lifetime/effects.h"
#include "stitch/rref/lifetime/holder_table.h"
#include "stitch/rref/lifetime/ledger.h"
#include "stitch/rref/lifetime/owner_table.h"
#include "stitch/rref/lifetime/rref_id.h"
#include "stitch/rref/lifetime/sweeps.h"

namespace stitch::rref {

// One reference inside a message, as it is written in the message's header: once per object,
// however many copies the body contains.
struct CarriedRef {
  RRefId id;
  std::uint64_t token = 0;  // settles the sender's pin; unique among what this sender's life sends
                            // to this receiver's life
  bool pinned = false;      // false: nothing to settle (a lost reference, or a message to oneself)
  bool lost = false;        // the sender's handle is lost
  bool created = false;     // the sender knows that the object has been created
};

// One object that a worker owns or refers to; one of the two is there.
struct ListedRef {
  RRefId id;
  std::optional<OwnerTable::Status> owned;
  std::optional<HolderTable::Status> held;
};

// One worker's part in the lifetime protocol (PROTOCOL.md): both tables and one ledger per peer. No
// I/O and no threads. Thread contract: every method from any thread; one internal lock, which is
// never held while the caller's code runs. What an event asks for is returned as Effects: the
// caller performs them while it holds no lock.
class Lifetime {
 public:
  // `max_unrequested` as for OwnerTable.
  explicit Lifetime(WorkerLife self, std::size_t max_unrequested = OwnerTable::kMaxUnrequested)
      : self_(self), owners_(self, max_unrequested) {}
  // What the membership of the world says. Each is called under the lock and must not call back.
  struct World {
    // Whether that life is known here, be it over: then member_over() is told when it is. Empty:
    // all are, and what a peer says of an end is the news itself.
    std::function<bool(const WorkerLife&)> contains;
    // The present life of every worker that this one knows; those of which member_over() has not
    // been told count as alive. Empty: there are no others.
    std::function<std::vector<WorkerLife>()> live;
    // Why what belongs to a life that is over cannot be used. Empty: the life is named by numbers.
    std::function<Error(const WorkerLife&)> gone;
  };
  // REQUIRES: called before the first message.
  void set_world(World world);

  struct Status {
    bool owned = false;      // this worker owns the object
    bool confirmed = false;  // the owner is known to know of it: owned, registered, or created
    std::optional<Error> lost;
  };
  struct Counts {
    OwnerTable::Counts owned;
    HolderTable::Counts held;
    std::size_t entries = 0, holds = 0, tokens = 0;
    std::size_t ledger_unsent = 0;
    std::size_t unswept = 0;  // lives that are over, and that objects here may still wait for
  };

  // --- objects ---
  // Owns an object here, with one local reference. A null object is pending until resolve().
  // `made_by`, the name of the function that makes it or null, is not copied; for list().
  [[nodiscard]] RRefId add_object(std::shared_ptr<void> object,
                                  const std::string* made_by = nullptr);
  // A new id for an object to be created at `owner`, another worker, with one local reference.
  // Followed by answered(), or by create_not_sent() when the request certainly did not leave.
  // `made_by` as for add_object().
  [[nodiscard]] RRefId begin_create(const WorkerLife& owner, const std::string* made_by = nullptr);
  [[nodiscard]] Effects answered(const RRefId& id, const std::optional<Error>& failure);
  [[nodiscard]] Effects create_not_sent(const RRefId& id, const Error& why);
  // A request to create arrived. False if it is a duplicate. Throws Error(protocol) if it is for
  // another owner or the object was deleted already; the end of its creator if that is over.
  // `made_by` as for add_object().
  [[nodiscard]] bool create(const RRefId& id, const WorkerLife& creator,
                            const std::string* made_by = nullptr);
  // The creation here ended. The first outcome is kept; the object of a later one is destroyed.
  [[nodiscard]] Effects resolve(const RRefId& id, std::shared_ptr<void> object,
                                const std::optional<Error>& failure);
  // Whether the outcome of the creation is known here or will be: at the owner, and at the creator
  // until it has dropped its last reference. Otherwise only the owner knows it.
  [[nodiscard]] bool tracks_creation(const RRefId& id) const;
  // Runs `waiter` when the creation has ended. REQUIRES: tracks_creation().
  [[nodiscard]] Effects when_created(const RRefId& id, Waiter waiter);
  // The three of them at once, for a handle: why it is lost; else whether the creation is tracked
  // here, and `waiter` is kept or run as by when_created(). Otherwise `waiter` is left untouched.
  struct Watch {
    std::optional<Error> lost;
    bool tracked = false;
    Effects effects;
  };
  [[nodiscard]] Watch watch_creation(const RRefId& id, Waiter& waiter);

  // --- handles of this process ---
  void add_local(const RRefId& id);
  [[nodiscard]] Effects drop_local(const RRefId& id);
  [[nodiscard]] Status status(const RRefId& id) const;
  [[nodiscard]] std::optional<OwnerTable::Status> owned(const RRefId& id) const;
  // Whether this worker has an entry for the object: it owns it, or will.
  [[nodiscard]] bool owns(const RRefId& id) const;

  // --- messages ---
  // Called before the bytes of a message leave. REQUIRES: a local reference.
  [[nodiscard]] CarriedRef pin(const RRefId& id, const WorkerLife& receiver);
  // The message certainly never reached `receiver`.
  [[nodiscard]] Effects unpin(const CarriedRef& carried, const WorkerLife& receiver);
  // A message arrived; user code has not seen it. The message holds a local reference until
  // message_done(). `lost`: the error of a reference that was lost at its sender.
  [[nodiscard]] Effects receive(const CarriedRef& carried, const WorkerLife& sender,
                                const std::optional<Error>& lost = std::nullopt);
  // The message has been processed: its arguments are destroyed and its reply is about to leave, or
  // it ended in any other way.
  [[nodiscard]] Effects message_done(const RRefId& id, const WorkerLife& sender);
  // To be called a moment after Effects::kept: registers the borrows that still exist.
  [[nodiscard]] Effects register_kept();

  // --- ledgers ---
  // The peers to which ledgers have something to say.
  [[nodiscard]] std::vector<WorkerLife> due() const;
  // Appends the next ledger frame to `peer`; false if there is none. REQUIRES: called by one thread
  // at a time for that peer, and the frames are sent in this order.
  [[nodiscard]] bool encode_ledger(const WorkerLife& peer, base::Bytes& out);
  [[nodiscard]] Effects accept_ledger(const WorkerLife& peer, std::span<const std::byte> frame);

  // --- ends ---
  // This worker cannot reach that life of `peer` any more: what it owns is lost here with `why`;
  // nothing more is expected from it. What it holds, and pins towards it, stay.
  [[nodiscard]] Effects peer_lost(const WorkerLife& peer, const Error& why);
  // The world has declared that life over, or it has left: peer_lost(), and it is swept: what it
  // holds, and pins towards it, go as soon as no worker depends on them.
  [[nodiscard]] Effects member_over(const WorkerLife& peer, const Error& why);
  // Whether that life is over, as far as is known here: references that it sends are lost.
  [[nodiscard]] bool over(const WorkerLife& life) const;
  // Whether a reference to it here would be lost, or is.
  [[nodiscard]] bool lost(const RRefId& id) const;
  // A new life is a member of the world.
  [[nodiscard]] Effects member_joined(const WorkerLife& life);
  // This worker is leaving: every handle here is lost with `why`. Ledgers work until close().
  [[nodiscard]] Effects leave(const Error& why);
  // After leave(): releases the remaining objects, whether they are referenced or not.
  [[nodiscard]] Effects close();

  [[nodiscard]] Counts counts() const;
  // All that is owned and held, in no order.
  [[nodiscard]] std::vector<ListedRef> list() const;
  [[nodiscard]] const WorkerLife& self() const noexcept { return self_; }

 private:
  struct PeerState {
    Ledger ledger;
    std::uint64_t next_token = 0;
    // Sent and not settled.
    std::map<std::uint64_t, RRefId, std::less<>,
             base::RecyclingAllocator<std::pair<const std::uint64_t, RRefId>>>
        tokens;
  };

  // Queues the operations in their ledgers, under the lock that ordered them, and returns the rest.
  [[nodiscard]] Effects pack(TableEffects effects) STITCH_REQUIRES(mutex_);
  // The next id of an object at `owner`. One that a peer made up, and that is held here, is
  // skipped.
  [[nodiscard]] RRefId new_id(const WorkerLife& owner) STITCH_REQUIRES(mutex_);
  void drop_pin(const RRefId& id, TableEffects& effects) STITCH_REQUIRES(mutex_);
  void apply(const LedgerOp& op, const WorkerLife& peer, TableEffects& effects)
      STITCH_REQUIRES(mutex_);
  void settle(const LedgerOp& op, const WorkerLife& peer, TableEffects& effects)
      STITCH_REQUIRES(mutex_);
  // The operations about lives that are over.
  void apply_sweep(const LedgerOp& op, const WorkerLife& peer, TableEffects& effects)
      STITCH_REQUIRES(mutex_);
  void lose(const WorkerLife& peer, const Error& why, TableEffects& effects)
      STITCH_REQUIRES(mutex_);
  void end_life(const WorkerLife& over, const Error& why, TableEffects& effects)
      STITCH_REQUIRES(mutex_);
  // Whether that life was never known here and will not be, since a later one of its worker is.
  [[nodiscard]] bool passed(const WorkerLife& life) const STITCH_REQUIRES(mutex_);
  // `peer` asks about a life that is not known here. False if it has asked about too many of these.
  [[nodiscard]] bool note_unheard(const WorkerLife& life, const WorkerLife& peer)
      STITCH_REQUIRES(mutex_);
  // That life is or was a member: questions about it are answered when its end is told, those about
  // earlier ones, of which nothing more will be heard, now.
  void hear_of(const WorkerLife& life, TableEffects& effects) STITCH_REQUIRES(mutex_);
  // CLEAN to all who have asked about that life.
  void answer_early(const WorkerLife& over, TableEffects& effects) STITCH_REQUIRES(mutex_);
  void ask(const std::vector<Sweeps::Question>& questions, TableEffects& effects)
      STITCH_REQUIRES(mutex_);
  void start_sweeps(TableEffects& effects) STITCH_REQUIRES(mutex_);
  void finish_sweeps(TableEffects& effects) STITCH_REQUIRES(mutex_);
  // Drops the pins of objects of `owner` in messages to `receiver`, which will not be settled.
  void void_pins(const WorkerLife& receiver, const WorkerLife& owner, TableEffects& effects)
      STITCH_REQUIRES(mutex_);
  [[nodiscard]] std::vector<WorkerLife> live() const STITCH_REQUIRES(mutex_);
  [[nodiscard]] Error error_of_ended(const WorkerLife& life) const STITCH_REQUIRES(mutex_);
  [[nodiscard]] std::optional<Error> loss_of(const RRefId& id) const STITCH_REQUIRES(mutex_);
  // Whether references to `id` are counted by its OwnedEntry. Those to an object of this worker
  // that arrived as lost before the object was created are counted by a Hold, and so are all later
  // ones while that Hold exists: a reference is dropped from the table that it was added to.
  [[nodiscard]] bool owned_here(const RRefId& id) const STITCH_REQUIRES(mutex_);
  // Why no request to create that object will come here: its creator is lost, or was over before
  // this worker heard of it. Nothing if the object is here, or may come.
  [[nodiscard]] std::optional<Error> why_never(const RRefId& id) const STITCH_REQUIRES(mutex_);

  const WorkerLife self_;
  mutable base::Mutex mutex_;
  OwnerTable owners_ STITCH_GUARDED_BY(mutex_);
  HolderTable holders_ STITCH_GUARDED_BY(mutex_);
  std::unordered_map<WorkerLife, PeerState, WorkerLifeHash> peers_ STITCH_GUARDED_BY(mutex_);
  std::unordered_map<WorkerLife, std::uint64_t, WorkerLifeHash> next_k_ STITCH_GUARDED_BY(mutex_);
  // Lives that this worker cannot reach; those of them that are over are in sweeps_, too.
  std::unordered_map<WorkerLife, Error, WorkerLifeHash> gone_ STITCH_GUARDED_BY(mutex_);
  Sweeps sweeps_ STITCH_GUARDED_BY(mutex_);
  // Who has asked about lives of whose end this worker has not been told yet.
  std::map<WorkerLife, std::set<WorkerLife>> asked_early_ STITCH_GUARDED_BY(mutex_);
  // By peer, the lives that it has named and that were not known here then.
  std::map<WorkerLife, std::set<WorkerLife>> unheard_ STITCH_GUARDED_BY(mutex_);
  std::optional<Error> leaving_ STITCH_GUARDED_BY(mutex_);
  World world_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::rref
