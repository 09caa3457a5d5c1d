#pragma once

#include <string>
#include <vector>

#include "side.h"

namespace stitch_bench {

// A measurement with a name. Its processes are started again for each round and each path.
struct Measure {
  std::string name;
  std::string about;          // one line for --list
  bool quick = false;         // part of the default set
  bool needs_device = false;  // left out of --all where there is no CUDA device
  // Run for each, empty: once. Those of stitch's connection are "same_host" and "tcp".
  std::vector<std::string> paths{};
  std::vector<std::string> floors{};  // measures that run with it
  void (*first)(Side&) = nullptr;     // run by rank 0
  void (*second)(Side&) = nullptr;    // run by rank 1; null: there is none
};

// All of them, floors first.
[[nodiscard]] const std::vector<Measure>& all_measures();
// Throws std::invalid_argument listing the names.
[[nodiscard]] const Measure& find_measure(const std::string& name);

// Each in the file of that name.
[[nodiscard]] Measure latency();
[[nodiscard]] Measure rate();
[[nodiscard]] Measure connect();
[[nodiscard]] Measure bandwidth();
[[nodiscard]] Measure beside_bulk();
[[nodiscard]] Measure idle();
[[nodiscard]] Measure steal();
[[nodiscard]] Measure autograd();
[[nodiscard]] Measure step();
[[nodiscard]] Measure rows();
[[nodiscard]] Measure saving();
[[nodiscard]] Measure rref();
[[nodiscard]] Measure allocs();
[[nodiscard]] Measure gpu();
// Whether there is a CUDA device that libtorch sees, and what the measures need beside it.
[[nodiscard]] bool has_device();
[[nodiscard]] std::string why_no_device();
// idle.cc and floors_*.cc
[[nodiscard]] Measure memory_base();
[[nodiscard]] Measure floor_sockets();
[[nodiscard]] Measure floor_memcpy();
[[nodiscard]] Measure floor_tensorpipe_latency();
[[nodiscard]] Measure floor_tensorpipe_rate();
[[nodiscard]] Measure floor_tensorpipe_bandwidth();

}  // namespace stitch_bench
