#pragma once

#include <exception>
#include <memory>
#include <string_view>
#include <tuple>
#include <utility>

#include "stitch/rpc/calls/pending_call.h"
#include "stitch/rpc/function_runner.h"
#include "stitch/rpc/target.h"

namespace stitch::rpc {

class Agent;
class PeerTable;

// ---- What the templates of calls need of an Agent, whose class programs do not see.

// The worker that code on this thread belongs to: that of the running handler, continuation or
// WorkerScope, else the process's only one. Throws as LiveRuntimes::only().
[[nodiscard]] std::shared_ptr<Agent> current_agent();
// As AgentState::throw_if_stopped().
void throw_if_stopped(const Agent& agent);
[[nodiscard]] const PeerTable& peers_of(Agent& agent);

struct DeleteRequest {
  void operator()(OutMessage* request) const noexcept;
};
// A request that is being written: an OutArchive appends the arguments.
using Request = std::unique_ptr<OutMessage, DeleteRequest>;
[[nodiscard]] Request begin_request(std::uint64_t function_id, WhenFull when_full = WhenFull::wait);
// As OutgoingCalls::start_call() and start_notify(), with the effective_timeout().
std::uint64_t start_call(Agent& agent, const WorkerInfo& to, std::string_view function,
                         std::optional<std::chrono::nanoseconds> timeout, Request request,
                         std::shared_ptr<PendingCall> pending);
void start_notify(Agent& agent, const WorkerInfo& to, std::string_view function,
                  std::optional<std::chrono::nanoseconds> timeout, Request request);
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

}  // namespace stitch::rpc

namespace stitch {

namespace detail {

// How an argument can stand for a value of another type, which the callee gets from elsewhere: a
// layer above specializes it (rref/rref.h: a reference, for its object). write() notes in the
// message what stands at that position; nothing is written into the body.
template <class Arg, class Value>
struct StandIn {
  static constexpr bool kExists = false;
};

template <class Arg, class Value>
inline constexpr bool kStandsIn =
    !std::is_convertible_v<Arg&&, Value> && StandIn<std::remove_cvref_t<Arg>, Value>::kExists;
template <class Arg, class Value>
inline constexpr bool kGivable = std::is_convertible_v<Arg&&, Value> || kStandsIn<Arg, Value>;

// Whether F can be called with arguments of these types. Fails to compile if not, with advice.
template <auto F, class... Args>
struct CallOf {
  using Function = RemoteFunction<F>;
  using Traits = typename Function::Traits;
  static constexpr std::size_t kGiven = sizeof...(Args);
  static constexpr bool kCount = kGiven == Traits::kArity;
  template <std::size_t I>
  static constexpr bool gives() {
    using Arg = std::tuple_element_t<I, std::tuple<Args&&...>>;
    return kGivable<Arg, std::remove_cvref_t<typename Traits::template Param<I>>>;
  }
  static constexpr bool kGood = [] {
    if constexpr (!Function::kGood || !kCount) {
      return false;
    } else {
      return []<std::size_t... I>(std::index_sequence<I...>) { return (gives<I>() && ...); }
      (std::make_index_sequence<kGiven>{});
    }
  }();
  template <std::size_t I>
  static constexpr bool say_of() {
    using Arg = std::tuple_element_t<I, std::tuple<Args&&...>>;
    using Value = std::remove_cvref_t<typename Traits::template Param<I>>;
    static_assert(gives<I>() || Converts<Arg, Value, Argument<I + 1, F>>::value,
                  "stitch: an argument does not convert to its parameter's type");
    return true;
  }
  static constexpr bool say() {
    if constexpr (kGood || !Function::kGood) {
      return true;
    } else if constexpr (!kCount) {
      static_assert(TakesArguments<kGiven, Traits::kArity, F>::value,
                    "stitch: the number of arguments is not that of the function's parameters");
      return true;
    } else {
      return []<std::size_t... I>(std::index_sequence<I...>) { return (say_of<I>() && ...); }
      (std::make_index_sequence<kGiven>{});
    }
  }
};

template <std::size_t I, class Param, class Arg>
void encode_argument(rpc::OutArchive& archive, Arg&& argument) {
  using Value = std::remove_cvref_t<Param>;
  if constexpr (kStandsIn<Arg, Value>) {
    StandIn<std::remove_cvref_t<Arg>, Value>::write(archive.message(), I, argument);
  } else if constexpr (std::is_same_v<std::remove_cvref_t<Arg>, PlacedTensor> &&
                       std::is_same_v<Value, at::Tensor>) {
    archive(static_cast<const PlacedTensor&>(argument));
  } else if constexpr (std::is_same_v<std::remove_cvref_t<Arg>, Value>) {
    archive(static_cast<const Value&>(argument));
  } else {
    const Value converted = static_cast<Value>(std::forward<Arg>(argument));
    archive(converted);
  }
  archive.seal();
}

// Writes arguments as the parameter types of Traits, converting as a direct call would.
template <class Traits, class... Args>
void encode_arguments(rpc::OutMessage& message, Args&&... args) {
  if constexpr (Traits::kArity == 0) return;
  rpc::OutArchive archive(message);
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    (encode_argument<I, typename Traits::template Param<I>>(archive, std::forward<Args>(args)),
     ...);
  }
  (std::make_index_sequence<Traits::kArity>{});
}

// Whether the result of F can be sent. say() fails to compile if not, with advice.
template <auto F>
struct ResultOf {
  using R = typename rpc::TraitsOf<F>::Result;
  static constexpr bool kGood = std::is_void_v<R> || Sendable<R>;
  static constexpr bool say() {
    if constexpr (kGood || !RemoteFunction<F>::kGood) {
      return true;
    } else {
      return WhyNot<R, Result<F>>::kSaid;
    }
  }
};

// The error of a call whose arguments could not be written.
[[nodiscard]] Error was_not_made(std::string_view function, const WorkerInfo& to,
                                 const std::exception_ptr& exception);

// The outcome of a call: what its future shares and what the call table completes, in one.
// Thread contract: as FutureStateBase and PendingCall.
template <class R>
class CallState final : public FutureState<R>, public rpc::PendingCall {
 public:
  explicit CallState(std::weak_ptr<rpc::Agent> agent) : agent_(std::move(agent)) {}
  // As Target::into. Before started().
  void receive_into(at::Tensor tensor) {
    if constexpr (kIntoTensor) {
      into_.set(std::move(tensor));
    } else {
      throw Error(ErrorCode::invalid_argument,
                  "a result cannot be received into a tensor: the function does not return one");
    }
  }
  [[nodiscard]] rpc::IntoTensor* into() noexcept override {
    if constexpr (kIntoTensor) return &into_;
    return nullptr;
  }
  void on_reply(rpc::InMessage& message) override {
    const auto body = rpc::result_in(message);
    if constexpr (std::is_void_v<R>) {
      if (body.empty()) {
        this->set_value();
        return;
      }
    }
    rpc::InArchive archive(message, body);
    if constexpr (std::is_void_v<R>) {
      archive.expect_end();
      this->set_value();
    } else {
      R result = rpc::blank<R>();
      archive(result);
      archive.check_seal();
      archive.expect_end();
      if constexpr (kIntoTensor) result = into_.store_result(std::move(result));
      this->set_value_with(rpc::memory_of(message), std::move(result));
    }
  }
  void on_error(const Error& error) override {
    this->set_exception(std::make_exception_ptr(error));
  }
  [[nodiscard]] std::uint64_t awaited_call() const noexcept override {
    return call_id_.load(std::memory_order_acquire);
  }
  void started(std::uint64_t call_id) noexcept {
    call_id_.store(call_id, std::memory_order_release);
  }

