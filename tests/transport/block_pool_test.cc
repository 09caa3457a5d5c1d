// Reuse of the memory of large buffers.
#include <sys/resource.h>

#include <limits>

#include "stitch/base/event_loop.h"
#include "stitch/base/freed_memory.h"
#include "stitch/transport/block_pool.h"
#include "stitch/transport/trimmed_pool.h"
#include "tests/support/forked_child.h"
#include "tests/support/plain_test.h"
#include "tests/support/resident_memory.h"

namespace stitch::transport::block_pool_test {
namespace {

using testing::resident_bytes;

constexpr std::size_t kKiB = 1024;
constexpr std::size_t kMiB = 1024 * kKiB;
constexpr std::size_t kGiB = 1024 * kMiB;

std::shared_ptr<BlockPool> make_pool(std::size_t most_kept_bytes = kGiB,
                                     base::UniqueFunction<void()> trim_later = nullptr,
                                     std::size_t most_bytes = BlockPool::kUnlimited) {
  return std::make_shared<BlockPool>(most_kept_bytes, std::move(trim_later), most_bytes);
}

int mappings() {
  std::ifstream file("/proc/self/maps");
  int lines = 0;
  for (std::string line; std::getline(file, line);) ++lines;
  return lines;
}

std::vector<std::size_t> odd_sizes() {
  std::vector<std::size_t> sizes;
  for (std::size_t size = 64 * kKiB; size <= 32 * kMiB; size *= 2) {
    for (const std::size_t each :
         {size - 1, size, size + 1, size + size / 4 - 1, size + size / 4 + 1, size / 3 * 4 + 7})
      sizes.push_back(each);
  }
  sizes.push_back(40 * kMiB);
  return sizes;
}

TEST(BlockPool, BlocksAreLargeEnoughAndAtMostAQuarterTooLarge) {
  std::size_t before = 0;
  for (std::size_t bytes = BlockPool::kSmallest; bytes <= 64 * kMiB; bytes += 1 + bytes / 37) {
    const std::size_t block = BlockPool::block_bytes(bytes);
    EXPECT_GE(block, bytes);
    EXPECT_LE(block - bytes, bytes / 4) << bytes;
    EXPECT_EQ(block % 4096, 0U) << bytes;
    EXPECT_EQ(BlockPool::block_bytes(block), block) << "a block holds a block of its size";
    EXPECT_GE(block, before);
    before = block;
  }
  EXPECT_EQ(BlockPool::block_bytes(0), BlockPool::kSmallest);
}

TEST(BlockPool, OddSizesAreAlignedAndWritableToTheirEnds) {
  const auto pool = make_pool();
  for (const int round : {1, 2}) {  // fresh, then reused ones
    for (const std::size_t bytes : odd_sizes()) {
      const Buffer buffer = pool->allocate(Device{}, bytes);
      EXPECT_EQ(buffer.bytes, bytes);
      EXPECT_TRUE(buffer.device == Device{});
      ASSERT_NE(buffer.data, nullptr);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data) % 64, 0U) << bytes;
      if (bytes >= 2 * kMiB) {
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data) % (2 * kMiB), 0U) << bytes;
      }
      auto* data = static_cast<unsigned char*>(buffer.data);
      if (round == 1) {
        std::memset(data, 0x5a, bytes);
      } else {
        data[0] = data[bytes / 2] = data[bytes - 1] = 1;
      }
    }
  }
  EXPECT_EQ(pool->statistics().used_bytes, 0U);
}

TEST(BlockPool, SmallAndEmptyBuffersComeFromTheHeap) {
  const auto pool = make_pool();
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{1}, std::size_t{100}, BlockPool::kSmallest - 1}) {
    const Buffer buffer = pool->allocate(Device{}, bytes);
    EXPECT_EQ(buffer.bytes, bytes);
    EXPECT_NE(buffer.data, nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data) % 64, 0U);
    if (bytes > 0) std::memset(buffer.data, 1, bytes);
  }
  const auto statistics = pool->statistics();
  EXPECT_EQ(statistics.fresh + statistics.reused + statistics.used_bytes + statistics.kept_bytes,
            0U);
}

