// References that stand for their objects as arguments of calls.

#include "tests/rref/tables.h"
#include "tests/support/world_test.h"

// Functions of the same names are registered by other units of this program.
namespace stitch::pipelining_test {
namespace {

using namespace stitch::testing;

Gate gate;
int beyond_the_gate(int value) {
  gate.pass();
  return value;
}
int throws(int) { throw std::runtime_error("no luck"); }
int one_more(int value) { return value + 1; }
int sum(int a, const int& b, int c) { return 100 * a + 10 * b + c; }
Future<int> sum_later(int a, int b) { co_return a + co_await rpc_async<&one_more>("worker0", b); }
at::Tensor make_ones(int size) { return at::ones({size}); }
at::Tensor twice(at::Tensor x) { return x * 2; }
std::string label(std::string text, std::vector<int> numbers) {
  return text + std::to_string(numbers.size());
}
std::string text(int n) { return std::string(static_cast<std::size_t>(n), 'a'); }
std::vector<int> numbers(int n) { return std::vector<int>(static_cast<std::size_t>(n)); }
std::atomic<int> noted{0};
void note(int value) { noted = value; }

struct Tally {
  int count = 0;
  int add(int by) { return count += by; }
};

class Pipelining : public ::testing::Test {
 protected:
  Pipelining() { gate.close(); }
  ~Pipelining() override { gate.open(); }
};
#define EXPECT_EMPTY_TABLES(cluster)                                      \
  EXPECT_TRUE(eventually([&] { return testing::tables_empty(cluster); })) \
      << testing::tables(cluster)

TEST_F(Pipelining, AReferenceStandsForItsObjectInEveryKindOfCall) {
  Cluster cluster(3);
  {
    const auto there = remote<&one_more>("worker1", 1);
    const auto here = make_rref(3);
    const auto at_callee = remote<&one_more>("worker2", 3);
    EXPECT_EQ(rpc_sync<&sum>("worker2", there, here, at_callee), 234);
    EXPECT_EQ(rpc_async<&sum>("worker2", 1, there, 3).get(), 123);
    EXPECT_EQ(rpc_sync<&sum>("worker0", there, there, here), 223);
    EXPECT_EQ(rpc_sync<&sum_later>("worker2", there, here), 6);
    EXPECT_EQ(remote<&one_more>("worker2", there).to_here(), 3);
    EXPECT_EQ(remote<&sum>("worker2", at_callee, remote<&one_more>("worker2", 6), 1).to_here(),
              471);
    notify<&note>("worker2", there);
    EXPECT_TRUE(eventually([] { return noted == 2; }));
    const auto tally = remote<Tally>("worker2");
    EXPECT_EQ(tally.rpc_sync<&Tally::add>(there), 2);
    EXPECT_EQ(tally.remote<&Tally::add>(here).to_here(), 5);
    EXPECT_EQ(
        rpc_sync<&label>("worker2", remote<&text>("worker1", 2), remote<&numbers>("worker0", 3)),
        "aa3");
  }
  EXPECT_EMPTY_TABLES(cluster);
}

TEST_F(Pipelining, AChainCostsItsCallerOneMessageEachAndTheDataGoesDirectly) {
  gate.open();
  Cluster cluster(3);
  {
    static_cast<void>(rpc_sync<&one_more>("worker1", 1));
    static_cast<void>(rpc_sync<&one_more>("worker2", 1));
    const auto count = [&](int rank, const char* name) {
      const auto numbers = cluster[rank].debug_info();
      return numbers.at(name) -
             (std::string(name) == "rpc.messages_sent" ? numbers.at("rref.ledger_frames") : 0);
    };
    const auto sent = count(0, "rpc.messages_sent");
    const auto kept = remote<&make_ones>("worker1", 100'000);
    const auto doubled = remote<&twice>("worker2", kept);
    doubled.when_created().get();
    EXPECT_EQ(count(0, "rpc.messages_sent") - sent, 2);
    EXPECT_TRUE(at::equal(doubled.to_here(), at::full({100'000}, 2.0)));
  }
  EXPECT_EMPTY_TABLES(cluster);
}

TEST_F(Pipelining, RemoteReturnsOnceItsRequestHasBegun) {
  Cluster cluster(2, {.max_inflight_calls = 1});
  {
    const auto under_way = rpc_async<&beyond_the_gate>("worker1", 7);
    std::atomic<bool> made{false};
    std::optional<RRef<int>> object;
    std::jthread thread([&] {
      const WorkerScope scope(cluster[0]);
      object = remote<&one_more>("worker1", 1);
      made = true;
    });
    EXPECT_TRUE(eventually([&] { return cluster[0].debug_info().at("rpc.calls_waiting") == 1; }));
    EXPECT_FALSE(made);
    gate.open();
    thread.join();
    EXPECT_EQ(object->to_here(), 2);
    EXPECT_EQ(under_way.get(), 7);
  }
  EXPECT_EMPTY_TABLES(cluster);
}

TEST_F(Pipelining, ACalleeWithOneThreadServesOthersWhileItWaitsForArguments) {
  Cluster cluster(3, {.num_threads = 1});
  {
    const auto late = remote<&beyond_the_gate>("worker1", 7);
    std::vector<Future<int>> waiting;
    for (int i = 0; i < 20; ++i) waiting.push_back(rpc_async<&one_more>("worker2", late));
    const auto chained = remote<&one_more>("worker2", remote<&one_more>("worker0", late));
    EXPECT_EQ(rpc_sync<&one_more>("worker2", 1), 2);
    EXPECT_EQ(rpc_sync<&one_more>("worker0", 1), 2);
    for (const auto& each : waiting) EXPECT_FALSE(each.ready());
    gate.open();
    for (const auto& each : waiting) EXPECT_EQ(each.get(), 8);
    EXPECT_EQ(chained.to_here(), 9);
  }
  EXPECT_EMPTY_TABLES(cluster);
}

TEST_F(Pipelining, ErrorsOfTheCreationReachTheCallerNamingFunctionAndOwner) {
  Cluster cluster(3);
  {
    const auto bad = remote<&throws>("worker1", 1);
    const auto origin = "throws() to worker \"worker1\" (id 1) failed: std::runtime_error: no luck";
    for (const char* callee : {"worker0", "worker1", "worker2"}) {
      const Error error = error_of([&] { rpc_sync<&sum>(callee, 1, bad, 3); });
      EXPECT_TRUE(has_text(error, ErrorCode::remote_exception, origin));
      EXPECT_TRUE(has_text(error, ErrorCode::remote_exception, "failed: argument 2: "));
      EXPECT_TRUE(contains(error.function(), "sum"));
    }
    const auto result = remote<&one_more>("worker2", bad);
    EXPECT_TRUE(has_text(error_of([&] { result.when_created().get(); }),
                         ErrorCode::remote_exception, origin));
    EXPECT_TRUE(has_text(error_of([&] { rpc_sync<&one_more>("worker0", result); }),
                         ErrorCode::remote_exception, origin));
    EXPECT_EQ(error_of([&] { rpc_sync<&one_more>("worker1", RRef<int>()); }).code(),
              ErrorCode::invalid_argument);
  }
  EXPECT_EMPTY_TABLES(cluster);
}

TEST_F(Pipelining, AReferenceToAnotherTypeIsRefused) {
  Cluster cluster(2);
  const auto tensor = make_rref(at::ones({2}));
  const auto& function = kFunction<&one_more>;
  rpc::Request request = rpc::begin_request(function.id);
  rref::write_argument(*request, 0, tensor.handle(), detail::type_id<at::Tensor>());
  const auto agent = rpc::current_agent();
  const auto refused = detail::start_call<int>(agent, cluster[1].info(), function.name,
                                               std::nullopt, std::move(request));
  EXPECT_TRUE(has_text(error_of([&] { refused.get(); }), ErrorCode::invalid_argument,
                       "argument 1 does not match its type on the callee, int: its reference is to "
                       "an object of another type"));
}

TEST_F(Pipelining, TheDeadlineOfTheCallCoversTheWait) {
  Cluster cluster(3);
  {
    const auto late = remote<&beyond_the_gate>("worker1", 7);
    const auto late_here = remote<&beyond_the_gate>("worker2", 7);
    const auto own = late.with_timeout(0s);  // of calls through it, not of those it is passed to
    for (const auto& each : {late, late_here, own}) {
      EXPECT_EQ(
          error_of([&] { rpc_sync<&one_more>({.to = "worker2", .timeout = 30ms}, each); }).code(),
          ErrorCode::timeout);
    }
    const auto result = remote<&one_more>({.to = "worker2", .timeout = 30ms}, late);
    EXPECT_EQ(error_of([&] { result.when_created().get(); }).code(), ErrorCode::timeout);
    // The requests for the object are abandoned.
    EXPECT_TRUE(eventually([&] { return cluster[2].debug_info().at("rpc.calls_made") == 0; }));
    gate.open();
    EXPECT_EQ(rpc_sync<&one_more>("worker2", late), 8);
    EXPECT_EQ(rpc_sync<&one_more>("worker2", late_here), 8);
  }
  EXPECT_EMPTY_TABLES(cluster);
}

TEST_F(Pipelining, ACancelledCallLetsGoOfItsArguments) {
  Cluster cluster(3);
  {
    auto late = remote<&beyond_the_gate>("worker1", 7);
    const auto call = rpc_async<&one_more>("worker2", late);
    ASSERT_TRUE(eventually([&] { return cluster[2].debug_info().at("rpc.calls_made") == 1; }));
    call.cancel();
    EXPECT_TRUE(eventually([&] {
      const auto numbers = cluster[2].debug_info();
      return numbers.at("rpc.calls_made") == 0 && numbers.at("rpc.calls_served") == 0 &&
             numbers.at("rref.holds") == 0;
    })) << testing::tables(cluster);
    gate.open();
    EXPECT_EQ(late.to_here(), 7);
  }
  EXPECT_EMPTY_TABLES(cluster);
}

TEST_F(Pipelining, TheCallKeepsTheObjectWhenItsCallerHasDroppedTheReference) {
  Cluster cluster(3);
  std::vector<Future<int>> calls;
  for (int i = 0; i < 50; ++i) {
    const std::string callee = "worker" + std::to_string(i % 3);
    calls.push_back(rpc_async<&one_more>(callee, remote<&beyond_the_gate>("worker1", i)));
    calls.push_back(rpc_async<&one_more>(callee, make_rref(i)));
  }
  gate.open();
  for (int i = 0; i < 100; ++i) EXPECT_EQ(calls[static_cast<std::size_t>(i)].get(), i / 2 + 1);
  calls.clear();
  EXPECT_EMPTY_TABLES(cluster);
}

TEST_F(Pipelining, AnOwnerThatGoesFailsTheCallsThatWaitForItsObjects) {
  Cluster cluster(3);
  const auto late = remote<&beyond_the_gate>("worker1", 7);
  const auto call = rpc_async<&one_more>("worker2", late);
  const auto result = remote<&one_more>("worker2", late);
  ASSERT_TRUE(gate.wait_for_arrival());
  ASSERT_TRUE(eventually([&] { return cluster[2].debug_info().at("rpc.calls_made") == 2; }));
  cluster[1].shutdown({.graceful = false, .timeout = 10ms});
  ASSERT_TRUE(call.wait_for(20s));
  EXPECT_TRUE(call.error().code() == ErrorCode::disconnected ||
              call.error().code() == ErrorCode::shutting_down)
      << call.error().what();
  EXPECT_TRUE(contains(call.error().what(),
                       "argument 1: call RRef::to_here() to worker "
                       "\"worker1\" (id 1) failed"))
      << call.error().what();
  EXPECT_TRUE(result.when_created().wait_for(20s));
  EXPECT_TRUE(result.when_created().has_error());
  // A reference that is lost already.
  ASSERT_TRUE(eventually([&] { return testing::number(cluster, 0, "holds_lost") == 1; }));
  const Error lost = error_of([&] { rpc_sync<&one_more>("worker2", late); });
  EXPECT_EQ(lost.code(), ErrorCode::disconnected) << lost.what();
  EXPECT_EQ(lost.worker(), "worker1") << lost.what();
  gate.open();
  cluster.shutdown();
}

TEST_F(Pipelining, ACalleeThatLeavesFailsTheCallsThatWaitThere) {
  Cluster cluster(3);
  const auto late = remote<&beyond_the_gate>("worker1", 7);
  const auto call = rpc_async<&one_more>("worker2", late);
  ASSERT_TRUE(eventually([&] { return cluster[2].debug_info().at("rpc.calls_made") == 1; }));
  cluster[2].shutdown({.graceful = false, .timeout = 5s});
  ASSERT_TRUE(call.wait_for(20s));
  EXPECT_TRUE(call.has_error());
  gate.open();
  EXPECT_EQ(late.to_here(), 7);
  cluster.shutdown();
}

}  // namespace
}  // namespace stitch::pipelining_test
