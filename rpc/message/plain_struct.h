#pragma once

#include <concepts>
#include <cstddef>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

#include "stitch/rpc/message/archive.h"

// How plain structs, aggregates without a serialize function, are written and read: their fields in
// order. Their number is found by trying initializers, the fields by structured bindings. Included
// by archive.h.
namespace stitch::rpc {

// Up to so many fields they may have.
inline constexpr std::size_t kMaxFields = 16;

// Stand for the initializer of a field of any type, of a reference, of a base class, of a union.
struct AnyValue {
  template <class T>
  operator T() const;  // NOLINT: implicit, as all of these
};
struct AnyLvalue {
  template <class T>
  operator T&() const;  // NOLINT
};
template <class Struct>
struct AnyBase {
  template <class T>
  requires(std::is_base_of_v<T, Struct> && !std::is_same_v<T, Struct>) operator T()
      const;  // NOLINT
};
struct AnyUnion {
  template <class T>
  requires std::is_union_v<T>
  operator T() const;  // NOLINT
};
template <class Any, std::size_t>
using RepeatedT = Any;
template <std::size_t N>
using Count = std::integral_constant<std::size_t, N>;

// made_of<T, Any, Middle...>(Count<n>, ..j.., ..k..): whether a T is made of n empty braces (which
// initialize one field each, also an array), j of Any, one of each Middle, and k of Any.
// made_of_pair(): the same with two values in braces in the middle.
#define STITCH_MADE_OF(n, ...)                                                                   \
  template <class T, class Any, class... Middle, std::size_t... J, std::size_t... K>             \
  constexpr bool made_of(Count<n>, std::index_sequence<J...>, std::index_sequence<K...>) {       \
    return requires {                                                                            \
      T{__VA_ARGS__ __VA_OPT__(, ) RepeatedT<Any, J>{}..., Middle{}..., RepeatedT<Any, K>{}...}; \
    };                                                                                           \
  }                                                                                              \
  template <class T, std::size_t... J, std::size_t... K>                                         \
  constexpr bool made_of_pair(Count<n>, std::index_sequence<J...>, std::index_sequence<K...>) {  \
    return requires {                                                                            \
      T{__VA_ARGS__ __VA_OPT__(, ) RepeatedT<AnyValue, J>{}...,                                  \
        {AnyValue{}, AnyValue{}},                                                                \
        RepeatedT<AnyValue, K>{}...};                                                            \
    };                                                                                           \
  }
STITCH_MADE_OF(0)
STITCH_MADE_OF(1, {})
STITCH_MADE_OF(2, {}, {})
STITCH_MADE_OF(3, {}, {}, {})
STITCH_MADE_OF(4, {}, {}, {}, {})
STITCH_MADE_OF(5, {}, {}, {}, {}, {})
STITCH_MADE_OF(6, {}, {}, {}, {}, {}, {})
STITCH_MADE_OF(7, {}, {}, {}, {}, {}, {}, {})
STITCH_MADE_OF(8, {}, {}, {}, {}, {}, {}, {}, {})
STITCH_MADE_OF(9, {}, {}, {}, {}, {}, {}, {}, {}, {})
STITCH_MADE_OF(10, {}, {}, {}, {}, {}, {}, {}, {}, {}, {})
STITCH_MADE_OF(11, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {})
STITCH_MADE_OF(12, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {})
STITCH_MADE_OF(13, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {})
STITCH_MADE_OF(14, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {})
STITCH_MADE_OF(15, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {})
STITCH_MADE_OF(16, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {})
STITCH_MADE_OF(17, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {})
#undef STITCH_MADE_OF

template <class T, class Any, std::size_t Braces, std::size_t Before, std::size_t After,
          class... Middle>
inline constexpr bool kMadeOf = made_of<T, Any, Middle...>(Count<Braces>{},
                                                           std::make_index_sequence<Before>{},
                                                           std::make_index_sequence<After>{});

template <class T, std::size_t N = kMaxFields + 1>
constexpr std::size_t most_braces() {
  if constexpr (N == 0 || kMadeOf<T, AnyValue, N, 0, 0>) {
    return N;
  } else {
    return most_braces<T, N - 1>();
  }
}
// How many of Any may follow so many braces.
template <class T, class Any, std::size_t Braces, std::size_t N = kMaxFields + 1 - Braces>
constexpr std::size_t most_after() {
  if constexpr (N == 0 || kMadeOf<T, Any, Braces, N, 0>) {
    return N;
  } else {
    return most_after<T, Any, Braces, N - 1>();
  }
}

// The fields of an aggregate, as far as its initializers tell. Those that have no default, or only
// an explicit one, and all behind them are counted by values; an array among these would count as
// its elements.
template <class T>
struct FieldCount {
  static constexpr std::size_t kBraces = most_braces<T>();
  static constexpr std::size_t kValues = most_after<T, AnyValue, kBraces>();
  static constexpr std::size_t kAll = kBraces + kValues;
  static constexpr bool kHasBase = kMadeOf<T, AnyValue, 0, 0, 0, AnyBase<T>>;
  static constexpr bool kTooMany = kAll > kMaxFields;

