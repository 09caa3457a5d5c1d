#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/message/tensor_codec.h"

#include <ATen/ATen.h>

#include "stitch/base/error.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz {
namespace {

using transport::Buffer;

void touch_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  if (tensor.is_sparse()) {
    touch_tensor(tensor._indices());
    touch_tensor(tensor._values());
    return;
  }
  if (tensor.numel() == 0) return;
  // First and last byte of what the sizes and strides cover.
  std::size_t last = 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i)
    last += static_cast<std::size_t>((tensor.size(i) - 1) * tensor.stride(i));
  const auto* data = static_cast<const std::byte*>(tensor.data_ptr());
  touch({data, 1});
  const auto element = static_cast<std::size_t>(tensor.element_size());
  touch({data + last * element, element});
}

// The input: how many buffers, the size of each and whether it is beside the frame (only large ones
// may be), how long the table of tensors is, the table, the bytes of the buffers.
bool run(Bytes input) {
  Choices choices(input);
  try {
    transport::FrameBuilder builder(rpc::wire::kRequest);
    builder.end_body();
    builder.set_inline_bytes(256);
    const unsigned buffers = choices.byte() % 16;
    std::vector<std::size_t> sizes;
    for (unsigned i = 0; i < buffers; ++i) sizes.push_back(choices.word() % 4096);
    builder.add_section(rpc::wire::kTensors, choices.take(choices.word()));
    for (const std::size_t size : sizes) {
      Buffer buffer = transport::allocate_buffer({}, size);
      std::memset(buffer.data, 0, size);
      const Bytes content = choices.take(size);
      if (!content.empty()) std::memcpy(buffer.data, content.data(), content.size());
      builder.add_buffer(std::move(buffer));
    }
    rpc::InMessage message(std::move(builder).finish(), WorkerInfo{"peer", WorkerId(1), 1});
    rpc::decode_tensors(message);
    for (const at::Tensor& tensor : message.tensors) touch_tensor(tensor);
    return !message.tensors.empty();
  } catch (const Error&) {
    return false;
  }
}

base::Bytes seed_of(const std::vector<at::Tensor>& tensors) {
  rpc::OutMessage out(rpc::wire::kRequest);
  out.frame.end_body();
  out.frame.set_inline_bytes(256);
  out.tensors = tensors;
  rpc::encode_tensors(out);
  const transport::Message message = std::move(out.frame).finish();
  const transport::FrameView view(message);
  base::Bytes seed;
  base::ByteWriter to(seed);
  to.write(static_cast<std::uint8_t>(view.buffers().size()));
  for (const auto& each : view.buffers()) to.write(static_cast<std::uint16_t>(each.buffer.bytes));
  const auto* table = view.section(rpc::wire::kTensors);
  to.write(static_cast<std::uint16_t>(table->bytes.size()));
  to.write_bytes(table->bytes);
  for (const auto& each : view.buffers())
    to.write_bytes({static_cast<const std::byte*>(each.buffer.data), each.buffer.bytes});
  return seed;
}

std::vector<base::Bytes> seeds() {
  std::vector<base::Bytes> list;
  list.push_back(seed_of({at::ones({3, 4}), at::Tensor(), at::ones({0, 2})}));
  list.push_back(seed_of({at::ones({10, 20}).t(), at::ones({4, 1}).expand({4, 5})}));
  list.push_back(seed_of({at::ones({5}, at::kBool), at::ones({5}, at::kComplexDouble)}));
  list.push_back(seed_of({at::eye(6).to_sparse(), at::scalar_tensor(1.5)}));
  return list;
}

}  // namespace

const Target tensors{"tensors", run, seeds, 256, std::size_t{4} << 20};

}  // namespace stitch::fuzz
