#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <variant>

#include "stitch/base/deadline.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/calls.h"
#include "stitch/rref/rref_agent.h"

// The requests behind RRef<T> and remote<>: typed at compile time, ordinary rpc requests on the
// wire.
namespace stitch::detail {

using Timeout = std::optional<std::chrono::nanoseconds>;

// What RRef<T> is on the wire: both ends compare it.
template <class T>
[[nodiscard]] std::uint64_t reference_type() {
  static const std::uint64_t type = rpc::function_id(typeid(T).name());
  return type;
}

[[nodiscard]] Error wrong_type(const rref::Handle& handle, const std::type_info& actual,
                               const std::type_info& wanted);

// The registry entry of a method M called on a T. A method that T inherits gets an entry of its
// own, which knows the way from a T to the base.
template <class T, auto M>
struct InheritedMethod {
  using Base = typename rpc::TraitsOf<M>::ObjectType;
  static void reply(const std::shared_ptr<rpc::IncomingCall>& call, void* object) {
    FunctionRunner<M>::reply(call, static_cast<Base*>(static_cast<T*>(object)));
  }
  static void keep(const std::shared_ptr<rpc::IncomingCall>& call, void* object,
                   rpc::KeepResult sink) {
    FunctionRunner<M>::keep(call, static_cast<Base*>(static_cast<T*>(object)), std::move(sink));
  }
  static const rpc::Function& add() {
    rpc::Function function = register_function<M>();
    function.id = rpc::function_id(typeid(InheritedMethod).name());
    function.identity = reinterpret_cast<const void*>(&InheritedMethod::keep);
    function.object_type = &typeid(T);
    function.reply = &InheritedMethod::reply;
    function.keep = &InheritedMethod::keep;
    return rpc::FunctionRegistry::instance().add(std::move(function));
  }
};
template <class T, auto M>
inline const rpc::Function& kInheritedMethod = InheritedMethod<T, M>::add();

template <class T, auto M>
[[nodiscard]] const rpc::Function& method_function() {
  static_assert(!rpc::IsFree<M>, "stitch: name a member function, rref.rpc_async<&T::method>(...)");
  using Object = typename rpc::TraitsOf<M>::ObjectType;
  static_assert(std::is_base_of_v<Object, T>,
                "stitch: this is not a member function of the referenced type");
  if constexpr (std::is_same_v<Object, T>) {
    return kFunction<M>;
  } else {
    return kInheritedMethod<T, M>;
  }
}

// The registry entry that constructs a T from an A...: only keeping the result makes sense.
template <class T, class... A>
struct Constructor {
  static void reply(const std::shared_ptr<rpc::IncomingCall>& call, void*) {
    call->fail(Error(ErrorCode::protocol, "a constructor's result can only be kept"));
  }
  static void keep(const std::shared_ptr<rpc::IncomingCall>& call, void*, rpc::KeepResult sink) {
    std::tuple<A...> arguments;
    try {
      decode_arguments(*call, arguments);
    } catch (...) {
      sink({}, std::make_exception_ptr(rpc::CallRefused(to_error(std::current_exception()))));
      return;
    }
    rpc::OwnedObject value;
    try {
      value = rpc::OwnedObject::of(std::apply(
          [](A&... each) { return std::make_shared<T>(std::move(each)...); }, arguments));
    } catch (...) {
      sink({}, std::current_exception());
      return;
    }
    arguments = {};
    sink(std::move(value), nullptr);
  }
  static const rpc::Function& add() {
    rpc::Function function;
    function.id = rpc::function_id(typeid(Constructor).name());
    function.name = base::demangle(typeid(T).name());
    function.identity = reinterpret_cast<const void*>(&Constructor::keep);
    function.reply = &Constructor::reply;
    function.keep = &Constructor::keep;
    return rpc::FunctionRegistry::instance().add(std::move(function));
  }
};
template <class T, class... A>
inline const rpc::Function& kConstructor = Constructor<T, A...>::add();

// How an argument without a parameter to convert to is sent.
template <class A>
using SentAs = std::conditional_t<std::is_convertible_v<std::decay_t<A>, std::string_view>,
                                  std::string, std::decay_t<A>>;

// A future of the error that is being handled, of whatever type it is.
template <class R>
[[nodiscard]] Future<R> make_failed_now() {
  Promise<R> promise;
  promise.set_exception(std::current_exception());
  return promise.future();
}

// A request about the object of `handle`, for `function`. Errors of the handle are thrown.
struct TargetedRequest {
  std::shared_ptr<rpc::Agent> agent;
  rpc::OutMessage message;
};
[[nodiscard]] TargetedRequest begin_targeted(const rref::Handle& handle, rref::TargetUse use,
                                             std::uint64_t function_id, std::string_view function);

template <class T, auto M, class... Args>
auto call_method(const rref::Handle& handle, const Timeout& timeout, Args&&... args) {
  using Traits = rpc::TraitsOf<M>;
  using R = typename Traits::Result;
  static_assert(std::is_void_v<R> || Sendable<R>,
                "stitch: the result type of this method cannot be sent; keep it on the owner with "
                "remote<>()");
  const rpc::Function& function = method_function<T, M>();
  try {
    auto request = begin_targeted(handle, rref::TargetUse::call, function.id, function.name);
    encode_arguments<Traits>(request.message, std::forward<Args>(args)...);
    return start_call<R>(request.agent, handle.owner, function.name, timeout,
                         std::move(request.message));
  } catch (const Error&) {
    return make_failed_now<R>();
  }
}

template <class T, auto M, class... Args>
rref::HandlePtr create_by_method(const rref::Handle& handle, const Timeout& timeout,
                                 Args&&... args) {
  const rpc::Function& function = method_function<T, M>();
  auto request = begin_targeted(handle, rref::TargetUse::call, function.id, function.name);
  encode_arguments<rpc::TraitsOf<M>>(request.message, std::forward<Args>(args)...);
  return handle.rrefs->create(handle.owner, function.name,
                              request.agent->effective_timeout(timeout),
                              std::move(request.message));
}

template <auto F, class... Args>
rref::HandlePtr create_by_function(const std::shared_ptr<rpc::Agent>& agent, const Target& target,
                                   Args&&... args) {
  static_assert(rpc::IsFree<F>, "stitch: member functions are called through an RRef");
  const rpc::Function& function = kFunction<F>;
  agent->throw_if_stopped();
  target.expect_no_into("remote()");
  const WorkerInfo& to = target.resolve(agent->peers());
  rpc::OutMessage message = rpc::Agent::begin_request(function.id);
  encode_arguments<rpc::TraitsOf<F>>(message, std::forward<Args>(args)...);
  return rref::RRefAgent::of(*agent)->create(
      to, function.name, agent->effective_timeout(target.timeout()), std::move(message));
}

template <class T, class... Args>
rref::HandlePtr create_by_constructor(const std::shared_ptr<rpc::Agent>& agent,
                                      const Target& target, Args&&... args) {
  static_assert((Sendable<SentAs<Args>> && ...),
                "stitch: an argument of this constructor has a type that cannot be sent");
  static_assert(
      std::is_constructible_v<T, SentAs<Args>&&...>,
      "stitch: the type has no constructor for these arguments (text is sent as std::string)");
  const rpc::Function& function = kConstructor<T, SentAs<Args>...>;
  agent->throw_if_stopped();
  target.expect_no_into("remote()");
  const WorkerInfo& to = target.resolve(agent->peers());
  rpc::OutMessage message = rpc::Agent::begin_request(function.id);
  rpc::OutArchive archive(message);
  (encode_argument<0, SentAs<Args>>(archive, std::forward<Args>(args)), ...);
  return rref::RRefAgent::of(*agent)->create(
      to, function.name, agent->effective_timeout(target.timeout()), std::move(message));
}

[[nodiscard]] Error not_created_in_time(const rref::Handle& handle, std::chrono::nanoseconds limit);

// Completes with `timeout` after that time unless it is complete by then; zero: never.
template <class T>
void complete_by(const Promise<T>& promise, rpc::Agent& agent, std::chrono::nanoseconds timeout,
                 const rref::Handle& handle) {
  const auto deadline = base::deadline_or_none(timeout);
  if (deadline == rpc::Clock::time_point::max() || promise.future().ready()) return;
  const auto timer = agent.loop().call_at(
      deadline,
      [promise, error = not_created_in_time(handle, timeout)] { promise.set_error(error); });
  promise.future().on_ready([weak = agent.weak_from_this(), timer] {
    if (const auto alive = weak.lock()) alive->loop().cancel(timer);
  });
}

template <class T>
Future<T> fetch(const rref::Handle& handle, const Timeout& timeout) {
  try {
    constexpr const char* kName = "RRef::to_here";
    const auto agent = handle.rrefs->require_usable(handle, kName);
    if constexpr (std::is_void_v<T> || kCopyable<T>) {
      if (handle.id.owner == handle.rrefs->lifetime().self()) {
        Promise<T> promise;
        handle.rrefs->when_created(
            handle.id, [promise](const std::shared_ptr<void>& object,
                                 const std::optional<Error>& failure) mutable {
              if (failure) {
                promise.set_error(failure->with_prefix("its object was not created"));
              } else {
                if constexpr (std::is_void_v<T>) {
                  promise.set_value();
                } else {
                  promise.fulfil([&] {
                    return *static_cast<const T*>(
                        static_cast<const rpc::OwnedObject*>(object.get())->object.get());
                  });
                }
              }
            });
        complete_by(promise, *agent, agent->effective_timeout(timeout), handle);
        return promise.future();
      }
    }
    auto request = begin_targeted(
        handle, std::is_void_v<T> ? rref::TargetUse::await : rref::TargetUse::fetch, 0, kName);
    return start_call<T>(agent, handle.owner, kName, timeout, std::move(request.message));
  } catch (const Error&) {
    return make_failed_now<T>();
  }
}

[[nodiscard]] Future<void> when_created(const rref::Handle& handle, const Timeout& timeout);
// The object. Throws Error(invalid_argument) when it is not owned here; waits for its creation as
// when_created() does and throws its failure.
[[nodiscard]] rpc::OwnedObject local_value(const rref::Handle& handle, const Timeout& timeout);

}  // namespace stitch::detail

// At namespace scope: lets peers construct a T here, STITCH_EXPORT_CONSTRUCTOR(T, A...), that this
// program itself never constructs remotely. A... are the arguments' types as they are sent:
// decayed, text as std::string.
#define STITCH_EXPORT_CONSTRUCTOR(...)                                                 \
  [[maybe_unused]] static const bool STITCH_DETAIL_JOIN(stitch_export_, __COUNTER__) = \
      (::stitch::rpc::FunctionRegistry::instance().export_function(                    \
           ::stitch::detail::Constructor<__VA_ARGS__>::add()),                         \
       true)