TEST(BlockPool, AReturnedBlockServesTheNextOfItsSize) {
  for (const std::size_t bytes : {100 * kKiB, 3 * kMiB, 40 * kMiB}) {
    const auto pool = make_pool();
    const std::size_t block = BlockPool::block_bytes(bytes);
    Buffer buffer = pool->allocate(Device{}, bytes);
    void* const at = buffer.data;
    auto statistics = pool->statistics();
    EXPECT_EQ(statistics.fresh, 1U);
    EXPECT_EQ(statistics.used_bytes, block);
    EXPECT_EQ(statistics.kept_bytes, 0U);
    Buffer copy = buffer;
    buffer = {};
    EXPECT_EQ(pool->statistics().used_bytes, block) << "a copy is left";
    copy = {};
    statistics = pool->statistics();
    EXPECT_EQ(statistics.used_bytes, 0U);
    EXPECT_EQ(statistics.kept_bytes, block);
    // Another request that takes the same block size.
    buffer = pool->allocate(Device{}, block);
    EXPECT_EQ(buffer.data, at);
    EXPECT_EQ(buffer.bytes, block);
    statistics = pool->statistics();
    EXPECT_EQ(statistics.reused, 1U);
    EXPECT_EQ(statistics.fresh, 1U);
    EXPECT_EQ(statistics.kept_bytes, 0U);
    // It does not serve other sizes.
    const Buffer other = pool->allocate(Device{}, 2 * block);
    EXPECT_NE(other.data, at);
    EXPECT_EQ(pool->statistics().fresh, 2U);
  }
}

TEST(BlockPool, KeepsNoMoreThanItsLimit) {
  const std::size_t block = BlockPool::block_bytes(kMiB);
  const auto pool = make_pool(3 * block);
  std::vector<Buffer> buffers;
  for (int i = 0; i < 10; ++i) buffers.push_back(pool->allocate(Device{}, kMiB));
  EXPECT_EQ(pool->statistics().used_bytes, 10 * block);
  buffers.clear();
  EXPECT_EQ(pool->statistics().kept_bytes, 3 * block);
  EXPECT_EQ(pool->statistics().used_bytes, 0U);
  for (int i = 0; i < 10; ++i) buffers.push_back(pool->allocate(Device{}, kMiB));
  EXPECT_EQ(pool->statistics().reused, 3U);
  EXPECT_EQ(pool->statistics().fresh, 17U);
  buffers.clear();
  const auto none = make_pool(0);
  static_cast<void>(none->allocate(Device{}, kMiB));
  static_cast<void>(none->allocate(Device{}, kMiB));
  EXPECT_EQ(none->statistics().kept_bytes, 0U);
  EXPECT_EQ(none->statistics().fresh, 2U);
}

TEST(BlockPool, UnusedBlocksMakeRoomForThoseOfAnotherSize) {
  const auto pool = make_pool(kGiB, nullptr, 8 * kMiB);
  for (const std::size_t bytes : {4 * kMiB, kMiB, 2 * kMiB})
    static_cast<void>(pool->allocate(Device{}, bytes));
  EXPECT_EQ(pool->statistics().kept_bytes, 7 * kMiB) << "they take no more than the limit";
  const Buffer used = pool->allocate(Device{}, 512 * kKiB);
  EXPECT_EQ(pool->statistics().kept_bytes, 7 * kMiB);
  const Buffer more = pool->allocate(Device{}, 768 * kKiB);
  EXPECT_EQ(pool->statistics().kept_bytes, 3 * kMiB) << "the one that was used first is dropped";
  EXPECT_EQ(pool->statistics().fresh, 5U);
  static_cast<void>(pool->allocate(Device{}, 2 * kMiB));
  EXPECT_EQ(pool->statistics().reused, 1U);
}

TEST(BlockPool, BlocksInUseMayTakeMoreThanTheLimitAndAreReusedThen) {
  const auto pool = make_pool(kGiB, nullptr, 8 * kMiB);
  const Buffer held = pool->allocate(Device{}, 20 * kMiB);  // by the program, for long
  for (int round = 0; round < 5; ++round) {
    for (int trims = 0; trims < round; ++trims) pool->trim(BlockPool::Clock::time_point{});
    const Buffer message = pool->allocate(Device{}, 4 * kMiB);
  }
  EXPECT_EQ(pool->statistics().fresh, 2U);
  EXPECT_EQ(pool->statistics().reused, 4U);
  EXPECT_EQ(pool->statistics().kept_bytes, 4 * kMiB);
  // What was used lately may be kept, and no more.
  static_cast<void>(pool->allocate(Device{}, 3 * kMiB));
  EXPECT_EQ(pool->statistics().kept_bytes, 3 * kMiB);
  pool->trim(BlockPool::Clock::time_point{});
  pool->trim(BlockPool::Clock::time_point{});
  pool->trim(BlockPool::Clock::time_point{});
  const Buffer next = pool->allocate(Device{}, kMiB);
  EXPECT_EQ(pool->statistics().kept_bytes, 0U);
}

