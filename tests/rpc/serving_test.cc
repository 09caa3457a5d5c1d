// Which thread serves a call, over each transport: the one that reads, or one of the pool.
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <semaphore>

#include "tests/support/world_test.h"

namespace serving_test {
namespace {

using namespace stitch::testing;

std::atomic<int> serving_now{0};
std::atomic<int> most_serving{0};
int serve_counted(int i) {
  const int now = ++serving_now;
  int most = most_serving;
  while (now > most && !most_serving.compare_exchange_weak(most, now)) {
  }
  std::this_thread::yield();
  --serving_now;
  return i;
}

// A wait that the pool does not notice.
std::unique_ptr<std::binary_semaphore> gate;
void wait_at_gate() { gate->acquire(); }
std::binary_semaphore at_gate{0};
void wait_at_gate_seen() {
  at_gate.release();
  gate->acquire();
}
void open_gate() { gate->release(); }

int pass_down(int depth) { return depth == 0 ? 0 : 1 + rpc_sync<pass_down>("worker0", depth - 1); }

Future<int> answer_after_a_call(int i) {
  co_await rpc_async<serve_counted>("worker0", i);
  co_return i;
}

at::Tensor doubled(const at::Tensor& x) { return x * 2; }

std::vector<float> many_numbers() { return std::vector<float>(200'000, 1); }

class Serving : public ::testing::TestWithParam<const char*> {
 protected:
  static std::unique_ptr<Cluster> cluster(int size, int threads) {
    return std::make_unique<Cluster>(size, [threads](Options& options) {
      options.num_threads = threads;
      options.transports = {GetParam()};
    });
  }
};

// Such a result is decoded on the pool, whose only thread waits for it.
TEST_P(Serving, ALargeResultDoesNotWaitForTheCallersHandlers) {
  gate = std::make_unique<std::binary_semaphore>(0);
  const auto cluster = this->cluster(2, 1);
  auto waiting = (*cluster)[1].rpc_async<wait_at_gate_seen>("worker0");
  at_gate.acquire();
  auto numbers = rpc_async<many_numbers>({.to = "worker1", .timeout = 60s});
  const bool came = numbers.wait_for(20s);
  gate->release();
  ASSERT_TRUE(came);
  EXPECT_EQ(numbers.get().size(), 200'000U);
  waiting.get();
}

TEST_P(Serving, AWorkerOfOneThreadServesOneCallAtATime) {
  most_serving = 0;
  const auto world = cluster(2, 1);
  std::vector<Future<int>> answers;
  for (int i = 0; i < 2000; ++i) answers.push_back(rpc_async<serve_counted>("worker1", i));
  for (int i = 0; i < 2000; ++i) EXPECT_EQ(answers[static_cast<std::size_t>(i)].get(), i);
  EXPECT_EQ(most_serving, 1);
}

TEST_P(Serving, AHandlerThatWaitsForAnotherCallDoesNotBlockIt) {
  for (int round = 0; round < 50; ++round) {
    gate = std::make_unique<std::binary_semaphore>(0);
    const auto world = cluster(2, 2);
    const auto waiting = rpc_async<wait_at_gate>("worker1");
    rpc_sync<open_gate>("worker1");
    waiting.get();
  }
}

TEST_P(Serving, OneBatchIsServedBySeveralThreads) {
  // The first of the batch waits for the last: the thread that serves the batch must share it.
  gate = std::make_unique<std::binary_semaphore>(0);
  const auto world = cluster(2, 2);
  for (int round = 0; round < 100; ++round) {
    std::vector<Future<int>> between;
    const auto waiting = rpc_async<wait_at_gate>("worker1");
    for (int i = 0; i < 10; ++i) between.push_back(rpc_async<serve_counted>("worker1", i));
    const auto opening = rpc_async<open_gate>("worker1");
    waiting.get();
    opening.get();
    for (auto& each : between) static_cast<void>(each.get());
  }
}

TEST_P(Serving, CallsBackAndForthNeedNoThreadOfTheirOwn) {
  const auto world = cluster(2, 1);
  EXPECT_EQ(rpc_sync<pass_down>("worker1", 20), 20);
}

TEST_P(Serving, CoroutinesAnswerWhileOthersAreServed) {
  const auto world = cluster(3, 1);
  std::vector<Future<int>> answers;
  for (int i = 0; i < 500; ++i)
    answers.push_back(rpc_async<answer_after_a_call>(i % 2 == 0 ? "worker1" : "worker2", i));
  for (int i = 0; i < 500; ++i) EXPECT_EQ(answers[static_cast<std::size_t>(i)].get(), i);
}

TEST_P(Serving, SmallCallsAndLargeTensorsShareAConnection) {
  const auto world = cluster(2, 2);
  const auto large = at::arange(3 << 20, at::kFloat);
  std::vector<Future<at::Tensor>> tensors;
  std::vector<Future<int>> numbers;
  for (int round = 0; round < 8; ++round) {
    tensors.push_back(rpc_async<doubled>("worker1", large));
    for (int i = 0; i < 50; ++i) numbers.push_back(rpc_async<serve_counted>("worker1", i));
  }
  for (std::size_t i = 0; i < numbers.size(); ++i)
    EXPECT_EQ(numbers[i].get(), static_cast<int>(i % 50));
  for (auto& each : tensors) EXPECT_TRUE(at::equal(each.get(), large * 2));
}

TEST_P(Serving, ReceivedMemoryIsUsedAgain) {
  if (std::string(GetParam()) == "loopback") GTEST_SKIP() << "copies at the sender";
  const auto world = cluster(2, 2);
  const auto large = at::ones({1 << 20});
  for (int i = 0; i < 20; ++i)
    EXPECT_EQ(rpc_sync<doubled>("worker1", large).sum().item<float>(), 2.0F * (1 << 20));
  const auto numbers = (*world)[0].debug_info();
  EXPECT_GE(numbers.at("rpc.receive_pool_reused"), 10);
  EXPECT_LE(numbers.at("rpc.receive_pool_fresh"), 5);
}

bool grad_mode_is_on() { return at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled(); }
STITCH_INLINE(grad_mode_is_on);
// Under the modes of a new thread, whichever have come with the call.
bool ask_back() {
  const c10::InferenceMode no_inference(false);
  const at::AutoGradMode with_grad(true);
  return rpc_sync<grad_mode_is_on>("worker0");
}

TEST_P(Serving, AThreadThatWaitsServesOthersWithoutItsGuards) {
  const auto world = cluster(2, 2);
  const at::NoGradGuard no_grad;
  const c10::InferenceMode inference;
  for (int i = 0; i < 200; ++i) EXPECT_TRUE(rpc_sync<ask_back>("worker1"));
  EXPECT_FALSE(at::GradMode::is_enabled());
  EXPECT_FALSE(rpc_sync<doubled>("worker1", at::ones({4})).is_inference());
}

TEST_P(Serving, ManyThreadsWaitConcurrently) {
  const auto world = cluster(3, 2);
  std::vector<std::jthread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const WorkerScope scope((*world)[t % 3]);
      for (int i = 0; i < 300; ++i)
        wrong +=
            rpc_sync<serve_counted>("worker" + std::to_string((t + 1 + i % 2) % 3), i) == i ? 0 : 1;
    });
  }
  threads.clear();
  EXPECT_EQ(wrong, 0);
}

INSTANTIATE_TEST_SUITE_P(Over, Serving, ::testing::Values("loopback", "shm", "uv"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace serving_test
