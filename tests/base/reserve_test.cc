#include <new>

#include "stitch/base/reserve.h"
#include "tests/support/plain_test.h"

namespace stitch::base::reserve_test {
namespace {

// All that take_reserved(bytes) has to give.
std::vector<void*> take_all(std::size_t bytes) {
  std::vector<void*> blocks;
  try {
    for (;;) blocks.push_back(take_reserved(bytes));
  } catch (const std::bad_alloc&) {
    return blocks;
  }
}

TEST(Reserve, GivesBlocksThatDoNotOverlapAndTakesThemBack) {
  for (const std::size_t bytes :
       {std::size_t{1}, std::size_t{128}, std::size_t{129}, std::size_t{512}, std::size_t{4096}}) {
    const auto first = take_all(bytes);
    for (void* const at : first) std::memset(at, 0x5a, bytes);
    EXPECT_EQ(std::set<void*>(first.begin(), first.end()).size(), first.size());
    for (void* const at : first) EXPECT_TRUE(give_back_reserved(at));
    const auto second = take_all(bytes);
    EXPECT_EQ(second.size(), first.size()) << bytes;
    EXPECT_GE(second.size(), 64u);
    for (void* const at : second) EXPECT_TRUE(give_back_reserved(at));
  }
  EXPECT_THROW(static_cast<void>(take_reserved(4097)), std::bad_alloc);
}

TEST(Reserve, KeepsItsSecondHalfForWhatEndsThings) {
  EXPECT_NO_THROW(require_reserve());
  const auto blocks = take_all(1);
  EXPECT_THROW(require_reserve(), std::bad_alloc);
  for (void* const at : blocks) EXPECT_TRUE(give_back_reserved(at));
  EXPECT_NO_THROW(require_reserve());
}

TEST(Reserve, KnowsItsBlocks) {
  int here = 0;
  EXPECT_FALSE(give_back_reserved(&here));
  EXPECT_FALSE(give_back_reserved(nullptr));
}

// A heap without memory.
template <class T>
struct NoHeap {
  T* allocate(std::size_t) { throw std::bad_alloc(); }
  void deallocate(T*, std::size_t) noexcept { FAIL() << "it has given nothing"; }
};

TEST(ReservedAllocator, TakesFromTheReserveWhereTheHeapHasNothing) {
  std::vector<int, ReservedAllocator<int, NoHeap>> numbers;
  for (int i = 0; i < 1000; ++i) numbers.push_back(i);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(numbers[static_cast<std::size_t>(i)], i);
  EXPECT_THROW(numbers.resize(2000), std::bad_alloc);
  EXPECT_EQ(numbers.size(), 1000u);
}

}  // namespace
}  // namespace stitch::base::reserve_test
