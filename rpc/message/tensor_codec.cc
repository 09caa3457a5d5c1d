// One file, though long: what is written and what is read stand side by side.
#include "stitch/rpc/message/tensor_codec.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string>

#include "stitch/base/byte_io.h"
#include "stitch/rpc/message/frame_kinds.h"

namespace stitch::rpc {

namespace {

using base::ByteReader;
using base::Bytes;
using base::ByteWriter;
using transport::Buffer;

enum class Layout : std::uint8_t { undefined = 0, dense = 1, coo = 2 };
enum Flag : std::uint8_t { kRequiresGrad = 1, kCoalesced = 2, kHasStrides = 4, kWrappedNumber = 8 };
constexpr std::size_t kMaxDims = kMaxWireDims;
constexpr std::size_t kReservedTensors = 256;

// Position in this list is the wire code: our own numbers, since libtorch's may change.
constexpr std::array kDtypes{at::kByte,        at::kChar,         at::kShort,         at::kInt,
                             at::kLong,        at::kHalf,         at::kFloat,         at::kDouble,
                             at::kComplexHalf, at::kComplexFloat, at::kComplexDouble, at::kBool,
                             at::kBFloat16};

using c10::DispatchKey;
using c10::DispatchKeySet;

// Of a tensor whose memory is its values.
constexpr DispatchKeySet kPlainKeys({DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::AutogradCPU,
                                     DispatchKey::AutogradCUDA, DispatchKey::AutogradOther,
                                     DispatchKey::ADInplaceOrView, DispatchKey::AutocastCPU,
                                     DispatchKey::AutocastCUDA});
// Of all that can be sent.
constexpr DispatchKeySet kSentKeys =
    kPlainKeys |
    DispatchKeySet({DispatchKey::SparseCPU, DispatchKey::SparseCUDA, DispatchKey::Conjugate,
                    DispatchKey::Negative, DispatchKey::ZeroTensor});

// One that the tensor has beside these; Undefined: none.
DispatchKey other_key(const at::Tensor& tensor, DispatchKeySet keys) {
  return (tensor.key_set() - keys).highestFunctionalityKey();
}

std::uint8_t dtype_code(const at::Tensor& tensor) { return wire_dtype(tensor.scalar_type()); }

// The bytes of a contiguous run of tensor memory, as a buffer that holds the tensor.
Buffer share(const at::Tensor& tensor, std::size_t bytes) {
  auto holder = std::make_shared<const at::Tensor>(tensor);
  return Buffer{{}, tensor.data_ptr(), bytes, std::move(holder)};
}

// Whether dimensions of stride 0 may be sent once. Not in a sparse tensor's parts: checking them
// takes time by the number of elements, which must have arrived then.
enum class Expanded { once, in_full };

// The caller's own, which may be changed after the call, or copies that only the message has.
enum class Source { callers, copies, copies_to_come };

void write_dense(OutMessage& message, ByteWriter& out, const at::Tensor& original,
                 bool requires_grad, Expanded stride_0, Source source) {
  at::Tensor tensor = stride_0 == Expanded::once ? original : original.contiguous();
  if (tensor._is_zerotensor()) tensor = at::zeros(tensor.sizes(), tensor.options());
  tensor = tensor.resolve_conj().resolve_neg();
  const auto sizes = original.sizes();
  // Expanded dimensions (stride 0) are sent once: narrowed to length 1 here, stretched again by
  // their stride of 0 there.
  std::vector<std::int64_t> expanded;
  if (tensor.numel() > 0 && !tensor.is_non_overlapping_and_dense()) {
    for (std::int64_t d = 0; d < tensor.dim(); ++d) {
      if (tensor.stride(d) == 0 && tensor.size(d) > 1) {
        tensor = tensor.narrow(d, 0, 1);
        expanded.push_back(d);
      }
    }
    if (!tensor.is_non_overlapping_and_dense()) tensor = tensor.clone(at::MemoryFormat::Preserve);
  }
  std::vector<std::int64_t> strides = tensor.strides().vec();
  for (const auto d : expanded) strides[static_cast<std::size_t>(d)] = 0;
  const std::size_t bytes = static_cast<std::size_t>(tensor.numel()) * tensor.element_size();
  if (source == Source::callers && bytes > message.frame.inline_bytes() &&
      bytes <= kSnapshotBytes && tensor.is_alias_of(original))
    tensor = tensor.clone();

  const bool has_strides = !expanded.empty() || !tensor.is_contiguous();
  out.write(Layout::dense);
  out.write(dtype_code(tensor));
  out.write(static_cast<std::uint8_t>((requires_grad ? kRequiresGrad : 0) |
                                      (has_strides ? kHasStrides : 0)));
  out.write(static_cast<std::uint8_t>(sizes.size()));
  for (const auto size : sizes) out.write(size);
  if (has_strides) {
    for (const auto stride : strides) out.write(stride);
  }
  out.write(message.frame.add_buffer(bytes == 0 ? Buffer{} : share(tensor, bytes)));
}

// Whether the tensor's bytes go into the frame as they are. Most do; they are spared the handles,
// sizes and strides that others need.
bool is_small_and_plain(const OutMessage& message, const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.device().is_cpu() && tensor.is_contiguous() &&
         tensor.nbytes() <= message.frame.inline_bytes() &&
         other_key(tensor, kPlainKeys) == DispatchKey::Undefined &&
         static_cast<std::size_t>(tensor.dim()) <= kMaxDims;
}

void write_small_and_plain(OutMessage& message, ByteWriter& out, const at::Tensor& tensor) {
  out.write(Layout::dense);
  out.write(dtype_code(tensor));
  out.write(static_cast<std::uint8_t>(
      (tensor.requires_grad() ? kRequiresGrad : 0) |
      (tensor.unsafeGetTensorImpl()->is_wrapped_number() ? kWrappedNumber : 0)));
  out.write(static_cast<std::uint8_t>(tensor.dim()));
  for (const auto size : tensor.sizes()) out.write(size);
  const std::size_t bytes = tensor.nbytes();
  out.write(message.frame.add_buffer(bytes == 0 ? Buffer{}
                                                : Buffer{{}, tensor.data_ptr(), bytes, nullptr}));
}

void write_tensor(OutMessage& message, ByteWriter& out, const at::Tensor& tensor, Source source) {
  if (!tensor.defined()) {
    out.write(Layout::undefined);
    return;
  }
  if (is_small_and_plain(message, tensor)) {
    write_small_and_plain(message, out, tensor);
    return;
  }
  if (!tensor.device().is_cpu()) {
    throw Error(ErrorCode::invalid_argument,
                "tensor on device " + tensor.device().str() + " cannot be sent as one on the CPU");
  }
  if (static_cast<std::size_t>(tensor.dim()) > kMaxDims) {
    throw Error(ErrorCode::invalid_argument, "tensor with " + std::to_string(tensor.dim()) +
                                                 " dimensions cannot be sent; at most " +
                                                 std::to_string(kMaxDims));
  }
  if (tensor.layout() == at::kStrided) {
    write_dense(message, out, tensor.detach(), tensor.requires_grad(), Expanded::once, source);
  } else {
    const at::Tensor plain = tensor.detach();
    out.write(Layout::coo);
    out.write(dtype_code(tensor));
    out.write(static_cast<std::uint8_t>((tensor.requires_grad() ? kRequiresGrad : 0) |
                                        (tensor.is_coalesced() ? kCoalesced : 0)));
    out.write(static_cast<std::uint8_t>(tensor.dim()));
    for (const auto size : tensor.sizes()) out.write(size);
    write_dense(message, out, plain._indices(), false, Expanded::in_full, source);
    write_dense(message, out, plain._values(), false, Expanded::in_full, source);
  }
}

using Dims = c10::SmallVector<std::int64_t, 6>;

Dims read_dims(ByteReader& in, std::size_t count, std::string_view what) {
  Dims dims(count);
  for (auto& dim : dims) {
    dim = in.read<std::int64_t>();
    if (dim < 0)
      throw Error(ErrorCode::protocol, "tensor descriptor has a negative " + std::string(what) +
                                           ": " + std::to_string(dim));
  }
  return dims;
}

Dims packed_strides(at::IntArrayRef sizes) {
  Dims strides(sizes.size(), 1);
  for (std::size_t d = sizes.size(); d-- > 1;) {
    const std::int64_t size = sizes[d] > 0 ? sizes[d] : 1;
    if (__builtin_mul_overflow(strides[d], size, &strides[d - 1]))
      throw Error(ErrorCode::protocol, "tensor descriptor has sizes that overflow");
  }
  return strides;
}

at::Tensor over_memory(const Buffer& buffer, std::size_t bytes, at::ScalarType dtype,
                       at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto holder = std::make_unique<std::shared_ptr<const void>>(buffer.keep_alive);
  c10::DataPtr memory(
      buffer.data, holder.release(),
      [](void* held) { delete static_cast<std::shared_ptr<const void>*>(held); }, at::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<std::int64_t>(bytes),
                       std::move(memory), c10::GetCPUAllocator(), true);
  return at::empty({0}, at::TensorOptions().dtype(dtype))
      .set_(std::move(storage), 0, sizes, strides);
}

struct Header {
  at::ScalarType dtype;
  std::uint8_t flags;
  Dims sizes;
};

Header read_header(ByteReader& in) {
  Header header{};
  header.dtype = dtype_of_wire(in.read<std::uint8_t>());
  header.flags = in.read<std::uint8_t>();
  const auto dims = in.read<std::uint8_t>();
  if (dims > kMaxDims)
    throw Error(ErrorCode::protocol, "tensor descriptor has " + std::to_string(dims) +
                                         " dimensions; at most " + std::to_string(kMaxDims));
  header.sizes = read_dims(in, dims, "size");
  return header;
}

// The buffers of a message, each handed out once and in order. A buffer that several descriptors
// could name would be copied for each of them, and tensors of one message would share memory.
class BufferQueue {
 public:
  explicit BufferQueue(const InMessage& message) : buffers_(message.view.buffers()) {}
  [[nodiscard]] const transport::FrameView::BufferView& take(std::uint32_t index) {
    if (index >= buffers_.size()) {
      throw Error(ErrorCode::protocol, "tensor descriptor names buffer " + std::to_string(index) +
                                           " of " + std::to_string(buffers_.size()));
    }
    if (index != next_) {
      throw Error(ErrorCode::protocol, "tensor descriptor names buffer " + std::to_string(index) +
                                           ", the next one is " + std::to_string(next_));
    }
    const auto& taken = buffers_[next_++];
    if (taken.buffer.device != transport::Device{})
      throw Error(ErrorCode::protocol, "tensor descriptor names a buffer that is not on the CPU");
    return taken;
  }

