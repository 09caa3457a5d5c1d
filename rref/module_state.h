#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

namespace torch::nn {
class Module;
}

namespace stitch::rref {

// Copies of a module's parameters and buffers, by name. Not safe while another thread modifies the
// module.
[[nodiscard]] std::map<std::string, at::Tensor> module_state(const torch::nn::Module& module);

// Overwrites them in place. Throws Error(invalid_argument), having changed nothing, that lists the
// names missing from `state`, the names the module does not have, and the sizes that differ.
void load_module_state(torch::nn::Module& module, const std::map<std::string, at::Tensor>& state);

}  // namespace stitch::rref
