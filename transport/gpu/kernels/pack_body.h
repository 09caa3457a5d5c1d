#pragma once

#include <cstdint>
#include <cstring>

#include "stitch/transport/gpu/kernels/cast.h"
#include "stitch/transport/gpu/kernels/segment.h"

// What one thread of the pack and unpack kernels does, for the device and for tests on the host.
namespace stitch::transport::gpu::kernels {

// 16 bytes of a packed buffer; moved by one load or store.
struct alignas(16) Slot {
  std::uint64_t low;
  std::uint64_t high;
};

// REQUIRES: `address` is aligned to T; a misaligned access ends the program, as on the device.
template <class T>
STITCH_HOST_DEVICE T load(std::uint64_t address) {
#if defined(__CUDA_ARCH__)
  return *reinterpret_cast<const T*>(address);
#else
  if (address % alignof(T) != 0) __builtin_trap();
  T value;
  std::memcpy(&value, reinterpret_cast<const void*>(address), sizeof value);
  return value;
#endif
}
template <class T>
STITCH_HOST_DEVICE void store(std::uint64_t address, T value) {
#if defined(__CUDA_ARCH__)
  *reinterpret_cast<T*>(address) = value;
#else
  if (address % alignof(T) != 0) __builtin_trap();
  std::memcpy(reinterpret_cast<void*>(address), &value, sizeof value);
#endif
}

// Four floats of a tensor.
struct alignas(16) FourFloats {
  float values[4];
};

template <Mode kMode>
STITCH_HOST_DEVICE std::uint32_t narrow(float value) {
  return kMode == Mode::bfloat16_from16 ? bfloat16_of(value) : half_of(value);
}
template <Mode kMode>
STITCH_HOST_DEVICE float widen(std::uint32_t bits) {
  return kMode == Mode::bfloat16_from16 ? float_of_bfloat16(bits) : float_of_half(bits);
}
template <Mode kMode>
STITCH_HOST_DEVICE std::uint64_t narrow_four(std::uint64_t address) {
  const auto floats = load<FourFloats>(address);
  const std::uint64_t low = narrow<kMode>(floats.values[0]) | narrow<kMode>(floats.values[1])
                                                                  << 16U;
  const std::uint64_t high = narrow<kMode>(floats.values[2]) | narrow<kMode>(floats.values[3])
                                                                   << 16U;
  return low | high << 32U;
}
template <Mode kMode>
STITCH_HOST_DEVICE void widen_four(std::uint64_t address, std::uint64_t packed) {
  FourFloats floats;
  for (int i = 0; i < 4; ++i)
    floats.values[i] = widen<kMode>(static_cast<std::uint32_t>(packed >> (16 * i)) & 0xffffU);
  store(address, floats);
}

// The piece of a tensor at `address` as it is packed. Not for Mode::copy16.
STITCH_HOST_DEVICE std::uint64_t read_piece(Mode mode, std::uint64_t address) {
  switch (mode) {
    case Mode::copy1:
      return load<std::uint8_t>(address);
    case Mode::copy2:
      return load<std::uint16_t>(address);
    case Mode::copy4:
      return load<std::uint32_t>(address);
    case Mode::bfloat16_from4:
      return bfloat16_of(load<float>(address));
    case Mode::bfloat16_from16:
      return narrow_four<Mode::bfloat16_from16>(address);
    case Mode::half_from4:
      return half_of(load<float>(address));
    case Mode::half_from16:
      return narrow_four<Mode::half_from16>(address);
    default:
      return load<std::uint64_t>(address);
  }
}
STITCH_HOST_DEVICE void write_piece(Mode mode, std::uint64_t address, std::uint64_t packed) {
  const auto low = static_cast<std::uint32_t>(packed);
  switch (mode) {
    case Mode::copy1:
      store(address, static_cast<std::uint8_t>(low));
      break;
    case Mode::copy2:
      store(address, static_cast<std::uint16_t>(low));
      break;
    case Mode::copy4:
      store(address, low);
      break;
    case Mode::bfloat16_from4:
      store(address, float_of_bfloat16(low & 0xffffU));
      break;
    case Mode::bfloat16_from16:
      widen_four<Mode::bfloat16_from16>(address, packed);
      break;
    case Mode::half_from4:
      store(address, float_of_half(low & 0xffffU));
      break;
    case Mode::half_from16:
      widen_four<Mode::half_from16>(address, packed);
      break;
    default:
      store(address, packed);
  }
}

// Where the pieces of a flat segment are, one after the other.
class FlatPieces {
 public:
  STITCH_HOST_DEVICE FlatPieces(const FlatSegment& segment, Mode mode, std::uint64_t packed_offset)
      : stride_(piece_bytes(mode)),
        address_(segment.address + packed_offset * (casts(mode) ? 2 : 1)) {}
  // The address of the current piece. False: it has none.
  STITCH_HOST_DEVICE bool address(std::uint64_t* result) const {
    *result = address_;
    return true;
  }
  STITCH_HOST_DEVICE void next() { address_ += stride_; }

