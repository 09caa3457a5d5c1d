// Trainers that are killed: each numbered step is taken once, and none that was saved is lost.
#include <signal.h>
#include <sys/mman.h>

#include <iostream>

#include "tests/support/forked_world.h"
#include "tests/support/world_test.h"

namespace killed_trainers_test {
namespace {

namespace autograd = stitch::dist_autograd;
using namespace stitch::testing;
using stitch::optim::NamedParameter;
using stitch::optim::SparseSGD;
using stitch::optim::SparseSGDOptions;

// In memory that all processes have.
struct Progress {
  const std::int64_t steps;              // to be taken
  std::atomic<std::int64_t> saved{-1};   // steps in the last save that returned
  std::atomic<std::int64_t> again{0};    // steps that were asked for again
  std::atomic<std::int64_t> resumed{0};  // trainers that went on from a save
  std::atomic<bool> ended{false};        // a trainer has, itself
  std::atomic<bool> over{false};         // all may leave
};
Progress* progress = nullptr;
struct SharedProgress {
  explicit SharedProgress(std::int64_t steps)
      : memory(::mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                      -1, 0)) {
    progress = new (memory) Progress{.steps = steps};
  }
  ~SharedProgress() { ::munmap(memory, sizeof(Progress)); }
  SharedProgress(const SharedProgress&) = delete;
  SharedProgress& operator=(const SharedProgress&) = delete;
  void* const memory;
};

// On an owner: row n is 0 before step n, and -1 after it.
at::Tensor& rows() {
  static at::Tensor rows = at::zeros({progress->steps, 1}).set_requires_grad(true);
  return rows;
}
RRef<at::Tensor> parameter() { return make_rref(rows()); }
at::Tensor row(std::int64_t number) {
  return at::embedding(rows(), at::full({1}, number, at::kLong), -1, false, true).sum();
}
// Rows that are not as `taken` steps leave them.
std::int64_t wrong(std::int64_t taken) {
  const at::Tensor expected = at::zeros_like(rows());
  expected.slice(0, 0, taken).fill_(-1);
  return rows().detach().ne(expected).sum().item<std::int64_t>();
}

// 0 when all steps have been taken.
int train(const std::filesystem::path& folder) {
  const std::vector<std::string> owners{"worker0", "worker1"};
  std::vector<NamedParameter> parameters;
  for (const auto& owner : owners) parameters.emplace_back(owner, rpc_sync<parameter>(owner));
  stitch::optim::DistributedOptimizer<SparseSGD> optimizer(parameters, SparseSGDOptions(1));
  stitch::Checkpoint checkpoint(folder);
  checkpoint.add("model", parameters);
  checkpoint.add("optimizer", optimizer);
  if (progress->saved >= 0) {
    checkpoint.load();
    ++progress->resumed;
    if (optimizer.next_step() < progress->saved) {
      std::cerr << "step " << progress->saved << " was saved, " << optimizer.next_step()
                << " was loaded";
      return 1;
    }
  }
  for (std::int64_t next = optimizer.next_step();; next = optimizer.next_step()) {
    if (next % 100 == 0 && next != progress->saved) {
      for (const auto& owner : owners) {
        if (const auto count = rpc_sync<wrong>(owner, next); count != 0) {
          std::cerr << count << " steps of " << owner << " were lost or taken twice before step "
                    << next;
          return 2;
        }
      }
      checkpoint.save();
      progress->saved = next;
    }
    if (next == progress->steps) return 0;
    autograd::Context context;
    context.backward({rpc_sync<row>(owners[0], next) + rpc_sync<row>(owners[1], next)});
    for (bool taken = false; !taken;) {
      try {
        optimizer.step(context, {.timeout = 3ms});
        taken = true;
      } catch (const Error& error) {
        if (error.code() != ErrorCode::timeout) throw;
        ++progress->again;
      }
    }
  }
}

// Worker 2 trains and is killed at random, until it has taken all steps. Returns how often it was.
int expect_each_step_once(std::int64_t steps) {
  const SharedProgress shared(steps);
  const TemporaryFolder folder;
  const auto run = [&](Options options) {
    options.fault = "drop=0.002";
    const auto self = stitch::init(std::move(options));
    const int status = self.rank() == 2 ? train(folder.path()) : 0;
    if (self.rank() == 2) progress->ended = true;
    EXPECT_TRUE(eventually([] { return progress->over.load(); }, 500s));
    return status;
  };
  ForkedWorld world(3, run, 600s);
  std::minstd_rand random(static_cast<unsigned>(steps));
  int killed = 0;
  for (;; ++killed) {
    // The trainer is killed at a random moment of its life.
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 800));
    if (progress->ended) break;
    world.signal(2, SIGKILL);
    if (const auto trainer = world.wait(2); trainer.signal != SIGKILL) {
      ADD_FAILURE() << "signal " << trainer.signal << ": " << trainer.said;
      return 0;
    }
    world.start(2);
  }
  progress->over = true;
  for (const int rank : {0, 1, 2}) {
    const auto outcome = world.wait(rank);
    EXPECT_EQ(outcome.status, 0) << outcome.said;
  }
  std::cout << killed << " trainers were killed, " << progress->resumed << " went on from a save, "
            << progress->again << " steps were asked for again\n";
  return killed;
}

