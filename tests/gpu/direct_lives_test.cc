// Transfers of workers that join, die in mid-transfer and come back, and over connections that
// break. Over the double of CUDA and NCCL.
#include "tests/gpu/device_test.h"

namespace direct_lives_test {  // its functions are registered under their full names
namespace {

using namespace stitch::testing::device_names;  // NOLINT
using stitch::Worker;

constexpr std::int64_t kOwn = 300'000;       // floats: a transfer of its own
constexpr std::int64_t kChunks = 1'600'000;  // floats: four chunks by staging

at::Tensor cuda(int index, float value, std::int64_t size = kOwn) {
  return filled(index, value, {size});
}
int next(int number) { return number + 1; }
at::Tensor twice(const at::Tensor& tensor) { return tensor * 2; }

std::atomic<int> handled{0};
at::Tensor twice_counted(const at::Tensor& tensor) {
  ++handled;
  return tensor * 2;
}

// Workers of one store. What "a" and "c" send from cuda:0, "b" gets on cuda:1, or where it was.
class DirectLives : public ::testing::Test {
 protected:
  Worker start(const std::string& name, bool map = true) const {
    Options options{.name = name,
                    .world_size = "1:8",
                    .rpc_timeout = 60s,
                    .init_timeout = 30s,
                    .shutdown_timeout = 20s,
                    .store = store_};
    if (map && name != "b") options.device_maps["b"] = {{"cuda:0", "cuda:1"}};
    return stitch::init(std::move(options));
  }
  // Ends as a process that is killed does, as far as the others can see.
  static void kill(Worker& worker) { worker.shutdown({.graceful = false}); }
  // Calls until a transfer each way has gone by that path.
  static void await_path(Worker& caller, const std::string& path) {
    const std::string key = "gpu.sent_messages." + path + ".b.cuda:0";
    const auto before = count(caller, key);
    ASSERT_TRUE(eventually([&] {
      EXPECT_TRUE(holds(caller.rpc_sync<twice>("b", cuda(0, 3)), 0, 6));
      return count(caller, key) > before;
    })) << path;
  }
  static bool nothing_under_way(Worker& worker) {
    return count(worker, "gpu.transfers_sending") == 0 &&
           count(worker, "gpu.transfers_receiving") == 0;
  }

