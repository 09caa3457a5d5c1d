// Calls that run one after the other: those on a Serialized object.

#include <numeric>

#include "tests/rref/tables.h"
#include "tests/support/world_test.h"

// Functions of the same names are registered by other units of this program.
namespace stitch::serialized_test {
namespace {

using namespace stitch::testing;

Gate gate;
int echo(int value) { return value; }

// Notes the numbers that it is called with, and whether calls overlap.
class Diary {
 public:
  int note(int number) {
    const Inside inside(*this);
    notes_.push_back(number);
    return number;
  }
  int note_behind_the_gate(int number) {
    const Inside inside(*this);
    gate.pass();
    notes_.push_back(number);
    return number;
  }
  int note_and_fail(int number) {
    static_cast<void>(note(number));
    throw std::runtime_error("this one fails");
  }
  Future<int> note_later(int number) {
    const Inside inside(*this);
    for (int i = 0; i < 3; ++i) co_await rpc_async<&echo>("worker0", i);
    notes_.push_back(number);
    co_return number;
  }
  std::vector<int> notes() const { return notes_; }
  bool overlapped() const { return overlapped_; }

 private:
  struct Inside {
    Diary& diary;
    explicit Inside(Diary& of) : diary(of) {
      if (diary.inside_++ > 0) diary.overlapped_ = true;
    }
    ~Inside() { --diary.inside_; }
  };
  std::atomic<int> inside_{0};
  std::atomic<bool> overlapped_{false};
  std::vector<int> notes_;
};
void four_threads(Options& options) { options.num_threads = 4; }

struct Sum {
  Sum() = default;
  explicit Sum(int start) : value(start) {}
  int add(int by) { return value += by; }
  int value = 0;
};

// Calls from another worker on a reference that it was given.
int note_many(RRef<Serialized<Diary>> diary, int first, int count) {
  std::vector<Future<int>> calls;
  for (int i = 0; i < count; ++i) {
    calls.push_back(i % 2 == 0 ? diary.rpc_async<&Diary::note>(first + i)
                               : diary.rpc_async<&Diary::note_later>(first + i));
  }
  for (auto& call : calls) static_cast<void>(call.get());
  return count;
}

#define EXPECT_EMPTY_TABLES(cluster)                                      \
  EXPECT_TRUE(eventually([&] { return testing::tables_empty(cluster); })) \
      << testing::tables(cluster)

TEST(SerializedObjects, NoTwoMethodsRunConcurrentlyFromHoweverManyWorkersTheyAreCalled) {
  Cluster cluster(3, four_threads);
  {
    const auto diary = remote<Serialized<Diary>>("worker1");
    std::vector<Future<int>> many;
    for (int i = 0; i < 3; ++i) {
      many.push_back(rpc_async<&note_many>("worker" + std::to_string(i), diary, 1000 * i, 100));
    }
    for (auto& each : many) EXPECT_EQ(each.get(), 100);
    EXPECT_FALSE(diary.rpc_sync<&Diary::overlapped>());
    auto notes = diary.rpc_sync<&Diary::notes>();
    EXPECT_EQ(notes.size(), 300u);
    std::sort(notes.begin(), notes.end());
    EXPECT_EQ(std::unique(notes.begin(), notes.end()), notes.end());
  }
  EXPECT_EMPTY_TABLES(cluster);
}

TEST(SerializedObjects, WaitingMethodsOccupyNoThread) {
  gate.close();
  Cluster cluster(2, {.num_threads = 2});
  {
    const auto diary = remote<Serialized<Diary>>("worker1");
    std::vector<Future<int>> calls;
    for (int i = 0; i < 20; ++i) calls.push_back(diary.rpc_async<&Diary::note_behind_the_gate>(i));
    ASSERT_TRUE(gate.wait_for_arrival());
    EXPECT_EQ(rpc_sync<&echo>("worker1", 4), 4) << "on the other thread";
    const auto failing = diary.rpc_async<&Diary::note_and_fail>(20);
    gate.open();
    for (auto& call : calls) static_cast<void>(call.get());
    EXPECT_EQ(error_of([&] { failing.get(); }).code(), ErrorCode::remote_exception);
    EXPECT_EQ(diary.rpc_sync<&Diary::notes>().size(), 21u);
    EXPECT_FALSE(diary.rpc_sync<&Diary::overlapped>());
  }
  EXPECT_EMPTY_TABLES(cluster);
}

TEST(SerializedObjects, AreOwnedByMakeRRefToo) {
  Cluster cluster(2, four_threads);
  {
    const auto sum = remote<Serialized<Sum>>("worker1", 5);
    EXPECT_EQ(sum.rpc_sync<&Sum::add>(1), 6);
    const auto own = make_rref(Serialized<Sum>(7));
    EXPECT_EQ(own.rpc_sync<&Sum::add>(1), 8);
    EXPECT_EQ(own.local_value().value, 8);
  }
  EXPECT_EMPTY_TABLES(cluster);
}

TEST(SerializedObjects, RunTheSmallCallsOfOneThreadInTheirOrder) {
  Cluster cluster(2, four_threads);
  {
    const auto diary = remote<Serialized<Diary>>("worker1");
    diary.when_created().get();
    std::vector<Future<int>> calls;
    for (int i = 0; i < 50; ++i) calls.push_back(diary.rpc_async<&Diary::note_later>(i));
    for (auto& call : calls) static_cast<void>(call.get());
    std::vector<int> all(50);
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(diary.rpc_sync<&Diary::notes>(), all);
  }
  EXPECT_EMPTY_TABLES(cluster);
}

TEST(SerializedObjects, ObjectsWithWaitingMethodsEndWithTheirWorker) {
  gate.close();
  Cluster cluster(2, four_threads);
  const auto diary = remote<Serialized<Diary>>("worker1");
  std::vector<Future<int>> calls;
  for (int i = 0; i < 10; ++i) calls.push_back(diary.rpc_async<&Diary::note_behind_the_gate>(i));
  ASSERT_TRUE(gate.wait_for_arrival());
  cluster[1].shutdown({.graceful = false, .timeout = 10ms});
  gate.open();
  for (auto& call : calls) {
    ASSERT_TRUE(call.wait_for(20s));
    EXPECT_TRUE(call.has_error());
  }
  cluster.shutdown();
}

}  // namespace
}  // namespace stitch::serialized_test