 private:
  std::uint32_t stride_;
  std::uint64_t address_;
};

// Those of a strided segment: the place is computed anew only where the last dimension ends.
class StridedPieces {
 public:
  STITCH_HOST_DEVICE StridedPieces(const StridedSegment& segment, Mode mode,
                                   std::uint64_t packed_offset)
      : segment_(segment), piece_(packed_offset / packed_piece_bytes(mode)) {
    locate();
  }
  STITCH_HOST_DEVICE bool address(std::uint64_t* result) const {
    *result = address_;
    return valid_;
  }
  STITCH_HOST_DEVICE void next() {
    ++piece_;
    const int last = segment_.dimensions - 1;
    // Dimension 0 of a gather is not regular; with one dimension it is the last, too.
    const bool regular = last > 0 || segment_.rows == 0;
    if (++inner_ < segment_.sizes[last] && regular) {
      address_ += static_cast<std::uint64_t>(segment_.strides[last]);
    } else if (piece_ < segment_.pieces) {
      locate();
    }
  }

 private:
  STITCH_HOST_DEVICE void locate() {
    // Division of 32 bits is several times quicker.
    if (segment_.pieces <= 0xffffffffU) {
      locate_in<std::uint32_t>(static_cast<std::uint32_t>(piece_));
    } else {
      locate_in<std::uint64_t>(piece_);
    }
  }
  template <class Index>
  STITCH_HOST_DEVICE void locate_in(Index rest) {
    const int last = segment_.dimensions - 1;
    std::int64_t offset = 0;
    for (int d = last; d > 0; --d) {
      const auto size = static_cast<Index>(segment_.sizes[d]);
      const Index above = rest / size;
      const Index position = rest - above * size;
      if (d == last) inner_ = position;
      offset += static_cast<std::int64_t>(position) * segment_.strides[d];
      rest = above;
    }
    if (last == 0) inner_ = rest;
    auto row = static_cast<std::int64_t>(rest);
    if (segment_.rows != 0) {
      row = load<std::int64_t>(segment_.rows + std::uint64_t{rest} * sizeof(std::int64_t));
      valid_ = row >= 0 && row < segment_.table_rows;
      if (!valid_) row = 0;
    }
    offset += row * segment_.strides[0];
    address_ = segment_.address + static_cast<std::uint64_t>(offset);
  }

