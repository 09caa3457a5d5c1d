#pragma once

#include <cstdint>

#include "stitch/transport/gpu/kernels/host_device.h"
#include "stitch/transport/gpu/kernels/kernel_abi.h"

// What the pack and unpack kernels read: a table of segments, passed as the argument of a launch.
// A packed buffer consists of units of 256 bytes, and each unit of 16 slots of 16 bytes. A segment
// begins at a unit and fills up its last one with zeros. A thread packs or unpacks whole slots.
namespace stitch::transport::gpu::kernels {

inline constexpr std::uint32_t kSlotBytes = 16;
inline constexpr std::uint32_t kSlotsPerUnit = 16;
inline constexpr std::uint32_t kUnitBytes = kSlotBytes * kSlotsPerUnit;
static_assert(kUnitBytes == kPackedAlignment);

// How the bytes of a tensor are moved: pieces of that many bytes in the tensor. Casts halve them.
enum class Mode : std::uint32_t {
  copy1 = 0,
  copy2,
  copy4,
  copy8,
  copy16,
  bfloat16_from4,
  bfloat16_from16,
  half_from4,
  half_from16
};

STITCH_HOST_DEVICE bool casts(Mode mode) { return mode > Mode::copy16; }
// Bytes of a piece in the tensor.
STITCH_HOST_DEVICE std::uint32_t piece_bytes(Mode mode) {
  if (!casts(mode)) return 1U << static_cast<std::uint32_t>(mode);
  return mode == Mode::bfloat16_from4 || mode == Mode::half_from4 ? 4 : 16;
}
// Bytes of a piece in the packed buffer.
STITCH_HOST_DEVICE std::uint32_t packed_piece_bytes(Mode mode) {
  return casts(mode) ? piece_bytes(mode) / 2 : piece_bytes(mode);
}
// For the last bytes of a tensor, which are less than a piece.
STITCH_HOST_DEVICE Mode narrowest(Mode mode) {
  if (!casts(mode)) return Mode::copy1;
  return mode <= Mode::bfloat16_from16 ? Mode::bfloat16_from4 : Mode::half_from4;
}

// A contiguous tensor, or a part of a large one. 16 bytes, so that 2032 fit into one launch.
struct FlatSegment {
  std::uint64_t address;
  std::uint32_t unit;
  std::uint32_t shape;  // the mode in the upper 4 bits, packed bytes in the lower 28
};
inline constexpr std::uint32_t kMaxFlatBytes = 1U << 27U;

STITCH_HOST_DEVICE Mode mode_of(const FlatSegment& segment) {
  return static_cast<Mode>(segment.shape >> 28U);
}
STITCH_HOST_DEVICE std::uint64_t packed_bytes_of(const FlatSegment& segment) {
  return segment.shape & ((1U << 28U) - 1);
}

// A tensor of pieces with strides, some of whose rows may be gathered.
struct StridedSegment {
  std::uint64_t address;
  std::uint64_t rows;  // of std::int64_t, one for each position of dimension 0; 0: none
  std::int64_t table_rows;
  std::uint64_t pieces;                        // the product of the sizes
  std::uint64_t sizes[kMaxPackedDimensions];   // in pieces
  std::int64_t strides[kMaxPackedDimensions];  // in bytes
  std::uint32_t unit;
  Mode mode;
  std::int32_t dimensions;
  std::uint32_t reserved;
};

STITCH_HOST_DEVICE Mode mode_of(const StridedSegment& segment) { return segment.mode; }
STITCH_HOST_DEVICE std::uint64_t packed_bytes_of(const StridedSegment& segment) {
  return segment.pieces * packed_piece_bytes(segment.mode);
}

// The segments of one launch, by ascending unit. Units between two of them may belong to segments
// of other launches, and are left alone.
template <class SegmentType, std::uint32_t kSegments>
struct SegmentTable {
  using Segment = SegmentType;
  static constexpr std::uint32_t kCapacity = kSegments;

  std::uint32_t count = 0;
  std::uint32_t end_unit = 0;  // of the last segment
  Segment segments[kSegments];
};

// A launch has up to 32764 bytes of arguments; the small tables are for the usual message, since
// the driver copies the whole argument for each launch.
inline constexpr std::uint32_t kMaxLaunchBytes = 32764;
using FlatTable = SegmentTable<FlatSegment, 2032>;
using SmallFlatTable = SegmentTable<FlatSegment, 120>;
using StridedTable = SegmentTable<StridedSegment, 184>;
using SmallStridedTable = SegmentTable<StridedSegment, 10>;
static_assert(sizeof(FlatSegment) == 16 && sizeof(StridedSegment) == 176);
static_assert(sizeof(FlatTable) + 2 * sizeof(std::uint64_t) <= kMaxLaunchBytes);
static_assert(sizeof(StridedTable) + 2 * sizeof(std::uint64_t) <= kMaxLaunchBytes);

// A thread block packs this many slots, one after another for each of its threads.
inline constexpr std::uint32_t kPackThreads = 256;
inline constexpr std::uint32_t kSlotsPerThread = 4;
inline constexpr std::uint32_t kSlotsPerBlock = kPackThreads * kSlotsPerThread;
inline constexpr std::uint32_t kUnitsPerBlock = kSlotsPerBlock / kSlotsPerUnit;

// Blocks for the units from the first segment to the last.
template <class Table>
std::uint32_t blocks_of(const Table& table) {
  if (table.count == 0) return 0;
  const std::uint32_t units = table.end_unit - table.segments[0].unit;
  return units / kUnitsPerBlock + (units % kUnitsPerBlock != 0 ? 1 : 0);
}

}  // namespace stitch::transport::gpu::kernels