// On worker 0. The lock of the second is held there until worker 1, in its second life, has loaded.
RRef<at::Tensor> weight(int which) {
  static const std::vector<at::Tensor> weights{at::ones({1}).set_requires_grad(true),
                                               at::ones({1}).set_requires_grad(true),
                                               at::ones({1}).set_requires_grad(true)};
  return make_rref(weights.at(static_cast<std::size_t>(which)));
}
at::Tensor value(int which) { return weight(which).local_value() * 1; }
void hold_second() {
  const auto lock = stitch::optim::parameter_lock(weight(1).local_value());
  const stitch::base::MutexLock held(*lock);
  progress->again = 1;
  EXPECT_TRUE(eventually([] { return progress->resumed > 0; }));
}

// In its first life it dies with a step that has taken the first of three weights.
int train_twice(const std::filesystem::path& folder) {
  std::vector<RRef<at::Tensor>> weights;
  for (int i = 0; i < 3; ++i) weights.push_back(rpc_sync<weight>("worker0", i));
  stitch::Checkpoint checkpoint(folder);
  checkpoint.add("third", {{"weight", weights[2]}});
  const bool first_life = progress->saved < 0;
  if (!first_life) {
    checkpoint.load();
    progress->resumed = 1;
  }
  const auto now = [](int which) { return rpc_sync<value>("worker0", which).item<float>(); };
  stitch::optim::DistributedOptimizer<torch::optim::SGD> sgd(weights, torch::optim::SGDOptions(1));
  const auto step = [&](const autograd::Context& context) {
    auto loss = at::zeros({1});
    for (int i = 0; i < 3; ++i) loss = loss + rpc_sync<value>("worker0", i);
    context.backward({loss});
    return sgd.step_async(context);
  };
  if (first_life) {
    checkpoint.save();
    progress->saved = 0;
    stitch::notify<hold_second>("worker0");
    EXPECT_TRUE(eventually([] { return progress->again == 1; }));
    const autograd::Context context;
    const auto stepping = step(context);
    EXPECT_TRUE(eventually([&] { return now(0) == 0; }));
    progress->ended = true;
    EXPECT_FALSE(eventually([] { return progress->over.load(); })) << "it is to be killed";
  }
  for (int i = 0; i < 20; ++i) {
    const autograd::Context context;
    step(context).get();
  }
  if (now(2) == 1 - 20) return 0;
  std::cerr << "20 steps made 1 " << now(2);
  return 1;
}

TEST(KilledTrainers, DoNotStepWhatTheirNextLifeHasLoaded) {
  SharedProgress shared(0);
  const TemporaryFolder folder;
  ForkedWorld world(2, [&](Options options) {
    options.num_threads = 4;
    const auto self = stitch::init(std::move(options));
    const int status = self.rank() == 1 ? train_twice(folder.path()) : 0;
    if (self.rank() == 1) progress->over = true;
    EXPECT_TRUE(eventually([] { return progress->over.load(); }));
    return status;
  });
  EXPECT_TRUE(eventually([] { return progress->ended.load(); }));
  world.signal(1, SIGKILL);
  EXPECT_EQ(world.wait(1).signal, SIGKILL);
  world.start(1);
  for (const int rank : {0, 1}) {
    const auto outcome = world.wait(rank);
    EXPECT_EQ(outcome.status, 0) << outcome.said;
  }
}

TEST(KilledTrainers, TakeEachStepOnce) { EXPECT_GT(expect_each_step_once(1'000), 0); }
TEST(KilledTrainersSoak, TakeEachStepOnce) { EXPECT_GT(expect_each_step_once(100'000), 100); }

}  // namespace
}  // namespace killed_trainers_test
