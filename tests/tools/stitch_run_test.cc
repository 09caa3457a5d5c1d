// Each promise of stitch-run, which runs as a user runs it, on small shell programs.
#include <signal.h>

#include "tests/support/plain_test.h"
#include "tests/support/running_command.h"

namespace stitch_run_test {
namespace {

using std::chrono::steady_clock;
using namespace stitch::testing;

std::vector<std::string> shell(std::vector<std::string> options, const std::string& script) {
  options.insert(options.begin(), STITCH_RUN);
  options.insert(options.end(), {"sh", "-c", script});
  return options;
}

std::vector<std::string> sorted_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  std::ranges::sort(lines);
  return lines;
}

// With a folder to which the scripts of a test write process ids.
class StitchRun : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_.path() / name; }

  // Waits until a script has written a process id to that file, and returns it.
  pid_t noted_pid(const std::string& name) const {
    pid_t pid = -1;
    EXPECT_TRUE(eventually([&] {
      std::ifstream file(path(name));
      return file >> pid && file.get() == '\n';
    })) << name
        << " was not written";
    return pid;
  }

 private:
  const TemporaryFolder folder_;
};

TEST_F(StitchRun, SetsRankAndNameOfEachProcess) {
  const auto result = run_command(
      shell({"-n", "3"},
            "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $STITCH_NAME"));
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(sorted_lines(result.out),
            (std::vector<std::string>{"[worker0] 0 0 3 3 127.0.0.1 worker0",
                                      "[worker1] 1 1 3 3 127.0.0.1 worker1",
                                      "[worker2] 2 2 3 3 127.0.0.1 worker2"}));
}

TEST_F(StitchRun, RemovesTheRendezvousFileAtTheEnd) {
  const auto result =
      run_command(shell({"-n", "1", "--no-prefix"},
                        "echo ${STITCH_INIT_METHOD#file://}; touch ${STITCH_INIT_METHOD#file://}"));
  ASSERT_EQ(result.status, 0) << result.err;
  const std::filesystem::path file = result.out.substr(0, result.out.find('\n'));
  EXPECT_TRUE(file.is_absolute());
  EXPECT_FALSE(std::filesystem::exists(file.parent_path())) << file;
}

TEST_F(StitchRun, GivesAllProcessesTheSamePort) {
  const auto result = run_command(shell({"-n", "2", "--no-prefix"}, "echo $MASTER_PORT"));
  const auto lines = sorted_lines(result.out);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0], lines[1]);
  EXPECT_GT(std::stoi(lines[0]), 0);
}

TEST_F(StitchRun, HidesTheVariablesOfOtherLaunchers) {
  const auto result =
      run_command({"env", "SLURM_PROCID=7", "OMPI_COMM_WORLD_RANK=7", "RANK=7", STITCH_RUN, "-n",
                   "1", "sh", "-c", "echo \"$SLURM_PROCID|$OMPI_COMM_WORLD_RANK|$RANK\""});
  EXPECT_EQ(result.out, "[worker0] ||0\n");
}

TEST_F(StitchRun, MakesASecretAndANameForEachRun) {
  const auto run_with = [&](std::vector<std::string> command) {
    command.insert(command.end(), {STITCH_RUN, "-n", "2", "--no-prefix", "sh", "-c",
                                   "echo \"$STITCH_JOB\"; echo \"${STITCH_SECRET-}\"; "
                                   "test -z \"${STITCH_SECRET_FILE-}\" || echo \"$(cat "
                                   "$STITCH_SECRET_FILE) $(stat -c %a $STITCH_SECRET_FILE)\""});
    const auto result = run_command(command);
    EXPECT_EQ(result.status, 0) << result.err;
    return sorted_lines(result.out);
  };
  const std::vector<std::string> alone{"env", "-u", "STITCH_SECRET", "-u", "STITCH_SECRET_FILE"};
  const auto one = run_with(alone);
  const auto other = run_with(alone);
  ASSERT_EQ(one.size(), 6U);
  EXPECT_EQ(one[2], one[3]);  // the job; before them the two that are no secrets
  EXPECT_NE(one[2], other[2]);
  EXPECT_EQ(one[4], one[5]);
  EXPECT_NE(one[4], other[4]);
  EXPECT_TRUE(one[4].starts_with("stitch-random:")) << one[4];
  EXPECT_EQ(one[4].size(), std::string("stitch-random:").size() + 64 + 4);
  EXPECT_TRUE(one[4].ends_with(" 600")) << one[4];
  // The user's own.
  const auto given = run_with({"env", "-u", "STITCH_SECRET_FILE", "STITCH_SECRET=mine"});
  EXPECT_EQ(given.size(), 4U);
  EXPECT_EQ(std::ranges::count(given, "mine"), 2);
}

