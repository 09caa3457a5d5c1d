#pragma once

#include <ATen/core/Tensor.h>

#include <cereal/cereal.hpp>
#include <cereal/types/array.hpp>
#include <cereal/types/bitset.hpp>
#include <cereal/types/chrono.hpp>
#include <cereal/types/common.hpp>
#include <cereal/types/complex.hpp>
#include <cereal/types/deque.hpp>
#include <cereal/types/list.hpp>
#include <cereal/types/map.hpp>
#include <cereal/types/memory.hpp>
#include <cereal/types/optional.hpp>
#include <cereal/types/set.hpp>
#include <cereal/types/string.hpp>
#include <cereal/types/tuple.hpp>
#include <cereal/types/unordered_map.hpp>
#include <cereal/types/unordered_set.hpp>
#include <cereal/types/utility.hpp>
#include <cereal/types/variant.hpp>
#include <cereal/types/vector.hpp>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <type_traits>

#include "stitch/base/bytes.h"
#include "stitch/base/error.h"
#include "stitch/rpc/message/placed_tensor.h"

namespace stitch::rpc {

class ArrivedMemory;
struct InMessage;
struct OutMessage;

// A running fingerprint of what was written or read: the kinds of fields in order, not their
// values. Both ends compare it, so a struct whose fields differ between two programs is an error
// instead of garbage. FNV-1a over one code a field.
class FieldFingerprint {
 public:
  void mix(std::uint32_t code) noexcept { hash_ = (hash_ ^ code) * 16777619u; }
  template <class T>
  void mix_type() noexcept {
    mix(static_cast<std::uint32_t>(sizeof(T) | (std::is_floating_point_v<T> ? 0x100u : 0u) |
                                   (std::is_signed_v<T> ? 0x200u : 0u) |
                                   (std::is_same_v<T, bool> ? 0x400u : 0u)));
  }
  [[nodiscard]] std::uint32_t value() const noexcept { return hash_ ^ (hash_ >> 16); }

 private:
  std::uint32_t hash_ = 2166136261u;
};

// The codes of types that are written as fields of other types.
enum class FieldMark : std::uint32_t {
  half = 0x4001,
  bfloat16 = 0x4002,
  scalar = 0x4003,
  device = 0x4004
};

// How deep structs, containers and pointers may nest: a value that contains itself is written and
// read recursively, and a stack is finite.
inline constexpr int kMaxNesting = 256;
// How many elements of containers may take no bytes in a message, all together: bytes that arrive
// do not bound their number.
inline constexpr std::size_t kMaxElementsWithoutBytes = 65536;
// How much memory the elements of containers may take, all together: so much for each byte of the
// body, and the rest whatever its size. Elements that take no bytes or few take the most: a set of
// chars 33 for each, a vector of optional numbers 16. Only a value that is mostly empty places for
// large elements, such as std::optional of a large array, exceeds both; use a std::unique_ptr
// there. Strings and vectors of numbers are not counted: all their bytes arrive.
inline constexpr std::size_t kMaxElementMemoryForEachByte = 64;
inline constexpr std::size_t kMaxElementMemoryInAnyCase = std::size_t{64} << 20;

[[noreturn]] void fail_nesting();
[[noreturn]] void fail_elements_without_bytes();
[[noreturn]] void fail_element_memory(ErrorCode code, std::size_t body_bytes);
[[nodiscard]] constexpr std::size_t max_element_memory(std::size_t body_bytes) noexcept {
  return kMaxElementMemoryForEachByte * body_bytes + kMaxElementMemoryInAnyCase;
}

// Writes C++ values into the body of a message; a cereal output archive. Little-endian, no padding.
// Tensors go to message().tensors, the body holds their index. Throws Error(invalid_argument) for
// what InArchive would refuse. Not thread-safe.
class OutArchive : public cereal::OutputArchive<OutArchive, cereal::AllowEmptyClassElision> {
 public:
  explicit OutArchive(OutMessage& message);
  [[nodiscard]] OutMessage& message() noexcept { return message_; }

