#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "stitch/transport/gpu/kernels/segment.h"

// From the tensors of a message to the tables of launches; runs on the host.
namespace stitch::transport::gpu::kernels {

// A tensor as pieces with strides in bytes: dimensions of size 1 are gone, neighbours that lie in
// memory like one are merged, and pieces are as large as addresses and strides allow.
struct PiecewiseTensor {
  bool flat = false;  // one dimension of adjacent pieces, or nothing but a tail
  Mode mode = Mode::copy1;
  int dimensions = 0;
  std::uint64_t sizes[kMaxPackedDimensions + 1] = {};
  std::int64_t strides[kMaxPackedDimensions + 1] = {};
  std::uint64_t packed_bytes = 0;
};

// The largest power of two, at most 16, that divides `value`; 16 for 0.
inline std::uint32_t alignment_of(std::uint64_t value) {
  return static_cast<std::uint32_t>((value | 16U) & ~((value | 16U) - 1));
}

inline Mode mode_for(PackCast cast, std::uint32_t width) {
  if (cast == PackCast::float_to_bfloat16)
    return width == 16 ? Mode::bfloat16_from16 : Mode::bfloat16_from4;
  if (cast == PackCast::float_to_half) return width == 16 ? Mode::half_from16 : Mode::half_from4;
  std::uint32_t mode = 0;
  while ((1U << mode) < width) ++mode;
  return static_cast<Mode>(mode);
}

// Fills in `result`. `unpacks`: the tensor is written to.
inline KernelStatus describe_pieces(const PackedTensor& tensor, bool unpacks,
                                    PiecewiseTensor* result) {
  const bool casts = tensor.cast != PackCast::none;
  if (tensor.element_bytes == 0 || tensor.cast > PackCast::float_to_half) return kKernelBadElement;
  if (casts && tensor.element_bytes != sizeof(float)) return kKernelBadElement;
  if (tensor.dimensions < 0 || tensor.dimensions > kMaxPackedDimensions) return kKernelTooManyDims;
  const bool gathers = tensor.rows != 0;
  if (gathers && (tensor.dimensions == 0 || tensor.table_rows < 0)) return kKernelBadShape;
  if (gathers && tensor.rows % alignof(std::int64_t) != 0) return kKernelMisaligned;

  // The bytes of an element are one more dimension at first.
  std::uint64_t bytes = tensor.element_bytes;
  PiecewiseTensor& pieces = *result;
  pieces = PiecewiseTensor{};
  int n = 0;
  for (int d = 0; d <= tensor.dimensions; ++d) {
    const bool last = d == tensor.dimensions;
    const std::int64_t size = last ? tensor.element_bytes : tensor.sizes[d];
    std::int64_t stride = 1;
    if (size < 0) return kKernelBadShape;
    if (!last) {
      if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes) ||
          __builtin_mul_overflow(tensor.strides[d], std::int64_t{tensor.element_bytes}, &stride))
        return kKernelBadShape;
    }
    const bool row_dimension = gathers && d == 0;
    std::int64_t extent = 0;
    if (__builtin_mul_overflow(stride, row_dimension ? tensor.table_rows : size, &extent))
      return kKernelBadShape;
    if (unpacks && size > 1 && stride == 0) return kKernelOverlap;
    if (size == 1 && !row_dimension && (n > 0 || !last)) continue;
    const bool follows_rows = gathers && n == 1;
    if (n > 0 && !follows_rows && pieces.strides[n - 1] == extent) {
      pieces.sizes[n - 1] *= static_cast<std::uint64_t>(size);
      pieces.strides[n - 1] = stride;
    } else {
      pieces.sizes[n] = static_cast<std::uint64_t>(size);
      pieces.strides[n] = stride;
      ++n;
    }
  }
  pieces.packed_bytes = casts ? bytes / 2 : bytes;
  if (bytes >> 62U != 0) return kKernelBadShape;
  if (bytes == 0) return kKernelSuccess;

  // Bytes that lie together: none but one where elements of one byte have another stride.
  if (pieces.strides[n - 1] != 1 || (gathers && n == 1)) {
    pieces.sizes[n] = 1;
    pieces.strides[n] = 1;
    ++n;
  }
  const std::uint64_t run = pieces.sizes[n - 1];
  if (n == 1) {
    pieces.flat = true;
    const std::uint32_t width = alignment_of(tensor.address);
    if (casts && width < sizeof(float)) return kKernelMisaligned;
    pieces.mode = mode_for(tensor.cast, casts && width < 16 ? 4 : width);
    pieces.dimensions = 1;
    return kKernelSuccess;
  }
  std::uint32_t width = std::min(alignment_of(tensor.address), alignment_of(run));
  for (int d = 0; d < n - 1; ++d)
    width = std::min(width, alignment_of(static_cast<std::uint64_t>(pieces.strides[d])));
  if (casts && width < sizeof(float)) return kKernelMisaligned;
  if (casts && width < 16) width = 4;
  pieces.mode = mode_for(tensor.cast, width);
  pieces.sizes[n - 1] = run / width;
  pieces.strides[n - 1] = width;
  if (pieces.sizes[n - 1] == 1) --n;
  if (n > kMaxPackedDimensions) return kKernelTooManyDims;
  pieces.dimensions = n;
  return kKernelSuccess;
}

