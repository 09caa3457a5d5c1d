#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "stitch/transport/gpu/kernels/cast.h"
#include "stitch/transport/gpu/kernels/segment.h"

// Messages of random tensors in host memory, and their packed form computed element by element.
// For tests of the kernels on the host and on a device.
namespace stitch::transport::gpu::kernels {

inline constexpr std::uint8_t kPoison = 0xa5;

// Memory that begins at a multiple of 256, as device memory does.
class Arena {
 public:
  explicit Arena(std::uint64_t bytes) : units_(bytes / kUnitBytes + 1) {
    std::memset(units_.data(), kPoison, units_.size() * kUnitBytes);
  }
  std::uint8_t* at(std::uint64_t offset) {
    return reinterpret_cast<std::uint8_t*>(units_.data()) + offset;
  }
  std::uint64_t address(std::uint64_t offset = 0) {
    return reinterpret_cast<std::uint64_t>(at(offset));
  }
  std::uint64_t bytes() const { return units_.size() * kUnitBytes; }
  bool operator==(const Arena& other) const {
    return std::memcmp(units_.data(), other.units_.data(), bytes()) == 0;
  }
  void randomize(std::mt19937_64& random) {
    for (std::uint64_t i = 0; i < bytes(); ++i) *at(i) = static_cast<std::uint8_t>(random());
  }

 private:
  struct alignas(256) Unit {
    std::uint8_t bytes[kUnitBytes];
  };
  std::vector<Unit> units_;
};

inline std::uint64_t aligned(std::uint64_t bytes) {
  return (bytes + kPackedAlignment - 1) / kPackedAlignment * kPackedAlignment;
}

inline std::uint64_t elements_of(const PackedTensor& tensor) {
  std::uint64_t elements = 1;
  for (int d = 0; d < tensor.dimensions; ++d)
    elements *= static_cast<std::uint64_t>(tensor.sizes[d]);
  return elements;
}
inline std::uint64_t packed_size(const PackedTensor& tensor) {
  return elements_of(tensor) * tensor.element_bytes / (tensor.cast == PackCast::none ? 1 : 2);
}

// The bytes from the tensor's first to its last element, in elements.
inline std::uint64_t extent_of(const PackedTensor& tensor) {
  std::uint64_t extent = 1;
  for (int d = 0; d < tensor.dimensions; ++d) {
    const std::int64_t size = tensor.rows != 0 && d == 0 ? tensor.table_rows : tensor.sizes[d];
    if (size > 0) extent += static_cast<std::uint64_t>((size - 1) * tensor.strides[d]);
  }
  return extent;
}

// A tensor of random shape whose elements do not overlap: dimensions in random order in memory,
// with gaps. The address is its offset in an arena still.
inline PackedTensor random_tensor(std::mt19937_64& random) {
  const auto below = [&random](std::uint64_t end) { return random() % end; };
  PackedTensor tensor{};
  const std::uint32_t element_sizes[] = {1, 2, 4, 4, 8, 16, 3, 12};
  tensor.element_bytes = element_sizes[below(8)];
  tensor.dimensions = static_cast<int>(below(6));
  int order[kMaxPackedDimensions];
  std::iota(order, order + tensor.dimensions, 0);
  if (below(2) != 0) std::shuffle(order, order + tensor.dimensions, random);
  std::int64_t stride = below(4) == 0 ? 2 : 1;
  std::int64_t elements = 1;
  for (int i = tensor.dimensions - 1; i >= 0; --i) {
    const int d = order[i];
    tensor.sizes[d] = static_cast<std::int64_t>(below(12) == 0 ? below(2) : 1 + below(9));
    if (below(8) == 0) tensor.sizes[d] *= 16;
    if (elements * tensor.sizes[d] > 10000) tensor.sizes[d] = 1;
    elements *= std::max<std::int64_t>(tensor.sizes[d], 1);
    tensor.strides[d] = stride;
    stride *= std::max<std::int64_t>(tensor.sizes[d], 1);
    if (below(4) == 0) stride += static_cast<std::int64_t>(below(8));
  }
  if (tensor.element_bytes == 4 && below(3) == 0)
    tensor.cast = below(2) == 0 ? PackCast::float_to_bfloat16 : PackCast::float_to_half;
  return tensor;
}

// Calls each(number of the element, its offset in bytes from the tensor's address).
template <class Each>
void for_each_element(const PackedTensor& tensor, Each&& each) {
  const std::uint64_t elements = elements_of(tensor);
  for (std::uint64_t i = 0; i < elements; ++i) {
    std::uint64_t rest = i;
    std::int64_t offset = 0;
    for (int d = tensor.dimensions - 1; d >= 0; --d) {
      const auto size = static_cast<std::uint64_t>(tensor.sizes[d]);
      auto position = static_cast<std::int64_t>(rest % size);
      rest /= size;
      if (d == 0 && tensor.rows != 0)
        position = reinterpret_cast<const std::int64_t*>(tensor.rows)[position];
      offset += position * tensor.strides[d];
    }
    each(i, offset * tensor.element_bytes);
  }
}

// Messages of random tensors in one arena; places are assigned as a sender does.
struct Message {
  std::vector<PackedTensor> tensors;
  std::uint64_t packed_bytes = 0;
  std::uint64_t arena_bytes = 0;

  void add(PackedTensor tensor, std::uint64_t misalignment) {
    tensor.packed_offset = packed_bytes;
    tensor.address = arena_bytes + misalignment;
    arena_bytes += aligned(misalignment + extent_of(tensor) * tensor.element_bytes + 16);
    packed_bytes += aligned(packed_size(tensor));
    tensors.push_back(tensor);
  }
  std::vector<PackedTensor> in(Arena& arena) const {
    std::vector<PackedTensor> placed = tensors;
    for (PackedTensor& tensor : placed) tensor.address += arena.address();
    return placed;
  }
};

inline Message random_message(std::mt19937_64& random) {
  Message message;
  const std::uint64_t count = 1 + random() % 40;
  for (std::uint64_t i = 0; i < count; ++i) {
    const PackedTensor tensor = random_tensor(random);
    const std::uint64_t step = tensor.element_bytes == 4 ? 4 : 1;
    message.add(tensor, random() % 16 / step * step);
  }
  return message;
}

// What packing has to give, byte by byte.
inline Arena packed_reference(const Message& message, Arena& source) {
  Arena expected(message.packed_bytes);
  for (const PackedTensor& tensor : message.in(source)) {
    std::uint8_t* const to = expected.at(tensor.packed_offset);
    std::memset(to, 0, aligned(packed_size(tensor)));
    for_each_element(tensor, [&](std::uint64_t i, std::int64_t offset) {
      const auto* const from = reinterpret_cast<const std::uint8_t*>(
          tensor.address + static_cast<std::uint64_t>(offset));
      if (tensor.cast == PackCast::none) {
        std::memcpy(to + i * tensor.element_bytes, from, tensor.element_bytes);
        return;
      }
      float value = 0;
      std::memcpy(&value, from, sizeof value);
      const auto bits = static_cast<std::uint16_t>(
          tensor.cast == PackCast::float_to_bfloat16 ? bfloat16_of(value) : half_of(value));
      std::memcpy(to + i * 2, &bits, sizeof bits);
    });
  }
  return expected;
}

}  // namespace stitch::transport::gpu::kernels
