#include "stitch/rpc/gpu/transfer_section.h"

#include <limits>
#include <string>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/error.h"
#include "stitch/rpc/gpu/wire_device.h"
#include "stitch/rpc/message/tensor_codec.h"

namespace stitch::rpc {

namespace {

constexpr std::size_t kTransferEntryBytes = 18;
constexpr std::size_t kTensorEntryBytes = 19;  // without dimensions
constexpr std::uint8_t kWantsGradient = 1;

[[noreturn]] void refuse_section(const std::string& text) {
  throw Error(ErrorCode::protocol, "section of transfers " + text);
}

TransferSection::Tensor read_described(base::ByteReader& in) {
  TransferSection::Tensor tensor;
  tensor.tensor = in.read<std::uint32_t>();
  tensor.dtype = dtype_of_wire(in.read<std::uint8_t>());
  tensor.requires_grad = (in.read<std::uint8_t>() & kWantsGradient) != 0;
  const auto dims = in.read<std::uint8_t>();
  if (dims > kMaxWireDims)
    refuse_section("has a tensor of " + std::to_string(dims) + " dimensions");
  for (std::uint8_t d = 0; d < dims; ++d) tensor.sizes.push_back(in.read<std::int64_t>());
  for (std::uint8_t d = 0; d < dims; ++d) tensor.strides.push_back(in.read<std::int64_t>());
  for (std::uint8_t d = 0; d < dims; ++d) {
    if (tensor.sizes[d] <= 0 || tensor.strides[d] < 0)
      refuse_section("has a tensor of size " + std::to_string(tensor.sizes[d]) + " and stride " +
                     std::to_string(tensor.strides[d]));
  }
  if (tensor.requires_grad && !c10::isFloatingType(tensor.dtype) &&
      !c10::isComplexType(tensor.dtype))
    refuse_section("wants gradients of an integer tensor");
  tensor.transfer = in.read<std::uint32_t>();
  tensor.offset = in.read<std::uint64_t>();
  return tensor;
}

}  // namespace

std::size_t TransferSection::bytes() const noexcept {
  std::size_t sum = 0;
  for (const auto& each : transfers) {
    if (__builtin_add_overflow(sum, each.bytes, &sum))
      return std::numeric_limits<std::size_t>::max();
  }
  return sum;
}

base::Bytes TransferSection::encode() const {
  base::Bytes bytes;
  base::ByteWriter out(bytes);
  out.write(static_cast<std::uint32_t>(transfers.size()));
  for (const auto& transfer : transfers) {
    out.write(transfer.id);
    out.write(transfer.bytes);
    write_device(out, transfer.to);
  }
  out.write(static_cast<std::uint32_t>(tensors.size()));
  for (const auto& tensor : tensors) {
    out.write(tensor.tensor);
    out.write(wire_dtype(tensor.dtype));
    out.write(static_cast<std::uint8_t>(tensor.requires_grad ? kWantsGradient : 0));
    out.write(static_cast<std::uint8_t>(tensor.sizes.size()));
    for (const auto size : tensor.sizes) out.write(size);
    for (const auto stride : tensor.strides) out.write(stride);
    out.write(tensor.transfer);
    out.write(tensor.offset);
  }
  return bytes;
}

TransferSection TransferSection::decode(std::span<const std::byte> bytes) {
  base::ByteReader in(bytes, "section of transfers");
  TransferSection section;
  const auto transfers = in.read_count(kTransferEntryBytes);
  if (transfers > kMaxTransfers)
    refuse_section("names " + std::to_string(transfers) + " transfers, at most " +
                   std::to_string(kMaxTransfers) + " are possible");
  for (std::uint32_t i = 0; i < transfers; ++i) {
    Transfer transfer;
    transfer.id = in.read<std::uint64_t>();
    transfer.bytes = in.read<std::uint64_t>();
    transfer.to = read_device(in);
    if (transfer.id == 0 || transfer.bytes == 0 || transfer.to.is_cpu() ||
        transfer.bytes > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      refuse_section("has transfer " + std::to_string(transfer.id) + " of " +
                     std::to_string(transfer.bytes) + " bytes to " + transfer.to.str());
    }
    section.transfers.push_back(transfer);
  }
  if (transfers == 0) refuse_section("names none");
  const auto tensors = in.read_count(kTensorEntryBytes);
  // Of each transfer: up to where the tensors so far have its bytes. Tensors of several alternate.
  std::vector<std::uint64_t> taken(section.transfers.size(), 0);
  for (std::uint32_t i = 0; i < tensors; ++i) {
    Tensor tensor = read_described(in);
    if (!section.tensors.empty() && section.tensors.back().tensor >= tensor.tensor)
      refuse_section("names its tensors in no order");
    const auto needed = spanned_bytes(tensor.sizes, tensor.strides, c10::elementSize(tensor.dtype));
    if (!needed) refuse_section("has sizes that overflow");
    if (overlaps(tensor.sizes, tensor.strides))
      refuse_section("has a tensor whose elements overlap in memory");
    if (tensor.transfer >= section.transfers.size() || tensor.offset < taken[tensor.transfer] ||
        tensor.offset % c10::elementSize(tensor.dtype) != 0 ||
        tensor.offset > section.transfers[tensor.transfer].bytes ||
        *needed > section.transfers[tensor.transfer].bytes - tensor.offset) {
      refuse_section("places tensor " + std::to_string(tensor.tensor) + " of " +
                     std::to_string(*needed) + " bytes at " + std::to_string(tensor.offset) +
                     " of transfer " + std::to_string(tensor.transfer) + ", where it has no room");
    }
    taken[tensor.transfer] = tensor.offset + *needed;
    section.tensors.push_back(std::move(tensor));
  }
  for (std::size_t i = 0; i < taken.size(); ++i) {
    if (taken[i] == 0)
      refuse_section("names transfer " + std::to_string(i) + ", which has no tensor");
  }
  in.expect_end();
  return section;
}

}  // namespace stitch::rpc
