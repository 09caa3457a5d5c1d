#pragma once

#include <ATen/ATen.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace stitch::testing {

// A scenario of scenarios.txt, which says how it is written.
struct Scenario {
  std::string name;
  int passes = 1;
  std::string expression;
};
[[nodiscard]] std::vector<Scenario> read_scenarios(const std::filesystem::path& file);

// The tensors that an expression stands for on the worker that is current on this thread.
[[nodiscard]] std::vector<at::Tensor> evaluate(const std::string& expression,
                                               const std::vector<at::Tensor>& arguments);

// The leaves of a worker, by name: the same for all scenarios of a process.
[[nodiscard]] const std::map<std::string, at::Tensor>& leaves_of(std::uint32_t worker);

}  // namespace stitch::testing
