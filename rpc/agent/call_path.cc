#include "stitch/rpc/agent/call_path.h"

#include <utility>

#include "stitch/base/answer_wait.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/calls/incoming_call.h"
#include "stitch/rpc/future/live_runtimes.h"

namespace stitch::rpc {

std::shared_ptr<Agent> current_agent() {
  return std::static_pointer_cast<Agent>(current_runtime());
}

void throw_if_stopped(const std::shared_ptr<Agent>& agent) { agent->throw_if_stopped(); }

const PeerTable& peers_of(const std::shared_ptr<Agent>& agent) { return agent->peers(); }

OutMessage begin_request(std::uint64_t function_id) {
  return OutgoingCalls::begin_request(function_id);
}

std::chrono::nanoseconds effective_timeout(const std::shared_ptr<Agent>& agent,
                                           std::optional<std::chrono::nanoseconds> timeout) {
  return agent->outgoing_calls().effective_timeout(timeout);
}

std::uint64_t start_call(const std::shared_ptr<Agent>& agent, const WorkerInfo& to,
                         std::string_view function, std::chrono::nanoseconds timeout,
                         OutMessage message, std::shared_ptr<PendingCall> pending) {
  return agent->outgoing_calls().start_call(to, function, timeout, std::move(message),
                                            std::move(pending));
}

void start_notify(const std::shared_ptr<Agent>& agent, const WorkerInfo& to,
                  std::string_view function, std::chrono::nanoseconds timeout, OutMessage message) {
  agent->outgoing_calls().start_notify(to, function, timeout, std::move(message));
}

void abandon_call(const std::weak_ptr<Agent>& agent, std::uint64_t call_id) {
  if (const auto alive = agent.lock()) alive->outgoing_calls().abandon_call(call_id);
}

AnswerWaitScope::AnswerWaitScope() noexcept : outer_(base::AnswerWait::set(true)) {}
AnswerWaitScope::~AnswerWaitScope() { base::AnswerWait::set(outer_); }

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