 private:
  const std::vector<transport::FrameView::BufferView>& buffers_;
  std::uint32_t next_ = 0;
};

// Bytes other than 0 and 1 are no bools: reading them is undefined.
void make_bools(void* data, std::size_t bytes) {
  auto* const at = static_cast<std::uint8_t*>(data);
  std::uint8_t seen = 0;
  for (std::size_t i = 0; i < bytes; ++i) seen |= at[i];
  if (seen <= 1) return;
  for (std::size_t i = 0; i < bytes; ++i) at[i] = at[i] != 0 ? 1 : 0;
}

at::Tensor read_dense(BufferQueue& buffers, ByteReader& in, Expanded stride_0) {
  const Header header = read_header(in);
  const auto strides = (header.flags & kHasStrides) != 0
                           ? read_dims(in, header.sizes.size(), "stride")
                           : packed_strides(header.sizes);
  const auto& source = buffers.take(in.read<std::uint32_t>());
  const std::size_t item = c10::elementSize(header.dtype);
  const auto needed = stride_0 == Expanded::once
                          ? spanned_bytes(header.sizes, strides, item)
                          : spanned_bytes(header.sizes, packed_strides(header.sizes), item);
  if (!needed || *needed > source.buffer.bytes) {
    throw Error(ErrorCode::protocol,
                "tensor descriptor needs " + (needed ? std::to_string(*needed) : "too many") +
                    " bytes, its buffer has " + std::to_string(source.buffer.bytes));
  }
  if (*needed != 0 && overlaps(header.sizes, strides))
    throw Error(ErrorCode::protocol, "tensor descriptor has elements that overlap in memory");
  if (stride_0 == Expanded::in_full && (header.flags & kHasStrides) != 0)
    throw Error(ErrorCode::protocol, "sparse tensor descriptor has parts with strides");
  at::Tensor tensor;
  if (*needed == 0) {
    tensor = at::empty_strided(header.sizes, strides, header.dtype);
  } else if (source.in_frame && (header.flags & kHasStrides) == 0) {
    // Not through the dispatcher, which takes longer than the rest.
    tensor = at::Tensor(at::detail::empty_cpu(header.sizes, header.dtype));
    std::memcpy(tensor.data_ptr(), source.buffer.data, *needed);
  } else if (source.in_frame) {
    tensor = at::empty_strided(header.sizes, strides, header.dtype);
    std::memcpy(tensor.data_ptr(), source.buffer.data, *needed);
  } else {
    tensor = over_memory(source.buffer, source.buffer.bytes, header.dtype, header.sizes, strides);
  }
  if (header.dtype == at::kBool && *needed != 0)
    make_bools(tensor.data_ptr(), source.in_frame ? *needed : source.buffer.bytes);
  if ((header.flags & kWrappedNumber) != 0) {
    if (tensor.dim() != 0)
      throw Error(ErrorCode::protocol, "tensor descriptor wants a number that has dimensions");
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  if ((header.flags & kRequiresGrad) != 0) {
    if (!tensor.is_floating_point() && !tensor.is_complex())
      throw Error(ErrorCode::protocol, "tensor descriptor wants gradients of an integer tensor");
    tensor.set_requires_grad(true);
  }
  return tensor;
}

// What "coalesced" says of the indices of a sparse tensor: sorted, none twice.
bool sorted_without_duplicates(const at::Tensor& indices) {
  const auto columns = indices.accessor<std::int64_t, 2>();
  for (std::int64_t i = 1; i < columns.size(1); ++i) {
    std::int64_t d = 0;
    while (d < columns.size(0) && columns[d][i - 1] == columns[d][i]) ++d;
    if (d == columns.size(0) || columns[d][i - 1] > columns[d][i]) return false;
  }
  return true;
}

at::Tensor read_coo(BufferQueue& buffers, ByteReader& in) {
  const Header header = read_header(in);
  if (in.read<Layout>() != Layout::dense)
    throw Error(ErrorCode::protocol, "sparse tensor descriptor has no dense indices");
  const at::Tensor indices = read_dense(buffers, in, Expanded::in_full);
  if (indices.scalar_type() != at::kLong || indices.dim() != 2 || indices.requires_grad())
    throw Error(ErrorCode::protocol, "sparse tensor descriptor has no indices");
  if (in.read<Layout>() != Layout::dense)
    throw Error(ErrorCode::protocol, "sparse tensor descriptor has no dense values");
  const at::Tensor values = read_dense(buffers, in, Expanded::in_full);
  // The checked constructor: indices out of range would be undefined behaviour later.
  at::_validate_sparse_coo_tensor_args(indices, values, header.sizes);
  at::Tensor tensor = at::_sparse_coo_tensor_unsafe(indices, values, header.sizes,
                                                    values.options().layout(at::kSparse));
  // A peer's word is not enough: operations rely on it without looking.
  tensor._coalesced_((header.flags & kCoalesced) != 0 && sorted_without_duplicates(indices));
  if ((header.flags & kRequiresGrad) != 0) tensor.set_requires_grad(true);
  return tensor;
}

at::Tensor read_tensor(BufferQueue& buffers, ByteReader& in) {
  switch (const auto layout = in.read<Layout>()) {
    case Layout::undefined:
      return {};
    case Layout::dense:
      return read_dense(buffers, in, Expanded::once);
    case Layout::coo:
      return read_coo(buffers, in);
    default:
      throw Error(ErrorCode::protocol, "tensor descriptor has layout code " +
                                           std::to_string(static_cast<int>(layout)) +
                                           ", known are 0 to 2");
  }
}

// Whether decoding looks at every element of a tensor in this table; others beside the frame are
// used in place.
bool looks_at_elements(ByteReader in) {
  const auto count = in.read_count(1);
  for (std::uint32_t i = 0; i < count; ++i) {
    const auto layout = in.read<Layout>();
    if (layout == Layout::undefined) continue;
    if (layout != Layout::dense) return true;
    if (dtype_of_wire(in.read<std::uint8_t>()) == at::kBool) return true;
    const auto flags = in.read<std::uint8_t>();
    const std::size_t dims = in.read<std::uint8_t>();
    static_cast<void>(in.take(dims * sizeof(std::int64_t) * ((flags & kHasStrides) != 0 ? 2 : 1)));
    static_cast<void>(in.read<std::uint32_t>());
  }
  return false;
}

void write_tensors(OutMessage& message, const std::vector<at::Tensor>& tensors, Source source) {
  if (tensors.empty()) return;
  const at::NoGradGuard no_grad;
  Bytes table;
  ByteWriter out(table);
  out.write(static_cast<std::uint32_t>(tensors.size()));
  for (std::size_t i = 0; i < tensors.size(); ++i)
    write_tensor(message, out, tensors[i],
                 tensors[i].is_same(message.tensors[i]) ? Source::callers : source);
  message.frame.add_section(wire::kTensors, table.span());
}

}  // namespace

std::uint8_t wire_dtype(at::ScalarType dtype) {
  for (std::size_t i = 0; i < kDtypes.size(); ++i) {
    if (kDtypes[i] == dtype) return static_cast<std::uint8_t>(i + 1);
  }
  throw Error(ErrorCode::invalid_argument,
              std::string("tensor of dtype ") + at::toString(dtype) + " cannot be sent");
}

at::ScalarType dtype_of_wire(std::uint8_t code) {
  if (code == 0 || code > kDtypes.size()) {
    throw Error(ErrorCode::protocol, "tensor descriptor has dtype code " + std::to_string(code) +
                                         ", known are 1 to " + std::to_string(kDtypes.size()));
  }
  return kDtypes[code - 1];
}

std::optional<std::size_t> spanned_bytes(at::IntArrayRef sizes, at::IntArrayRef strides,
                                         std::size_t item) {
  std::size_t last = 0;
  std::int64_t elements = 1;
  for (const auto size : sizes) {
    if (size == 0) return 0;
    if (__builtin_mul_overflow(elements, size, &elements)) return std::nullopt;
  }
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    std::size_t step = 0;
    if (__builtin_mul_overflow(static_cast<std::size_t>(sizes[d] - 1),
                               static_cast<std::size_t>(strides[d]), &step))
      return std::nullopt;
    if (__builtin_add_overflow(last, step, &last)) return std::nullopt;
  }
  std::size_t bytes = 0;
  if (__builtin_add_overflow(last, std::size_t{1}, &last) ||
      __builtin_mul_overflow(last, item, &bytes))
    return std::nullopt;
  return bytes;
}

bool overlaps(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::int64_t elements = 1;
  std::int64_t span = 1;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (strides[d] == 0) continue;
    elements *= sizes[d];
    span += (sizes[d] - 1) * strides[d];
  }
  return elements > span;
}

