// The examples, as a user runs them.

#include "tests/support/plain_test.h"
#include "tests/support/running_command.h"
#include "tests/support/temporary_folder.h"

namespace {

using namespace stitch::testing;

std::string run(std::vector<std::string> command, int expected_status = 0) {
  RunningCommand running(command, std::chrono::seconds(170));
  EXPECT_EQ(running.wait(), expected_status) << running.out() << running.err();
  if (expected_status == 0) {
    EXPECT_EQ(running.err(), "");
  }
  return running.out() + running.err();
}

std::string example(const std::string& name) { return std::string(EXAMPLES) + "/" + name; }

TEST(Examples, HelloRpcPrintsASum) {
  const auto text = run({STITCH_RUN, "-n", "2", example("hello_rpc")});
  EXPECT_TRUE(contains(text, "[worker0]  2")) << text;
}

TEST(Examples, ErrorsAndDeadlinesPrintsWhatACallerSees) {
  const auto text = run({STITCH_RUN, "-n", "2", example("errors_and_deadlines")});
  EXPECT_TRUE(contains(text,
                       "remote_exception: call square_root() to worker \"worker1\" (id 1) failed: "
                       "std::domain_error: square root of a negative number"))
      << text;
  EXPECT_TRUE(contains(
      text, "timeout: call ask_to_work() to worker \"worker1\" (id 1) timed out after 100"))
      << text;
  EXPECT_TRUE(contains(text, "cancelled: future was cancelled by its holder")) << text;
}

TEST(Examples, FuturesAndCoroutinesPrintsSquares) {
  const auto text = run({STITCH_RUN, "-n", "3", example("futures_and_coroutines")});
  EXPECT_TRUE(contains(text, "100 100 100 from 3 workers")) << text;
  EXPECT_TRUE(contains(text, "7 squared is 49")) << text;
  EXPECT_TRUE(contains(text, "sum of squares 5")) << text;
}

TEST(Examples, RrefCounterCountsOnEveryWorkerAndIsDestroyed) {
  const auto text = run({STITCH_RUN, "-n", "3", example("rref_counter")});
  EXPECT_TRUE(contains(text, "[worker0] counted to 300 on worker2")) << text;
  EXPECT_TRUE(contains(text, "[worker2] apple counter destroyed at 300")) << text;
}

TEST(Examples, HelloRpcSaysWhatHasFailed) {
  const TemporaryFolder folder;
  RunningCommand alone({"env", "STITCH_INIT_TIMEOUT=1s", "RANK=1", "WORLD_SIZE=2",
                        "STITCH_INIT_METHOD=file://" + (folder.path() / "store").string(),
                        example("hello_rpc")});
  EXPECT_EQ(alone.wait(), 1);
  EXPECT_TRUE(contains(alone.err(), "only these arrived: worker1")) << alone.err();
}

TEST(Examples, ModelServiceAnswersClientsThatComeBeforeItsModel) {
  const auto text = run({STITCH_RUN, "-n", "3", "--no-prefix", example("model_service")});
  for (const char* client : {"client1", "client2"})
    EXPECT_TRUE(contains(text, std::string(client) + ": sum of 8 rows is 224\n")) << text;
}

TEST(Examples, ShardedTableIsTrainedSavedAndLoaded) {
  const TemporaryFolder folder;
  const auto text = run({STITCH_RUN, "-n", "3", example("sharded_table"), folder.path()});
  EXPECT_TRUE(contains(text, "table of 3 shards: largest error below 0.1\n")) << text;
}

TEST(Examples, CpuPipelineTrainsInStages) {
  const auto text = run({STITCH_RUN, "-n", "3", example("cpu_pipeline")});
  EXPECT_TRUE(contains(text, "3 stages, 4 micro-batches: loss ")) << text;
  EXPECT_TRUE(contains(text, " after one step, less after 40\n")) << text;
}

TEST(Examples, LeavingWaitsForWhatIsInFlight) {
  const auto text = run({STITCH_RUN, "-n", "2", example("leaving")});
  EXPECT_TRUE(contains(text, "[worker0] notes received: 100")) << text;
  EXPECT_TRUE(contains(text, "[worker1] notes received: 100")) << text;
  EXPECT_TRUE(contains(
      text,
      "[worker1] shutting_down: there is no current worker: the one of this process has shut "
      "down"))
      << text;
}

TEST(Examples, ActorPoolSaysHowItIsCalled) {
  for (const auto& [argument, status] : {std::pair("--help", 0), std::pair("many", 2)}) {
    RunningCommand running({example("actor_pool"), argument}, std::chrono::seconds(30));
    EXPECT_EQ(running.wait(), status) << argument;
    EXPECT_TRUE(contains(running.err(), "usage: actor_pool [kills]")) << running.err();
  }
}

TEST(Examples, ActorPoolLearnsOnWhileCollectorsAreKilledAndComeBack) {
  const auto text = run({example("actor_pool"), "3"});
  for (const char* line :
       {"collector0 is dead after ", "collector1 is dead after ", "collector2 is dead after ",
        "collector0 joined, epoch 2", "collector1 joined, epoch 2", "collector2 joined, epoch 2",
        "3 collectors were killed and came back, the learner has learned all the time"})
    EXPECT_TRUE(contains(text, line)) << line << " is missing in:\n" << text;
}

TEST(Examples, TwoWorkerAutogradLowersItsLoss) {
  const auto text = run({STITCH_RUN, "-n", "2", example("two_worker_autograd")});
  EXPECT_TRUE(contains(text, "step 20  loss 0.0")) << text;
}

TEST(Examples, GradientPenaltyBringsTheNormOfAGradientToOne) {
  const auto text = run({STITCH_RUN, "-n", "2", example("gradient_penalty")});
  EXPECT_TRUE(contains(text, "step   0  penalty 0.")) << text;
  EXPECT_TRUE(contains(text, "step 100  penalty 0.00")) << text;
}

TEST(Examples, GraphPictureDrawsTheGraphOfThreeWorkers) {
  const TemporaryFolder folder;
  const std::string svg = folder.path() / "graph.svg";
  const auto text = run({STITCH_RUN, "-n", "3", example("graph_picture"), svg});
  if (contains(text, "dot is not installed")) GTEST_SKIP() << text;
  EXPECT_TRUE(contains(text, "drew " + svg)) << text;
  std::ifstream file(svg);
  const std::string picture(std::istreambuf_iterator<char>(file), {});
  for (const char* part : {"<svg", "worker0", "worker1", "worker2", "last pass", "Tanh"})
    EXPECT_TRUE(contains(picture, part)) << part;
}

TEST(Examples, GraphPictureSaysWhatIsMissingWithoutGraphviz) {
  const TemporaryFolder folder;
  const std::string svg = folder.path() / "graph.svg";
  const auto text =
      run({"/usr/bin/env", "PATH=/nowhere", STITCH_RUN, "-n", "3", example("graph_picture"), svg});
  EXPECT_TRUE(contains(text, "dot is not installed (Debian package graphviz); the graph is in "))
      << text;
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "graph.dot"));
}

