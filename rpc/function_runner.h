#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <typeinfo>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/rpc/function/registry.h"
#include "stitch/rpc/message/archive.h"

namespace stitch::rpc {

// The value of an argument that is not in its request's body: an object of this worker, or the
// reply to a request for a copy of one.
struct GivenArgument {
  std::size_t position = 0;  // from 0
  std::uint64_t type = 0;    // detail::type_id() of what the caller refers to
  OwnedObject object;
  std::shared_ptr<InMessage> reply;
};
// Null if the argument at that position is in the body.
[[nodiscard]] GivenArgument* given_argument(InMessage& request, std::size_t position);

// ---- What the templates of handlers need of an IncomingCall, whose class programs do not see.
// Each function does what the method of the same name does.

[[nodiscard]] InArchive arguments_of(IncomingCall& call);
// Whether it has none.
[[nodiscard]] bool without_arguments(IncomingCall& call) noexcept;
void fail(IncomingCall& call, const Error& error);
void fail_in_handler(IncomingCall& call, const std::exception_ptr& exception);
void others_poll(IncomingCall& call) noexcept;
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

// From a function named at compile time to a registry entry that can be called from bytes.
namespace stitch::detail {

struct ReplyDelivery {
  std::shared_ptr<rpc::IncomingCall> call;
  void value() { rpc::reply(*call); }
  template <class V>
  void value(V&& value) {
    using Result = std::remove_cvref_t<V>;
    constexpr bool kMoves = std::is_nothrow_move_constructible_v<Result>;
    if constexpr (!kMoves) rpc::others_poll(*call);
    rpc::reply(*call, [&](rpc::OutArchive& archive) {
      // Destroyed before the answer is sent: its destructor may block, and the thread that has sent
      // the answer polls.
      std::conditional_t<kMoves, Result, const Result&> result(std::forward<V>(value));
      archive(result);
      archive.seal();
    });
  }
  void error(const std::exception_ptr& exception) { rpc::fail_in_handler(*call, exception); }
  void refused(const Error& error) { rpc::fail(*call, error); }
};

struct KeepDelivery {
  rpc::KeepResult sink;
  void value() { sink(rpc::OwnedObject::of(std::make_shared<std::monostate>()), nullptr); }
  template <class V>
  void value(V&& value) {
    using Object = ReceivedT<std::remove_cvref_t<V>>;
    sink(rpc::OwnedObject::of(std::make_shared<Object>(std::forward<V>(value))), nullptr);
  }
  void error(const std::exception_ptr& exception) { sink({}, exception); }
  void refused(const Error& error) { sink({}, std::make_exception_ptr(rpc::CallRefused(error))); }
};

// What stands for T where both ends must mean the same type.
template <class T>
[[nodiscard]] std::uint64_t type_id() {
  static const std::uint64_t id = rpc::function_id(typeid(T).name());
  return id;
}

// Throws the error of an argument, counted from 1, that the exception being handled keeps from
// being read.
[[noreturn]] void throw_mismatch(std::size_t position, const std::type_info& type);
// Throws the error of a referenced object whose type cannot be the argument's.
[[noreturn]] void throw_other_type(const std::type_info& type);

// Moves or copies an argument that is not in the body to its place.
template <class P>
void take_given(rpc::GivenArgument& given, P& argument) {
  if (given.type != type_id<P>())
    throw Error(ErrorCode::invalid_argument, "its reference is to an object of another type");
  if (given.reply) {
    if (const auto memory = rpc::memory_of(*given.reply)) rpc::use_on_current_streams(*memory);
    rpc::InArchive archive(*given.reply, rpc::result_in(*given.reply));
    archive(argument);
    archive.check_seal();
    archive.expect_end();
    given.reply.reset();
  } else if constexpr (kCopyable<P> && std::is_move_assignable_v<P>) {
    if (*given.object.type != typeid(P)) throw_other_type(*given.object.type);
    argument = P(*static_cast<const P*>(given.object.object.get()));
  } else {
    throw Error(ErrorCode::invalid_argument, "objects of this type cannot be copied");
  }
}

template <class... Params>
void decode_arguments(rpc::IncomingCall& call, std::tuple<Params...>& arguments) {
  if constexpr (sizeof...(Params) == 0) {
    if (rpc::without_arguments(call)) return;  // else they are too many
  }
  rpc::InArchive archive = rpc::arguments_of(call);
  std::size_t position = 0;
  const auto decode_one = [&]<class P>(P& argument) {
    ++position;
    try {
      if (auto* const given = rpc::given_argument(archive.message(), position - 1)) [[unlikely]] {
        take_given(*given, argument);
      } else {
        archive(argument);
      }
      archive.check_seal();
    } catch (...) {
      throw_mismatch(position, typeid(P));
    }
  };
  std::apply([&](auto&... argument) { (decode_one(argument), ...); }, arguments);
  archive.expect_end();
}

// Answers with the outcome of a future that a function has returned. REQUIRES: it is complete.
template <class T, class Delivery>
void deliver(const Future<T>& future, Delivery& delivery) {
  try {
    if constexpr (std::is_void_v<T>) {
      future.get();
      delivery.value();
    } else {
      delivery.value(future.get());
    }
  } catch (const rpc::CallRefused& refused) {
    delivery.refused(refused);
  } catch (...) {
    delivery.error(std::current_exception());
  }
}

// Calls `invoke(arguments...)` with the decoded arguments of `call` and hands the outcome to
// `delivery`.
template <class Result, class Arguments, class Invoke, class Delivery>
void run_function(const std::shared_ptr<rpc::IncomingCall>& call, Invoke invoke,
                  Delivery delivery) {
  // Shared only when the function may continue after it returned: a coroutine can hold references
  // to its arguments.
  std::conditional_t<kIsFuture<Result>, std::shared_ptr<Arguments>, std::optional<Arguments>>
      arguments;
  try {
    if constexpr (kIsFuture<Result>) {
      arguments = std::make_shared<Arguments>(rpc::blank<Arguments>());
    } else if constexpr (std::is_default_constructible_v<Arguments>) {
      arguments.emplace();
    } else {
      arguments.emplace(rpc::blank<Arguments>());
    }
    decode_arguments(*call, *arguments);
  } catch (...) {
    delivery.refused(to_error(std::current_exception()));
    return;
  }
  const auto apply = [&]() -> decltype(auto) {
    return std::apply([&](auto&... each) -> decltype(auto) { return invoke(std::move(each)...); },
                      *arguments);
  };
  try {
    if constexpr (kIsFuture<Result>) {
      rpc::others_poll(
          *call);  // what the future and its arguments hold is destroyed after the answer
      const Result future = apply();
      if (!future.valid()) {
        arguments.reset();
        delivery.refused(Error(ErrorCode::invalid_argument, kReturnedEmptyFuture));
        return;
      }
      const auto& state = future.shared_state();
      if (!state->ready()) rpc::stops_with(*call, state);
      state->on_ready(
          [future, arguments = std::move(arguments), delivery = std::move(delivery)]() mutable {
            arguments.reset();  // what they hold is destroyed before the answer is sent
            deliver(future, delivery);
          });
    } else if constexpr (std::is_void_v<Result>) {
      apply();
      arguments.reset();
      delivery.value();
    } else {
      Result result = apply();
      arguments.reset();  // what they hold is destroyed before the answer is sent
      delivery.value(std::move(result));
    }
  } catch (...) {
    arguments.reset();
    delivery.error(std::current_exception());
  }
}

template <auto F>
struct FunctionRunner {
  using Traits = rpc::TraitsOf<F>;
  using Return = std::remove_cvref_t<typename Traits::Return>;
  using Arguments = typename Traits::Arguments;

