#include "stitch/base/hash.h"
#include "tests/support/plain_test.h"

namespace stitch::base::hash_test {
namespace {

TEST(Hash, DependsOnEveryFieldAndTheirOrder) {
  EXPECT_NE(hash_of(1U, 2U), hash_of(2U, 1U));
  EXPECT_NE(hash_of(0U, 1U, 2U), hash_of(0U, 2U, 1U));
  std::set<std::size_t> hashes;
  for (std::uint64_t a = 0; a < 32; ++a) {
    for (std::uint32_t b = 0; b < 32; ++b) hashes.insert(hash_of(a, b, std::uint64_t{7}));
  }
  EXPECT_EQ(hashes.size(), 32U * 32U);
}

TEST(Hash, SpreadsConsecutiveNumbersOverTheLowBits) {
  std::set<std::size_t> buckets;
  for (std::uint64_t i = 0; i < 256; ++i) buckets.insert(hash_of(i << 20) % 256);
  EXPECT_GT(buckets.size(), 128U);
}

}  // namespace
}  // namespace stitch::base::hash_test
