// The cost of references: which messages are sent for them.

#include <numeric>

#include "stitch/rref/creation_answers.h"
#include "tests/rref/tables.h"
#include "tests/support/world_test.h"

// Functions of the same names are registered by other units of this program.
namespace stitch::rref_messages_test {
namespace {

using namespace std::chrono_literals;
using testing::Cluster;
using testing::eventually;
using testing::Gate;

struct Tally {
  std::atomic<int> count = 0;
  int add(int by) { return count += by; }
};
RRef<Tally> pass_back(RRef<Tally> tally) { return tally; }
RRef<Tally> pass_back_by_reference(const RRef<Tally>& tally) { return tally; }
Future<RRef<Tally>> pass_back_later(RRef<Tally> tally) {
  co_await make_ready();
  co_return tally;
}
int answer(int x) { return x; }
int throws() { throw std::runtime_error("it cannot be made"); }
Future<int> use_later(RRef<Tally> tally) {
  static_cast<void>(tally.valid());
  co_return co_await rpc_async<&answer>("worker1", 1);
}
Future<int> use_later_by_reference(const RRef<Tally>& tally) {
  const int one = co_await rpc_async<&answer>("worker1", 1);
  co_return tally.valid() ? one : 0;
}

Gate gate;
int beyond_the_gate(int value) {
  gate.pass();
  return value;
}
bool confirmed_there(const RRef<int>& number) { return number.confirmed_by_owner(); }

base::Mutex kept_mutex;
RRef<Tally> kept;
void keep(RRef<Tally> tally) {
  base::MutexLock lock(kept_mutex);
  kept = std::move(tally);
}
void drop_kept() {
  base::MutexLock lock(kept_mutex);
  kept = RRef<Tally>();
}

// Requests and replies sent by all workers, without ledger frames.
std::int64_t messages(Cluster& cluster) {
  std::int64_t sent = 0;
  for (int rank = 0; rank < cluster.size(); ++rank) {
    const auto numbers = cluster[rank].debug_info();
    sent += numbers.at("rpc.messages_sent") - numbers.at("rref.ledger_frames");
  }
  return sent;
}
// Repeats the count: a ledger frame that is being sent may be in only one of the two numbers.
bool come_to(std::int64_t wanted, Cluster& cluster) {
  return eventually([&] { return messages(cluster) == wanted; });
}

TEST(RRefMessages, HandlersThatReturnOrAwaitWithTheirReferenceTellTheOwnerNothing) {
  Cluster cluster(3);
  {
    const auto tally = remote<Tally>("worker1");
    tally.when_created().get();
    const auto registrations = number(cluster, 2, "registrations");
    for (int i = 0; i < 100; ++i) {
      EXPECT_EQ(rpc_sync<&pass_back>("worker2", tally), tally);
      EXPECT_EQ(rpc_sync<&pass_back_by_reference>("worker2", tally), tally);
      EXPECT_EQ(rpc_sync<&pass_back_later>("worker2", tally), tally);
      EXPECT_EQ(rpc_sync<&use_later>("worker2", tally), 1);
      EXPECT_EQ(rpc_sync<&use_later_by_reference>("worker2", tally), 1);
    }
    // None, unless a pause of this machine makes a reference look kept: few compared with the 500
    // calls, each of which would register its reference otherwise.
    EXPECT_LT(number(cluster, 2, "registrations") - registrations, 50);
    EXPECT_TRUE(eventually([&] { return number(cluster, 2, "holds") == 0; })) << tables(cluster);
    EXPECT_TRUE(eventually([&] { return number(cluster, 1, "holders") == 1; })) << tables(cluster);
  }
  EXPECT_TRUE(eventually([&] { return tables_empty(cluster); })) << tables(cluster);
}

TEST(RRefMessages, AReferenceThatIsKeptIsRegisteredSoonAndSettledThen) {
  Cluster cluster(3);
  {
    const auto tally = remote<Tally>("worker1");
    tally.when_created().get();
    const auto start = std::chrono::steady_clock::now();
    rpc_sync<&keep>("worker2", tally);
    ASSERT_TRUE(eventually([&] { return number(cluster, 1, "holders") == 2; })) << tables(cluster);
    EXPECT_GE(std::chrono::steady_clock::now() - start, 50ms);
    EXPECT_EQ(number(cluster, 2, "registrations"), 1);
    ASSERT_TRUE(eventually([&] { return number(cluster, 0, "pins") == 0; })) << tables(cluster);
    rpc_sync<&drop_kept>("worker2");
    EXPECT_TRUE(eventually([&] { return number(cluster, 1, "holders") == 1; })) << tables(cluster);
  }
  EXPECT_TRUE(eventually([&] { return tables_empty(cluster); })) << tables(cluster);
}

TEST(RRefMessages, MethodsCostARequestAndAReplyAndAnOwnersUsesNothing) {
  Cluster cluster(2);
  const auto tally = remote<Tally>("worker1");
  tally.when_created().get();
  ASSERT_TRUE(eventually([&] { return number(cluster, 0, "ledger_unacknowledged") == 0; }));
  auto before = messages(cluster);
  EXPECT_EQ(tally.rpc_sync<&Tally::add>(1), 1);
  EXPECT_TRUE(come_to(before + 2, cluster)) << messages(cluster) - before;
  const auto sum = tally.remote<&Tally::add>(1);
  sum.when_created().get();
  EXPECT_TRUE(come_to(before + 4, cluster)) << messages(cluster) - before;
  tally.rpc_async<&Tally::add>(1).get();
  EXPECT_TRUE(come_to(before + 6, cluster)) << messages(cluster) - before;

  before = messages(cluster);
  {
    const auto mine = make_rref(std::string("text"));
    const auto copy = mine;
    EXPECT_EQ(copy.to_here(), "text");
    EXPECT_EQ(copy.to_here_async().get(), "text");
    EXPECT_EQ(copy.local_value(), "text");
    copy.when_created().get();
    EXPECT_EQ(number(cluster, 0, "entries"), 1);
  }
  EXPECT_TRUE(eventually([&] { return number(cluster, 0, "entries") == 0; }));
  EXPECT_TRUE(come_to(before, cluster)) << messages(cluster) - before;
}

Gate second_gate;
int pass_the_second_gate() {
  second_gate.pass();
  return 0;
}
int pass_the_gate() {
  gate.pass();
  return 0;
}
void with_one_thread(Options& options) { options.num_threads = 1; }

TEST(RRefMessages, AnswersOfCreationsThatFollowEachOtherTravelTogether) {
  constexpr int kObjects = 300;
  gate.close();
  Cluster cluster(2, &with_one_thread);
  const auto sent = [&] {
    const auto numbers = cluster[1].debug_info();
    return numbers.at("rpc.messages_sent") - numbers.at("rref.ledger_frames");
  };
  auto first = rpc_async<&pass_the_gate>("worker1");
  ASSERT_TRUE(gate.wait_for_arrival());
  const auto before = sent();
  std::vector<RRef<int>> objects;
  std::vector<Future<void>> created;
  for (int i = 0; i < kObjects; ++i) {
    objects.push_back(remote<&answer>("worker1", i));
    created.push_back(objects.back().when_created());
  }
  // All are there before the first of them runs: no answer waits for a request to come.
  ASSERT_TRUE(
      eventually([&] { return cluster[1].debug_info().at("rpc.calls_served") == kObjects + 1; }));
  const auto start = std::chrono::steady_clock::now();
  gate.open();
  first.get();
  for (auto& each : created) each.get();
  const auto passed = std::chrono::steady_clock::now() - start;
  // One for each 128 answers, and one a millisecond.
  EXPECT_LT(sent() - before, kObjects / 20 + passed / 1ms)
      << "messages of the owner for " << kObjects << " objects";
  for (int i = 0; i < kObjects; ++i) {
    EXPECT_TRUE(objects[static_cast<std::size_t>(i)].confirmed_by_owner());
    EXPECT_EQ(objects[static_cast<std::size_t>(i)].to_here(), i);
  }
  objects.clear();
  EXPECT_TRUE(eventually([&] { return tables_empty(cluster); })) << tables(cluster);
}

TEST(RRefMessages, AnAnswerOfACreationDoesNotWaitForWhatComesNext) {
  gate.close();
  second_gate.close();
  Cluster cluster(2, &with_one_thread);
  auto first = rpc_async<&pass_the_gate>("worker1");
  ASSERT_TRUE(gate.wait_for_arrival());
  const auto object = remote<&answer>("worker1", 7);
  auto next = rpc_async<&pass_the_second_gate>("worker1");
  auto failing = remote<&throws>("worker1");
  gate.open();
  ASSERT_TRUE(second_gate.wait_for_arrival());
  EXPECT_TRUE(object.when_created().wait_for(10s)) << "while another handler has the only thread";
  second_gate.open();
  next.get();
  first.get();
  EXPECT_THROW(failing.when_created().get(), Error);
}

Gate made;
int wait_for_an_object(int value) {
  const auto object = remote<&answer>("worker1", value);
  made.pass();
  object.when_created().get();
  return value;
}

TEST(RRefMessages, AnswersOfCreationsDoNotWaitWithARequestForRoomAtTheirReceiver) {
  gate.close();
  second_gate.close();
  made.close();
  made.open();
  Cluster cluster(2, [](Options& options) {
    with_one_thread(options);
    if (options.rank == 1) options.max_inflight_calls = 1;
  });
  const auto first = rpc_async<&pass_the_gate>("worker1");
  ASSERT_TRUE(gate.wait_for_arrival());
  std::vector<Future<int>> waiting;
  {
    const WorkerScope scope(cluster[1]);
    waiting.push_back(rpc_async<&wait_for_an_object>("worker0", 7));
  }
  ASSERT_TRUE(made.wait_for_arrival());
  const std::jthread next([&] {
    const WorkerScope scope(cluster[0]);
    rpc_sync<&pass_the_second_gate>("worker1");
  });
  EXPECT_TRUE(eventually([&] { return cluster[0].debug_info().at("rpc.calls_waiting") == 1; }));
  gate.open();
  {
    // While the answer of the creation waits for others, for a millisecond.
    const WorkerScope scope(cluster[1]);
    for (int i = 0; i < 3000 && !waiting.front().ready(); ++i)
      waiting.push_back(rpc_async<&answer>("worker0", i));
  }
  EXPECT_TRUE(waiting.front().wait_for(10s)) << "its object's answer waits behind it";
  second_gate.open();
  for (const auto& each : waiting) static_cast<void>(each.get());
}

TEST(RRefMessages, AnswersOfCreationsNotAskedForAreIgnoredAndMalformedOnesRefused) {
  gate.close();
  Cluster cluster(3);
  const auto object = remote<&beyond_the_gate>("worker1", 4);
  const WorkerScope scope(cluster[0]);
  const auto agent = rpc::current_agent();
  const auto from = [&](int rank) { return cluster[rank].info(); };
  const auto accept = [&](int rank, std::uint32_t count, const std::vector<std::uint64_t>& calls) {
    base::Bytes bytes;
    base::ByteWriter out(bytes);
    out.write(count);
    for (const std::uint64_t call : calls) out.write(call);
    rref::CreationAnswers::accept(*agent, from(rank), bytes.span());
  };
  std::vector<std::uint64_t> all(100);
  std::iota(all.begin(), all.end(), std::uint64_t{0});
  accept(2, 100, all);  // of a worker that was not asked
  accept(1, 1, {std::uint64_t{1} << 60});
  accept(1, 0, {});
  EXPECT_FALSE(object.when_created().ready());
  for (const std::uint32_t count : {2U, 0U, 0xffffffffU}) {
    const auto error = testing::error_of([&] { accept(1, count, {1}); });
    EXPECT_EQ(error.code(), ErrorCode::protocol) << error.what();
  }
  EXPECT_FALSE(object.when_created().ready());
  gate.open();
  EXPECT_EQ(object.to_here(), 4);
}

TEST(RRefMessages, ConfirmationComesWithTheCreationAndTravelsWithTheReference) {
  gate.close();
  Cluster cluster(3);
  const auto number = remote<&beyond_the_gate>("worker1", 4);
  EXPECT_FALSE(number.confirmed_by_owner());
  EXPECT_FALSE(rpc_sync<&confirmed_there>("worker2", number));
  EXPECT_TRUE(rpc_sync<&confirmed_there>("worker1", number)) << "the owner knows of its object";
  gate.open();
  number.when_created().get();
  EXPECT_TRUE(number.confirmed_by_owner());
  EXPECT_TRUE(rpc_sync<&confirmed_there>("worker2", number)) << "borrowed";
  gate.close();
}

}  // namespace
}  // namespace stitch::rref_messages_test
