#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string_view>
#include <typeinfo>

#include "stitch/rpc/message/archive.h"

namespace stitch {

template <class T>
class Future;

namespace detail {

// Up to so many bytes an argument or a result has as a C++ object: several copies of each lie on
// the stack of the thread that reads or writes it.
inline constexpr std::size_t kMaxValueBytes = std::size_t{64} << 10;
template <class T>
inline constexpr bool kFitsOnStack = sizeof(T) <= kMaxValueBytes;

// Whether T can be sent as a part of another value. `Outer` are the structs that it is a part of:
// a struct may contain itself, in a vector or behind a pointer.
template <class T, class Outer = rpc::TypeList<>>
struct IsSendable;

template <class Outer, class... Ts>
struct AllSendable : std::conjunction<IsSendable<std::remove_cv_t<Ts>, Outer>...,
                                      rpc::HasBlank<std::remove_cv_t<Ts>>...> {
  using Parts = rpc::TypeList<std::remove_cv_t<Ts>...>;
};
// Of those that cereal makes by their default constructor.
template <class Outer, class... Ts>
struct AllDefault
    : std::conjunction<std::is_default_constructible<Ts>..., AllSendable<Outer, Ts...>> {
  using Parts = rpc::TypeList<std::remove_cv_t<Ts>...>;
};

template <class Outer, class Fields>
struct FieldsSendable;
template <class Outer, class... Fields>
struct FieldsSendable<Outer, rpc::TypeList<Fields...>>
    : std::conjunction<IsSendable<Fields, Outer>...> {};
template <class T, class Outer>
struct IsPartOf;
template <class T, class... Outer>
struct IsPartOf<T, rpc::TypeList<Outer...>> : std::disjunction<std::is_same<T, Outer>...> {};
template <class T, class Outer>
struct With;
template <class T, class... Outer>
struct With<T, rpc::TypeList<Outer...>> {
  using type = rpc::TypeList<T, Outer...>;
};
template <class T, class Outer>
struct StructSendable : FieldsSendable<typename With<T, Outer>::type, rpc::FieldTypes<T>> {};

template <class T>
struct SomeSerializer
    : std::bool_constant<cereal::traits::is_output_serializable<T, rpc::OutArchive>::value &&
                         cereal::traits::is_input_serializable<T, rpc::InArchive>::value> {};
template <class T, class Outer>
struct OtherSendable : SomeSerializer<T> {};
template <rpc::PlainStruct T, class Outer>
struct OtherSendable<T, Outer>
    : std::conditional_t<IsPartOf<T, Outer>::value, std::true_type, StructSendable<T, Outer>> {};

template <class T, class Outer>
struct IsSendable : std::conditional_t<std::is_object_v<T> && !std::is_pointer_v<T>,
                                       OtherSendable<T, Outer>, std::false_type> {};

// Containers are as sendable as what they hold.
template <class T, std::size_t N, class O>
struct IsSendable<T[N], O> : AllSendable<O, T> {};
template <class T, class A, class O>
struct IsSendable<std::vector<T, A>, O> : AllSendable<O, T> {};
template <class T, class A, class O>
struct IsSendable<std::deque<T, A>, O> : AllSendable<O, T> {};
template <class T, class A, class O>
struct IsSendable<std::list<T, A>, O> : AllSendable<O, T> {};
template <class T, std::size_t N, class O>
struct IsSendable<std::array<T, N>, O> : AllSendable<O, T> {};
template <class T, class O>
struct IsSendable<std::optional<T>, O> : AllSendable<O, T> {};
template <class T, class O>
requires rpc::kHasOwnOptional<T>
struct IsSendable<c10::optional<T>, O> : AllSendable<O, T> {
};
template <class T, class D, class O>
struct IsSendable<std::unique_ptr<T, D>, O> : AllDefault<O, T> {};
// Shared pointers could be made to share across types by the bytes of a peer.
template <class T, class O>
struct IsSendable<std::shared_ptr<T>, O> : std::false_type {};
template <class T, class O>
struct IsSendable<std::weak_ptr<T>, O> : std::false_type {};
template <class A, class B, class O>
struct IsSendable<std::pair<A, B>, O> : AllSendable<O, A, B> {};
template <class... Ts, class O>
struct IsSendable<std::tuple<Ts...>, O> : AllSendable<O, Ts...> {};
template <class... Ts, class O>
struct IsSendable<std::variant<Ts...>, O> : AllSendable<O, Ts...> {};
template <class K, class C, class A, class O>
struct IsSendable<std::set<K, C, A>, O> : AllSendable<O, K> {};
template <class K, class C, class A, class O>
struct IsSendable<std::multiset<K, C, A>, O> : AllSendable<O, K> {};
template <class K, class V, class C, class A, class O>
struct IsSendable<std::map<K, V, C, A>, O> : AllSendable<O, K, V> {};
template <class K, class V, class C, class A, class O>
struct IsSendable<std::multimap<K, V, C, A>, O> : AllSendable<O, K, V> {};
template <class K, class H, class E, class A, class O>
struct IsSendable<std::unordered_set<K, H, E, A>, O> : AllSendable<O, K> {};
template <class K, class H, class E, class A, class O>
struct IsSendable<std::unordered_multiset<K, H, E, A>, O> : AllSendable<O, K> {};
template <class K, class V, class H, class E, class A, class O>
struct IsSendable<std::unordered_map<K, V, H, E, A>, O> : AllSendable<O, K, V> {};
template <class K, class V, class H, class E, class A, class O>
struct IsSendable<std::unordered_multimap<K, V, H, E, A>, O> : AllSendable<O, K, V> {};
template <class K, class V, class O>
struct IsSendable<torch::OrderedDict<K, V>, O> : AllSendable<O, K, V> {};

}  // namespace detail

// Types that may be arguments and results of remote functions, of at most 64 KiB as C++ objects:
// - arithmetic types, enums, std::string, chrono durations, std::filesystem::path, stitch::Error,
// stitch::WorkerInfo;
// - at::Tensor (rpc/message/tensor_codec.h says which properties travel), at::Half, at::BFloat16,
// c10::complex, at::Scalar, at::Device;
// - stitch::RRef and stitch::RemoteModule;
// - standard containers, std::optional, c10::optional, variant, tuple, pair, unique_ptr and
// torch::OrderedDict of these;
// - plain structs: aggregates of up to 16 fields of these types, without base classes, bit-fields,
// unions, references or const fields;
// - other classes with a cereal serialize function (or save and load) and a default constructor.
template <class T>
concept Sendable = detail::IsSendable<std::remove_cv_t<T>>::value &&
    rpc::HasBlank<std::remove_cv_t<T>>::value && detail::kFitsOnStack<T>;

namespace detail {

// ---- why a type cannot be sent

// Where a value stands, for the compiler's errors: argument N of F, its result, field N of Struct,
// an element of Container.
template <std::size_t N, auto F>
struct Argument;
template <auto F>
struct Result;
template <std::size_t N, class T>
struct ConstructorArgument;
template <class T>
struct Object;
template <std::size_t N, class Struct>
struct Field;
template <class Container>
struct ElementOf;

template <class Where>
inline constexpr bool kIsPart = false;
template <std::size_t N, class Struct>
inline constexpr bool kIsPart<Field<N, Struct>> = true;
template <class Container>
inline constexpr bool kIsPart<ElementOf<Container>> = true;

// False; the compilers name it with its arguments.
template <class T, class Where>
struct CanBeSent {
  static constexpr bool value = false;
};

template <class T>
inline constexpr bool kIsView = false;
template <class C, class T>
inline constexpr bool kIsView<std::basic_string_view<C, T>> = true;
template <class T>
inline constexpr bool kIsSpan = false;
template <class T, std::size_t N>
inline constexpr bool kIsSpan<std::span<T, N>> = true;
template <class T>
inline constexpr bool kIsSpan<c10::ArrayRef<T>> = true;
template <class T>
inline constexpr bool kIsSpan<std::initializer_list<T>> = true;
template <class T>
inline constexpr bool kIsShared = false;
template <class T>
inline constexpr bool kIsShared<std::shared_ptr<T>> = true;
template <class T>
inline constexpr bool kIsShared<std::weak_ptr<T>> = true;
template <class T>
inline constexpr bool kIsShared<c10::intrusive_ptr<T>> = true;
template <class T>
inline constexpr bool kIsCallable = false;
template <class F>
inline constexpr bool kIsCallable<std::function<F>> = true;
template <class T>
inline constexpr bool kIsWrapped = false;
template <class T>
inline constexpr bool kIsWrapped<std::reference_wrapper<T>> = true;
template <class T>
inline constexpr bool kIsFutureValue = false;
template <class T>
inline constexpr bool kIsFutureValue<Future<T>> = true;

template <class T, class Where>
struct WhyNot;
template <class T, class Parts>
struct WhyNotParts;
template <class T, class... Parts>
struct WhyNotParts<T, rpc::TypeList<Parts...>> {
  static constexpr bool kSendable =
      ((IsSendable<Parts>::value && rpc::HasBlank<Parts>::value) && ...);
  static constexpr bool kSaid = (WhyNot<Parts, ElementOf<T>>::kSaid && ...);
};

// The fields of a struct as they are, also const ones.
struct CollectFields {
  template <class... Fields>
  rpc::TypeList<Fields...> operator()(Fields&...) const {
    return {};
  }
};
template <class T, class Fields, class Numbers>
struct WhyNotFields;
template <class T, class... Fields, std::size_t... I>
struct WhyNotFields<T, rpc::TypeList<Fields...>, std::index_sequence<I...>> {
  static constexpr bool kSaid = (WhyNot<Fields, Field<I + 1, T>>::kSaid && ...);
};
template <class T>
using WhyNotStruct = WhyNotFields<T,
                                  decltype(rpc::visit_fields(rpc::Count<rpc::FieldCount<T>::kAll>{},
                                                             std::declval<T&>(), CollectFields{})),
                                  std::make_index_sequence<rpc::FieldCount<T>::kAll>>;
// The first field, from 1 on, that takes an lvalue only; 0: none.
template <class T, std::size_t I = 0>
constexpr std::size_t reference_field() {
  constexpr std::size_t kAll = rpc::most_after<T, rpc::AnyLvalue, 0>();
  if constexpr (I >= kAll || kAll > rpc::kMaxFields) {
    return 0;
  } else if constexpr (!rpc::kMadeOf<T, rpc::AnyLvalue, 0, I, kAll - I - 1, rpc::AnyValue>) {
    return I + 1;
  } else {
    return reference_field<T, I + 1>();
  }
}

// Fails to compile, with advice, if T cannot be sent; once for each place.
template <class T, class Where>
struct WhyNot {
  using Sendability = IsSendable<T>;
  using Here = CanBeSent<T, Where>;

