#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <map>
#include <string>
#include <vector>

#include "stitch/rpc/target.h"

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

// The device of `to` that a module is to be made on, with its index. Throws Error: an unknown
// worker, or one that does not have this device.
[[nodiscard]] at::Device module_device(const Target& to, const at::Device& device);

// A device in a message.
struct SentDevice {
  std::string name;  // as at::Device reads and writes it
  template <class Archive>
  void serialize(Archive& archive) {
    archive(name);
  }
};
// Moves the parameters and buffers of a module to a device.
void move_module(torch::nn::Module& module, const SentDevice& device);

}  // namespace stitch::rref
