// Trains a classifier on Fashion-MNIST: worker 0 holds the parameters, the others train on them.
//   stitch-run -n 3 parameter_server --epochs 2
#include <stitch/stitch.h>

#include <cstdio>
#include <filesystem>
#include <map>

#include "command_line.h"
#include "fashion_mnist.h"
#include "loss_plot.h"
#include "mlp.h"
#include "progress_bar.h"
#include "training_server.h"

namespace {

using namespace std::chrono_literals;

// Shows the progress of training until all trainers have finished; throws the error of one that
// failed.
LossPlot watch(const stitch::RRef<TrainingServer>& server, stitch::Future<void> finished,
               std::int64_t total) {
  LossPlot plot("Fashion-MNIST training loss");
  ProgressBar bar(total);
  std::map<int, int> steps;
  for (bool done = false; !done;) {
    done = finished.wait_for(50ms);
    if (done && finished.has_error()) break;
    const auto [reports, images] = server.local_value().take_reports();
    for (const auto& report : reports)
      plot.add("trainer" + std::to_string(report.trainer + 1), steps[report.trainer]++,
               report.loss);
    if (!reports.empty()) bar.update(images, reports.back().loss);
  }
  bar.finish();
  finished.get();
  return plot;
}

void serve(const CommandLine& line, const stitch::Worker& self) {
  const auto test = read_fashion_mnist(
      line.data, FashionMnistSplit::test);  // a missing file shows before anything starts
  const int trainers = self.world_size() - 1;
  // [tutorial: start]
  const auto server =
      stitch::remote<TrainingServer>(self.id(), line.hidden, std::uint64_t{1}, line.device);
  std::vector<stitch::Future<void>> training;
  for (int i = 0; i < trainers; ++i) {
    const TrainingPlan plan{line.data,
                            line.device,
                            line.optimizer,
                            line.learning_rate,
                            line.batch,
                            line.epochs,
                            i,
                            trainers,
                            1};
    training.push_back(stitch::rpc_async<train>(
        {.to = "trainer" + std::to_string(i + 1), .timeout = 0s}, server, plan));
  }
  // [tutorial: end]
  const auto plot =
      watch(server, stitch::when_all(std::move(training)), std::int64_t{60'000} * line.epochs);
  auto parameters = server.local_value().fetch();
  for (auto& parameter : parameters) parameter = parameter.cpu();
  plot.write(line.out);
  std::printf("test accuracy %.2f %%\n", 100 * mlp_accuracy(parameters, test.images, test.labels));
  std::printf("loss curve    %s\n", std::filesystem::absolute(line.out).string().c_str());
}

}  // namespace

int main(int argc, char** argv) try {
  const CommandLine line = parse_command_line(argc, argv);
  if (line.help) {
    std::fputs(help_text().c_str(), stdout);
    return 0;
  }
  if (torch::Device(line.device).is_cuda() && !torch::cuda::is_available())
    throw std::invalid_argument("no device: --device is \"" + line.device +
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
