// What stitch-bench guarantees on any machine under any load: each measure ends and prints numbers,
// and no process is left. The numbers themselves are not tested.
#include <signal.h>
#include <unistd.h>

#include <cmath>

#include "tests/support/plain_test.h"
#include "tests/support/running_command.h"

namespace stitch_bench_test {
namespace {

using namespace stitch::testing;

// The shortest run of a measure.
const std::vector<std::string> kSmallest{"--rounds=1", "--seconds=0.02", "--sizes=1,2",
                                         "--load-size=4"};

std::vector<std::string> bench(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), STITCH_BENCH);
  return arguments;
}

std::map<std::string, std::pair<double, std::string>> results(const std::string& output) {
  std::map<std::string, std::pair<double, std::string>> found;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string word, key, unit;
    double value = 0;
    if (words >> word >> key >> value >> unit && word == "RESULT") found[key] = {value, unit};
  }
  return found;
}

// Differences of two numbers that may be equal.
bool may_be_negative(const std::string& key) {
  return key.ends_with(".slowdown") || key.ends_with("_above_libtorch") ||
         key.starts_with("allocs.");
}

void expect_positive_numbers(const std::string& output) {
  for (const auto& [key, result] : results(output)) {
    EXPECT_TRUE(std::isfinite(result.first)) << key;
    if (!may_be_negative(key)) {
      EXPECT_GT(result.first, 0) << key;
    }
    EXPECT_FALSE(result.second.empty()) << key;
  }
}

std::set<std::string> names_of_measures() {
  RunningCommand list(bench({"--list"}));
  EXPECT_EQ(list.wait(), 0);
  std::set<std::string> names;
  std::istringstream lines(list.out());
  for (std::string line; std::getline(lines, line);) names.insert(line.substr(0, line.find(' ')));
  return names;
}

std::vector<pid_t> children_of(pid_t parent) {
  std::ifstream list("/proc/" + std::to_string(parent) + "/task/" + std::to_string(parent) +
                     "/children");
  std::vector<pid_t> children;
  for (pid_t child = 0; list >> child;) children.push_back(child);
  return children;
}

// A measure that takes minutes; constructed once both of its processes run.
struct LongMeasure {
  LongMeasure() : command(bench({"latency", "--no-floors", "--seconds=60"}), 60s) {
    static_cast<void>(eventually(
        [this] {
          children = children_of(command.pid());
          return children.size() >= 2;
        },
        30s));
  }
  RunningCommand command;
  std::vector<pid_t> children;
};

TEST(StitchBench, EveryMeasureEndsAndPrintsPositiveNumbers) {
  auto arguments = bench(kSmallest);
  arguments.insert(arguments.end(), {"--all", "--result-lines"});
  RunningCommand command(arguments, 500s);
  EXPECT_EQ(command.wait(), 0) << command.err();
  expect_positive_numbers(command.out());
  const auto found = results(command.out());
  for (const std::string name : {"latency", "rate", "bandwidth", "beside_bulk", "idle", "steal",
                                 "autograd", "step", "rref", "allocs"}) {
    EXPECT_TRUE(names_of_measures().contains(name)) << name;
    for (const std::string path : {"same_host", "tcp"}) {
      const auto first = found.lower_bound(name + "." + path + ".");
      EXPECT_TRUE(first != found.end() && first->first.starts_with(name + "." + path + "."))
          << "nothing from " << name << " over " << path;
    }
  }
  for (const std::string floor :
       {"floor.tcp.rtt64.p50", "floor.unix.rtt64.p50", "floor.memcpy.1MiB", "rows.adagrad.bfloat16",
        "saving.same_host.checkpoint", "floor.tensorpipe.shm.rtt64.p50",
        "floor.tensorpipe.uv.calls.256", "floor.tensorpipe.shm.one_way",
        "floor.tensorpipe.uv.echo.2MiB"}) {
    EXPECT_TRUE(found.contains(floor)) << floor;
  }
}

