// Products of bfloat16 matrices with float32 sums, where the processor has instructions for them: AMX tiles, else
// AVX-512 dot products. One shape serves both halves of attention: rows times columns stored in pairs.
#pragma once

#include "common.h"

#if defined(FASTATTN_DPBF16)

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define FASTATTN_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fastattn {

// Transposes 16 x 16 numbers of 32 bits.
inline void transpose(__m512i (&rows)[16]) {
  __m512i pairs[16];
  FASTATTN_UNROLL
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  __m512i fours[16]; // fours[4 i + j] holds in its lane l column 4 l + j of rows 4 i to 4 i + 3
  FASTATTN_UNROLL
  for (int i = 0; i < 16; i += 4) {
    fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
    fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
  FASTATTN_UNROLL
  for (int j = 0; j < 4; ++j) {
    const __m512i even = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x88);
    const __m512i odd = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xdd);
    const __m512i later_even = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x88);
    const __m512i later_odd = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xdd);
    rows[j] = _mm512_shuffle_i32x4(even, later_even, 0x88);
    rows[4 + j] = _mm512_shuffle_i32x4(odd, later_odd, 0x88);
    rows[8 + j] = _mm512_shuffle_i32x4(even, later_even, 0xdd);
    rows[12 + j] = _mm512_shuffle_i32x4(odd, later_odd, 0xdd);
  }
}

// Two rows interleaved, as products want their right side; `columns` is a multiple of 16.
inline void interleave(const BFloat16* first, const BFloat16* second, int64_t columns, BFloat16* out) {
  const __m512i low = _mm512_set_epi16(
      47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32,
      0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  int64_t c = 0;
  for (; c + 32 <= columns; c += 32) {
    const __m512i a = _mm512_loadu_si512(first + c), b = _mm512_loadu_si512(second + c);
    _mm512_storeu_si512(out + 2 * c, _mm512_permutex2var_epi16(a, low, b));
    _mm512_storeu_si512(out + 2 * c + 32, _mm512_permutex2var_epi16(a, high, b));
  }
  if (c < columns) {
    const __m512i a = _mm512_maskz_loadu_epi16(0xffff, first + c), b = _mm512_maskz_loadu_epi16(0xffff, second + c);
    _mm512_storeu_si512(out + 2 * c, _mm512_permutex2var_epi16(a, low, b));
  }
}

// out[m][n] (+)= sum over k of left[m][k] * right[k][n]. `right` lies in pairs of rows: its numbers [2 r][c] and
// [2 r + 1][c] are neighbors.
struct Product {
  const BFloat16* left;
  int64_t left_row;
  const BFloat16* right;
  float* out;
  int64_t rows, columns, inner; // multiples of 16, 16 and 32
  bool add;
};

template <int kRows, int kVectors>
inline void dot_product_tile(const Product& p, int64_t m, int64_t n) {
  __m512 sums[kRows][kVectors];
  FASTATTN_UNROLL
  for (int i = 0; i < kRows; ++i) {
    FASTATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      sums[i][v] = p.add ? _mm512_loadu_ps(p.out + (m + i) * p.columns + n + 16 * v) : _mm512_setzero_ps();
    }
  }
  for (int64_t k = 0; k < p.inner; k += 2) {
    __m512bh right[kVectors];
    FASTATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      right[v] = (__m512bh)_mm512_loadu_si512(p.right + k * p.columns + 2 * (n + 16 * v));
    }
    FASTATTN_UNROLL
    for (int i = 0; i < kRows; ++i) {
      int32_t pair;
      __builtin_memcpy(&pair, p.left + (m + i) * p.left_row + k, 4);
      const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
      FASTATTN_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        sums[i][v] = _mm512_dpbf16_ps(sums[i][v], left, right[v]);
      }
    }
  }
  FASTATTN_UNROLL
  for (int i = 0; i < kRows; ++i) {
    FASTATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      _mm512_storeu_ps(p.out + (m + i) * p.columns + n + 16 * v, sums[i][v]);
    }
  }
}

inline void multiply_by_dot_products(const Product& p) {
  int64_t n = 0;
  for (; n + 32 <= p.columns; n += 32) {
    for (int64_t m = 0; m < p.rows; m += 8) {
      dot_product_tile<8, 2>(p, m, n);
    }
  }
  for (; n < p.columns; n += 16) {
    for (int64_t m = 0; m < p.rows; m += 8) {
      dot_product_tile<8, 1>(p, m, n);
    }
  }
}

#if defined(FASTATTN_AMX)
// Linux lets a process use the tiles once it has asked.
inline bool amx_permitted() {
  constexpr long kRequest = 0x1023, kTileData = 18;
  static const bool permitted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return permitted;
}

// While it lives, this thread's eight tiles have 16 rows of 64 bytes.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    _tile_loadconfig(&shape);
  }
  ~Tiles() {
    _tile_release();
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// Tiles 0 to 3 are sums, 4 and 5 rows of the left side, 6 and 7 columns of the right side.
template <bool kTwoRows, bool kTwoColumns>
inline void amx_tile(const Product& p, int64_t m, int64_t n) {
  const int64_t out_row = p.columns * sizeof(float), left_row = p.left_row * sizeof(BFloat16);
  float *top = p.out + m * p.columns + n, *bottom = top + 16 * p.columns;
  if (p.add) {
    _tile_loadd(0, top, out_row);
    if constexpr (kTwoColumns) _tile_loadd(1, top + 16, out_row);
    if constexpr (kTwoRows) _tile_loadd(2, bottom, out_row);
    if constexpr (kTwoRows && kTwoColumns) _tile_loadd(3, bottom + 16, out_row);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < p.inner; k += 32) {
    const BFloat16 *left = p.left + m * p.left_row + k, *right = p.right + k * p.columns + 2 * n;
    _tile_loadd(4, left, left_row);
    _tile_loadd(6, right, out_row);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTwoColumns) {
      _tile_loadd(7, right + 32, out_row);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kTwoRows) {
      _tile_loadd(5, left + 16 * p.left_row, left_row);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (kTwoRows && kTwoColumns) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, top, out_row);
  if constexpr (kTwoColumns) _tile_stored(1, top + 16, out_row);
  if constexpr (kTwoRows) _tile_stored(2, bottom, out_row);
  if constexpr (kTwoRows && kTwoColumns) _tile_stored(3, bottom + 16, out_row);
}

inline void multiply_by_tiles(const Product& p) {
  for (int64_t n = 0; n < p.columns; n += 32) {
    const bool two_columns = n + 32 <= p.columns;
    for (int64_t m = 0; m < p.rows; m += 32) {
      if (m + 32 <= p.rows) {
        two_columns ? amx_tile<true, true>(p, m, n) : amx_tile<true, false>(p, m, n);
      } else {
        two_columns ? amx_tile<false, true>(p, m, n) : amx_tile<false, false>(p, m, n);
      }
    }
  }
}
#endif

inline void multiply(const Product& p) {
#if defined(FASTATTN_AMX)
  if (amx_permitted()) {
    const Tiles tiles;
    return multiply_by_tiles(p);
  }
#endif
  multiply_by_dot_products(p);
}

} // namespace fastattn

#endif
