#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/base/recycler.h"
#include "stitch/rref/lifetime/effects.h"
#include "stitch/rref/lifetime/rref_id.h"

namespace stitch::rref {

// The references of this worker to objects of other workers: one Hold per object, for all its
// handles. A Hold is alive while it has local references or pins. PROTOCOL.md has the rules and the
// guarantees G1.. . Pure state of a Lifetime, which locks it; events add their effects to
// `effects`. Not thread-safe.
class HolderTable {
 public:
  enum class State : std::uint8_t {
    creating,     // the owner was asked to create it and has not answered
    borrowed,     // kept alive by its senders' pins; the owner does not know of this worker
    registering,  // REG is in the ledger
    registered,   // the owner counts this worker as a holder
    lost,         // the owner's life is over: every use gives `error`
  };
  static constexpr std::size_t kStates = static_cast<std::size_t>(State::lost) + 1;
  // A reference as a message has brought it.
  struct Arrival {
    WorkerLife sender;
    std::uint64_t token = 0;
    bool pinned = true;    // false: the sender's handle was lost, no token is to be settled
    bool created = false;  // the sender knows that it has been created
  };
  struct Counts {
    std::array<std::size_t, kStates> holds{};  // by State
    std::size_t creditors = 0;
    std::uint64_t registrations = 0;  // REGs so far
    [[nodiscard]] std::size_t in(State state) const noexcept {
      return holds[static_cast<std::size_t>(state)];
    }
  };
  struct Status {
    State state = State::lost;
    bool created = false;
    std::optional<Error> error;  // of the loss, or of the creation
    std::uint32_t local = 0;
    std::uint32_t pins = 0;
    const std::string* made_by = nullptr;         // as given to begin_create()
    std::chrono::steady_clock::time_point since;  // the Hold's beginning
  };

  HolderTable() { holds_.max_load_factor(2); }

  // Adds a Hold in State::creating with one local reference. REQUIRES: `id` is new. `made_by`, the
  // name of the creating function or null, is not copied; lists show it.
  void begin_create(const RRefId& id, const std::string* made_by = nullptr);
  // The owner has answered the creation. The Hold stays registered also after a failure, because
  // the owner keeps the outcome.
  void answered(const RRefId& id, const std::optional<Error>& failure, TableEffects& effects);
  // The request to create certainly never reached the owner. The owner is told where other workers
  // may know of the object, and again when this Hold ends.
  void create_not_sent(const RRefId& id, const Error& why, TableEffects& effects);

  // One more handle or message refers to the object. REQUIRES: the Hold has a local reference.
  void add_local(const RRefId& id);
  void drop_local(const RRefId& id, TableEffects& effects);

  // A message with the reference is about to leave. False for a lost Hold, whose references are
  // sent without pins. REQUIRES: the Hold has a local reference (G1, case "send").
  [[nodiscard]] bool pin(const RRefId& id);
  void unpin(const RRefId& id, TableEffects& effects);

  // The reference has arrived in a message: adds a local reference, which the message has until
  // message_done(). `lost`: the error of a lost reference.
  void receive(const RRefId& id, const Arrival& arrival, const std::optional<Error>& lost,
               TableEffects& effects);
  // The message has been processed: drops its reference. register_kept() registers a borrowed Hold
  // that stays in use, unless other messages with the reference are still being processed.
  void message_done(const RRefId& id, TableEffects& effects);
  // Registers the Holds that were kept before the previous call. The caller waits a moment after
  // Effects::kept, so a reference that ends shortly after its message (a result on its way back)
  // costs no message to the owner.
  void register_kept(TableEffects& effects);
  // The owner's answer to REG: this worker is a holder.
  void registered(const RRefId& id, TableEffects& effects);
  // This worker cannot reach that life of the owner any more: Holds of its objects are lost. Holds
  // with pins keep their creditors, because the owner may go on for other workers.
  void owner_lost(const WorkerLife& owner, const Error& why, TableEffects& effects);
  // The owner's other answer to REG: there is no such object.
  void gone(const RRefId& id, const Error& why, TableEffects& effects);
  // That life of the owner is over, after owner_lost(): Holds of its objects settle all creditors.
  void owner_over(const WorkerLife& owner, TableEffects& effects);
  // A lender's life is over: registers the Holds that were borrowed from it.
  void register_borrowed_from(const WorkerLife& lender, TableEffects& effects);
  // This worker is leaving: handles no longer count. Every Hold ends as its state allows, when its
  // pins are settled and its creation is answered.
  void drop_all_handles(TableEffects& effects);
  // Whether the owner's answer to the creation is or will be known here. False for a Hold that came
  // back in a message after this worker, the creator, had dropped its first one.
  [[nodiscard]] bool tracks_creation(const RRefId& id) const;
  // Runs `waiter` after the owner's answer to the creation, or now if that has come. REQUIRES:
  // tracks_creation().
  void when_answered(const RRefId& id, Waiter waiter, TableEffects& effects);