 private:
  // A call that has not started has no id, and no peer to tell.
  void ask_to_stop() override {
    rpc::abandon_call(agent_, call_id_.load(std::memory_order_acquire));
  }
  static constexpr bool kIntoTensor = std::is_same_v<R, at::Tensor>;
  struct Nothing {};
  const std::weak_ptr<rpc::Agent> agent_;
  std::atomic<std::uint64_t> call_id_{0};
  [[no_unique_address]] std::conditional_t<kIntoTensor, rpc::IntoTensor, Nothing> into_;
};

// Compiled once, in calls.cc: the outcomes that most programs have.
extern template class CallState<void>;
extern template class CallState<at::Tensor>;
extern template class CallState<bool>;
extern template class CallState<int>;
extern template class CallState<std::int64_t>;
extern template class CallState<double>;
extern template class CallState<std::string>;

// Starts a call whose arguments are in `request`; cancelling the future abandons the call. `name`
// is a registered function's.
template <class R>
Future<R> start_call(const std::shared_ptr<rpc::Agent>& agent, const WorkerInfo& to,
                     std::string_view name, std::optional<std::chrono::nanoseconds> timeout,
                     rpc::Request request, const at::Tensor& into = {}) {
  auto state = make_state<CallState<R>>(agent);
  if (into.defined()) state->receive_into(into);
  state->started(rpc::start_call(*agent, to, name, timeout, std::move(request), state));
  return Future<R>(std::move(state));
}

template <auto F, class... Args>
auto call(const std::shared_ptr<rpc::Agent>& agent, const Target& target, Args&&... args) {
  using Call = CallOf<F, Args...>;
  using R = typename Call::Traits::Result;
  static_assert(rpc::IsFree<F>, "stitch: member functions are called through an RRef");
  static_assert(Call::say() && ResultOf<F>::say());
  if constexpr (rpc::IsFree<F> && Call::kGood && ResultOf<F>::kGood) {
    const rpc::Function& function = kFunction<F>;
    rpc::throw_if_stopped(*agent);
    try {
      const WorkerInfo& to = target.resolve(rpc::peers_of(*agent));
      rpc::Request request = rpc::begin_request(function.id, target.when_full());
      try {
        encode_arguments<typename Call::Traits>(*request, std::forward<Args>(args)...);
      } catch (...) {
        return make_failed<R>(was_not_made(function.name, to, std::current_exception()));
      }
      return start_call<R>(agent, to, function.name, target.timeout(), std::move(request),
                           target.into());
    } catch (...) {
      Error error = to_error(std::current_exception());
      if (error.function().empty()) error = error.with_function(std::string(function.name));
      return make_failed<R>(std::move(error));
    }
  } else {
    return Future<R>();
  }
}

template <auto F, class... Args>
void notify(const std::shared_ptr<rpc::Agent>& agent, const Target& target, Args&&... args) {
  using Call = CallOf<F, Args...>;
  static_assert(rpc::IsFree<F>, "stitch: member functions are called through an RRef");
  static_assert(Call::say());
  if constexpr (rpc::IsFree<F> && Call::kGood) {
    target.expect_no_into("notify()");
    rpc::throw_if_stopped(*agent);  // first: after shutdown the target may be unknown
    const WorkerInfo& to = target.resolve(rpc::peers_of(*agent));
    rpc::Request request = rpc::begin_request(kFunction<F>.id, target.when_full());
    try {
      encode_arguments<typename Call::Traits>(*request, std::forward<Args>(args)...);
    } catch (...) {
      throw was_not_made(kFunction<F>.name, to, std::current_exception());
    }
    rpc::start_notify(*agent, to, kFunction<F>.name, target.timeout(), std::move(request));
  }
}

// A function that stands among the arguments of a call.
template <class F>
concept FunctionValue = std::is_function_v<std::remove_pointer_t<std::remove_cvref_t<F>>> ||
    std::is_member_pointer_v<std::remove_cvref_t<F>> || requires {
  &std::remove_cvref_t<F>::operator();
};
template <class F>
rpc::AnyValue refuse_function_value() {
  static_assert(rpc::CanBeCalled<F>::value,
                "stitch: the function is a template argument: write rpc_sync<f>(\"ps0\", ...), or "
                "rref.rpc_sync<&T::method>(...); likewise rpc_async, notify and remote");
  return {};
}

}  // namespace detail

