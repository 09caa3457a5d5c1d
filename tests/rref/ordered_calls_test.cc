// Calls that run one after the other: through an ordered handle, and on a Serialized object.

#include <numeric>

#include "stitch/rref/frame_kinds.h"
#include "tests/rref/tables.h"
#include "tests/support/world_test.h"

// Functions of the same names are registered by other units of this program.
namespace stitch::ordered_calls_test {
namespace {

using namespace std::chrono_literals;
using testing::Cluster;
using testing::error_of;
using testing::eventually;
using testing::Gate;
using testing::LoopbackFaults;
using transport::Fate;

Gate gate;
int echo(int value) { return value; }
int beyond_the_gate(int value) {
  gate.pass();
  return value;
}

// Notes the numbers that it is called with, and whether calls overlap.
class Diary {
 public:
  int note(int number) {
    const Inside inside(*this);
    notes_.push_back(number);
    return number;
  }
  int note_text(int number, const std::string& text) {
    return note(number) + (text.empty() ? 1 : 0);
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
std::vector<int> up_to(int n) {
  std::vector<int> numbers(static_cast<std::size_t>(n));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}
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

#define EXPECT_NO_ORDERED_CALLS(cluster)                              \
  EXPECT_TRUE(eventually([&] {                                        \
    return testing::tables_empty(cluster) &&                          \
           testing::number(cluster, 1, "ordered_handles") == 0 &&     \
           testing::number(cluster, 1, "ordered_calls_waiting") == 0; \
  })) << testing::tables(cluster)

TEST(OrderedHandles, CallsRunOneAfterTheOtherInTheOrderInWhichTheyWereMade) {
  Cluster cluster(2, four_threads);
  {
    const auto diary = remote<Diary>("worker1").ordered();
    std::vector<Future<int>> calls;
    for (int i = 0; i < 300; ++i) {
      calls.push_back(i % 3 == 0 ? diary.rpc_async<&Diary::note_later>(i)
                                 : diary.rpc_async<&Diary::note>(i));
    }
    const auto copied = diary;  // copies share the order
    EXPECT_EQ(copied.rpc_sync<&Diary::notes>(), up_to(300));
    for (int i = 0; i < 300; ++i) EXPECT_EQ(calls[static_cast<std::size_t>(i)].get(), i);
    EXPECT_FALSE(copied.rpc_sync<&Diary::overlapped>());
    EXPECT_EQ(diary.remote<&Diary::note>(300).to_here(), 300);
  }
  EXPECT_NO_ORDERED_CALLS(cluster);
}

TEST(OrderedHandles, WorkOnOnesOwnObjectsAndIncludeFetches) {
  Cluster cluster(2, four_threads);
  {
    const auto diary = remote<Diary>("worker0").ordered();
    std::vector<Future<int>> calls;
    for (int i = 0; i < 50; ++i) calls.push_back(diary.rpc_async<&Diary::note_later>(i));
    EXPECT_EQ(diary.rpc_sync<&Diary::notes>(), up_to(50));
    const auto text = make_rref(std::string("a")).ordered();
    EXPECT_EQ(text.to_here(), "a");
    const auto there = remote<&echo>("worker1", 5).ordered();
    EXPECT_EQ(there.to_here(), 5);
  }
  EXPECT_NO_ORDERED_CALLS(cluster);
}

TEST(OrderedHandles, ACallWaitsForThoseBeforeItAlsoWhenTheirArgumentsAreNotThereYet) {
  gate.close();
  Cluster cluster(2, four_threads);
  {
    const auto diary = remote<Diary>("worker1").ordered();
    const auto late = remote<&beyond_the_gate>("worker0", 0);
    const auto first = diary.rpc_async<&Diary::note>(late);
    const auto second = diary.rpc_async<&Diary::note>(1);
    const auto other = diary.ordered().rpc_async<&Diary::notes>();  // another order
    EXPECT_EQ(other.get(), std::vector<int>());
    EXPECT_FALSE(second.ready());
    gate.open();
    EXPECT_EQ(second.get(), 1);
    EXPECT_EQ(diary.rpc_sync<&Diary::notes>(), up_to(2));
  }
  EXPECT_NO_ORDERED_CALLS(cluster);
}

TEST(OrderedHandles, WhatFailsIsRefusedOrCancelledHoldsUpNothingBehindIt) {
  gate.close();
  Cluster cluster(2, [](Options& options) {
    options.num_threads = 4;
    options.max_frame_bytes = 1 << 20;
  });
  {
    const auto diary = remote<Diary>("worker1").ordered();
    const auto first = diary.rpc_async<&Diary::note_behind_the_gate>(0);
    const auto failing = diary.rpc_async<&Diary::note_and_fail>(1);
    const auto too_large =
        diary.rpc_async<&Diary::note_text>(-1, std::string(std::size_t{2} << 20, 'x'));
    const auto cancelled = diary.rpc_async<&Diary::note>(-2);
    const auto late = diary.with_timeout(20ms).rpc_async<&Diary::note>(-3);
    const auto last = diary.rpc_async<&Diary::note>(2);
    EXPECT_EQ(error_of([&] { too_large.get(); }).code(), ErrorCode::out_of_range);
    cancelled.cancel();
    EXPECT_EQ(error_of([&] { late.get(); }).code(), ErrorCode::timeout);
    EXPECT_FALSE(last.ready());
    gate.open();
    EXPECT_EQ(last.get(), 2);
    EXPECT_EQ(first.get(), 0);
    EXPECT_EQ(error_of([&] { failing.get(); }).code(), ErrorCode::remote_exception);
    auto notes = diary.rpc_sync<&Diary::notes>();
    std::erase_if(notes, [](int n) { return n < -1; });  // their ends may not have arrived in time
    EXPECT_EQ(notes, up_to(3));
    // The creation of a result may time out; its method still runs in order.
    EXPECT_FALSE(diary.rpc_sync<&Diary::overlapped>());
  }
  EXPECT_NO_ORDERED_CALLS(cluster);
}

TEST(OrderedHandles, ARequestRefusedWhenItIsLaidOutHoldsUpNothing) {
  constexpr std::size_t kLimit = 1 << 20;
  Cluster cluster(2, [](Options& options) { options.max_frame_bytes = kLimit; });
  {
    const auto diary = remote<Diary>("worker1").ordered();
    int refused = 0, sent = 0;
    for (std::size_t below = 400; below > 0; below -= 8) {  // sections are added to the text
      const auto call = diary.rpc_async<&Diary::note_text>(sent, std::string(kLimit - below, 'x'));
      const auto next = diary.rpc_async<&Diary::note>(1000);
      ASSERT_TRUE(call.wait_for(20s));
      ASSERT_TRUE(next.wait_for(20s));
      call.has_error() ? ++refused : ++sent;
    }
    EXPECT_GT(refused, 0);
    EXPECT_GT(sent, 0);
    EXPECT_EQ(diary.rpc_sync<&Diary::notes>().size(), 50u + static_cast<std::size_t>(sent));
  }
  EXPECT_NO_ORDERED_CALLS(cluster);
}

TEST(OrderedHandles, CallsThatWaitForRoomRunInTheOrderInWhichTheyWereMade) {
  Cluster cluster(2, [](Options& options) {
    options.num_threads = 4;
    options.max_inflight_bytes = 256 << 10;
    options.rpc_timeout = 20s;
  });
  {
    const auto diary = remote<Diary>("worker1").ordered();
    std::vector<Future<int>> calls;
    int made = 0;
    // Of the program and of a continuation in turn, some small and some above half of the limit.
    const auto make = [&] {
      for (int i = 0; i < 50; ++i, ++made) {
        const std::size_t bytes = made % 7 == 0 ? 150 << 10 : made % 3 == 0 ? 40 << 10 : 10;
        calls.push_back(diary.rpc_async<&Diary::note_text>(made, std::string(bytes, 'x')));
      }
    };
    for (int i = 0; i < 2; ++i) {
      make();
      rpc_async<&echo>("worker0", 1)
          .then([&](int) {
            for (int each = 0; each < 3; ++each, ++made)
              calls.push_back(diary.rpc_async<&Diary::note>(made));
          })
          .get();
    }
    for (int i = 0; i < made; ++i) EXPECT_EQ(calls[static_cast<std::size_t>(i)].get(), i);
    EXPECT_EQ(diary.rpc_sync<&Diary::notes>(), up_to(made));
    EXPECT_FALSE(diary.rpc_sync<&Diary::overlapped>());
  }
  EXPECT_NO_ORDERED_CALLS(cluster);
}

TEST(OrderedHandles, AnOwnersEndFailsWhatWaits) {
  gate.close();
  Cluster cluster(3, four_threads);
  const auto diary = remote<Diary>("worker1").ordered();
  std::vector<Future<int>> calls;
  for (int i = 0; i < 10; ++i) calls.push_back(diary.rpc_async<&Diary::note_behind_the_gate>(i));
  ASSERT_TRUE(gate.wait_for_arrival());
  cluster[1].shutdown({.graceful = false, .timeout = 10ms});
  for (auto& call : calls) {
    ASSERT_TRUE(call.wait_for(20s));
    EXPECT_TRUE(call.has_error());
  }
  ASSERT_TRUE(eventually([&] { return testing::number(cluster, 0, "holds_lost") == 1; }));
  EXPECT_EQ(error_of([&] { diary.rpc_sync<&Diary::note>(1); }).code(), ErrorCode::disconnected);
  gate.open();
  cluster.shutdown();
}

TEST(OrderedHandles, ACallersEndLeavesNothingBehindAtTheOwner) {
  gate.close();
  Cluster cluster(3, four_threads);
  const auto diary = remote<Diary>("worker1");
  diary.when_created().get();
  {
    const WorkerScope as_two(cluster[2]);
    const auto theirs = remote<Diary>("worker1").ordered();
    std::vector<Future<int>> calls;
    for (int i = 0; i < 10; ++i) calls.push_back(theirs.rpc_async<&Diary::note_behind_the_gate>(i));
    ASSERT_TRUE(gate.wait_for_arrival());
    cluster[2].shutdown({.graceful = false, .timeout = 5s});
  }
  EXPECT_TRUE(eventually([&] { return testing::number(cluster, 1, "ordered_handles") == 0; }));
  EXPECT_EQ(testing::number(cluster, 1, "ordered_calls_waiting"), 0);
  gate.open();
  EXPECT_EQ(diary.ordered().rpc_sync<&Diary::note>(1), 1);
  EXPECT_TRUE(eventually([&] { return cluster[1].debug_info().at("rpc.calls_served") == 0; }));
  cluster.shutdown();
}

TEST(OrderedHandleFaults, CallsRunInOrderAlthoughMessagesOvertakeEachOther) {
  std::atomic<int> delayed{0};
  const LoopbackFaults network(
      [&](std::uint32_t, std::uint32_t, std::uint64_t sequence, const transport::Message& message) {
        const transport::FrameView view(message);
        if (sequence % 3 != 0 || view.section(rref::wire::kOrderSection) == nullptr) return Fate{};
        ++delayed;
        return Fate{.delay = 1ms * static_cast<int>(sequence % 5)};
      });
  Cluster cluster(2, four_threads);
  {
    const auto diary = remote<Diary>("worker1").ordered();
    std::vector<Future<int>> calls;
    for (int i = 0; i < 200; ++i) calls.push_back(diary.rpc_async<&Diary::note>(i));
    for (auto& call : calls) static_cast<void>(call.get());
    EXPECT_EQ(diary.rpc_sync<&Diary::notes>(), up_to(200));
  }
  EXPECT_GT(delayed, 0);
  EXPECT_NO_ORDERED_CALLS(cluster);
}

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
  EXPECT_NO_ORDERED_CALLS(cluster);
}

TEST(SerializedObjects, WaitingMethodsOccupyNoThread) {
  gate.close();
  Cluster cluster(2, [](Options& options) { options.num_threads = 2; });
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
  EXPECT_NO_ORDERED_CALLS(cluster);
}

TEST(SerializedObjects, AreOwnedByMakeRRefAndOrderedToo) {
  Cluster cluster(2, four_threads);
  {
    const auto sum = remote<Serialized<Sum>>("worker1", 5);
    EXPECT_EQ(sum.rpc_sync<&Sum::add>(1), 6);
    const auto own = make_rref(Serialized<Sum>(7));
    EXPECT_EQ(own.rpc_sync<&Sum::add>(1), 8);
    EXPECT_EQ(own.local_value().value, 8);
    const auto diary = remote<Serialized<Diary>>("worker1").ordered();
    std::vector<Future<int>> calls;
    for (int i = 0; i < 50; ++i) calls.push_back(diary.rpc_async<&Diary::note_later>(i));
    EXPECT_EQ(diary.rpc_sync<&Diary::notes>(), up_to(50));
  }
  EXPECT_NO_ORDERED_CALLS(cluster);
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
}  // namespace stitch::ordered_calls_test
