// A table of embeddings whose rows are spread over all workers: looked up, trained, saved, loaded,
// until its steps are done or a signal stops it.
//   stitch-run -n 3 sharded_table FOLDER
#include <stitch/stitch.h>

#include <cstdio>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

// [tutorial: table]
// Every n-th row.
class Shard {
 public:
  Shard(std::int64_t rows, std::int64_t width)
      : rows_(torch::zeros({rows, width}, torch::requires_grad())) {}
  torch::Tensor lookup(const torch::Tensor& at) {
    return torch::embedding(rows_, at, -1, false, /*sparse=*/true);
  }
  stitch::RRef<torch::Tensor> parameter() { return stitch::make_rref(rows_); }
  void clear() {
    const torch::NoGradGuard none;
    rows_.zero_();
  }

 private:
  torch::Tensor rows_;
};

// Row i is row i / n of shard i % n. All shards are asked at once.
torch::Tensor lookup(const std::vector<stitch::RRef<Shard>>& shards, const torch::Tensor& ids) {
  const auto n = static_cast<std::int64_t>(shards.size());
  std::vector<torch::Tensor> places;
  std::vector<stitch::Future<torch::Tensor>> parts;
  for (std::int64_t i = 0; i < n; ++i) {
    places.push_back((ids.remainder(n) == i).nonzero().squeeze(1));
    parts.push_back(shards[static_cast<std::size_t>(i)].rpc_async<&Shard::lookup>(
        ids.index_select(0, places.back()).floor_divide(n)));
  }
  return torch::cat(stitch::when_all(parts).get()).index_select(0, torch::cat(places).argsort());
}
// [tutorial: end]

int main(int argc, char** argv) try {
  const std::filesystem::path folder = argc > 1 ? argv[1] : "sharded_table_checkpoint";
  // [tutorial: stop]
  auto self = stitch::init({.stop_on_signals = true});
  if (self.rank() != 0) return 0;  // serves until all workers leave
  // [tutorial: end]

  std::vector<stitch::RRef<Shard>> shards;
  std::vector<std::pair<std::string, stitch::RRef<torch::Tensor>>> parameters;
  for (const auto& worker : self.workers()) {
    shards.push_back(stitch::remote<Shard>(worker, 10, 4));
    parameters.emplace_back(worker.name, shards.back().rpc_sync<&Shard::parameter>());
  }
  stitch::optim::DistributedOptimizer<stitch::optim::SparseAdagrad> optimizer(
      parameters, stitch::optim::SparseAdagradOptions(0.3));
  // [tutorial: checkpoint]
  // Rows of all shards, the state of their optimizer, and where the program stands.
  stitch::Checkpoint checkpoint(folder, {.name = "table", .keep = 2});
  checkpoint.add("rows", parameters);
  checkpoint.add("optimizer", optimizer);
  // [tutorial: end]
  const auto ids = torch::arange(0, 20, torch::kLong).flip(0);
  const auto target = ids.to(torch::kFloat).div(20).unsqueeze(1).expand({20, 4});
  // [tutorial: loop]
  for (int step = 0; step < 60 && !stitch::stop_requested(); ++step) {
    stitch::dist_autograd::Context context;
    const auto loss = (lookup(shards, ids) - target).square().sum();
    context.backward({loss});
    optimizer.step(context);
  }
  checkpoint.values["next_step"] = optimizer.next_step();
  checkpoint.save();  // also where SIGTERM has ended the loop
  // [tutorial: end]
  for (const auto& shard : shards) shard.rpc_sync<&Shard::clear>();
  checkpoint.load();
  const double error = (lookup(shards, ids) - target).abs().max().item<double>();
  std::printf("table of %zu shards: largest error %s\n", shards.size(),
              error < 0.1 ? "below 0.1" : "too large");
  return 0;
} catch (const stitch::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
