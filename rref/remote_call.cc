#include "stitch/rref/remote_call.h"

#include "stitch/transport/demangle.h"

namespace stitch::detail {

Error wrong_type(const rref::Handle& handle, const std::type_info& actual,
                 const std::type_info& wanted) {
  return Error(ErrorCode::invalid_argument, rref::to_string(handle.id) + " is an object of type " +
                                                demangle(actual.name()) + ", not " +
                                                demangle(wanted.name()));
}

TargetedRequest begin_targeted(const rref::Handle& handle, rref::TargetUse use,
                               std::uint64_t function_id) {
  auto agent = handle.rrefs->require_usable(handle);
  agent->throw_if_stopped();
  OutMessage message = Agent::begin_request(function_id);
  message.attachment<rref::OutgoingRefs>().target(handle.shared_from_this(), use);
  return {std::move(agent), std::move(message)};
}

Future<void> when_created(const rref::Handle& handle, const Timeout& timeout) {
  try {
    const auto agent = handle.rrefs->require_usable(handle);
    const auto self = handle.rrefs->lifetime().self();
    if (handle.id.owner != self && handle.id.creator != self) {  // only the owner knows
      auto request = begin_targeted(handle, rref::TargetUse::await, 0);
      return start_call<void>(agent, handle.owner, "RRef::when_created", timeout,
                              std::move(request.message));
    }
    Promise<void> promise;
    handle.rrefs->when_created(handle.id,
                               [promise](void*, const std::optional<Error>& failure) mutable {
                                 if (failure) {
                                   promise.set_error(*failure);
                                 } else {
                                   promise.set_value();
                                 }
                               });
    if (timeout) complete_by(promise, *agent, agent->effective_timeout(timeout), handle);
    return promise.future();
  } catch (const Error& error) {
    return make_failed<void>(error);
  }
}

}  // namespace stitch::detail
