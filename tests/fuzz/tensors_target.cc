#include "stitch/base/byte_io.h"
#include "stitch/rpc/message/message.h"
#include "stitch/rpc/message/tensor_codec.h"

#include <ATen/ATen.h>

#include <cstring>

#include "stitch/rpc/gpu/transfer_section.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz::tensor_tables {

using transport::Buffer;

// The tables of tensors in a message, and of those whose bytes come by transfers between devices.
enum Decoder : std::uint8_t { kTable, kTransfers, kDecoders };

static void touch_tensor(const at::Tensor& tensor) {
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

// A message with what encode_tensors() makes of these.
static transport::Message written(const std::vector<at::Tensor>& tensors) {
  rpc::OutMessage out(rpc::wire::kRequest);
  out.frame.end_body();
  out.frame.set_inline_bytes(256);
  out.tensors = tensors;
  rpc::encode_tensors(out);
  return std::move(out.frame).finish();
}

static void check_alike(const at::Tensor& one, const at::Tensor& other) {
  require(one.defined() == other.defined(), "a tensor, written again");
  if (!one.defined()) return;
  require(one.sizes() == other.sizes() && one.scalar_type() == other.scalar_type() &&
              one.layout() == other.layout() && one.requires_grad() == other.requires_grad(),
          "a tensor, written again");
}

// How many buffers, the size of each, how long the table of tensors is, the table, the bytes of the
// buffers. Small ones are in the frame.
static bool run_table(Choices choices) {
  return accepts([&] {
    transport::FrameBuilder builder(rpc::wire::kRequest);
    builder.end_body();
    builder.set_inline_bytes(256);
    const unsigned buffers = choices.byte() % 16;
    std::vector<std::size_t> sizes;
    for (unsigned i = 0; i < buffers; ++i) sizes.push_back(choices.word() % 4096);
    builder.add_section(rpc::wire::kTensors, choices.take(choices.word()));
    for (const std::size_t size : sizes) {
      Buffer buffer = transport::allocate_buffer({}, size);
      if (size > 0) std::memset(buffer.data, 0, size);
      const Bytes content = choices.take(size);
      if (!content.empty()) std::memcpy(buffer.data, content.data(), content.size());
      static_cast<void>(builder.add_buffer(std::move(buffer)));
    }
    rpc::InMessage message(std::move(builder).finish(), WorkerInfo{"peer", WorkerId(1), 1});
    rpc::decode_tensors(message);
    for (const at::Tensor& tensor : message.tensors) touch_tensor(tensor);
    rpc::InMessage again(written(message.tensors), WorkerInfo{"peer", WorkerId(1), 1});
    rpc::decode_tensors(again);
    require(again.tensors.size() == message.tensors.size(), "tensors, written again");
    for (std::size_t i = 0; i < again.tensors.size(); ++i)
      check_alike(message.tensors[i], again.tensors[i]);
    return !message.tensors.empty();
  });
}

static bool run_transfers(Bytes bytes) {
  return accepts([&] {
    const auto section = rpc::TransferSection::decode(bytes);
    const base::Bytes again = section.encode();
    const auto twice = rpc::TransferSection::decode(again.span());
    require(same(twice.encode().span(), again.span()), "a section of transfers, written again");
  });
}

static bool run(Bytes input) {
  Choices choices(input);
  return choices.byte() % kDecoders == kTable ? run_table(choices) : run_transfers(choices.rest());
}

static base::Bytes seed_of(const std::vector<at::Tensor>& tensors) {
  const transport::Message message = written(tensors);
  const transport::FrameView view(message);
  base::Bytes seed;
  base::ByteWriter to(seed);
  to.write(static_cast<std::uint8_t>(kTable));
  to.write(static_cast<std::uint8_t>(view.buffers().size()));
  for (const auto& each : view.buffers()) to.write(static_cast<std::uint16_t>(each.buffer.bytes));
  const auto* table = view.section(rpc::wire::kTensors);
  to.write(static_cast<std::uint16_t>(table->bytes.size()));
  to.write_bytes(table->bytes);
  for (const auto& each : view.buffers())
    to.write_bytes({static_cast<const std::byte*>(each.buffer.data), each.buffer.bytes});
  return seed;
}

static Seeds seeds() {
  Seeds list;
  const auto add = [&](const char* name, const std::vector<at::Tensor>& tensors) {
    list.push_back({name, seed_of(tensors)});
  };
  add("dense", {at::ones({3, 4}), at::Tensor(), at::ones({0, 2})});
  add("strided", {at::ones({10, 20}).t(), at::ones({4, 1}).expand({4, 5})});
  add("types",
      {at::ones({5}, at::kBool), at::ones({5}, at::kComplexDouble), at::ones({2}, at::kHalf)});
  add("sparse", {at::eye(6).to_sparse(), at::scalar_tensor(1.5)});
  add("gradient", {at::ones({2, 2}).requires_grad_()});
  rpc::TransferSection section;
  section.transfers = {{7, 64, c10::Device(c10::kCUDA, 0)}, {8, 32, c10::Device(c10::kCUDA, 1)}};
  section.tensors.push_back({0, at::kFloat, true, {2, 3}, {3, 1}, 0, 0});
  section.tensors.push_back({2, at::kLong, false, {4}, {1}, 1, 0});
  section.tensors.push_back({5, at::kFloat, false, {2, 2}, {0, 1}, 0, 32});
  list.push_back({"transfers", seed_for(kTransfers, section.encode().span())});
  return list;
}

}  // namespace stitch::fuzz::tensor_tables

namespace stitch::fuzz {
// A tensor takes some hundred bytes, a description of one 20 or more; buffers are announced.
const Target tensors{"tensors", tensor_tables::run, tensor_tables::seeds, 256,
                     std::size_t{4} << 20};
}  // namespace stitch::fuzz
