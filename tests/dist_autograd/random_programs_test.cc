// Random programs over workers against the same programs in one process. RANDOM_PROGRAMS is how
// many run in all (default 2000, 200 under a sanitizer); a program that fails prints how to run it
// alone.
#include <cmath>
#include <cstdlib>

#include "stitch/dist_autograd/executor/delivery_check.h"
#include "stitch/dist_autograd/protocol/messages.h"
#include "tests/support/histories.h"
#include "tests/support/oracle.h"
#include "tests/support/random_program.h"
#include "tests/support/tensor_hook.h"
#include "tests/support/world_test.h"

namespace stitch::testing::random_programs_test {
namespace {

// Undefined also where that worker took no part in the context.
at::Tensor gradient_on(Worker& worker, const dist_autograd::ContextId& context,
                       const at::Tensor& parameter) {
  const WorkerScope scope(worker);
  const auto handle = dist_autograd::find_usable_context(context);
  return handle ? handle->gradient(parameter) : at::Tensor();
}

// Asking::twice_remote: the gradients of the parameters of the worker that runs this.
Tensors gradients_here(std::uint64_t seed) {
  Tensors gradients;
  for (int i = 0; i < kProgramParameters; ++i) {
    gradients.push_back(dist_autograd::current_context().gradient(
        parameters().get(seed, rpc::current_agent()->self().id.value(), i)));
  }
  return gradients;
}

// A program, and how it is differentiated.
struct Trial {
  RandomProgram program;
  Asking asking;
  dist_autograd::Options options;
};

// How far sums may differ that were added in another order.
double tolerance_of(at::ScalarType dtype) {
  switch (c10::toRealValueType(dtype)) {
    case at::kDouble:
      return 1e-12;
    case at::kFloat:
      return 1e-5;
    case at::kHalf:
      return 0.02;
    default:
      return 0.1;
  }
}

// How a gradient differs from the one expected; empty where it does not.
std::string difference(const at::Tensor& got, const at::Tensor& expected,
                       const RandomProgram& program) {
  if (got.defined() != expected.defined())
    return got.defined() ? "a gradient in place of none" : "no gradient: undefined is not zero";
  if (!got.defined()) return "";
  if (got.scalar_type() != program.dtype) return c10::toString(got.scalar_type());
  if (got.is_sparse() != expected.is_sparse()) return got.is_sparse() ? "sparse" : "dense";
  const auto equal = equal_gradients(got, expected, tolerance_of(program.dtype));
  return equal ? "" : std::string("value ") + equal.message();
}

// Changes the gradients of first results that the root worker has from calls, as they are about to
// be sent to another worker, by one millionth. Counts those that were not zero.
class Damage {
 public:
  ProgramHost apply_to(ProgramHost host) {
    host.call = [this, call = std::move(host.call)](int callee, const ProgramBlock& block,
                                                    const Tensors& arguments) {
      return [this, wait = call(callee, block, arguments)] {
        Tensors results = wait();
        if (results.at(0).defined() && results[0].requires_grad()) {
          add_tensor_hook(results[0], [this](const at::Tensor& gradient) {
            if (!gradient.defined()) return gradient;
            if (gradient.abs().max().item<double>() > 0) ++done_;
            return gradient * (1 + 1e-6);
          });
        }
        return results;
      };
    };
    return host;
  }
  [[nodiscard]] int done() const { return done_; }