// Calls F on the target and returns a future of its result. Arguments convert to F's parameter
// types as in a direct call. Errors reach the future; only a worker that has shut down (or none)
// throws here. The target may also be written
// {.to = "ps0", .timeout = 5s}. Any thread. A thread of the program waits here while the peer's
// budget is full, until the deadline of the call; handlers and callbacks never wait.
template <auto F, class... Args>
auto rpc_async(Target target, Args&&... args) {
  return detail::call<F>(rpc::current_agent(), target, std::forward<Args>(args)...);
}
template <auto F, class... Args>
auto rpc_async(TargetOptions target, Args&&... args) {
  return detail::call<F>(rpc::current_agent(), Target(std::move(target)),
                         std::forward<Args>(args)...);
}

// Does not compile: write rpc_async<f>(target, arguments...).
template <detail::FunctionValue F, class... Args>
rpc::AnyValue rpc_async(F&&, Args&&...) {
  return detail::refuse_function_value<F>();
}

// Calls F on the target and waits for its result. Throws its Error. Any thread but one that runs a
// STITCH_INLINE function.
template <auto F, class... Args>
auto rpc_sync(Target target, Args&&... args) {
  const rpc::AnswerWaitScope waits;
  return detail::call<F>(rpc::current_agent(), target, std::forward<Args>(args)...).get();
}
template <auto F, class... Args>
auto rpc_sync(TargetOptions target, Args&&... args) {
  const rpc::AnswerWaitScope waits;
  return detail::call<F>(rpc::current_agent(), Target(std::move(target)),
                         std::forward<Args>(args)...)
      .get();
}

// Does not compile: write rpc_sync<f>(target, arguments...).
template <detail::FunctionValue F, class... Args>
rpc::AnyValue rpc_sync(F&&, Args&&...) {
  return detail::refuse_function_value<F>();
}

// Calls F on the target one-way: no reply, no error from there. Throws when the message cannot be
// made. Waits for room as rpc_async does, until Target::timeout or Options::rpc_timeout; then, and
// where it must not wait, it throws `overloaded`.
template <auto F, class... Args>
void notify(Target target, Args&&... args) {
  detail::notify<F>(rpc::current_agent(), target, std::forward<Args>(args)...);
}
template <auto F, class... Args>
void notify(TargetOptions target, Args&&... args) {
  detail::notify<F>(rpc::current_agent(), Target(std::move(target)), std::forward<Args>(args)...);
}

// Does not compile: write notify<f>(target, arguments...).
template <detail::FunctionValue F, class... Args>
rpc::AnyValue notify(F&&, Args&&...) {
  return detail::refuse_function_value<F>();
}

// Counts one step of the current worker, for Options::fault: "kill=ps0@step10" ends the process of
// ps0, in its first life, here when it counts its tenth. Owners that step parameters for a
// DistributedOptimizer count by themselves, once for each optimizer and step. Does nothing without
// such a fault, and where no worker is current. Any thread.
void fault_step() noexcept;

}  // namespace stitch
