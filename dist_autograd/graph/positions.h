#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace stitch::dist_autograd {

// A set of positions, one bit each. Not thread-safe.
class Positions {
 public:
  Positions() = default;
  Positions(std::initializer_list<std::uint32_t> positions) {
    for (const std::uint32_t position : positions) add(position);
  }
  void add(std::uint32_t position) {
    if (position / 8 >= bits_.size()) bits_.resize(position / 8 + 1);
    bits_[position / 8] |= bit(position);
  }
  [[nodiscard]] bool has(std::uint32_t position) const noexcept {
    return position / 8 < bits_.size() && (bits_[position / 8] & bit(position)) != 0;
  }
  // Whether all positions below `count` are in it.
  [[nodiscard]] bool all_below(std::uint32_t count) const noexcept {
    for (std::uint32_t i = 0; i < count; ++i) {
      if (!has(i)) return false;
    }
    return true;
  }
  [[nodiscard]] bool empty() const noexcept { return bits_.empty(); }
  // Whether all of them are below `count`, and no byte is superfluous.
  [[nodiscard]] bool below(std::uint32_t count) const noexcept {
    if (bits_.empty()) return true;
    const auto highest = static_cast<std::size_t>(std::bit_width(bits_.back()));
    return highest != 0 && 8 * (bits_.size() - 1) + highest <= count;
  }
  template <class Archive>
  void serialize(Archive& archive) {
    archive(bits_);
  }
  friend bool operator==(const Positions&, const Positions&) = default;

 private:
  [[nodiscard]] static std::uint8_t bit(std::uint32_t position) noexcept {
    return static_cast<std::uint8_t>(1U << position % 8);
  }
  std::vector<std::uint8_t> bits_;  // up to the last position in the set
};

}  // namespace stitch::dist_autograd
