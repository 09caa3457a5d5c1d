// Checkpoints of tables that fit into no message, by a worker that owns nothing.
#include <iostream>

#include "tests/support/forked_world.h"
#include "tests/support/resident_memory.h"
#include "tests/support/world_test.h"

namespace large_tables_test {
namespace {

namespace autograd = stitch::dist_autograd;
using namespace stitch::testing;
using torch::optim::Adam;
using torch::optim::AdamOptions;

constexpr std::int64_t kElements = 12'000'000;  // 46 MiB, and twice as much of state
at::Tensor filled(std::int64_t size) { return at::full({size}, 1.0).set_requires_grad(true); }
double sum_of(const at::Tensor& tensor) { return tensor.sum(at::kDouble).item<double>(); }
double sum_there(const RRef<at::Tensor>& tensor) { return sum_of(tensor.local_value()); }
at::Tensor loss(const RRef<at::Tensor>& tensor) { return tensor.local_value().square().sum(); }
void clear(const RRef<at::Tensor>& tensor) { tensor.local_value().detach().zero_(); }

bool expect(bool holds, const std::string& what) {
  if (!holds) std::cerr << what << '\n';
  return holds;
}

// True when all is as it should be.
bool save_and_load(const Worker& self, const std::filesystem::path& folder) {
  const auto table = remote<filled>("worker1", kElements);
  const auto small = remote<filled>("worker1", std::int64_t{1000});
  const std::vector<std::pair<std::string, RRef<at::Tensor>>> tensors{{"table", table},
                                                                      {"small", small}};
  stitch::optim::DistributedOptimizer<Adam> adam(tensors, AdamOptions(0.1));
  const auto step = [&](const RRef<at::Tensor>& tensor) {
    autograd::Context context;
    context.backward({rpc_sync<loss>("worker1", tensor)});
    adam.step(context);
  };
  for (const auto& each : {table, small}) step(each);
  stitch::Checkpoint checkpoint(folder);
  checkpoint.add("model", tensors);
  checkpoint.add("optimizer", adam);

  std::atomic<int> steps = 0;
  std::jthread training([&](const std::stop_token& stop) {
    const WorkerScope scope(self);
    for (; !stop.stop_requested(); ++steps) step(small);
  });
  const auto limit = std::size_t{64} << 20;
  const auto saving = growth_by([&] { checkpoint.save(); });
  training = {};  // joins
  const double before = rpc_sync<sum_there>("worker1", table);
  for (const auto& each : {table, small}) rpc_sync<clear>("worker1", each);
  const auto loading = growth_by([&] { checkpoint.load(); });
  const auto file = stitch::load(folder / "checkpoint.1.model.0.safetensors");
  const at::Tensor saved = file.at("small");
  bool good = expect(steps > 0, "no step was taken during the save");
  good &= expect(saving < limit, "memory of a save: " + std::to_string(saving >> 20) + " MiB");
  good &= expect(loading < limit, "memory of a load: " + std::to_string(loading >> 20) + " MiB");
  good &= expect(at::equal(saved, at::full_like(saved, saved[0].item<double>())), "mixed steps");
  good &= expect(at::equal(small.to_here().detach(), saved), "another small tensor");
  good &= expect(rpc_sync<sum_there>("worker1", table) == before, "another table");
  return good & expect(error_of([&] { table.to_here(); }).code() == ErrorCode::overloaded,
                       "the table fits into a message");
}

TEST(LargeTables, AreSavedAndLoadedInPiecesWhileTheyAreTrained) {
  const TemporaryFolder folder;
  ForkedWorld world(2, [&](Options options) {
    options.max_inflight_bytes = std::size_t{8} << 20;
    const auto self = stitch::init(std::move(options));
    return self.rank() == 0 && !save_and_load(self, folder.path()) ? 1 : 0;
  });
  for (const int rank : {0, 1}) {
    const auto outcome = world.wait(rank);
    EXPECT_EQ(outcome.status, 0) << outcome.said;
  }
}

}  // namespace
}  // namespace large_tables_test
