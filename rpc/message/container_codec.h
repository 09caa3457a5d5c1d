#pragma once

#include <algorithm>
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

// How the containers of the standard library are written and read; included by archive.h. cereal
// would do it, too, but makes room for as many elements as a message announces, and an element may
// be a thousand times as large as its bytes. Here each element is constructed when its bytes are
// read. The bytes are cereal's: a count, then the elements.
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
    archive.read_element(sequence.emplace_back());
  }
}
template <class Set>
void read_set(InArchive& archive, Set& set) {
  const std::size_t count = archive.read_count(0);
  set.clear();
  for (std::size_t i = 0; i < count; ++i) {
    archive.count_memory(memory_of_element<Set>());
    typename Set::key_type key{};
    archive.read_element(key);
    set.emplace_hint(set.end(), std::move(key));
  }
}
template <class Map>
void read_map(InArchive& archive, Map& map) {
  const std::size_t count = archive.read_count(0);
  map.clear();
  for (std::size_t i = 0; i < count; ++i) {
    archive.count_memory(memory_of_element<Map>());
    typename Map::key_type key{};
    typename Map::mapped_type value{};
    archive.read_element(key, value);
    map.emplace_hint(map.end(), std::move(key), std::move(value));
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
