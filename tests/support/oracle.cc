#include "tests/support/oracle.h"

#include <torch/torch.h>

#include "stitch/dist_autograd/graph/compat.h"

namespace stitch::testing {

namespace {

struct MessageNode final : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }
};

// What arrives when these tensors are sent: copies, each that requires grad behind a node of its
// own.
Tensors sent(const Tensors& tensors) {
  Tensors received;
  for (const at::Tensor& tensor : tensors) {
    received.push_back(tensor.defined() ? tensor.detach().clone() : tensor);
    if (!tensor.defined() || !tensor.requires_grad()) continue;
    const auto node = dist_autograd::make_node<MessageNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(tensor));
    torch::autograd::set_history(received.back(), node);
  }
  return received;
}

ProgramHost local_host(const std::vector<Tensors>& parameters, int worker) {
  ProgramHost host;
  host.parameter = [&parameters, worker](int index) {
    return parameters[static_cast<std::size_t>(worker)][static_cast<std::size_t>(index)];
  };
  host.call = [&parameters](int callee, const ProgramBlock& block, const Tensors& arguments) {
    Tensors results = sent(run_block(local_host(parameters, callee), block, sent(arguments)));
    return [results] { return results; };
  };
  return host;
}

}  // namespace

Roots run_for_roots(const ProgramHost& host, const RandomProgram& program, const Asking& asking) {
  const at::Tensor loss = run_program(host, program);
  Roots roots{{loss}, {at::Tensor()}};
  if (asking.own_seed)
    roots.gradients[0] = at::real(program_seed(program, 0)).sum().to(loss.scalar_type());
  if (asking.two_roots) {
    roots.tensors.push_back(at::sin(loss));
    roots.gradients.emplace_back();
  }
  if (asking.two_losses) {
    roots.tensors.push_back(run_second_program(host, program));
    roots.gradients.push_back(program_seed(program, 1));
  }
  return roots;
}

at::Tensor loss_of_gradients(const Tensors& gradients) {
  at::Tensor loss;
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.defined() || !gradient.requires_grad()) continue;
    const at::Tensor values = gradient.is_sparse() ? gradient.to_dense() : gradient;
    const at::Tensor norm = at::real(values * values.conj()).sum();
    loss = loss.defined() ? loss + norm : norm;
  }
  return loss;
}

OracleResult run_oracle(const RandomProgram& program, const std::vector<Tensors>& parameters,
                        const Asking& asking) {
  const Roots roots = run_for_roots(local_host(parameters, 0), program, asking);
  OracleResult result;
  result.loss = roots.tensors[0].item<double>();
  for (const Tensors& each : parameters) result.gradients.emplace_back(each.size());
  // Passes are added up here, out of place: libtorch adds to `.grad` in place, whatever shares its
  // memory. In one of some thousand programs the two differ.
  const auto take_gradients = [&] {
    for (std::size_t worker = 0; worker < parameters.size(); ++worker) {
      for (std::size_t i = 0; i < parameters[worker].size(); ++i) {
        at::Tensor& grad = parameters[worker][i].mutable_grad();
        at::Tensor& sum = result.gradients[worker][i];
        if (grad.defined() && sum.defined()) {
          sum = sum.is_sparse() ? grad.detach() + sum : sum + grad.detach();
        } else if (grad.defined()) {
          sum = grad.detach();
        }
        grad = at::Tensor();
      }
    }
  };
  for (int pass = 1; pass <= asking.passes; ++pass) {
    torch::autograd::backward(roots.tensors, roots.gradients, pass < asking.passes || asking.twice,
                              asking.twice);
    if (pass < asking.passes) take_gradients();
  }
  Tensors first;
  for (const at::Tensor& parameter : parameters[0]) first.push_back(parameter.grad());
  for (std::size_t worker = 1; asking.twice_remote && worker < parameters.size(); ++worker) {
    Tensors there;
    for (const at::Tensor& parameter : parameters[worker]) there.push_back(parameter.grad());
    for (const at::Tensor& gradient : sent(there)) first.push_back(gradient);
  }
  take_gradients();
  const at::Tensor second = asking.twice ? loss_of_gradients(first) : at::Tensor();
  if (second.defined()) torch::autograd::backward({second});
  take_gradients();
  return result;
}

}  // namespace stitch::testing
