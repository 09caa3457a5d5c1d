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

// One reference inside a message, as the message's section has it: once per object, for all copies
// in the body.
struct CarriedRef {
  RRefId id;
  std::uint64_t token = 0;  // settles the sender's pin; unique among what this sender's life sends
                            // to this receiver's life
  bool pinned = false;      // false: nothing to settle (a lost reference, or a message to oneself)
  bool lost = false;        // the sender's handle is lost
  bool created = false;     // the sender knows that the object has been created
};

// One object that a worker owns, or refers to: one of the two fields is set.
struct ListedRef {
  RRefId id;
  std::optional<OwnerTable::Status> owned;
  std::optional<HolderTable::Status> held;
};

// One worker's part in the lifetime protocol (PROTOCOL.md): both tables and one ledger per peer. No
// I/O and no threads. Owned by RRefAgent, or by a simulation. Thread contract: every method from
// any thread; one internal lock, which is never held while the caller's code runs. Events return
// Effects, which the caller carries out while it holds no lock.
class Lifetime {
 public:
  // `max_unrequested` as for OwnerTable.
  explicit Lifetime(WorkerLife self, std::size_t max_unrequested = OwnerTable::kMaxUnrequested)
      : self_(self), owners_(self, max_unrequested) {}
  // The membership of the world, as it is known here. The functions run under the lock and must not
  // call back.
  struct World {
    // Whether this worker knows that life, alive or over; member_over() follows the end of a known
    // life. Empty: all lives are known, and a peer's word of an end is the end.
    std::function<bool(const WorkerLife&)> contains;
    // The present life of every known worker; a life counts as alive until member_over(). Empty:
    // the world has no other workers.
    std::function<std::vector<WorkerLife>()> live;
    // The error of objects whose owner's life is over. Empty: the text names the life by numbers.
    std::function<Error(const WorkerLife&)> gone;
  };
  // REQUIRES: called before the first message.
  void set_world(World world);

  struct Status {
    bool owned = false;      // this worker owns the object
    bool confirmed = false;  // the owner knows of it, for certain: owned, registered, or created
    std::optional<Error> lost;
  };
  struct Counts {
    OwnerTable::Counts owned;
    HolderTable::Counts held;
    std::size_t entries = 0, holds = 0, tokens = 0;
    std::size_t ledger_unsent = 0;
    std::size_t unswept = 0;  // lives that are over and not swept yet
  };

  // --- objects ---
  // Owns an object here, with one local reference. A null object is pending until resolve().
  // `made_by`, the name of the function that makes it or null, is not copied; for list().
  [[nodiscard]] RRefId add_object(std::shared_ptr<void> object,
                                  const std::string* made_by = nullptr);
  // The id of a new object that `owner`, another worker, is to create, with one local reference.
  // Either answered() follows, or create_not_sent() for a request that certainly did not leave.
  // `made_by` as for add_object().
  [[nodiscard]] RRefId begin_create(const WorkerLife& owner, const std::string* made_by = nullptr);
  [[nodiscard]] Effects answered(const RRefId& id, const std::optional<Error>& failure);
  [[nodiscard]] Effects create_not_sent(const RRefId& id, const Error& why);
  // A request to create has arrived. False for a duplicate. Throws Error(protocol) for another
  // owner's object or one that was deleted, and the end of a creator whose life is over. `made_by`
  // as for add_object().
  [[nodiscard]] bool create(const RRefId& id, const WorkerLife& creator,
                            const std::string* made_by = nullptr);
  // The creation here has ended. The first outcome counts; the object of a later one is destroyed.
  [[nodiscard]] Effects resolve(const RRefId& id, std::shared_ptr<void> object,
                                const std::optional<Error>& failure);
  // Whether the outcome of the creation is or will be known here: at the owner, and at the creator
  // until it drops its last reference. Other workers have to ask the owner.
  [[nodiscard]] bool tracks_creation(const RRefId& id) const;
  // Runs `waiter` when the creation has ended. REQUIRES: tracks_creation().
  [[nodiscard]] Effects when_created(const RRefId& id, Waiter waiter);
  // status(), tracks_creation() and when_created() in one step: the error of a lost reference, else
  // whether the creation is tracked here. Takes `waiter` only where it is.
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
  // Whether this worker has an entry for the object as its owner.
  [[nodiscard]] bool owns(const RRefId& id) const;

  // --- messages ---
  // Pins the object for a message whose bytes have not left. REQUIRES: a local reference.
  [[nodiscard]] CarriedRef pin(const RRefId& id, const WorkerLife& receiver);
  // The message certainly never reached `receiver`.
  [[nodiscard]] Effects unpin(const CarriedRef& carried, const WorkerLife& receiver);
  // A message has arrived that user code has not seen. The message has a local reference until
  // message_done(). `lost`: the error of a reference that was lost at its sender.
  [[nodiscard]] Effects receive(const CarriedRef& carried, const WorkerLife& sender,
                                const std::optional<Error>& lost = std::nullopt);
  // The message has been processed: its arguments are destroyed, and its reply, if any, is about to
  // leave.
  [[nodiscard]] Effects message_done(const RRefId& id, const WorkerLife& sender);
  // Registers the borrows that still exist; called a moment after Effects::kept.
  [[nodiscard]] Effects register_kept();

