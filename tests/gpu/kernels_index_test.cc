#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>

#include "tests/gpu/kernels_host_run.h"
#include "tests/gpu/random_message.h"

namespace stitch::transport::gpu::kernels::kernels_index_test {
namespace {

TEST(PackKernel, PacksRandomTensorsAsAByteByByteCopy) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 300; ++round) {
    const Message message = random_message(random);
    Arena source(message.arena_bytes);
    source.randomize(random);
    Arena packed(message.packed_bytes);
    const HostRun run = run_pack<true>(message.in(source), packed.address(), message.packed_bytes);
    ASSERT_EQ(run.status, 0) << "round " << round;
    ASSERT_TRUE(packed == packed_reference(message, source)) << "round " << round;
  }
}

TEST(PackKernel, UnpackingWritesTheElementsAndNothingElse) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 300; ++round) {
    const Message message = random_message(random);
    Arena packed(message.packed_bytes);
    packed.randomize(random);
    Arena target(message.arena_bytes);
    Arena expected(message.arena_bytes);
    const HostRun run = run_pack<false>(message.in(target), packed.address(), message.packed_bytes);
    ASSERT_EQ(run.status, 0) << "round " << round;
    for (const PackedTensor& tensor : message.in(expected)) {
      const std::uint8_t* const from = packed.at(tensor.packed_offset);
      for_each_element(tensor, [&](std::uint64_t i, std::int64_t offset) {
        auto* const to =
            reinterpret_cast<std::uint8_t*>(tensor.address + static_cast<std::uint64_t>(offset));
        if (tensor.cast == PackCast::none) {
          std::memcpy(to, from + i * tensor.element_bytes, tensor.element_bytes);
          return;
        }
        std::uint16_t bits = 0;
        std::memcpy(&bits, from + i * 2, sizeof bits);
        const float value = tensor.cast == PackCast::float_to_bfloat16 ? float_of_bfloat16(bits)
                                                                       : float_of_half(bits);
        std::memcpy(to, &value, sizeof value);
      });
    }
    ASSERT_TRUE(target == expected) << "round " << round;
  }
}

PackedTensor bytes_tensor(std::int64_t bytes) {
  PackedTensor tensor{};
  tensor.element_bytes = 1;
  tensor.dimensions = 1;
  tensor.sizes[0] = bytes;
  tensor.strides[0] = 1;
  return tensor;
}

TEST(PackKernel, TakesTwoThousandContiguousTensorsInOneLaunch) {
  std::mt19937_64 random(3);
  for (const int count : {2032, 2033, 5000}) {
    Message message;
    for (int i = 0; i < count; ++i)
      message.add(bytes_tensor(1 + static_cast<std::int64_t>(random() % 600)), random() % 16);
    Arena source(message.arena_bytes);
    source.randomize(random);
    Arena packed(message.packed_bytes);
    const HostRun run = run_pack<true>(message.in(source), packed.address(), message.packed_bytes);
    EXPECT_EQ(run.flat_launches, (count + 2031) / 2032);
    EXPECT_EQ(run.strided_launches, 0);
    EXPECT_TRUE(packed == packed_reference(message, source)) << count;
  }
}

TEST(PackKernel, MovesAlignedContiguousTensorsWithoutLookingAtEachSlot) {
  std::mt19937_64 random(4);
  Message message;
  message.add(bytes_tensor(5 * 16384 + 100), 0);
  message.add(bytes_tensor(3 * 16384), 0);
  message.add(bytes_tensor(3 * 16384), 8);  // not aligned for it
  Arena source(message.arena_bytes);
  source.randomize(random);
  Arena packed(message.packed_bytes);
  const HostRun run = run_pack<true>(message.in(source), packed.address(), message.packed_bytes);
  EXPECT_EQ(run.plain_blocks, 5 + 2);  // the first tensor ends within a block
  EXPECT_TRUE(packed == packed_reference(message, source));
}

TEST(PackKernel, CutsLargeTensorsAtTheLimitOfASegment) {
  Message message;
  const std::int64_t bytes = 2 * std::int64_t{kMaxFlatBytes} + 1000;
  message.add(bytes_tensor(bytes), 0);
  std::vector<FlatSegment> segments;
  auto flat = std::make_unique<FlatTable>();
  auto strided = std::make_unique<StridedTable>();
  EXPECT_EQ(plan_pack(
                message.tensors.data(), 1, message.packed_bytes, false, *flat, *strided,
                [&](const FlatTable& table) {
                  segments.assign(table.segments, table.segments + table.count);
                  return 0;
                },
                [](const StridedTable&) { return 1; }),
            0);
  ASSERT_EQ(segments.size(), 3U);
  EXPECT_EQ(packed_bytes_of(segments[0]), kMaxFlatBytes);
  EXPECT_EQ(segments[2].address, std::uint64_t{2} * kMaxFlatBytes);
  EXPECT_EQ(segments[2].unit, 2 * (kMaxFlatBytes / kUnitBytes));
  EXPECT_EQ(packed_bytes_of(segments[2]), 1000U);
}

