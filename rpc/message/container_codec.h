#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "stitch/rpc/message/archive.h"
#include "stitch/rpc/message/plain_struct.h"

// How containers and the small types of libtorch are written and read; included by archive.h.
// cereal would do containers, too, but makes room for as many elements as a message announces, and
// an element may be a thousand times as large as its bytes. Here each element is constructed when
// its bytes are read. The bytes are cereal's: a count, then the elements.
namespace torch {
template <typename Key, typename Value>
class OrderedDict;
}  // namespace torch

namespace stitch::rpc {

// Room that is made ahead of the elements.
inline constexpr std::size_t kReservedBytes = std::size_t{64} << 10;

// What a node of a list, set or map takes beside its element.
inline constexpr std::size_t kNodeBytes = 32;
template <class Container>
[[nodiscard]] constexpr std::size_t memory_of_element() {
  constexpr bool has_no_nodes = requires(Container & container) {
    container.front();
    container[0];
  };
  return sizeof(typename Container::value_type) + (has_no_nodes ? 0 : kNodeBytes);
}

template <class Container>
void write_elements(OutArchive& archive, const Container& container) {
  archive.write_size(container.size());
  archive.count_memory(container.size() * memory_of_element<Container>());
  for (const auto& element : container) archive.write_element(element);
}
template <class Map>
void write_pairs(OutArchive& archive, const Map& map) {
  archive.write_size(map.size());
  archive.count_memory(map.size() * memory_of_element<Map>());
  for (const auto& [key, value] : map) archive.write_element(key, value);
}

template <class Sequence>
void read_sequence(InArchive& archive, Sequence& sequence) {
  const std::size_t count = archive.read_count(0);
  sequence.clear();
  if constexpr (requires { sequence.reserve(count); })
    sequence.reserve(std::min(count, kReservedBytes / sizeof(typename Sequence::value_type) + 1));
  for (std::size_t i = 0; i < count; ++i) {
    archive.count_memory(memory_of_element<Sequence>());
    if constexpr (std::is_default_constructible_v<typename Sequence::value_type>) {
      archive.read_element(sequence.emplace_back());
    } else {
      archive.read_element(sequence.emplace_back(blank<typename Sequence::value_type>()));
    }
  }
}
template <class Set>
void read_set(InArchive& archive, Set& set) {
  const std::size_t count = archive.read_count(0);
  set.clear();
  for (std::size_t i = 0; i < count; ++i) {
    archive.count_memory(memory_of_element<Set>());
    ValueToRead<typename Set::key_type> key;
    archive.read_element(*key);
    set.emplace_hint(set.end(), std::move(*key));
  }
}
template <class Map>
void read_map(InArchive& archive, Map& map) {
  const std::size_t count = archive.read_count(0);
  map.clear();
  for (std::size_t i = 0; i < count; ++i) {
    archive.count_memory(memory_of_element<Map>());
    ValueToRead<typename Map::key_type> key;
    ValueToRead<typename Map::mapped_type> value;
    archive.read_element(*key, *value);
    map.emplace_hint(map.end(), std::move(*key), std::move(*value));
  }
}

// Of which an array is copied in one piece.
template <class T>
concept Plain = std::is_arithmetic_v<T> && !std::is_same_v<T, bool>;

template <class T>
inline constexpr bool kFalse = false;
template <class T>
void refuse_shared_pointer() {
  static_assert(kFalse<T>,
                "stitch: a std::shared_ptr or std::weak_ptr cannot be sent, also not inside a "
                "struct: use a value, a std::unique_ptr, or a stitch::RRef to an object that stays "
                "where it is");
}

template <class C, class T, class A>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, std::basic_string<C, T, A>& text) {
  text.resize(archive.read_count(sizeof(C)));
  archive.read_array(text.data(), text.size());
}
template <Plain T, class A>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, std::vector<T, A>& vector) {
  vector.resize(archive.read_count(sizeof(T)));
  archive.read_array(vector.data(), vector.size());
}
// cereal's way with std::vector<bool> is sound.
template <class T, class A>
requires(!std::is_arithmetic_v<T>) void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive,
                                                                  const std::vector<T, A>& vector) {
  write_elements(archive, vector);
}
template <class T, class A>
requires(!std::is_arithmetic_v<T>) void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive,
                                                                  std::vector<T, A>& vector) {
  read_sequence(archive, vector);
}
template <class T, class A>
void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive, const std::deque<T, A>& deque) {
  write_elements(archive, deque);
}
template <class T, class A>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, std::deque<T, A>& deque) {
  read_sequence(archive, deque);
}
template <class T, class A>
void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive, const std::list<T, A>& list) {
  write_elements(archive, list);
}
template <class T, class A>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, std::list<T, A>& list) {
  read_sequence(archive, list);
}