TEST(Examples, TheParameterServerExplainsItself) {
  EXPECT_TRUE(contains(run({example("parameter_server"), "--help"}), "--optimizer NAME"));
  EXPECT_TRUE(contains(run({example("parameter_server"), "--resume"}, 1),
                       "parameter_server: --resume needs --checkpoint FOLDER"));
  EXPECT_TRUE(contains(
      run({example("parameter_server"), "--optimizer", "adm"}, 1),
      "parameter_server: --optimizer is \"adm\"; known are sgd, adam, adamw, adagrad, rmsprop"));
  EXPECT_TRUE(contains(run({example("parameter_server"), "--epochs", "none"}, 1),
                       "--epochs is \"none\"; it takes a number from 1 on"));
}

// What parameter_server prints for a small model, trained for 240 steps of one trainer.
std::string train(const TemporaryFolder& folder, const std::vector<std::string>& more,
                  const std::string& fault = "", int expected_status = 0) {
  std::vector<std::string> command{"env",
                                   "STITCH_FAULT=" + fault,
                                   STITCH_RUN,
                                   "-n",
                                   "2",
                                   "--no-prefix",
                                   example("parameter_server"),
                                   "--epochs",
                                   "1",
                                   "--hidden",
                                   "16",
                                   "--batch",
                                   "250",
                                   "--out",
                                   folder.path() / "loss.svg"};
  command.insert(command.end(), more.begin(), more.end());
  return run(command, expected_status);
}

double accuracy(const std::string& text) {
  const std::string before = "test accuracy ";
  const auto at = text.find(before);
  return at == std::string::npos ? 0 : std::stod(text.substr(at + before.size()));
}

bool has_images() { return std::filesystem::exists("/usr/share/datasets/fashion-mnist"); }

TEST(Examples, TheParameterServerTrainsAndPrintsItsAccuracy) {
  if (!has_images()) GTEST_SKIP() << "dataset-fashion-mnist is not installed";
  const TemporaryFolder folder;
  const auto text = train(folder, {"--optimizer", "sgd"});
  EXPECT_GT(accuracy(text), 50) << text;
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "loss.svg"));
}

TEST(Examples, AParameterServerThatIsKilledGoesOnFromItsCheckpoint) {
  if (!has_images()) GTEST_SKIP() << "dataset-fashion-mnist is not installed";
  const TemporaryFolder folder;
  const double undisturbed = accuracy(train(folder, {}));
  EXPECT_GT(undisturbed, 70);

  const std::string saved = folder.path() / "saved";
  const auto killed = train(folder, {"--checkpoint", saved}, "kill=ps@step150", 137);
  EXPECT_EQ(accuracy(killed), 0) << killed;
  const auto text = train(folder, {"--checkpoint", saved, "--resume"});
  EXPECT_TRUE(contains(text, "resumed at step 100\n")) << text;
  EXPECT_NEAR(accuracy(text), undisturbed, 0.5) << text;
}

TEST(Examples, GpuPipelineTrainsWithoutADevice) {
  const auto text =
      run({STITCH_RUN, "-n", "2", example("gpu_pipeline"), "--device", "cpu", "--steps", "15"});
  EXPECT_TRUE(contains(text, "stages on cpu and cpu: loss")) << text;
}

TEST(Examples, WithoutADeviceTheExamplesForDevicesSayThatThereIsNone) {
  EXPECT_TRUE(
      contains(run({example("gpu_pipeline")}, 1), "no device: libtorch sees no CUDA device here"));
  EXPECT_TRUE(contains(run({example("parameter_server"), "--device", "cuda"}, 1),
                       "no device: --device is \"cuda\", but libtorch sees no CUDA device here"));
}

}  // namespace
