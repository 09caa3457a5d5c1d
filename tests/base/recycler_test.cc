// Small blocks that pass from thread to thread without the heap.
#include <deque>
#include <limits>
#include <unordered_map>

#include "stitch/base/bytes.h"
#include "stitch/base/mutex.h"
#include "stitch/base/recycler.h"
#include "tests/support/plain_test.h"
#include "tests/support/resident_memory.h"

// Under the sanitizers the recycler frees everything to the heap, so that they detect uses after
// free.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define STITCH_TEST_RECYCLES 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define STITCH_TEST_RECYCLES 0
#endif
#endif
#ifndef STITCH_TEST_RECYCLES
#define STITCH_TEST_RECYCLES 1
#endif

namespace stitch::base::recycler_test {
namespace {

// The usable size of a block taken for `bytes`: under a sanitizer exactly `bytes`.
std::size_t usable(std::size_t bytes) {
  return STITCH_TEST_RECYCLES ? recycled_capacity(bytes) : bytes;
}

// Blocks that pass from thread to thread.
class Basket {
 public:
  void put(std::vector<void*> blocks) {
    MutexLock lock(mutex_);
    baskets_.push_back(std::move(blocks));
    changed_.notify_all();
  }
  [[nodiscard]] std::vector<void*> take() {
    MutexLock lock(mutex_);
    while (baskets_.empty()) changed_.wait(mutex_);
    auto blocks = std::move(baskets_.front());
    baskets_.pop_front();
    return blocks;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::deque<std::vector<void*>> baskets_ STITCH_GUARDED_BY(mutex_);
};

TEST(Recycler, CapacitiesArePowersOfTwoFrom64To4096) {
  if (!STITCH_TEST_RECYCLES) GTEST_SKIP() << "nothing is recycled under a sanitizer";
  for (std::size_t bytes = 0; bytes <= kMaxRecycledBytes; ++bytes) {
    std::size_t expected = 64;
    while (expected < bytes) expected *= 2;
    ASSERT_EQ(recycled_capacity(bytes), expected) << bytes;
    ASSERT_EQ(recycled_capacity(expected), expected);
  }
  for (const std::size_t bytes : {kMaxRecycledBytes + 1, std::size_t{10'000}, std::size_t{1} << 30})
    EXPECT_EQ(recycled_capacity(bytes), bytes);
}

TEST(Recycler, EverySizeIsAlignedAndWritable) {
  for (const int round : {1, 2, 3}) {
    std::vector<std::pair<void*, std::size_t>> blocks;
    for (std::size_t bytes = 0; bytes <= kMaxRecycledBytes + 200; bytes += bytes < 200 ? 1 : 61) {
      void* const at = take_recycled(bytes);
      ASSERT_NE(at, nullptr);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(at) % 64, 0U) << bytes;
      std::memset(at, round, usable(bytes));
      blocks.emplace_back(at, bytes);
    }
    std::set<void*> distinct;
    for (const auto& [at, bytes] : blocks) {
      EXPECT_TRUE(distinct.insert(at).second);
      if (usable(bytes) > 0) {
        EXPECT_EQ(static_cast<unsigned char*>(at)[usable(bytes) - 1], round) << "memory is shared";
      }
      recycle(at, bytes);
    }
  }
}

TEST(Recycler, ABlockMayReturnWithAnotherSizeOfItsClass) {
  for (const std::size_t bytes : {1, 65, 129, 1025, 2049, 4000}) {
    void* const at = take_recycled(bytes);
    recycle(at, recycled_capacity(bytes));
  }
}

TEST(Recycler, EmptyAndLargeBlocksWork) {
  for (const std::size_t bytes :
       {std::size_t{0}, kMaxRecycledBytes, kMaxRecycledBytes + 1, std::size_t{1} << 20}) {
    std::vector<void*> blocks;
    for (int i = 0; i < 100; ++i) {
      blocks.push_back(take_recycled(bytes));
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(blocks.back()) % 64, 0U);
      std::memset(blocks.back(), 1, bytes);
    }
    for (void* at : blocks) recycle(at, bytes);
  }
  // A sanitizer aborts the program instead.
  if (STITCH_TEST_RECYCLES) {
    EXPECT_THROW(static_cast<void>(take_recycled(std::numeric_limits<std::size_t>::max() / 2)),
                 std::bad_alloc);
  }
}

TEST(Recycler, AThreadReusesTheBlocksItFreed) {
  if (!STITCH_TEST_RECYCLES) GTEST_SKIP() << "nothing is recycled under a sanitizer";
  std::set<void*> seen;
  for (int i = 0; i < 10'000; ++i) {
    void* const at = take_recycled(200);
    seen.insert(at);
    recycle(at, 200);
  }
  EXPECT_EQ(seen.size(), 1U);
}

// One thread allocates, another frees: the memory must be reused.
TEST(Recycler, BlocksFreedByAnotherThreadAreReused) {
  constexpr std::size_t kBatch = 100;
  constexpr int kRounds = 2000;
  for (const std::size_t bytes : {std::size_t{64}, std::size_t{500}, std::size_t{4096}}) {
    Basket there;
    Basket back;
    std::thread other([&] {
      for (int i = 0; i < kRounds; ++i) {
        for (void* at : there.take()) recycle(at, bytes);
        back.put({});
      }
    });
    std::set<void*> seen;
    for (int i = 0; i < kRounds; ++i) {
      std::vector<void*> blocks;
      for (std::size_t k = 0; k < kBatch; ++k) {
        blocks.push_back(take_recycled(bytes));
        std::memset(blocks.back(), i & 0xff, bytes);
        seen.insert(blocks.back());
      }
      there.put(std::move(blocks));
      static_cast<void>(back.take());
    }
    other.join();
    // The blocks in flight, two batches of 32 in each of the two threads, and those of the shared
    // list.
    if (STITCH_TEST_RECYCLES) {
      EXPECT_LE(seen.size(), kBatch + 8 * 32) << bytes;
    }
  }
}

TEST(Recycler, BlocksAboveTheLimitAreReturnedToTheHeap) {
  if (!STITCH_TEST_RECYCLES) GTEST_SKIP() << "nothing is recycled under a sanitizer";
  // Ten times the limit of a size class, freed by another thread, repeatedly: the process must not
  // grow.
  constexpr std::size_t kBlocks = 10 * kKeptBytes / 4096;
  std::size_t first = 0;
  for (int round = 0; round < 30; ++round) {
    std::vector<void*> blocks(kBlocks);
    for (void*& at : blocks) {
      at = take_recycled(4096);
      std::memset(at, round, 4096);
    }
    std::thread([&] {
      for (void* at : blocks) recycle(at, 4096);
    }).join();
    if (round == 5) first = testing::resident_bytes();
  }
  EXPECT_GT(first, 0U);
  EXPECT_LE(testing::resident_bytes(), first + 3 * kBlocks * 4096);
}

TEST(Recycler, ThreadsThatEndFreeTheirBlocks) {
  for (int round = 0; round < 200; ++round) {
    Basket basket;
    std::thread maker([&] {
      std::vector<void*> blocks;
      for (int i = 0; i < 70; ++i) blocks.push_back(take_recycled(128));
      basket.put(std::move(blocks));
    });
    maker.join();
    std::thread([&] {
      for (void* at : basket.take()) recycle(at, 128);
    }).join();
  }
}

// Objects that a thread drops while it ends, before and after its lists have been freed.
struct AtThreadEnd {
  std::vector<std::pair<void*, std::size_t>> blocks;
  ~AtThreadEnd() {
    for (const auto& [at, bytes] : blocks) recycle(at, bytes);
    void* const late = take_recycled(64);
    std::memset(late, 1, 64);
    recycle(late, 64);
    const Bytes bytes(300);
  }
};

TEST(Recycler, WorksWhileAThreadEnds) {
  for (const bool lists_first : {true, false}) {
    std::thread([&] {
      if (lists_first) recycle(take_recycled(64), 64);
      static thread_local AtThreadEnd held;
      for (std::size_t bytes = 1; bytes <= 5000; bytes += 97)
        held.blocks.emplace_back(take_recycled(bytes), bytes);
    }).join();
  }
}

TEST(Recycler, StandardContainersWorkWithIt) {
  using Pair = std::pair<const std::string, int>;
  std::unordered_map<std::string, int, std::hash<std::string>, std::equal_to<>,
                     RecyclingAllocator<Pair>>
      map;
  std::deque<std::string, RecyclingAllocator<std::string>> deque;
  std::vector<std::uint64_t, RecyclingAllocator<std::uint64_t>> vector;
  for (int i = 0; i < 5000; ++i) {
    map.emplace("key" + std::to_string(i), i);
    deque.push_back("a string that is too long for its object " + std::to_string(i));
    if (i % 3 == 0) deque.pop_front();
    vector.push_back(static_cast<std::uint64_t>(i));
    if (i % 2 == 0) map.erase("key" + std::to_string(i / 2));
  }
  for (const auto& [key, value] : map) EXPECT_EQ(key, "key" + std::to_string(value));
  EXPECT_EQ(deque.back(), "a string that is too long for its object 4999");
  EXPECT_EQ(vector.back(), 4999U);
  auto moved = std::move(map);
  map.clear();
  EXPECT_EQ(moved.at("key4999"), 4999);
  EXPECT_TRUE(RecyclingAllocator<int>() == RecyclingAllocator<char>());
  EXPECT_THROW(static_cast<void>(RecyclingAllocator<std::uint64_t>().allocate(
                   std::numeric_limits<std::size_t>::max() / 4)),
               std::bad_alloc);
}

struct alignas(64) Wide {
  std::array<unsigned char, 64> bytes{};
};

TEST(Recycler, BytesOfEverySizeUseIt) {
  Bytes grown;
  std::string expected;
  std::mt19937_64 random(1);
  for (int i = 0; i < 300; ++i) {
    const std::string piece(random() % 90, static_cast<char>('a' + i % 26));
    grown.append(piece.data(), piece.size());
    expected += piece;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(grown.data()) % Bytes::kAlignment, 0U);
  }
  EXPECT_EQ(std::memcmp(grown.data(), expected.data(), expected.size()), 0);
  Bytes moved = std::move(grown);
  grown = Bytes(10);
  grown = std::move(moved);
  EXPECT_EQ(grown.size(), expected.size());
}

}  // namespace
}  // namespace stitch::base::recycler_test
