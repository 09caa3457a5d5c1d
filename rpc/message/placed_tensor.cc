#include "stitch/rpc/message/placed_tensor.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <sstream>
#include <string>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/rpc/message/message.h"
#include "stitch/rpc/message/parse_device.h"
#include "stitch/rpc/message/tensor_codec.h"

namespace stitch {

PlacedTensor on(const std::string& device, at::Tensor tensor) {
  return {rpc::parse_device(device), std::move(tensor)};
}

}  // namespace stitch

namespace stitch::rpc {

namespace {

std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  std::ostringstream text;
  text << at::toString(tensor.scalar_type()) << ' ' << tensor.sizes();
  if (tensor.layout() != at::kStrided) text << ' ' << tensor.layout();
  if (!tensor.is_cpu()) text << " on " << tensor.device();
  return text.str();
}

}  // namespace

void IntoTensor::set(at::Tensor tensor) {
  const auto refuse = [](const std::string& why) {
    throw Error(ErrorCode::invalid_argument,
                "a result cannot be received into a tensor that " + why);
  };
  if (!tensor.defined()) refuse("is undefined");
  if (!tensor.is_cpu() && !tensor.is_cuda()) refuse("is on device " + tensor.device().str());
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_nested())
    refuse("is not dense");
  if (tensor.requires_grad()) refuse("requires grad");
  if (missing_memory(tensor)) refuse("has too little memory: " + *missing_memory(tensor));
  if (tensor.is_cuda())
    stream_ = c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(tensor.device());
  tensor_ = std::move(tensor);
}

std::optional<c10::Stream> IntoTensor::store_later(const InMessage& message) {
  if (!stream_ || message.tensors.size() != 1) return std::nullopt;
  const at::Tensor& result = message.tensors.front();
  if (!result.defined() || result.layout() != at::kStrided || result.device() != tensor_.device() ||
      result.scalar_type() != tensor_.scalar_type() || result.sizes() != tensor_.sizes())
    return std::nullopt;  // store_result() says so
  const at::NoGradGuard no_grad;
  const c10::StreamGuard on(*stream_);
  tensor_.copy_(result.detach(), true);
  stored_ = true;
  return stream_;
}

transport::Buffer IntoTensor::place(std::size_t bytes) noexcept {
  if (!is_set() || placed_ || !tensor_.is_cpu() || !tensor_.is_contiguous() ||
      tensor_.nbytes() != bytes)
    return {};
  placed_ = true;
  return {{}, tensor_.data_ptr(), bytes, std::make_shared<const at::Tensor>(tensor_)};
}

at::Tensor IntoTensor::store_result(at::Tensor result) {
  if (!is_set()) return result;
  if (!result.defined() || result.layout() != at::kStrided || result.device() != tensor_.device() ||
      result.scalar_type() != tensor_.scalar_type() || result.sizes() != tensor_.sizes()) {
    throw Error(ErrorCode::invalid_argument, "the result is " + describe(result) +
                                                 ", the tensor to receive it into is " +
                                                 describe(tensor_));
  }
  const at::NoGradGuard no_grad;
  const bool there =
      stored_ || result.numel() == 0 ||
      (placed_ && result.data_ptr() == tensor_.data_ptr() && result.strides() == tensor_.strides());
  if (there) {
    tensor_.unsafeGetTensorImpl()->bump_version();
  } else {
    // A transposed result, say, that is in the destination memory already.
    tensor_.copy_(placed_ ? result.detach().clone() : result.detach());
  }
  if (!result.requires_grad()) return tensor_;
  // One memory has one version counter, so that a backward which saved the result sees when the
  // memory is used again.
  result.set_data(tensor_);
  result.unsafeGetTensorImpl()->set_version_counter(
      tensor_.unsafeGetTensorImpl()->version_counter());
  return result;
}

}  // namespace stitch::rpc