std::optional<std::string> missing_memory(const at::Tensor& tensor) {
  if (tensor.numel() == 0 || tensor._is_zerotensor()) return std::nullopt;
  const auto bytes = spanned_bytes(tensor.sizes(), tensor.strides(), tensor.element_size());
  std::size_t needed = 0;
  if (!bytes ||
      __builtin_add_overflow(
          *bytes, static_cast<std::size_t>(tensor.storage_offset()) * tensor.element_size(),
          &needed))
    needed = std::numeric_limits<std::size_t>::max();
  const at::Storage& storage = tensor.storage();
  const std::size_t there = storage.data() == nullptr ? 0 : storage.nbytes();
  if (there >= needed) return std::nullopt;
  return "its storage has " + std::to_string(there) + " of " + std::to_string(needed) + " bytes";
}

void expect_sendable(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorCode::invalid_argument,
                std::string("tensor of type ") + tensor.toString() + " cannot be sent: " + why);
  };
  switch (const DispatchKey other = other_key(tensor, kSentKeys)) {
    case DispatchKey::Undefined:
      break;
    case DispatchKey::Named:
      refuse("its dimensions have names: send tensor.rename(at::nullopt)");
      break;
    case DispatchKey::Quantized:
      refuse("it is quantized: send int_repr(), scale and zero point, or dequantize()");
      break;
    default:
      refuse(std::string("it is ") + c10::toString(other) +
             ", known are dense and sparse COO tensors");
  }
  if (tensor._fw_grad(0).defined()) refuse("it has a tangent of forward-mode differentiation");
  if (!tensor.is_cpu() && !tensor.is_cuda()) return;  // refused with its position
  const auto expect_memory = [&](const at::Tensor& part) {
    if (const auto missing = missing_memory(part)) refuse(*missing);
  };
  if (tensor.layout() != at::kSparse) {
    expect_memory(tensor);
  } else {
    const at::NoGradGuard no_grad;
    expect_memory(tensor._indices());
    expect_memory(tensor._values());
  }
}

