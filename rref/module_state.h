#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace stitch {

// What load_state_dict(state, false) left alone.
struct StateDifference {
  std::vector<std::string> missing;  // in the module, not in the state
  std::vector<std::string> unknown;  // in the state, not in the module
  template <class Archive>
  void serialize(Archive& archive) {
    archive(missing, unknown);
  }
};

}  // namespace stitch

namespace stitch::rref {

// Copies of a module's parameters and buffers, by name. Not safe while another thread modifies the
// module.
[[nodiscard]] std::map<std::string, at::Tensor> module_state(const torch::nn::Module& module);

// Overwrites them in place. Throws Error(invalid_argument), having changed nothing, that lists
// every name whose sizes or dtype differ and, if `strict`, the names missing from `state` and those
// that the module does not have. Otherwise these are returned.
StateDifference load_module_state(torch::nn::Module& module,
                                  const std::map<std::string, at::Tensor>& state, bool strict);

// Throws Error(invalid_argument) for any device but the CPU.
void require_cpu(const at::Device& device);

}  // namespace stitch::rref
