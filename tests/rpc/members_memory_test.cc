// A worker that joins or comes back, whichever allocation fails: the next try does what is left.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/rpc/agent/peer_table.h"
#include "tests/support/failing_memory.h"

namespace stitch::rpc {
namespace {

using stitch::testing::FailingMemory;

// Names and texts that do not fit into a std::string itself.
Member member_of(std::uint32_t id, std::uint64_t epoch) {
  return {{"worker" + std::to_string(id) + "-with-a-long-name", WorkerId(id), epoch}, {}, {}};
}

// What worker 0 knows of the others; none of them can be reached.
class MembersWithoutMemory : public ::testing::Test {
 protected:
  void start(PeerTable& table) {
    table.start(
        {member_of(0, 1), member_of(1, 1)}, WorkerId(0),
        {.on_message = [](const auto&, const WorkerInfo&, transport::Message) {},
         .place = [](const auto&, const auto&, std::size_t) { return transport::Buffer{}; },
         .on_lost = [this](const WorkerInfo&, const Error&) { ++lost_; },
         .call_at = [](auto, auto) {},
         .deadline =
             [](std::uint64_t) { return std::optional(PeerTable::Clock::time_point::max()); }});
  }
  // Adds the life until that succeeds, with the `first` allocation failing. Whether it has.
  static bool add(PeerTable& table, const Member& member, std::int64_t first) {
    FailingMemory::begin(first);
    bool failed = false;
    try {
      table.add_life(member);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    const bool any = FailingMemory::end() > 0;
    if (failed) {
      EXPECT_NO_THROW(table.add_life(member)) << "allocation " << first;
    }
    return any;
  }
  static constexpr std::int64_t kMaxAllocations = 1000;

  int lost_ = 0;
};

TEST_F(MembersWithoutMemory, AWorkerThatJoinsIsAddedAtTheNextTry) {
  std::int64_t first = 1;
  for (bool any = true; any && first < kMaxAllocations; ++first) {
    PeerTable table;
    start(table);
    const Member joiner = member_of(2, 1);
    any = add(table, joiner, first);
    ASSERT_NE(table.life(joiner.info), nullptr) << "allocation " << first;
    EXPECT_EQ(table.find(joiner.info.name), joiner.info) << "allocation " << first;
    EXPECT_EQ(table.size(), 3U) << "allocation " << first;
    table.admit(*table.life(joiner.info));
    EXPECT_TRUE(table.life(joiner.info)->announced.load());
    table.close();
  }
  EXPECT_GT(first, 5);
  EXPECT_LT(first, kMaxAllocations);
}

TEST_F(MembersWithoutMemory, ALifeThatFollowsAnotherEndsItAtTheNextTry) {
  std::int64_t first = 1;
  for (bool any = true; any && first < kMaxAllocations; ++first) {
    PeerTable table;
    start(table);
    lost_ = 0;
    const Member next = member_of(1, 2);
    any = add(table, next, first);
    ASSERT_NE(table.life(next.info), nullptr) << "allocation " << first;
    const Life* former = table.life(member_of(1, 1).info);
    ASSERT_NE(former, nullptr);
    EXPECT_EQ(table.life(next.info)->previous, former);
    EXPECT_TRUE(former->over.load()) << "allocation " << first;
    EXPECT_EQ(lost_, 1) << "allocation " << first;
    EXPECT_EQ(table.size(), 2U);
    table.close();
  }
  EXPECT_GT(first, 5);
  EXPECT_LT(first, kMaxAllocations);
}

TEST_F(MembersWithoutMemory, ALifeThatHasBeenAdmittedIsNotAddedAgain) {
  PeerTable table;
  start(table);
  table.admit(table.add_life(member_of(2, 1)));
  EXPECT_THROW(table.add_life(member_of(2, 1)), Error);
  table.close();
}

}  // namespace
}  // namespace stitch::rpc
