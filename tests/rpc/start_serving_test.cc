// A worker that begins to serve when its program says so, and what its functions find there.
#include <numeric>

#include "tests/support/world_test.h"

namespace start_serving_test {
namespace {

using namespace stitch::testing;

struct Model {
  std::atomic<int> version{0};
  std::mutex mutex;
  std::vector<int> order;
};

int version() { return stitch::user_data<std::shared_ptr<Model>>()->version; }
int version_inline() { return version(); }
STITCH_INLINE(version_inline);
void note(int i) {
  const auto model = stitch::user_data<std::shared_ptr<Model>>();
  const std::lock_guard lock(model->mutex);
  model->order.push_back(i);
}
void wrong_type() { static_cast<void>(stitch::user_data<int>()); }

struct Counter {
  int add(int n) { return count += n; }
  int count = 0;
};

// Worker 1 waits for serve(); each worker has a model of its own.
std::unique_ptr<Cluster> cluster(const std::function<void(Options&)>& adjust = {}) {
  return std::make_unique<Cluster>(2, [&](Options& options) {
    options.start_serving = options.rank == 0;
    options.num_threads = 1;
    options.user_data = std::make_shared<Model>();
    if (adjust) adjust(options);
  });
}

std::shared_ptr<Model> model_of(const Worker& worker) {
  return worker.user_data<std::shared_ptr<Model>>();
}

TEST(StartServing, CallsThatComeBeforeWaitAndAreServedInTheirOrder) {
  const auto world = cluster();
  auto before = rpc_async<version>("worker1");
  auto before_inline = rpc_async<version_inline>("worker1");
  auto counter = remote<Counter>("worker1");
  auto added = counter.rpc_async<&Counter::add>(3);
  for (int i = 0; i < 20; ++i) notify<note>("worker1", i);
  auto last = rpc_async<note>("worker1", 20);
  ASSERT_TRUE(eventually([&] { return (*world)[1].debug_info()["rpc.calls_served"] >= 25; }));
  EXPECT_FALSE(before.wait_for(20ms));
  EXPECT_FALSE(before_inline.ready());
  model_of((*world)[1])->version = 7;
  (*world)[1].serve();
  EXPECT_EQ(before.get(), 7);
  EXPECT_EQ(before_inline.get(), 7);
  EXPECT_EQ(added.get(), 3);
  last.get();
  std::vector<int> ascending(21);
  std::iota(ascending.begin(), ascending.end(), 0);
  EXPECT_EQ(model_of((*world)[1])->order, ascending);
  (*world)[1].serve();  // without effect
  EXPECT_EQ(rpc_sync<version>("worker1"), 7);
}

TEST(StartServing, BarriersAreAnsweredBefore) {
  const auto world = cluster();
  std::thread other([&] {
    (*world)[1].barrier();
    static_cast<void>((*world)[1].all_gather(1));
  });
  (*world)[0].barrier();
  EXPECT_EQ((*world)[0].all_gather(1).size(), 2U);
  other.join();
  (*world)[1].serve();
}

TEST(StartServing, ACallWhoseDeadlinePassesBeforeSaysSo) {
  const auto world = cluster();
  const auto error =
      error_of([] { static_cast<void>(rpc_sync<version>({.to = "worker1", .timeout = 50ms})); });
  EXPECT_TRUE(has_text(error, ErrorCode::timeout, " there, before Worker::serve()"));
  (*world)[1].serve();
  EXPECT_EQ(rpc_sync<version>("worker1"), 0);
}

TEST(StartServing, AWorkerThatLeavesBeforeRefusesWhatWaitsAndWhatComes) {
  auto world = cluster();
  auto waiting = rpc_async<version>("worker1");
  ASSERT_TRUE(eventually([&] { return (*world)[1].debug_info()["rpc.calls_served"] == 1; }));
  std::thread leaving([&] { (*world)[1].shutdown(); });
  const std::string text = "is shutting down; Worker::serve() was not called there";
  EXPECT_TRUE(has_text(error_of([&] { waiting.get(); }), ErrorCode::shutting_down, text));
  EXPECT_TRUE(
      has_text(error_of([] { rpc_sync<version>("worker1"); }), ErrorCode::shutting_down, text));
  (*world)[0].shutdown();
  leaving.join();
  EXPECT_TRUE(model_of((*world)[1])->order.empty());
}

TEST(UserData, IsThatOfTheWorkerWhoseFunctionRuns) {
  const auto world = cluster([](Options& options) { options.start_serving = true; });
  model_of((*world)[0])->version = 10;
  model_of((*world)[1])->version = 11;
  EXPECT_EQ(rpc_sync<version>("worker0"), 10);
  EXPECT_EQ(rpc_sync<version>("worker1"), 11);
  EXPECT_EQ(stitch::user_data<std::shared_ptr<Model>>()->version, 10);
}

TEST(UserData, OfAnotherTypeOrNoneIsAnErrorThatNamesBoth) {
  const auto world = cluster([](Options& options) {
    options.start_serving = true;
    if (options.rank == 0) options.user_data.reset();
  });
  EXPECT_TRUE(has_text(error_of([] { static_cast<void>(stitch::user_data<int>()); }),
                       ErrorCode::invalid_argument,
                       "user_data of worker \"worker0\" (id 0) is not set; wanted: int"));
  EXPECT_TRUE(has_text(error_of([] { rpc_sync<wrong_type>("worker1"); }),
                       ErrorCode::remote_exception, "is std::shared_ptr<"));
}

}  // namespace
}  // namespace start_serving_test
