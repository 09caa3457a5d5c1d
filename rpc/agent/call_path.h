#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string_view>
#include <type_traits>

#include "stitch/rpc/calls/pending_call.h"
#include "stitch/rpc/future/future_state.h"
#include "stitch/rpc/message/archive.h"
#include "stitch/rpc/message/message.h"
#include "stitch/rpc/message/worker_info.h"

// What the templates behind calls and handlers need of an Agent and of an IncomingCall. They are
// compiled into every program that uses stitch; the classes themselves are not. Each function below
// does what the method of the same name does: errors and thread contracts are stated there.
namespace stitch::rpc {

class Agent;
class IncomingCall;
class PeerTable;

// ---- the caller's side

// The worker that code on this thread belongs to: that of the running handler, continuation or
// WorkerScope, else the process's only one. Throws as LiveRuntimes::only().
[[nodiscard]] std::shared_ptr<Agent> current_agent();

void throw_if_stopped(const std::shared_ptr<Agent>& agent);
[[nodiscard]] const PeerTable& peers_of(const std::shared_ptr<Agent>& agent);
[[nodiscard]] OutMessage begin_request(std::uint64_t function_id);
[[nodiscard]] std::chrono::nanoseconds effective_timeout(
    const std::shared_ptr<Agent>& agent, std::optional<std::chrono::nanoseconds> timeout);
std::uint64_t start_call(const std::shared_ptr<Agent>& agent, const WorkerInfo& to,
                         std::string_view function, std::chrono::nanoseconds timeout,
                         OutMessage message, std::shared_ptr<PendingCall> pending);
void start_notify(const std::shared_ptr<Agent>& agent, const WorkerInfo& to,
                  std::string_view function, std::chrono::nanoseconds timeout, OutMessage message);
// Does nothing when the agent is gone.
void abandon_call(const std::weak_ptr<Agent>& agent, std::uint64_t call_id);

// As long as it lives, this thread waits at once for the answer of each call that it makes
// (base::AnswerWait).
class AnswerWaitScope {
 public:
  AnswerWaitScope() noexcept;
  ~AnswerWaitScope();
  AnswerWaitScope(const AnswerWaitScope&) = delete;
  AnswerWaitScope& operator=(const AnswerWaitScope&) = delete;

 private:
  const bool outer_;
};

// ---- the callee's side

[[nodiscard]] InArchive arguments_of(IncomingCall& call);
// Whether it has none.
[[nodiscard]] bool without_arguments(IncomingCall& call) noexcept;
void fail(IncomingCall& call, const Error& error);
void fail_in_handler(IncomingCall& call, const std::exception_ptr& exception);
void others_poll(IncomingCall& call) noexcept;
// From here on a stop of the call is one of `state`, which its function has returned; where the
// result is kept, and may be wanted by others than the caller, only a stop that comes once the call
// has been answered.
void stops_with(IncomingCall& call, const std::shared_ptr<detail::FutureStateBase>& state);
// `encode(what, archive)` writes the result.
void reply(IncomingCall& call, void (*encode)(void* what, OutArchive& archive), void* what);
// Without a result.
void reply(IncomingCall& call);
template <class Encode>
void reply(IncomingCall& call, Encode&& encode) {
  using Function = std::remove_reference_t<Encode>;
  reply(
      call, [](void* what, OutArchive& archive) { (*static_cast<Function*>(what))(archive); },
      &encode);
}

}  // namespace stitch::rpc