  template <std::size_t I>
  static constexpr bool is_bindable() {
    constexpr std::size_t kBefore = I < kBraces ? I : kBraces;
    using Before = std::make_index_sequence<I - kBefore>;
    if constexpr (made_of<T, AnyValue, AnyUnion>(Count<kBefore>{}, Before{},
                                                 std::make_index_sequence<kAll - I - 1>{})) {
      return false;
    } else if constexpr (I < kBraces) {
      return true;
    } else {
      return !made_of_pair<T>(Count<kBefore>{}, Before{}, std::index_sequence<>{}) ||
             made_of_pair<T>(Count<kBefore>{}, Before{}, std::make_index_sequence<kAll - I - 1>{});
    }
  }
  // Whether its fields can be bound to so many names.
  static constexpr bool kKnown = [] {
    if constexpr (kHasBase || kTooMany || kAll == 0) {
      return false;
    } else {
      return []<std::size_t... I>(std::index_sequence<I...>) { return (is_bindable<I>() && ...); }
      (std::make_index_sequence<kAll>{});
    }
  }();
};

// Their types and values.
template <class... Types>
struct TypeList {};
#define STITCH_FIELDS(n, ...)                                      \
  template <class T, class Visit>                                  \
  decltype(auto) visit_fields(Count<n>, T& value, Visit&& visit) { \
    auto& [__VA_ARGS__] = value;                                   \
    return visit(__VA_ARGS__);                                     \
  }
STITCH_FIELDS(1, f1)
STITCH_FIELDS(2, f1, f2)
STITCH_FIELDS(3, f1, f2, f3)
STITCH_FIELDS(4, f1, f2, f3, f4)
STITCH_FIELDS(5, f1, f2, f3, f4, f5)
STITCH_FIELDS(6, f1, f2, f3, f4, f5, f6)
STITCH_FIELDS(7, f1, f2, f3, f4, f5, f6, f7)
STITCH_FIELDS(8, f1, f2, f3, f4, f5, f6, f7, f8)
STITCH_FIELDS(9, f1, f2, f3, f4, f5, f6, f7, f8, f9)
STITCH_FIELDS(10, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10)
STITCH_FIELDS(11, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11)
STITCH_FIELDS(12, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12)
STITCH_FIELDS(13, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13)
STITCH_FIELDS(14, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14)
STITCH_FIELDS(15, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15)
STITCH_FIELDS(16, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16)
#undef STITCH_FIELDS
struct CollectTypes {
  template <class... Fields>
  TypeList<Fields...> operator()(const Fields&...) const {
    return {};
  }
};

// Probes for serialize functions: as the archives, but for what is constrained to those.
struct OutProbe : OutArchive {};
struct InProbe : InArchive {};
template <class T>
inline constexpr bool kHasSerializer =
    cereal::traits::detail::count_output_serializers<T, OutProbe>::value != 0 ||
    cereal::traits::detail::count_input_serializers<T, InProbe>::value != 0;

template <class T>
concept Aggregate = std::is_class_v<T> && requires {
  sizeof(T);
} && std::is_aggregate_v<T> && !std::is_empty_v<T> && !kHasSerializer<T>;
// A field that is const or a reference leaves a struct without assignment.
template <class T>
concept PlainStruct =
    Aggregate<T> && !std::is_const_v<T> && std::is_move_assignable_v<T> && FieldCount<T>::kKnown;
template <PlainStruct T>
using FieldTypes =
    decltype(visit_fields(Count<FieldCount<T>::kAll>{}, std::declval<T&>(), CollectTypes{}));

// Templates of the archive, too, so that the probes do not look at their second constraint.
template <std::same_as<OutArchive> Archive, PlainStruct T>
void CEREAL_SAVE_FUNCTION_NAME(Archive& archive, const T& value) {
  visit_fields(Count<FieldCount<T>::kAll>{}, value,
               [&](const auto&... fields) { archive(fields...); });
}
template <std::same_as<InArchive> Archive, PlainStruct T>
void CEREAL_LOAD_FUNCTION_NAME(Archive& archive, T& value) {
  visit_fields(Count<FieldCount<T>::kAll>{}, value, [&](auto&... fields) { archive(fields...); });
}

// ---- values to read into

// Whether blank<T>() exists: of types with a default constructor, of at::Device, and of structs,
// pairs, tuples and variants of these.
template <class T>
struct HasBlank
    : std::bool_constant<std::is_default_constructible_v<T> || std::is_same_v<T, at::Device>> {};
template <class... Fields>
struct HasBlank<TypeList<Fields...>> : std::conjunction<HasBlank<Fields>...> {};
template <PlainStruct T>
requires(!std::is_default_constructible_v<T>) struct HasBlank<T> : HasBlank<FieldTypes<T>> {
};
template <class A, class B>
struct HasBlank<std::pair<A, B>> : std::conjunction<HasBlank<A>, HasBlank<B>> {};
template <class... Ts>
struct HasBlank<std::tuple<Ts...>> : std::conjunction<HasBlank<Ts>...> {};

template <class First, class... Rest>
requires(!std::is_default_constructible_v<First>) struct HasBlank<std::variant<First, Rest...>>
    : HasBlank<First> {
};

template <class T>
[[nodiscard]] T blank();
struct BlankField {
  template <class T>
  operator T() const {  // NOLINT
    return blank<T>();
  }
};
template <class T>
struct BlankOf {
  static T make() {
    return []<std::size_t... I>(std::index_sequence<I...>) {
      return T{RepeatedT<BlankField, I>{}...};
    }
    (std::make_index_sequence<FieldCount<T>::kAll>{});
  }
};
template <class A, class B>
struct BlankOf<std::pair<A, B>> {
  static std::pair<A, B> make() { return {blank<A>(), blank<B>()}; }
};
template <class... Ts>
struct BlankOf<std::tuple<Ts...>> {
  static std::tuple<Ts...> make() { return std::tuple<Ts...>(blank<Ts>()...); }
};
template <class First, class... Rest>
struct BlankOf<std::variant<First, Rest...>> {
  static std::variant<First, Rest...> make() {
    return std::variant<First, Rest...>(std::in_place_index<0>, blank<First>());
  }
};
// A value that is about to be read.
template <class T>
T blank() {
  if constexpr (std::is_default_constructible_v<T>) {
    return T();
  } else if constexpr (std::is_same_v<T, at::Device>) {
    return T(at::kCPU);
  } else {
    return BlankOf<T>::make();
  }
}

// A value to read into, on the heap where it is large: readers call themselves.
template <class T>
class ValueToRead {
  static constexpr bool kIsLarge = sizeof(T) > 1024;

 public:
  T& operator*() noexcept {
    if constexpr (kIsLarge) {
      return *value_;
    } else {
      return value_;
    }
  }

 private:
  static auto make() {
    if constexpr (kIsLarge) {
      return std::unique_ptr<T>(new T(blank<T>()));
    } else {
      return blank<T>();
    }
  }
  std::conditional_t<kIsLarge, std::unique_ptr<T>, T> value_ = make();
};

}  // namespace stitch::rpc