void encode_tensors(OutMessage& message) {
  for (const at::Tensor& tensor : message.tensors) expect_sendable(tensor);
  write_tensors(message, message.tensors, Source::callers);
}

void encode_copies(OutMessage& message, const std::vector<at::Tensor>& copies, bool complete) {
  // Bytes that are still to come cannot be copied into the frame.
  if (!complete) message.frame.set_inline_bytes(0);
  write_tensors(message, copies, complete ? Source::copies : Source::copies_to_come);
}

void decode_tensors(InMessage& message) {
  if (message.arrival) [[unlikely]] {
    if (message.arrival->error) throw *message.arrival->error;
    return;
  }
  const auto* section = message.view.section(wire::kTensors);
  if (section == nullptr) return;
  const at::NoGradGuard no_grad;
  ByteReader in(section->bytes, "tensor table");
  BufferQueue buffers(message);
  const auto count = in.read_count(1);
  // A descriptor may be a single byte, a tensor is more: memory follows what was read.
  message.tensors.reserve(std::min<std::size_t>(count, kReservedTensors));
  try {
    for (std::uint32_t i = 0; i < count; ++i) message.tensors.push_back(read_tensor(buffers, in));
  } catch (const c10::Error& error) {
    throw Error(ErrorCode::protocol, std::string("tensor descriptor is inconsistent: ") +
                                         error.what_without_backtrace());
  }
  in.expect_end();
}

bool takes_long_to_decode(const InMessage& message) noexcept {
  if (message.raw.frame.size() > kQuicklyDecodedBytes) return true;
  if (total_bytes(message.raw) <= kQuicklyDecodedBytes) return false;
  const auto* section = message.view.section(wire::kTensors);
  try {
    return section != nullptr && looks_at_elements(ByteReader(section->bytes, "tensor table"));
  } catch (const std::exception&) {
    return false;  // decoding it ends there, too
  }
}

}  // namespace stitch::rpc
