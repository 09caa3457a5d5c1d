// A server of a model, and clients: requests that come within a moment are computed together.
//   stitch-run -n 3 model_service
#include <stitch/stitch.h>

#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace std::chrono_literals;

// [tutorial: batching]
// The call that finds no batch begins one, waits a moment for others, and computes all of them.
class Model {
 public:
  void load() { weight_ = torch::eye(4) * 2; }

  stitch::Future<torch::Tensor> infer(const torch::Tensor& row) {
    const stitch::Promise<torch::Tensor> answer;
    std::unique_lock lock(mutex_);
    const bool first = rows_.empty();
    rows_.push_back(row);
    answers_.push_back(answer);
    lock.unlock();
    if (first) compute_soon();
    return answer.future();
  }

 private:
  void compute_soon() {
    {
      const stitch::BlockingRegion waits;  // another thread serves meanwhile
      std::this_thread::sleep_for(2ms);
    }
    std::unique_lock lock(mutex_);
    const auto rows = std::exchange(rows_, {});
    const auto answers = std::exchange(answers_, {});
    lock.unlock();
    const auto results = torch::stack(rows).mm(weight_);
    for (std::size_t i = 0; i < answers.size(); ++i)
      answers[i].set_value(results[static_cast<std::int64_t>(i)].clone());
  }

  torch::Tensor weight_;
  std::mutex mutex_;
  std::vector<torch::Tensor> rows_;
  std::vector<stitch::Promise<torch::Tensor>> answers_;
};

stitch::Future<torch::Tensor> infer(torch::Tensor row) {
  return stitch::user_data<std::shared_ptr<Model>>()->infer(row);
}
// [tutorial: end]

int main() try {
  // [tutorial: server]
  stitch::Options options = stitch::resolve_options({});  // the launcher says the rank
  const bool serves = options.rank == 0;
  const auto model = std::make_shared<Model>();
  options.name = serves ? "model" : "client" + std::to_string(options.rank);
  options.user_data = model;        // for the functions that are called here
  options.start_serving = !serves;  // calls that come while the model is loaded wait
  auto self = stitch::init(options);
  if (serves) {
    model->load();
    self.serve();
    return 0;  // ~Worker: serves until all clients leave
  }
  // [tutorial: end]

  // [tutorial: client]
  std::vector<stitch::Future<torch::Tensor>> answers;
  for (int i = 0; i < 8; ++i)
    answers.push_back(
        stitch::rpc_async<infer>({.to = "model", .timeout = 10s}, torch::full({4}, 1.0 * i)));
  const auto rows = torch::stack(stitch::when_all(answers).get());
  // [tutorial: end]
  std::printf("%s: sum of %ld rows is %.0f\n", self.name().c_str(), static_cast<long>(rows.size(0)),
              rows.sum().item<double>());
  return 0;
} catch (const stitch::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
