#pragma once

#include <cstddef>
#include <cstdint>

// What libstitch_kernels.so offers, in plain types: stitch includes this without CUDA. The library
// exports one function, stitch_kernel_table; everything else stands in the table it returns. A
// change of anything below counts up kKernelAbi, and a loader refuses another number.
namespace stitch::transport::gpu {

inline constexpr std::uint32_t kKernelAbi = 2;

// Tensors of one message begin at multiples of this many bytes in its packed buffer.
inline constexpr std::uint64_t kPackedAlignment = 256;
inline constexpr int kMaxPackedDimensions = 8;

// Zero, one of these, or a cudaError_t, which is positive. KernelTable::describe has the text.
enum KernelStatus : int {
  kKernelSuccess = 0,
  kKernelBadOffset = -1,       // packed offset: no multiple of 256, not ascending, or overlapping
  kKernelBadRange = -2,        // the tensors do not fit into the packed buffer
  kKernelBadShape = -3,        // a size is negative, or sizes and strides overflow 64 bits
  kKernelBadElement = -4,      // an element size of 0, or a cast of elements other than float
  kKernelMisaligned = -5,      // an address or stride does not suit the type it points to
  kKernelTooManyDims = -6,     // more than kMaxPackedDimensions dimensions that do not merge
  kKernelOverlap = -7,         // unpacking into a tensor with a stride of 0
  kKernelBadRule = -8,         // an unknown rule, or a state tensor that the rule needs is missing
  kKernelSmallWorkspace = -9,  // the workspace has fewer bytes than sparse_workspace() says
  // Some rows are stepped, and what was to step the others was not launched. All other errors of
  // sparse_update() leave all rows as they are.
  kKernelCutShort = -10
};

enum class PackCast : std::uint32_t { none = 0, float_to_bfloat16 = 1, float_to_half = 2 };

// One tensor and its place in a packed buffer. Bytes between the end of a tensor and the next
// multiple of kPackedAlignment are packed as zeros.
struct PackedTensor {
  // The address of element (0, ..., 0), on the device.
  std::uint64_t address;
  // In bytes. Ascending from tensor to tensor.
  std::uint64_t packed_offset;
  // On the device, sizes[0] numbers of rows; 0: none. Position i of dimension 0 is then row rows[i]
  // of a tensor with `table_rows` rows. A number outside of it is packed as zeros, is skipped when
  // unpacking, and sets the `errors` word. Unpacking REQUIRES: no row twice.
  std::uint64_t rows;
  std::int64_t table_rows;
  std::int64_t sizes[kMaxPackedDimensions];
  std::int64_t strides[kMaxPackedDimensions];  // in elements
  std::int32_t dimensions;
  std::uint32_t element_bytes;  // of the tensor, not of its packed form
  PackCast cast;                // packing; unpacking casts back
  std::uint32_t reserved;
};

// How a row w of weights, touched by the (summed) gradient g, is updated. In each case rows that
// no index names, and their state, stay as they are.
enum class SparseRule : std::uint32_t {
  // w -= lr * g. torch::optim::SGD without momentum and weight decay.
  sgd = 0,
  // s += g * g; w -= clr * g / (sqrt(s) + eps), clr = lr / (1 + (step - 1) * lr_decay). The sparse
  // case of torch::optim::Adagrad.
  adagrad = 1,
  // As adagrad, with one s for a row: s += mean(g * g).
  rowwise_adagrad = 2,
  // m += (1 - beta1) * (g - m); v += (1 - beta2) * (g * g - v);
  // w -= lr * sqrt(1 - beta2^step) / (1 - beta1^step) * m / (sqrt(v) + eps).
  // torch.optim.SparseAdam.
  adam = 3
};

// One step of one table of weights. All tensors are fp32 on the device, with contiguous rows;
// strides are in elements, from row to row. The result does not depend on timing: duplicates of an
// index are summed in an order that the indices alone determine.
struct SparseUpdate {
  std::uint64_t weights;
  std::uint64_t first_state;   // adagrad: s; rowwise_adagrad: s[rows], contiguous; adam: m
  std::uint64_t second_state;  // adam: v
  std::int64_t weights_stride;
  std::int64_t state_stride;
  std::int64_t rows;  // less than 2^32 - 1
  std::int64_t columns;
  std::uint64_t indices;    // std::int64_t[count]; one outside of the table is skipped and sets
                            // the `errors` word
  std::uint64_t gradients;  // float[count][columns]
  std::int64_t gradients_stride;
  std::int64_t count;  // less than 2^31
  SparseRule rule;
  std::uint32_t reserved;
  double learning_rate;
  double lr_decay;
  double eps;
  double beta1;
  double beta2;
  std::int64_t step;  // 1 for the first
  std::uint64_t workspace;
  std::uint64_t workspace_bytes;
};

// The functions work on `device`, whatever the calling thread's current device is, and leave that
// as it was. They enqueue on `stream` (a cudaStream_t) and do not wait. What they are given on the
// host is copied before they return; `errors`, on the device, may be null where nothing sets it.
// Thread contract: any thread.
struct KernelTable {
  std::uint32_t abi;
  std::uint32_t bytes;  // sizeof(KernelTable)

  // REQUIRES: `packed` is aligned to kPackedAlignment, and so is packed_bytes.
  int (*pack)(int device, const PackedTensor* tensors, std::size_t count, void* packed,
              std::uint64_t packed_bytes, std::uint32_t* errors, void* stream);
  int (*unpack)(int device, const PackedTensor* tensors, std::size_t count, const void* packed,
                std::uint64_t packed_bytes, std::uint32_t* errors, void* stream);
  // How much workspace an update of these shapes takes, in bytes.
  int (*sparse_workspace)(int device, std::int64_t count, std::int64_t rows, std::int64_t columns,
                          std::uint64_t* bytes);
  int (*sparse_update)(int device, const SparseUpdate* update, std::uint32_t* errors, void* stream);
  // Loads all kernels but those of the sort, which the first sparse_update() loads. CUDA loads a
  // kernel at its first launch otherwise, and may wait for the device while it does.
  int (*load)(int device);
  const char* (*describe)(int status);
};

}  // namespace stitch::transport::gpu

extern "C" {
using StitchKernelTableFunction = const stitch::transport::gpu::KernelTable* (*)();
}
#define STITCH_KERNEL_TABLE_SYMBOL "stitch_kernel_table"