  template <base::WireScalar T>
  void write(T value) {
    fingerprint_.mix_type<T>();
    value = base::to_wire_order(value);
    body_.append(&value, sizeof(T));
  }
  void write_size(std::uint64_t size) {
    fingerprint_.mix(0x1000);
    size = base::to_wire_order(size);
    body_.append(&size, sizeof(size));
  }
  template <class T>
  void write_array(const T* values, std::size_t count) {
    fingerprint_.mix_type<T>();
    if constexpr (std::endian::native == std::endian::little || sizeof(T) == 1) {
      body_.append(values, count * sizeof(T));
    } else {
      for (std::size_t i = 0; i < count; ++i) {
        const T value = base::to_wire_order(values[i]);
        body_.append(&value, sizeof(T));
      }
    }
  }
  // A value of a type that its bytes alone do not tell follows.
  void mark(FieldMark mark) noexcept { fingerprint_.mix(static_cast<std::uint32_t>(mark)); }
  void write_tensor(const at::Tensor& tensor);
  // The same for a tensor that is to be put on `device` of the receiver.
  void write_tensor(const at::Tensor& tensor, c10::Device device);
  // Writes one element of a container.
  template <class... Parts>
  void write_element(const Parts&... parts) {
    const std::size_t before = body_.size();
    (*this)(parts...);
    if (body_.size() == before && ++elements_without_bytes_ > kMaxElementsWithoutBytes)
      fail_elements_without_bytes();
  }
  // So much memory InArchive will take for the elements of a container.
  void count_memory(std::size_t bytes) noexcept { element_memory_ += bytes; }
  // Around every value that may contain itself.
  void enter() {
    if (++nesting_ > kMaxNesting) fail_nesting();
  }
  void leave() noexcept { --nesting_; }
  // Writes the fingerprint of everything so far, for InArchive::check_seal(). Throws
  // Error(invalid_argument) when the elements would take too much memory.
  void seal() {
    const std::size_t bytes = body_.size();
    if (element_memory_ > max_element_memory(bytes))
      fail_element_memory(ErrorCode::invalid_argument, bytes);
    const auto value = base::to_wire_order(static_cast<std::uint16_t>(fingerprint_.value()));
    body_.append(&value, sizeof(value));
    ++seals_;
  }

 private:
  OutMessage& message_;
  base::Bytes& body_;        // of message_
  std::uint32_t seals_ = 0;  // arguments written
  FieldFingerprint fingerprint_;
  int nesting_ = 0;
  std::size_t elements_without_bytes_ = 0;
  std::size_t element_memory_ = 0;
};

// The part of a reply that InArchive reads: the result.
[[nodiscard]] std::span<const std::byte> result_in(const InMessage& reply) noexcept;
// The memory on devices that a message has brought; null for none.
[[nodiscard]] std::shared_ptr<const ArrivedMemory> memory_of(const InMessage& message) noexcept;

// Reads what OutArchive wrote; a cereal input archive. Every length and count is checked against
// the bytes that arrived before memory is taken: Error(invalid_argument) when the types of the two
// ends do not fit. Each tensor of the message is handed out once. Not thread-safe.
class InArchive : public cereal::InputArchive<InArchive, cereal::AllowEmptyClassElision> {
 public:
  // `body` is what is left of the message's body.
  InArchive(InMessage& message, std::span<const std::byte> body)
      : InputArchive(this), message_(message), body_(body) {}
  [[nodiscard]] InMessage& message() noexcept { return message_; }

