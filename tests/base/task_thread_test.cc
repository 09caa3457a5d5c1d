#include <future>

#include "stitch/base/task_thread.h"
#include "tests/support/no_more_threads.h"
#include "tests/support/plain_test.h"

namespace stitch::base::task_thread_test {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

TEST(TaskThread, RunsPostedTasksInOrderOnOneThread) {
  TaskThread thread;
  std::vector<int> order;
  std::promise<std::thread::id> id;
  for (int i = 0; i < 1000; ++i) thread.post([&order, i] { order.push_back(i); });
  thread.post([&id] { id.set_value(std::this_thread::get_id()); });
  EXPECT_NE(id.get_future().get(), std::this_thread::get_id());
  ASSERT_EQ(order.size(), 1000U);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(order[i], i);
}

TEST(TaskThread, ThatCannotBeStartedIsAnError) {
  const stitch::testing::NoMoreThreads none;
  const auto error = stitch::testing::error_of([] { const TaskThread thread; });
  EXPECT_EQ(error.code(), ErrorCode::overloaded);
  EXPECT_TRUE(std::string(error.what())
                  .starts_with("thread that runs an endpoint's tasks cannot be started: "))
      << error.what();
}

TEST(TaskThread, RunsTimedTasksWhenTheyAreDue) {
  TaskThread thread;
  std::vector<int> order;
  std::promise<void> last;
  const auto start = Clock::now();
  thread.post_at(start + milliseconds(60), [&] {
    order.push_back(3);
    last.set_value();
  });
  thread.post_at(start + milliseconds(20), [&] { order.push_back(1); });
  thread.post_at(start + milliseconds(20), [&] { order.push_back(2); });
  thread.post([&] { order.push_back(0); });
  last.get_future().wait();
  EXPECT_GE(Clock::now() - start, milliseconds(60));
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3}));
}

TEST(TaskThread, FinishesPostedTasksAndDropsTimedOnesAtTheEnd) {
  std::atomic<int> ran{0};
  {
    TaskThread thread;
    thread.post_at(Clock::now() + std::chrono::hours(1), [&] { ran += 1000; });
    thread.post([&] {
      ++ran;
      thread.post([&] { ++ran; });
    });
  }
  EXPECT_EQ(ran, 2);
}

TEST(TaskThread, RunsTasksInsidePostWhenItHasEnded) {
  TaskThread thread;
  thread.join();
  thread.join();
  bool ran = false;
  thread.post([&] { ran = true; });
  EXPECT_TRUE(ran);
}

TEST(TaskThread, TakesTasksFromSeveralThreads) {
  std::atomic<int> ran{0};
  {
    TaskThread thread;
    std::vector<std::jthread> posters;
    for (int t = 0; t < 4; ++t) {
      posters.emplace_back([&] {
        for (int i = 0; i < 5000; ++i) thread.post([&] { ++ran; });
      });
    }
  }
  EXPECT_EQ(ran, 20000);
}

}  // namespace
}  // namespace stitch::base::task_thread_test
