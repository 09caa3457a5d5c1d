// stitch-run --diagnose on dumps that are made up, damaged or hostile.
#include <sys/stat.h>

#include "tests/support/plain_test.h"
#include "tests/support/running_command.h"

namespace diagnose_test {
namespace {

using namespace stitch::testing;

// A dump with some tables, as a worker would write it.
std::string dump(const std::string& name, const std::string& tables, double time = 100) {
  return R"({"stitch_dump": 1, "name": ")" + name +
         R"(", "id": 0, "epoch": 1, "pid": 1, "host": "h", "reason": "signal SIGUSR1", "time": )" +
         std::to_string(time) + R"(, "tables": [)" + tables + "]}";
}

std::string made(const std::string& to, const std::string& function, double age) {
  return R"({"name": "calls made", "columns": ["call", "function", "to", "age", "state"], )"
         R"("rows": [[7, ")" +
         function + R"(", ")" + to + R"(", )" + std::to_string(age) +
         R"(, "waits for an answer"]]})";
}

class Diagnose : public ::testing::Test {
 protected:
  void put(const std::string& file, const std::string& text) const {
    std::ofstream(folder_.path() / file, std::ios::binary) << text;
  }
  [[nodiscard]] CommandResult run() const {
    return run_command({STITCH_RUN, "--diagnose", folder_.path()});
  }
  const TemporaryFolder folder_;
};

TEST_F(Diagnose, NamesWhoWaitsForAWorkerThatIsSilent) {
  put("a.json", dump("a", made("b", "f", 12.1)));
  const auto result = run();
  EXPECT_EQ(result.status, 0);
  EXPECT_TRUE(result.out.starts_with(
      "worker \"a\" waits for worker \"b\": call f() since 12.1 s; worker \"b\" has written no "
      "dump: it is stopped, dead, cut off, or was not asked for one\n\nculprit: worker \"b\"\n"))
      << result.out;
}

TEST_F(Diagnose, TakesTheNewestDumpOfAWorker) {
  put("1.json", dump("a", made("b", "old", 1), 100));
  put("2.json", dump("a", made("b", "newer", 2), 200));
  put("3.json", dump("a", made("b", "older", 3), 150));
  EXPECT_TRUE(contains(run().out, "call newer() since"));
}

// As `dump`, of one world.
std::string dump_of(const std::string& world, const std::string& name, const std::string& tables,
                    double time, const std::string& reason = "signal SIGUSR1") {
  return R"({"stitch_dump": 1, "name": ")" + name + R"(", "id": 0, "epoch": 1, "world": ")" +
         world + R"(", "pid": 1, "host": "h", "reason": ")" + reason + R"(", "time": )" +
         std::to_string(time) + R"(, "tables": [)" + tables + "]}";
}