  static constexpr bool say() {
    if constexpr (std::is_const_v<T> || !std::is_object_v<T>) {
      static_assert(Here::value,
                    "stitch: a reference or a const field cannot be received: make it "
                    "a value");
    } else if constexpr (Sendability::value && rpc::HasBlank<T>::value &&
                         (kIsPart<Where> || kFitsOnStack<T>)) {
      return true;
    } else if constexpr (std::is_pointer_v<T>) {
      say_of_pointer<std::remove_cv_t<std::remove_pointer_t<T>>>();
    } else if constexpr (!kIsPart<Where> && !kFitsOnStack<T>) {
      static_assert(Here::value,
                    "stitch: a value of more than 64 KiB cannot be sent: send a std::vector, or a "
                    "std::unique_ptr to it");
    } else if constexpr (kIsView<T>) {
      static_assert(Here::value, "stitch: a std::string_view cannot be sent: send a std::string");
    } else if constexpr (kIsSpan<T>) {
      static_assert(Here::value, "stitch: a view of an array cannot be sent: send a std::vector");
    } else if constexpr (kIsShared<T>) {
      static_assert(Here::value,
                    "stitch: a shared pointer cannot be sent: send the value, a std::unique_ptr, "
                    "or a stitch::RRef to an object that stays where it is");
    } else if constexpr (kIsCallable<T>) {
      static_assert(Here::value,
                    "stitch: a std::function cannot be sent: make the function a template "
                    "argument, or send a number that stands for it");
    } else if constexpr (kIsWrapped<T>) {
      static_assert(Here::value, "stitch: a std::reference_wrapper cannot be sent: send the value");
    } else if constexpr (kIsFutureValue<T>) {
      static_assert(Here::value,
                    "stitch: a stitch::Future cannot be sent: wait for it and send its value (a "
                    "remote function may return one)");
    } else if constexpr (Sendability::value) {
      static_assert(Here::value,
                    "stitch: this type cannot be received: give it a default constructor");
    } else if constexpr (requires { typename Sendability::Parts; } && !rpc::Aggregate<T>) {
      say_of_parts<WhyNotParts<T, typename Sendability::Parts>>();
    } else if constexpr (rpc::Aggregate<T>) {
      say_of_struct<rpc::FieldCount<T>>();
    } else {
      static_assert(Here::value,
                    "stitch: this type cannot be sent: give it template <class Archive> void "
                    "serialize(Archive& archive) { archive(a, b); }, or keep the object where it "
                    "is and send a stitch::RRef");
    }
    return true;
  }
  template <class Pointee>
  static constexpr void say_of_pointer() {
    if constexpr (std::is_same_v<Pointee, char>) {
      static_assert(Here::value, "stitch: a const char* cannot be sent: send a std::string");
    } else if constexpr (std::is_function_v<Pointee>) {
      static_assert(Here::value,
                    "stitch: a pointer to a function cannot be sent: make the function a template "
                    "argument, or send a number that stands for it");
    } else {
      static_assert(Here::value,
                    "stitch: a pointer cannot be sent: send the value, a std::unique_ptr or "
                    "std::vector, or a stitch::RRef to an object that stays where it is");
    }
  }
  template <class Parts>
  static constexpr void say_of_parts() {
    if constexpr (Parts::kSendable) {
      static_assert(Here::value,
                    "stitch: a std::unique_ptr to a value without a default constructor cannot be "
                    "sent");
    } else {
      static_assert(Parts::kSaid);
    }
  }
  template <class Fields>
  static constexpr void say_of_struct() {
    if constexpr (Fields::kTooMany) {
      static_assert(Here::value,
                    "stitch: a struct of more than 16 fields cannot be sent as it is: give it "
                    "template <class Archive> void serialize(Archive& archive) { archive(a, b); }");
    } else if constexpr (Fields::kHasBase) {
      static_assert(Here::value,
                    "stitch: a struct with a base class cannot be sent as it is: give it template "
                    "<class Archive> void serialize(Archive& archive) { archive(a, b); }");
    } else if constexpr (Fields::kKnown) {
      static_assert(WhyNotStruct<T>::kSaid);
    } else if constexpr (reference_field<T>() != 0) {
      static_assert(CanBeSent<T, Field<reference_field<T>(), T>>::value,
                    "stitch: a reference cannot be sent: make the field a value");
    } else {
      static_assert(Here::value,
                    "stitch: a struct with a union, or with an array behind a field without a "
                    "default, cannot be sent as it is: give it template <class Archive> void "
                    "serialize(Archive& archive) { archive(a, b); }");
    }
  }

  static constexpr bool kSaid = say();
};

}  // namespace detail

}  // namespace stitch

namespace stitch::rpc {

// An object of any type, kept on behalf of others: the result of a function that was asked to keep
// it. Copies share the object; the last one destroys it. Thread contract: as the object.
struct OwnedObject {
  std::shared_ptr<void> object;
  const std::type_info* type = nullptr;
  void (*encode)(OutArchive&, const void* object) = nullptr;  // null when the type cannot be sent

  template <class T>
  [[nodiscard]] static OwnedObject of(std::shared_ptr<T> object) {
    OwnedObject value{std::move(object), &typeid(T), nullptr};
    if constexpr (Sendable<T>) {
      value.encode = [](OutArchive& archive, const void* at) {
        archive(*static_cast<const T*>(at));
      };
    }
    return value;
  }
};

}  // namespace stitch::rpc
