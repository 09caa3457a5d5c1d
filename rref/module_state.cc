#include "stitch/rref/module_state.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <sstream>

#include "stitch/base/error.h"

namespace stitch::rref {
namespace {

std::map<std::string, at::Tensor> tensors_of(const torch::nn::Module& module) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& item : module.named_parameters()) tensors.emplace(item.key(), item.value());
  for (const auto& item : module.named_buffers()) tensors.emplace(item.key(), item.value());
  return tensors;
}

}  // namespace

std::map<std::string, at::Tensor> module_state(const torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> state;
  for (const auto& [name, tensor] : tensors_of(module))
    state.emplace(name, tensor.defined() ? tensor.detach().clone() : tensor);
  return state;
}

void load_module_state(torch::nn::Module& module, const std::map<std::string, at::Tensor>& state) {
  const auto own = tensors_of(module);
  std::ostringstream wrong;
  for (const auto& [name, tensor] : own) {
    const auto given = state.find(name);
    if (given == state.end()) {
      wrong << "; \"" << name << "\" is missing";
    } else if (given->second.defined() != tensor.defined() ||
               (tensor.defined() && given->second.sizes() != tensor.sizes())) {
      wrong << "; \"" << name << "\" has sizes "
            << (tensor.defined() ? tensor.sizes() : at::IntArrayRef()) << ", given are "
            << (given->second.defined() ? given->second.sizes() : at::IntArrayRef());
    }
  }
  for (const auto& [name, tensor] : state) {
    if (!own.contains(name)) wrong << "; \"" << name << "\" is unknown";
  }
  if (!wrong.str().empty())
    throw Error(ErrorCode::invalid_argument, "state does not fit the module" + wrong.str());
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : own) {
    // The copy of the handle shares the tensor, which is changed in place.
    if (tensor.defined()) at::Tensor(tensor).copy_(state.at(name));
  }
}

}  // namespace stitch::rref
