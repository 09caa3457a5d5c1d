// What barriers and all_gathers leave in the exchanges of their workers: nothing, however they end.
#include "tests/support/world_test.h"

namespace gathering_test {
namespace {

using namespace stitch::testing;

bool nothing_is_kept(Cluster& cluster, int workers) {
  return eventually([&] {
    for (int rank = 0; rank < workers; ++rank) {
      if (cluster[rank].debug_info().at("rpc.gatherings") != 0) return false;
    }
    return true;
  });
}

TEST(Gatherings, ThatFailForOneLeaveNothingAndALateWorkerIsToldSo) {
  Cluster cluster(3, {.rpc_timeout = 1s});
  EXPECT_EQ(error_of([&] { cluster[0].barrier(); }).code(), ErrorCode::timeout);
  EXPECT_TRUE(nothing_is_kept(cluster, 3)) << "worker1 and worker2 have not come at all";
  for (const int late : {1, 2}) {
    const auto error = error_of([&] { cluster[late].barrier(); });
    EXPECT_TRUE(has_text(error, ErrorCode::timeout, "failed: no answer from worker \"worker"));
    EXPECT_TRUE(nothing_is_kept(cluster, 3));
  }
  // All are in step again.
  on_each(3, [&](int rank) { cluster[rank].barrier(); });
  EXPECT_TRUE(nothing_is_kept(cluster, 3));
}

// Only some of them wait for worker5 itself.
TEST(Gatherings, ATimeoutNamesTheWorkerThatHasNotArrivedOnEveryWorker) {
  constexpr int kWorkers = 8;
  Cluster cluster(kWorkers, {.rpc_timeout = 500ms});
  on_each(kWorkers, [&](int rank) {
    if (rank == 5) return;
    const auto error = error_of([&] { cluster[rank].barrier(); });
    EXPECT_TRUE(
        has_text(error, ErrorCode::timeout, "failed: no answer from worker \"worker5\" (id 5): "));
    EXPECT_EQ(error.worker(), "worker5");
  });
  EXPECT_TRUE(nothing_is_kept(cluster, kWorkers));
}

TEST(Gatherings, OfAWorkerThatIsGoneLeaveNothing) {
  Cluster cluster(3);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const std::string text = error_of([&] { cluster[rank].barrier(); }).what();
      EXPECT_TRUE(contains(text, "failed: no answer from worker \"worker2\" (id 2)")) << text;
    });
  }
  // Both have arrived, and wait for the third at each other's and at its exchange.
  EXPECT_TRUE(eventually([&] { return cluster[2].debug_info().at("rpc.calls_served") == 2; }));
  cluster[2].shutdown({.graceful = false});
  threads.clear();
  EXPECT_TRUE(nothing_is_kept(cluster, 2));
}

TEST(Gatherings, WithoutNamesAreRefusedInAnElasticWorld) {
  Options options;
  options.name = "a";
  options.world_size = "1:2";
  options.store = stitch::transport::make_hash_store();
  auto self = stitch::init(std::move(options));
  const std::string refused =
      "barrier() and all_gather() take names in an elastic world, whose workers come and go: say "
      "who takes part, as in barrier({\"a\", \"b\"})";
  EXPECT_TRUE(has_text(error_of([&] { self.barrier(); }), ErrorCode::invalid_argument, refused));
  EXPECT_TRUE(has_text(error_of([&] { static_cast<void>(self.all_gather(1)); }),
                       ErrorCode::invalid_argument, refused));
  self.barrier({"a"});
}

}  // namespace
}  // namespace gathering_test
