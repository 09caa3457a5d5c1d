#include "stitch/rpc/gpu/row_update.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/variable.h>

#include <string>

#include "stitch/base/error.h"
#include "stitch/rpc/gpu/device_bridge.h"
#include "stitch/rpc/gpu/device_gate.h"
#include "stitch/rpc/gpu/device_kernels.h"
#include "stitch/transport/gpu/kernel_table.h"

namespace stitch::rpc {

namespace {

using transport::gpu::KernelTable;
using transport::gpu::SparseUpdate;
using Rule = RowUpdate::Rule;

bool is_plain(const at::Tensor& tensor, c10::Device device) {
  return tensor.defined() && tensor.device() == device && tensor.layout() == at::kStrided &&
         tensor.scalar_type() == at::kFloat && tensor.is_contiguous() && !tensor.is_neg();
}

bool has_rows(const at::Tensor& parameter) {
  return parameter.defined() && parameter.is_cuda() && is_plain(parameter, parameter.device()) &&
         parameter.dim() > 0 && parameter.numel() > 0;
}

bool suits(const at::Tensor& gradient, const at::Tensor& parameter) {
  return gradient.defined() && gradient.is_sparse() && gradient.device() == parameter.device() &&
         gradient.scalar_type() == at::kFloat && gradient.sparse_dim() == 1 &&
         gradient.sizes() == parameter.sizes();
}

// Whether the state that the rule needs is there.
bool has_state(const RowUpdate& update, const at::Tensor& parameter) {
  const auto suits = [&](const at::Tensor& state, at::IntArrayRef sizes) {
    return is_plain(state, parameter.device()) && state.sizes() == sizes;
  };
  const at::Tensor& first = update.first_state;
  if (update.rule == Rule::sgd) return true;
  if (update.rule == Rule::rowwise_adagrad) return suits(first, {parameter.size(0)});
  if (!suits(first, parameter.sizes())) return false;
  return update.rule == Rule::adagrad || suits(update.second_state, parameter.sizes());
}

std::uint64_t address(const at::Tensor& tensor) {
  return tensor.defined() ? reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) : 0;
}

}  // namespace

bool update_rows(const at::Tensor& parameter, const at::Tensor& gradient, const RowUpdate& update) {
  if (!has_rows(parameter) || !suits(gradient, parameter) || !has_state(update, parameter))
    return false;
  const DeviceBridge* const bridge = device_bridge();
  const KernelTable* const kernels =
      bridge != nullptr ? device_kernels(parameter.device()) : nullptr;
  if (kernels == nullptr) return false;

  const at::NoGradGuard no_grad;
  const c10::Device device = parameter.device();
  const at::Tensor rows = gradient.detach();
  const at::Tensor indices = rows._indices().contiguous();
  const at::Tensor values = rows._values().contiguous();
  SparseUpdate described{};
  described.rows = parameter.size(0);
  described.columns = parameter.numel() / parameter.size(0);
  described.weights = address(parameter);
  described.first_state = address(update.first_state);
  described.second_state = address(update.second_state);
  described.weights_stride = described.state_stride = described.gradients_stride =
      described.columns;
  described.indices = address(indices);
  described.gradients = address(values);
  described.count = indices.size(1);
  described.rule = update.rule;
  described.learning_rate = update.learning_rate;
  described.lr_decay = update.lr_decay;
  described.eps = update.eps;
  described.beta1 = update.beta1;
  described.beta2 = update.beta2;
  described.step = update.step;
  const auto failed = [&](int status) {
    return transport::gpu::kernel_error(
        *kernels, "update " + std::to_string(described.count) + " rows on device " + device.str(),
        status);
  };

  // What the kernels refuse, too many rows say, libtorch's operators may do all the same.
  int status = kernels->sparse_workspace(device.index(), described.count, described.rows,
                                         described.columns, &described.workspace_bytes);
  if (status < 0 || kernels_cannot_run(device, status)) return false;
  if (status > 0) throw failed(status);
  at::Tensor workspace;
  try {
    workspace = at::empty({static_cast<std::int64_t>(described.workspace_bytes)},
                          at::TensorOptions().dtype(at::kByte).device(device));
  } catch (const std::exception& exception) {
    throw device_error("device " + device.str(), exception);
  }
  described.workspace = address(workspace);
  const c10::Stream stream = c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(device);
  status = kernels->sparse_update(device.index(), &described, nullptr, bridge->raw(stream));
  // Libtorch's operators would step some rows twice.
  if (status == transport::gpu::kKernelCutShort) throw failed(status);
  if (status < 0 || kernels_cannot_run(device, status)) return false;
  if (status > 0) throw failed(status);
  if (!parameter.is_inference()) torch::autograd::impl::bump_version(parameter);
  return true;
}

}  // namespace stitch::rpc