 private:
  std::shared_ptr<stitch::transport::Store> store_ = stitch::transport::make_hash_store();
};

TEST_F(DirectLives, AWorkerThatJoinsSendsAndReceivesByTransfers) {
  for (const bool apart : {false, true}) {
    fake::workers_are_processes(apart);
    auto a = start("a");
    auto b = start("b");
    EXPECT_TRUE(holds(a.rpc_sync<twice>("b", cuda(0, 3)), 0, 6));
    EXPECT_EQ(count(a, "gpu.sent_messages.host.b.cuda:0"), 0);
    EXPECT_TRUE(holds(b.rpc_sync<twice>("a", on("cuda:2", cuda(1, 2))), 2, 4));
    EXPECT_EQ(count(b, "gpu.sent_messages.host.a.cuda:1"), 0);
    b.shutdown();
    a.shutdown();
  }
}

// A device that does not answer may wait for a peer, which waits for what the reader reads next.
TEST_F(DirectLives, AThreadThatReadsWaitsForNoDevice) {
  auto a = start("a");
  auto b = start("b");
  // Its result returns by the inverse of the map, from cuda:1 to cuda:0.
  const auto small = [&] { return a.rpc_async<twice>("b", on("cuda:1", at::ones({10}))); };
  EXPECT_TRUE(holds(small().get(), 0, 2));  // what is made once has been made
  fake::Hold hold(fake::pool_stream({c10::kCUDA, 1}));
  fake::gpu().set_sync_on_alloc(true);
  auto late = small();
  EXPECT_EQ(a.rpc_sync<next>({.to = "b", .timeout = 5s}, 3), 4);
  EXPECT_FALSE(late.ready());
  fake::gpu().set_sync_on_alloc(false);
  hold.release();
  EXPECT_TRUE(holds(late.get(), 0, 2));
}

// It asks for events while the program may be capturing a graph.
TEST_F(DirectLives, TheThreadThatWaitsForDevicesEndsNoCapture) {
  stitch::rpc::note_device_in_use({c10::kCUDA, 1});
  stitch::rpc::GateWatch watch("watch");
  auto mode = cuda_api::kCaptureGlobal;
  watch.then(nullptr, [&](const std::optional<stitch::Error>&) {
    static_cast<void>(fake::gpu().cuda().thread_exchange_stream_capture_mode(&mode));
  });
  EXPECT_TRUE(eventually([&] { return watch.waiting() == 0; }));
  EXPECT_EQ(mode, cuda_api::kCaptureRelaxed);
}

// In a world that workers leave one by one, none waits for the others' shutdown.
TEST_F(DirectLives, AWorkerThatLeavesEndsTheTransfersOfItsAnswersFirst) {
  for (const bool apart : {false, true}) {
    fake::workers_are_processes(apart);
    auto a = start("a");
    for (int i = 0; i < 4; ++i) {
      auto b = start("b");
      std::vector<Future<at::Tensor>> calls;
      handled = 0;
      for (int k = 0; k < 6; ++k)
        calls.push_back(a.rpc_async<twice_counted>("b", cuda(0, 3, kChunks)));
      EXPECT_TRUE(eventually([&] { return handled > 0; }));
      b.shutdown();
      // Calls that had come are answered, others fail; no answer is lost on its way.
      int answered = 0;
      for (const auto& call : calls) {
        ASSERT_TRUE(eventually([&] { return call.ready(); }));
        if (call.has_error()) continue;
        EXPECT_TRUE(holds(call.get(), 0, 6));
        ++answered;
      }
      EXPECT_EQ(answered, handled.load());
      EXPECT_TRUE(eventually([&] { return nothing_under_way(a); }));
    }
    a.shutdown();
  }
}

// By each path that workers of one process, and workers that pass for several, take.
TEST_F(DirectLives, AWorkerThatDiesInMidTransferAndComesBackHasTransfersOfItsOwn) {
  struct Case {
    bool apart;
    const char* path;
    bool warm;
  };
  std::mt19937 random(7);
  for (const Case& each : {Case{false, "local", true}, Case{false, "peer", true},
                           Case{true, "staging", false}, Case{true, "nccl", true}}) {
    fake::workers_are_processes(each.apart);
    std::uint64_t life = 0;  // of "b"
    const bool map = std::string(each.path) != "local";
    auto a = start("a", map);
    auto c = start("c", map);
    const auto argument = [&](float value) { return cuda(0, value, kChunks); };
    for (int i = 0; i < 6; ++i) {
      auto b = start("b");
      EXPECT_EQ(b.info().epoch, ++life);
      if (each.warm) await_path(a, each.path);
      if (HasFatalFailure()) return;
      std::vector<Future<at::Tensor>> calls;
      for (int k = 0; k < 4; ++k) {
        calls.push_back(a.rpc_async<twice>("b", argument(2)));
        calls.push_back(b.rpc_async<twice>("a", argument(2)));
      }
      auto other = a.rpc_async<twice>("c", argument(5));
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 8000));
      kill(b);
      for (const auto& call : calls) {
        ASSERT_TRUE(eventually([&] { return call.ready(); })) << each.path;
        if (!call.has_error()) {
          EXPECT_TRUE(holds(call.get(), 0, 4));
        }
      }
      EXPECT_TRUE(holds(other.get(), 0, 10));
      EXPECT_TRUE(eventually([&] { return nothing_under_way(a); })) << each.path;
    }
    auto b = start("b");
    EXPECT_EQ(b.info().epoch, ++life);
    EXPECT_TRUE(holds(a.rpc_sync<twice>("b", argument(2)), 0, 4));
    for (Worker* worker : {&a, &b, &c}) worker->shutdown();
  }
}

// Each message arrives once, or its connection breaks and the next one carries it.
TEST_F(DirectLives, TransfersGoOnOverConnectionsThatReplaceBrokenOnes) {
  for (const char* fault : {"seed=3,drop=0.05", "seed=4,duplicate=0.05", "seed=5,reorder=0.5"}) {
    for (const bool apart : {false, true}) {
      fake::workers_are_processes(apart);
      Cluster cluster(2, [&](Options& options) {
        options.fault = fault;
        options.reconnect_timeout = 20s;
        if (options.rank == 0) options.device_maps["worker1"] = {{"cuda:0", "cuda:1"}};
      });
      for (int i = 0; i < 30; ++i) {
        const auto value = static_cast<float>(i);
        const auto there = cluster[0].rpc_async<twice>("worker1", cuda(0, value, kChunks));
        const auto back = cluster[1].rpc_async<twice>("worker0", on("cuda:2", cuda(1, value)));
        EXPECT_TRUE(holds(there.get(), 0, 2 * value)) << fault;
        EXPECT_TRUE(holds(back.get(), 2, 2 * value)) << fault;
      }
      if (std::string(fault).find("reorder") == std::string::npos) {
        EXPECT_GT(count(cluster[0], "rpc.reconnects"), 0) << fault;
      }
      EXPECT_TRUE(eventually([&] { return nothing_under_way(cluster[0]); }));
      EXPECT_TRUE(eventually([&] { return nothing_under_way(cluster[1]); }));
    }
  }
}

}  // namespace
}  // namespace direct_lives_test
