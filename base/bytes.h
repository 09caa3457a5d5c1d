#pragma once

#include <bit>
#include <cstddef>
#include <cstring>
#include <span>
#include <type_traits>
#include <utility>

#include "stitch/base/recycler.h"

namespace stitch::base {

// A growable byte array aligned to 64 whose new bytes are uninitialised, for frames; small ones are
// recycled. Move-only. Not thread-safe.
class Bytes {
 public:
  static constexpr std::size_t kAlignment = 64;

  Bytes() noexcept = default;
  explicit Bytes(std::size_t size) { resize(size); }
  Bytes(Bytes&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        capacity_(std::exchange(other.capacity_, 0)) {}
  Bytes& operator=(Bytes&& other) noexcept {
    if (this != &other) {
      if (capacity_ != 0) recycle(data_, capacity_);
      data_ = std::exchange(other.data_, nullptr);
      size_ = std::exchange(other.size_, 0);
      capacity_ = std::exchange(other.capacity_, 0);
    }
    return *this;
  }
  ~Bytes() {
    if (capacity_ != 0) recycle(data_, capacity_);
  }
  // Bytes that belong to someone else and outlive this: to be read only. Growing copies them.
  [[nodiscard]] static Bytes borrowed(const Bytes& owner) noexcept {
    Bytes bytes;
    bytes.data_ = owner.data_;
    bytes.size_ = owner.size_;
    return bytes;
  }

  [[nodiscard]] std::byte* data() noexcept { return data_; }
  [[nodiscard]] const std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] std::span<const std::byte> span() const noexcept { return {data_, size_}; }

  void reserve(std::size_t capacity) {
    if (capacity <= capacity_) return;
    if (capacity < 2 * capacity_) capacity = 2 * capacity_;
    if (capacity < 512) capacity = 512;
    capacity = recycled_capacity(capacity);
    auto* const bigger = static_cast<std::byte*>(take_recycled(capacity));
    if (size_ > 0) std::memcpy(bigger, data_, size_);
    if (capacity_ != 0) recycle(data_, capacity_);
    data_ = bigger;
    capacity_ = capacity;
  }
  void resize(std::size_t size) {
    reserve(size);
    size_ = size;
  }
  void append(const void* from, std::size_t bytes) {
    if (bytes == 0) return;
    reserve(size_ + bytes);
    std::memcpy(data_ + size_, from, bytes);
    size_ += bytes;
  }
  // Zero bytes up to the next multiple of `alignment`, a power of two.
  void pad_to(std::size_t alignment) {
    const std::size_t padded = (size_ + alignment - 1) & ~(alignment - 1);
    const std::size_t old = size_;
    resize(padded);
    if (padded != old) std::memset(data_ + old, 0, padded - old);
  }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;  // 0: nothing, or borrowed
};

// The values that messages have as little-endian fields.
template <class T>
concept WireScalar = std::is_arithmetic_v<T> || std::is_enum_v<T>;

// `value` with its bytes in little-endian order.
template <WireScalar T>
[[nodiscard]] T to_wire_order(T value) noexcept {
  if constexpr (std::endian::native == std::endian::little || sizeof(T) == 1) {
    return value;
  } else {
    std::byte bytes[sizeof(T)];
    std::byte swapped[sizeof(T)];
    std::memcpy(bytes, &value, sizeof(T));
    for (std::size_t i = 0; i < sizeof(T); ++i) swapped[i] = bytes[sizeof(T) - 1 - i];
    std::memcpy(&value, swapped, sizeof(T));
    return value;
  }
}

}  // namespace stitch::base
