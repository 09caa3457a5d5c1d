// Trains a classifier on Fashion-MNIST: worker 0 holds the parameters, the others train on them.
//   stitch-run -n 3 parameter_server --epochs 2 --checkpoint saved     (and later: --resume)
#include <stitch/stitch.h>

#include <cstdio>
#include <filesystem>
#include <map>

#include "support/command_line.h"
#include "support/fashion_mnist.h"
#include "support/loss_plot.h"
#include "support/progress_bar.h"
#include "training_server.h"

namespace {

using namespace std::chrono_literals;

// Shows the progress of training until all trainers have finished; throws the error of one that
// failed.
LossPlot watch(const ServerRef& server, stitch::Future<void> finished, const TrainingPlan& plan) {
  LossPlot plot("Fashion-MNIST training loss");
  ProgressBar bar((plan.steps - plan.done) * plan.batch);
  std::map<int, int> steps;
  std::int64_t images = 0;
  for (bool done = false; !done;) {
    done = finished.wait_for(50ms);
    if (done && finished.has_error()) break;
    for (const auto& [trainer, loss] : server.rpc_sync<&TrainingServer::take_reports>()) {
      plot.add("trainer" + std::to_string(trainer + 1), steps[trainer]++, loss);
      bar.update(images += plan.batch, loss);
    }
  }
  bar.finish();
  finished.get();
  return plot;
}

void serve(const CommandLine& line, const stitch::Worker& self) {
  TrainingPlan plan = line.plan;
  plan.trainers = self.world_size() - 1;
  // A missing file shows before anything starts.
  const auto test = read_fashion_mnist(plan.data, FashionMnistSplit::test);
  // [tutorial: start]
  const stitch::RemoteModule<Mlp> model({.to = self.id(), .device = plan.device}, line.hidden,
                                        plan.seed);
  const ServerRef server =
      stitch::remote<stitch::Serialized<TrainingServer>>(self.id(), model, plan);
  if (line.resume) plan.done = server.rpc_sync<&TrainingServer::resume>();
  std::vector<stitch::Future<void>> training;
  for (int i = 0; i < plan.trainers; ++i) {
    training.push_back(stitch::rpc_async<train>(
        {.to = "trainer" + std::to_string(i + 1), .timeout = 0s}, server, plan, i));
  }
  // [tutorial: end]
  if (line.resume) std::printf("resumed at step %ld\n", static_cast<long>(plan.done));
  const auto plot = watch(server, stitch::when_all(std::move(training)), plan);
  auto parameters = server.rpc_sync<&TrainingServer::fetch>();
  for (auto& parameter : parameters) parameter = parameter.cpu();
  plot.write(line.out);
  std::printf("test accuracy %.2f %%\n", 100 * mlp_accuracy(parameters, test.images, test.labels));
  std::printf("loss curve    %s\n", std::filesystem::absolute(line.out).string().c_str());
}

}  // namespace

int main(int argc, char** argv) try {
  const CommandLine line = parse_command_line(argc, argv);
  if (torch::Device(line.plan.device).is_cuda() && !torch::cuda::is_available())
    throw std::invalid_argument("no device: --device is \"" + line.plan.device +
                                "\", but libtorch sees no CUDA device here");
  stitch::Options options = stitch::resolve_options({});
  options.name = options.rank == 0 ? "ps" : "trainer" + std::to_string(options.rank);
  if (options.world_size < 2)
    throw std::invalid_argument(
        "one server and at least one trainer are needed: stitch-run -n 2 or more");
  if (line.workers && *line.workers != options.world_size.min() - 1) {
    throw std::invalid_argument("--workers is " + std::to_string(*line.workers) + ", but " +
                                std::to_string(options.world_size.min() - 1) +
                                " trainers were started: stitch-run -n " +
                                std::to_string(*line.workers + 1));
  }
  // [tutorial: roles]
  // A trainer's main() has nothing more to do: it serves in ~Worker until the server has finished
  // or is gone.
  const auto self = stitch::init(options);
  if (self.rank() == 0) serve(line, self);
  // [tutorial: end]
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "parameter_server: %s\n", error.what());
  return 1;
}
