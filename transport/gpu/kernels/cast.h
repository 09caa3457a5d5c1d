#pragma once

#include <cstdint>
#include <cstring>

#include "stitch/transport/gpu/kernels/host_device.h"

// Casts between fp32 and 16-bit floating point: to the nearest, ties to even, as torch casts.
namespace stitch::transport::gpu::kernels {

STITCH_HOST_DEVICE std::uint32_t bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}
STITCH_HOST_DEVICE float float_of(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

STITCH_HOST_DEVICE std::uint32_t bfloat16_of(float value) {
  const std::uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return 0x7fc0;  // not a number
  return (bits + 0x7fffU + ((bits >> 16U) & 1U)) >> 16U;
}
STITCH_HOST_DEVICE float float_of_bfloat16(std::uint32_t bits) { return float_of(bits << 16U); }

STITCH_HOST_DEVICE std::uint32_t half_of(float value) {
#if defined(__CUDA_ARCH__)
  std::uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
#else
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits >> 16U) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return 0x7fff;           // not a number, as the device has it
  if (magnitude >= 0x477ff000U) return sign | 0x7c00U;  // rounds to 65536 or more
  if (magnitude < 0x33000001U) return sign;             // at most half of the least number
  const std::uint32_t exponent = magnitude >> 23U;
  std::uint32_t mantissa = (magnitude & 0x7fffffU) | 0x800000U;
  std::uint32_t shift = 13;
  std::uint32_t base = 0;
  if (exponent < 113) {
    shift = 126 - exponent;  // below the normal numbers: more bits are dropped
  } else {
    base = (exponent - 112) << 10U;
    mantissa &= 0x7fffffU;
  }
  const std::uint32_t kept = mantissa >> shift;
  const std::uint32_t dropped = mantissa & ((1U << shift) - 1);
  const std::uint32_t tie = 1U << (shift - 1);
  const bool up = dropped > tie || (dropped == tie && (kept & 1U) != 0);
  return sign | (base + kept + (up ? 1U : 0U));  // a carry goes into the exponent
#endif
}
STITCH_HOST_DEVICE float float_of_half(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<std::uint16_t>(bits)));
  return value;
#else
  const std::uint32_t sign = (bits & 0x8000U) << 16U;
  const std::uint32_t exponent = (bits >> 10U) & 0x1fU;
  const std::uint32_t mantissa = bits & 0x3ffU;
  if (exponent == 0x1f) return float_of(sign | 0x7f800000U | (mantissa << 13U));
  if (exponent != 0) return float_of(sign | ((exponent + 112) << 23U) | (mantissa << 13U));
  // Multiples of 2^-24, which float has exactly.
  const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8F;
  return sign != 0 ? -magnitude : magnitude;
#endif
}

}  // namespace stitch::transport::gpu::kernels
