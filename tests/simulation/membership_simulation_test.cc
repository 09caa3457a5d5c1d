// Histories of whole worlds over a simulated network and clock.
#include "tests/simulation/membership_simulation.h"
#include "stitch/base/bytes.h"
#include "stitch/rpc/membership/membership_protocol.h"
#include "tests/support/plain_test.h"

namespace stitch::rpc::membership_simulation_test {
namespace {

constexpr bool kSlow = stitch::testing::kAddressSanitizer || stitch::testing::kThreadSanitizer;
TEST(MembershipSimulation, WorkersAgreeWhateverHappens) {
  constexpr std::uint64_t kHistories = 1000;  // of each kind
  simulation::Totals all;
  for (std::size_t kind = 0; kind < std::size(membership_simulation::kKinds); ++kind) {
    all += simulation::run_histories(1'000'000 * kind, kHistories, [&](std::uint64_t number) {
      membership_simulation::Options options = membership_simulation::kKinds[kind];
      options.workers = 2 + static_cast<int>(number % 5);
      return membership_simulation::run(number, options);
    });
    if (HasFailure()) return;
  }
  for (const char* const what : {"verdicts", "fenced", "welcomed", "left", "refused"})
    all.expect_over(what, all.of / 128);
}

// A worker that comes back again and again costs the others what one life of it costs, and what an
// old life says is not heard.
TEST(MembershipSimulation, OnlyTheLastLifeOfAWorkerIsKept) {
  using Protocol = MembershipProtocol;
  constexpr std::uint64_t kRestarts = kSlow ? 2'000 : 100'000;
  const MemberCard self{{"w0", WorkerId(0), 1}, {}, {}};
  const MemberCard sponsor{{"w2", WorkerId(2), 1}, {}, {}};
  const auto life = [](std::uint64_t epoch) {
    return MemberCard{{"w1", WorkerId(1), epoch}, {"tcp://127.0.0.1:1"}, {}};
  };
  const auto bytes_of = [](const Protocol& protocol) {
    base::Bytes bytes;
    Notice{Notice::Step::list, {}, {}, {}, protocol.lives()}.write(bytes);
    return bytes.size();
  };
  const KnownLife first[] = {{self}, {life(1)}, {sponsor}};
  Protocol protocol(self, {});
  protocol.start(first);
  const std::size_t bytes = bytes_of(protocol);
  Protocol::Time now{std::chrono::hours(1)};
  for (std::uint64_t epoch = 2; epoch <= kRestarts; ++epoch) {
    now += std::chrono::seconds(1);
    if (epoch % 2 == 0) {  // else the new life is the first news of the end of the former
      const Notice dead{Notice::Step::dead, life(epoch - 1).info, sponsor.info, "it was killed"};
      ASSERT_EQ(protocol.on_notice(sponsor.info, dead, now).events.size(), 1U);
    }
    const Notice joined{Notice::Step::member, life(epoch).info, sponsor.info, {}, {{life(epoch)}}};
    const auto effects = protocol.on_notice(sponsor.info, joined, now);
    ASSERT_EQ(effects.events.size(), epoch % 2 == 0 ? 1U : 2U);
    ASSERT_EQ(effects.events.back().kind, Protocol::Event::Kind::joined);
  }
  ASSERT_EQ(protocol.lives().size(), 3U);
  EXPECT_EQ(bytes_of(protocol), bytes);
  const KnownLife last[] = {{self}, {life(kRestarts)}, {sponsor}};
  Protocol fresh(self, {});
  fresh.start(last);
  EXPECT_EQ(protocol.digests(), fresh.digests());
  const auto accepted = [&](const WorkerInfo& from) {
    const Notice dead{Notice::Step::dead, sponsor.info, from, "it was killed"};
    return !protocol.on_notice(from, dead, now).events.empty();
  };
  for (const std::uint64_t epoch : {std::uint64_t{1}, kRestarts / 2, kRestarts - 1}) {
    EXPECT_FALSE(accepted(life(epoch).info)) << epoch;
    EXPECT_EQ(protocol.state(life(epoch).info), LifeState::dead) << epoch;
    EXPECT_TRUE(protocol.obituary(life(epoch).info).has_value()) << epoch;
  }
  EXPECT_TRUE(accepted(life(kRestarts).info));
}

// Two workers have lost each other for good; a probe of the judge fails on its own side at first.
TEST(MembershipSimulation, AProbeThatDecidesNothingDoesNotTakeItsTurnFromTheJudge) {
  using Protocol = MembershipProtocol;
  using std::chrono::milliseconds;
  const MemberCard judge{{"w0", WorkerId(0), 1}, {}, {}};
  const MemberCard other{{"w1", WorkerId(1), 1}, {}, {}};
  // When one of them declares the other dead, its first probe failing or not.
  const auto verdict_after = [&](const MemberCard& self, const MemberCard& lost, bool fails) {
    Protocol protocol(self, {.heartbeat_timeout = milliseconds(1500)});
    const KnownLife lives[] = {{self}, {lost}};
    protocol.start(lives);
    const Protocol::Time start{std::chrono::hours(1)};
    bool first = true;
    for (milliseconds passed{0}; passed < milliseconds(20'000); passed += milliseconds(250)) {
      const Protocol::Time now = start + passed;
      Protocol::Effects effects = protocol.on_tick(now, {});
      if (first) {
        effects = protocol.on_link_lost(lost.info,
                                        Error(ErrorCode::disconnected, "connection reset"), now);
      }
      if (effects.probes.empty()) continue;
      const auto answer = fails && first ? std::nullopt : std::optional(true);
      first = false;
      if (!protocol.on_probe(lost.info, answer, now).events.empty()) return passed;
    }
    return milliseconds(20'000);
  };
  const milliseconds usual = verdict_after(judge, other, false);
  EXPECT_EQ(usual, milliseconds(1500));
  EXPECT_EQ(verdict_after(judge, other, true), usual + milliseconds(500));
  EXPECT_EQ(verdict_after(other, judge, false), milliseconds(4500));
}

}  // namespace
}  // namespace stitch::rpc::membership_simulation_test
