#pragma once

#include <compare>
#include <limits>
#include <ostream>
#include <string>

namespace stitch {

// How many workers a world has: a number (a fixed world), or a range "min:max" (an elastic world:
// it starts when `min` workers have arrived, further ones join and leave while it runs, at most
// `max` at a time). Not set: what the launcher says. A plain value; made from an int or from a
// text, so that `options.world_size = 4` and `options.world_size = "2:8"` both do.
class WorldSize {
 public:
  static constexpr int kUnset = std::numeric_limits<int>::min();    // "what the launcher says"
  static constexpr int kNoLimit = std::numeric_limits<int>::max();  // the max of "2:"

  constexpr WorldSize() noexcept = default;
  // A fixed world. resolve_options() refuses numbers below 1.
  constexpr WorldSize(int size) noexcept : min_(size), max_(size) {}  // NOLINT: as an int
  // "4", "2:8", or "2:" for no limit. Throws Error(invalid_argument) for any other text.
  WorldSize(const std::string& text);                            // NOLINT: as a text
  WorldSize(const char* text) : WorldSize(std::string(text)) {}  // NOLINT: as a text
  // The elastic world "min:max". resolve_options() refuses a min below 1 and a max below min.
  [[nodiscard]] static constexpr WorldSize range(int min, int max = kNoLimit) noexcept {
    WorldSize size(min);
    size.max_ = max;
    size.elastic_ = true;
    return size;
  }

  // Whether it says anything.
  [[nodiscard]] constexpr bool is_set() const noexcept { return min_ != kUnset; }
  // Whether workers may join and leave; true also of "4:4".
  [[nodiscard]] constexpr bool is_elastic() const noexcept { return elastic_; }
  // With how many workers the world starts; of a fixed world its size.
  [[nodiscard]] constexpr int min() const noexcept { return min_; }
  // How many there may be at a time; of a fixed world its size.
  [[nodiscard]] constexpr int max() const noexcept { return max_; }
  // "4", "2:8", "2:" or "unset".
  [[nodiscard]] std::string str() const;

  friend constexpr bool operator==(const WorldSize&, const WorldSize&) = default;
  // Equal to a number: a fixed world of that size. Ordered by the number it starts with.
  friend constexpr bool operator==(const WorldSize& size, int number) noexcept {
    return !size.elastic_ && size.min_ == number;
  }
  friend constexpr std::strong_ordering operator<=>(const WorldSize& size, int number) noexcept {
    return size.min_ <=> number;
  }
  friend std::ostream& operator<<(std::ostream& out, const WorldSize& size) {
    return out << size.str();
  }

 private:
  int min_ = kUnset;
  int max_ = kUnset;
  bool elastic_ = false;
};

}  // namespace stitch
