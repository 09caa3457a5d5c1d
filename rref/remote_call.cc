#include "stitch/rref/remote_call.h"

#include "stitch/base/demangle.h"

namespace stitch::detail {

Error wrong_type(const rref::Handle& handle, const std::type_info& actual,
                 const std::type_info& wanted) {
  return Error(ErrorCode::invalid_argument, rref::to_string(handle.id) + " is an object of type " +
                                                base::demangle(actual.name()) + ", not " +
                                                base::demangle(wanted.name()));
}

TargetedRequest begin_targeted(const rref::Handle& handle, rref::TargetUse use,
                               std::uint64_t function_id, std::string_view function) {
  auto agent = handle.rrefs->require_usable(handle, function);
  agent->throw_if_stopped();
  rpc::OutMessage message = rpc::Agent::begin_request(function_id);
  message.attachment<rref::OutgoingRefs>().target(handle.shared_from_this(), use);
  return {std::move(agent), std::move(message)};
}

Error not_created_in_time(const rref::Handle& handle, std::chrono::nanoseconds limit) {
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(limit).count();
  return Error(ErrorCode::timeout, rref::to_string(handle.id) + " was not created by " +
                                       to_string(handle.owner) + " within " + std::to_string(ms) +
                                       " ms")
      .with_worker(handle.owner.name);
}

Future<void> when_created(const rref::Handle& handle, const Timeout& timeout) {
  try {
    constexpr const char* kName = "RRef::when_created";
    const auto agent = handle.rrefs->require_usable(handle, kName);
    if (!handle.rrefs->lifetime().tracks_creation(handle.id)) {  // only the owner knows
      auto request = begin_targeted(handle, rref::TargetUse::await, 0, kName);
      return start_call<void>(agent, handle.owner, kName, timeout, std::move(request.message));
    }
    Promise<void> promise;
    handle.rrefs->when_created(handle.id, [promise](const std::shared_ptr<void>&,
                                                    const std::optional<Error>& failure) mutable {
      if (failure) {
        promise.set_error(*failure);
      } else {
        promise.set_value();
      }
    });
    complete_by(promise, *agent, agent->effective_timeout(timeout), handle);
    return promise.future();
  } catch (const Error&) {
    return make_failed_now<void>();
  }
}

rpc::OwnedObject local_value(const rref::Handle& handle, const Timeout& timeout) {
  const auto agent = handle.rrefs->require_usable(handle, "RRef::local_value");
  if (handle.id.owner != handle.rrefs->lifetime().self()) {
    throw Error(ErrorCode::invalid_argument,
                rref::to_string(handle.id) + " is owned by " + to_string(handle.owner) +
                    ", not by " + to_string(agent->self()) +
                    " that asked for its local value; use to_here() or call a method of it");
  }
  Promise<rpc::OwnedObject> promise;
  handle.rrefs->when_created(handle.id, [promise](const std::shared_ptr<void>& object,
                                                  const std::optional<Error>& failure) {
    if (failure) {
      promise.set_error(*failure);
    } else {
      promise.set_value(*static_cast<const rpc::OwnedObject*>(object.get()));
    }
  });
  complete_by(promise, *agent, agent->effective_timeout(timeout), handle);
  return promise.future().get();
}

}  // namespace stitch::detail
