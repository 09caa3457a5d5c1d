#include "stitch/rpc/function_runner.h"

#include "stitch/base/error.h"
#include "stitch/rpc/calls/incoming_call.h"

namespace stitch::rpc {

InArchive arguments_of(IncomingCall& call) { return call.arguments(); }

bool without_arguments(IncomingCall& call) noexcept {
  return call.message().view.body().size() == CallHeader::kBytes;
}

void fail(IncomingCall& call, const Error& error) { call.fail(error); }

void fail_in_handler(IncomingCall& call, const std::exception_ptr& exception) {
  call.fail_in_handler(exception);
}

void others_poll(IncomingCall& call) noexcept { call.others_poll(); }

void stops_with(IncomingCall& call, const std::shared_ptr<detail::FutureStateBase>& state) {
  call.stops_with(state);
}

void reply(IncomingCall& call, void (*encode)(void* what, OutArchive& archive), void* what) {
  call.reply([&](OutArchive& archive) { encode(what, archive); });
}

void reply(IncomingCall& call) { call.reply(); }

}  // namespace stitch::rpc

namespace stitch::detail {

void throw_mismatch(std::size_t position, const std::type_info& type) {
  throw Error(ErrorCode::invalid_argument,
              "argument " + std::to_string(position) + " does not match its type on the callee, " +
                  base::demangle(type.name()) + ": " + to_error(std::current_exception()).what());
}

void throw_other_type(const std::type_info& type) {
  throw Error(ErrorCode::invalid_argument, "the object is of type " + base::demangle(type.name()));
}

}  // namespace stitch::detail