 private:
  std::atomic<int> done_{0};
};

void differentiate(const dist_autograd::Context& context, const Roots& roots,
                   const std::vector<Tensors>& own, const Trial& trial) {
  dist_autograd::Options options = trial.options;
  options.create_graph = trial.asking.twice;
  options.grads = roots.gradients;
  for (int pass = 1; pass <= trial.asking.passes; ++pass) {
    options.retain_graph = pass < trial.asking.passes;
    context.backward(roots.tensors, options);
  }
  if (!trial.asking.twice) return;
  Tensors gradients;
  for (const at::Tensor& parameter : own[0]) gradients.push_back(context.gradient(parameter));
  for (int worker = 1; trial.asking.twice_remote && worker < trial.program.workers; ++worker) {
    for (at::Tensor& gradient :
         rpc_sync<gradients_here>(WorkerId(static_cast<std::uint32_t>(worker)), trial.program.seed))
      gradients.push_back(std::move(gradient));
  }
  const at::Tensor second = loss_of_gradients(gradients);
  if (second.defined()) context.backward({second}, trial.options);
}

// Runs a program over the workers and returns how it differs from the same in one process.
std::vector<std::string> differences_of(Cluster& cluster, const Trial& trial,
                                        Damage* damage = nullptr) {
  const RandomProgram& program = trial.program;
  std::vector<std::string> all;
  std::vector<Tensors> own;
  for (int worker = 0; worker < program.workers; ++worker)
    own.push_back(program_parameters(program, worker));
  const OracleResult expected = run_oracle(program, own, trial.asking);

  parameters().put(program.seed, own);
  {
    dist_autograd::Context context;
    ProgramHost host = remote_host(program.seed);
    if (damage != nullptr) host = damage->apply_to(std::move(host));
    const Roots roots = run_for_roots(host, program, trial.asking);
    const double limit = tolerance_of(program.dtype) * std::max(1.0, std::abs(expected.loss));
    const double loss = roots.tensors[0].item<double>();
    if (!(std::abs(loss - expected.loss) <= limit))
      all.push_back("loss " + std::to_string(loss) + ", not " + std::to_string(expected.loss));
    try {
      differentiate(context, roots, own, trial);
    } catch (const Error& error) {
      all.emplace_back(error.what());
    }
    for (std::size_t worker = 0; worker < own.size(); ++worker) {
      for (std::size_t i = 0; i < own[worker].size(); ++i) {
        std::string found =
            difference(gradient_on(cluster[static_cast<int>(worker)], context.id(), own[worker][i]),
                       expected.gradients[worker][i], program);
        if (own[worker][i].grad().defined()) found += " and something in .grad";
        if (!found.empty()) {
          all.push_back("parameter " + std::to_string(i) + " of worker " + std::to_string(worker) +
                        ": " + found);
        }
      }
    }
  }
  parameters().remove(program.seed);
  return all;
}

void run_trial(Cluster& cluster, const Trial& trial) {
  const auto* const test = ::testing::UnitTest::GetInstance()->current_test_info();
  for (const std::string& found : differences_of(cluster, trial)) {
    ADD_FAILURE() << found << "\nto run it alone: RANDOM_PROGRAM_SEED=" << trial.program.seed
                  << " ... --gtest_filter=" << test->test_suite_name() << "." << test->name();
  }
}

// Of all tests together with all histories, unless RANDOM_PROGRAMS says otherwise.
constexpr std::uint64_t kPrograms = 2000;

// Runs the programs of one test, several contexts at once. `vary` makes a trial of a random number.
template <class Vary>
void run_trials(int workers, std::uint64_t first_seed, const Vary& vary) {
  constexpr int kTests = 6, kWorlds = 4, kThreads = 3;
  const char* const wanted = std::getenv("RANDOM_PROGRAMS");
  const std::uint64_t count =
      (wanted != nullptr ? std::strtoull(wanted, nullptr, 10) : share_of(kPrograms)) /
          (kTests * kWorlds) +
      1;
  const char* const alone = std::getenv("RANDOM_PROGRAM_SEED");
  dist_autograd::DeliveryCheck::switch_on();
  Cluster cluster(workers, {.num_threads = 4});
  const auto run_one = [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Trial trial;
    trial.program.seed = seed;
    trial.program.workers = workers;
    vary(trial, random);
    run_trial(cluster, trial);
  };
  if (alone != nullptr) {
    run_one(std::strtoull(alone, nullptr, 10));
    return;
  }
  first_seed += 1'000'000 * static_cast<std::uint64_t>(workers);
  std::atomic<std::uint64_t> next{first_seed};
  testing::on_each(kThreads, [&](int t) {
    const WorkerScope scope(cluster[0]);
    for (auto seed = next++; seed < first_seed + count; seed = next++) {
      if (::testing::Test::HasFailure()) return;
      run_one(seed);
    }
  });
  std::int64_t sent = 0;
  for (int worker = 0; worker < workers; ++worker)
    sent += cluster[worker].debug_info().at("dist_autograd.gradient_links_sent");
  EXPECT_GT(sent, static_cast<std::int64_t>(count)) << "these programs show little";
}

// libtorch's embeddings have no complex gradients.
void set_complex(RandomProgram& program) {
  program.dtype = at::kComplexDouble;
  program.sparse = false;
}

class RandomPrograms : public ::testing::TestWithParam<int> {};

TEST_P(RandomPrograms, HaveTheGradientsOfOneProcess) {
  run_trials(GetParam(), 0, [](Trial& trial, std::mt19937_64& random) {
    trial.program.hooks = random() % 2 == 0;
    trial.program.sparse = random() % 2 == 0;
    trial.program.in_place = random() % 2 == 0;
  });
}

TEST_P(RandomPrograms, HaveTheGradientsOfOneProcessWhenEverythingIsUsed) {
  run_trials(GetParam(), 100'000, [](Trial& trial, std::mt19937_64& random) {
    trial.program.uses_everything = true;
    trial.program.hooks = random() % 2 == 0;
    trial.program.sparse = random() % 2 == 0;
    trial.program.in_place = random() % 2 == 0;
  });
}

TEST_P(RandomPrograms, HaveTheGradientsOfOneProcessInEveryDtype) {
  static constexpr std::array kDtypes{at::kFloat, at::kBFloat16, at::kHalf, at::kComplexDouble,
                                      at::kComplexFloat};
  run_trials(GetParam(), 200'000, [](Trial& trial, std::mt19937_64& random) {
    trial.program.dtype = kDtypes[random() % kDtypes.size()];
    trial.program.hooks = random() % 2 == 0;
    trial.program.in_place = random() % 2 == 0;
    trial.program.sparse = trial.program.dtype == at::kFloat;
  });
}