template <class K, class C, class A>
void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive, const std::set<K, C, A>& set) {
  write_elements(archive, set);
}
template <class K, class C, class A>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, std::set<K, C, A>& set) {
  read_set(archive, set);
}
template <class K, class C, class A>
void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive, const std::multiset<K, C, A>& set) {
  write_elements(archive, set);
}
template <class K, class C, class A>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, std::multiset<K, C, A>& set) {
  read_set(archive, set);
}
template <class K, class H, class E, class A>
void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive, const std::unordered_set<K, H, E, A>& set) {
  write_elements(archive, set);
}
template <class K, class H, class E, class A>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, std::unordered_set<K, H, E, A>& set) {
  read_set(archive, set);
}
template <class K, class H, class E, class A>
void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive,
                               const std::unordered_multiset<K, H, E, A>& set) {
  write_elements(archive, set);
}
template <class K, class H, class E, class A>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, std::unordered_multiset<K, H, E, A>& set) {
  read_set(archive, set);
}

template <class K, class V, class C, class A>
void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive, const std::map<K, V, C, A>& map) {
  write_pairs(archive, map);
}
template <class K, class V, class C, class A>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, std::map<K, V, C, A>& map) {
  read_map(archive, map);
}
template <class K, class V, class C, class A>
void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive, const std::multimap<K, V, C, A>& map) {
  write_pairs(archive, map);
}
template <class K, class V, class C, class A>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, std::multimap<K, V, C, A>& map) {
  read_map(archive, map);
}
template <class K, class V, class H, class E, class A>
void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive, const std::unordered_map<K, V, H, E, A>& map) {
  write_pairs(archive, map);
}
template <class K, class V, class H, class E, class A>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, std::unordered_map<K, V, H, E, A>& map) {
  read_map(archive, map);
}
template <class K, class V, class H, class E, class A>
void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive,
                               const std::unordered_multimap<K, V, H, E, A>& map) {
  write_pairs(archive, map);
}
template <class K, class V, class H, class E, class A>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, std::unordered_multimap<K, V, H, E, A>& map) {
  read_map(archive, map);
}

// As cereal does, but for values without a default constructor. libtorch's own optional is that of
// the standard library in newer versions.
template <class Optional>
void read_optional(InArchive& archive, Optional& optional) {
  using T = typename Optional::value_type;
  bool is_empty = false;
  archive(is_empty);
  optional.reset();
  if (is_empty) return;
  if constexpr (std::is_default_constructible_v<T>) optional.emplace();
  if constexpr (!std::is_default_constructible_v<T>) optional.emplace(blank<T>());
  archive(*optional);
}
template <class T>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, std::optional<T>& optional) {
  read_optional(archive, optional);
}
template <class T>
inline constexpr bool kHasOwnOptional = !std::is_same_v<c10::optional<T>, std::optional<T>>;
template <class T>
requires kHasOwnOptional<T>
void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive, const c10::optional<T>& optional) {
  archive(!optional.has_value());
  if (optional.has_value()) archive(*optional);
}
template <class T>
requires kHasOwnOptional<T>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, c10::optional<T>& optional) {
  read_optional(archive, optional);
}

// As cereal does, but in place.
template <std::size_t I = 0, class... Ts>
void read_alternative(InArchive& archive, std::variant<Ts...>& variant, std::int32_t index) {
  if constexpr (I == sizeof...(Ts)) {
    throw Error(ErrorCode::invalid_argument,
                "a variant of " + std::to_string(I) + " types has index " + std::to_string(index));
  } else if (index != static_cast<std::int32_t>(I)) {
    read_alternative<I + 1>(archive, variant, index);
  } else if constexpr (std::is_default_constructible_v<
                           std::variant_alternative_t<I, std::variant<Ts...>>>) {
    archive(variant.template emplace<I>());
  } else {
    archive(
        variant.template emplace<I>(blank<std::variant_alternative_t<I, std::variant<Ts...>>>()));
  }
}
template <class... Ts>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, std::variant<Ts...>& variant) {
  std::int32_t index = 0;
  archive(index);
  read_alternative(archive, variant, index);
}

