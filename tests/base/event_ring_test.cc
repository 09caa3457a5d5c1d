#include "stitch/base/event_ring.h"
#include "tests/support/plain_test.h"

namespace stitch::base::event_ring_test {
namespace {

TEST(EventRing, ListsWhatWasRecordedOldestFirstWithItsTimes) {
  EventRing ring;
  const auto before = std::chrono::steady_clock::now();
  ring.record("call made", 3, 0x1'0000'0007, 42, "f");
  ring.record("pass begun");
  const auto after = std::chrono::steady_clock::now();
  const auto events = ring.list();
  ASSERT_EQ(events.size(), 2U);
  EXPECT_EQ(std::string(events[0].what), "call made");
  EXPECT_EQ(events[0].peer, 3U);
  EXPECT_EQ(events[0].epoch, 7U);
  EXPECT_EQ(events[0].id, 42U);
  EXPECT_EQ(events[0].name, "f");
  EXPECT_FALSE(events[1].peer);
  EXPECT_EQ(events[1].name, "");
  constexpr std::chrono::milliseconds kSlack{1};
  for (const Event& event : events) {
    EXPECT_GE(event.when, before - kSlack);
    EXPECT_LE(event.when, after + kSlack);
  }
  EXPECT_LE(events[0].when, events[1].when);
}

TEST(EventRing, TakesATimeThatIsKnown) {
  EventRing ring;
  const auto when = std::chrono::steady_clock::now() - std::chrono::seconds(5);
  ring.record_at(when, "call made", 1, 1, 1, "f");
  ASSERT_EQ(ring.list().size(), 1U);
  EXPECT_EQ(ring.list()[0].when, when);
}

TEST(EventRing, KeepsTheLastOnes) {
  EventRing ring;
  for (std::uint64_t i = 1; i <= 2 * EventRing::kEvents + 10; ++i) ring.record("event", 0, 0, i);
  const auto events = ring.list();
  ASSERT_EQ(events.size(), EventRing::kEvents);
  EXPECT_EQ(events.front().id, EventRing::kEvents + 11);
  EXPECT_EQ(events.back().id, 2 * EventRing::kEvents + 10);
  EXPECT_EQ(ring.recorded(), 2 * EventRing::kEvents + 10);
}

// What is listed while others write is whole: the fields of each event belong together.
TEST(EventRing, NeverListsAHalfWrittenEvent) {
  EventRing ring;
  static constexpr const char* kNames[] = {"0", "11", "222", "3333"};
  std::vector<std::jthread> writers;
  for (std::uint32_t writer = 0; writer < 4; ++writer) {
    writers.emplace_back([&, writer](const std::stop_token& stop) {
      while (!stop.stop_requested())
        ring.record(kNames[writer], writer, writer, writer, kNames[writer]);
    });
  }
  std::size_t seen = 0;
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  for (int i = 0; i < 300 || (seen == 0 && std::chrono::steady_clock::now() < give_up); ++i) {
    for (const Event& event : ring.list()) {
      ASSERT_TRUE(event.peer);
      ASSERT_LT(*event.peer, 4U);
      ASSERT_EQ(event.id, *event.peer);
      ASSERT_EQ(event.what, kNames[*event.peer]);
      ASSERT_EQ(event.name, kNames[*event.peer]);
      ++seen;
    }
  }
  EXPECT_GT(seen, 0U);
}

}  // namespace
}  // namespace stitch::base::event_ring_test
