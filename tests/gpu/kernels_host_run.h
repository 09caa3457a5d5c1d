#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "stitch/transport/gpu/kernels/pack_body.h"
#include "stitch/transport/gpu/kernels/pack_plan.h"
#include "stitch/transport/gpu/kernels/sparse_plan.h"

// Runs what the kernels' threads run, one thread after the other, on the host.
namespace stitch::transport::gpu::kernels {

// How a message was divided, and whether a row was not in its table.
struct HostRun {
  int status = 0;
  bool error = false;
  int flat_launches = 0;
  int strided_launches = 0;
  int plain_blocks = 0;
};

template <bool kPack, class Table>
void run_table(const Table& table, std::uint64_t packed, HostRun& run) {
  for (std::uint32_t block = 0; block < blocks_of(table); ++block) {
    const BlockRange range = range_of(table, block);
    std::uint64_t tensor = 0;
    if (is_plain_copy(table, range, &tensor)) {
      ++run.plain_blocks;
      const std::uint64_t buffer = packed + std::uint64_t{range.first_unit} * kUnitBytes;
      for (std::uint32_t slot = 0; slot < kSlotsPerBlock; ++slot) {
        const std::uint64_t at = std::uint64_t{slot} * kSlotBytes;
        store((kPack ? buffer : tensor) + at, load<Slot>((kPack ? tensor : buffer) + at));
      }
      continue;
    }
    for (std::uint32_t slot = 0; slot < kSlotsPerBlock; ++slot)
      run.error |= !move_slot<kPack>(table, range, slot, packed);
  }
}

template <bool kPack>
HostRun run_pack(const std::vector<PackedTensor>& tensors, std::uint64_t packed,
                 std::uint64_t packed_bytes) {
  HostRun run;
  auto flat_table = std::make_unique<FlatTable>();
  auto strided_table = std::make_unique<StridedTable>();
  // Small tables are copied, as the launcher does.
  const auto launch = [&](const auto& table, auto small, int& launches) {
    ++launches;
    if (table.count <= decltype(small)::kCapacity) {
      copy_table(table, small);
      run_table<kPack>(small, packed, run);
    } else {
      run_table<kPack>(table, packed, run);
    }
    return 0;
  };
  run.status = plan_pack(
      tensors.data(), tensors.size(), packed_bytes, !kPack, *flat_table, *strided_table,
      [&](const FlatTable& table) { return launch(table, SmallFlatTable{}, run.flat_launches); },
      [&](const StridedTable& table) {
        return launch(table, SmallStridedTable{}, run.strided_launches);
      });
  return run;
}

template <int kWidth>
void run_chunk(const SparseArguments& a, std::uint32_t position, std::uint32_t lanes) {
  const Chunk chunk = chunk_at(a, position);
  if (chunk.kind == ChunkKind::kNone) return;
  if (chunk.kind != ChunkKind::kWhole) {
    for (std::uint32_t lane = 0; lane < lanes; ++lane) save_columns<kWidth>(a, chunk, lane, lanes);
    return;
  }
  struct Lane {
    Columns<kWidth> kept[kKeptPanels];
  };
  std::vector<Lane> all(lanes);
  float squares = 0;
  for (std::uint32_t lane = 0; lane < lanes; ++lane)
    squares += collect_columns<kWidth>(a, chunk, lane, lanes, all[lane].kept);
  const bool measures = a.rule == SparseRule::rowwise_adagrad;
  const float rate = measures ? advance_row(a, a.keys[chunk.begin], squares) : 0;
  for (std::uint32_t lane = 0; lane < lanes; ++lane)
    apply_columns<kWidth>(a, chunk, lane, lanes, all[lane].kept, rate);
}

template <int kWidth>
void run_long_run(const SparseArguments& a, std::uint32_t block) {
  const LongRun run = long_run_in(a, block);
  if (!run.exists) return;
  const auto total_of = [&](std::uint32_t column) {
    Columns<kWidth> total{};
    for (std::uint32_t part = 0; part < kRunParts; ++part) {
      const BlockSpan span = part_of(run, part);
      add(total, sum_blocks<kWidth>(a, run, span.first, span.end, column));
    }
    return total;
  };
  float squares = 0;
  for (std::uint32_t column = 0; column < a.columns; column += kWidth)
    squares += sum_of_squares(total_of(column));
  const bool measures = a.rule == SparseRule::rowwise_adagrad;
  const float rate = measures ? advance_row(a, run.row, squares) : 0;
  for (std::uint32_t column = 0; column < a.columns; column += kWidth)
    apply_rule(a, run.row, column, total_of(column), rate);
}

// All of sparse_update(), with a stable sort of the standard library in place of the device's.
inline int run_sparse(const SparseUpdate& update) {
  SparseArguments a;
  if (const int status = plan_sparse(update, &a)) return status;
  if (a.count == 0 || a.columns == 0) return 0;
  const auto* const indices = reinterpret_cast<const std::int64_t*>(update.indices);
  std::vector<std::uint32_t> positions(a.count);
  std::iota(positions.begin(), positions.end(), 0U);
  const auto key_of = [&](std::uint32_t position) {
    const std::int64_t index = indices[position];
    return index >= 0 && index < update.rows ? static_cast<std::uint32_t>(index) : a.rows;
  };
  std::stable_sort(positions.begin(), positions.end(),
                   [&](std::uint32_t x, std::uint32_t y) { return key_of(x) < key_of(y); });
  std::vector<std::uint32_t> keys(a.count);
  std::transform(positions.begin(), positions.end(), keys.begin(), key_of);
  const SparseLayout layout = sparse_layout(update.count, update.columns);
  struct alignas(16) Line {
    char bytes[16];
  };
  std::vector<Line> workspace(layout.sort / sizeof(Line));
  place_workspace(layout, reinterpret_cast<std::uint64_t>(workspace.data()), &a);
  a.keys = keys.data();
  a.positions = positions.data();
  const int width = column_width(update);
  const std::uint32_t lanes = lanes_for(a.columns, width);
  for (std::uint32_t at = 0; at < a.count; ++at)
    width == 4 ? run_chunk<4>(a, at, lanes) : run_chunk<1>(a, at, lanes);
  for (std::uint32_t block = 0; block < sparse_blocks(a.count); ++block)
    width == 4 ? run_long_run<4>(a, block) : run_long_run<1>(a, block);
  return 0;
}

}  // namespace stitch::transport::gpu::kernels
