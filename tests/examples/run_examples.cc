// The examples, as a user runs them.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/support/running_command.h"

namespace {

using stitch::testing::RunningCommand;

std::string run(std::vector<std::string> command, int expected_status = 0) {
  RunningCommand running(command, std::chrono::seconds(170));
  EXPECT_EQ(running.wait(), expected_status) << running.out() << running.err();
  if (expected_status == 0) {
    EXPECT_EQ(running.err(), "");
  }
  return running.out() + running.err();
}

std::string example(const std::string& name) { return std::string(EXAMPLES) + "/" + name; }
bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Examples, HelloRpcPrintsASum) {
  const auto text = run({STITCH_RUN, "-n", "2", example("hello_rpc")});
  EXPECT_TRUE(contains(text, "[worker0]  2")) << text;
}

TEST(Examples, HelloRpcRunsUnderMpirun) {
  EXPECT_TRUE(contains(
      run({"mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", example("hello_rpc")}),
      " 2\n 2"));
}

TEST(Examples, RrefCounterRuns) { run({STITCH_RUN, "-n", "3", example("rref_counter")}); }

TEST(Examples, TwoWorkerAutogradLowersItsLoss) {
  const auto text = run({STITCH_RUN, "-n", "2", example("two_worker_autograd")});
  EXPECT_TRUE(contains(text, "step 20  loss 0.0")) << text;
}

TEST(Examples, TheParameterServerExplainsItself) {
  EXPECT_TRUE(contains(run({example("parameter_server"), "--help"}), "--optimizer NAME"));
  EXPECT_TRUE(contains(
      run({example("parameter_server"), "--optimizer", "adm"}, 1),
      "parameter_server: --optimizer is \"adm\"; known are sgd, adam, adamw, adagrad, rmsprop"));
  EXPECT_TRUE(contains(run({example("parameter_server"), "--epochs", "none"}, 1),
                       "--epochs is \"none\"; it takes a number from 1 on"));
}

TEST(Examples, TheParameterServerNamesAMissingDataFile) {
  const auto text =
      run({STITCH_RUN, "-n", "2", example("parameter_server"), "--data", "/nowhere"}, 1);
  EXPECT_TRUE(contains(text, "/nowhere/t10k-images-idx3-ubyte.gz")) << text;
}

}  // namespace
