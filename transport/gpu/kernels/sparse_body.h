#pragma once

#include <cmath>
#include <cstdint>

#include "stitch/transport/gpu/kernels/host_device.h"
#include "stitch/transport/gpu/kernels/kernel_abi.h"

// Row-wise updates by sorted indices, for the device and for tests on the host. After a stable sort
// by index, duplicates of an index are neighbours, in the order of their gradients: a run. A run is
// summed in chunks, which end at its own end and wherever a block of kBlockPositions positions
// ends, so that a frequent index is summed by many threads, and always in the same order:
//   1. A chunk that is a whole run is summed and applied at once (kWhole).
//   2. Of a run over several blocks, the chunk in its first block is summed into that block's
//      `tails` (kTail), the chunks in the others into their block's `heads` (kHead).
//   3. combine: tails[first] + heads[first + 1] + ... + heads[last], applied.
namespace stitch::transport::gpu::kernels {

inline constexpr std::uint32_t kBlockPositions = 32;

// `kWidth` neighbouring columns of a row, moved by one load or store.
template <int kWidth>
struct alignas(sizeof(float) * kWidth) Columns {
  float values[kWidth];
};

// The argument of the kernels.
struct SparseArguments {
  const std::uint32_t* keys;       // the indices, sorted; `rows` where one is not in the table
  const std::uint32_t* positions;  // of the gradients, in the same order
  const float* gradients;
  float* weights;
  float* first_state;
  float* second_state;
  float* heads;  // [blocks][columns]
  float* tails;
  std::int64_t gradients_stride;
  std::int64_t weights_stride;
  std::int64_t state_stride;
  std::uint32_t count;
  std::uint32_t rows;
  std::uint32_t columns;
  SparseRule rule;
  float rate;  // the learning rate after decay or bias correction
  float eps;
  float gain1;  // 1 - beta1
  float gain2;  // 1 - beta2
};

enum class ChunkKind : std::uint32_t { kNone, kWhole, kHead, kTail };
struct Chunk {
  ChunkKind kind;
  std::uint32_t begin;  // sorted positions
  std::uint32_t end;
};

// The chunk that begins at sorted position `at`; kNone if none does.
STITCH_HOST_DEVICE Chunk chunk_at(const SparseArguments& a, std::uint32_t at) {
  Chunk chunk{ChunkKind::kNone, at, at};
  if (at >= a.count) return chunk;
  const std::uint32_t key = a.keys[at];
  if (key >= a.rows) return chunk;
  const bool begins_run = at == 0 || a.keys[at - 1] != key;
  const bool begins_block = at % kBlockPositions == 0;
  if (!begins_run && !begins_block) return chunk;
  std::uint32_t end = at + 1;
  while (end < a.count && end % kBlockPositions != 0 && a.keys[end] == key) ++end;
  chunk.end = end;
  if (!begins_run) {
    chunk.kind = ChunkKind::kHead;
  } else if (end < a.count && a.keys[end] == key) {
    chunk.kind = ChunkKind::kTail;
  } else {
    chunk.kind = ChunkKind::kWhole;
  }
  return chunk;
}

// A run over several blocks: its row, and its chunks as blocks [first, last].
struct LongRun {
  bool exists;
  std::uint32_t row;
  std::uint32_t first_block;
  std::uint32_t last_block;
};

// The run that begins in `block` and continues in the next.
STITCH_HOST_DEVICE LongRun long_run_in(const SparseArguments& a, std::uint32_t block) {
  LongRun run{false, 0, block, block};
  const std::uint64_t next = (std::uint64_t{block} + 1) * kBlockPositions;
  if (next >= a.count) return run;
  const std::uint32_t key = a.keys[next - 1];
  if (key >= a.rows || a.keys[next] != key) return run;
  const std::uint32_t begin = block * kBlockPositions;
  if (a.keys[begin] == key && begin > 0 && a.keys[begin - 1] == key) return run;  // began before
  // The last block whose first position has the key.
  std::uint32_t low = block + 1;
  std::uint32_t high = (a.count - 1) / kBlockPositions;
  while (low < high) {
    const std::uint32_t middle = low + (high - low + 1) / 2;
    if (a.keys[middle * kBlockPositions] == key) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  run.exists = true;
  run.row = key;
  run.last_block = low;
  return run;
}

template <int kWidth>
STITCH_HOST_DEVICE Columns<kWidth> load_columns(const float* from) {
  return *reinterpret_cast<const Columns<kWidth>*>(from);
}
template <int kWidth>
STITCH_HOST_DEVICE void store_columns(float* to, const Columns<kWidth>& columns) {
  *reinterpret_cast<Columns<kWidth>*>(to) = columns;
}
template <int kWidth>
STITCH_HOST_DEVICE void add(Columns<kWidth>& sum, const Columns<kWidth>& more) {
  for (int i = 0; i < kWidth; ++i) sum.values[i] += more.values[i];
}

// The gradients of a chunk, in order, in the columns from `column` on.
template <int kWidth>
STITCH_HOST_DEVICE Columns<kWidth> sum_chunk(const SparseArguments& a, const Chunk& chunk,
                                             std::uint32_t column) {
  Columns<kWidth> sum{};
  for (std::uint32_t at = chunk.begin; at < chunk.end; ++at)
    add(sum, load_columns<kWidth>(a.gradients + a.positions[at] * a.gradients_stride + column));
  return sum;
}

// The sums of blocks [first, end) of a long run, in order.
template <int kWidth>
STITCH_HOST_DEVICE Columns<kWidth> sum_blocks(const SparseArguments& a, const LongRun& run,
                                              std::uint32_t first, std::uint32_t end,
                                              std::uint32_t column) {
  Columns<kWidth> sum{};
  for (std::uint32_t block = first; block < end; ++block) {
    const float* sums = block == run.first_block ? a.tails : a.heads;
    add(sum, load_columns<kWidth>(sums + std::uint64_t{block} * a.columns + column));
  }
  return sum;
}

template <int kWidth>
STITCH_HOST_DEVICE float sum_of_squares(const Columns<kWidth>& gradient) {
  float sum = 0;
  for (int i = 0; i < kWidth; ++i) sum += gradient.values[i] * gradient.values[i];
  return sum;
}

// rowwise_adagrad: adds the mean square of the row's gradient to its state; returns by what the
// gradient is multiplied and subtracted. For one thread of those that work on a row.
STITCH_HOST_DEVICE float advance_row(const SparseArguments& a, std::uint32_t row, float squares) {
  const float sum = a.first_state[row] + squares / static_cast<float>(a.columns);
  a.first_state[row] = sum;
  return a.rate / (std::sqrt(sum) + a.eps);
}

// Updates columns of one row. `row_rate`: what advance_row() returned.
template <int kWidth>
STITCH_HOST_DEVICE void apply_rule(const SparseArguments& a, std::uint32_t row,
                                   std::uint32_t column, const Columns<kWidth>& gradient,
                                   float row_rate) {
  float* const weights = a.weights + row * a.weights_stride + column;
  Columns<kWidth> w = load_columns<kWidth>(weights);
  if (a.rule == SparseRule::sgd || a.rule == SparseRule::rowwise_adagrad) {
    const float rate = a.rule == SparseRule::sgd ? a.rate : row_rate;
    for (int i = 0; i < kWidth; ++i) w.values[i] -= rate * gradient.values[i];
  } else if (a.rule == SparseRule::adagrad) {
    float* const state = a.first_state + row * a.state_stride + column;
    Columns<kWidth> s = load_columns<kWidth>(state);
    for (int i = 0; i < kWidth; ++i) {
      const float g = gradient.values[i];
      s.values[i] += g * g;
      w.values[i] -= a.rate * (g / (std::sqrt(s.values[i]) + a.eps));
    }
    store_columns(state, s);
  } else {
    float* const first = a.first_state + row * a.state_stride + column;
    float* const second = a.second_state + row * a.state_stride + column;
    Columns<kWidth> m = load_columns<kWidth>(first);
    Columns<kWidth> v = load_columns<kWidth>(second);
    for (int i = 0; i < kWidth; ++i) {
      const float g = gradient.values[i];
      m.values[i] += (g - m.values[i]) * a.gain1;
      v.values[i] += (g * g - v.values[i]) * a.gain2;
      w.values[i] -= a.rate * (m.values[i] / (std::sqrt(v.values[i]) + a.eps));
    }
    store_columns(first, m);
    store_columns(second, v);
  }
  store_columns(weights, w);
}

// Sums of up to this many panels of a row stay in registers between their squares and their use; a
// panel is what the lanes of a row cover at a time. Others are summed again.
inline constexpr std::uint32_t kKeptPanels = 4;

// Step 1 for one of `lanes` threads that work on a whole run: sums its columns and returns the sum
// of their squares.
template <int kWidth>
STITCH_HOST_DEVICE float collect_columns(const SparseArguments& a, const Chunk& chunk,
                                         std::uint32_t lane, std::uint32_t lanes,
                                         Columns<kWidth> (&kept)[kKeptPanels]) {
  const std::uint32_t panel = lanes * kWidth;
  const std::uint32_t start = lane * kWidth;
  float squares = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (std::uint32_t i = 0; i < kKeptPanels; ++i) {
    const std::uint32_t column = start + i * panel;
    if (column >= a.columns) continue;
    kept[i] = sum_chunk<kWidth>(a, chunk, column);
    squares += sum_of_squares(kept[i]);
  }
  if (a.rule != SparseRule::rowwise_adagrad) return squares;
  for (std::uint32_t column = start + kKeptPanels * panel; column < a.columns; column += panel)
    squares += sum_of_squares(sum_chunk<kWidth>(a, chunk, column));
  return squares;
}
// Step 2, when advance_row() has run if the rule needs it.
template <int kWidth>
STITCH_HOST_DEVICE void apply_columns(const SparseArguments& a, const Chunk& chunk,
                                      std::uint32_t lane, std::uint32_t lanes,
                                      const Columns<kWidth> (&kept)[kKeptPanels], float row_rate) {
  const std::uint32_t row = a.keys[chunk.begin];
  const std::uint32_t panel = lanes * kWidth;
  const std::uint32_t start = lane * kWidth;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (std::uint32_t i = 0; i < kKeptPanels; ++i) {
    const std::uint32_t column = start + i * panel;
    if (column < a.columns) apply_rule(a, row, column, kept[i], row_rate);
  }
  for (std::uint32_t column = start + kKeptPanels * panel; column < a.columns; column += panel)
    apply_rule(a, row, column, sum_chunk<kWidth>(a, chunk, column), row_rate);
}
// Instead of both, for a part of a long run.
template <int kWidth>
STITCH_HOST_DEVICE void save_columns(const SparseArguments& a, const Chunk& chunk,
                                     std::uint32_t lane, std::uint32_t lanes) {
  float* const sums = (chunk.kind == ChunkKind::kHead ? a.heads : a.tails) +
                      std::uint64_t{chunk.begin / kBlockPositions} * a.columns;
  for (std::uint32_t column = lane * kWidth; column < a.columns; column += lanes * kWidth)
    store_columns(sums + column, sum_chunk<kWidth>(a, chunk, column));
}

// A thread block sums a long run in this many parts, side by side, and these in order.
inline constexpr std::uint32_t kRunParts = 8;
struct BlockSpan {
  std::uint32_t first;
  std::uint32_t end;
};
STITCH_HOST_DEVICE BlockSpan part_of(const LongRun& run, std::uint32_t part) {
  const std::uint64_t blocks = run.last_block - run.first_block + std::uint64_t{1};
  return {run.first_block + static_cast<std::uint32_t>(blocks * part / kRunParts),
          run.first_block + static_cast<std::uint32_t>(blocks * (part + 1) / kRunParts)};
}

}  // namespace stitch::transport::gpu::kernels