  template <base::WireScalar T>
  void read(T& value) {
    fingerprint_.mix_type<T>();
    if constexpr (std::is_same_v<T, bool>) {
      std::uint8_t byte = 0;
      raw(&byte, 1);
      value = byte != 0;
    } else {
      raw(&value, sizeof(T));
      value = base::to_wire_order(value);
    }
  }
  // How many elements follow; each takes at least `bytes_each` bytes. With 0 the caller reads them
  // by read_element() and takes memory as it reads.
  [[nodiscard]] std::size_t read_count(std::size_t bytes_each);
  // Reads one element of a container.
  template <class... Parts>
  void read_element(Parts&... parts) {
    const std::size_t before = at_;
    (*this)(parts...);
    if (at_ == before && ++elements_without_bytes_ > kMaxElementsWithoutBytes)
      fail_elements_without_bytes();
  }
  // Before memory is taken for an element of a container. Throws Error(protocol) when that is too
  // much for the bytes that arrived: OutArchive does not write such values.
  void count_memory(std::size_t bytes) {
    element_memory_ += bytes;
    if (element_memory_ > max_element_memory(body_.size()))
      fail_element_memory(ErrorCode::protocol, body_.size());
  }
  template <class T>
  void read_array(T* values, std::size_t count) {
    fingerprint_.mix_type<T>();
    if (count > remaining() / sizeof(T)) fail_short(count * sizeof(T));
    if constexpr (std::is_same_v<T, bool>) {
      // Bytes other than 0 and 1 are no bools.
      for (std::size_t i = 0; i < count; ++i) values[i] = body_[at_ + i] != std::byte{0};
      at_ += count;
      return;
    }
    raw(values, count * sizeof(T));
    if constexpr (std::endian::native != std::endian::little && sizeof(T) > 1) {
      for (std::size_t i = 0; i < count; ++i) values[i] = base::to_wire_order(values[i]);
    }
  }
  void mark(FieldMark mark) noexcept { fingerprint_.mix(static_cast<std::uint32_t>(mark)); }
  void read_tensor(at::Tensor& tensor);
  // Throws Error(invalid_argument) when what was read so far has other kinds of fields than what
  // was written.
  void check_seal();
  [[nodiscard]] std::size_t remaining() const noexcept { return body_.size() - at_; }
  // As OutArchive.
  void enter() {
    if (++nesting_ > kMaxNesting) fail_nesting();
  }
  void leave() noexcept { --nesting_; }
  // Throws Error(invalid_argument) when something is left over.
  void expect_end() const;

 private:
  void raw(void* to, std::size_t bytes) {
    if (bytes > remaining()) fail_short(bytes);
    if (bytes != 0) std::memcpy(to, body_.data() + at_, bytes);
    at_ += bytes;
  }
  [[noreturn]] void fail_short(std::size_t wanted) const;