  // --- ledgers ---
  // The peers whose ledgers have unsent operations.
  [[nodiscard]] std::vector<WorkerLife> due() const;
  // Appends the next ledger frame to `peer`; false for an empty ledger. REQUIRES: one thread at a
  // time calls this for a peer, and sends the frames in this order.
  [[nodiscard]] bool encode_ledger(const WorkerLife& peer, base::Bytes& out);
  [[nodiscard]] Effects accept_ledger(const WorkerLife& peer, std::span<const std::byte> frame);

  // --- ends ---
  // This worker cannot reach that life any more: references to its objects are lost here with
  // `why`. The peer's own holds, and pins towards the peer, stay.
  [[nodiscard]] Effects peer_lost(const WorkerLife& peer, const Error& why);
  // That life is over for the world, dead or left: as peer_lost(), and a sweep begins, which drops
  // the peer's holds, and pins towards it, when no other worker depends on them.
  [[nodiscard]] Effects member_over(const WorkerLife& peer, const Error& why);
  // Whether this worker knows that the life is over: references that it sends are lost.
  [[nodiscard]] bool over(const WorkerLife& life) const;
  // Whether references to the object are lost here.
  [[nodiscard]] bool lost(const RRefId& id) const;
  // A new life is a member of the world.
  [[nodiscard]] Effects member_joined(const WorkerLife& life);
  // This worker is leaving: all its handles are lost with `why`. Ledgers work until close().
  [[nodiscard]] Effects leave(const Error& why);
  // Releases the remaining objects, referenced or not; after leave().
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
  // The next id of an object at `owner`. Skips an id that a peer has made up and that has a Hold.
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
  // Whether that life never was known here and never will be: a later life of its worker is known.
  [[nodiscard]] bool passed(const WorkerLife& life) const STITCH_REQUIRES(mutex_);
  // `peer` asks about an unknown life. False when it has asked about too many unknown lives.
  [[nodiscard]] bool note_unheard(const WorkerLife& life, const WorkerLife& peer)
      STITCH_REQUIRES(mutex_);
  // That life is or was a member: its end answers questions about it later. Questions about earlier
  // lives of the worker, whose ends will not be reported here, are answered now.
  void hear_of(const WorkerLife& life, TableEffects& effects) STITCH_REQUIRES(mutex_);
  // Sends CLEAN to all workers that have asked about that life.
  void answer_early(const WorkerLife& over, TableEffects& effects) STITCH_REQUIRES(mutex_);
  void ask(const std::vector<Sweeps::Question>& questions, TableEffects& effects)
      STITCH_REQUIRES(mutex_);
  void start_sweeps(TableEffects& effects) STITCH_REQUIRES(mutex_);
  void finish_sweeps(TableEffects& effects) STITCH_REQUIRES(mutex_);
  // Drops the pins of objects of `owner` in messages to `receiver`, which will not settle them.
  void void_pins(const WorkerLife& receiver, const WorkerLife& owner, TableEffects& effects)
      STITCH_REQUIRES(mutex_);
  [[nodiscard]] std::vector<WorkerLife> live() const STITCH_REQUIRES(mutex_);
  [[nodiscard]] Error error_of_ended(const WorkerLife& life) const STITCH_REQUIRES(mutex_);
  [[nodiscard]] std::optional<Error> loss_of(const RRefId& id) const STITCH_REQUIRES(mutex_);
  // Whether an OwnedEntry counts the references to `id`. A Hold counts references to an object of
  // this worker that arrived as lost before its creation, and all later references while that Hold
  // exists, so a reference is dropped from the table that it was added to.
  [[nodiscard]] bool owned_here(const RRefId& id) const STITCH_REQUIRES(mutex_);
  // The error of an object that no request will create here, because its creator is lost or was
  // over from the beginning. Nothing for an object that is here, or may come.
  [[nodiscard]] std::optional<Error> why_never(const RRefId& id) const STITCH_REQUIRES(mutex_);

  const WorkerLife self_;
  mutable base::Mutex mutex_;
  OwnerTable owners_ STITCH_GUARDED_BY(mutex_);
  HolderTable holders_ STITCH_GUARDED_BY(mutex_);
  std::unordered_map<WorkerLife, PeerState, WorkerLifeHash> peers_ STITCH_GUARDED_BY(mutex_);
  std::unordered_map<WorkerLife, std::uint64_t, WorkerLifeHash> next_k_ STITCH_GUARDED_BY(mutex_);
  // Lives that this worker cannot reach; lives that are over are in sweeps_, too.
  std::unordered_map<WorkerLife, Error, WorkerLifeHash> gone_ STITCH_GUARDED_BY(mutex_);
  Sweeps sweeps_ STITCH_GUARDED_BY(mutex_);
  // By life whose end this worker does not know, the workers that have asked about it.
  std::map<WorkerLife, std::set<WorkerLife>> asked_early_ STITCH_GUARDED_BY(mutex_);
  // By peer, the unknown lives that it has named.
  std::map<WorkerLife, std::set<WorkerLife>> unheard_ STITCH_GUARDED_BY(mutex_);
  std::optional<Error> leaving_ STITCH_GUARDED_BY(mutex_);
  World world_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::rref
