#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/base/reserve.h"
#include "stitch/rref/lifetime/ledger.h"
#include "stitch/rref/lifetime/rref_id.h"
#include "stitch/rref/lifetime/waiter.h"

namespace stitch::rref {

// A few short-lived things; most events have none or one.
template <class T>
using EffectList = std::vector<T, base::ReservedAllocator<T>>;

// What lasts: of the heap, or of the reserve.
template <class Key, class Value, class Hash>
using ReservedMap =
    std::unordered_map<Key, Value, Hash, std::equal_to<>,
                       base::ReservedAllocator<std::pair<const Key, Value>, std::allocator>>;
template <class Key, class Hash>
using ReservedSet =
    std::unordered_set<Key, Hash, std::equal_to<>, base::ReservedAllocator<Key, std::allocator>>;

// What an event of the lifetime protocol leaves to be done once the lock is released, because
// waiters and destructors are user code and sending calls the transport.
struct Effects {
  struct Run {
    Waiter waiter;
    std::shared_ptr<void> object;
    std::optional<Error> failure;
    void operator()() { waiter(object, failure); }
  };
  EffectList<std::shared_ptr<void>> destroy;         // unreferenced objects: release them
  EffectList<Run> run;                               // waiters to call
  EffectList<std::pair<WorkerLife, Urgency>> flush;  // send Lifetime::encode_ledger() to these
  bool kept = false;            // a borrow outlives its message: call register_kept() later
  std::optional<Error> broken;  // the peer broke the protocol: close its connection with this error
};

// What an event of one table asks for. Lifetime queues the operations in the ledgers, under the
// lock that ordered them, and returns the rest to its caller.
struct TableEffects : Effects {
  struct Op {
    WorkerLife to;
    LedgerOp op;
  };
  EffectList<Op> ops;  // to be queued in this order
};

}  // namespace stitch::rref