// A long wait of yesterday does not hide the one of today, and a worker of then is not missing now.
TEST_F(Diagnose, TakesTheRunOfTheNewestDumpAndNamesTheOthers) {
  put("a.json", dump_of("18446744073709551615", "a", made("b", "today", 12), 90'000));
  put("b.json", dump_of("18446744073709551615", "b", "", 90'001));
  put("b_before.json", dump_of("7", "b", made("c", "yesterday", 300), 3'600));
  put("c_before.json", dump_of("7", "c", "", 3'601));
  put("d_older.json", dump("d", made("e", "long_ago", 900), 100));
  const auto result = run();
  EXPECT_EQ(result.status, 0);
  EXPECT_TRUE(
      result.out.starts_with("worker \"a\" waits for worker \"b\": call today() since 12.0 s"))
      << result.out;
  for (const char* absent : {"yesterday", "long_ago", "\"c\"", "\"d\""})
    EXPECT_FALSE(contains(result.out, absent)) << absent << " is in\n" << result.out;
  EXPECT_TRUE(contains(result.out,
                       "\nof other runs, left out:\n"
                       "  files without the number of a world: dumps of 1 workers, 89901 s older\n"
                       "  world 7: dumps of 2 workers, 86400 s older\n"))
      << result.out;
}

// A dump of one life of a worker.
std::string dump_of_life(int epoch, const std::string& name, const std::string& tables, double time,
                         const std::string& reason = "signal SIGUSR1") {
  return R"({"stitch_dump": 1, "name": ")" + name + R"(", "id": 0, "epoch": )" +
         std::to_string(epoch) + R"(, "world": "7", "pid": 4999999, "host": "h", "reason": ")" +
         reason + R"(", "time": )" + std::to_string(time) + R"(, "tables": [)" + tables + "]}";
}

// Each row: ["name", id, epoch, "life"].
std::string members(const std::string& rows) {
  return R"({"name": "members", "columns": ["name", "id", "epoch", "life"], "rows": [)" + rows +
         "]}";
}

TEST_F(Diagnose, AWorkerThatRunsAgainIsNotJudgedByADumpOfItsFormerLife) {
  put("a.1.json", dump_of_life(1, "a",
                               made("b", "now", 12) + ", " +
                                   members(R"(["a", 0, 1, "alive"], ["b", 1, 2, "alive"])"),
                               200));
  put("b.1.json", dump_of_life(1, "b", made("c", "long_ago", 900), 190));
  const auto result = run();
  EXPECT_EQ(result.status, 0);
  EXPECT_TRUE(
      result.out.starts_with("worker \"a\" waits for worker \"b\": call now() since 12.0 s"))
      << result.out;
  EXPECT_FALSE(contains(result.out, "long_ago")) << result.out;
  EXPECT_TRUE(contains(result.out,
                       "\nof former lives, left out:\n"
                       "  \"b.1.json\": worker \"b\" is of epoch 1, and epoch 2 runs\n"))
      << result.out;
}

// Each row: ["worker", "waits for"].
std::string leaving(const std::string& rows) {
  return R"({"name": "shutdown", "columns": ["worker", "waits for", "age"], "rows": [)" + rows +
         "]}";
}

// A server that returned from main serves until the others leave; the trainer waits for a lock
// there.
TEST_F(Diagnose, AWorkerThatServesInItsShutdownIsInNoCircle) {
  const std::string served =
      R"({"name": "calls served", "columns": ["caller", "call", "function", "stage", )"
      R"("running for", "thread", "thread state", "age"], )"
      R"("rows": [["trainer", 7, "pull", "running", 3, 5, "waits for a lock or a condition", 3]]})";
  put("ps.json",
      dump("ps", served + ", " + leaving(R"(["trainer", "shutdown to be called", 40])")));
  put("trainer.json", dump("trainer", made("ps", "pull", 3)));
  const std::string out = run().out;
  EXPECT_TRUE(
      out.starts_with("worker \"trainer\" waits for worker \"ps\": call pull() since 3.0 s"))
      << out;
  EXPECT_FALSE(contains(out, "circular")) << out;
  EXPECT_FALSE(contains(out, "in its shutdown")) << out;
  std::ifstream in(folder_.path() / "waits.dot");
  const std::string dot((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  EXPECT_TRUE(contains(dot, "pull()\\n3.0 s")) << dot;
}

TEST_F(Diagnose, SaysOfAWaitThatItIsKnownFromAnOldDump) {
  put("a.json", dump("a", made("b", "f", 1), 1000));
  put("b.json", dump("b", made("c", "g", 1), 300));
  EXPECT_TRUE(
      contains(run().out, " (the dump of worker \"b\" is 700.0 s older than the newest one)\n"))
      << run().out;
  put("b.json", dump("b", made("c", "g", 1), 990));
  EXPECT_FALSE(contains(run().out, "older than")) << run().out;
}

TEST_F(Diagnose, WorkersThatHaveLeftOrAreDeadAreNotMissing) {
  put("a.json", dump_of_life(1, "a",
                             members(R"(["a", 0, 1, "alive"], ["b", 1, 1, "left"],)"
                                     R"( ["c", 2, 1, "alive"], ["d", 3, 1, "alive"])"),
                             100));
  // It knows better what has become of c.
  put("e.json", dump_of_life(1, "e", members(R"(["c", 2, 1, "dead"], ["e", 4, 1, "alive"])"), 99));
  const std::string out = run().out;
  EXPECT_TRUE(
      out.starts_with("no worker that has written a dump waits for another, but worker "
                      "\"d\" has written no dump"))
      << out;
  for (const char* gone : {"\"b\"", "\"c\""})
    EXPECT_FALSE(contains(out, gone)) << gone << " is in\n" << out;
}

TEST_F(Diagnose, SaysOfAWorkerThatIsWaitedForThatItHasLeftOrIsDead) {
  for (const auto& [life, why] :
       {std::pair("left", "it has left the world"), std::pair("dead", "it was declared dead")}) {
    put("a.json", dump_of_life(1, "a",
                               made("b", "f", 12) + ", " +
                                   members(R"(["b", 1, 1, ")" + std::string(life) + "\"]"),
                               100));
    const std::string out = run().out;
    EXPECT_TRUE(
        out.starts_with("worker \"a\" waits for worker \"b\": call f() since 12.0 s; "
                        "worker \"b\" has written no dump: " +
                        std::string(why) + "\n"))
        << out;
    EXPECT_TRUE(contains(out, "\n  \"b\" has written no dump: " + std::string(why) + "\n")) << out;
  }
}

TEST_F(Diagnose, SaysThatNothingWaits) {
  put("a.json", dump("a", ""));
  EXPECT_TRUE(run().out.starts_with("no worker waits for another\n"));
}

TEST_F(Diagnose, DrawsThePicture) {
  put("a.json", dump("a", made("b\\\"]; x", "f", 12.1)));
  EXPECT_EQ(run().status, 0);
  std::ifstream in(folder_.path() / "waits.dot");
  const std::string dot((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  EXPECT_TRUE(contains(dot, "\"a\" -> \"b\\\"")) << dot;
  EXPECT_TRUE(contains(dot, "f()\\n12.1 s")) << dot;
}

TEST_F(Diagnose, LeavesOutFilesThatCannotBeReadAndSaysWhy) {
  put("good.json", dump("a", made("b", "f", 1)));
  put("empty.json", "");
  put("half.json", dump("c", made("b", "f", 1)).substr(0, 90));
  put("deep.json", std::string(100'000, '['));
  put("list.json", "[]");
  put("future.json", R"({"stitch_dump": 9})");
  put("nameless.json", R"({"stitch_dump": 1})");
  put("row.json", dump("d", R"({"name": "t", "columns": ["x"], "rows": [[1, 2]]})"));
  const auto result = run();
  EXPECT_EQ(result.status, 0);
  for (const char* line :
       {"\"empty.json\": [json.exception.parse_error.101]",
        "\"half.json\": [json.exception.parse_error.101]",
        "\"deep.json\": values are nested too deeply", "\"list.json\": it is no dump of stitch",
        "\"future.json\": it is of version 9 of dumps, and this program reads version 1",
        "\"nameless.json\": \"name\" is missing or is no text",
        "\"row.json\": a row of table \"t\" does not fit its columns"})
    EXPECT_TRUE(contains(result.out, line)) << line << " is not in\n" << result.out;
}

TEST_F(Diagnose, RefusesAFolderWithoutDumps) {
  const auto result = run();
  EXPECT_EQ(result.status, 125);
  EXPECT_EQ(result.err, "stitch-run: there is no dump in \"" + folder_.path().string() + "\"\n");
  RunningCommand missing({STITCH_RUN, "--diagnose", "/no/such/folder"});
  EXPECT_EQ(missing.wait(), 125);
  EXPECT_TRUE(missing.err().starts_with("stitch-run: \"/no/such/folder\" is not a folder"));
  RunningCommand nothing({STITCH_RUN, "--diagnose"});
  EXPECT_EQ(nothing.wait(), 2);
  EXPECT_EQ(nothing.err(), "stitch-run: --diagnose needs the folder that the dumps are in\n");
}

// Of another user, who has planted links to a file of this one's, and text for a shell.
TEST_F(Diagnose, APlantedFolderIsRefusedAndALinkInItIsNotFollowed) {
  const auto victim = folder_.path() / "profile";
  put("profile", "mine");
  put("a.json", dump("$(touch pwned)", made("b`touch pwned`", "f;\\ntouch pwned", 12.1)));
  ASSERT_EQ(::chmod(folder_.path().c_str(), 0777), 0);
  const auto refused = run();
  EXPECT_NE(refused.status, 0);
  EXPECT_TRUE(contains(refused.err, "cannot be believed: other users may write in it"))
      << refused.err;
  ASSERT_EQ(::chmod(folder_.path().c_str(), 0700), 0);
  for (const char* name : {"waits.dot", "waits.svg"})
    std::filesystem::create_symlink(victim, folder_.path() / name);
  EXPECT_EQ(run().status, 0);
  std::ifstream in(victim);
  EXPECT_EQ(std::string((std::istreambuf_iterator<char>(in)), {}), "mine");
  EXPECT_TRUE(std::filesystem::is_regular_file(
      std::filesystem::symlink_status(folder_.path() / "waits.dot")));
}

TEST_F(Diagnose, PrintsNoControlCharactersOfADump) {
  put("a.json", dump("a", made("b", R"(f\u001b[2J\u009b)", 1)));
  const auto result = run();
  EXPECT_EQ(result.out.find('\x1b'), std::string::npos);
  EXPECT_TRUE(contains(result.out,
                       "call f?[2J?"
                       "?() since"))
      << result.out;
}

// A chain that leads back to itself ends.
TEST_F(Diagnose, EndsOnDumpsThatReferToThemselves) {
  const std::string served =
      R"(, {"name": "calls served", "columns": ["caller", "call", "function", "stage",)"
      R"( "running for", "thread", "object"], "rows": [["a", 7, "f", "awaiting", 1, 0, ""]]})";
  const std::string under =
      R"({"name": "calls made", "columns": ["call", "function", "to", "age", "under caller",)"
      R"( "under call"], "rows": [[7, "f", "a", 5, "a", 7], [8, "f", "a", 5, null, null]]})";
  put("a.json", dump("a", under + served));
  EXPECT_EQ(run().status, 0);
  put("a.json", dump("a", made("a", "f", 5) + served + "," + under));
  EXPECT_EQ(run().status, 0);
}

}  // namespace
}  // namespace diagnose_test
