#pragma once

#include "stitch/transport/gpu/kernels/kernel_abi.h"

// The functions of KernelTable, which describes them.
namespace stitch::transport::gpu::kernels {

int pack(int device, const PackedTensor* tensors, std::size_t count, void* packed,
         std::uint64_t packed_bytes, std::uint32_t* errors, void* stream);
int unpack(int device, const PackedTensor* tensors, std::size_t count, const void* packed,
           std::uint64_t packed_bytes, std::uint32_t* errors, void* stream);
int sparse_workspace(int device, std::int64_t count, std::int64_t rows, std::int64_t columns,
                     std::uint64_t* bytes);
int sparse_update(int device, const SparseUpdate* update, std::uint32_t* errors, void* stream);

}  // namespace stitch::transport::gpu::kernels