TEST_F(StitchRun, DividesTheProcessorsUnlessOmpNumThreadsIsSet) {
  EXPECT_EQ(run_command(shell({"-n", "100"}, "exit 0")).status, 0);
  EXPECT_EQ(run_command({"env", "-u", "OMP_NUM_THREADS", STITCH_RUN, "-n", "64", "sh", "-c",
                         "test $OMP_NUM_THREADS -ge 1"})
                .status,
            0);
  EXPECT_EQ(run_command({"env", "OMP_NUM_THREADS=5", STITCH_RUN, "-n", "1", "sh", "-c",
                         "echo $OMP_NUM_THREADS"})
                .out,
            "[worker0] 5\n");
}

TEST_F(StitchRun, LetsOpenMpWaitInTheKernelWhereProcessesShareAHost) {
  const auto policies = [](const std::string& set, const std::string& processes) {
    const auto result =
        run_command({"env", "-u", "OMP_WAIT_POLICY", set, STITCH_RUN, "--no-prefix", "-n",
                     processes, "sh", "-c", "echo \"${OMP_WAIT_POLICY-none}\""});
    return result.out;
  };
  EXPECT_EQ(policies("A=1", "2"), "passive\npassive\n");
  EXPECT_EQ(policies("A=1", "1"), "none\n");
  EXPECT_EQ(policies("OMP_WAIT_POLICY=active", "2"), "active\nactive\n");
}

TEST_F(StitchRun, NamesWorkersAsTold) {
  const auto result = run_command(shell({"-n", "2", "--name", "ps"}, "echo $STITCH_NAME"));
  EXPECT_EQ(sorted_lines(result.out), (std::vector<std::string>{"[ps0] ps0", "[ps1] ps1"}));
}

TEST_F(StitchRun, KeepsStderrSeparate) {
  const auto result = run_command(shell({"-n", "1"}, "echo out; echo err >&2"));
  EXPECT_EQ(result.out, "[worker0] out\n");
  EXPECT_EQ(result.err, "[worker0] err\n");
}

TEST_F(StitchRun, PassesArgumentsAndAnEmptyStdin) {
  const auto result = run_command({STITCH_RUN, "-n", "1", "--", "sh", "-c",
                                   "cat; printf '<%s>' \"$@\"", "name", "-n", "two words"});
  EXPECT_EQ(result.out, "[worker0] <-n><two words>\n");
}

TEST_F(StitchRun, StopsTheOthersWhenOneFailsAndSaysItLast) {
  const auto start = steady_clock::now();
  const auto result =
      run_command(shell({"-n", "3"},
                        "if [ $RANK = 1 ]; then echo first >&2; echo second >&2; exit 3; "
                        "fi; echo $$; exec sleep 60"));
  EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(20));
  EXPECT_EQ(result.status, 3);
  EXPECT_TRUE(result.err.ends_with("stitch-run: worker1 exited with status 3\n")) << result.err;
  const auto first = result.err.find("[worker1] first\n[worker1] second\n");
  EXPECT_NE(first, std::string::npos) << result.err;
  EXPECT_EQ(result.err.find("second", first + 30), std::string::npos) << "each line once";
}

TEST_F(StitchRun, ReportsASignalAsAShellDoes) {
  const auto result =
      run_command(shell({"-n", "2"}, "[ $RANK = 0 ] && kill -KILL $$; exec sleep 60"));
  EXPECT_EQ(result.status, 128 + SIGKILL);
  EXPECT_TRUE(result.err.ends_with("stitch-run: worker0 was killed by signal 9 (Killed)\n"))
      << result.err;
}

