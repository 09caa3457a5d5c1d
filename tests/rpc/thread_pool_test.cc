#include <semaphore>

#include "tests/support/no_more_threads.h"
#include "tests/support/world_test.h"

namespace thread_pool_test {
namespace {

using stitch::BlockingRegion;
using stitch::base::UniqueFunction;
using stitch::rpc::ThreadPool;
using stitch::testing::eventually;

void post(ThreadPool& pool, UniqueFunction<void()> task) { EXPECT_TRUE(pool.post(task)); }

TEST(ThreadPool, ThatHasNoThreadIsAnError) {
  const stitch::testing::NoMoreThreads none;
  const auto error = stitch::testing::error_of([] { const ThreadPool pool(3, "pool"); });
  EXPECT_EQ(error.code(), stitch::ErrorCode::overloaded);
  EXPECT_TRUE(std::string(error.what()).starts_with("thread pool \"pool\" cannot start a thread: "))
      << error.what();
}

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

TEST(ThreadPool, MakesThreadsWhenTheyAreWantedAndEndsIdleOnesButOne) {
  ThreadPool pool(4, "pool", std::chrono::milliseconds(20));
  EXPECT_EQ(pool.threads(), 1);
  for (int round = 0; round < 3; ++round) {
    std::counting_semaphore<> go{0};
    std::atomic<int> running{0};
    for (int i = 0; i < 6; ++i) {
      post(pool, [&] {
        ++running;
        go.acquire();
        --running;
      });
    }
    EXPECT_TRUE(eventually([&] { return running == 4; }));
    EXPECT_EQ(pool.threads(), 4);
    go.release(6);
    EXPECT_TRUE(
        eventually([&] { return running == 0 && pool.queued() == 0 && pool.threads() == 1; }));
  }
}

TEST(ThreadPool, CountsAThreadThatRunsTasksAsAGuest) {
  std::binary_semaphore go{0};
  std::atomic<bool> ran{false};
  ThreadPool pool(1, "pool");
  UniqueFunction<void()> first = [&] { go.acquire(); };
  ASSERT_TRUE(pool.post_quietly(first));
  std::thread guest([&] {
    if (pool.run_one_here(false)) pool.wake();  // unless the pool's own thread was quicker
  });
  ASSERT_TRUE(eventually([&] { return pool.queued() == 0; }));
  post(pool, [&] { ran = true; });
  EXPECT_FALSE(pool.run_one_here(false)) << "one task at a time";
  EXPECT_FALSE(ran);
  go.release();
  guest.join();
  EXPECT_TRUE(eventually([&] { return ran.load(); }));
}

TEST(ThreadPool, ReplacesAThreadThatBlockedBeforeItWasMissed) {
  std::binary_semaphore unblock{0};
  std::atomic<bool> blocked{false};
  std::atomic<bool> busy{false};
  std::atomic<bool> reached{false};
  std::atomic<bool> seen{false};
  ThreadPool pool(2, "pool");
  post(pool, [&] {
    const BlockingRegion region;
    blocked = true;
    unblock.acquire();
  });
  ASSERT_TRUE(eventually([&] { return blocked.load(); }));
  // Another becomes busy, without saying that it waits: the next task must find a third.
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
  std::counting_semaphore<> unblock{0};
  std::atomic<int> blocked{0};
  std::atomic<int> ran{0};
  ThreadPool pool(2, "pool");
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
  for (int i = 0; i < 100; ++i) post(pool, [&] { ++ran; });
  EXPECT_TRUE(eventually([&] { return ran == 100; }));
}

TEST(ThreadPool, BeginsAtOnceWhatMustNotWaitOrNotAtAll) {
  std::counting_semaphore<> go{0};
  std::binary_semaphore blocked{0}, ran{0};
  ThreadPool pool(1, "pool");
  UniqueFunction<void()> task = [&] { ran.release(); };
  ASSERT_TRUE(eventually([&] { return pool.post_if_free(task); })) << "its thread is starting";
  ran.acquire();
  post(pool, [&] {
    blocked.release();
    go.acquire();
  });
  blocked.acquire();
  task = [&] { ran.release(); };
  EXPECT_FALSE(pool.post_if_free(task));
  task();  // it was left untouched
  ran.acquire();
  go.release();
  EXPECT_TRUE(eventually([&] {
    UniqueFunction<void()> again = [&] { ran.release(); };
    return pool.post_if_free(again);
  }));
  ran.acquire();
}

TEST(ThreadPool, SaysOnceWhenTooManyHandlersWait) {
  std::counting_semaphore<> go{0};
  std::atomic<int> waiting{0};
  ::testing::internal::CaptureStderr();
  ThreadPool pool(1, "full");
  const auto wait = [&] {
    const BlockingRegion region;
    ++waiting;
    go.acquire();
  };
  for (int i = 0; i <= ThreadPool::kMaxExtra; ++i) post(pool, wait);
  EXPECT_TRUE(eventually([&] { return waiting == ThreadPool::kMaxExtra + 1; }));
  EXPECT_EQ(pool.threads_missed(), 0u);
  for (int i = 0; i < 5; ++i) post(pool, wait);
  EXPECT_GE(pool.threads_missed(), 5u);
  EXPECT_EQ(pool.threads(), ThreadPool::kMaxExtra + 1);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "stitch: calls wait in thread pool \"full\": 256 of its handlers wait for "
            "something, and no more threads are added\n");
  go.release(ThreadPool::kMaxExtra + 6);
  EXPECT_TRUE(eventually([&] { return pool.queued() == 0; }));
}

}  // namespace
}  // namespace thread_pool_test
