#pragma once

#include <memory>

#include "stitch/rpc/agent/incoming_call.h"
#include "stitch/rpc/message/owned_object.h"
#include "stitch/rref/carried_refs.h"
#include "stitch/rref/rref_agent.h"

namespace stitch::rref {

// What a request about an object is told if the creation of the object failed.
[[nodiscard]] Error not_created(const Error& failure);

// An object with what its owner needs to serve it.
struct OwnedBox : rpc::OwnedObject {
  std::size_t bytes = 0;             // when it was made, as far as it is known
  std::unique_ptr<TurnQueue> turns;  // null: its methods may run concurrently
};

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
  // A request passes these in turn; where it has to wait it is kept, and no thread waits. `target`:
  // the object that the request is about, or null.
  // 1. Waits until its target has been created.
  void find_target(const std::shared_ptr<rpc::IncomingCall>& call, IncomingRefs& refs) const;
  // 2. Waits for its place in the order of its handle, then for its turn at the object.
  void take_turn(const std::shared_ptr<rpc::IncomingCall>& call, IncomingRefs& refs,
                 const OwnedBox* target) const;
  void take_turn_at_object(const std::shared_ptr<rpc::IncomingCall>& call, IncomingRefs& refs,
                           const OwnedBox* target) const;
  // 3. Answers.
  void serve(const std::shared_ptr<rpc::IncomingCall>& call, const IncomingRefs& refs,
             const OwnedBox* target) const;
  void serve_creation(const std::shared_ptr<rpc::IncomingCall>& call, void* object) const;
  // The object of `call` has been created: tells its caller, and those who wait for it.
  void announce(const std::shared_ptr<rpc::IncomingCall>& call, IncomingRefs& refs,
                Effects created) const;

  std::shared_ptr<RRefAgent> rrefs_;
};

}  // namespace stitch::rref