TEST_F(StitchRun, KillsProcessesThatIgnoreSigterm) {
  const auto result = run_command(shell(
      {"-n", "2", "--grace", "0.3"},
      "[ $RANK = 0 ] || trap '' TERM; echo $$ > " + path("pid") + ".$RANK; while [ ! -s " +
          path("pid") +
          ".1 ]; do sleep 0.01; done; [ $RANK = 0 ] && exit 4; while :; do sleep 0.05; done"));
  EXPECT_EQ(result.status, 4) << result.err;
  EXPECT_TRUE(gone(noted_pid("pid.1")));
}

TEST_F(StitchRun, LeavesNoGrandchildrenBehind) {
  const auto result = run_command(shell({"-n", "2"}, "sleep 1000 & echo $! > " + path("plain") +
                                                         ".$RANK; setsid sleep 1000 & echo $! > " +
                                                         path("own") + ".$RANK; exit 0"));
  EXPECT_EQ(result.status, 0) << result.err;
  for (const char* name : {"plain.0", "plain.1", "own.0", "own.1"})
    EXPECT_TRUE(gone(noted_pid(name))) << name;
}

TEST_F(StitchRun, LeavesNothingBehindWhenKilled) {
  RunningCommand running(shell({"-n", "2"}, "sleep 1000 & echo $! > " + path("sleep") +
                                                ".$RANK; echo $$ > " + path("shell") +
                                                ".$RANK; echo ${STITCH_INIT_METHOD#file://} > " +
                                                path("store") + "; wait"));
  std::vector<pid_t> pids;
  for (const char* name : {"sleep.0", "sleep.1", "shell.0", "shell.1"})
    pids.push_back(noted_pid(name));
  running.send_signal(SIGKILL);
  EXPECT_EQ(running.wait(), 128 + SIGKILL);
  for (pid_t pid : pids) EXPECT_TRUE(gone(pid));
  std::string store;
  std::ifstream(path("store")) >> store;
  const auto folder = std::filesystem::path(store).parent_path();
  EXPECT_TRUE(eventually([&] { return !std::filesystem::exists(folder); })) << folder;
}

TEST_F(StitchRun, LeavesNothingBehindWhenKilledByAChild) {
  // As early as possible: the launcher is still starting the program.
  for (int round = 0; round < 20; ++round) {
    const auto result = run_command(
        shell({"-n", "1"}, "sleep 1000 & echo $! > " + path("sleep") + "; kill -KILL $PPID; wait"));
    EXPECT_EQ(result.status, 128 + SIGKILL);
    EXPECT_TRUE(gone(noted_pid("sleep")));
    std::filesystem::remove(path("sleep"));
  }
}

TEST_F(StitchRun, ContinuesWithoutItsGuardian) {
  const auto result = run_command(shell(
      {"-n", "2"},
      // It may not have its name yet.
      "[ $RANK = 1 ] || for try in $(seq 500); do "
      "for child in $(cat /proc/$PPID/task/$PPID/children); do "
      "grep -q guardian /proc/$child/comm && kill -KILL $child && echo killed && exit 0; done; "
      "sleep 0.01; done; exit 0"));
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.out, "[worker0] killed\n");
}

TEST_F(StitchRun, ForwardsAnInterrupt) {
  RunningCommand running(shell({"-n", "2"}, "trap 'echo interrupted; exit 0' INT; echo $$ > " +
                                                path("ready") +
                                                ".$RANK; while :; do sleep 0.02; done"));
  noted_pid("ready.0");
  noted_pid("ready.1");
  running.send_signal(SIGINT);
  EXPECT_EQ(running.wait(), 128 + SIGINT);
  EXPECT_EQ(sorted_lines(running.out()),
            (std::vector<std::string>{"[worker0] interrupted", "[worker1] interrupted"}));
  EXPECT_EQ(running.err(), "stitch-run: stopped by Ctrl-C\n");
}

TEST_F(StitchRun, KillsAtTheSecondInterrupt) {
  RunningCommand running(shell({"-n", "1", "--grace", "1000"},
                               "trap 'echo $$ > " + path("asked") + "' TERM; echo $$ > " +
                                   path("ready") + "; while :; do sleep 0.02; done"));
  const pid_t pid = noted_pid("ready");
  running.send_signal(SIGTERM);
  noted_pid("asked");
  running.send_signal(SIGTERM);
  EXPECT_EQ(running.wait(), 128 + SIGTERM);
  EXPECT_TRUE(gone(pid));
}

