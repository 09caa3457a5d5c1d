#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/base/unique_function.h"
#include "stitch/rref/lifetime/ledger.h"
#include "stitch/rref/lifetime/rref_id.h"

namespace stitch::rref {

// Who waits for an object to be created: gets the object, which lives at least as long as the copy
// it keeps, or the error that its creation ended with.
using Waiter = base::UniqueFunction<void(const std::shared_ptr<void>& object,
                                         const std::optional<Error>& failure)>;

// What an event of the lifetime protocol asks for. The tables only collect it, under their lock;
// their user does it afterwards, without the lock, because waiters and destructors are user code.
struct Effects {
  struct Op {
    WorkerLife to;
    LedgerOp op;
  };
  struct Run {
    Waiter waiter;
    std::shared_ptr<void> object;
    std::optional<Error> failure;
    void operator()() { waiter(object, failure); }
  };
  std::vector<Op> ops;                         // to be queued in this order
  std::vector<std::shared_ptr<void>> destroy;  // objects nobody refers to any more
  std::vector<Run> run;                        // waiters whose time has come
  bool kept = false;  // a borrow outlives its message: HolderTable::register_kept() is to come
};

}  // namespace stitch::rref
