#pragma once

#include <cmath>
#include <cstdint>

#include "stitch/transport/gpu/kernels/kernel_abi.h"
#include "stitch/transport/gpu/kernels/sparse_body.h"

// From an update to the arguments of its kernels; runs on the host.
namespace stitch::transport::gpu::kernels {

// Where the parts of a workspace begin, in bytes.
struct SparseLayout {
  std::uint64_t keys;
  std::uint64_t positions;
  std::uint64_t sorted_keys;
  std::uint64_t sorted_positions;
  std::uint64_t heads;
  std::uint64_t tails;
  std::uint64_t sort;  // as much as the sort needs
};

inline std::uint32_t sparse_blocks(std::int64_t count) {
  return static_cast<std::uint32_t>((count + kBlockPositions - 1) / kBlockPositions);
}

// REQUIRES: sizes that check_shape() accepts.
inline SparseLayout sparse_layout(std::int64_t count, std::int64_t columns) {
  SparseLayout layout{};
  std::uint64_t end = 0;
  const auto take = [&end](std::uint64_t bytes) {
    const std::uint64_t begin = end;
    end += (bytes + kPackedAlignment - 1) / kPackedAlignment * kPackedAlignment;
    return begin;
  };
  const auto numbers = static_cast<std::uint64_t>(count) * sizeof(std::uint32_t);
  const std::uint64_t sums =
      std::uint64_t{sparse_blocks(count)} * static_cast<std::uint64_t>(columns) * sizeof(float);
  layout.keys = take(numbers);
  layout.positions = take(numbers);
  layout.sorted_keys = take(numbers);
  layout.sorted_positions = take(numbers);
  layout.heads = take(sums);
  layout.tails = take(sums);
  layout.sort = end;
  return layout;
}

inline KernelStatus check_shape(std::int64_t count, std::int64_t rows, std::int64_t columns) {
  const bool fits = count >= 0 && count < (std::int64_t{1} << 31U) && rows >= 0 &&
                    rows < 0xffffffffLL && columns >= 0 && columns < (std::int64_t{1} << 31U);
  return fits ? kKernelSuccess : kKernelBadShape;
}

// Checks an update; `arguments` gets everything but what lies in the workspace.
inline KernelStatus plan_sparse(const SparseUpdate& update, SparseArguments* arguments) {
  if (const KernelStatus status = check_shape(update.count, update.rows, update.columns))
    return status;
  const bool adam = update.rule == SparseRule::adam;
  const bool per_row = update.rule == SparseRule::rowwise_adagrad;
  if (update.rule > SparseRule::adam || update.step < 1) return kKernelBadRule;
  if (update.rule != SparseRule::sgd && update.first_state == 0) return kKernelBadRule;
  if (adam && update.second_state == 0) return kKernelBadRule;
  const bool has_state = adam || update.rule == SparseRule::adagrad;
  if (update.weights_stride < update.columns || update.gradients_stride < update.columns ||
      (has_state && update.state_stride < update.columns))
    return kKernelBadShape;
  const std::uint64_t addresses =
      update.weights | update.gradients | update.first_state | update.second_state;
  if (addresses % alignof(float) != 0 || update.indices % alignof(std::int64_t) != 0)
    return kKernelMisaligned;

  SparseArguments a{};
  a.gradients = reinterpret_cast<const float*>(update.gradients);
  a.weights = reinterpret_cast<float*>(update.weights);
  a.first_state = reinterpret_cast<float*>(update.first_state);
  a.second_state = reinterpret_cast<float*>(update.second_state);
  a.gradients_stride = update.gradients_stride;
  a.weights_stride = update.weights_stride;
  a.state_stride = per_row ? 1 : update.state_stride;
  a.count = static_cast<std::uint32_t>(update.count);
  a.rows = static_cast<std::uint32_t>(update.rows);
  a.columns = static_cast<std::uint32_t>(update.columns);
  a.rule = update.rule;
  const auto step = static_cast<double>(update.step);
  double rate = update.learning_rate;
  if (adam) {
    rate *= std::sqrt(1 - std::pow(update.beta2, step)) / (1 - std::pow(update.beta1, step));
  } else if (update.rule != SparseRule::sgd) {
    rate /= 1 + (step - 1) * update.lr_decay;
  }
  a.rate = static_cast<float>(rate);
  a.eps = static_cast<float>(update.eps);
  a.gain1 = static_cast<float>(1 - update.beta1);
  a.gain2 = static_cast<float>(1 - update.beta2);
  *arguments = a;
  return kKernelSuccess;
}

// Puts the parts of the workspace at `base` into the arguments.
inline void place_workspace(const SparseLayout& layout, std::uint64_t base, SparseArguments* a) {
  a->keys = reinterpret_cast<const std::uint32_t*>(base + layout.sorted_keys);
  a->positions = reinterpret_cast<const std::uint32_t*>(base + layout.sorted_positions);
  a->heads = reinterpret_cast<float*>(base + layout.heads);
  a->tails = reinterpret_cast<float*>(base + layout.tails);
}

// How many neighbouring columns a thread moves at a time: 4 where all rows are aligned for it.
inline int column_width(const SparseUpdate& update) {
  const bool per_element = update.rule == SparseRule::adam || update.rule == SparseRule::adagrad;
  std::uint64_t all =
      update.weights | update.gradients |
      static_cast<std::uint64_t>(update.columns | update.weights_stride | update.gradients_stride) *
          sizeof(float);
  if (per_element) {
    all |= update.first_state | update.second_state |
           static_cast<std::uint64_t>(update.state_stride) * sizeof(float);
  }
  return all % sizeof(Columns<4>) == 0 ? 4 : 1;
}

// Threads for one row: a power of two up to 32, no more than it has columns to move.
inline std::uint32_t lanes_for(std::int64_t columns, int width) {
  std::uint32_t lanes = 1;
  while (lanes < 32 &&
         lanes * static_cast<std::uint64_t>(width) < static_cast<std::uint64_t>(columns))
    lanes *= 2;
  return lanes;
}

// Bits of the keys that the sort has to look at: those of `rows` itself, the key of what is not in
// the table.
inline int key_bits(std::int64_t rows) {
  int bits = 1;
  while (bits < 32 && (static_cast<std::uint64_t>(rows) >> bits) != 0) ++bits;
  return bits;
}

}  // namespace stitch::transport::gpu::kernels
