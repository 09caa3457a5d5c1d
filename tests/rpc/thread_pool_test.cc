#include "stitch/rpc/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <semaphore>

#include "tests/support/eventually.h"

namespace {

using stitch::BlockingRegion;
using stitch::ThreadPool;
using stitch::UniqueFunction;
using stitch::testing::eventually;

void post(ThreadPool& pool, UniqueFunction<void()> task) { EXPECT_TRUE(pool.post(task)); }

TEST(ThreadPool, RunsWhatIsQueuedThenEnds) {
  std::atomic<int> ran{0};
  ThreadPool pool(3, "pool");
  for (int i = 0; i < 1000; ++i) post(pool, [&] { ++ran; });
  pool.close();
  UniqueFunction<void()> late = [&] { ran = -1; };
  EXPECT_FALSE(pool.post(late));
  EXPECT_TRUE(pool.join_until(std::chrono::steady_clock::time_point::max()));
  EXPECT_EQ(ran, 1000);
}

TEST(ThreadPool, ReplacesAThreadThatBlockedWhileOthersWereIdle) {
  ThreadPool pool(2, "pool");
  std::binary_semaphore unblock{0};
  std::atomic<bool> blocked{false};
  // Until one blocks while the other is idle, so that no third was started for it.
  for (int attempt = 0;; ++attempt) {
    ASSERT_LT(attempt, 10'000);
    blocked = false;
    post(pool, [&] {
      const BlockingRegion region;
      blocked = true;
      unblock.acquire();
    });
    ASSERT_TRUE(eventually([&] { return blocked.load(); }));
    if (pool.threads() == 2) break;
    unblock.release();
    ASSERT_TRUE(eventually([&] { return pool.threads() == 2; }));
  }
  // The idle one becomes busy, without saying that it waits: the next task must find another.
  std::atomic<bool> busy{false};
  std::atomic<bool> reached{false};
  std::atomic<bool> seen{false};
  post(pool, [&] {
    busy = true;
    seen = eventually([&] { return reached.load(); });
  });
  ASSERT_TRUE(eventually([&] { return busy.load(); }));
  post(pool, [&] { reached = true; });
  EXPECT_TRUE(eventually([&] { return reached.load(); }, std::chrono::seconds(10)));
  unblock.release();
  EXPECT_TRUE(eventually([&] { return seen.load(); }));
  EXPECT_TRUE(eventually([&] { return pool.threads() == 2; }));
}

TEST(ThreadPool, KeepsItsNumberOfThreadsAfterManyHaveBlocked) {
  ThreadPool pool(2, "pool");
  std::counting_semaphore<> unblock{0};
  std::atomic<int> blocked{0};
  for (int i = 0; i < 20; ++i) {
    post(pool, [&] {
      const BlockingRegion region;
      ++blocked;
      unblock.acquire();
    });
  }
  EXPECT_TRUE(eventually([&] { return blocked == 20; }));
  unblock.release(20);
  EXPECT_TRUE(eventually([&] { return pool.threads() == 2; }));
  std::atomic<int> ran{0};
  for (int i = 0; i < 100; ++i) post(pool, [&] { ++ran; });
  EXPECT_TRUE(eventually([&] { return ran == 100; }));
}

}  // namespace
