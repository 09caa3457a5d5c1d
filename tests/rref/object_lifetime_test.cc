// An object outlives the functions that use it. A violation is also a use after free, which
// AddressSanitizer detects.

#include <numeric>

#include "tests/rref/tables.h"
#include "tests/support/world_test.h"

// Functions of the same names are registered by other units of this program.
namespace stitch::object_lifetime_test {
namespace {

using namespace stitch::testing;

int echo(int x) { return x; }

Gate gate;
std::atomic<int> inside{0};         // methods that wait at the gate
std::atomic<int> gone{0};           // objects
std::atomic<int> gone_under_us{0};  // while a method ran on them
std::atomic<std::thread::id> gone_on;

// Has a method that waits until the gate is open and reads the object's memory after that.
class Shelf {
 public:
  Shelf() : numbers_(1000, 1) {}
  Shelf(const Shelf&) = delete;
  Shelf& operator=(const Shelf&) = delete;
  ~Shelf() {
    gone_on = std::this_thread::get_id();
    ++gone;
  }
  int sum_at_the_gate() const {
    const int before = gone;
    ++inside;
    gate.pass();
    --inside;
    gone_under_us += gone - before;
    return std::accumulate(numbers_.begin(), numbers_.end(), 0);
  }
  // Goes on after it was stopped.
  Future<int> work() const {
    try {
      co_await stopped->future();
    } catch (const Error&) {
      stopped_at_size = numbers_.size();
    }
    co_await may_end->future();
    co_return std::accumulate(numbers_.begin(), numbers_.end(), 0);
  }
  static inline std::optional<Promise<int>> stopped, may_end;
  static inline std::atomic<std::size_t> stopped_at_size{0};

