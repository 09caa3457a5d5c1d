#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <unordered_map>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/rpc/future/future.h"
#include "stitch/rpc/message/placed_tensor.h"
#include "stitch/rpc/message/sendable.h"

namespace stitch {

// Picks one function of an overload set: rpc_sync<overload<int(int)>(twice)>("ps0", 21).
template <class Signature>
requires std::is_function_v<Signature>
constexpr Signature* overload(Signature* function) { return function; }

}  // namespace stitch

namespace stitch::rpc {

template <class R, class Object, class... Params>
struct Signature {
  using Return = R;  // as written
  using Result =
      detail::ReceivedT<detail::UnwrapT<std::remove_cvref_t<R>>>;  // what the caller gets
  using ObjectType = Object;  // of a member function; void otherwise
  using Parameters = std::tuple<Params...>;
  using Arguments = std::tuple<std::remove_cvref_t<Params>...>;
  static constexpr std::size_t kArity = sizeof...(Params);
  template <std::size_t I>
  using Param = std::tuple_element_t<I, Parameters>;
  static constexpr bool kIsFunction = true;
  static constexpr bool kSaid = true;  // why not
};

// False; the compilers name it with F's type.
template <class F>
struct CanBeCalled {
  static constexpr bool value = false;
};
// Of what has no signature, or one that cannot be called remotely.
template <class F>
struct FunctionTraits : Signature<void, void> {
  static constexpr bool kIsFunction = false;
  static constexpr bool say() {
    if constexpr (std::is_member_object_pointer_v<F>) {
      static_assert(CanBeCalled<F>::value,
                    "stitch: a data member cannot be called remotely: write a method that returns "
                    "it");
    } else if constexpr (std::is_member_function_pointer_v<F>) {
      static_assert(CanBeCalled<F>::value,
                    "stitch: a member function that is qualified && or volatile, or takes `...`, "
                    "cannot be called remotely");
    } else if constexpr (std::is_pointer_v<F> && std::is_function_v<std::remove_pointer_t<F>>) {
      static_assert(CanBeCalled<F>::value,
                    "stitch: a function that takes `...` cannot be called remotely: give its "
                    "parameters types");
    } else if constexpr (std::is_class_v<F>) {
      static_assert(CanBeCalled<F>::value,
                    "stitch: this object has no operator() or several (a generic lambda): a "
                    "remote function has parameters of known types");
    } else {
      static_assert(CanBeCalled<F>::value,
                    "stitch: a remote function is a function, a captureless lambda or a member "
                    "function, not a value of this type");
    }
    return true;
  }
  static constexpr bool kSaid = say();
};
template <class F, class Arguments>
struct CanInvoke;
template <class F, class... P>
struct CanInvoke<F, std::tuple<P...>> : std::is_invocable<F, P...> {};
template <class F>
requires requires { &F::operator(); }
struct FunctionTraits<F> : FunctionTraits<decltype(&F::operator())> {
  using Operator = FunctionTraits<decltype(&F::operator())>;
  static constexpr bool kCanInvoke = CanInvoke<const F&, typename Operator::Parameters>::value;
  static constexpr bool kIsFunction = Operator::kIsFunction && std::is_empty_v<F> && kCanInvoke;
  static constexpr bool say() {
    if constexpr (!Operator::kIsFunction) {
      return Operator::kSaid;
    } else if constexpr (!std::is_empty_v<F>) {
      static_assert(CanBeCalled<F>::value,
                    "stitch: an object with data cannot be called remotely, only an empty one, "
                    "such as a captureless lambda");
    } else {
      static_assert(kCanInvoke || CanBeCalled<F>::value,
                    "stitch: an operator() that is not const cannot be called remotely");
    }
    return true;
  }
  static constexpr bool kSaid = say();
};
template <class R, class... P>
struct FunctionTraits<R (*)(P...)> : Signature<R, void, P...> {};
template <class R, class... P>
struct FunctionTraits<R (*)(P...) noexcept> : Signature<R, void, P...> {};
#define STITCH_MEMBER_TRAITS(qualifiers)  \
  template <class R, class T, class... P> \
  struct FunctionTraits<R (T::*)(P...) qualifiers> : Signature<R, T, P...> {};
STITCH_MEMBER_TRAITS()
STITCH_MEMBER_TRAITS(const)
STITCH_MEMBER_TRAITS(noexcept)
STITCH_MEMBER_TRAITS(const noexcept)
STITCH_MEMBER_TRAITS(&)
STITCH_MEMBER_TRAITS(const&)
STITCH_MEMBER_TRAITS(&noexcept)
STITCH_MEMBER_TRAITS(const& noexcept)
#undef STITCH_MEMBER_TRAITS

template <auto F>
struct FunctionTag {};

// Free function, static member or captureless lambda; false for a member function.
template <auto F>
concept IsFree = !std::is_member_function_pointer_v<decltype(F)>;
template <auto F>
using TraitsOf = FunctionTraits<std::remove_cv_t<decltype(F)>>;

}  // namespace stitch::rpc