// Cuts the tensors of a message into tables, in order, and passes each to flat(const FlatTable&)
// or strided(const StridedTable&) once it is full or all are in; these return a status, and
// planning ends with the first that is not kKernelSuccess. Nothing is passed on when a tensor is
// refused.
template <class Flat, class Strided>
int plan_pack(const PackedTensor* tensors, std::size_t count, std::uint64_t packed_bytes,
              bool unpacks, FlatTable& flat_table, StridedTable& strided_table, Flat&& flat,
              Strided&& strided) {
  PiecewiseTensor pieces;
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const int status = describe_pieces(tensors[i], unpacks, &pieces);
    if (status != kKernelSuccess) return status;
    const std::uint64_t offset = tensors[i].packed_offset;
    if (offset % kPackedAlignment != 0 || offset < end) return kKernelBadOffset;
    if (offset > packed_bytes || pieces.packed_bytes > packed_bytes - offset)
      return kKernelBadRange;
    end = offset + pieces.packed_bytes;
    // Units are numbered by 32 bits, with room for the last block's end.
    if ((end >> 8U) >= 0xffffff00U) return kKernelBadRange;
  }

  flat_table.count = 0;
  strided_table.count = 0;
  const auto units_to = [](std::uint64_t bytes) {
    return static_cast<std::uint32_t>((bytes + kUnitBytes - 1) / kUnitBytes);
  };
  for (std::size_t i = 0; i < count; ++i) {
    const PackedTensor& tensor = tensors[i];
    (void)describe_pieces(tensor, unpacks, &pieces);
    if (pieces.packed_bytes == 0) continue;
    const auto unit = static_cast<std::uint32_t>(tensor.packed_offset / kUnitBytes);
    if (!pieces.flat) {
      StridedSegment& segment = strided_table.segments[strided_table.count++];
      segment = StridedSegment{};
      segment.address = tensor.address;
      segment.rows = tensor.rows;
      segment.table_rows = tensor.table_rows;
      segment.pieces = pieces.packed_bytes / packed_piece_bytes(pieces.mode);
      std::copy_n(pieces.sizes, pieces.dimensions, segment.sizes);
      std::copy_n(pieces.strides, pieces.dimensions, segment.strides);
      segment.unit = unit;
      segment.mode = pieces.mode;
      segment.dimensions = pieces.dimensions;
      strided_table.end_unit = unit + units_to(pieces.packed_bytes);
      if (strided_table.count == StridedTable::kCapacity) {
        if (const int status = strided(strided_table)) return status;
        strided_table.count = 0;
      }
      continue;
    }
    for (std::uint64_t done = 0; done < pieces.packed_bytes; done += kMaxFlatBytes) {
      const auto part = static_cast<std::uint32_t>(
          std::min<std::uint64_t>(kMaxFlatBytes, pieces.packed_bytes - done));
      FlatSegment& segment = flat_table.segments[flat_table.count++];
      segment.address = tensor.address + done * (casts(pieces.mode) ? 2 : 1);
      segment.unit = unit + static_cast<std::uint32_t>(done / kUnitBytes);
      segment.shape = static_cast<std::uint32_t>(pieces.mode) << 28U | part;
      flat_table.end_unit = segment.unit + units_to(part);
      if (flat_table.count == FlatTable::kCapacity) {
        if (const int status = flat(flat_table)) return status;
        flat_table.count = 0;
      }
    }
  }
  if (flat_table.count > 0) {
    if (const int status = flat(flat_table)) return status;
  }
  if (strided_table.count > 0) {
    if (const int status = strided(strided_table)) return status;
  }
  return kKernelSuccess;
}

// The used part of a table, in a smaller one. REQUIRES: it fits.
template <class Small, class Table>
void copy_table(const Table& table, Small& small) {
  small.count = table.count;
  small.end_unit = table.end_unit;
  std::memcpy(small.segments, table.segments, table.count * sizeof(typename Table::Segment));
}

}  // namespace stitch::transport::gpu::kernels
