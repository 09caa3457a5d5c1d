#pragma once

#include "stitch/rpc/message/archive.h"

namespace stitch {

namespace detail {

template <class T>
struct IsSendable
    : std::bool_constant<!std::is_pointer_v<T> && !std::is_reference_v<T> && std::is_object_v<T> &&
                         cereal::traits::is_output_serializable<T, rpc::OutArchive>::value &&
                         cereal::traits::is_input_serializable<T, rpc::InArchive>::value> {};

// Containers are as sendable as what they hold.
template <class... Ts>
struct AllSendable : std::conjunction<IsSendable<std::remove_cv_t<Ts>>...> {};
template <class T, class A>
struct IsSendable<std::vector<T, A>> : AllSendable<T> {};
template <class T, class A>
struct IsSendable<std::deque<T, A>> : AllSendable<T> {};
template <class T, class A>
struct IsSendable<std::list<T, A>> : AllSendable<T> {};
template <class T, std::size_t N>
struct IsSendable<std::array<T, N>> : AllSendable<T> {};
template <class T>
struct IsSendable<std::optional<T>> : AllSendable<T> {};
template <class T, class D>
struct IsSendable<std::unique_ptr<T, D>> : AllSendable<T> {};
// Shared pointers could be made to share across types by the bytes of a peer.
template <class T>
struct IsSendable<std::shared_ptr<T>> : std::false_type {};
template <class T>
struct IsSendable<std::weak_ptr<T>> : std::false_type {};
template <class A, class B>
struct IsSendable<std::pair<A, B>> : AllSendable<A, B> {};
template <class... Ts>
struct IsSendable<std::tuple<Ts...>> : AllSendable<Ts...> {};
template <class... Ts>
struct IsSendable<std::variant<Ts...>> : AllSendable<Ts...> {};
template <class K, class C, class A>
struct IsSendable<std::set<K, C, A>> : AllSendable<K> {};
template <class K, class C, class A>
struct IsSendable<std::multiset<K, C, A>> : AllSendable<K> {};
template <class K, class V, class C, class A>
struct IsSendable<std::map<K, V, C, A>> : AllSendable<K, V> {};
template <class K, class V, class C, class A>
struct IsSendable<std::multimap<K, V, C, A>> : AllSendable<K, V> {};
template <class K, class H, class E, class A>
struct IsSendable<std::unordered_set<K, H, E, A>> : AllSendable<K> {};
template <class K, class H, class E, class A>
struct IsSendable<std::unordered_multiset<K, H, E, A>> : AllSendable<K> {};
template <class K, class V, class H, class E, class A>
struct IsSendable<std::unordered_map<K, V, H, E, A>> : AllSendable<K, V> {};
template <class K, class V, class H, class E, class A>
struct IsSendable<std::unordered_multimap<K, V, H, E, A>> : AllSendable<K, V> {};

}  // namespace detail

// Types that may be arguments and results of remote functions: arithmetic types, enums, strings,
// chrono durations, at::Tensor, stitch::RRef, stitch::Error, standard containers, optional,
// variant, tuple, pair and unique_ptr of these, and structs with a cereal serialize function. They
// must be default constructible.
template <class T>
concept Sendable =
    detail::IsSendable<std::remove_cv_t<T>>::value && std::is_default_constructible_v<T>;

}  // namespace stitch
