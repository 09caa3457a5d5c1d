#include <cub/device/device_radix_sort.cuh>

#include "stitch/transport/gpu/kernels/launch.h"
#include "stitch/transport/gpu/kernels/launchers.h"
#include "stitch/transport/gpu/kernels/sparse_plan.h"

namespace stitch::transport::gpu::kernels {
namespace {

constexpr std::uint32_t kThreads = 256;
static_assert(kThreads == kRunParts * 32);

__global__ void __launch_bounds__(kThreads)
    number_kernel(const std::int64_t* indices, std::uint32_t count, std::uint32_t rows,
                  std::uint32_t* keys, std::uint32_t* positions, std::uint32_t* errors) {
  const std::uint32_t at = blockIdx.x * kThreads + threadIdx.x;
  if (at >= count) return;
  const std::int64_t index = indices[at];
  const bool in_table = index >= 0 && index < static_cast<std::int64_t>(rows);
  keys[at] = in_table ? static_cast<std::uint32_t>(index) : rows;
  positions[at] = at;
  if (!in_table && errors != nullptr) *errors = 1;
}

// `lanes` threads, 1 << log_lanes, for each sorted position.
// Up to 128 registers: left alone, ptxas spills to have 40 for sm_80 and sm_90.
template <int kWidth>
__global__ void __launch_bounds__(kThreads, 2)
    chunk_kernel(const __grid_constant__ SparseArguments a, std::uint32_t log_lanes) {
  const std::uint64_t thread = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::uint64_t position = thread >> log_lanes;
  if (position >= a.count) return;
  const std::uint32_t lanes = 1U << log_lanes;
  const std::uint32_t lane = threadIdx.x & (lanes - 1);
  const Chunk chunk = chunk_at(a, static_cast<std::uint32_t>(position));
  if (chunk.kind == ChunkKind::kNone) return;
  if (chunk.kind != ChunkKind::kWhole) {
    save_columns<kWidth>(a, chunk, lane, lanes);
    return;
  }
  Columns<kWidth> kept[kKeptPanels];
  float squares = collect_columns<kWidth>(a, chunk, lane, lanes, kept);
  float row_rate = 0;
  if (a.rule == SparseRule::rowwise_adagrad) {
    const std::uint32_t first = threadIdx.x % 32 - lane;
    const std::uint32_t group = (lanes == 32 ? 0xffffffffU : (1U << lanes) - 1) << first;
    for (std::uint32_t step = lanes / 2; step > 0; step /= 2)
      squares += __shfl_xor_sync(group, squares, static_cast<int>(step));
    if (lane == 0) row_rate = advance_row(a, a.keys[chunk.begin], squares);
    row_rate = __shfl_sync(group, row_rate, static_cast<int>(first));
  }
  apply_columns<kWidth>(a, chunk, lane, lanes, kept, row_rate);
}

// One thread block for each block of positions; those in which no long run begins end at once.
template <int kWidth>
__global__ void __launch_bounds__(kThreads) run_kernel(const __grid_constant__ SparseArguments a) {
  __shared__ Columns<kWidth> sums[kRunParts][32];
  __shared__ float shared_rate;
  const LongRun run = long_run_in(a, blockIdx.x);
  if (!run.exists) return;
  const std::uint32_t part = threadIdx.x / 32;
  const std::uint32_t lane = threadIdx.x % 32;
  const BlockSpan span = part_of(run, part);
  const bool measures = a.rule == SparseRule::rowwise_adagrad;
  float row_rate = 0;
  // rowwise_adagrad needs the squares of the whole row first, and sums it a second time.
  for (int pass = measures ? 0 : 1; pass < 2; ++pass) {
    float squares = 0;
    for (std::uint32_t base = 0; base < a.columns; base += 32 * kWidth) {
      const std::uint32_t column = base + lane * kWidth;
      const bool inside = column < a.columns;
      __syncthreads();
      if (inside) sums[part][lane] = sum_blocks<kWidth>(a, run, span.first, span.end, column);
      __syncthreads();
      if (part != 0 || !inside) continue;
      Columns<kWidth> total = sums[0][lane];
      for (std::uint32_t i = 1; i < kRunParts; ++i) add(total, sums[i][lane]);
      if (pass == 0) {
        squares += sum_of_squares(total);
      } else {
        apply_rule(a, run.row, column, total, row_rate);
      }
    }
    if (pass == 1) return;
    if (part == 0) {
      for (int step = 16; step > 0; step /= 2)
        squares += __shfl_xor_sync(0xffffffffU, squares, step);
      if (lane == 0) shared_rate = advance_row(a, run.row, squares);
    }
    __syncthreads();
    row_rate = shared_rate;
  }
}

int sort(void* memory, std::size_t* bytes, const SparseLayout& layout, std::uint64_t base,
         std::int64_t count, std::int64_t rows, cudaStream_t stream) {
  const auto numbers = [base](std::uint64_t offset) {
    return reinterpret_cast<std::uint32_t*>(base + offset);
  };
  return cub::DeviceRadixSort::SortPairs(
      memory, *bytes, static_cast<const std::uint32_t*>(numbers(layout.keys)),
      numbers(layout.sorted_keys), static_cast<const std::uint32_t*>(numbers(layout.positions)),
      numbers(layout.sorted_positions), static_cast<int>(count), 0, key_bits(rows), stream);
}

template <int kWidth>
int launch(const SparseArguments& a, cudaStream_t stream) {
  const std::uint32_t lanes = lanes_for(a.columns, kWidth);
  std::uint32_t log_lanes = 0;
  while ((1U << log_lanes) < lanes) ++log_lanes;
  const std::uint64_t threads = std::uint64_t{a.count} << log_lanes;
  const auto blocks = static_cast<std::uint32_t>((threads + kThreads - 1) / kThreads);
  chunk_kernel<kWidth><<<blocks, kThreads, 0, stream>>>(a, log_lanes);
  if (const int status = cudaGetLastError()) return status;
  if (a.count <= kBlockPositions) return cudaSuccess;
  run_kernel<kWidth><<<sparse_blocks(a.count), kThreads, 0, stream>>>(a);
  return cudaGetLastError() == cudaSuccess ? kKernelSuccess : kKernelCutShort;
}

template <class Kernel>
int load_kernel(Kernel* kernel) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}

}  // namespace

