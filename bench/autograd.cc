// Distributed autograd with tiny tensors: the time per call, forward and backward.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <functional>
#include <stdexcept>
#include <vector>

#include "measure.h"
#include "stitch/dist_autograd/context.h"
#include "stitch/rpc/future/future.h"
#include "timing.h"
#include "world.h"

namespace stitch_bench {

namespace autograd_measure {
namespace {

namespace dist_autograd = stitch::dist_autograd;

at::Tensor multiply(at::Tensor a, at::Tensor b) { return a * b; }

// One kind of graph: the loss of x and c after `calls` calls, and what the gradient of x has to be.
struct Graph {
  std::string key;
  std::string per;  // the unit by which the times are divided
  int calls;
  std::function<at::Tensor(const at::Tensor& x, const at::Tensor& c)> loss;
  double gradient;
};

constexpr double kFactor = 1.01;

Graph chain(stitch::WorkerId to, int calls) {
  return {"chain." + std::to_string(calls), "_per_hop", calls,
          [=](const at::Tensor& x, const at::Tensor& c) {
            at::Tensor y = x;
            for (int i = 0; i < calls; ++i) y = stitch::rpc_sync<&multiply>(to, y, c);
            return y.sum();
          },
          std::pow(kFactor, calls)};
}

Graph fan_out(stitch::WorkerId to, int calls) {
  return {"fan_out." + std::to_string(calls), "_per_call", calls,
          [=](const at::Tensor& x, const at::Tensor& c) {
            std::vector<stitch::Future<at::Tensor>> pending;
            for (int i = 0; i < calls; ++i)
              pending.push_back(stitch::rpc_async<&multiply>(to, x, c));
            std::vector<at::Tensor> results;
            for (auto& call : pending) results.push_back(std::move(call).get());
            return at::stack(results).sum();
          },
          kFactor * calls};
}

// Times of single iterations, in microseconds.
struct Times {
  std::vector<double> forward, backward, total;
};

void iterate(const Graph& graph, Times& times) {
  const auto x = at::ones({8}).set_requires_grad(true);
  const auto c = at::full({8}, kFactor);
  const auto us = [](Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double, std::micro>(to - from).count();
  };
  const auto start = Clock::now();
  Clock::time_point middle, end;
  at::Tensor gradient;
  {
    dist_autograd::Context context;
    const auto loss = graph.loss(x, c);
    middle = Clock::now();
    context.backward({loss});
    end = Clock::now();
    gradient = context.gradient(x);
  }
  times.total.push_back(us(start, Clock::now()));
  times.forward.push_back(us(start, middle));
  times.backward.push_back(us(middle, end));
  if (!gradient.defined() || !at::allclose(gradient, at::full({8}, graph.gradient), 1e-4))
    throw std::runtime_error("the gradient is wrong");
}

void measure_graph(const Side& side, const Graph& graph) {
  Times times;
  static_cast<void>(time_each_us(side.settings().seconds / 4, 3, [&] { iterate(graph, times); }));
  times = {};
  const auto end = after(side.settings().seconds);
  while (times.total.size() < 5 || Clock::now() < end) iterate(graph, times);
  const std::string key = "autograd." + side.path() + '.' + graph.key;
  const std::string floor = side.floor("tensorpipe.shm.rtt64.p50", "tcp.rtt64.p50");
  side.result(key + ".forward" + graph.per, median(times.forward) / graph.calls, "us", floor);
  side.result(key + ".backward" + graph.per, median(times.backward) / graph.calls, "us", floor);
  side.result(key + ".total" + graph.per, median(times.total) / graph.calls, "us");
}

// A graph of `nodes` multiplications without remote parts: backward in a context, beside libtorch's
// own engine. In turns, so that both meet the same load.
void measure_local(const Side& side, int nodes) {
  const auto x = at::ones({8}).set_requires_grad(true);
  const auto c = at::full({8}, kFactor);
  const auto loss = [&] {
    at::Tensor y = x;
    for (int i = 0; i < nodes; ++i) y = y * c;
    return y.sum();
  };
  const auto us = [](Clock::time_point from) {
    return std::chrono::duration<double, std::micro>(Clock::now() - from).count();
  };
  std::vector<double> ours, whole, floors;
  at::Tensor gradient;
  const auto end = after(side.settings().seconds);
  while (ours.size() < 20 || Clock::now() < end) {
    {
      const auto start = Clock::now();
      const dist_autograd::Context context;
      const at::Tensor root = loss();
      const auto middle = Clock::now();
      context.backward({root});
      gradient = context.gradient(x);
      ours.push_back(us(middle));
      whole.push_back(us(start));
    }
    const at::Tensor root = loss();
    const auto start = Clock::now();
    const at::Tensor expected = torch::autograd::grad({root}, {x}).at(0);
    floors.push_back(us(start));
    if (!gradient.defined() || !at::equal(gradient, expected))
      throw std::runtime_error("the gradient is wrong");
  }
  const std::string key = "autograd.local." + std::to_string(nodes);
  side.result(key + ".torch_grad", median(floors), "us");
  side.result(key + ".backward", median(ours), "us", key + ".torch_grad");
  side.result(key + ".total", median(whole), "us");
}

void first(Side& side) {
  const stitch::Worker self = join_world(side);
  if (side.path() == "same_host") {
    for (const int nodes : {1, 16, 256}) measure_local(side, nodes);
  }
  for (const int calls : {1, 4, 16, 64}) measure_graph(side, chain(other(side), calls));
  for (const int calls : {1, 16, 256}) measure_graph(side, fan_out(other(side), calls));
  finish(side);
}

}  // namespace
}  // namespace autograd_measure

Measure autograd() {
  using namespace autograd_measure;
  return {.name = "autograd",
          .about =
              "chains of 1 to 64 calls and fans of 1 to 256 calls in one context, then backward; "
              "time per call",
          .paths = {"same_host", "tcp"},
          .floors = {"floor-sockets", "floor-tensorpipe-latency"},
          .first = &first,
          .second = &serve};
}

}  // namespace stitch_bench
