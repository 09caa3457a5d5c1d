#include "stitch/base/name_list.h"
#include "tests/support/no_more_threads.h"
#include "tests/support/world_test.h"

namespace errors_test {
namespace {

using namespace stitch::testing;

int one() { return 1; }
int throws_out_of_range(int i) { return std::vector<int>{1, 2}.at(static_cast<std::size_t>(i)); }
int throws_many(std::size_t bytes) { throw std::runtime_error(std::string(bytes, 'x')); }
int throws_text(std::string text) { throw std::runtime_error(text); }
Future<int> throws_before_its_future(int i) { return make_ready(throws_out_of_range(i)); }
Future<int> fails_later() {
  co_await rpc_async<one>(stitch::rpc::current_agent()->self());
  throw std::runtime_error("after a while");
}
Gate gate;
void block() { gate.pass(); }
std::atomic<int> waiting_for_stop{0};
std::atomic<bool> saw_stop{false};
void wait_for_stop() {
  ++waiting_for_stop;
  const auto token = current_stop_token();
  saw_stop = eventually([&] { return token.stop_requested(); });
}

TEST(Errors, AHandlersExceptionReachesTheCaller) {
  Cluster cluster(2);
  const Error error = error_of([] { rpc_sync<throws_text>("worker1", "no such row"); });
  EXPECT_EQ(error.code(), ErrorCode::remote_exception);
  EXPECT_TRUE(error.remote());
  EXPECT_EQ(error.worker(), "worker1");
  EXPECT_TRUE(contains(error.function(), "throws_text"));
  EXPECT_STREQ(error.what(),
               "call errors_test::(anonymous namespace)::throws_text() to worker \"worker1\" "
               "(id 1) failed: "
               "std::runtime_error: no such row");
  EXPECT_EQ(rpc_sync<one>("worker1"), 1);
  EXPECT_EQ(error_of([] { rpc_sync<throws_out_of_range>("worker1", 5); }).code(),
            ErrorCode::remote_exception);
  EXPECT_EQ(error_of([] { rpc_sync<fails_later>("worker1"); }).code(), ErrorCode::remote_exception);
  EXPECT_EQ(error_of([] { rpc_sync<throws_before_its_future>("worker1", 5); }).code(),
            ErrorCode::remote_exception);
  EXPECT_EQ(rpc_sync<throws_before_its_future>("worker1", 1), 2);
}

TEST(Errors, OfHandlersAreNotPrinted) {
  Cluster cluster(2);
  ::testing::internal::CaptureStderr();
  static_cast<void>(error_of([] { rpc_sync<throws_text>("worker1", "no such row"); }));
  notify<throws_text>("worker1", "no such row");
  EXPECT_EQ(rpc_sync<one>("worker1"), 1);
  EXPECT_TRUE(cluster.shutdown().empty());
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

at::Tensor unsendable() { return at::eye(3).to_sparse_csr(); }
std::string text_of(std::size_t bytes) { return std::string(bytes, 'x'); }

TEST(Errors, AResultThatCannotBeSentIsTheErrorOfItsCall) {
  Cluster cluster(2, {.max_frame_bytes = 1 << 20});
  Error error = error_of([] { rpc_sync<unsendable>("worker1"); });
  EXPECT_TRUE(
      has_text(error, ErrorCode::invalid_argument,
               "unsendable() to worker \"worker1\" (id 1) failed: its result cannot be sent: "));
  error = error_of([] { rpc_sync<text_of>("worker1", std::size_t{2} << 20); });
  EXPECT_TRUE(has_text(error, ErrorCode::out_of_range, "its result cannot be sent: "));
  EXPECT_EQ(rpc_sync<text_of>("worker1", std::size_t{3}), "xxx");
}

TEST(Errors, ALongTextIsCutToTheFrameOfItsReader) {
  Cluster cluster(2, [](Options& options) {
    if (options.rank == 0) options.max_frame_bytes = 8192;
  });
  const Error error = error_of([] { rpc_sync<throws_many>("worker1", std::size_t{1} << 20); });
  EXPECT_EQ(error.code(), ErrorCode::remote_exception);
  EXPECT_EQ(rpc_sync<text_of>("worker1", std::size_t{3}), "xxx");
}

TEST(Errors, AnUnknownWorkerIsNamedWithNearNames) {
  Cluster cluster(3);
  Error error = error_of([] { rpc_sync<one>("wroker1"); });
  EXPECT_EQ(error.code(), ErrorCode::not_found);
  EXPECT_STREQ(error.what(),
               "worker \"wroker1\" is not in this world of 3; known are \"worker1\", \"worker0\", "
               "\"worker2\"");
  error = error_of([] { rpc_sync<one>(WorkerId(9)); });
  EXPECT_EQ(error.code(), ErrorCode::not_found);
  EXPECT_STREQ(error.what(), "worker id 9 is not in this world; ids are 0 to 2");
}

TEST(Errors, AnUnregisteredFunctionIsNamed) {
  Cluster cluster(2);
  const auto agent = cluster[0].agent();
  const auto& to = cluster[1].info();
  auto message = stitch::rpc::begin_request(stitch::rpc::function_id("no such function"));
  const Error error = error_of([&] {
    stitch::detail::start_call<int>(agent, to, "errors_test::(anonymous namespace)::ones",
                                    std::nullopt, std::move(message))
        .get();
  });
  EXPECT_TRUE(has_text(error, ErrorCode::unimplemented,
                       "call errors_test::(anonymous namespace)::ones() to worker \"worker1\" (id "
                       "1) failed: the "
                       "function is not registered there; "
                       "near names there: errors_test::(anonymous namespace)::one"));
}

at::Tensor misfit() { return at::ones({2}) + at::ones({3}); }

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
    auto message = stitch::rpc::begin_request(stitch::kFunction<use_settings>.id);
    stitch::rpc::OutArchive archive(*message);
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
  EXPECT_EQ(rpc_sync<use_settings>("worker1", Settings{1, 5}), 5);
}

TEST(Errors, DeadlinesPass) {
  Cluster cluster(2);
  EXPECT_TRUE(has_text(
      error_of([] { rpc_sync<wait_for_stop>({.to = "worker1", .timeout = 50ms}); }),
      ErrorCode::timeout,
      "call errors_test::(anonymous namespace)::wait_for_stop() to worker \"worker1\" (id 1) timed "
      "out after 50 ms; "));
  EXPECT_EQ(rpc_sync<one>("worker1"), 1);
  EXPECT_EQ(error_of([] { rpc_sync<wait_for_stop>({.to = "worker1", .timeout = 1us}); }).code(),
            ErrorCode::timeout);
  EXPECT_EQ(rpc_sync<one>({.to = "worker1", .timeout = std::chrono::hours(2400)}), 1);
  EXPECT_EQ(rpc_sync<one>({.to = "worker1", .timeout = 0s}), 1);
}

std::atomic<int> nested_code{0};
void nested_wait() {
  try {
    rpc_sync<wait_for_stop>(WorkerId(2));
  } catch (const Error& error) {
    nested_code = static_cast<int>(error.code());
  }
  wait_for_stop();  // both deadlines pass at the same moment: the result must not win
}

TEST(Errors, DeadlinesShrinkThroughNestedCallsAndStopTheCallee) {
  Cluster cluster(3);
  saw_stop = false;
  nested_code = 0;
  EXPECT_EQ(error_of([] { rpc_sync<nested_wait>({.to = "worker1", .timeout = 1s}); }).code(),
            ErrorCode::timeout);
  EXPECT_TRUE(
      eventually([] { return saw_stop && nested_code == static_cast<int>(ErrorCode::timeout); }));
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
  EXPECT_EQ(rpc_sync<one>("worker1"), 1);
  const Error later = error_of([] { rpc_sync<one>("worker2"); });
  EXPECT_EQ(later.code(), ErrorCode::disconnected);
  EXPECT_EQ(later.worker(), "worker2");
}

TEST(Errors, AfterShutdownEveryCallThrows) {
  auto worker = stitch::init({.name = "solo", .rank = 0, .world_size = 1});
  EXPECT_EQ(rpc_sync<one>("solo"), 1);
  worker.shutdown();
  worker.shutdown();
  EXPECT_EQ(error_of([&] { static_cast<void>(worker.rpc_async<one>("solo")); }).code(),
            ErrorCode::shutting_down);
  EXPECT_EQ(error_of([&] { worker.notify<one>("solo"); }).code(), ErrorCode::shutting_down);
  EXPECT_EQ(error_of([&] { worker.barrier(); }).code(), ErrorCode::shutting_down);
  EXPECT_EQ(error_of([] { rpc_sync<one>("solo"); }).code(), ErrorCode::shutting_down);
}

TEST(Errors, WithoutOneCurrentWorkerCallsSaySo) {
  Cluster cluster(2);
  std::string text;
  std::jthread([&] { text = error_of([] { rpc_sync<one>("worker1"); }).what(); }).join();
  EXPECT_EQ(text,
            "there is no current worker on this thread, and this process has several (worker0, "
            "worker1): make one current with "
            "stitch::WorkerScope");
}

TEST(Errors, AnExceptionOfLibtorchArrivesWithoutItsStack) {
  Cluster cluster(2);
  const std::string text = error_of([] { rpc_sync<misfit>("worker1"); }).what();
  EXPECT_TRUE(contains(text, "c10::Error: The size of tensor a (2) must match")) << text;
  EXPECT_FALSE(contains(text, "frame #")) << text;
  EXPECT_EQ(text.find('\n'), std::string::npos) << text;
}

TEST(Errors, NearNamesLookIntoNamespaces) {
  EXPECT_EQ(stitch::base::nearest_names("embedd", {"ps::embed", "ps::other", "embark"}, 1),
            std::vector<std::string>{"ps::embed"});
  EXPECT_EQ(stitch::base::nearest_names("ps::embed", {"store::embed", "push_bed"}, 1),
            std::vector<std::string>{"store::embed"});
}

}  // namespace
}  // namespace errors_test
