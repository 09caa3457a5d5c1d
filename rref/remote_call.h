#pragma once

#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/rpc/calls.h"
#include "stitch/rref/agent/object_access.h"

// The requests behind RRef<T> and remote<>(): typed at compile time, ordinary rpc requests on the
// wire.
namespace stitch::detail {

// The registry entry of a method M called on a T. A method that T inherits has an entry of its own,
// which converts the pointer to a T to one to the base.
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

// The registry entry that constructs a T from an A... . Its result can only be kept.
template <class T, class... A>
struct Constructor {
  static void reply(const std::shared_ptr<rpc::IncomingCall>& call, void*) {
    rref::refuse_reply(call);
  }
  static void keep(const std::shared_ptr<rpc::IncomingCall>& call, void*, rpc::KeepResult sink) {
    auto arguments = rpc::blank<std::tuple<A...>>();
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
    arguments = rpc::blank<std::tuple<A...>>();
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

// An RRef<T> may stand for an argument of type T.
template <class T>
inline constexpr bool kCanStandIn = Sendable<T>&& kCopyable<T>&& std::is_move_assignable_v<T>;

// How an argument without a parameter to convert to is sent.
template <class A>
using SentAs = std::conditional_t<std::is_convertible_v<std::decay_t<A>, std::string_view>,
                                  std::string, std::decay_t<A>>;

// Runs `write`, which writes the arguments of a request; what it throws leaves as was_not_made().
template <class Write>
void write_arguments(const rref::ObjectRequest& request, const std::string& function,
                     Write&& write) {
  try {
    write();
  } catch (...) {
    throw was_not_made(function, *request.to, std::current_exception());
  }
}

// Runs `make`; what it throws leaves as an Error.
template <class Make>
rref::HandlePtr create_or_throw(Make&& make) {
  try {
    return make();
  } catch (...) {
    throw to_error(std::current_exception());
  }
}

template <class T, auto M, class... Args>
auto call_method(const rref::HandlePtr& handle, const rref::HandleUse& use, Args&&... args) {
  using Traits = rpc::TraitsOf<M>;
  using R = typename Traits::Result;
  static_assert(CallOf<M, Args...>::say() && ResultOf<M>::say());
  if constexpr (CallOf<M, Args...>::kGood && ResultOf<M>::kGood) {
    const rpc::Function& function = method_function<T, M>();
    try {
      auto request = rref::begin_method_call(handle, use, function.id, function.name);
      write_arguments(request, function.name, [&] {
        encode_arguments<Traits>(*request.message, std::forward<Args>(args)...);
      });
      return start_call<R>(request.agent, *request.to, function.name, use.timeout,
                           std::move(request.message));
    } catch (...) {
      return rref::make_failed_future<R>();
    }
  } else {
    return Future<R>();
  }
}

template <class T, auto M, class... Args>
rref::HandlePtr create_by_method(const rref::HandlePtr& handle, const rref::HandleUse& use,
                                 Args&&... args) {
  static_assert(CallOf<M, Args...>::say());
  if constexpr (CallOf<M, Args...>::kGood) {
    const rpc::Function& function = method_function<T, M>();
    return create_or_throw([&] {
      auto request = rref::begin_method_call(handle, use, function.id, function.name);
      write_arguments(request, function.name, [&] {
        encode_arguments<rpc::TraitsOf<M>>(*request.message, std::forward<Args>(args)...);
      });
      return rref::create(std::move(request), function.name, use.timeout);
    });
  } else {
    return nullptr;
  }
}

template <auto F, class... Args>
rref::HandlePtr create_by_function(const std::shared_ptr<rpc::Agent>& agent, const Target& target,
                                   Args&&... args) {
  static_assert(rpc::IsFree<F>, "stitch: member functions are called through an RRef");
  static_assert(CallOf<F, Args...>::say());
  if constexpr (rpc::IsFree<F> && CallOf<F, Args...>::kGood) {
    const rpc::Function& function = kFunction<F>;
    return create_or_throw([&] {
      auto request = rref::begin_creation(agent, target, function.id);
      write_arguments(request, function.name, [&] {
        encode_arguments<rpc::TraitsOf<F>>(*request.message, std::forward<Args>(args)...);
      });
      return rref::create(std::move(request), function.name, target.timeout());
    });
  } else {
    return nullptr;
  }
}

// Whether a T can be constructed from arguments of these types, as they are sent. say() fails to
// compile if not, with advice.
template <class T, class... A>
struct CanConstruct {
  static constexpr bool value = std::is_constructible_v<T, A&&...>;
};
template <class T, class... A>
struct ConstructionOf {
  static constexpr bool kSendable = (Sendable<A> && ...);
  static constexpr bool kGood = kSendable && CanConstruct<T, A...>::value;
  static constexpr bool say() {
    static_assert(!kSendable || CanConstruct<T, A...>::value,
                  "stitch: the type has no constructor for these arguments (text is sent as "
                  "std::string)");
    return []<std::size_t... I>(std::index_sequence<I...>) {
      return (WhyNot<A, ConstructorArgument<I + 1, T>>::kSaid && ...);
    }
    (std::index_sequence_for<A...>{});
  }
};

template <class T, class... Args>
rref::HandlePtr create_by_constructor(const std::shared_ptr<rpc::Agent>& agent,
                                      const Target& target, Args&&... args) {
  using Construction = ConstructionOf<T, SentAs<Args>...>;
  static_assert(Construction::say());
  if constexpr (Construction::kGood) {
    const rpc::Function& function = kConstructor<T, SentAs<Args>...>;
    return create_or_throw([&] {
      auto request = rref::begin_creation(agent, target, function.id);
      write_arguments(request, function.name, [&] {
        rpc::OutArchive archive(*request.message);
        (encode_argument<0, SentAs<Args>>(archive, std::forward<Args>(args)), ...);
      });
      return rref::create(std::move(request), function.name, target.timeout());
    });
  } else {
    return nullptr;
  }
}

template <class T>
Future<T> fetch(const rref::HandlePtr& handle, const rref::HandleUse& use) {
  try {
    constexpr const char* kName = "RRef::to_here";
    if constexpr (std::is_void_v<T> || kCopyable<T>) {
      if (handle->is_owner()) {
        const auto agent = rref::require_usable(*handle, kName);
        Promise<T> promise;
        rref::run_when_created(*handle, [promise](const std::shared_ptr<void>& object,
                                                  const std::optional<Error>& failure) {
          if (failure) {
            promise.set_error(failure->with_prefix("its object was not created"));
          } else {
            if constexpr (std::is_void_v<T>) {
              promise.set_value();
            } else {
              promise.fulfil([&] {
                const auto& owned = *static_cast<const rpc::OwnedObject*>(object.get());
                if (*owned.type != typeid(T)) {
                  throw Error(ErrorCode::invalid_argument,
                              "the object is of type " + base::demangle(owned.type->name()) +
                                  ", not " + base::demangle(typeid(T).name()));
                }
                return *static_cast<const T*>(owned.object.get());
              });
            }
          }
        });
        rref::complete_by(promise, *handle, agent, use.timeout);
        return promise.future();
      }
    }
    auto request =
        std::is_void_v<T> ? rref::begin_wait(handle, use, kName) : rref::begin_fetch(handle, use);
    return start_call<T>(request.agent, *request.to, kName, use.timeout,
                         std::move(request.message));
  } catch (...) {
    return rref::make_failed_future<T>();
  }
}

}  // namespace stitch::detail

// STITCH_EXPORT_CONSTRUCTOR(T, A...), at namespace scope: lets peers construct a T here although
// this program never constructs one remotely. A... are the types of the arguments as they are sent:
// decayed, text as std::string.
#define STITCH_EXPORT_CONSTRUCTOR(...)                                                 \
  [[maybe_unused]] static const bool STITCH_DETAIL_JOIN(stitch_export_, __COUNTER__) = \
      (::stitch::rpc::FunctionRegistry::instance().export_function(                    \
           ::stitch::detail::Constructor<__VA_ARGS__>::add()),                         \
       true)
