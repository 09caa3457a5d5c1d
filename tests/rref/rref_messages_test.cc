// The cost of references: which messages are sent for them.

#include "tests/rref/tables.h"
#include "tests/support/world_test.h"

// Functions of the same names are registered by other units of this program.
namespace stitch::rref_messages_test {
namespace {

using namespace stitch::testing;

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