TEST(StitchBench, MeasuresOnBusyHosts) {
  auto arguments = bench(kSmallest);
  arguments.insert(arguments.end(),
                   {"contention", "--busy=2,torch", "--no-floors", "--result-lines"});
  RunningCommand command(arguments, 500s);
  EXPECT_EQ(command.wait(), 0) << command.err();
  expect_positive_numbers(command.out());
  const auto found = results(command.out());
  for (const std::string prefix : {"busy-2.", "busy-torch."}) {
    for (const std::string key : {"latency.tcp.empty.pool.p50", "rate.tcp.empty.pool.window.1",
                                  "rref.same_host.remote_to_here.p99"})
      EXPECT_TRUE(found.contains(prefix + key)) << prefix + key;
  }
}

TEST(StitchBench, ItsProcessesEndWithIt) {
  for (const int signal : {SIGINT, SIGKILL}) {
    LongMeasure measure;
    ASSERT_EQ(measure.children.size(), 2u);
    measure.command.send_signal(signal);
    EXPECT_EQ(measure.command.wait(), 128 + signal);
    for (const pid_t child : measure.children) EXPECT_TRUE(gone(child));
  }
}

TEST(StitchBench, AMeasureWhoseProcessDiesFailsAndTheNextRuns) {
  LongMeasure measure;
  ASSERT_EQ(measure.children.size(), 2u);
  ::kill(measure.children[1], SIGKILL);
  for (const pid_t child : measure.children) EXPECT_TRUE(gone(child));
  EXPECT_TRUE(eventually([&] { return children_of(measure.command.pid()).size() == 2; }, 30s));
  measure.command.send_signal(SIGTERM);
  EXPECT_EQ(measure.command.wait(), 128 + SIGTERM);
  EXPECT_TRUE(
      contains(measure.command.err(), "latency same_host: process 1 was killed by signal 9"))
      << measure.command.err();
}

TEST(StitchBench, AFailureIsNamedAndCounts) {
  auto arguments = bench(kSmallest);
  arguments.insert(arguments.end(),
                   {"latency", "--no-floors", "--result-lines", "--tcp-transport=carrier-pigeon"});
  RunningCommand command(arguments, 60s);
  EXPECT_EQ(command.wait(), 1);
  EXPECT_TRUE(contains(command.err(), "carrier-pigeon")) << command.err();
  EXPECT_TRUE(results(command.out()).contains("latency.same_host.empty.pool.p50")) << command.out();
}

TEST(StitchBench, RefusesWhatItDoesNotKnow) {
  for (const auto& [arguments, word] :
       std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"latencies"}, "known are: "},
           {{"--round", "3"}, "--round"},
           {{"--rounds", "0"}, "--rounds"},
           {{"--seconds", "x"}, "--seconds"},
           {{"--busy", "2,very"}, "very"}}) {
    RunningCommand command(bench(arguments));
    EXPECT_EQ(command.wait(), 2);
    EXPECT_TRUE(contains(command.err(), word)) << command.err();
  }
}

// bench/compare; the frameworks that it compares with are rarely installed where tests run.
TEST(Compare, ExplainsItselfAndWhatIsMissing) {
  RunningCommand help({COMPARE, "--help"});
  const int status = help.wait();
  if (status == 127) GTEST_SKIP() << "there is no python3";
  EXPECT_EQ(status, 0) << help.err();
  EXPECT_TRUE(contains(help.out(), "--peers")) << help.out();

  RunningCommand nowhere({COMPARE, "--peers", "/nowhere/at/all"});
  EXPECT_EQ(nowhere.wait(), 2);
  EXPECT_TRUE(contains(nowhere.err(), "/nowhere/at/all")) << nowhere.err();

  RunningCommand list({COMPARE, "--list", "--peers", ::testing::TempDir()});
  EXPECT_EQ(list.wait(), 0) << list.err();
  EXPECT_TRUE(contains(list.out(), "gRPC: e_grpc.cpp is not in ")) << list.out();
}

}  // namespace
}  // namespace stitch_bench_test
