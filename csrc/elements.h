// The element types of logits, for the CPU's and the GPU's compilers: 16-bit floats are stored as their bits, so that no
// header of torch or CUDA is needed to name them.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#define TITAN_OPD_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TITAN_OPD_HOST_DEVICE inline
#endif

namespace titan_opd {

// The upper half of a float32.
struct Bfloat16 {
  uint16_t bits;
};

// IEEE 754 binary16.
struct Half {
  uint16_t bits;
};

TITAN_OPD_HOST_DEVICE float float_from_bits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

TITAN_OPD_HOST_DEVICE uint32_t bits_from_float(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

TITAN_OPD_HOST_DEVICE float to_float(float value) {
  return value;
}

TITAN_OPD_HOST_DEVICE float to_float(Bfloat16 value) {
  return float_from_bits(static_cast<uint32_t>(value.bits) << 16);
}

TITAN_OPD_HOST_DEVICE float to_float(Half value) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(value.bits));
#else
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  const uint32_t magnitude = (value.bits & 0x7fffu) << 13;  // a float32 whose exponent is 112 too small
  const bool is_finite = magnitude < 0x0f800000u;
  const uint32_t finite = bits_from_float(float_from_bits(magnitude) * 0x1p112f);  // exact for subnormals too
  return float_from_bits(sign | (is_finite ? finite : magnitude | 0x7f800000u));
#endif
}

// Rounds to the nearest, ties to even; NaN stays NaN.
TITAN_OPD_HOST_DEVICE void from_float(float value, float& element) {
  element = value;
}

TITAN_OPD_HOST_DEVICE void from_float(float value, Bfloat16& element) {
  const uint32_t bits = bits_from_float(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  element.bits = static_cast<uint16_t>(value != value ? 0x7fffu : rounded);
}

TITAN_OPD_HOST_DEVICE void from_float(float value, Half& element) {
#if defined(__CUDA_ARCH__)
  element.bits = __half_as_ushort(__float2half_rn(value));
#else
  const uint32_t bits = bits_from_float(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (value != value) {
    half = 0x7fffu;
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 1/2 rounds to a multiple of 2^-24, the least subnormal
    half = bits_from_float(float_from_bits(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  }
  element.bits = static_cast<uint16_t>((bits >> 16 & 0x8000u) | half);
#endif
}

}  // namespace titan_opd
