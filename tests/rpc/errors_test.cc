#include <latch>
#include <regex>

#include "stitch/base/name_list.h"
#include "stitch/transport/store/tcp_store.h"
#include "tests/support/no_more_threads.h"
#include "tests/support/world_test.h"

namespace errors_test {
namespace {

using namespace std::chrono_literals;
using stitch::Error;
using stitch::ErrorCode;
using stitch::Future;
using stitch::testing::Cluster;
using stitch::testing::error_of;
using stitch::testing::eventually;
using stitch::testing::Gate;

int one() { return 1; }
int throws_out_of_range(int i) { return std::vector<int>{1, 2}.at(static_cast<std::size_t>(i)); }
int throws_text(std::string text) { throw std::runtime_error(text); }
Future<int> throws_before_its_future(int i) { return stitch::make_ready(throws_out_of_range(i)); }
Future<int> fails_later() {
  co_await stitch::rpc_async<one>(stitch::rpc::current_agent()->self());
  throw std::runtime_error("after a while");
}
Gate gate;
void block() { gate.pass(); }
std::atomic<int> waiting_for_stop{0};
std::atomic<bool> saw_stop{false};
void wait_for_stop() {
  ++waiting_for_stop;
  const auto token = stitch::current_stop_token();
  saw_stop = eventually([&] { return token.stop_requested(); });
}

TEST(Errors, AHandlersExceptionReachesTheCaller) {
  Cluster cluster(2);
  const Error error = error_of([] { stitch::rpc_sync<throws_text>("worker1", "no such row"); });
  EXPECT_EQ(error.code(), ErrorCode::remote_exception);
  EXPECT_TRUE(error.remote());
  EXPECT_EQ(error.worker(), "worker1");
  EXPECT_NE(error.function().find("throws_text"), std::string::npos);
  EXPECT_STREQ(error.what(),
               "call errors_test::(anonymous namespace)::throws_text() to worker \"worker1\" "
               "(id 1) failed: "
               "std::runtime_error: no such row");
  EXPECT_EQ(stitch::rpc_sync<one>("worker1"), 1);
  EXPECT_EQ(error_of([] { stitch::rpc_sync<throws_out_of_range>("worker1", 5); }).code(),
            ErrorCode::remote_exception);
  EXPECT_EQ(error_of([] { stitch::rpc_sync<fails_later>("worker1"); }).code(),
            ErrorCode::remote_exception);
  EXPECT_EQ(error_of([] { stitch::rpc_sync<throws_before_its_future>("worker1", 5); }).code(),
            ErrorCode::remote_exception);
  EXPECT_EQ(stitch::rpc_sync<throws_before_its_future>("worker1", 1), 2);
}

TEST(Errors, OfHandlersAreNotPrinted) {
  Cluster cluster(2);
  ::testing::internal::CaptureStderr();
  static_cast<void>(error_of([] { stitch::rpc_sync<throws_text>("worker1", "no such row"); }));
  stitch::notify<throws_text>("worker1", "no such row");
  EXPECT_EQ(stitch::rpc_sync<one>("worker1"), 1);
  EXPECT_TRUE(cluster.shutdown().empty());
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

at::Tensor unsendable() { return at::eye(3).to_sparse_csr(); }
std::string text_of(std::size_t bytes) { return std::string(bytes, 'x'); }

TEST(Errors, AResultThatCannotBeSentIsTheErrorOfItsCall) {
  Cluster cluster(2, [](stitch::Options& options) { options.max_frame_bytes = 1 << 20; });
  Error error = error_of([] { stitch::rpc_sync<unsendable>("worker1"); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_NE(
      std::string(error.what())
          .find("unsendable() to worker \"worker1\" (id 1) failed: its result cannot be sent: "),
      std::string::npos)
      << error.what();
  error = error_of([] { stitch::rpc_sync<text_of>("worker1", std::size_t{2} << 20); });
  EXPECT_EQ(error.code(), ErrorCode::out_of_range);
  EXPECT_NE(std::string(error.what()).find("its result cannot be sent: "), std::string::npos)
      << error.what();
  EXPECT_EQ(stitch::rpc_sync<text_of>("worker1", std::size_t{3}), "xxx");
}

std::int64_t elements(at::Tensor tensor) { return tensor.numel(); }

TEST(Errors, WhatExceedsTheInflightLimitOfEitherSideIsRefused) {
  const std::vector<std::size_t> limits{2 << 20, 4 << 20, 1 << 19};
  Cluster cluster(3, [&](stitch::Options& options) {
    options.max_inflight_bytes = limits.at(static_cast<std::size_t>(options.rank));
  });
  // A message is counted until its transport has completed it, possibly after the answer has
  // arrived.
  const auto all_through = [&] {
    return eventually([&] {
      std::int64_t bytes = 0;
      for (int rank = 0; rank < 3; ++rank) {
        const auto numbers = cluster[rank].debug_info();
        bytes += numbers.at("rpc.incoming_bytes") + numbers.at("rpc.outgoing_bytes");
      }
      return bytes == 0;
    });
  };
  const auto tensor = [](std::int64_t half_mebibytes) {
    return at::zeros({half_mebibytes << 19}, at::kByte);
  };
  Error error = error_of([&] { cluster[0].rpc_sync<elements>("worker1", tensor(5)); });
  EXPECT_EQ(error.code(), ErrorCode::overloaded);
  EXPECT_NE(std::string(error.what()).find("was not made: message of "), std::string::npos)
      << error.what();
  error = error_of([&] { cluster[0].rpc_sync<elements>("worker2", tensor(3)); });
  EXPECT_EQ(error.code(), ErrorCode::overloaded);
  EXPECT_FALSE(error.remote());
  EXPECT_NE(std::string(error.what()).find("would exceed max_inflight_bytes 524288"),
            std::string::npos)
      << error.what();
  EXPECT_TRUE(all_through());
  EXPECT_EQ(cluster[0].rpc_sync<elements>("worker1", tensor(3)), std::int64_t{3} << 19);
  EXPECT_EQ(cluster[1].rpc_sync<elements>("worker1", tensor(5)), std::int64_t{5} << 19);
  EXPECT_TRUE(all_through());
}

TEST(Errors, AnUnknownWorkerIsNamedWithNearNames) {
  Cluster cluster(3);
  Error error = error_of([] { stitch::rpc_sync<one>("wroker1"); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_STREQ(error.what(),
               "worker \"wroker1\" is not in this world of 3; known are \"worker1\", \"worker0\", "
               "\"worker2\"");
  error = error_of([] { stitch::rpc_sync<one>(stitch::WorkerId(9)); });
  EXPECT_STREQ(error.what(), "worker id 9 is not in this world; ids are 0 to 2");
}

TEST(Errors, AnUnregisteredFunctionIsNamed) {
  Cluster cluster(2);
  const auto agent = cluster[0].agent();
  const auto& to = cluster[1].info();
  auto message = stitch::rpc::Agent::begin_request(stitch::rpc::function_id("no such function"));
  const Error error = error_of([&] {
    stitch::detail::start_call<int>(agent, to, "errors_test::(anonymous namespace)::ones",
                                    std::nullopt, std::move(message))
        .get();
  });
  EXPECT_EQ(error.code(), ErrorCode::unimplemented);
  EXPECT_NE(std::string(error.what())
                .find("call errors_test::(anonymous namespace)::ones() to worker \"worker1\" (id "
                      "1) failed: the "
                      "function is not registered there; "
                      "near names there: errors_test::(anonymous namespace)::one"),
            std::string::npos)
      << error.what();
}

// The answer of a callee without that function: near names, and many others before or after them.
Future<int> lists_names(bool near_first) {
  const std::string near = "errors_test::(anonymous namespace)::lists_name\n";
  std::string names;
  while (names.size() < std::size_t{64} << 10) names += "another name that is not near\n";
  const stitch::Promise<int> promise;
  promise.set_exception(std::make_exception_ptr(stitch::rpc::CallRefused(
      Error(ErrorCode::unimplemented, near_first ? near + names : names + near))));
  return promise.future();
}

TEST(Errors, ALongListOfNamesIsCut) {
  Cluster cluster(2);
  const std::string near = "near names there: errors_test::(anonymous namespace)::lists_name";
  Error error = error_of([] { stitch::rpc_sync<lists_names>("worker1", true); });
  EXPECT_EQ(error.code(), ErrorCode::unimplemented);
  EXPECT_NE(std::string(error.what()).find(near), std::string::npos) << error.what();
  error = error_of([] { stitch::rpc_sync<lists_names>("worker1", false); });
  EXPECT_EQ(error.code(), ErrorCode::unimplemented);
  EXPECT_EQ(std::string(error.what()).find(near), std::string::npos) << error.what();
}

at::Tensor misfit() { return at::ones({2}) + at::ones({3}); }
at::Tensor quoted_misfit() {
  try {
    return misfit();
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string("step 3: ") + error.what());
  }
}

struct Settings {
  double rate = 0;
  int steps = 0;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(rate, steps);
  }
};
int use_settings(Settings settings) { return settings.steps; }

TEST(Errors, ArgumentsWithOtherFieldsAreRefused) {
  Cluster cluster(2);
  const auto call_with = [&](auto... fields) {
    auto message = stitch::rpc::Agent::begin_request(stitch::kFunction<use_settings>.id);
    stitch::rpc::OutArchive archive(message);
    archive(fields...);
    archive.seal();
    return error_of([&] {
      stitch::detail::start_call<int>(cluster[0].agent(), cluster[1].info(), "use_settings",
                                      std::nullopt, std::move(message))
          .get();
    });
  };
  Error error = call_with(1, 2.0);  // same size, fields swapped
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_STREQ(error.what(),
               "call use_settings() to worker \"worker1\" (id 1) failed: argument 1 does not match "
               "its type on the callee, "
               "errors_test::(anonymous namespace)::Settings: its fields are of other types");
  EXPECT_EQ(call_with(1.0).code(), ErrorCode::invalid_argument);
  EXPECT_EQ(call_with(1.0, 2, 3).code(), ErrorCode::invalid_argument);
  EXPECT_EQ(stitch::rpc_sync<use_settings>("worker1", Settings{1, 5}), 5);
}

TEST(Errors, DeadlinesPass) {
  Cluster cluster(2);
  const Error error =
      error_of([] { stitch::rpc_sync<wait_for_stop>({.to = "worker1", .timeout = 50ms}); });
  EXPECT_EQ(error.code(), ErrorCode::timeout);
  // On a busy machine it may be queued, and what its callee says of it may come too late.
  EXPECT_TRUE(std::regex_match(
      error.what(),
      std::regex(
          "call errors_test::\\(anonymous namespace\\)::wait_for_stop\\(\\) to worker \"worker1\" "
          "\\(id 1\\) timed out after 50 ms; ((running|queued) [0-9.]+ ms there|worker was last "
          "heard [0-9.]+ ms ago; the request was sent)")))
      << error.what();
  EXPECT_EQ(stitch::rpc_sync<one>("worker1"), 1);
  EXPECT_EQ(
      error_of([] { stitch::rpc_sync<wait_for_stop>({.to = "worker1", .timeout = 1us}); }).code(),
      ErrorCode::timeout);
  EXPECT_EQ(stitch::rpc_sync<one>({.to = "worker1", .timeout = std::chrono::hours(2400)}), 1);
  EXPECT_EQ(stitch::rpc_sync<one>({.to = "worker1", .timeout = 0s}), 1);
}

std::atomic<int> nested_code{0};
void nested_wait() {
  try {
    stitch::rpc_sync<wait_for_stop>(stitch::WorkerId(2));
  } catch (const Error& error) {
    nested_code = static_cast<int>(error.code());
  }
  wait_for_stop();  // both deadlines pass at the same moment: the result must not win
}

TEST(Errors, DeadlinesShrinkThroughNestedCallsAndStopTheCallee) {
  Cluster cluster(3);
  saw_stop = false;
  nested_code = 0;
  EXPECT_EQ(
      error_of([] { stitch::rpc_sync<nested_wait>({.to = "worker1", .timeout = 1s}); }).code(),
      ErrorCode::timeout);
  EXPECT_TRUE(
      eventually([] { return saw_stop && nested_code == static_cast<int>(ErrorCode::timeout); }));
}

TEST(Errors, CancellingReachesACalleeThatHoldsTheOnlyThread) {
  Cluster cluster(2, [](stitch::Options& options) { options.num_threads = 1; });
  saw_stop = false;
  waiting_for_stop = 0;
  auto future = stitch::rpc_async<wait_for_stop>("worker1");
  ASSERT_TRUE(eventually([&] { return waiting_for_stop == 1; }));
  future.cancel();
  EXPECT_EQ(future.error().code(), ErrorCode::cancelled);
  EXPECT_TRUE(eventually([] { return saw_stop.load(); }));
}

TEST(Errors, AForcedShutdownFailsCallsToThatWorkerOnly) {
  Cluster cluster(3);
  gate.close();
  auto waiting = cluster[0].rpc_async<block>("worker2");
  ASSERT_TRUE(gate.wait_for_arrival());
  cluster[2].shutdown(
      {.graceful = false, .timeout = 1ms});  // it leaves the handler behind, and says so
  gate.open();
  const Error error = error_of([&] { waiting.get(); });
  EXPECT_EQ(error.code(), ErrorCode::disconnected) << error.what();
  EXPECT_EQ(error.worker(), "worker2");
  EXPECT_EQ(stitch::rpc_sync<one>("worker1"), 1);
  const Error later = error_of([] { stitch::rpc_sync<one>("worker2"); });
  EXPECT_EQ(later.code(), ErrorCode::disconnected);
  EXPECT_EQ(later.worker(), "worker2");
}

TEST(Errors, AfterShutdownEveryCallThrows) {
  auto worker = stitch::init({.name = "solo", .rank = 0, .world_size = 1});
  EXPECT_EQ(stitch::rpc_sync<one>("solo"), 1);
  worker.shutdown();
  worker.shutdown();
  EXPECT_EQ(error_of([&] { static_cast<void>(worker.rpc_async<one>("solo")); }).code(),
            ErrorCode::shutting_down);
  EXPECT_EQ(error_of([&] { worker.notify<one>("solo"); }).code(), ErrorCode::shutting_down);
  EXPECT_EQ(error_of([&] { worker.barrier(); }).code(), ErrorCode::shutting_down);
  EXPECT_EQ(error_of([] { stitch::rpc_sync<one>("solo"); }).code(), ErrorCode::shutting_down);
}

TEST(Errors, WithoutOneCurrentWorkerCallsSaySo) {
  Cluster cluster(2);
  std::string text;
  std::jthread([&] { text = error_of([] { stitch::rpc_sync<one>("worker1"); }).what(); }).join();
  EXPECT_EQ(text,
            "there is no current worker on this thread, and this process has several (worker0, "
            "worker1): make one current with "
            "stitch::WorkerScope");
}

TEST(Errors, DuplicateNamesAndRanksFailOnEveryWorkerConcerned) {
  const auto start_two = [](stitch::Options a, stitch::Options b) {
    const auto store = stitch::transport::make_hash_store();
    a.store = b.store = store;
    a.world_size = b.world_size = 2;
    std::vector<std::string> texts(2);
    {
      std::jthread first(
          [&] { texts[0] = error_of([&] { auto worker = stitch::init(a); }).what(); });
      std::jthread second(
          [&] { texts[1] = error_of([&] { auto worker = stitch::init(b); }).what(); });
    }
    return texts;
  };
  for (const auto& text : start_two({.name = "a", .rank = 0}, {.name = "b", .rank = 0})) {
    EXPECT_TRUE(text == "rank 0 is taken twice: by worker \"a\" and worker \"b\"" ||
                text == "rank 0 is taken twice: by worker \"b\" and worker \"a\"")
        << text;
  }
  for (const auto& text : start_two({.name = "ps", .rank = 0}, {.name = "ps", .rank = 1})) {
    EXPECT_TRUE(text == "worker name \"ps\" is taken twice: by rank 0 and rank 1" ||
                text == "worker name \"ps\" is taken twice: by rank 1 and rank 0")
        << text;
  }
}

// A port of 127.0.0.1 that was free a moment ago, with some ports above it.
std::string free_tcp_method() {
  stitch::base::EventLoop loop("test");
  const stitch::transport::TcpStoreServer server(loop, {});
  return "tcp://127.0.0.1:" + std::to_string(std::min<int>(server.port(), 65535 - 16));
}

// The host of the store fails, too: it keeps the store until the others have been told.
TEST(Errors, DuplicatesAreReportedOverTcpToo) {
  for (int round = 0; round < 10; ++round) {
    std::vector<stitch::Options> workers;
    std::string expected;
    switch (round % 4) {
      case 0:
        workers = {{.name = "ps", .rank = 0}, {.name = "ps", .rank = 1}};
        expected = "worker name \"ps\" is taken twice";
        break;
      case 1:
        workers = {{.rank = 0}, {.name = "a", .rank = 1}, {.name = "b", .rank = 1}};
        expected = "rank 1 is taken twice";
        break;
      case 2:
        workers = {{.name = "a", .rank = 0}, {.name = "b", .rank = 0}};
        expected = "rank 0 is taken twice";
        break;
      default:
        workers = {{.rank = 0, .world_size = 2}, {.rank = 1, .world_size = 3}};
        expected = "expects a world of ";
        break;
    }
    const std::string method = free_tcp_method();
    std::vector<std::string> texts(workers.size());
    {
      std::vector<std::jthread> threads;
      for (std::size_t i = 0; i < workers.size(); ++i) {
        workers[i].init_method = method;
        workers[i].init_timeout = 20s;
        if (workers[i].world_size < 0) workers[i].world_size = static_cast<int>(workers.size());
        threads.emplace_back([&, i] {
          texts[i] = error_of([&] { auto worker = stitch::init(workers[i]); }).what();
        });
      }
    }
    for (const auto& text : texts)
      EXPECT_NE(text.find(expected), std::string::npos) << text << " in round " << round;
  }
}

TEST(Errors, AnExceptionOfLibtorchArrivesWithoutItsStack) {
  Cluster cluster(2);
  const std::string text = error_of([] { stitch::rpc_sync<misfit>("worker1"); }).what();
  EXPECT_NE(text.find("c10::Error: The size of tensor a (2) must match"), std::string::npos)
      << text;
  EXPECT_EQ(text.find("frame #"), std::string::npos) << text;
  EXPECT_EQ(text.find('\n'), std::string::npos) << text;
}

TEST(Errors, ATextThatQuotesLibtorchArrivesWithoutTheStack) {
  Cluster cluster(2);
  const std::string text = error_of([] { stitch::rpc_sync<quoted_misfit>("worker1"); }).what();
  EXPECT_NE(text.find("step 3: The size of tensor a (2) must match"), std::string::npos) << text;
  EXPECT_EQ(text.find('\n'), std::string::npos) << text;
}

TEST(Errors, NearNamesLookIntoNamespaces) {
  EXPECT_EQ(stitch::base::nearest_names("embedd", {"ps::embed", "ps::other", "embark"}, 1),
            std::vector<std::string>{"ps::embed"});
  EXPECT_EQ(stitch::base::nearest_names("ps::embed", {"store::embed", "push_bed"}, 1),
            std::vector<std::string>{"store::embed"});
}

TEST(Errors, AnIncompleteWorldNamesTheWorkersThatArrived) {
  const Error error = error_of([] {
    auto worker = stitch::init({.name = "early",
                                .rank = 0,
                                .world_size = 2,
                                .init_timeout = 50ms,
                                .store = stitch::transport::make_hash_store()});
  });
  EXPECT_EQ(error.code(), ErrorCode::timeout);
  EXPECT_NE(std::string(error.what()).find("worker \"early\" waited 50 ms for a world of 2"),
            std::string::npos)
      << error.what();
  EXPECT_NE(std::string(error.what()).find("only these arrived: early"), std::string::npos)
      << error.what();
}

// What another program may have left in the store.
TEST(Errors, AMalformedStoreEntryIsRefused) {
  using stitch::base::ByteWriter;
  const auto start_beside = [](const std::string& entry, const std::string& world,
                               ErrorCode code = ErrorCode::protocol) {
    const auto store = stitch::transport::make_hash_store();
    store->add("stitch/founding/0/arrived", 1);
    store->set("stitch/founding/0/member/0", entry);
    store->set("stitch/founding/0/number", world);
    const Error error = error_of([&] {
      auto worker = stitch::init({.rank = 1, .world_size = 2, .init_timeout = 2s, .store = store});
    });
    EXPECT_EQ(error.code(), code) << error.what();
    return std::string(error.what());
  };
  // `map`: device of a map for worker "b", to cuda:0.
  const auto entry = [](const std::string& name, std::int64_t rank, std::int64_t size,
                        std::uint32_t devices = 0, const std::string& map = "",
                        const std::string& peer = "b", std::int64_t founders = -1) {
    stitch::base::Bytes bytes;
    ByteWriter writer(bytes);
    writer.write_string(name);
    writer.write(rank);
    writer.write(size);
    writer.write(founders < 0 ? size : founders);
    for (const char* token : {"process", "host", "memory"}) writer.write_string(token);
    writer.write(std::uint8_t{0});
    writer.write(devices);
    writer.write(std::uint8_t{0});  // takes part in transfers between devices
    writer.write(std::uint32_t{map.empty() ? 0u : 1u});
    if (!map.empty()) {
      writer.write_string(peer);
      writer.write(std::uint32_t{1});
      writer.write_string(map);
      writer.write_string("cuda:0");
    }
    for (const std::uint64_t limit : {1, 1, 4096}) writer.write(limit);
    return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  };
  for (const std::int64_t rank : {std::int64_t{-1}, std::int64_t{2}, std::int64_t{1} << 40}) {
    EXPECT_NE(start_beside(entry("a", rank, 2), "1")
                  .find("makes no sense: worker \"a\", rank " + std::to_string(rank) + " of 2"),
              std::string::npos);
  }
  EXPECT_NE(start_beside(entry("\x1b[2J", 0, 2), "1").find("worker \"?[2J\""), std::string::npos);
  EXPECT_NE(start_beside(entry("a", 0, 2) + "!", "1").find("1 bytes too many"), std::string::npos);
  EXPECT_NE(start_beside(entry("a", 0, 2, 65), "1").find("has 65 CUDA devices; at most 64"),
            std::string::npos);
  EXPECT_NE(start_beside(entry("a", 0, 2, 1, "tpu:0"), "1").find("\"tpu:0\" is no device"),
            std::string::npos);
  EXPECT_NE(start_beside(entry("a", 0, 2, 1, "cuda:0", "\x1b[2J"), "1").find("no worker's name"),
            std::string::npos);
  for (const std::int64_t founders : {0, 1, 3}) {
    EXPECT_NE(start_beside(entry("a", 0, 2, 0, "", "", founders), "1", ErrorCode::invalid_argument)
                  .find("worker \"a\" (rank 0) expects a world of " + std::to_string(founders) +
                        ":2, worker \"worker1\" one of 2"),
              std::string::npos);
  }
  for (const char* world : {"", "12x", "-1", "99999999999999999999999"}) {
    EXPECT_NE(start_beside(entry("a", 0, 2), world)
                  .find("the number of the world is \"" + std::string(world)),
              std::string::npos);
  }
}

TEST(Errors, AStartWithoutAThreadFails) {
  const stitch::testing::NoMoreThreads none;
  const Error error = error_of([] { auto worker = stitch::init({.rank = 0, .world_size = 1}); });
  EXPECT_EQ(error.code(), ErrorCode::overloaded);
  EXPECT_NE(std::string(error.what()).find("thread"), std::string::npos) << error.what();
}

TEST(Errors, AnUnreachableStoreIsNamed) {
  const Error error = error_of([] {
    auto worker = stitch::init(
        {.rank = 1, .world_size = 2, .init_method = "tcp://127.0.0.1:9", .init_timeout = 300ms});
  });
  EXPECT_EQ(error.code(), ErrorCode::disconnected);
  EXPECT_NE(std::string(error.what()).find("127.0.0.1:9"), std::string::npos) << error.what();
}

}  // namespace
}  // namespace errors_test
