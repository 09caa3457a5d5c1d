#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>

#include "stitch/rpc/future/future.h"
#include "stitch/rpc/message/placed_tensor.h"

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
  using Arguments = std::tuple<std::remove_cvref_t<Params>...>;
  static constexpr std::size_t kArity = sizeof...(Params);
  // A non-const lvalue reference would suggest that changes come back.
  static constexpr bool kTakesOutParameter =
      ((std::is_lvalue_reference_v<Params> && !std::is_const_v<std::remove_reference_t<Params>>) ||
       ...);
  template <std::size_t I>
  using Param = std::tuple_element_t<I, std::tuple<Params...>>;
};

template <class F>
struct FunctionTraits : FunctionTraits<decltype(&F::operator())> {
  static_assert(std::is_empty_v<F>, "stitch: only captureless lambdas can be called remotely");
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
#undef STITCH_MEMBER_TRAITS

template <auto F>
struct FunctionTag {};

// Free function, static member or captureless lambda; false for a member function.
template <auto F>
concept IsFree = !std::is_member_function_pointer_v<decltype(F)>;
template <auto F>
using TraitsOf = FunctionTraits<std::remove_cv_t<decltype(F)>>;

// The name of a function for people, "ps::embed", from its FunctionTag's mangled type name.
[[nodiscard]] std::string function_display_name(const std::type_info& tag);
// Its id on the wire: a hash (FNV-1a, 64 bits) of a name; never 0. Equal in every program that has
// the function.
[[nodiscard]] std::uint64_t function_id(std::string_view name);

}  // namespace stitch::rpc
