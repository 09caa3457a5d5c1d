#include "stitch/transport/gpu/kernels/launch.h"
#include "stitch/transport/gpu/kernels/launchers.h"
#include "stitch/transport/gpu/kernels/pack_body.h"
#include "stitch/transport/gpu/kernels/pack_plan.h"

namespace stitch::transport::gpu::kernels {
namespace {

template <bool kPack, class Table>
__global__ void __launch_bounds__(kPackThreads)
    move_kernel(const __grid_constant__ Table table, std::uint64_t packed, std::uint32_t* errors) {
  const BlockRange range = range_of(table, blockIdx.x);
  std::uint64_t tensor = 0;
  if (is_plain_copy(table, range, &tensor)) {
    const std::uint64_t buffer = packed + std::uint64_t{range.first_unit} * kUnitBytes;
    const std::uint64_t from = (kPack ? tensor : buffer) + threadIdx.x * kSlotBytes;
    const std::uint64_t to = (kPack ? buffer : tensor) + threadIdx.x * kSlotBytes;
    Slot slots[kSlotsPerThread];
#pragma unroll
    for (std::uint32_t i = 0; i < kSlotsPerThread; ++i)
      slots[i] = load<Slot>(from + i * kPackThreads * kSlotBytes);
#pragma unroll
    for (std::uint32_t i = 0; i < kSlotsPerThread; ++i)
      store(to + i * kPackThreads * kSlotBytes, slots[i]);
    return;
  }
  bool good = true;
#pragma unroll 1
  for (std::uint32_t i = 0; i < kSlotsPerThread; ++i)
    good &= move_slot<kPack>(table, range, i * kPackThreads + threadIdx.x, packed);
  if (!good && errors != nullptr) *errors = 1;
}

template <bool kPack, class Table>
int launch_table(const Table& table, std::uint64_t packed, std::uint32_t* errors,
                 cudaStream_t stream) {
  move_kernel<kPack, Table><<<blocks_of(table), kPackThreads, 0, stream>>>(table, packed, errors);
  return cudaGetLastError();
}

template <bool kPack, class Small, class Table>
int launch(const Table& table, std::uint64_t packed, std::uint32_t* errors, cudaStream_t stream) {
  if (table.count > Small::kCapacity) return launch_table<kPack>(table, packed, errors, stream);
  Small small;
  copy_table(table, small);
  return launch_table<kPack>(small, packed, errors, stream);
}

template <bool kPack>
int move(int device, const PackedTensor* tensors, std::size_t count, std::uint64_t packed,
         std::uint64_t packed_bytes, std::uint32_t* errors, void* stream) {
  if (packed % kPackedAlignment != 0) return kKernelMisaligned;
  if (packed_bytes % kPackedAlignment != 0) return kKernelBadRange;
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  const auto to = static_cast<cudaStream_t>(stream);
  FlatTable flat;
  StridedTable strided;
  return plan_pack(
      tensors, count, packed_bytes, !kPack, flat, strided,
      [&](const FlatTable& table) {
        return launch<kPack, SmallFlatTable>(table, packed, errors, to);
      },
      [&](const StridedTable& table) {
        return launch<kPack, SmallStridedTable>(table, packed, errors, to);
      });
}

template <bool kPack, class Table>
int load_kernel() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, move_kernel<kPack, Table>);
}
template <class Table>
int load_both() {
  if (const int status = load_kernel<true, Table>()) return status;
  return load_kernel<false, Table>();
}

}  // namespace

int pack(int device, const PackedTensor* tensors, std::size_t count, void* packed,
         std::uint64_t packed_bytes, std::uint32_t* errors, void* stream) {
  return move<true>(device, tensors, count, reinterpret_cast<std::uint64_t>(packed), packed_bytes,
                    errors, stream);
}
int unpack(int device, const PackedTensor* tensors, std::size_t count, const void* packed,
           std::uint64_t packed_bytes, std::uint32_t* errors, void* stream) {
  return move<false>(device, tensors, count, reinterpret_cast<std::uint64_t>(packed), packed_bytes,
                     errors, stream);
}

int load_pack_kernels() {
  if (const int status = load_both<FlatTable>()) return status;
  if (const int status = load_both<SmallFlatTable>()) return status;
  if (const int status = load_both<StridedTable>()) return status;
  return load_both<SmallStridedTable>();
}

}  // namespace stitch::transport::gpu::kernels
