// Attention of many bfloat16 queries to a block of slots as two matrix products, scores held slot by slot: what is
// computed for each query, its largest score and its sum, are then plain vector operations over queries.
#pragma once

#include "products.h"

namespace fastattn {

constexpr int64_t kProductBlock = 128; // slots: enough to spread the reading and writing of the sums over

#if defined(FASTATTN_DPBF16)

// Whether both products may be formed from the cache as it lies, and enough queries share them.
inline bool products_pay(int64_t rows, int64_t dim, int64_t value_dim) {
  return rows > 8 && dim % 32 == 0 && value_dim % 16 == 0 && dim > 0 && value_dim > 0;
}

class BlockProducts {
 public:
  static size_t bytes(int64_t rows, int64_t dim, int64_t value_dim) {
    const int64_t columns = round_up(rows, 16);
    return columns * (dim * 2 + kProductBlock * 6 + 4) + kProductBlock * (dim + 2 * value_dim) * 2 + 6 * 64;
  }

  BlockProducts(Scratch& scratch, int64_t rows, int64_t dim, int64_t value_dim) : dim_(dim), value_dim_(value_dim) {
    const int64_t columns = round_up(rows, 16);
    query_ = scratch.take<BFloat16>(columns * dim);
    scores_ = scratch.take<float>(columns * kProductBlock);
    weights_ = scratch.take<BFloat16>(columns * kProductBlock);
    shrink_ = scratch.take<float>(columns);
    pairs_ = scratch.take<BFloat16>(kProductBlock * value_dim);
    keys_ = scratch.take<BFloat16>(kProductBlock * dim);
    values_ = scratch.take<BFloat16>(kProductBlock * value_dim);
  }

  // `query`: [rows, dim], padded to `row` columns.
  void start(const BFloat16* query, int64_t row, int64_t rows) {
    rows_ = rows, columns_ = round_up(rows, 16);
    for (int64_t k = 0; k < dim_; k += 2) {
      BFloat16* out = query_ + k * columns_;
      for (int64_t m = 0; m < rows; ++m) {
        out[2 * m] = query[m * row + k];
        out[2 * m + 1] = query[m * row + k + 1];
      }
      std::fill(out + 2 * rows, out + 2 * columns_, BFloat16(0));
    }
  }

  // `key_factors`, `value_factors`: what scores and weights are multiplied by, slot by slot; null for 1.
  // `ahead`: the keys of a whole block that comes next, or none.
  // `largest`, `total` and the rows of `sums` are of round_up(rows, 16) queries. Query m sees `seen(m)` of the slots.
  template <typename Seen>
  void attend(
      const BFloat16* key, int64_t key_slot, const BFloat16* value, int64_t value_slot, int64_t slots, float scale,
      const Seen& seen, const float* key_factors, const float* value_factors, float* largest, float* total, float* sums,
      const BFloat16* ahead, int64_t ahead_slot) {
    const int64_t padded = round_up(slots, 32);
    if (padded != slots) { // what follows in memory is not to be read
      key = copy(key, key_slot, slots, padded, dim_, keys_), key_slot = dim_;
      value = copy(value, value_slot, slots, padded, value_dim_, values_), value_slot = value_dim_;
    }
    multiply({key, key_slot, query_, scores_, padded, columns_, dim_, false});
    for (int64_t n = 0; n < padded; ++n) {
      const __m512 factor = _mm512_set1_ps(key_factors ? key_factors[n] * scale : scale);
      for (float *score = scores_ + n * columns_, *end = score + columns_; score != end; score += 16) {
        _mm512_storeu_ps(score, _mm512_mul_ps(_mm512_loadu_ps(score), factor));
      }
    }
    for (int64_t m = 0; m < columns_; ++m) {
      for (int64_t n = std::clamp<int64_t>(m < rows_ ? seen(m) : slots, 0, slots); n < padded; ++n) {
        scores_[n * columns_ + m] = -std::numeric_limits<float>::infinity();
      }
    }
    for (int64_t m = 0; m < columns_; m += 16) {
      value_factors ? softmax<true>(m, padded, largest + m, total + m, value_factors)
                    : softmax<false>(m, padded, largest + m, total + m, nullptr);
    }
    for (int64_t m = 0; m < rows_; ++m) {
      if (shrink_[m] != 1.0f) { // also where it is NaN
        float* row = sums + m * value_dim_;
        for (int64_t c = 0; c < value_dim_; c += 16) {
          _mm512_storeu_ps(row + c, _mm512_mul_ps(_mm512_loadu_ps(row + c), _mm512_set1_ps(shrink_[m])));
        }
      }
    }
    for (int64_t n = 0; n < padded; n += 2) {
      if (ahead) {
        prefetch(ahead + n * ahead_slot, dim_);
        prefetch(ahead + (n + 1) * ahead_slot, dim_);
      }
      interleave(value + n * value_slot, value + (n + 1) * value_slot, value_dim_, pairs_ + n * value_dim_);
    }
    multiply({weights_, kProductBlock, pairs_, sums, columns_, value_dim_, padded, true});
  }

 private:
  static const BFloat16* copy(
      const BFloat16* data, int64_t row, int64_t rows, int64_t padded, int64_t columns, BFloat16* out) {
    for (int64_t n = 0; n < rows; ++n) {
      std::copy_n(data + n * row, columns, out + n * columns);
    }
    std::fill(out + rows * columns, out + padded * columns, BFloat16(0));
    return out;
  }

  // Scores of 16 queries to weights, a row of them for each query.
  template <bool kFactors>
  void softmax(int64_t m, int64_t slots, float* largest, float* total, const float* factors) {
    using V = Vectorized<float>;
    const float* scores = scores_ + m;
    const V none(-std::numeric_limits<float>::infinity()), before = V::loadu(largest);
    V top = before;
    for (int64_t n = 0; n < slots; ++n) {
      top = at::vec::maximum(top, V::loadu(scores + n * columns_));
    }
    const V origin = V::blendv(top, V(0.0f), top == none);
    const V shrink = V::blendv((before - origin).exp(), V(1.0f), top == before);
    V sum(0.0f);
    const __m512i half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    for (int64_t n = 0; n < slots; n += 32) {
      __m512i pairs[16];
      for (int i = 0; i < 16; ++i) {
        V first = (V::loadu(scores + (n + 2 * i) * columns_) - origin).exp_u20();
        V second = (V::loadu(scores + (n + 2 * i + 1) * columns_) - origin).exp_u20();
        sum = sum + (first + second);
        if constexpr (kFactors) {
          first = first * V(factors[n + 2 * i]), second = second * V(factors[n + 2 * i + 1]);
        }
        pairs[i] = _mm512_or_si512(
            _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(first)),
            _mm512_and_si512(half, _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(second)), 16)));
      }
      transpose(pairs);
      for (int i = 0; i < 16; ++i) {
        _mm512_storeu_si512(weights_ + (m + i) * kProductBlock + n, pairs[i]);
      }
    }
    (V::loadu(total) * shrink + sum).store(total);
    shrink.store(shrink_ + m);
    top.store(largest);
  }

  const int64_t dim_, value_dim_;
  int64_t rows_ = 0, columns_ = 0;
  BFloat16 *query_, *weights_, *pairs_, *keys_, *values_;
  float *scores_, *shrink_;
};

#endif

} // namespace fastattn
