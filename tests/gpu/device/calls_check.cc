// Calls and backward passes with tensors on devices, between workers of one process, as the
// contract of streams has them (docs/gpu_placement.md): on a GPU by scripts/gpu-test, and over the
// double of CUDA on a machine without one. CALLS_TRIALS and CALLS_PROGRAMS say how much of it.
#include "tests/gpu/device/calls_check.h"

#include <c10/core/StreamGuard.h>

#include <cstdlib>

#include "tests/support/oracle.h"
#include "tests/support/world_test.h"

namespace gpu_calls_check {  // its functions are registered under their full names
namespace {

using namespace stitch::testing;
using stitch::gpu_check::delay;
using stitch::gpu_check::pool_stream;
namespace autograd = stitch::dist_autograd;

at::Device device(int index) { return {at::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

// The consumer: it reads behind a delay, and what it returns is written behind another.
at::Tensor plus_one_later(const at::Tensor& tensor) {
  delay(tensor.device());
  at::Tensor result = tensor + 1;
  delay(tensor.device());
  return result;
}

class StaleReads : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(By, StaleReads, ::testing::Values("local", "peer"),
                         [](const auto& each) { return each.param; });

// What is not ordered is seen, or reported by the double: else the trials show nothing.
TEST(StaleReadsControl, WhatDoesNotWaitIsStale) {
  static_cast<void>(stitch::gpu_check::take_violations());
  delay(device(0));  // measures itself the first time
  const c10::StreamGuard producer(pool_stream(device(0)));
  at::Tensor source = at::zeros({600'000}, at::TensorOptions().dtype(at::kFloat).device(device(0)));
  static_cast<void>(source.cpu());
  int stale = 0;
  for (int trial = 1; trial <= 10; ++trial) {
    const at::Tensor value = at::full_like(source, trial);
    delay(device(0));
    source.copy_(value, true);  // does not wait for its end, over the double either
    {
      const c10::StreamGuard consumer(pool_stream(device(0)));
      stale += at::all(source.cpu() == trial).item<bool>() ? 0 : 1;
    }
    static_cast<void>(source.cpu());
  }
  const std::string reported = stitch::gpu_check::take_violations();
  EXPECT_TRUE(stale > 5 || !reported.empty()) << stale << " of 10 were stale";
}

// The same memory at the source and in `into` each time. Its bytes are written behind a delay, and
// others as soon as the call has completed.
TEST_P(StaleReads, AreNone) {
  const bool peer = GetParam() == "peer";
  if (peer && stitch::gpu_check::device_count() < 2) GTEST_SKIP() << "one device";
  const int there = peer ? 1 : 0;
  const Cluster cluster(2, [&](Options& options) {
    if (options.rank == 0)
      options.device_maps["worker1"] = {{"cuda:0", "cuda:" + std::to_string(there)}};
  });
  const int trials =
      stitch::gpu_check::number_of("CALLS_TRIALS", stitch::gpu_check::default_trials());
  const auto floats = at::TensorOptions().dtype(at::kFloat).device(device(0));
  int stale = 0;
  // In the message, packed, by itself.
  for (const std::int64_t size : {1'000, 100'000, 600'000}) {
    const c10::StreamGuard producer(pool_stream(device(0)));
    at::Tensor source = at::zeros({size}, floats);
    at::Tensor into = at::zeros({size}, floats);
    for (int trial = 0; trial < (trials + 2) / 3; ++trial) {
      source.fill_(-7);
      into.fill_(-7);
      delay(device(0));
      source.fill_(trial);
      const auto future = trial % 2 == 0
                              ? rpc_async<plus_one_later>({.to = "worker1", .into = into}, source)
                              : rpc_async<plus_one_later>("worker1", source);
      const at::Tensor result = future.get();
      source.fill_(-9);
      const c10::StreamGuard consumer(pool_stream(device(0)));
      if (!at::all(result.cpu() == trial + 1).item<bool>()) ++stale;
    }
  }
  EXPECT_EQ(stale, 0);
}

// ---- memory

at::Tensor works_on_much(const at::Tensor& tensor) {
  const at::Tensor much = at::zeros({std::int64_t{64} << 20}, tensor.options());  // 256 MiB
  return tensor + at::matmul(much.view({8192, 8192}), tensor.expand({8192}));
}

// libtorch keeps what a stream has used for that stream, and handlers have streams of their own.
TEST(MemoryOfHandlers, DoesNotGrowWithTheNumberOfCalls) {
  if (!stitch::gpu_check::reserved_bytes()) GTEST_SKIP() << "the double has no allocator";
  const Cluster cluster(2);
  const at::Tensor tensor = at::ones({1}, at::TensorOptions().dtype(at::kFloat).device(device(0)));
  const auto call = [&] { rpc_sync<works_on_much>("worker1", tensor); };
  const std::int64_t before = *stitch::gpu_check::reserved_bytes();
  call();
  const std::int64_t one = *stitch::gpu_check::reserved_bytes() - before;
  for (int i = 0; i < 200; ++i) call();
  EXPECT_LT(*stitch::gpu_check::reserved_bytes() - before, 3 * one);
}

// ---- random programs

at::Tensor on_cpu(const at::Tensor& tensor) { return tensor.defined() ? tensor.cpu() : tensor; }

at::Tensor gradient_on(Worker& worker, const autograd::ContextId& context,
                       const at::Tensor& parameter) {
  const WorkerScope scope(worker);
  try {
    return autograd::find_context(context).gradient(parameter);
  } catch (const Error&) {
    return {};  // it took no part
  }
}

class ProgramsOnDevices : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Workers, ProgramsOnDevices, ::testing::Values(2, 4));

// In fp64, to 1e-12, though calls, handlers and passes have streams of their own.
TEST_P(ProgramsOnDevices, HaveTheGradientsOfOneProcess) {
  Cluster cluster(GetParam());
  const int programs =
      stitch::gpu_check::number_of("CALLS_PROGRAMS", stitch::gpu_check::default_programs());
  const bool local = stitch::gpu_check::has_local_engine();
  for (int i = 0; i < programs && !HasFailure(); ++i) {
    RandomProgram program;
    program.seed = static_cast<std::uint64_t>(7'000 * GetParam() + i);
    program.workers = GetParam();
    program.devices = stitch::gpu_check::device_count();
    SCOPED_TRACE("seed " + std::to_string(program.seed));
    Asking asking;
    asking.two_losses = i % 2 == 1;
    asking.own_seed = i % 3 == 1;
    asking.passes = 1 + i % 2;
    RandomProgram alone = program;
    if (!local) alone.devices = 0;
    std::vector<Tensors> own, theirs;
    for (int worker = 0; worker < program.workers; ++worker) {
      own.push_back(program_parameters(program, worker));
      theirs.push_back(program_parameters(alone, worker));
    }
    const auto expected = run_oracle(alone, theirs, asking);

    parameters().put(program.seed, own);
    // A caller whose streams are not the default ones, now and then.
    c10::OptionalStreamGuard caller;
    if (i % 2 == 0) caller.reset_stream(pool_stream(device(0)));
    autograd::Context context;
    const auto roots = run_for_roots(remote_host(program.seed), program, asking);
    EXPECT_NEAR(roots.tensors[0].item<double>(), expected.loss,
                1e-12 * std::max(1.0, std::abs(expected.loss)));
    autograd::Options options;
    options.grads = roots.gradients;
    for (int pass = 1; pass <= asking.passes; ++pass) {
      options.retain_graph = pass < asking.passes;
      context.backward(roots.tensors, options);
    }
    for (int worker = 0; worker < program.workers; ++worker) {
      for (std::size_t p = 0; p < own[0].size(); ++p) {
        const at::Tensor& parameter = own[static_cast<std::size_t>(worker)][p];
        const at::Tensor got = gradient_on(cluster[worker], context.id(), parameter);
        const at::Tensor& wanted = expected.gradients[static_cast<std::size_t>(worker)][p];
        ASSERT_EQ(got.defined(), wanted.defined());
        if (!got.defined()) continue;
        EXPECT_EQ(got.device(), parameter.device());
        EXPECT_TRUE(equal_gradients(on_cpu(got), on_cpu(wanted), 1e-12));
      }
    }
    parameters().put(program.seed, {});
  }
}

}  // namespace
}  // namespace gpu_calls_check

namespace stitch::gpu_check {

int number_of(const char* variable, int otherwise) {
  const char* const value = std::getenv(variable);
  return value != nullptr ? std::atoi(value) : otherwise;
}

}  // namespace stitch::gpu_check