int sparse_workspace(int device, std::int64_t count, std::int64_t rows, std::int64_t columns,
                     std::uint64_t* bytes) {
  *bytes = 0;
  if (const int status = check_shape(count, rows, columns)) return status;
  if (count == 0 || columns == 0) return kKernelSuccess;
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  const SparseLayout layout = sparse_layout(count, columns);
  std::size_t sort_bytes = 0;
  if (const int status = sort(nullptr, &sort_bytes, layout, 0, count, rows, nullptr)) return status;
  *bytes = layout.sort + sort_bytes;
  return kKernelSuccess;
}

int sparse_update(int device, const SparseUpdate* update, std::uint32_t* errors, void* stream) {
  SparseArguments a;
  if (const int status = plan_sparse(*update, &a)) return status;
  if (update->count == 0 || update->columns == 0) return kKernelSuccess;
  std::uint64_t needed = 0;
  if (const int status =
          sparse_workspace(device, update->count, update->rows, update->columns, &needed))
    return status;
  if (update->workspace_bytes < needed) return kKernelSmallWorkspace;
  if (update->workspace % kPackedAlignment != 0) return kKernelMisaligned;
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();

  const auto to = static_cast<cudaStream_t>(stream);
  const SparseLayout layout = sparse_layout(update->count, update->columns);
  const std::uint64_t base = update->workspace;
  place_workspace(layout, base, &a);
  number_kernel<<<(a.count + kThreads - 1) / kThreads, kThreads, 0, to>>>(
      reinterpret_cast<const std::int64_t*>(update->indices), a.count, a.rows,
      reinterpret_cast<std::uint32_t*>(base + layout.keys),
      reinterpret_cast<std::uint32_t*>(base + layout.positions), errors);
  if (const int status = cudaGetLastError()) return status;
  std::size_t sort_bytes = needed - layout.sort;
  if (const int status = sort(reinterpret_cast<void*>(base + layout.sort), &sort_bytes, layout,
                              base, update->count, update->rows, to))
    return status;
  return column_width(*update) == 4 ? launch<4>(a, to) : launch<1>(a, to);
}

int load_sparse_kernels() {
  if (const int status = load_kernel(number_kernel)) return status;
  if (const int status = load_kernel(chunk_kernel<1>)) return status;
  if (const int status = load_kernel(chunk_kernel<4>)) return status;
  if (const int status = load_kernel(run_kernel<1>)) return status;
  return load_kernel(run_kernel<4>);
}

}  // namespace stitch::transport::gpu::kernels
