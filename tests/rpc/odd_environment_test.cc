// Processes that something odd has started: with low limits, closed descriptors, another locale, no
// temporary folder, blocked or ignored signals. They work, fall back, or say what is missing.
#include <nlohmann/json.hpp>

#include <csignal>

#include "tests/support/plain_test.h"
#include "tests/support/process_world.h"
#include "tests/support/running_command.h"

namespace odd_environment_test {
namespace {

using stitch::testing::contains;
using stitch::testing::eventually;
using stitch::testing::gone;
using stitch::testing::kAddressSanitizer;
using stitch::testing::ProcessWorld;
using stitch::testing::RunningCommand;
using stitch::testing::TemporaryFolder;

// What a shell does before it becomes worker_program.
std::vector<std::string> after(const std::string& commands, const std::string& what = "calls") {
  return {"sh", "-c", commands + "; exec \"$@\"", "sh", WORLD_PROGRAM, what};
}

// Two workers that call each other.
void expect_calls(const std::string& commands, const std::vector<std::string>& variables = {}) {
  SCOPED_TRACE(commands);
  ProcessWorld world(2, after(commands), variables);
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(world[rank].wait(), 0) << world[rank].err();
}

// Two workers that end by an error of this text.
void expect_error(const std::string& commands, const std::string& text,
                  const std::string& what = "calls",
                  const std::vector<std::string>& variables = {}) {
  SCOPED_TRACE(commands);
  ProcessWorld world(2, after(commands, what), variables);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(world[rank].wait(), 3) << world[rank].err();
    EXPECT_TRUE(contains(world[rank].err(), text)) << world[rank].err();
  }
}

TEST(OddEnvironments, ClosedStandardDescriptorsAreReplaced) {
  for (const char* closed : {"exec <&-", "exec >&-", "exec 2>&-", "exec <&- >&- 2>&-"})
    expect_calls(closed);
}

TEST(OddEnvironments, TheSoftLimitOfDescriptorsIsRaised) { expect_calls("ulimit -Sn 24"); }

TEST(OddEnvironments, ALowHardLimitOfDescriptorsIsNamed) {
  expect_error("ulimit -n 24", "this process may have 24 descriptors (RLIMIT_NOFILE)");
}

// Shared memory is a file, too. The store of a file cannot be.
TEST(OddEnvironments, WithoutFilesOfTheSizeOfSharedMemoryWorkersMeetOverTcp) {
  expect_calls("ulimit -f 64");
}

TEST(OddEnvironments, ALimitOfFilesThatIsTooLowForTheStoreIsNamed) {
  expect_error("ulimit -f 0", "file too large: files of this process may have 0 bytes");
}

TEST(OddEnvironments, NothingNeedsLockedMemory) {
  expect_calls("ulimit -l 0", {"STITCH_SECRET=s"});
}

TEST(OddEnvironments, FewAddressesAreAnErrorAndNotTheEnd) {
  if (kAddressSanitizer) GTEST_SKIP() << "it needs terabytes of addresses";
  ProcessWorld world(2, after("ulimit -v 1100000"));
  for (int rank = 0; rank < 2; ++rank) {
    const int status = world[rank].wait();
    EXPECT_TRUE(status == 0 || status == 3) << status << ": " << world[rank].err();
  }
}

TEST(OddEnvironments, NumbersAreWrittenAsInEveryLocale) {
  const TemporaryFolder folder;
  const std::string locale = (folder.path() / "de_DE.UTF-8").string();
  // Where this machine has its source; else the locale of C++ alone has other points and commas.
  RunningCommand made({"sh", "-c", "localedef -f UTF-8 -i de_DE " + locale + " 2>&1"});
  static_cast<void>(made.wait());
  const std::string dumps = (folder.path() / "dumps").string();
  ASSERT_TRUE(std::filesystem::create_directory(dumps));
  ProcessWorld world(2, {WORLD_PROGRAM, "another locale", dumps},
                     {"LOCPATH=" + folder.path().string(), "LC_ALL=de_DE.UTF-8"});
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(world[rank].wait(), 0) << world[rank].err();
  int read = 0;
  for (const auto& file : std::filesystem::directory_iterator(dumps)) {
    std::ifstream text(file.path());
    EXPECT_NO_THROW({
      const auto dump = nlohmann::json::parse(text);
      EXPECT_GT(dump["time"].get<double>(), 1e9);
    });
    ++read;
  }
  EXPECT_EQ(read, 2);
}

TEST(OddEnvironments, ATemporaryFolderThatIsMissingIsNotNeeded) {
  expect_calls("export TMPDIR=/nowhere");
  expect_calls("export TMPDIR=");
}

TEST(OddEnvironments, StitchRunSaysWhichTemporaryFolderIsMissing) {
  RunningCommand run({"env", "TMPDIR=/nowhere", STITCH_RUN, "-n", "2", WORLD_PROGRAM, "calls"});
  EXPECT_EQ(run.wait(), 125);
  EXPECT_TRUE(contains(run.err(), "cannot make a folder for the rendezvous file, /nowhere/"))
      << run.err();
}

TEST(OddEnvironments, StitchRunNeedsNoStandardDescriptorsAndNoSignals) {
  for (const char* odd :
       {"exec <&-", "exec >&-", "trap '' CHLD TERM INT HUP", "trap '' PIPE USR1"}) {
    SCOPED_TRACE(odd);
    RunningCommand run({"sh", "-c", std::string(odd) + "; exec \"$@\"", "sh", STITCH_RUN, "-n", "2",
                        "--timeout", "60", WORLD_PROGRAM, "calls"});
    EXPECT_EQ(run.wait(), 0) << run.err();
  }
  RunningCommand blocked(
      {"env", "--block-signal", STITCH_RUN, "-n", "2", "--timeout", "60", WORLD_PROGRAM, "calls"});
  EXPECT_EQ(blocked.wait(), 0) << blocked.err();
}

TEST(OddEnvironments, IgnoredAndBlockedSignalsDoNotMatterToCalls) {
  expect_calls("trap '' PIPE");
  expect_calls("trap '' TERM INT HUP CHLD USR1 USR2 ALRM");
  ProcessWorld world(2, {"env", "--block-signal", WORLD_PROGRAM, "calls"});
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(world[rank].wait(), 0) << world[rank].err();
}

TEST(OddEnvironments, ABlockedSignalThatIsToStopAWorkerIsNamed) {
  ProcessWorld world(2, {"env", "--block-signal=TERM", WORLD_PROGRAM, "serves"},
                     {"STITCH_STOP_ON_SIGNALS=1"});
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(world[rank].wait(), 3);
    EXPECT_TRUE(contains(world[rank].err(), "stop_on_signals: SIGTERM is blocked on the thread"))
        << world[rank].err();
  }
}

// As of a job in the background: the other signal stops it.
TEST(OddEnvironments, AnIgnoredSignalStaysIgnored) {
  const TemporaryFolder folder;
  const auto ready = [&](int rank) { return folder.path() / ("ready" + std::to_string(rank)); };
  auto command = after("trap '' INT", "serves");
  command.push_back((folder.path() / "ready").string());
  ProcessWorld world(2, command, {"STITCH_STOP_ON_SIGNALS=1"});
  for (int rank = 0; rank < 2; ++rank)
    ASSERT_TRUE(eventually([&] { return std::filesystem::exists(ready(rank)); }));
  world[0].send_signal(SIGINT);
  EXPECT_FALSE(gone(world[0].pid(), std::chrono::seconds(1)));
  for (int rank = 0; rank < 2; ++rank) world[rank].send_signal(SIGTERM);
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(world[rank].wait(), 0) << world[rank].err();
}

}  // namespace
}  // namespace odd_environment_test
