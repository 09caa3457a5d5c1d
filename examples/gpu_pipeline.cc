// A model in two stages on two workers, each on a device of its own where there are two:
// activations go from device to device, gradients back, and the optimizers step on the devices.
//   stitch-run -n 2 gpu_pipeline
//   stitch-run -n 2 gpu_pipeline --device cpu       without a GPU
#include <stitch/stitch.h>

#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using stitch::dist_autograd::Context;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kWidth = 512;
constexpr std::int64_t kBatch = 256;

// Two layers of a perceptron. Owned by an RRef; thread contract: one call at a time.
class Stage {
 public:
  Stage(std::string device, std::int64_t outputs, std::uint64_t seed) {
    torch::manual_seed(seed);
    const auto make = [&](std::int64_t rows, std::int64_t columns) {
      const auto scale = 1.0 / std::sqrt(static_cast<double>(columns));
      return (torch::randn({rows, columns}) * scale)
          .to(torch::Device(device))
          .set_requires_grad(true);
    };
    parameters_ = {make(kWidth, kWidth), make(outputs, kWidth)};
  }
  torch::Tensor forward(const torch::Tensor& input) {
    return torch::relu(input.mm(parameters_[0].t())).mm(parameters_[1].t());
  }
  std::vector<stitch::RRef<torch::Tensor>> parameters() {
    std::vector<stitch::RRef<torch::Tensor>> references;
    for (const auto& parameter : parameters_) references.push_back(stitch::make_rref(parameter));
    return references;
  }

 private:
  std::vector<torch::Tensor> parameters_;
};

struct Arguments {
  std::string device = "cuda";
  int steps = 50;
};

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; i += 2) {
    const std::string option = argv[i];
    if (i + 1 >= argc || (option != "--device" && option != "--steps"))
      throw std::invalid_argument("option " + option +
                                  ": known are --device cpu|cuda and --steps N");
    if (option == "--device") arguments.device = argv[i + 1];
    if (option == "--steps") arguments.steps = std::stoi(argv[i + 1]);
  }
  return arguments;
}

void train(const stitch::Worker& self, const std::string& here, const std::string& there,
           int steps) {
  auto first = stitch::remote<Stage>(self.id(), here, kWidth, std::uint64_t{1});
  auto second = stitch::remote<Stage>("worker1", there, std::int64_t{10}, std::uint64_t{2});
  auto parameters = first.rpc_sync<&Stage::parameters>();
  for (auto& each : second.rpc_sync<&Stage::parameters>()) parameters.push_back(std::move(each));
  stitch::optim::DistributedOptimizer<torch::optim::SGD> optimizer(parameters,
                                                                   torch::optim::SGDOptions(0.05));

  torch::manual_seed(3);
  const auto images = torch::randn({kBatch, kWidth}).to(torch::Device(here));
  const auto labels = images.abs().slice(1, 0, 10).argmax(1);
  double first_loss = 0;
  double loss = 0;
  const auto begun = Clock::now();
  for (int step = 0; step < steps; ++step) {
    Context context;
    const auto hidden = first.rpc_sync<&Stage::forward>(images);
    // 512 KiB of activations, to the device of the other stage; what returns is on this one.
    const auto scores = second.rpc_sync<&Stage::forward>(stitch::on(there, hidden));
    const auto error = torch::nn::functional::cross_entropy(scores.to(labels.device()), labels);
    context.backward({error});
    optimizer.step(context);
    loss = error.item<double>();
    if (step == 0) first_loss = loss;
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - begun).count();
  std::printf("stages on %s and %s: loss %.4f after one step, %.4f after %d; %.2f ms a step\n",
              here.c_str(), there.c_str(), first_loss, loss, steps, 1e3 * seconds / steps);
  for (const auto& [name, value] : self.debug_info()) {
    if (name.starts_with("gpu.sent_bytes."))
      std::printf("%s %lld\n", name.c_str(), static_cast<long long>(value));
  }
  if (!(loss < first_loss)) throw std::runtime_error("the loss did not fall");
}

}  // namespace

int main(int argc, char** argv) try {
  const Arguments arguments = parse(argc, argv);
  const bool cuda = torch::Device(arguments.device).is_cuda();
  if (cuda && !torch::cuda::is_available())
    throw std::invalid_argument(
        "no device: libtorch sees no CUDA device here; --device cpu does without");
  const auto self = stitch::init();
  if (self.world_size() != 2)
    throw std::invalid_argument("two workers are needed: stitch-run -n 2 gpu_pipeline");
  if (self.rank() == 0) {
    const bool two = cuda && torch::cuda::device_count() > 1;
    train(self, cuda ? "cuda:0" : "cpu", two ? "cuda:1" : cuda ? "cuda:0" : "cpu", arguments.steps);
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "gpu_pipeline: %s\n", error.what());
  return 1;
}
