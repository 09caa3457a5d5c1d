#include "stitch/rpc/calls.h"

#include <new>

#include "stitch/base/answer_wait.h"
#include "stitch/base/recycler.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/future/live_runtimes.h"

namespace stitch::rpc {

std::shared_ptr<Agent> current_agent() {
  return std::static_pointer_cast<Agent>(current_runtime());
}

void throw_if_stopped(const Agent& agent) { agent.throw_if_stopped(); }

const PeerTable& peers_of(Agent& agent) { return agent.peers(); }

void DeleteRequest::operator()(OutMessage* request) const noexcept {
  request->~OutMessage();
  base::recycle(request, sizeof(OutMessage));
}

Request begin_request(std::uint64_t function_id, WhenFull when_full) {
  Request request(new (base::take_recycled(sizeof(OutMessage)))
                      OutMessage(OutgoingCalls::begin_request(function_id)));
  request->refuse_when_full = when_full == WhenFull::refuse;
  return request;
}

std::uint64_t start_call(Agent& agent, const WorkerInfo& to, std::string_view function,
                         std::optional<std::chrono::nanoseconds> timeout, Request request,
                         std::shared_ptr<PendingCall> pending) {
  OutgoingCalls& calls = agent.outgoing_calls();
  return calls.start_call(to, function, calls.effective_timeout(timeout), std::move(*request),
                          std::move(pending));
}

void start_notify(Agent& agent, const WorkerInfo& to, std::string_view function,
                  std::optional<std::chrono::nanoseconds> timeout, Request request) {
  OutgoingCalls& calls = agent.outgoing_calls();
  calls.start_notify(to, function, calls.effective_timeout(timeout), std::move(*request));
}

void abandon_call(const std::weak_ptr<Agent>& agent, std::uint64_t call_id) {
  if (const auto alive = agent.lock()) alive->outgoing_calls().abandon_call(call_id);
}

AnswerWaitScope::AnswerWaitScope() noexcept : outer_(base::AnswerWait::set(true)) {}
AnswerWaitScope::~AnswerWaitScope() { base::AnswerWait::set(outer_); }

}  // namespace stitch::rpc

namespace stitch::detail {
namespace {

// An exception of an argument's own serialize function is a mistake of the program.
ErrorCode code_of_writing(const std::exception_ptr& exception) noexcept {
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    return error.code();
  } catch (...) {
    return ErrorCode::invalid_argument;
  }
}

}  // namespace

Error was_not_made(std::string_view function, const WorkerInfo& to,
                   const std::exception_ptr& exception) {
  const Error error = to_error(exception);
  return Error(code_of_writing(exception), "call " + std::string(function) + "() to " +
                                               to_string(to) + " was not made: " + error.what())
      .with_worker(to.name)
      .with_function(std::string(function));
}

template class CallState<void>;
template class CallState<at::Tensor>;
template class CallState<bool>;
template class CallState<int>;
template class CallState<std::int64_t>;
template class CallState<double>;
template class CallState<std::string>;

}  // namespace stitch::detail
