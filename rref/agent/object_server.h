#pragma once

#include <memory>
#include <utility>

#include "stitch/rpc/calls/incoming_call.h"
#include "stitch/rpc/message/sendable.h"
#include "stitch/rref/agent/carried_refs.h"
#include "stitch/rref/agent/rref_agent.h"

namespace stitch::rref {

// An object with what its owner needs to serve it.
struct OwnedBox : rpc::OwnedObject {
  std::size_t bytes = 0;             // when it was made, as far as it is known
  std::unique_ptr<TurnQueue> turns;  // null: its methods may run concurrently
};

// What a request about an object is told if the creation of the object failed.
[[nodiscard]] Error not_created(const Error& failure);

// Owns objects on behalf of their references. A cheap value: copies serve the same worker. Thread
// contract: any thread; no lock is held.
class ObjectServer {
 public:
  explicit ObjectServer(std::shared_ptr<RRefAgent> rrefs) : rrefs_(std::move(rrefs)) {}

  // As Extension::take_over: serves requests about objects.
  [[nodiscard]] bool take_over(const std::shared_ptr<rpc::IncomingCall>& call) const;
  // Owns `value` here; returns the first handle on it. Throws Error(shutting_down) after stop().
  [[nodiscard]] HandlePtr own(rpc::OwnedObject value) const;

 private:
  std::shared_ptr<RRefAgent> rrefs_;
};

}  // namespace stitch::rref