  const StridedSegment& segment_;
  std::uint64_t piece_;
  std::uint64_t inner_ = 0;  // the position in the last dimension
  std::uint64_t address_ = 0;
  bool valid_ = true;  // false: the row is not in the table
};

STITCH_HOST_DEVICE FlatPieces pieces_of(const FlatSegment& segment, Mode mode,
                                        std::uint64_t packed_offset) {
  return {segment, mode, packed_offset};
}
STITCH_HOST_DEVICE StridedPieces pieces_of(const StridedSegment& segment, Mode mode,
                                           std::uint64_t packed_offset) {
  return {segment, mode, packed_offset};
}
// A mode for the last, incomplete slot. A strided segment has whole pieces.
STITCH_HOST_DEVICE Mode tail_mode(const FlatSegment& segment) {
  return narrowest(mode_of(segment));
}
STITCH_HOST_DEVICE Mode tail_mode(const StridedSegment& segment) { return mode_of(segment); }

// The packed bytes from `offset` of a segment on, zeros behind its end. Sets *error where a row is
// not in the table.
template <class Segment>
STITCH_HOST_DEVICE Slot gather_slot(const Segment& segment, std::uint64_t offset, bool* error) {
  Slot slot{0, 0};
  const std::uint64_t bytes = packed_bytes_of(segment);
  if (offset >= bytes) return slot;
  const std::uint64_t left = bytes - offset;
  const Mode mode = left < kSlotBytes ? tail_mode(segment) : mode_of(segment);
  auto pieces = pieces_of(segment, mode, offset);
  std::uint64_t address = 0;
  if (mode == Mode::copy16) {
    if (pieces.address(&address)) return load<Slot>(address);
    *error = true;
    return slot;
  }
  const std::uint32_t step = packed_piece_bytes(mode);
  const auto end = static_cast<std::uint32_t>(left < kSlotBytes ? left : kSlotBytes);
  for (std::uint32_t at = 0; at < end; at += step, pieces.next()) {
    if (!pieces.address(&address)) {
      *error = true;
      continue;
    }
    const std::uint64_t piece = read_piece(mode, address);
    if (at < 8) {
      slot.low |= piece << (8 * at);
    } else {
      slot.high |= piece << (8 * (at - 8));
    }
  }
  return slot;
}

// The reverse: `slot` is what the packed buffer has for `offset` of the segment.
template <class Segment>
STITCH_HOST_DEVICE void scatter_slot(const Segment& segment, std::uint64_t offset, const Slot& slot,
                                     bool* error) {
  const std::uint64_t bytes = packed_bytes_of(segment);
  if (offset >= bytes) return;
  const std::uint64_t left = bytes - offset;
  const Mode mode = left < kSlotBytes ? tail_mode(segment) : mode_of(segment);
  auto pieces = pieces_of(segment, mode, offset);
  std::uint64_t address = 0;
  if (mode == Mode::copy16) {
    if (pieces.address(&address)) {
      store(address, slot);
    } else {
      *error = true;
    }
    return;
  }
  const std::uint32_t step = packed_piece_bytes(mode);
  const auto end = static_cast<std::uint32_t>(left < kSlotBytes ? left : kSlotBytes);
  for (std::uint32_t at = 0; at < end; at += step, pieces.next()) {
    if (!pieces.address(&address)) {
      *error = true;
      continue;
    }
    write_piece(mode, address, at < 8 ? slot.low >> (8 * at) : slot.high >> (8 * (at - 8)));
  }
}

// The last of segments [first, last] that begins at `unit` or before it. REQUIRES: `first` does.
template <class Table>
STITCH_HOST_DEVICE std::uint32_t find_segment(const Table& table, std::uint32_t unit,
                                              std::uint32_t first, std::uint32_t last) {
  while (first < last) {
    const std::uint32_t middle = first + (last - first + 1) / 2;
    if (table.segments[middle].unit <= unit) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  return first;
}

// What a thread block works on: units [first_unit, end_unit), and the segments that may have them.
struct BlockRange {
  std::uint32_t first_unit;
  std::uint32_t end_unit;
  std::uint32_t first_segment;
  std::uint32_t last_segment;
};
// REQUIRES: block < blocks_of(table).
template <class Table>
STITCH_HOST_DEVICE BlockRange range_of(const Table& table, std::uint32_t block) {
  BlockRange range;
  range.first_unit = table.segments[0].unit + block * kUnitsPerBlock;
  const std::uint32_t units = table.end_unit - range.first_unit;
  range.end_unit = range.first_unit + (units < kUnitsPerBlock ? units : kUnitsPerBlock);
  range.first_segment = find_segment(table, range.first_unit, 0, table.count - 1);
  range.last_segment =
      find_segment(table, range.end_unit - 1, range.first_segment, table.count - 1);
  return range;
}

// Packs slot `number` of a block; unpacks it likewise. Returns false where a row is not in the
// table. Slots that belong to no segment of this table are left alone.
template <bool kPack, class Table>
STITCH_HOST_DEVICE bool move_slot(const Table& table, const BlockRange& range, std::uint32_t number,
                                  std::uint64_t packed) {
  const std::uint32_t unit = range.first_unit + number / kSlotsPerUnit;
  if (unit >= range.end_unit) return true;
  const auto& segment =
      table.segments[find_segment(table, unit, range.first_segment, range.last_segment)];
  const std::uint64_t in_unit = std::uint64_t{number % kSlotsPerUnit} * kSlotBytes;
  const std::uint64_t offset = std::uint64_t{unit - segment.unit} * kUnitBytes + in_unit;
  const std::uint64_t units = (packed_bytes_of(segment) + kUnitBytes - 1) / kUnitBytes;
  if (unit - segment.unit >= units) return true;
  const std::uint64_t place = packed + std::uint64_t{unit} * kUnitBytes + in_unit;
  bool error = false;
  if constexpr (kPack) {
    store(place, gather_slot(segment, offset, &error));
  } else {
    scatter_slot(segment, offset, load<Slot>(place), &error);
  }
  return !error;
}

// Whether a block may move its slots without looking at each: all are complete 16-byte pieces of
// one contiguous tensor. *address is that of the first.
template <class Table>
STITCH_HOST_DEVICE bool is_plain_copy(const Table& table, const BlockRange& range,
                                      std::uint64_t* address) {
  return false;
}
template <std::uint32_t kSegments>
STITCH_HOST_DEVICE bool is_plain_copy(const SegmentTable<FlatSegment, kSegments>& table,
                                      const BlockRange& range, std::uint64_t* address) {
  if (range.first_segment != range.last_segment) return false;
  const FlatSegment& segment = table.segments[range.first_segment];
  if (mode_of(segment) != Mode::copy16) return false;
  const std::uint64_t offset = std::uint64_t{range.first_unit - segment.unit} * kUnitBytes;
  *address = segment.address + offset;
  return range.end_unit - range.first_unit == kUnitsPerBlock &&
         offset + std::uint64_t{kUnitsPerBlock} * kUnitBytes <= packed_bytes_of(segment);
}

}  // namespace stitch::transport::gpu::kernels
