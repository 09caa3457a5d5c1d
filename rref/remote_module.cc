#include "stitch/rref/remote_module.h"

#include <ATen/ATen.h>

#include <sstream>

#include "stitch/rpc/agent/agent.h"

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

StateDifference load_module_state(torch::nn::Module& module,
                                  const std::map<std::string, at::Tensor>& state, bool strict) {
  const auto own = tensors_of(module);
  StateDifference difference;
  std::ostringstream wrong;
  for (const auto& [name, tensor] : own) {
    const auto found = state.find(name);
    if (found == state.end()) {
      difference.missing.push_back(name);
      if (strict) wrong << "; \"" << name << "\" is missing";
      continue;
    }
    const at::Tensor& given = found->second;
    if (given.defined() != tensor.defined()) {
      wrong << "; \"" << name << "\" is " << (tensor.defined() ? "defined" : "undefined")
            << ", given is " << (given.defined() ? "a defined" : "an undefined") << " one";
    } else if (tensor.defined() && given.sizes() != tensor.sizes()) {
      wrong << "; \"" << name << "\" has sizes " << tensor.sizes() << ", given are "
            << given.sizes();
    } else if (tensor.defined() && given.scalar_type() != tensor.scalar_type()) {
      wrong << "; \"" << name << "\" has dtype " << at::toString(tensor.scalar_type())
            << ", given is " << at::toString(given.scalar_type());
    } else if (tensor.defined() && given.layout() != tensor.layout()) {
      wrong << "; \"" << name << "\" has layout " << tensor.layout() << ", given is "
            << given.layout();
    }
  }
  for (const auto& [name, tensor] : state) {
    if (own.contains(name)) continue;
    difference.unknown.push_back(name);
    if (strict) wrong << "; \"" << name << "\" is unknown";
  }
  if (!wrong.str().empty())
    throw Error(ErrorCode::invalid_argument, "state does not fit the module" + wrong.str());
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : own) {
    const auto found = state.find(name);
    // The copy of the handle shares the tensor, which is changed in place.
    if (tensor.defined() && found != state.end()) at::Tensor(tensor).copy_(found->second);
  }
  return difference;
}

at::Device module_device(const Target& to, const at::Device& device) {
  const auto agent = rpc::current_agent();
  return agent->device_tensors().existing_device(to.resolve(agent->peers()), device,
                                                 "a remote module cannot be made on");
}

void move_module(torch::nn::Module& module, const SentDevice& device) {
  module.to(at::Device(device.name));
}

}  // namespace stitch::rref
