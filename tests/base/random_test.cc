#include "stitch/base/random.h"
#include "tests/support/plain_test.h"

namespace stitch::base::random_test {
namespace {

TEST(Random, FillsExactlyTheBytesItIsGiven) {
  std::array<std::byte, 96> bytes{};
  fill_random(std::span(bytes).subspan(16, 64));
  for (std::size_t i = 0; i < 16; ++i) {
    EXPECT_EQ(bytes[i], std::byte{0}) << i;
    EXPECT_EQ(bytes[80 + i], std::byte{0}) << i;
  }
  std::set<std::byte> values(bytes.begin() + 16, bytes.begin() + 80);
  EXPECT_GT(values.size(), 16U);
  fill_random({});
}

TEST(Random, NumbersDiffer) {
  std::set<std::uint64_t> numbers;
  for (int i = 0; i < 1000; ++i) numbers.insert(random_number());
  EXPECT_EQ(numbers.size(), 1000U);
}

}  // namespace
}  // namespace stitch::base::random_test
