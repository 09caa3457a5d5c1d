#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stitch/base/bytes.h"
#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/rref/lifetime/effects.h"
#include "stitch/rref/lifetime/holder_table.h"
#include "stitch/rref/lifetime/ledger.h"
#include "stitch/rref/lifetime/owner_table.h"
#include "stitch/rref/lifetime/rref_id.h"

namespace stitch::rref {

// One reference inside a message, as it stands in the message's header: named once however many
// copies the body holds.
struct Carried {
  RRefId id;
  std::uint64_t token = 0;  // settles the sender's pin; unique among what this sender's life sends
                            // to this receiver's life
  bool pinned = false;      // false: nothing to settle (a lost reference, or a message to oneself)
  bool lost = false;        // the sender's handle is lost
  bool created = false;     // the sender knows that the object has been created
};

// One worker's whole part in the lifetime protocol (PROTOCOL.md): both tables and a ledger per
// peer. No I/O and no threads. Thread contract: every method from any thread; one lock inside,
// never held while anything of the caller runs. Whatever an event asks for comes back in a Todo, to
// be done by the caller without a lock of its own.
class Lifetime {
 public:
  explicit Lifetime(WorkerLife self) : self_(self), owners_(self) {}
  // Only lives for which `in_world` is true may create objects here, see check(). Called under the
  // lock: it must not call back. Before the first message.
  void set_world(std::function<bool(const WorkerLife&)> in_world);

  struct Todo {
    std::vector<std::shared_ptr<void>> destroy;         // let go of these where user code may run
    std::vector<Effects::Run> run;                      // call these; may be user code
    std::vector<std::pair<WorkerLife, Urgency>> flush;  // send encode_ledger() to these
    bool kept = false;                                  // call register_kept() in a moment
    std::optional<Error> broken;  // the peer broke the protocol: end its connection with this
  };
  struct Status {
    bool owned = false;  // an Entry of ours
    bool confirmed =
        false;  // the owner is known to know: owned, registered, or known to be created
    std::optional<Error> lost;
  };
  struct Counts {
    OwnerTable::Counts owned;
    HolderTable::Counts held;
    std::size_t entries = 0, holds = 0, tokens = 0;
    std::size_t ledger_unsent = 0, ledger_unacknowledged = 0;
  };

  // --- objects ---
  // Owns an object here; null: its creation, here, is under way until resolve(). One local
  // reference.
  [[nodiscard]] RRefId add_object(std::shared_ptr<void> object);
  // A new id for an object to be made at `owner`, another worker. One local reference; to be
  // followed by answered(), or never_asked() when the request certainly did not leave.
  [[nodiscard]] RRefId begin_create(const WorkerLife& owner);
  [[nodiscard]] Todo answered(const RRefId& id, const std::optional<Error>& failure);
  [[nodiscard]] Todo never_asked(const RRefId& id, const Error& why);
  // A request to create arrived. False: it was here before. Throws Error(protocol): for another
  // owner, or after its end.
  [[nodiscard]] bool create(const RRefId& id, const WorkerLife& creator);
  // The creation here ended. The first outcome stands; a late object is destroyed.
  [[nodiscard]] Todo resolve(const RRefId& id, std::shared_ptr<void> object,
                             const std::optional<Error>& failure);
  // Whether the outcome of the creation is known here, or will be: at the owner, and at the creator
  // as long as it has not let go of the object in between. Else only the owner can tell.
  [[nodiscard]] bool hears_of_creation(const RRefId& id) const;
  // Runs `waiter` when the creation has ended. REQUIRES: hears_of_creation().
  [[nodiscard]] Todo when_created(const RRefId& id, Waiter waiter);

  // --- handles of this process ---
  void add_local(const RRefId& id);
  [[nodiscard]] Todo drop_local(const RRefId& id);
  [[nodiscard]] Status status(const RRefId& id) const;
  [[nodiscard]] std::optional<OwnerTable::Status> owned(const RRefId& id) const;
  [[nodiscard]] std::vector<RRefId> owned_ids() const;

