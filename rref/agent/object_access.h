#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>

#include "stitch/base/unique_function.h"
#include "stitch/rpc/calls.h"
#include "stitch/rpc/future/future.h"
#include "stitch/rref/lifetime/rref_id.h"

namespace stitch::rpc {
class Agent;
class IncomingCall;
}  // namespace stitch::rpc

// What the templates of RRef<T> and remote<>() need of the worker, without its classes.
// Thread contract: every function from any thread; only local_value() waits.
namespace stitch::rref {

class RRefAgent;

// What the copies of one RRef in a process share: one local reference of the lifetime protocol,
// dropped with the last copy. Copying is an atomic increment and nothing else. May outlive its
// worker; it is lost then. Thread contract: constant after own(); any thread may drop the last
// copy.
class Handle {
 public:
  // Without a reference yet: own() follows, or it drops none.
  explicit Handle(std::shared_ptr<RRefAgent> rrefs);
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  // Takes over one local reference to `id`. Made first, it is there when the reference is.
  void own(const RRefId& id) noexcept {
    id_ = id;
    owns_ = true;
  }

  [[nodiscard]] const RRefId& id() const noexcept { return id_; }
  // Lives as long as this.
  [[nodiscard]] const WorkerInfo& owner() const;
  [[nodiscard]] bool is_owner() const noexcept;
  // The owner is known to know of the object.
  [[nodiscard]] bool confirmed_by_owner() const;
  // For this layer: the worker that the handle belongs to.
  [[nodiscard]] const std::shared_ptr<RRefAgent>& rrefs() const noexcept { return rrefs_; }

 private:
  const std::shared_ptr<RRefAgent> rrefs_;
  RRefId id_;
  bool owns_ = false;
};
using HandlePtr = std::shared_ptr<const Handle>;

// Makes every Agent constructed from now on take part in the lifetime protocol; returns the
// extension's index. Including this header is enough.
int register_rref_extension();
inline const int kRRefExtension = register_rref_extension();
[[nodiscard]] std::shared_ptr<RRefAgent> rrefs_of(rpc::Agent& agent);

// How the calls through one RRef are made; shared by its copies.
struct HandleUse {
  std::optional<std::chrono::nanoseconds> timeout;  // none: the worker's
  WhenFull when_full = WhenFull::wait;
};

// ---- requests
// A request about an object, or to create one, that is being written.
struct ObjectRequest {
  std::shared_ptr<rpc::Agent> agent;
  const WorkerInfo* to;  // lives as long as the handle, or the agent
  rpc::Request message;
};
// The agent to use `handle` with, for a call of `function`. Throws why the reference cannot be
// used: a CallRefused if it is lost (a handler's caller gets that error unchanged),
// Error(shutting_down) if its worker has shut down.
[[nodiscard]] std::shared_ptr<rpc::Agent> require_usable(const Handle& handle,
                                                         std::string_view function);
// A request for a method of the object of `handle`. Throws as require_usable().
[[nodiscard]] ObjectRequest begin_method_call(const HandlePtr& handle, const HandleUse& use,
                                              std::uint64_t function_id, std::string_view function);
// A request for a copy of the object, and one that is answered when it has been created.
[[nodiscard]] ObjectRequest begin_fetch(const HandlePtr& handle, const HandleUse& use);
[[nodiscard]] ObjectRequest begin_wait(const HandlePtr& handle, const HandleUse& use,
                                       std::string_view function);
// The argument at that position of a request is the object of `handle`, whose type_id() is `type`.
void write_argument(rpc::OutMessage& request, std::size_t position, const HandlePtr& handle,
                    std::uint64_t type);
// A request to create an object on the target. Throws Error: an unknown worker, `into`, a worker
// that has shut down.
[[nodiscard]] ObjectRequest begin_creation(const std::shared_ptr<rpc::Agent>& agent,
                                           const Target& target, std::uint64_t function_id);
// Sends a request whose result the receiver keeps, and returns the reference to it. `function`, a
// registered name, is not copied. Throws Error if the request cannot be made.
[[nodiscard]] HandlePtr create(ObjectRequest request, const std::string& function,
                               std::optional<std::chrono::nanoseconds> limit);

// ---- objects of this worker
// Owns `value` here; returns the first handle on it. Throws Error(shutting_down) after shutdown.
[[nodiscard]] HandlePtr own(const std::shared_ptr<rpc::Agent>& agent, rpc::OwnedObject value);
// Called once when the creation of an object has ended: with the object, or with the error.
using Created = base::UniqueFunction<void(const std::shared_ptr<void>& object,
                                          const std::optional<Error>& failure)>;
// Calls `waiter` when the creation has ended, at the owner with the rpc::OwnedObject. REQUIRES:
// handle.is_owner(), or Lifetime::tracks_creation().
void run_when_created(const Handle& handle, Created waiter);
// The object. Waits for its creation as when_created() does and throws its error. Throws
// Error(invalid_argument) if it is not owned here.
[[nodiscard]] rpc::OwnedObject local_value(const Handle& handle,
                                           std::optional<std::chrono::nanoseconds> timeout);
[[nodiscard]] Error wrong_type(const Handle& handle, const std::type_info& actual,
                               const std::type_info& wanted);

// ---- waiting
// As RRef::when_created().
[[nodiscard]] Future<void> when_created(const HandlePtr& handle, const HandleUse& use);
// Calls `on_timeout`, on the timer thread, with Error(timeout) when the limit (none: the worker's;
// zero: never) has passed. Returns a function that stops the timer; empty if there is no limit.
[[nodiscard]] base::UniqueFunction<void()> limit_wait(
    const Handle& handle, const std::shared_ptr<rpc::Agent>& agent,
    std::optional<std::chrono::nanoseconds> limit,
    base::UniqueFunction<void(const Error&)> on_timeout);
// Fails `promise` when the limit has passed, unless it is complete by then.
template <class T>
void complete_by(const Promise<T>& promise, const Handle& handle,
                 const std::shared_ptr<rpc::Agent>& agent,
                 std::optional<std::chrono::nanoseconds> limit) {
  if (promise.future().ready()) return;
  auto stop_timer =
      limit_wait(handle, agent, limit, [promise](const Error& error) { promise.set_error(error); });
  if (stop_timer) promise.future().on_ready(std::move(stop_timer));
}
// The exception that is being handled: an Error as it is, another one as to_error() has it.
[[nodiscard]] std::exception_ptr current_error() noexcept;
// A future of it.
template <class T>
[[nodiscard]] Future<T> make_failed_future() {
  Promise<T> promise;
  promise.set_exception(current_error());
  return promise.future();
}

// ---- messages
// Answers a request that wants the result of a constructor sent back.
void refuse_reply(const std::shared_ptr<rpc::IncomingCall>& call);
// Writes and reads one reference in a body: its index and the type it was created as. A null handle
// is read as null.
void write_reference(rpc::OutArchive& archive, const HandlePtr& handle, std::uint64_t type);
[[nodiscard]] HandlePtr read_reference(rpc::InArchive& archive, std::uint64_t type,
                                       std::string_view type_name);

// Whether objects of a type run one method at a time (Serialized<T>).
void note_one_at_a_time(const std::type_info& type);
[[nodiscard]] bool runs_one_at_a_time(const std::type_info& type);

}  // namespace stitch::rref