  template <class Delivery>
  static void run(const std::shared_ptr<rpc::IncomingCall>& call, void* object, Delivery delivery) {
    run_function<Return, Arguments>(
        call,
        [object]<class... A>(A&&... arguments) -> typename Traits::Return {
          if constexpr (rpc::IsFree<F>) {
            static_cast<void>(object);
            return call_with(std::index_sequence_for<A...>{}, arguments...);
          } else {
            return call_member(*static_cast<typename Traits::ObjectType*>(object),
                               std::index_sequence_for<A...>{}, arguments...);
          }
        },
        std::move(delivery));
  }
  static void reply(const std::shared_ptr<rpc::IncomingCall>& call, void* object) {
    if constexpr (std::is_void_v<typename Traits::Result> || Sendable<typename Traits::Result>) {
      run(call, object, ReplyDelivery{call});
    } else {
      rpc::fail(*call, Error(ErrorCode::invalid_argument,
                             "its result of type " +
                                 base::demangle(typeid(typename Traits::Result).name()) +
                                 " cannot be sent; use remote<>"));
    }
  }
  static void keep(const std::shared_ptr<rpc::IncomingCall>& call, void* object,
                   rpc::KeepResult sink) {
    run(call, object, KeepDelivery{std::move(sink)});
  }

 private:
  // A const& parameter gets an lvalue (a coroutine may keep referring to it), everything else is
  // moved in.
  template <std::size_t I, class A>
  static decltype(auto) pass(A& argument) {
    if constexpr (std::is_lvalue_reference_v<typename Traits::template Param<I>>) {
      return static_cast<const A&>(argument);
    } else {
      return std::move(argument);
    }
  }
  template <std::size_t... I, class... A>
  static typename Traits::Return call_with(std::index_sequence<I...>, A&... arguments) {
    return F(pass<I>(arguments)...);
  }
  template <class T, std::size_t... I, class... A>
  static typename Traits::Return call_member(T& object, std::index_sequence<I...>,
                                             A&... arguments) {
    return (object.*F)(pass<I>(arguments)...);
  }
};

template <auto F>
const rpc::Function& register_function() {
  if constexpr (RemoteFunction<F>::kGood) {
    using Traits = rpc::TraitsOf<F>;
    rpc::Function function;
    const std::type_info& tag = typeid(rpc::FunctionTag<F>);
    function.id = rpc::function_id(tag.name());
    function.name = rpc::function_display_name(tag);
    function.identity = reinterpret_cast<const void*>(&FunctionRunner<F>::keep);
    if constexpr (!rpc::IsFree<F>) function.object_type = &typeid(typename Traits::ObjectType);
    function.reply = &FunctionRunner<F>::reply;
    function.keep = &FunctionRunner<F>::keep;
    return rpc::FunctionRegistry::instance().add(std::move(function));
  } else {
    static const rpc::Function kNone;
    return kNone;
  }
}

}  // namespace stitch::detail

namespace stitch {

// The registry entry of F. Naming it anywhere in a program registers F before main().
template <auto F>
inline const rpc::Function& kFunction = detail::register_function<F>();

}  // namespace stitch

#define STITCH_DETAIL_JOIN2(a, b) a##b
#define STITCH_DETAIL_JOIN(a, b) STITCH_DETAIL_JOIN2(a, b)
// At namespace scope: lets peers call a function that this program itself never calls remotely.
#define STITCH_EXPORT(...)                                                             \
  [[maybe_unused]] static const bool STITCH_DETAIL_JOIN(stitch_export_, __COUNTER__) = \
      (::stitch::rpc::FunctionRegistry::instance().export_function(                    \
           ::stitch::detail::register_function<__VA_ARGS__>()),                        \
       true)
// The same under a name of its own: caller and callee that both export a function under one name
// need not have it in common. A function may have several such names, and its own if that is
// exported, too; this program calls it by the last.
#define STITCH_EXPORT_AS(name, ...)                                                    \
  [[maybe_unused]] static const bool STITCH_DETAIL_JOIN(stitch_export_, __COUNTER__) = \
      (::stitch::rpc::FunctionRegistry::instance().export_as(                          \
           ::stitch::detail::register_function<__VA_ARGS__>(), name),                  \
       true)
// At namespace scope: the function runs on the thread that read the message; it must be short and
// must not block.
#define STITCH_INLINE(...)                                                             \
  [[maybe_unused]] static const bool STITCH_DETAIL_JOIN(stitch_inline_, __COUNTER__) = \
      (::stitch::rpc::FunctionRegistry::instance().mark_inline(                        \
           ::stitch::detail::register_function<__VA_ARGS__>()),                        \
       true)