TEST(PackKernel, ChoosesTheWidestPiecesThatAddressAndStridesAllow) {
  const auto mode = [](std::uint64_t address, std::int64_t columns, std::int64_t stride) {
    PackedTensor tensor{};
    tensor.address = address;
    tensor.element_bytes = 4;
    tensor.dimensions = 2;
    tensor.sizes[0] = 5;
    tensor.sizes[1] = columns;
    tensor.strides[0] = stride;
    tensor.strides[1] = 1;
    PiecewiseTensor pieces;
    EXPECT_EQ(describe_pieces(tensor, false, &pieces), 0);
    return pieces.mode;
  };
  EXPECT_EQ(mode(256, 8, 12), Mode::copy16);
  EXPECT_EQ(mode(264, 8, 12), Mode::copy8);
  EXPECT_EQ(mode(256, 6, 12), Mode::copy8);
  EXPECT_EQ(mode(256, 8, 11), Mode::copy4);
  EXPECT_EQ(mode(256, 7, 7), Mode::copy16);  // contiguous: the tail is for single bytes
  EXPECT_EQ(mode(258, 8, 8), Mode::copy2);
}

TEST(PackKernel, GathersAndScattersRowsOfATable) {
  std::mt19937_64 random(5);
  for (const std::int64_t columns : {1, 4, 7, 64}) {
    PackedTensor tensor{};
    tensor.element_bytes = 4;
    tensor.dimensions = 2;
    tensor.table_rows = 50;
    std::vector<std::int64_t> rows(50);
    std::iota(rows.begin(), rows.end(), 0);
    std::shuffle(rows.begin(), rows.end(), random);
    rows.resize(33);
    tensor.rows = reinterpret_cast<std::uint64_t>(rows.data());
    tensor.sizes[0] = 33;
    tensor.sizes[1] = columns;
    tensor.strides[0] = columns + 4;
    tensor.strides[1] = 1;
    Message message;
    message.add(tensor, 0);
    Arena source(message.arena_bytes);
    source.randomize(random);
    Arena packed(message.packed_bytes);
    EXPECT_FALSE(run_pack<true>(message.in(source), packed.address(), message.packed_bytes).error);
    EXPECT_TRUE(packed == packed_reference(message, source)) << columns;

    Arena target(message.arena_bytes);
    EXPECT_FALSE(run_pack<false>(message.in(target), packed.address(), message.packed_bytes).error);
    Arena again(message.packed_bytes);
    (void)run_pack<true>(message.in(target), again.address(), message.packed_bytes);
    EXPECT_TRUE(again == packed) << columns;
  }
}

TEST(PackKernel, RowsOutsideOfTheTableArePackedAsZerosAndReported) {
  for (const std::int64_t outside :
       {std::int64_t{-1}, std::int64_t{3}, std::numeric_limits<std::int64_t>::min()}) {
    const std::vector<std::int64_t> rows{2, outside, 0};
    PackedTensor tensor{};
    tensor.element_bytes = 4;
    tensor.dimensions = 2;
    tensor.table_rows = 3;
    tensor.rows = reinterpret_cast<std::uint64_t>(rows.data());
    tensor.sizes[0] = 3;
    tensor.sizes[1] = 8;
    tensor.strides[0] = 8;
    tensor.strides[1] = 1;
    Message message;
    message.add(tensor, 0);
    Arena source(message.arena_bytes);
    Arena packed(message.packed_bytes);
    EXPECT_TRUE(run_pack<true>(message.in(source), packed.address(), message.packed_bytes).error);
    EXPECT_EQ(*packed.at(0), kPoison);
    EXPECT_EQ(*packed.at(31), kPoison);
    for (int i = 32; i < 64; ++i) EXPECT_EQ(*packed.at(static_cast<std::uint64_t>(i)), 0);
    EXPECT_EQ(*packed.at(64), kPoison);
    Arena target(message.arena_bytes);
    const Arena before = target;
    *packed.at(0) = 1;
    EXPECT_TRUE(run_pack<false>(message.in(target), packed.address(), message.packed_bytes).error);
    EXPECT_FALSE(target == before);
    *target.at(64) = kPoison;  // row 2, which rows[0] names
    EXPECT_TRUE(target == before);
  }
}

