#pragma once

#include <memory>

#include "stitch/rpc/agent/incoming_call.h"
#include "stitch/rpc/message/owned_object.h"
#include "stitch/rref/carried_refs.h"
#include "stitch/rref/rref_agent.h"

namespace stitch::rref {

// Owns objects on behalf of their references and serves the requests about them: to create one, to
// call a method of one, to fetch one, to wait until one exists. A cheap value: copies serve the
// same worker. Thread contract: any thread; no lock is held.
class ObjectServer {
 public:
  explicit ObjectServer(std::shared_ptr<RRefAgent> rrefs) : rrefs_(std::move(rrefs)) {}

  // As Extension::take_over.
  [[nodiscard]] bool take_over(const std::shared_ptr<rpc::IncomingCall>& call) const;
  // Owns `value` here; returns the first handle on it. Throws Error(shutting_down) after stop().
  [[nodiscard]] HandlePtr own(rpc::OwnedObject value) const;

 private:
  [[nodiscard]] std::shared_ptr<void> box(rpc::OwnedObject value) const;
  // `target`: the object that the request is about, or null.
  void serve(const std::shared_ptr<rpc::IncomingCall>& call, const IncomingRefs& refs,
             const rpc::OwnedObject* target) const;
  void serve_creation(const std::shared_ptr<rpc::IncomingCall>& call, const RRefId& id,
                      void* object) const;

  std::shared_ptr<RRefAgent> rrefs_;
};

}  // namespace stitch::rref
