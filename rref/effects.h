#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "stitch/rref/ledger.h"
#include "stitch/rref/rref_id.h"
#include "stitch/transport/error.h"
#include "stitch/transport/unique_function.h"

namespace stitch::rref {

// Who waits for an object to be created: gets the object, or the error that its creation ended
// with.
using Waiter = UniqueFunction<void(void* object, const std::optional<Error>& failure)>;

// What an event of the lifetime protocol asks for. The tables only collect it, under their lock;
// their user does it afterwards, without the lock, because waiters and destructors are user code.
struct Effects {
  struct Op {
    WorkerLife to;
    LedgerOp op;
  };
  struct Run {
    Waiter waiter;
    void* object = nullptr;
    std::optional<Error> failure;
    void operator()() { waiter(object, failure); }
  };
  std::vector<Op> ops;  // to be queued in this order
  std::vector<std::shared_ptr<void>>
      destroy;           // objects nobody refers to any more; the last pointer to each
  std::vector<Run> run;  // waiters whose time has come
};

}  // namespace stitch::rref