 private:
  std::vector<int> numbers_;
};

int sum_by_local_value(RRef<Shelf> shelf) { return shelf.local_value().sum_at_the_gate(); }

class ObjectLifetime : public ::testing::Test {
 protected:
  ObjectLifetime() {
    gate.close();
    inside = 0;
    gone = 0;
    gone_under_us = 0;
  }
  static void four_threads(Options& options) { options.num_threads = 4; }
};

TEST_F(ObjectLifetime, AMethodGoesOnWithItsObjectWhenTheCreationOfItsResultTimesOut) {
  Cluster cluster(2, four_threads);
  auto shelf = remote<Shelf>("worker1");
  shelf.when_created().get();
  {
    const auto sum = shelf.with_timeout(1s).remote<&Shelf::sum_at_the_gate>();
    shelf = RRef<Shelf>();
    ASSERT_TRUE(sum.when_created().wait_for(20s));
    EXPECT_EQ(sum.when_created().error().code(), ErrorCode::timeout);
  }
  ASSERT_TRUE(eventually([&] { return number(cluster, 1, "entries") == 0; })) << tables(cluster);
  // A released object would have been destroyed by the threads that serve these.
  for (int i = 0; i < 20; ++i) EXPECT_EQ(rpc_sync<&echo>("worker1", i), i);
  EXPECT_EQ(inside, 1);
  EXPECT_EQ(gone, 0);
  gate.open();
  EXPECT_TRUE(eventually([] { return gone == 1; }));
  EXPECT_EQ(gone_under_us, 0);
}

TEST_F(ObjectLifetime, AnObjectOutlivesTheCreationWhoseWorkGoesOn) {
  Cluster cluster(2, four_threads);
  Shelf::stopped.emplace();
  Shelf::may_end.emplace();
  Shelf::stopped_at_size = 0;
  auto shelf = remote<Shelf>("worker1");
  shelf.when_created().get();
  {
    const auto result = shelf.with_timeout(1s).remote<&Shelf::work>();
    shelf = RRef<Shelf>();
    ASSERT_TRUE(result.when_created().wait_for(20s));
    EXPECT_EQ(result.when_created().error().code(), ErrorCode::timeout);
  }
  ASSERT_TRUE(eventually([&] { return number(cluster, 1, "entries") == 0; })) << tables(cluster);
  EXPECT_TRUE(eventually([] { return Shelf::stopped_at_size == 1000; }));
  for (int i = 0; i < 20; ++i) EXPECT_EQ(rpc_sync<&echo>("worker1", i), i);
  EXPECT_EQ(gone, 0);
  Shelf::may_end->set_value(1);
  EXPECT_TRUE(eventually([] { return gone == 1; }));
  Shelf::stopped.reset();
  Shelf::may_end.reset();
}

TEST_F(ObjectLifetime, AShutdownThatIsNotGracefulDestroysObjectsWhenTheirMethodsHaveReturned) {
  Cluster cluster(2, four_threads);
  const auto shelf = remote<Shelf>("worker1");
  const auto method = shelf.rpc_async<&Shelf::sum_at_the_gate>();
  const auto elsewhere = rpc_async<&sum_by_local_value>("worker1", shelf);
  ASSERT_TRUE(eventually([] { return inside == 2; }));
  std::jthread opener([] {
    static_cast<void>(eventually([] { return gone > 0; }, 200ms));
    gate.open();
  });
  cluster[1].shutdown({.graceful = false, .timeout = 10s});
  EXPECT_EQ(gone_under_us, 0);
  EXPECT_EQ(gone, 1);
  EXPECT_EQ(gone_on.load(), std::this_thread::get_id()) << "the thread that shut down";
  EXPECT_TRUE(method.wait_for(20s));
  EXPECT_TRUE(elsewhere.wait_for(20s));
}

TEST_F(ObjectLifetime, ObjectsOfHandlersThatAreLeftBehindStay) {
  {
    Cluster cluster(2, four_threads);
    const auto shelf = remote<Shelf>("worker1");
    const auto method = shelf.rpc_async<&Shelf::sum_at_the_gate>();
    const auto elsewhere = rpc_async<&sum_by_local_value>("worker1", shelf);
    ASSERT_TRUE(eventually([] { return inside == 2; }));
    cluster[1].shutdown({.graceful = false, .timeout = 10ms});  // closing may take a second more
    EXPECT_EQ(inside, 2);
    EXPECT_EQ(gone, 0);
  }
  EXPECT_EQ(gone, 0);
  gate.open();
  EXPECT_TRUE(eventually([] { return gone == 1; })) << "with the last handler";
  EXPECT_EQ(gone_under_us, 0);
}

// Its methods hold a guard on a member, and the last reference is dropped meanwhile.
struct Guarded {
  std::atomic<int> guards{0};
  std::vector<int> numbers = std::vector<int>(1000, 1);
  ~Guarded() {
    gone_under_us += guards;
    ++gone;
  }
  struct Guard {
    Guarded& of;
    explicit Guard(Guarded& guarded) : of(guarded) { ++of.guards; }
    ~Guard() {
      // Longer than it takes the answer to arrive and the last reference to be dropped.
      static_cast<void>(eventually([] { return gone > 0; }, 50ms));
      --of.guards;
    }
  };
  Future<int> sum() {
    const Guard guard(*this);
    int sum = 0;
    for (const int each : numbers) sum += each;
    co_return sum + co_await rpc_async<&echo>(rpc::current_agent()->self(), 1);
  }
  Future<int> fail() {
    const Guard guard(*this);
    const int answer = co_await rpc_async<&echo>(rpc::current_agent()->self(), 1);
    throw std::out_of_range(std::to_string(answer));
  }
};

TEST_F(ObjectLifetime, ACoroutineMethodAnswersWhenItsFrameIsGone) {
  Cluster cluster(2, four_threads);
  {
    auto guarded = remote<Guarded>("worker1");
    auto sum = guarded.rpc_async<&Guarded::sum>();
    guarded = RRef<Guarded>();
    EXPECT_EQ(sum.get(), 1001);
  }
  EXPECT_TRUE(eventually([] { return gone == 1; }));
  {
    auto guarded = remote<Guarded>("worker1");
    auto failure = guarded.rpc_async<&Guarded::fail>();
    guarded = RRef<Guarded>();
    ASSERT_TRUE(failure.wait_for(20s));
    EXPECT_EQ(failure.error().code(), ErrorCode::remote_exception);
  }
  EXPECT_TRUE(eventually([] { return gone == 2; }));
  EXPECT_EQ(gone_under_us, 0);
}

TEST_F(ObjectLifetime, ObjectsAreDestroyedOnUserFunctionThreadsWhereverTheLastReferenceIsDropped) {
  Cluster cluster(2, {.num_threads = 1});
  gate.open();
  // Dropped on this thread, and on the thread that reads the DROP; destroyed on neither.
  { const auto mine = make_rref(std::make_unique<Shelf>()); }
  EXPECT_TRUE(eventually([] { return gone == 1; }));
  EXPECT_NE(gone_on.load(), std::this_thread::get_id());
  EXPECT_EQ(remote<Shelf>("worker1").rpc_sync<&Shelf::sum_at_the_gate>(), 1000);
  EXPECT_TRUE(eventually([] { return gone == 2; }));
  EXPECT_NE(gone_on.load(), std::this_thread::get_id());
}

TEST_F(ObjectLifetime, AWorkerThatIsNotCurrentOwnsWhatItsMemberMakes) {
  Cluster cluster(2);
  const RRef<int> there = cluster[1].make_rref(5);
  EXPECT_EQ(there.owner(), cluster[1].info());
  EXPECT_EQ(there.local_value(), 5);
}

}  // namespace
}  // namespace stitch::object_lifetime_test
