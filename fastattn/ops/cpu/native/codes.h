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

template <typename A>
inline void multiply_by(A* numbers, const A* factors, int64_t count) {
  using V = Vectorized<A>;
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

// Groups of 32 codes of 4 bits in 16 bytes, low halves first, each plus 8; a scale of float16 for each group.
constexpr int64_t kGroup = 32;

inline void widen_group(const uint8_t* codes, float scale, float* out) {
#if defined(FASTATTN_AVX512)
  const __m512 steps = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
  const __m512 numbers = _mm512_mul_ps(steps, _mm512_set1_ps(scale));
  const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  _mm512_storeu_ps(out, _mm512_permutexvar_ps(pairs, numbers)); // which looks at the lowest 4 bits
  _mm512_storeu_ps(out + 16, _mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), numbers));
#elif defined(FASTATTN_AVX2)
  const auto store = [scale](float* place, __m256i code) {
    const __m256 number = _mm256_cvtepi32_ps(_mm256_sub_epi32(code, _mm256_set1_epi32(8)));
    _mm256_storeu_ps(place, _mm256_mul_ps(number, _mm256_set1_ps(scale)));
  };
  for (int64_t i = 0; i < kGroup / 2; i += 8) {
    const __m256i pairs = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
    store(out + i, _mm256_and_si256(pairs, _mm256_set1_epi32(15)));
    store(out + kGroup / 2 + i, _mm256_srli_epi32(pairs, 4));
  }
#else
  for (int64_t i = 0; i < kGroup / 2; ++i) {
    out[i] = scale * float(int(codes[i] & 15) - 8);
    out[kGroup / 2 + i] = scale * float(int(codes[i] >> 4) - 8);
  }
#endif
}

// The normalized Hadamard transform of blocks of the largest power of two that divides `dim`, in place.
inline void hadamard(float* numbers, int64_t dim) {
  const int64_t block = dim & -dim;
  for (int64_t half = 1; half < block; half *= 2) {
    for (int64_t i = 0; i < dim; i += 2 * half) {
      for (int64_t j = i; j < i + half; ++j) {
        const float first = numbers[j], second = numbers[j + half];
        numbers[j] = first + second, numbers[j + half] = first - second;
      }
    }
  }
  const float norm = 1 / std::sqrt(float(block));
  for (int64_t i = 0; i < dim; ++i) {
    numbers[i] *= norm;
  }
}

enum class Format { kNone, kInt8, kE4m3, kInt4 };

// Keys or values of a quantised cache, read a block of slots at a time: for many queries, so that a code is widened
// once, and for int4, whose scales lie within a row.
struct Coded {
  Format format = Format::kNone;
  const uint8_t* data = nullptr;
  int64_t batch = 0, head = 0, slot = 0; // strides in bytes
  Scales scale{}; // of int8 and e4m3
  const Half* group_scale = nullptr; // of int4: a row's groups lie next to each other
  int64_t group_batch = 0, group_head = 0, group_slot = 0;

  bool same(const Coded& other) const {
    return data == other.data && slot == other.slot && scale.data == other.scale.data &&
        group_scale == other.group_scale;
  }

  // The first `dim` numbers of slots [first, first + count), in rows of a multiple of 32 columns of which those beyond
  // `dim` are zero. In bfloat16 they are to be multiplied by `factors`, one for each slot up to `size`.
  void read(int64_t b, int64_t h, int64_t first, int64_t count, int64_t dim, float* out, int64_t row) const {
    const uint8_t* codes = data + b * batch + h * head + first * slot;
    if (format == Format::kInt4) {
      const Half* scales = group_scale + b * group_batch + h * group_head + first * group_slot;
      for (int64_t n = 0; n < count; ++n) {
        for (int64_t g = 0; g < dim / kGroup; ++g) {
          widen_group(codes + n * slot + g * kGroup / 2, wide(scales[n * group_slot + g]), out + n * row + g * kGroup);
        }
      }
    } else {
      const float* scales = scale.data + b * scale.batch + h * scale.head + first * scale.slot;
      format == Format::kInt8 ? rows(reinterpret_cast<const Int8*>(codes), scales, count, dim, out, row)
                              : rows(reinterpret_cast<const E4m3*>(codes), scales, count, dim, out, row);
    }
  }

  void read(
      int64_t b, int64_t h, int64_t first, int64_t count, int64_t dim, BFloat16* out, int64_t row, float* factors,
      int64_t size) const {
    const uint8_t* codes = data + b * batch + h * head + first * slot;
    format == Format::kInt8 ? rows(reinterpret_cast<const Int8*>(codes), count, dim, out, row)
                            : rows(reinterpret_cast<const E4m3*>(codes), count, dim, out, row);
    scale.copy(b, h, first, count, format == Format::kInt8 ? Int8::kUnit : E4m3::kUnit, factors, size);
  }

 private:
  static float wide(Half scale) {
#if defined(__F16C__)
    return _cvtsh_ss(scale.x);
#else
    return scale;
#endif
  }

  template <typename Code>
  void rows(
      const Code* codes, const float* scales, int64_t count, int64_t dim, float* out, int64_t row) const {
    constexpr int64_t kLanes = Vectorized<float>::size();
    for (int64_t n = 0; n < count; ++n, codes += slot, out += row) {
      const Vectorized<float> factor(scales[n * scale.slot] * Code::kUnit);
      int64_t d = 0;
      for (; d + kLanes <= dim; d += kLanes) {
        (load_wide(codes + d) * factor).store(out + d);
      }
      if (d < dim) {
        (load_wide(codes + d, dim - d) * factor).store(out + d);
      }
    }
  }

  template <typename Code>
  void rows(const Code* codes, int64_t count, int64_t dim, BFloat16* out, int64_t row) const {
    constexpr int64_t kLanes = Vectorized<float>::size();
    const auto load = [dim](const Code* data, int64_t d) {
      return d + kLanes <= dim ? load_wide(data + d) : load_wide(data + d, std::max<int64_t>(dim - d, 0));
    };
    for (int64_t n = 0; n < count; ++n, codes += slot, out += row) {
      for (int64_t d = 0; d < dim; d += 2 * kLanes) {
#if defined(FASTATTN_DPBF16)
        _mm512_storeu_si512(out + d, (__m512i)_mm512_cvtne2ps_pbh(load(codes, d + kLanes), load(codes, d)));
#else
        at::vec::convert_from_float<BFloat16>(load(codes, d), load(codes, d + kLanes)).store(out + d);
#endif
      }
    }
  }
};

} // namespace fastattn