  InMessage& message_;
  std::span<const std::byte> body_;
  std::size_t at_ = 0;
  FieldFingerprint fingerprint_;
  std::uint32_t next_tensor_ = 0;
  int nesting_ = 0;
  std::size_t elements_without_bytes_ = 0;
  std::size_t element_memory_ = 0;
};

// What cereal wraps around values on their way; only they count as nested.
template <class T>
inline constexpr bool kIsWrapper = false;
template <class T>
inline constexpr bool kIsWrapper<cereal::NameValuePair<T>> = true;
template <class T>
inline constexpr bool kIsWrapper<cereal::SizeTag<T>> = true;
template <class T>
inline constexpr bool kIsWrapper<cereal::BinaryData<T>> = true;
template <class T>
inline constexpr bool kIsWrapper<cereal::memory_detail::PtrWrapper<T>> = true;
template <class T>
inline constexpr bool kMayNest = std::is_class_v<T> && !kIsWrapper<T>;
// What cereal writes by a serialize function of its own.
template <class T>
inline constexpr bool kIsSerialized = false;
template <class T>
inline constexpr bool kIsSerialized<cereal::NameValuePair<T>> = true;
template <class A, class B>
inline constexpr bool kIsSerialized<std::pair<A, B>> = true;
template <class... Ts>
inline constexpr bool kIsSerialized<std::tuple<Ts...>> = true;
// cereal calls these before and after each value.
template <class T>
void prologue(OutArchive& archive, const T&) {
  if constexpr (kMayNest<T>) archive.enter();
}
template <class T>
void epilogue(OutArchive& archive, const T&) {
  if constexpr (kMayNest<T>) archive.leave();
}
template <class T>
void prologue(InArchive& archive, const T&) {
  if constexpr (kMayNest<T>) archive.enter();
}
template <class T>
void epilogue(InArchive& archive, const T&) {
  if constexpr (kMayNest<T>) archive.leave();
}

// How cereal writes and reads the leaves.
template <class T>
requires std::is_arithmetic_v<T>
void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive, const T& value) { archive.write(value); }
template <class T>
requires std::is_arithmetic_v<T>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, T& value) { archive.read(value); }
template <class T>
void CEREAL_SERIALIZE_FUNCTION_NAME(OutArchive& archive, cereal::NameValuePair<T>& pair) {
  archive(pair.value);
}
template <class T>
void CEREAL_SERIALIZE_FUNCTION_NAME(InArchive& archive, cereal::NameValuePair<T>& pair) {
  archive(pair.value);
}
template <class T>
void CEREAL_SERIALIZE_FUNCTION_NAME(OutArchive& archive, cereal::SizeTag<T>& tag) {
  archive.write_size(tag.size);
}
template <class T>
void CEREAL_SERIALIZE_FUNCTION_NAME(InArchive& archive, cereal::SizeTag<T>& tag) {
  // Containers that container_codec.h does not know.
  tag.size = static_cast<std::remove_reference_t<T>>(archive.read_count(1));
}
template <class T>
void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive, const cereal::BinaryData<T>& data) {
  using Element = std::remove_cv_t<std::remove_pointer_t<std::decay_t<T>>>;
  archive.write_array(static_cast<const Element*>(data.data), data.size / sizeof(Element));
}
template <class T>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, cereal::BinaryData<T>& data) {
  using Element = std::remove_cv_t<std::remove_pointer_t<std::decay_t<T>>>;
  archive.read_array(static_cast<Element*>(data.data), data.size / sizeof(Element));
}
// cereal's own function writes an array in one piece and reads it by its elements.
template <class T, std::size_t N>
void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive, const T (&array)[N]) {
  if constexpr (std::is_arithmetic_v<T>) {
    archive.write_array(array, N);
  } else {
    for (const T& each : array) archive(each);
  }
}
template <class T, std::size_t N>
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, T (&array)[N]) {
  if constexpr (std::is_arithmetic_v<T>) {
    archive.read_array(array, N);
  } else {
    for (T& each : array) archive(each);
  }
}
inline void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive, const at::Tensor& tensor) {
  archive.write_tensor(tensor);
}
inline void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, at::Tensor& tensor) {
  archive.read_tensor(tensor);
}
inline void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive, const PlacedTensor& placed) {
  archive.write_tensor(placed.tensor(), placed.device());
}
inline void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, PlacedTensor& placed) {
  at::Tensor tensor;
  archive.read_tensor(tensor);
  placed = PlacedTensor(std::move(tensor));
}

// Errors are values too.
void CEREAL_SAVE_FUNCTION_NAME(OutArchive& archive, const Error& error);
void CEREAL_LOAD_FUNCTION_NAME(InArchive& archive, Error& error);

}  // namespace stitch::rpc

#include "stitch/rpc/message/container_codec.h"  // IWYU pragma: export
#include "stitch/rpc/message/plain_struct.h"     // IWYU pragma: export

CEREAL_REGISTER_ARCHIVE(stitch::rpc::OutArchive)
CEREAL_REGISTER_ARCHIVE(stitch::rpc::InArchive)
namespace cereal {
template <class T, std::size_t N>
struct specialize<stitch::rpc::OutArchive, T[N], specialization::non_member_load_save> {};
template <class T, std::size_t N>
struct specialize<stitch::rpc::InArchive, T[N], specialization::non_member_load_save> {};
}  // namespace cereal
CEREAL_SETUP_ARCHIVE_TRAITS(stitch::rpc::InArchive, stitch::rpc::OutArchive)
CEREAL_SETUP_ARCHIVE_TRAITS(stitch::rpc::InProbe, stitch::rpc::OutProbe)
