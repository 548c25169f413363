// Quantised keys and values: codes that become numbers in registers, and the scales that they are multiplied by. The
// formats are those of ops/_formats.py.
#pragma once

#include "common.h"

#include <array>

namespace fastattn {

// One float for every slot of [batch, heads, slots].
struct Scales {
  const float* data;
  int64_t batch, head, slot; // strides

  // `unit` times the scales of slots [first, first + count), zeros up to `size`.
  void copy(int64_t b, int64_t h, int64_t first, int64_t count, float unit, float* out, int64_t size) const {
    const float* source = data + b * batch + h * head + first * slot;
    for (int64_t n = 0; n < count; ++n) {
      out[n] = source[n * slot] * unit;
    }
    std::fill(out + count, out + size, 0.0f);
  }
};

inline void multiply_by(float* numbers, const float* factors, int64_t count) {
  using V = Vectorized<float>;
  for (int64_t n = 0; n < count; n += V::size()) {
    (V::loadu(numbers + n) * V::loadu(factors + n)).store(numbers + n);
  }
}

// `kUnit` times what widen() gives is the number that a code stands for.
struct Int8 {
  static constexpr float kUnit = 1;
  int8_t bits;

  static Vectorized<float> widen(const Int8* data) {
#if defined(FASTATTN_AVX512)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data))));
#elif defined(FASTATTN_AVX2)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(data))));
#else
    float numbers[Vectorized<float>::size()];
    for (int i = 0; i < Vectorized<float>::size(); ++i) {
      numbers[i] = data[i].bits;
    }
    return Vectorized<float>::loadu(numbers);
#endif
  }
};

// float8_e4m3fn, by way of float16, whose exponent is biased by 8 more.
struct E4m3 {
  static constexpr float kUnit = 256;
  uint8_t bits;

  static Vectorized<float> widen(const E4m3* data) {
#if defined(FASTATTN_AVX512)
    const __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data)));
    // Sign extended, the sign also stands where the exponent's highest bit goes: only NaN is to have that.
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16(int16_t(0xbfff)));
    const __m256i next = _mm256_add_epi16(half, _mm256_set1_epi16(0x80)); // carries into that bit from NaN alone
    return _mm512_cvtph_ps(_mm256_ternarylogic_epi32(half, next, _mm256_set1_epi16(0x4000), 0xf8));
#elif defined(FASTATTN_AVX2) && defined(__F16C__)
    const __m128i codes = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(data)));
    const __m128i half = _mm_and_si128(_mm_slli_epi16(codes, 7), _mm_set1_epi16(int16_t(0xbfff)));
    const __m128i next = _mm_add_epi16(half, _mm_set1_epi16(0x80));
    return _mm256_cvtph_ps(_mm_or_si128(half, _mm_and_si128(next, _mm_set1_epi16(0x4000))));
#else
    float numbers[Vectorized<float>::size()];
    for (int i = 0; i < Vectorized<float>::size(); ++i) {
      numbers[i] = kNumbers[data[i].bits];
    }
    return Vectorized<float>::loadu(numbers);
#endif
  }

 private:
  static constexpr std::array<float, 256> numbers() {
    std::array<float, 256> out{};
    for (int code = 0; code < 256; ++code) {
      const int exponent = code >> 3 & 15, mantissa = code & 7;
      float number = float(exponent ? 8 + mantissa : mantissa) / 131072; // 2^-9 / kUnit
      for (int i = 1; i < exponent; ++i) {
        number *= 2;
      }
      number = (code & 127) == 127 ? std::numeric_limits<float>::quiet_NaN() : number;
      out[code] = code & 128 ? -number : number;
    }
    return out;
  }
  static const std::array<float, 256> kNumbers;
};

inline const std::array<float, 256> E4m3::kNumbers = E4m3::numbers();

} // namespace fastattn