// pkill -USR1 -f ./app asks all workers for dumps, and matches stitch-run's command line, too.
TEST_F(StitchRun, GoesOnWhenItGetsTheSignalForDumpsAndLeavesItToTheWorkers) {
  RunningCommand running(shell({"-n", "2"}, "trap 'touch " + path("asked") +
                                                ".$RANK' USR1; echo $$ > " + path("ready") +
                                                ".$RANK; while [ ! -e " + path("asked") +
                                                ".$RANK ]; do sleep 0.02; done; echo asked"));
  const std::vector<pid_t> workers{noted_pid("ready.0"), noted_pid("ready.1")};
  running.send_signal(SIGUSR1);
  for (pid_t worker : workers) ::kill(worker, SIGUSR1);
  EXPECT_EQ(running.wait(), 0);
  EXPECT_EQ(sorted_lines(running.out()),
            (std::vector<std::string>{"[worker0] asked", "[worker1] asked"}));
  EXPECT_EQ(running.err(), "");
}

TEST_F(StitchRun, StopsAfterTheTimeLimit) {
  const auto result =
      run_command(shell({"-n", "2", "--timeout", "0.2"}, "[ $RANK = 1 ] && exit 0; exec sleep 60"));
  EXPECT_EQ(result.status, 124);
  EXPECT_EQ(result.err,
            "stitch-run: stopped after 0.2 s (--timeout); still running were: worker0\n");
}

TEST_F(StitchRun, StartsAFailedWorkerAgainAsOftenAsTold) {
  // worker1 fails twice and then ends well; worker0 goes on meanwhile.
  const auto result = run_command(
      shell({"-n", "2", "--restarts", "2"},
            "echo start $RANK $STITCH_NAME >&2; if [ $RANK = 1 ]; then echo x >> " + path("tries") +
                "; [ $(wc -l < " + path("tries") + ") -ge 3 ] && touch " + path("good") +
                " && exit 0; " + "[ $(wc -l < " + path("tries") +
                ") = 1 ] && kill -9 $$; exit 3; fi; " + "for i in $(seq 200); do [ -e " +
                path("good") + " ] && exit 0; sleep 0.05; done; exit 9"));
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(sorted_lines(result.err),
            (std::vector<std::string>{
                "[worker0] start 0 worker0", "[worker1] start 1 worker1",
                "[worker1] start 1 worker1", "[worker1] start 1 worker1",
                "stitch-run: worker1 exited with status 3; restarted (2 of 2)",
                "stitch-run: worker1 was killed by signal 9 (Killed); restarted (1 of 2)"}));
}

TEST_F(StitchRun, GivesUpAWorkerThatFailsTooOften) {
  const auto result =
      run_command(shell({"-n", "2", "--restarts", "1"}, "[ $RANK = 0 ] && sleep 20; exit 7"));
  EXPECT_EQ(result.status, 7) << result.err;
  EXPECT_TRUE(contains(result.err, "stitch-run: worker1 exited with status 7; restarted (1 of 1)"))
      << result.err;
  EXPECT_TRUE(contains(result.err, "stitch-run: worker1 exited with status 7\n")) << result.err;
}

TEST_F(StitchRun, DoesNotStartAWorkerAgainWhoseWorldIsOver) {
  const auto result = run_command(
      shell({"-n", "2", "--restarts", "5"}, "[ $RANK = 0 ] && exit 0; sleep 0.5; exit 4"));
  EXPECT_EQ(result.status, 4) << result.err;
  EXPECT_FALSE(contains(result.err, "restarted")) << result.err;
}

TEST_F(StitchRun, SaysThatAWorldIsElastic) {
  const auto result = run_command(shell({"--min-workers", "2", "--max-workers", "3"},
                                        "echo $RANK $STITCH_WORLD_SIZE $WORLD_SIZE"));
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(
      sorted_lines(result.out),
      (std::vector<std::string>{"[worker0] 0 2:3 3", "[worker1] 1 2:3 3", "[worker2] 2 2:3 3"}));
}

