#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/rref/lifetime/effects.h"
#include "stitch/rref/lifetime/rref_id.h"

namespace stitch::rref {

// What this worker knows of other workers' objects: one Hold per object, however many handles there
// are. A Hold is alive while it has local references or pins. PROTOCOL.md has the rules; the
// numbers G1.. are its guarantees. Pure state, no I/O, not thread-safe: whoever owns it locks. What
// an event asks for is added to `effects`.
class HolderTable {
 public:
  enum class State : std::uint8_t {
    creating,     // we asked the owner to make it; the answer is out
    borrowed,     // lives on the pins of those who sent it; the owner has not heard of us
    registering,  // REG is in the ledger
    registered,   // the owner counts us as a holder
    lost,         // the owner's life is over: every use gives `error`
  };
  // How an object arrived in a message.
  struct Arrival {
    WorkerLife sender;
    std::uint64_t token = 0;
    bool pinned = true;  // false: the sender's handle was lost already, there is nothing to settle
    bool created = false;  // the sender knows that it has been created
  };
  struct Counts {
    std::size_t creating = 0, borrowed = 0, registering = 0, registered = 0, lost = 0, pins = 0,
                creditors = 0;
    std::uint64_t registrations = 0;  // REGs so far
  };
  struct Status {
    State state = State::lost;
    bool created = false;
    std::optional<Error> error;  // why it is lost, or why its creation failed
  };

  // A new Hold in Creating with one local reference. REQUIRES: `id` is new.
  void begin_create(const RRefId& id);
  // The owner answered: the object is there, or its creation failed (the Hold stays registered: the
  // owner keeps the outcome).
  void answered(const RRefId& id, const std::optional<Error>& failure, Effects& effects);
  // The request to create certainly never reached the owner.
  void never_asked(const RRefId& id, const Error& why, Effects& effects);

  // One more handle or message that refers to it. REQUIRES: the Hold exists and has a local
  // reference already.
  void add_local(const RRefId& id);
  void drop_local(const RRefId& id, Effects& effects);

  // A message that carries it is about to leave. False when it is lost: it travels without a pin.
  // REQUIRES: the Hold has a local reference (G1, case "send").
  [[nodiscard]] bool pin(const RRefId& id);
  void unpin(const RRefId& id, Effects& effects);

  // It arrived in a message: adds a local reference, which the message holds until message_done().
  // `still_registered`: a DROP of it was taken back, so the owner still counts us.
  // `lost`: why it can only be lost, if that is known.
  void receive(const RRefId& id, const Arrival& arrival, bool still_registered,
               const std::optional<Error>& lost, Effects& effects);
  // That message has been dealt with: drops its reference. What is still in use then is kept, and
  // registered by register_kept() if that lasts, unless other messages that brought it are still
  // being dealt with.
  void message_done(const RRefId& id, Effects& effects);
  // Registers what has been kept since before the previous call. To be called, some time later,
  // whenever an event has set Effects::kept: what is used a moment longer than its message (a
  // handler's result that is on its way back, say) needs no word to the owner.
  void register_kept(Effects& effects);
  // To be called at regular times: registers what was borrowed before the previous tick, which cuts
  // borrow cycles (G5).
  void tick(Effects& effects);
  // The ledger says that the owner has applied our REG.
  void registered(const RRefId& id, Effects& effects);
  // That life of the owner is over.
  void owner_lost(const WorkerLife& owner, const Error& why, Effects& effects);
  // This worker is leaving: no handle counts any more; every Hold ends as its state allows, pins
  // and answers awaited.
  void abandon(Effects& effects);
  // Whether the owner's answer to its creation is known here or will be: false for a Hold made anew
  // after its creator had let go of the first.
  [[nodiscard]] bool hears_of_creation(const RRefId& id) const;
  // Runs `waiter` when the owner has answered the creation; at once when it has. REQUIRES:
  // hears_of_creation().
  void when_answered(const RRefId& id, Waiter waiter, Effects& effects);

  [[nodiscard]] std::optional<Status> status(const RRefId& id) const;
  [[nodiscard]] bool contains(const RRefId& id) const { return holds_.contains(id); }
  [[nodiscard]] std::size_t size() const noexcept { return holds_.size(); }
  [[nodiscard]] Counts counts() const;

 private:
  struct Creditor {
    WorkerLife sender;
    std::uint64_t token;
  };
  struct Hold {
    State state = State::borrowed;
    bool created = false;
    bool answered = false;       // `error` is the outcome of its creation, or there is none
    bool old = false;            // borrowed since before the previous tick
    bool kept_before = false;    // in kept_ since before the previous register_kept()
    std::uint32_t local = 0;     // handles and messages being dealt with
    std::uint32_t arriving = 0;  // of these, messages being dealt with
    std::uint32_t pins = 0;      // messages sent that carry it and are not settled
    std::vector<Creditor> creditors;
    std::optional<Error> error;
    std::vector<Waiter> waiters;
    [[nodiscard]] bool alive() const noexcept { return local > 0 || pins > 0; }
  };
  using Map = std::unordered_map<RRefId, Hold, RRefIdHash>;

  [[nodiscard]] Hold& at(const RRefId& id);
  static void settle(Hold& hold, Effects& effects);
  void no_longer_borrowed(const RRefId& id);
  static void release_waiters(Hold& hold, Effects& effects);
  void start_registering(const RRefId& id, Hold& hold, Effects& effects);
  void become_registered(Map::iterator at, Effects& effects);
  void lose(Map::iterator at, const Error& why, Effects& effects);
  // Lets a Hold that is no longer alive go, as its state allows. The iterator may be dead
  // afterwards.
  void bury(Map::iterator at, Effects& effects);

  Map holds_;
  std::unordered_set<RRefId, RRefIdHash> borrowed_;  // the Holds in State::borrowed
  std::unordered_set<RRefId, RRefIdHash> kept_;      // of these, those that outlived their messages
  std::uint64_t registrations_ = 0;
};

}  // namespace stitch::rref
