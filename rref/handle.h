#pragma once

#include <memory>

#include "stitch/rpc/message/worker_info.h"
#include "stitch/rref/lifetime/rref_id.h"

namespace stitch::rref {

class RRefAgent;

// What the copies of one RRef in a process share: one local reference of the lifetime protocol,
// given back when the last copy goes. Copying is an atomic increment and nothing else. May outlive
// its worker; it is lost then. Thread contract: constant after construction; any thread may drop
// the last copy.
struct Handle : std::enable_shared_from_this<Handle> {
  Handle(std::shared_ptr<RRefAgent> agent, const RRefId& id, WorkerInfo owner)
      : rrefs(std::move(agent)), id(id), owner(std::move(owner)) {}
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  const std::shared_ptr<RRefAgent> rrefs;
  const RRefId id;
  const WorkerInfo owner;
};
using HandlePtr = std::shared_ptr<const Handle>;

}  // namespace stitch::rref