TEST_F(StitchRun, AnElasticWorldGoesOnWhileEnoughWorkersAreThere) {
  const auto goes_on =
      run_command(shell({"-n", "3", "--min-workers", "2"}, "[ $RANK = 2 ] && exit 5; sleep 0.5"));
  EXPECT_EQ(goes_on.status, 0) << goes_on.err;
  EXPECT_TRUE(contains(goes_on.err, "stitch-run: worker2 exited with status 5; the others go on"))
      << goes_on.err;
  const auto too_few =
      run_command(shell({"-n", "3", "--min-workers", "3"}, "[ $RANK = 2 ] && exit 5; sleep 20"));
  EXPECT_EQ(too_few.status, 5) << too_few.err;
}

// A script that fails once the other two, which end well, have ended.
std::string fails_last(const std::string& pids, int last) {
  return "echo $$ > " + pids + ".$RANK; [ $RANK = " + std::to_string(last) +
         " ] || exit 0; for i in 0 1 2; do [ $i = $RANK ] && continue; until [ -s " + pids +
         ".$i ]; do sleep 0.01; done; until grep -q '^State:.Z' /proc/$(cat " + pids +
         ".$i)/status; do sleep 0.01; done; done; exit 5";
}

TEST_F(StitchRun, AWorkerThatFailsAfterAllOthersHaveEndedWellFailsTheRun) {
  for (const auto& sizes : {std::vector<std::string>{"-n", "3", "--min-workers", "2"},
                            std::vector<std::string>{"--max-workers", "3"}}) {
    const std::string pids = path("pid" + sizes.back());
    const auto result = run_command(shell(sizes, fails_last(pids, 2)));
    EXPECT_EQ(result.status, 5) << result.err;
    EXPECT_EQ(result.err, "stitch-run: worker2 exited with status 5\n");
  }
}

TEST_F(StitchRun, ExplainsAWrongCommandLine) {
  const auto refused = [](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), STITCH_RUN);
    const auto result = run_command(arguments);
    EXPECT_EQ(result.status, 2);
    EXPECT_EQ(result.out, "");
    return result.err;
  };
  EXPECT_EQ(
      refused({"./app"}),
      "stitch-run: -n is missing: say how many processes to start, as in stitch-run -n 4 ./app\n");
  EXPECT_EQ(refused({"-n", "2"}),
            "stitch-run: the program is missing, as in stitch-run -n 2 ./app\n");
  EXPECT_EQ(refused({"-n"}), "stitch-run: -n needs a value\n");
  EXPECT_EQ(refused({"-n", "two", "x"}),
            "stitch-run: -n is \"two\"; it takes a number of processes from 1 to 1000\n");
  EXPECT_EQ(refused({"-n", "0", "x"}),
            "stitch-run: -n is \"0\"; it takes a number of processes from 1 to 1000\n");
  EXPECT_EQ(refused({"-n", "100000", "x"}),
            "stitch-run: -n is 100000; one host runs at most 1000 processes\n");
  EXPECT_EQ(refused({"--timeout=soon", "x"}),
            "stitch-run: --timeout is \"soon\"; it takes a number of seconds\n");
  EXPECT_EQ(refused({"--no-prefx", "x"}),
            "stitch-run: unknown option \"--no-prefx\"; did you mean \"--no-prefix\"? (stitch-run "
            "--help lists the options)\n");
  EXPECT_EQ(refused({"--nproc", "2"}),
            "stitch-run: unknown option \"--nproc\"; did you mean \"-n\"? (stitch-run --help lists "
            "the options)\n");
  EXPECT_EQ(refused({"--chek"}),
            "stitch-run: unknown option \"--chek\" (stitch-run --help lists the options)\n");
}

TEST_F(StitchRun, ReportsAMissingProgram) {
  const auto result = run_command({STITCH_RUN, "-n", "2", "./no-such-program"});
  EXPECT_EQ(result.status, 127);
  EXPECT_EQ(result.err,
            "stitch-run: cannot start \"./no-such-program\": No such file or directory\n");
}

TEST_F(StitchRun, PrintsHelpAndVersion) {
  const auto help = run_command({STITCH_RUN, "--help"});
  EXPECT_EQ(help.status, 0);
  for (const char* word : {"-n N", "--name", "--timeout", "--no-prefix", "MASTER_PORT",
                           "STITCH_INIT_METHOD", "OMP_NUM_THREADS"}) {
    EXPECT_TRUE(contains(help.out, word)) << word;
  }
  EXPECT_TRUE(run_command({STITCH_RUN, "--version"}).out.starts_with("stitch-run "));
}

}  // namespace
}  // namespace stitch_run_test
