// References: the rate at which objects are made on the other worker and released, the time to
// fetch one, and the memory that one takes on either side; a remote module beside a call of it.
#include <ATen/ATen.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "handlers.h"
#include "measure.h"
#include "process_usage.h"
#include "stitch/rpc/future/future.h"
#include "stitch/rref/remote_module.h"
#include "stitch/rref/rref.h"
#include "timing.h"
#include "world.h"

namespace stitch_bench {

namespace rref_measure {
namespace {

// The object of the references; counts its instances.
class Kept {
 public:
  Kept() { ++count; }
  ~Kept() { --count; }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  static inline std::atomic<std::int64_t> count{0};
};

std::int64_t kept() { return Kept::count; }

void wait_until_none_is_kept(stitch::WorkerId there) {
  const auto end = after(60);
  while (stitch::rpc_sync<&kept>(there) > 0) {
    if (Clock::now() > end)
      throw std::runtime_error("unreferenced objects have not been destroyed");
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

// Makes and drops thousands at a time; at the end all have been destroyed.
double created_and_dropped_per_second(stitch::WorkerId there, double seconds) {
  const auto start = Clock::now();
  const auto end = after(seconds);
  double made = 0;
  do {
    std::vector<stitch::RRef<Kept>> references;
    std::vector<stitch::Future<void>> created;
    for (int i = 0; i < 1000; ++i) {
      references.push_back(stitch::remote<Kept>(there));
      created.push_back(references.back().when_created());
    }
    for (auto& future : created) future.get();
    made += 1000;
  } while (Clock::now() < end);
  wait_until_none_is_kept(there);
  return made / seconds_since(start);
}

void add_some(stitch::WorkerId there, std::vector<stitch::RRef<Kept>>& references) {
  constexpr int kTogether = 1000;
  std::vector<stitch::Future<void>> created;
  for (int i = 0; i < kTogether; ++i) {
    references.push_back(stitch::remote<Kept>(there));
    created.push_back(references.back().when_created());
  }
  for (auto& future : created) future.get();
}

// The growth of both processes by references to as many objects of one byte, per reference.
void report_reference_memory(Side& side, const std::string& key) {
  constexpr std::size_t kReferences = 200'000;
  std::vector<stitch::RRef<Kept>> references;
  references.reserve(kReferences);
  add_some(other(side), references);  // what the first ones need besides
  const std::size_t before = references.size();
  const double here = resident_mib();
  const double there = stitch::rpc_sync<&resident_mib>(other(side));
  while (references.size() < kReferences) add_some(other(side), references);
  const auto each = static_cast<double>(references.size() - before) / (1 << 20);
  side.result(key + ".user_memory", (resident_mib() - here) / each, "bytes");
  side.result(key + ".owner_memory", (stitch::rpc_sync<&resident_mib>(other(side)) - there) / each,
              "bytes");
  references.clear();
  wait_until_none_is_kept(other(side));
}

// Adds to 8 floats: the time of its forward is that of the call.
struct Offset : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x + offset; }
  at::Tensor offset = register_parameter("offset", at::ones({8}), /*requires_grad=*/false);
};

at::Tensor forward_of_own_module(at::Tensor x) {
  static Offset module;
  return module.forward(x);
}

// RemoteModule::forward() and rpc_sync of a function that runs the same module, in turns, so that
// both meet the same load.
void report_module(Side& side, const std::string& key) {
  const stitch::RemoteModule<Offset> module(other(side));
  const auto x = at::arange(8, at::kFloat);
  std::vector<double> functions, modules;
  const auto timed = [&](std::vector<double>& times, auto&& call) {
    const auto start = Clock::now();
    const at::Tensor y = call();
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
    if (times.size() == 1 && !at::equal(y, x + 1)) throw std::runtime_error("the sum is wrong");
  };
  for (const double seconds : {side.settings().seconds / 2, side.settings().seconds * 2}) {
    functions.clear();  // of the warm-up
    modules.clear();
    const auto end = after(seconds);
    while (functions.size() < 20 || Clock::now() < end) {
      timed(functions, [&] { return stitch::rpc_sync<&forward_of_own_module>(other(side), x); });
      timed(modules, [&] { return module.forward(x); });
    }
  }
  report_latency(side, key + ".module_function", functions);
  report_latency(side, key + ".module_forward", modules, key + ".module_function");
}

void first(Side& side) {
  const stitch::Worker self = join_world(side);
  const std::string key = "rref." + side.path();
  static_cast<void>(created_and_dropped_per_second(other(side), side.settings().seconds / 4));
  side.result(key + ".create_and_drop",
              created_and_dropped_per_second(other(side), side.settings().seconds), "rrefs/s");
  const auto a = at::arange(8, at::kFloat);
  const auto b = at::ones({8});
  report_latency(
      side, key + ".remote_to_here",
      time_each_us(side.settings().seconds, 20,
                   [&] { static_cast<void>(stitch::remote<&add>(other(side), a, b).to_here()); }),
      side.floor("tensorpipe.shm.rtt64", "tcp.rtt64"));
  report_module(side, key);
  if (side.path() == "same_host") report_reference_memory(side, key);
  finish(side);
}

}  // namespace
}  // namespace rref_measure

Measure rref() {
  using namespace rref_measure;
  return {.name = "rref",
          .about =
              "objects made on the other worker and dropped, per second; time of remote() and "
              "to_here() together; forward of a remote module beside a call of it; memory of a "
              "reference",
          .paths = {"same_host", "tcp"},
          .floors = {"floor-sockets", "floor-tensorpipe-latency"},
          .first = &first,
          .second = &serve};
}

}  // namespace stitch_bench