  // --- messages ---
  // Before the bytes of a message leave. REQUIRES: a local reference.
  [[nodiscard]] Carried pin(const RRefId& id, const WorkerLife& receiver);
  // The message certainly never reached `receiver`.
  [[nodiscard]] Todo unpin(const Carried& carried, const WorkerLife& receiver);
  // Throws Error(protocol) when `id`, as a peer names it, cannot be the name of an object: this
  // worker is its creator and never asked for it, or its owner and the creator is not in this
  // world: it would be waited for for ever.
  void check(const RRefId& id) const;
  // A message arrived, before user code sees it. The message holds a local reference until
  // message_done(). `lost`: the error of a reference that was lost at its sender.
  [[nodiscard]] Todo receive(const Carried& carried, const WorkerLife& sender,
                             const std::optional<Error>& lost = std::nullopt);
  // The message is dealt with: its arguments are gone and its reply is about to leave, or nothing
  // more will come of it.
  [[nodiscard]] Todo message_done(const RRefId& id, const WorkerLife& sender);
  // Some time after an event said `kept`: registers the borrows that still last.
  [[nodiscard]] Todo register_kept();

  // --- ledgers ---
  // Appends the ledger frame that is due to `peer`; false when there is none.
  [[nodiscard]] bool encode_ledger(const WorkerLife& peer, base::Bytes& out);
  [[nodiscard]] Todo accept_ledger(const WorkerLife& peer, std::span<const std::byte> frame);
  // At regular times: resends what got no acknowledgement, registers old borrows.
  [[nodiscard]] Todo tick();
  // A connection to the same life of `peer` was made anew.
  [[nodiscard]] Todo reconnected(const WorkerLife& peer);

  // --- ends ---
  // That life of `peer` is over: what it owns is lost with `why`, what it owed will not come.
  [[nodiscard]] Todo peer_lost(const WorkerLife& peer, const Error& why);
  // This worker is leaving: every handle here is lost with `why`; the ledgers go on until quiet().
  [[nodiscard]] Todo leave(const Error& why);
  // Nothing is held, nothing of ours is unacknowledged.
  [[nodiscard]] bool quiet() const;
  // After leave(): the last objects go too, whoever holds them.
  [[nodiscard]] Todo close();

  [[nodiscard]] Counts counts() const;
  [[nodiscard]] const WorkerLife& self() const noexcept { return self_; }

 private:
  struct Link {
    Ledger ledger;
    std::uint64_t next_token = 0;
    std::map<std::uint64_t, RRefId> tokens;  // sent and not settled
  };

  // Puts the operations into their ledgers, under the same lock that ordered them, and packs up the
  // rest.
  [[nodiscard]] Todo pack(Effects effects) STITCH_REQUIRES(mutex_);
  void drop_pin(const RRefId& id, Effects& effects) STITCH_REQUIRES(mutex_);
  void apply(const LedgerOp& op, const WorkerLife& peer, Link& link, Effects& effects)
      STITCH_REQUIRES(mutex_);
  [[nodiscard]] std::optional<Error> why_lost(const RRefId& id) const STITCH_REQUIRES(mutex_);
  // Whether references to `id` count at its Entry. Those to an object of our own that came as lost
  // before it was asked for count at a Hold, and so do all others until the last of them is gone:
  // each is taken back where it was added.
  [[nodiscard]] bool owned_here(const RRefId& id) const STITCH_REQUIRES(mutex_);
  void check_locked(const RRefId& id) const STITCH_REQUIRES(mutex_);

  const WorkerLife self_;
  mutable base::Mutex mutex_;
  OwnerTable owners_ STITCH_GUARDED_BY(mutex_);
  HolderTable holders_ STITCH_GUARDED_BY(mutex_);
  std::unordered_map<WorkerLife, Link, WorkerLifeHash> links_ STITCH_GUARDED_BY(mutex_);
  std::unordered_map<WorkerLife, std::uint64_t, WorkerLifeHash> next_k_ STITCH_GUARDED_BY(mutex_);
  std::unordered_map<WorkerLife, Error, WorkerLifeHash> gone_ STITCH_GUARDED_BY(mutex_);
  std::optional<Error> leaving_ STITCH_GUARDED_BY(mutex_);
  std::function<bool(const WorkerLife&)> in_world_ STITCH_GUARDED_BY(mutex_);  // empty: all are
};

}  // namespace stitch::rref