// They would stay in the arena of each thread that has ever received something.
TEST(BlockPool, BlocksThatAreNotKeptGoBackToTheSystemFromAllThreads) {
  if (testing::kAddressSanitizer || testing::kThreadSanitizer)
    GTEST_SKIP() << "their memory counts, too";
  base::keep_freed_memory();
  for (const std::size_t bytes : {64 * kKiB, kMiB}) {
    const auto pool = make_pool(0);
    const std::size_t before = resident_bytes();
    for (int round = 0; round < 6; ++round) {
      std::vector<Buffer> received;
      std::thread([&] {
        while (received.size() * bytes < 32 * kMiB) {
          received.push_back(pool->allocate(Device{}, bytes));
          std::memset(received.back().data, 1, bytes);
        }
      }).join();
      EXPECT_GE(resident_bytes(), before + 30 * kMiB);
    }
    EXPECT_LE(resident_bytes(), before + 4 * kMiB) << bytes;
  }
}

TEST(BlockPool, ManySmallBlocksLeaveMappingsToTheProcess) {
  const int before = mappings();
  const auto pool = make_pool(0);
  std::vector<Buffer> all;
  for (int i = 0; i < 50'000; ++i) all.push_back(pool->allocate(Device{}, BlockPool::kSmallest));
  for (std::size_t i = 0; i < all.size(); i += 2) all[i] = {};  // a hole beside each
  EXPECT_LT(mappings() - before, 20'000);
  all.clear();
  EXPECT_EQ(pool->statistics().used_bytes, 0U);
}

TEST(BlockPool, TrimFreesBlocksThatWereUnusedForLong) {
  int asked = 0;
  const auto pool = make_pool(kGiB, [&asked] { ++asked; });
  const std::size_t small = BlockPool::block_bytes(100 * kKiB);
  const std::size_t large = BlockPool::block_bytes(5 * kMiB);
  static_cast<void>(pool->allocate(Device{}, 100 * kKiB));
  static_cast<void>(pool->allocate(Device{}, 5 * kMiB));
  EXPECT_EQ(asked, 1) << "asked once, when the first block came to lie unused";
  const auto between = BlockPool::Clock::now();
  while (BlockPool::Clock::now() == between) {
  }
  static_cast<void>(pool->allocate(Device{}, 5 * kMiB));  // used again: younger than `between` now
  EXPECT_EQ(pool->statistics().kept_bytes, small + large);
  EXPECT_TRUE(pool->trim(between));
  EXPECT_EQ(pool->statistics().kept_bytes, large);
  EXPECT_TRUE(pool->trim(between));
  EXPECT_FALSE(pool->trim(BlockPool::Clock::time_point::max()));
  EXPECT_EQ(pool->statistics().kept_bytes, 0U);
  EXPECT_FALSE(pool->trim(BlockPool::Clock::time_point::max()));
  EXPECT_EQ(asked, 1);
  static_cast<void>(pool->allocate(Device{}, kMiB));
  EXPECT_EQ(asked, 2) << "asked again after everything had gone";
  // Blocks in use are not touched.
  const Buffer buffer = pool->allocate(Device{}, kMiB);
  EXPECT_FALSE(pool->trim(BlockPool::Clock::time_point::max()));
  std::memset(buffer.data, 1, buffer.bytes);
}

TEST(TrimmedPool, GivesUnusedBlocksBackByItself) {
  const auto loop = std::make_shared<base::EventLoop>("trims");
  const auto pool = make_trimmed_pool(kGiB, loop, std::chrono::milliseconds(20));
  for (int round = 0; round < 2; ++round) {  // the timer starts again
    for (const std::size_t bytes : {kMiB, 3 * kMiB})
      static_cast<void>(pool->allocate(Device{}, bytes));
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (pool->statistics().kept_bytes > 0 && std::chrono::steady_clock::now() < give_up)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(pool->statistics().kept_bytes, 0U);
  }
}

TEST(TrimmedPool, OutlivesItsLoop) {
  auto loop = std::make_shared<base::EventLoop>("trims");
  const auto pool = make_trimmed_pool(kGiB, loop);
  loop.reset();
  static_cast<void>(pool->allocate(Device{}, kMiB));
  EXPECT_EQ(pool->statistics().kept_bytes, kMiB);
}

TEST(BlockPool, BuffersOutliveThePoolsOwner) {
  Buffer last;
  std::weak_ptr<BlockPool> watch;
  {
    auto pool = make_pool();
    watch = pool;
    static_cast<void>(pool->allocate(Device{}, 3 * kMiB));  // one unused block
    last = pool->allocate(Device{}, 5 * kMiB);
  }
  EXPECT_FALSE(watch.expired());
  std::memset(last.data, 7, last.bytes);
  last = {};
  EXPECT_TRUE(watch.expired());
}

TEST(BlockPool, OtherDevicesAreRefused) {
  const auto pool = make_pool();
  for (const std::size_t bytes : {std::size_t{1}, kMiB}) {
    const Error error = stitch::testing::error_of([&] {
      static_cast<void>(pool->allocate(Device{DeviceType::cuda, 3}, bytes));
    });
    EXPECT_EQ(error.code(), ErrorCode::unimplemented);
    EXPECT_NE(std::string(error.what()).find("cuda:3"), std::string::npos);
  }
  EXPECT_EQ(pool->statistics().used_bytes, 0U);
}

TEST(BlockPool, MoreMemoryThanAnyMachineHasIsRefused) {
  const auto pool = make_pool();
  constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max();
  for (const std::size_t bytes : {kMost, kMost - 1, kMost - kMost / 32, kMost / 4 * 3,
                                  kMost / 2 + 2, kMost / 2, kMost / 16}) {
    const Error error =
        stitch::testing::error_of([&] { const Buffer buffer = pool->allocate(Device{}, bytes); });
    EXPECT_EQ(error.code(), ErrorCode::overloaded) << error.what();
    EXPECT_EQ(pool->statistics().used_bytes, 0U) << bytes;
  }
}

TEST(BlockPool, SeveralThreadsAllocateAndFree) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 2000;
  std::atomic<int> asked{0};
  const auto pool = make_pool(20 * kMiB, [&asked] { asked.fetch_add(1); });
  // Each thread drops what its neighbour allocated.
  struct Slot {
    base::Mutex mutex;
    Buffer buffer STITCH_GUARDED_BY(mutex);
  };
  std::array<Slot, kThreads> slots;
  std::atomic<bool> torn{false};
  std::atomic<bool> stop{false};
  std::thread trimmer([&] {
    while (!stop.load()) {
      pool->trim(BlockPool::Clock::now());
      EXPECT_LE(pool->statistics().kept_bytes, 20 * kMiB);
      std::this_thread::yield();
    }
  });
  testing::on_each(kThreads, [&](int t) {
    std::mt19937_64 random(static_cast<std::uint64_t>(t));
    for (int i = 0; i < kRounds; ++i) {
      const std::size_t bytes =
          BlockPool::kSmallest +
          (random() % 8 == 0 ? random() % (4 * kMiB) : random() % (100 * kKiB));
      Buffer mine = pool->allocate(Device{}, bytes);
      auto* data = static_cast<unsigned char*>(mine.data);
      data[0] = data[bytes - 1] = static_cast<unsigned char>(t);
      std::this_thread::yield();
      if (data[0] != t || data[bytes - 1] != t) torn = true;
      Slot& slot = slots[static_cast<std::size_t>((t + 1) % kThreads)];
      base::MutexLock lock(slot.mutex);
      std::swap(slot.buffer, mine);
      lock.unlock();
      mine = {};
      lock.lock();
    }
  });
  stop = true;
  trimmer.join();
  EXPECT_FALSE(torn);
  for (Slot& slot : slots) {
    base::MutexLock lock(slot.mutex);
    slot.buffer = {};
  }
  const auto statistics = pool->statistics();
  EXPECT_EQ(statistics.used_bytes, 0U);
  EXPECT_LE(statistics.kept_bytes, 20 * kMiB);
  EXPECT_EQ(statistics.fresh + statistics.reused, static_cast<std::uint64_t>(kThreads * kRounds));
  EXPECT_GE(asked.load(), 1);
}

// It runs in a child: the limit is one of the process.
TEST(BlockPool, GivesBackWhatItKeepsBeforeItFails) {
  constexpr std::size_t kHalf = std::size_t{512} << 20;
  testing::ForkedChild child([] {
    const auto pool = std::make_shared<BlockPool>(4 * kHalf, nullptr);
    { const Buffer kept = pool->allocate(Device{}, kHalf); }
    std::int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlim_t bytes = static_cast<rlim_t>(pages) * 4096 + kHalf / 2;
    const rlimit limit{bytes, bytes};
    if (pool->statistics().kept_bytes == 0 || ::setrlimit(RLIMIT_AS, &limit) != 0) return 2;
    // Another size: what is kept has to go first.
    const Buffer other = pool->allocate(Device{}, kHalf / 4 * 5);
    if (other.data == nullptr || pool->statistics().kept_bytes != 0) return 3;
    try {
      static_cast<void>(pool->allocate(Device{}, kHalf));
    } catch (const Error& error) {
      return error.code() == ErrorCode::overloaded ? 0 : 4;
    }
    return 5;
  });
  EXPECT_EQ(child.wait(), 0);
}

}  // namespace
}  // namespace stitch::transport::block_pool_test