TEST(PackKernel, RefusesWhatDoesNotFit) {
  Arena arena(4096);
  const auto status = [&](PackedTensor tensor, std::uint64_t packed_bytes = 1024,
                          bool unpacks = false) {
    tensor.address += arena.address();
    const std::vector<PackedTensor> one{tensor};
    Arena packed(1024);
    return unpacks ? run_pack<false>(one, packed.address(), packed_bytes).status
                   : run_pack<true>(one, packed.address(), packed_bytes).status;
  };
  PackedTensor tensor = bytes_tensor(1000);
  EXPECT_EQ(status(tensor), kKernelSuccess);
  EXPECT_EQ(status(tensor, 768), kKernelBadRange);
  tensor.packed_offset = 8;
  EXPECT_EQ(status(tensor), kKernelBadOffset);
  tensor.packed_offset = 256;
  EXPECT_EQ(status(tensor), kKernelBadRange);
  tensor = bytes_tensor(-1);
  EXPECT_EQ(status(tensor), kKernelBadShape);
  tensor = bytes_tensor(std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(status(tensor), kKernelBadShape);
  tensor = bytes_tensor(8);
  tensor.element_bytes = 0;
  EXPECT_EQ(status(tensor), kKernelBadElement);
  tensor.element_bytes = 8;
  tensor.cast = PackCast::float_to_half;
  EXPECT_EQ(status(tensor), kKernelBadElement);
  tensor.element_bytes = 4;
  tensor.address = 2;
  EXPECT_EQ(status(tensor), kKernelMisaligned);
  tensor = bytes_tensor(8);
  tensor.strides[0] = 0;
  EXPECT_EQ(status(tensor), kKernelSuccess);
  EXPECT_EQ(status(tensor, 1024, true), kKernelOverlap);
  tensor.dimensions = 9;
  EXPECT_EQ(status(tensor), kKernelTooManyDims);
}

TEST(PackKernel, RefusesPlacesThatOverlap) {
  Arena arena(4096);
  Arena packed(1024);
  std::vector<PackedTensor> two(2, bytes_tensor(300));
  for (PackedTensor& tensor : two) tensor.address = arena.address();
  two[1].packed_offset = 256;
  EXPECT_EQ(run_pack<true>(two, packed.address(), 1024).status, kKernelBadOffset);
  two[1].packed_offset = 512;
  EXPECT_EQ(run_pack<true>(two, packed.address(), 1024).status, kKernelSuccess);
}

// The values of all 16-bit patterns, by a computation of its own.
double half_value(std::uint32_t bits) {
  const auto exponent = static_cast<int>(bits >> 10U & 31U);
  const double mantissa = bits & 1023U;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return (bits & 0x8000U) != 0 ? -magnitude : magnitude;
}
double bfloat16_value(std::uint32_t bits) {
  const auto exponent = static_cast<int>(bits >> 7U & 255U);
  const double mantissa = bits & 127U;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -133) : std::ldexp(128 + mantissa, exponent - 134);
  return (bits & 0x8000U) != 0 ? -magnitude : magnitude;
}

TEST(PackKernel, CastsEveryShortFloatBackAndForth) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    if ((bits & 0x7c00U) != 0x7c00U) {
      ASSERT_EQ(float_of_half(bits), half_value(bits)) << bits;
      ASSERT_EQ(half_of(float_of_half(bits)), bits);
    }
    if ((bits & 0x7f80U) != 0x7f80U) {
      ASSERT_EQ(float_of_bfloat16(bits), bfloat16_value(bits)) << bits;
      ASSERT_EQ(bfloat16_of(float_of_bfloat16(bits)), bits);
    }
  }
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(float_of_half(half_of(-infinity)), -infinity);
  EXPECT_EQ(float_of_bfloat16(bfloat16_of(infinity)), infinity);
  EXPECT_TRUE(std::isnan(float_of_half(half_of(std::nanf("")))));
  EXPECT_TRUE(std::isnan(float_of_bfloat16(bfloat16_of(std::nanf("")))));
}

TEST(PackKernel, CastsRoundToTheNearestAndTiesToEven) {
  const auto check = [](float value, std::uint32_t low, double (*value_of)(std::uint32_t),
                        std::uint32_t chosen) {
    // Neighbours of one sign; `low` is the one nearer to zero.
    const double below = std::abs(value - value_of(low));
    const double above = std::abs(value - value_of(low + 1));
    const bool up = above < below || (above == below && (low & 1U) != 0);
    ASSERT_EQ(chosen, up ? low + 1 : low) << value;
  };
  std::mt19937_64 random(6);
  for (int i = 0; i < 200000; ++i) {
    const auto low =
        static_cast<std::uint32_t>(random() % 0x7bff) | (random() % 2 == 0 ? 0x8000U : 0U);
    const double share = i % 3 == 0 ? 0.5 : static_cast<double>(random() % 1000) / 1000;
    const double from = half_value(low);
    const auto value = static_cast<float>(from + (half_value(low + 1) - from) * share);
    check(value, low, half_value, half_of(value));
    const auto wide = static_cast<std::uint32_t>(random() % 0x7f7f) | (low & 0x8000U);
    const double start = bfloat16_value(wide);
    const auto second = static_cast<float>(start + (bfloat16_value(wide + 1) - start) * share);
    check(second, wide, bfloat16_value, bfloat16_of(second));
  }
  EXPECT_EQ(half_of(65519.0F), 0x7bffU);
  EXPECT_EQ(half_of(65520.0F), 0x7c00U);
  EXPECT_EQ(half_of(-1e9F), 0xfc00U);
}

}  // namespace
}  // namespace stitch::transport::gpu::kernels::kernels_index_test