  [[nodiscard]] std::optional<Status> status(const RRefId& id) const;
  // Of all Holds.
  [[nodiscard]] std::vector<std::pair<RRefId, Status>> list() const;
  [[nodiscard]] bool contains(const RRefId& id) const { return holds_.contains(id); }
  // Whether this worker knows that the object has been created. REQUIRES: contains(id).
  [[nodiscard]] bool created(const RRefId& id) const { return holds_.at(id).created; }
  [[nodiscard]] std::size_t size() const noexcept { return holds_.size(); }
  [[nodiscard]] Counts counts() const;

 private:
  struct Creditor {
    WorkerLife sender;
    std::uint64_t token;
  };
  // The fields that few Holds need, so that a million Holds do not pay for them.
  struct Rare {
    std::vector<Creditor> creditors;
    std::optional<Error> error;
    std::vector<Waiter> waiters;
    [[nodiscard]] static void* operator new(std::size_t bytes) {
      return base::take_recycled(bytes);
    }
    static void operator delete(void* at, std::size_t bytes) noexcept { base::recycle(at, bytes); }
  };
  using Clock = std::chrono::steady_clock;
  // A moment, to a 64th of a second, for two years after the first.
  class Moment {
   public:
    [[nodiscard]] static Moment now() { return Moment(Clock::now()); }
    [[nodiscard]] Clock::time_point time() const { return begin() + Ticks(ticks_); }

   private:
    using Ticks = std::chrono::duration<std::uint32_t, std::ratio<1, 64>>;
    explicit Moment(Clock::time_point time)
        : ticks_(std::chrono::duration_cast<Ticks>(time - begin()).count()) {}
    [[nodiscard]] static Clock::time_point begin() {
      static const Clock::time_point first = Clock::now();
      return first;
    }
    std::uint32_t ticks_;
  };
  // A worker may have millions of Holds: see the assertion on the size.
  struct Hold {
    State state : 3 = State::borrowed;
    bool created : 1 = false;
    bool answered : 1 = false;     // the creation has ended, perhaps with `error`
    bool told : 1 = false;         // sent in a message while creating: other workers may know it
    bool kept_before : 1 = false;  // in kept_ since before the previous register_kept()
    // Messages being processed that carry the reference; 2^24 of them would take 16 GiB.
    std::uint32_t arriving : 24 = 0;
    std::uint32_t local = 0;  // these, and handles
    std::uint32_t pins = 0;   // messages sent that carry it and are not settled
    Moment since = Moment::now();
    std::unique_ptr<Rare> rare;
    const std::string* made_by = nullptr;
    [[nodiscard]] bool alive() const noexcept { return local > 0 || pins > 0; }
    [[nodiscard]] Rare& more() {
      if (!rare) rare = std::make_unique<Rare>();
      return *rare;
    }
    [[nodiscard]] std::optional<Error> error() const { return rare ? rare->error : std::nullopt; }
    void set_error(const std::optional<Error>& why) {
      if (why || rare) more().error = why;
    }
  };
  static_assert(sizeof(Hold) == 32);
  using Map = std::unordered_map<RRefId, Hold, RRefIdHash>;

  [[nodiscard]] Hold& at(const RRefId& id);
  [[nodiscard]] static Status status_of(const Hold& hold);
  static void settle(Hold& hold, TableEffects& effects);
  static void release_waiters(Hold& hold, TableEffects& effects);
  void start_registering(const RRefId& id, Hold& hold, TableEffects& effects);
  void become_registered(Map::iterator at, TableEffects& effects);
  void lose(Map::iterator at, const Error& why, TableEffects& effects);
  // Ends a Hold that is no longer alive, as its state allows. Invalidates `at` if it erases it.
  void erase_if_unused(Map::iterator at, TableEffects& effects);

  Map holds_;
  std::unordered_set<RRefId, RRefIdHash> kept_;  // the borrowed Holds that outlived their messages
  std::uint64_t registrations_ = 0;
};

}  // namespace stitch::rref