// cereal would take torch::save() and torch::load(), which have parameters of any number and type,
// for functions with a version, and for those of what has a serialize function.
template <class T>
inline constexpr bool kNamesDict = false;
template <class T, std::size_t N>
inline constexpr bool kNamesDict<std::array<T, N>> = kNamesDict<T>;
template <class K, class V>
inline constexpr bool kNamesDict<torch::OrderedDict<K, V>> = true;
template <template <class...> class Template, class... Ts>
inline constexpr bool kNamesDict<Template<Ts...>> = (kNamesDict<std::remove_cvref_t<Ts>> || ...);
template <class T, class Version>
requires kNamesDict<T>
void CEREAL_SAVE_FUNCTION_NAME(OutArchive&, const T&, Version&&) = delete;
template <class T, class Version>
requires kNamesDict<T>
void CEREAL_LOAD_FUNCTION_NAME(InArchive&, T&, Version&&) = delete;
template <class T>
requires(kNamesDict<T>&& kIsSerialized<T>) void CEREAL_SAVE_FUNCTION_NAME(OutArchive&,
                                                                          const T&) = delete;
template <class T>
requires(kNamesDict<T>&& kIsSerialized<T>) void CEREAL_LOAD_FUNCTION_NAME(InArchive&, T&) = delete;
template <class K, class V>
void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive, const torch::OrderedDict<K, V>& dict) {
  archive(dict.key_description());
  archive.write_size(dict.size());
  archive.count_memory(dict.size() * (sizeof(K) + sizeof(V) + kNodeBytes));
  for (const auto& item : dict) archive.write_element(item.key(), item.value());
}
template <class K, class V>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, torch::OrderedDict<K, V>& dict) {
  std::string description;
  archive(description);
  dict = torch::OrderedDict<K, V>(std::move(description));
  const std::size_t count = archive.read_count(0);
  for (std::size_t i = 0; i < count; ++i) {
    archive.count_memory(sizeof(K) + sizeof(V) + kNodeBytes);
    ValueToRead<K> key;
    ValueToRead<V> value;
    archive.read_element(*key, *value);
    dict.insert(std::move(*key), std::move(*value));
  }
}

// std::filesystem::path, without its header.
template <class T>
concept Path = std::is_same_v<typename T::string_type, std::string> && requires(const T& path) {
  typename T::format;
  { path.native() } -> std::same_as<const std::string&>;
};
template <Path T>
void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive, const T& path) {
  archive(path.native());
}
template <Path T>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, T& path) {
  std::string text;
  archive(text);
  path = T(std::move(text));
}

// Types of libtorch that are no tensors. Templates all: at::Scalar and at::Device are implicit from
// other types, which have their own ways.
template <class T>
concept ShortFloat = std::is_same_v<T, at::Half> || std::is_same_v<T, at::BFloat16>;
template <ShortFloat T>
void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive, const T& value) {
  archive.mark(std::is_same_v<T, at::Half> ? FieldMark::half : FieldMark::bfloat16);
  archive.write(value.x);
}
template <ShortFloat T>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, T& value) {
  archive.mark(std::is_same_v<T, at::Half> ? FieldMark::half : FieldMark::bfloat16);
  archive.read(value.x);
}
template <class T>
void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive, const c10::complex<T>& value) {
  archive(T(value.real()), T(value.imag()));
}
template <class T>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, c10::complex<T>& value) {
  T real{};
  T imag{};
  archive(real, imag);
  using Wide = std::conditional_t<std::is_same_v<T, at::Half>, float, T>;
  value = static_cast<c10::complex<T>>(c10::complex<Wide>(real, imag));
}
void write_scalar(OutArchive& archive, const at::Scalar& scalar);
[[nodiscard]] at::Scalar read_scalar(InArchive& archive);
template <std::same_as<at::Scalar> T>
void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive, const T& scalar) {
  write_scalar(archive, scalar);
}
template <std::same_as<at::Scalar> T>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, T& scalar) {
  scalar = read_scalar(archive);
}
void write_device(OutArchive& archive, at::Device device);
[[nodiscard]] at::Device read_device(InArchive& archive);
template <std::same_as<at::Device> T>
void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive, const T& device) {
  write_device(archive, device);
}
template <std::same_as<at::Device> T>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, T& device) {
  device = read_device(archive);
}

// cereal restores a shared pointer by a number that the peer chose, whatever type it belongs to.
template <class T>
void CEREAL_SAVE_FUNCTION_NAME(OutArchive&, const std::shared_ptr<T>&) {
  refuse_shared_pointer<T>();
}
template <class T>
void CEREAL_LOAD_FUNCTION_NAME(InArchive&, std::shared_ptr<T>&) {
  refuse_shared_pointer<T>();
}
template <class T>
void CEREAL_SAVE_FUNCTION_NAME(OutArchive&, const std::weak_ptr<T>&) {
  refuse_shared_pointer<T>();
}
template <class T>
void CEREAL_LOAD_FUNCTION_NAME(InArchive&, std::weak_ptr<T>&) {
  refuse_shared_pointer<T>();
}

}  // namespace stitch::rpc