TEST_P(RandomPrograms, HaveTheGradientsOfOneProcessFromSeveralRootsAndPasses) {
  run_trials(GetParam(), 300'000, [](Trial& trial, std::mt19937_64& random) {
    trial.program.hooks = random() % 2 == 0;
    trial.program.sparse = random() % 2 == 0;
    trial.program.in_place = random() % 2 == 0;
    trial.program.uses_everything = random() % 2 == 0;
    if (random() % 4 == 0) set_complex(trial.program);
    trial.asking = {.two_roots = random() % 3 != 0,
                    .two_losses = random() % 3 != 0,
                    .own_seed = random() % 2 == 0,
                    .passes = random() % 3 == 1 ? 1 : 3};
  });
}

TEST_P(RandomPrograms, HaveTheGradientsOfOneProcessWhenDifferentiatedTwice) {
  run_trials(GetParam(), 400'000, [](Trial& trial, std::mt19937_64& random) {
    trial.program.hooks = random() % 2 == 0;
    trial.program.in_place = random() % 2 == 0;
    trial.program.depth = 2;
    trial.program.sparse = trial.program.tables_apart = random() % 2 == 0;
    if (random() % 3 == 0) set_complex(trial.program);
    trial.asking.twice = true;
    trial.asking.twice_remote = random() % 2 == 0;
  });
}

TEST_P(RandomPrograms, HaveTheGradientsOfOneProcessWhenMessagesOvertakeEachOther) {
  const LoopbackFaults faults([](std::uint32_t, std::uint32_t, std::uint64_t sequence,
                                 const transport::Message& message) {
    std::mt19937_64 random(sequence);
    transport::Fate fate;
    const auto kind = kind_of(message);
    const bool call = kind == rpc::wire::kRequest || kind == rpc::wire::kReply;
    if (call || (kind >= dist_autograd::wire::kFirstKind && kind <= dist_autograd::wire::kLastKind))
      fate.delay = std::chrono::microseconds(random() % 1000);
    return fate;
  });
  run_trials(GetParam(), 500'000, [](Trial& trial, std::mt19937_64& random) {
    trial.program.hooks = random() % 2 == 0;
    trial.program.sparse = random() % 2 == 0;
    trial.program.in_place = random() % 2 == 0;
    trial.program.uses_everything = random() % 3 == 0;
    trial.asking = {.two_roots = random() % 2 == 0, .two_losses = random() % 2 == 0, .passes = 2};
    if (trial.program.uses_everything) {
    } else if (random() % 3 == 0) {
      trial.program.depth = 2;
      trial.program.tables_apart = trial.program.sparse;
      trial.asking = {.twice = true, .twice_remote = random() % 2 == 0};
    }
  });
}

TEST(RandomProgramsThemselves, FindAGradientThatIsWrongByAMillionth) {
  constexpr std::uint64_t kCount = 60;
  Cluster cluster(3, {.num_threads = 4});
  int damaged = 0, found = 0;
  for (std::uint64_t seed = 600'000; seed < 600'000 + kCount; ++seed) {
    Trial trial;
    trial.program = {.seed = seed, .workers = 3, .sparse = seed % 2 == 0};
    Damage damage;
    const bool differs = !differences_of(cluster, trial, &damage).empty();
    if (damage.done() == 0) {
      EXPECT_FALSE(differs) << "seed " << seed;
      continue;
    }
    ++damaged;
    found += differs ? 1 : 0;
  }
  EXPECT_GT(damaged, static_cast<int>(kCount) / 2);
  // What a gradient of almost nothing adds to a large sum is within the tolerance.
  EXPECT_GE(found, damaged * 9 / 10) << "of " << damaged;
}

TEST(RandomProgramsThemselves, FindWhatIsUndefinedOrOfAnotherKind) {
  const RandomProgram program;
  const at::Tensor some = at::ones({3, 3}, at::kDouble), zeros = at::zeros({3, 3}, at::kDouble);
  const double nan = std::nan("");
  EXPECT_EQ(difference(some, some.clone(), program), "");
  EXPECT_EQ(difference({}, {}, program), "");
  EXPECT_NE(difference({}, zeros, program), "");
  EXPECT_NE(difference(zeros, {}, program), "");
  EXPECT_NE(difference(some.to(at::kFloat), some, program), "");
  EXPECT_NE(difference(some.to_sparse(), some, program), "");
  EXPECT_NE(difference(some, some.to_sparse(), program), "");
  EXPECT_NE(difference(some * (1 + 1e-11), some, program), "");
  EXPECT_NE(difference(some.narrow(0, 0, 2), some, program), "");
  EXPECT_NE(difference(some * nan, some * nan, program), "");
  EXPECT_NE(difference(some * nan, some, program), "");
}

INSTANTIATE_TEST_SUITE_P(Over, RandomPrograms, ::testing::Values(2, 3, 4, 5),
                         [](const auto& info) { return std::to_string(info.param) + "Workers"; });

}  // namespace
}  // namespace stitch::testing::random_programs_test