namespace stitch::detail {

// False; the compilers name them with their arguments.
template <class Parameter, class Where>
struct CanBeParameter {
  static constexpr bool value = false;
};
template <class Given, class Parameter, class Where>
struct Converts {
  static constexpr bool value = false;
};
template <std::size_t Given, std::size_t Parameters, auto F>
struct TakesArguments {
  static constexpr bool value = false;
};

// A non-const lvalue reference would suggest that changes come back.
template <class P>
inline constexpr bool kIsOutParameter =
    std::is_lvalue_reference_v<P> && !std::is_const_v<std::remove_reference_t<P>>;

template <class P, class Where>
struct Parameter {
  static constexpr bool kGood = !kIsOutParameter<P> && Sendable<std::remove_cvref_t<P>>;
  static constexpr bool say() {
    if constexpr (kIsOutParameter<P>) {
      static_assert(CanBeParameter<P, Where>::value,
                    "stitch: a remote function cannot take a non-const reference: changes would "
                    "not come back");
      return true;
    } else {
      return WhyNot<std::remove_cvref_t<P>, Where>::kSaid;
    }
  }
  static constexpr bool kSaid = say();
};
template <auto F, class Parameters, class Numbers>
struct ParametersOf;
template <auto F, class... P, std::size_t... I>
struct ParametersOf<F, std::tuple<P...>, std::index_sequence<I...>> {
  static constexpr bool kGood = (Parameter<P, Argument<I + 1, F>>::kGood && ...);
  static constexpr bool kSaid = (Parameter<P, Argument<I + 1, F>>::kSaid && ...);
};

// Whether F can be called remotely. Fails to compile if not, with advice; once for each F.
template <auto F>
struct RemoteFunction {
  using Traits = rpc::TraitsOf<F>;
  using Parameters =
      ParametersOf<F, typename Traits::Parameters, std::make_index_sequence<Traits::kArity>>;
  static constexpr bool kGood = Traits::kIsFunction && Parameters::kGood;
  static_assert(Traits::kSaid && Parameters::kSaid);
};

}  // namespace stitch::detail

namespace stitch::rpc {

// The name of a function for people, "ps::embed", from its FunctionTag's mangled type name.
[[nodiscard]] std::string function_display_name(const std::type_info& tag);
// Its id on the wire: a hash (FNV-1a, 64 bits) of a name; never 0. Equal in every program that has
// the function.
[[nodiscard]] std::uint64_t function_id(std::string_view name);

}  // namespace stitch::rpc

namespace stitch::rpc {

class IncomingCall;

// Why a call was not run, or was refused for its arguments: what a KeepResult gets instead of an
// exception of the user's function. Thrown by a function, it reaches the caller
// as it is.
class CallRefused : public Error {
 public:
  explicit CallRefused(const Error& error) : Error(error) {}
};
// Takes the result of a function that was asked to keep it: an object, or the exception it threw.
using KeepResult = base::UniqueFunction<void(OwnedObject value, std::exception_ptr exception)>;

// A function that peers may call. Constant after static initialisation.
struct Function {
  std::uint64_t id = 0;
  std::string name;              // for people
  std::uint64_t default_id = 0;  // without STITCH_EXPORT_AS
  std::string default_name{};
  bool name_wanted = false;        // STITCH_EXPORT or STITCH_EXPORT_AS named it so
  const void* identity = nullptr;  // differs between different functions
  const std::type_info* object_type =
      nullptr;                  // of the object a member function needs; null for a free function
  bool run_inline = false;      // on the reader thread, see STITCH_INLINE
  bool before_serving = false;  // also before Worker::serve()
  // Decodes the arguments, runs the function (on `object` for a member function) and answers the
  // call, now or later.
  void (*reply)(const std::shared_ptr<IncomingCall>& call, void* object) = nullptr;
  // As above, but gives the result to `sink` (exactly once) instead of sending it.
  void (*keep)(const std::shared_ptr<IncomingCall>& call, void* object, KeepResult sink) = nullptr;
};

// All functions of this program that may be called remotely, by wire id. Filled before main() by
// the templates that name functions; only what is in here can be called. Thread contract: any
// thread.
class FunctionRegistry {
 public:
  [[nodiscard]] static FunctionRegistry& instance();

  // Registers `function` and returns the stored one. A second, different function of that id is
  // remembered for check().
  const Function& add(Function function) STITCH_EXCLUDES(mutex_);
  // The function can be called by its default name, also when it has others.
  void export_function(const Function& function) STITCH_EXCLUDES(mutex_);
  // Gives a registered function another name and wire id, by which this program calls it from now
  // on. The name must be unique. Earlier names keep working.
  void export_as(const Function& function, const std::string& name) STITCH_EXCLUDES(mutex_);
  // `before_serving`: it is served also before Worker::serve().
  void mark_inline(const Function& function, bool before_serving = false) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] const Function* find(std::uint64_t id) const STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::vector<std::string> names() const STITCH_EXCLUDES(mutex_);
  // Throws Error(invalid_argument) when two different functions share a name. init() calls it.
  void check() const STITCH_EXCLUDES(mutex_);

 private:
  struct Alias {
    std::string name;
    const Function* function;
  };
  void add_alias(std::uint64_t id, const std::string& name, const Function& function)
      STITCH_REQUIRES(mutex_);

  mutable base::Mutex mutex_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Function>> functions_ STITCH_GUARDED_BY(mutex_);
  std::unordered_map<std::uint64_t, Alias> aliases_
      STITCH_GUARDED_BY(mutex_);  // names that are not the latest
  std::unordered_map<const void*, const Function*> by_identity_ STITCH_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Function>> refused_ STITCH_GUARDED_BY(mutex_);
  std::vector<std::string> clashes_ STITCH_GUARDED_BY(mutex_);  // names of two different functions
};

}  // namespace stitch::rpc
