#include <sys/socket.h>

#include "stitch/transport/self_transfer.h"
#include "tests/support/world_test.h"

namespace worker_test {
namespace {

using namespace stitch::testing;

int unity() { return 1; }
std::int64_t elements(const at::Tensor& tensor) { return tensor.numel(); }
std::atomic<int> notified{0};
void note(int by) { notified += by; }
int inline_square(int x) { return x * x; }
STITCH_INLINE(inline_square);
int exported(int x) { return -x; }
STITCH_EXPORT_AS("negate", exported);
int much_exported(int x) { return x + 1; }
STITCH_EXPORT(much_exported);
STITCH_EXPORT_AS("v1.next", much_exported);
STITCH_EXPORT_AS("v2.next", much_exported);
int later_exported(int x) { return x + 2; }
STITCH_EXPORT_AS("skip", later_exported);
STITCH_EXPORT(later_exported);

int world() { return static_cast<int>(stitch::rpc::current_agent()->world_size()); }
Future<int> walk(int depth) {
  if (depth == 0) co_return 0;
  const auto next =
      (stitch::rpc::current_agent()->self().id.value() + 1) % static_cast<std::uint32_t>(world());
  co_return 1 + co_await rpc_async<walk>(WorkerId(next), depth - 1);
}

std::string where() { return current_worker().name; }
Future<std::string> where_after_a_wait() {
  co_await rpc_async<unity>(current_worker());
  co_return current_worker().name;
}

TEST(Worker, CodeCanAskWhichWorkerIsCurrent) {
  Cluster cluster(2);
  EXPECT_EQ(current_worker(), cluster[0].info());
  EXPECT_EQ(rpc_sync<where>("worker1"), "worker1");
  EXPECT_EQ(rpc_sync<where_after_a_wait>("worker1"), "worker1");
  {
    const WorkerScope in(cluster[1]);
    EXPECT_EQ(current_worker().id, WorkerId(1));
    EXPECT_EQ(rpc_async<unity>("worker0").then([](int) { return where(); }).get(), "worker1");
  }
  std::jthread([] {
    EXPECT_EQ(error_of([] { where(); }).code(), ErrorCode::invalid_argument);
  }).join();
}

TEST(Worker, NotifiesOneWay) {
  notified = 0;
  {
    Cluster cluster(2);
    for (int i = 0; i < 100; ++i) notify<note>("worker1", 2);
  }  // a graceful shutdown waits for what is in flight
  EXPECT_EQ(notified, 200);
}

// One-way around the ring, `hops` times.
void pass_on(int hops) {
  ++notified;
  if (hops == 0) return;
  const auto next =
      (stitch::rpc::current_agent()->self().id.value() + 1) % static_cast<std::uint32_t>(world());
  notify<pass_on>(WorkerId(next), hops - 1);
}

TEST(Worker, WaitsForChainsOfNotificationsBeforeItShutsDown) {
  for (int round = 0; round < 20; ++round) {
    notified = 0;
    {
      Cluster cluster(3);
      notify<pass_on>("worker1", 100);
    }
    EXPECT_EQ(notified, 101);
  }
}

TEST(Worker, RunsInlineAndRenamedFunctions) {
  Cluster cluster(2);
  EXPECT_EQ(rpc_sync<inline_square>("worker1", 7), 49);
  EXPECT_EQ(rpc_sync<exported>("worker1", 7), -7);
  EXPECT_EQ(stitch::kFunction<exported>.name, "negate");
  // Under every exported name, and no other.
  const auto call = [&](std::string_view name) {
    auto message = stitch::rpc::begin_request(stitch::rpc::function_id(name));
    stitch::rpc::OutArchive archive(*message);
    archive(1);
    archive.seal();
    return stitch::detail::start_call<int>(stitch::rpc::current_agent(), cluster[1].info(), name,
                                           std::nullopt, std::move(message));
  };
  for (const char* name :
       {"v1.next", "v2.next", typeid(stitch::rpc::FunctionTag<much_exported>).name()}) {
    EXPECT_EQ(call(name).get(), 2) << name;
  }
  for (const char* name : {"skip", typeid(stitch::rpc::FunctionTag<later_exported>).name()})
    EXPECT_EQ(call(name).get(), 3) << name;
  const auto gone = call(typeid(stitch::rpc::FunctionTag<exported>).name());
  EXPECT_EQ(error_of([&] { static_cast<void>(gone.get()); }).code(), ErrorCode::unimplemented);
}

TEST(Worker, OneThreadIsEnoughForAnyNestingOfCoroutines) {
  Cluster cluster(8, {.num_threads = 1});
  EXPECT_EQ(rpc_sync<walk>("worker1", 100), 100);
}

TEST(Worker, BarriersWaitForAllWorkers) {
  Cluster cluster(4);
  std::atomic<int> arrived{0};
  on_each(4, [&](int rank) {
    for (int round = 1; round <= 20; ++round) {
      ++arrived;
      cluster[rank].barrier();
      EXPECT_GE(arrived, 4 * round);
      cluster[rank].barrier();
    }
    if (rank < 2) cluster[rank].barrier({"worker0", "worker1"});
  });
}

TEST(Worker, AWorldThatNeedsMoreDescriptorsThanAllowedIsRefused) {
  Options options;
  options.name = "a";
  options.world_size = "1:2000000000";
  options.store = stitch::transport::make_hash_store();
  EXPECT_TRUE(has_text(error_of([&] { static_cast<void>(stitch::init(options)); }),
                       ErrorCode::overloaded,
                       "a worker of a world of 2000000000 takes up to 2000000040 descriptors, and "
                       "this process may have "));
}

TEST(Worker, GathersTheValueOfEveryWorker) {
  Cluster cluster(3);
  on_each(3, [&](int rank) {
    const auto values = cluster[rank].all_gather(std::vector<int>{rank, rank * rank});
    EXPECT_EQ(values.size(), 3u);
    EXPECT_EQ(values.at("worker2"), (std::vector<int>{2, 4}));
    const auto tensors = cluster[rank].all_gather(at::full({2}, rank));
    EXPECT_TRUE(at::equal(tensors.at("worker1"), at::full({2}, 1)));
  });
}

TEST(Worker, ListsTheWorkers) {
  Cluster cluster(2);
  EXPECT_EQ(cluster[1].name(), "worker1");
  EXPECT_EQ(cluster[1].rank(), 1);
  EXPECT_EQ(cluster[1].id(), WorkerId(1));
  EXPECT_EQ(cluster[1].world_size(), 2);
  EXPECT_EQ(cluster[0].workers().size(), 2u);
  EXPECT_EQ(cluster[0].worker("worker1"), cluster[1].info());
  EXPECT_EQ(cluster[0].info().epoch, 1u);
}

TEST(Worker, TablesAreEmptyAfterTraffic) {
  Cluster cluster(2);
  std::vector<Future<int>> futures;
  for (int i = 0; i < 2000; ++i) futures.push_back(rpc_async<inline_square>("worker1", i));
  for (int i = 0; i < 2000; ++i) EXPECT_EQ(futures[static_cast<std::size_t>(i)].get(), i * i);
  EXPECT_EQ(cluster[0].debug_info().at("rpc.calls_made"), 0);
  EXPECT_TRUE(eventually([&] { return cluster[1].debug_info().at("rpc.calls_served") == 0; }));
  EXPECT_EQ(cluster[1].debug_info().at("rpc.incoming_bytes"), 0);
}

TEST(Worker, StartsAndEndsManyTimesInOneProcess) {
  for (int round = 0; round < 100; ++round) {
    Cluster cluster(4);
    EXPECT_EQ(rpc_sync<unity>("worker3"), 1);
  }
}

TEST(Worker, IsConnectedByItsFirstMessage) {
  // Workers connect to watch each other, too, 250 ms after the start: then it is tried again.
  for (int round = 0; round < 20; ++round) {
    const auto begun = std::chrono::steady_clock::now();
    Cluster cluster(3);
    std::vector<std::int64_t> connections;
    const auto look = [&](int rank) {
      connections.push_back(cluster[rank].debug_info().at("rpc.connections"));
    };
    for (int rank = 0; rank < 3; ++rank) look(rank);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(rpc_sync<unity>("worker1"), 1);
    look(0);
    look(1);
    // The same connection, in the other direction.
    EXPECT_EQ(cluster[1].rpc_sync<unity>("worker0"), 1);
    for (int rank = 0; rank < 3; ++rank) look(rank);
    if (std::chrono::steady_clock::now() - begun >= 250ms) continue;
    EXPECT_EQ(connections, (std::vector<std::int64_t>{0, 0, 0, 1, 1, 1, 1, 0}));
    return;
  }
  GTEST_SKIP() << "this machine is too busy";
}

// Sockets of this process that other processes may connect to over a network.
int open_ports() {
  constexpr int kMaxDescriptors = 4096;
  int ports = 0;
  for (int file = 0; file < kMaxDescriptors; ++file) {
    int listens = 0;
    int family = 0;
    socklen_t size = sizeof(int);
    if (getsockopt(file, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 && listens != 0 &&
        getsockopt(file, SOL_SOCKET, SO_DOMAIN, &family, &size) == 0 && family != AF_UNIX)
      ++ports;
  }
  return ports;
}

TEST(Worker, ListensOnNoPortWhereAllMeetInSharedMemory) {
  const int before = open_ports();
  for (const auto& [transports, ports] :
       std::vector<std::pair<std::vector<std::string>, int>>{{{"loopback", "shm", "tcp"}, 0},
                                                             {{"shm", "tcp"}, 0},
                                                             {{"shm", "uv"}, 0},
                                                             {{"tcp", "shm"}, 2}}) {
    Cluster cluster(2, {.transports = transports});
    EXPECT_EQ(rpc_sync<unity>("worker1"), 1);
    EXPECT_EQ(open_ports() - before, ports);
  }
  // A worker that cannot share memory with the others communicates with them over TCP.
  Cluster cluster(2, [&](Options& options) {
    if (options.rank == 0) {
      options.transports = {"shm", "tcp"};
    } else {
      options.transports = {"tcp"};
    }
  });
  EXPECT_EQ(rpc_sync<unity>("worker1"), 1);
  EXPECT_EQ(cluster[1].rpc_sync<unity>("worker0"), 1);
  EXPECT_EQ(open_ports() - before, 2);
}

// No worker has a connection to it, so none is told.
TEST(Worker, AGracefulShutdownDetectsTheLossOfAWorkerWithoutAConnection) {
  for (const int leaver : {0, 1, 2}) {
    Cluster cluster(3);
    try {
      cluster[leaver].shutdown({.graceful = false, .timeout = 5s});
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
    for (const std::string& error : cluster.shutdown())
      ADD_FAILURE() << "worker " << leaver << " had left: " << error;
  }
}

TEST(Worker, AGracefulShutdownWithAMissingWorkerEndsInTime) {
  Cluster cluster(2);
  const auto start = std::chrono::steady_clock::now();
  const Error error = error_of([&] { cluster[0].shutdown({.wait = 100ms}); });
  EXPECT_TRUE(has_text(error, ErrorCode::timeout, "worker \"worker1\" (id 1)"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
}

TEST(Worker, TheKeysOfItsNumbersDoNotChange) {
  const auto keys = [](const Worker& worker) {
    std::set<std::string> keys;
    for (const auto& [key, number] : worker.debug_info()) {
      if (!contains(key, ".peer.")) keys.insert(key);
    }
    return keys;
  };
  Cluster cluster(2);
  const auto before = keys(cluster[0]);
  EXPECT_FALSE(stitch::transport::passes_once(
      "uv nowhere", []() -> std::unique_ptr<stitch::transport::Endpoint> {
        throw Error(ErrorCode::unimplemented, "there is no such transport");
      }));
  static_cast<void>(rpc_sync<unity>("worker1"));
  EXPECT_THROW(static_cast<void>(rpc_sync<unity>("worker7")), Error);
  {
    const stitch::dist_autograd::Context context;
    EXPECT_EQ(keys(cluster[0]), before);
  }
}

TEST(Worker, CountsTheTrafficWithEachPeer) {
  Cluster cluster(2);
  const auto number = [&](int rank, const std::string& name) {
    return cluster[rank].debug_info().at("rpc.peer.worker" + std::to_string(1 - rank) + '.' + name);
  };
  const auto messages = number(0, "messages_sent");
  const auto bytes = number(0, "bytes_sent");
  const auto received = number(1, "bytes_received");
  const auto back = number(0, "messages_received");
  constexpr std::int64_t kBytes = 1 << 20;
  EXPECT_EQ(rpc_sync<elements>("worker1", at::zeros({kBytes}, at::kByte)), kBytes);
  EXPECT_GE(number(0, "messages_sent"), messages + 1);
  EXPECT_GE(number(0, "bytes_sent"), bytes + kBytes);
  EXPECT_LT(number(0, "bytes_sent"), bytes + 2 * kBytes);
  EXPECT_GE(number(1, "bytes_received"), received + kBytes);
  EXPECT_GE(number(0, "messages_received"), back + 1);
}

}  // namespace
}  // namespace worker_test
