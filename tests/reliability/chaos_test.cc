// stitch-reliability on any machine under any load: what must not happen in a chaos run does not,
// and strangers' connections stop no neighbour. The times are not tested.
#include "tests/support/plain_test.h"
#include "tests/support/running_command.h"

namespace chaos_test {
namespace {

using namespace stitch::testing;

CommandResult run(std::vector<std::string> words) {
  words.insert(words.begin(), STITCH_RELIABILITY);
  return run_command(words, 240s);
}

// The number at the end of the line that begins with `label`; -1 when there is none.
long number_after(const std::string& table, const std::string& label) {
  std::istringstream lines(table);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("  " + label + " "))
      return std::stol(line.substr(line.find_last_of(' ') + 1));
  }
  return -1;
}

TEST(Chaos, NothingIsLostRunTwiceOrHungWhileWorkersAreKilledStoppedPartitionedAndRestarted) {
  const auto outcome = run({"chaos", "--processes", "4", "--duration", "24s", "--seed", "8",
                            "--slack", "20s", "--verbose", "yes"});
  EXPECT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  for (const char* none :
       {"lost (no outcome)", "executed twice", "hung (no outcome in time)",
        "answered, but not executed", "wrong results", "processes that crashed"}) {
    EXPECT_EQ(number_after(outcome.out, none), 0) << none << '\n' << outcome.out;
  }
  for (const char* some :
       {"events: kill", "events: stop", "events: partition", "events: restart", "restarts", "ok",
        "backward passes compared", "rounds of optimizer steps compared"}) {
    EXPECT_GT(number_after(outcome.out, some), 0) << some << '\n' << outcome.out;
  }
}

TEST(Chaos, ConnectionsThatBreakAllTheTimeLoseNothing) {
  const auto outcome = run({"chaos", "--processes", "3", "--duration", "8s", "--every", "0s",
                            "--fault", "drop=0.001,duplicate=0.001", "--slack", "20s"});
  EXPECT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  for (const char* some : {"ok", "connections replaced, as both ends count"})
    EXPECT_GT(number_after(outcome.out, some), 0) << some << '\n' << outcome.out;
}

TEST(Detection, SeesAKillAStopAndAPartition) {
  const auto outcome = run({"detection", "--trials", "1"});
  EXPECT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  for (const char* kind : {"kill", "stop", "partition"}) {
    EXPECT_TRUE(contains(outcome.out, std::string(kind) + ": a pending call fails")) << outcome.out;
  }
}

TEST(Neighbours, GoOnBesideThousandsOfHalfOpenConnectionsAndAPeerThatReadsNothing) {
  const auto outcome = run({"neighbours", "--connections", "5000", "--seconds", "4"});
  EXPECT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  std::printf("%s", outcome.out.c_str());
}

TEST(StitchReliability, RefusesWhatItDoesNotKnow) {
  for (const auto& [words, text] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"order"}, "there are chaos, detection, neighbours"},
           {{"chaos", "--process", "3"}, "\"--process\" is unknown"},
           {{"chaos", "--duration", "10"}, "--duration is \"10\""},
           {{"chaos", "--events", "rain"}, "event \"rain\" is unknown"},
           {{"chaos", "--work", "rest"}, "work \"rest\" is unknown"},
           {{"detection", "--kinds", "rain"}, "kind \"rain\" is unknown"}}) {
    const auto outcome = run(words);
    EXPECT_EQ(outcome.status, 2);
    EXPECT_TRUE(contains(outcome.err, text)) << outcome.err;
  }
}

}  // namespace
}  // namespace chaos_test
