#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/base/unique_function.h"
#include "stitch/rref/lifetime/ledger.h"
#include "stitch/rref/lifetime/rref_id.h"

namespace stitch::rref {

// A callback of the end of a creation, called once with the object or with the error. User code may
// run in it: no lock is held.
using Waiter = base::UniqueFunction<void(const std::shared_ptr<void>& object,
                                         const std::optional<Error>& failure)>;

// The actions of an event of the lifetime protocol for after the lock: waiters and destructors are
// user code, and sending calls the transport.
struct Effects {
  struct Run {
    Waiter waiter;
    std::shared_ptr<void> object;
    std::optional<Error> failure;
    void operator()() { waiter(object, failure); }
  };
  std::vector<std::shared_ptr<void>> destroy;  // unreferenced objects: release them
  std::vector<Run> run;                        // waiters to call
  bool flush = false;           // ledgers have unsent operations: send their frames soon
  bool kept = false;            // a borrow outlives its message: call register_kept() later
  std::optional<Error> broken;  // the peer broke the protocol: close its connection with this error
};

// The effects of an event of one table. Lifetime queues the operations in the ledgers, under the
// lock that ordered them, and returns the rest to its caller.
struct TableEffects : Effects {
  struct Op {
    WorkerLife to;
    LedgerOp op;
  };
  std::vector<Op> ops;  // to be queued in this order
};

}  // namespace stitch::rref
