#pragma once

#include <memory>
#include <utility>

#include "stitch/rpc/agent.h"
#include "stitch/rpc/function_runner.h"
#include "stitch/rpc/target.h"

namespace stitch {

// The agent of the worker that is current on this thread: that of the running handler or of a WorkerScope, else the
// process's only worker. Throws Error(invalid_argument) when there is none or more than one.
[[nodiscard]] std::shared_ptr<Agent> current_agent();

namespace detail {

template <std::size_t I, class Param, class Arg>
void encode_argument(OutArchive& archive, Arg&& argument) {
  using Value = std::remove_cvref_t<Param>;
  static_assert(Sendable<Value>,
                "stitch: a parameter of this remote function has a type that cannot be sent; give the type a cereal "
                "serialize(Archive&) member, or pass one of the sendable types listed at stitch::Sendable");
  static_assert(std::is_convertible_v<Arg&&, Value>, "stitch: an argument does not convert to the remote function's parameter type");
  if constexpr (std::is_same_v<std::remove_cvref_t<Arg>, Value>) {
    archive(static_cast<const Value&>(argument));
  } else {
    const Value converted = static_cast<Value>(std::forward<Arg>(argument));
    archive(converted);
  }
  archive.seal();
}

// Writes arguments as the parameter types of Traits, converting as a direct call would.
template <class Traits, class... Args>
void encode_arguments(OutMessage& message, Args&&... args) {
  static_assert(sizeof...(Args) == Traits::kArity, "stitch: wrong number of arguments for this remote function");
  static_assert(!Traits::kTakesOutParameter, "stitch: a remote function cannot take a non-const reference: changes would not come back");
  OutArchive archive(message);
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    (encode_argument<I, typename Traits::template Param<I>>(archive, std::forward<Args>(args)), ...);
  }
  (std::make_index_sequence<Traits::kArity>{});
}

template <class R>
class PendingResult final : public PendingCall {
 public:
  explicit PendingResult(Promise<R> promise) : promise_(std::move(promise)) {}
  void on_reply(InMessage& message) override {
    InArchive archive(message, message.view.body().subspan(sizeof(std::uint64_t)));
    if constexpr (std::is_void_v<R>) {
      archive.expect_end();
      promise_.set_value();
    } else {
      R result{};
      archive(result);
      archive.check_seal();
      archive.expect_end();
      promise_.set_value(std::move(result));
    }
  }
  void on_error(const Error& error) override { promise_.set_error(error); }

 private:
  Promise<R> promise_;
};

// Starts a call whose arguments are in `message`; cancelling the future abandons the call.
template <class R>
Future<R> start_call(const std::shared_ptr<Agent>& agent, const WorkerInfo& to, const std::string& name,
                     std::optional<std::chrono::nanoseconds> timeout, OutMessage message) {
  Promise<R> promise;
  auto future = promise.future();
  // The id is known only once the call is under way, so that cancelling finds it through this cell.
  auto call_id = std::make_shared<std::atomic<std::uint64_t>>(0);
  promise.on_cancel([weak = std::weak_ptr(agent), call_id] {
    if (const auto alive = weak.lock()) alive->abandon_call(call_id->load());
  });
  call_id->store(agent->start_call(to, name, agent->effective_timeout(timeout), std::move(message),
                                   std::make_shared<PendingResult<R>>(std::move(promise))));
  return future;
}

template <auto F, class... Args>
auto call(const std::shared_ptr<Agent>& agent, const Target& target, Args&&... args) {
  using Traits = TraitsOf<F>;
  using R = typename Traits::Result;
  static_assert(kIsFree<F>, "stitch: member functions are called through an RRef");
  static_assert(std::is_void_v<R> || Sendable<R>,
                "stitch: the result type of this remote function cannot be sent; keep it on the callee with remote<f>()");
  const Function& function = kFunction<F>;
  agent->throw_if_stopped();
  try {
    const WorkerInfo& to = target.resolve(agent->peers());
    OutMessage message = Agent::begin_request(function.id);
    encode_arguments<Traits>(message, std::forward<Args>(args)...);
    return start_call<R>(agent, to, function.name, target.timeout(), std::move(message));
  } catch (...) {
    return make_failed<R>(to_error(std::current_exception()));
  }
}

template <auto F, class... Args>
void notify(const std::shared_ptr<Agent>& agent, const Target& target, Args&&... args) {
  static_assert(kIsFree<F>, "stitch: member functions are called through an RRef");
  const WorkerInfo& to = target.resolve(agent->peers());
  OutMessage message = Agent::begin_request(kFunction<F>.id);
  encode_arguments<TraitsOf<F>>(message, std::forward<Args>(args)...);
  agent->start_notify(to, std::move(message));
}

}  // namespace detail

// Calls F on the target and returns a future of its result. Arguments convert to F's parameter types as in a direct call.
// Errors reach the future; only a worker that has shut down (or none) throws here. The target may also be written
// {.to = "ps0", .timeout = 5s}. Any thread; does not block.
template <auto F, class... Args>
auto rpc_async(Target target, Args&&... args) {
  return detail::call<F>(current_agent(), target, std::forward<Args>(args)...);
}
template <auto F, class... Args>
auto rpc_async(TargetOptions target, Args&&... args) {
  return detail::call<F>(current_agent(), Target(std::move(target)), std::forward<Args>(args)...);
}

// Calls F on the target and waits for its result. Throws its Error. Any thread but one that runs a STITCH_INLINE function.
template <auto F, class... Args>
auto rpc_sync(Target target, Args&&... args) {
  return detail::call<F>(current_agent(), target, std::forward<Args>(args)...).get();
}
template <auto F, class... Args>
auto rpc_sync(TargetOptions target, Args&&... args) {
  return detail::call<F>(current_agent(), Target(std::move(target)), std::forward<Args>(args)...).get();
}

// Calls F on the target one-way: no reply, no error from there. Throws when the message cannot be made. Does not block.
template <auto F, class... Args>
void notify(Target target, Args&&... args) {
  detail::notify<F>(current_agent(), target, std::forward<Args>(args)...);
}
template <auto F, class... Args>
void notify(TargetOptions target, Args&&... args) {
  detail::notify<F>(current_agent(), Target(std::move(target)), std::forward<Args>(args)...);
}

}  // namespace stitch
