// Attention of a few queries to a block of slots: scores, online softmax and weighted sums, a few queries at a time
// against a few keys or columns, so that what is loaded serves several sums that stay in registers.
#pragma once

#include "common.h"

namespace fastattn {

constexpr int64_t kBlock = 64; // slots whose scores are kept at once: their keys and values stay in a core's caches

// scores[m][n] = query row m . key n, without the scale. `query` rows are padded with zeros to a multiple of kStep.
template <typename T, int kRows, int kKeys>
inline void dot_tile(
    const typename Dot<T>::Query* query, int64_t query_row, const T* key, int64_t key_slot, int64_t dim,
    Wide<T>* scores, int64_t scores_row) {
  using D = Dot<T>;
  Vec<T> sums[kRows][kKeys];
  FASTATTN_UNROLL
  for (int m = 0; m < kRows; ++m) {
    FASTATTN_UNROLL
    for (int n = 0; n < kKeys; ++n) {
      sums[m][n] = Vec<T>(0);
    }
  }
  const auto step = [&](int64_t d, auto load_key) {
    typename D::Chunk keys[kKeys];
    FASTATTN_UNROLL
    for (int n = 0; n < kKeys; ++n) {
      keys[n] = load_key(key + n * key_slot + d);
    }
    FASTATTN_UNROLL
    for (int m = 0; m < kRows; ++m) {
      const auto row = D::load_query(query + m * query_row + d);
      FASTATTN_UNROLL
      for (int n = 0; n < kKeys; ++n) {
        sums[m][n] = D::step(row, keys[n], sums[m][n]);
      }
    }
  };
  int64_t d = 0;
  for (; d + D::kStep <= dim; d += D::kStep) {
    step(d, [](const T* data) { return D::load_key(data); });
  }
  if (d < dim) {
    step(d, [rest = dim - d](const T* data) { return D::load_key(data, rest); });
  }
  FASTATTN_UNROLL
  for (int m = 0; m < kRows; ++m) {
    if constexpr (kKeys == 4) {
      sum_lanes_of_four(sums[m], scores + m * scores_row);
    } else {
      for (int n = 0; n < kKeys; ++n) {
        scores[m * scores_row + n] = sum_lanes(sums[m][n]);
      }
    }
  }
}

template <typename T, int kRows>
inline void dot_rows(
    const typename Dot<T>::Query* query, int64_t query_row, const T* key, int64_t key_slot, int64_t keys, int64_t dim,
    Wide<T>* scores, const T* ahead, int64_t ahead_slot, int64_t ahead_dim) {
  int64_t n = 0;
  for (; n + 4 <= keys; n += 4) {
    if (ahead) {
      FASTATTN_UNROLL
      for (int i = 0; i < 4; ++i) {
        prefetch(ahead + (n + i) * ahead_slot, ahead_dim);
      }
    }
    dot_tile<T, kRows, 4>(query, query_row, key + n * key_slot, key_slot, dim, scores + n, kBlock);
  }
  for (; n < keys; ++n) {
    dot_tile<T, kRows, 1>(query, query_row, key + n * key_slot, key_slot, dim, scores + n, kBlock);
  }
}

// sums[m][:] += sum over slots n of weights[m][n] * value n, for kLoads loads of columns.
template <typename T, int kRows, int kLoads>
inline void weigh_tile(
    const Wide<T>* weights, const T* value, int64_t value_slot, int64_t slots, int64_t rest, Wide<T>* sums,
    int64_t sums_row, const T* ahead, int64_t ahead_slot) {
  using W = Widen<T>;
  constexpr int kVectors = kLoads * W::kVectors, kLanes = Vec<T>::size();
  Vec<T> total[kRows][kVectors];
  FASTATTN_UNROLL
  for (int m = 0; m < kRows; ++m) {
    FASTATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      total[m][v] = Vec<T>(0); // block by block: one long sum would err more
    }
  }
  const auto add = [&](int64_t n, auto load_values) {
    Vec<T> columns[kLoads][W::kVectors];
    FASTATTN_UNROLL
    for (int c = 0; c < kLoads; ++c) {
      load_values(value + n * value_slot + c * W::kNumbers, columns[c]);
    }
    FASTATTN_UNROLL
    for (int m = 0; m < kRows; ++m) {
      const Vec<T> weight(weights[m * kBlock + n]);
      FASTATTN_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        total[m][v] = at::vec::fmadd(weight, columns[v / W::kVectors][v % W::kVectors], total[m][v]);
      }
    }
  };
  if (rest == 0) {
    for (int64_t n = 0; n < slots; ++n) {
      if (ahead) {
        prefetch(ahead + n * ahead_slot, kLoads * W::kNumbers);
      }
      add(n, [](const T* data, auto& out) { W::load_values(data, out); });
    }
  } else {
    for (int64_t n = 0; n < slots; ++n) {
      add(n, [rest](const T* data, auto& out) { W::load_values(data, rest, out); });
    }
  }
  FASTATTN_UNROLL
  for (int m = 0; m < kRows; ++m) {
    FASTATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      Wide<T>* place = sums + m * sums_row + v * kLanes;
      (Vec<T>::loadu(place) + total[m][v]).store(place);
    }
  }
}

#if defined(FASTATTN_AVX2)
constexpr int kDotRows = 2; // with 4 keys their sums fill half of the 16 registers
#else
constexpr int kDotRows = 6; // three quarters of 32
#endif

// Calls f(row count, m) with up to kMost rows at a time.
template <int kMost, typename F>
inline void in_tiles(int64_t rows, const F& f) {
  int64_t m = 0;
  if constexpr (kMost >= 6) {
    for (; rows - m >= 10 || rows - m == 6; m += 6) {
      f(std::integral_constant<int, 6>{}, m);
    }
  }
  if constexpr (kMost >= 4) {
    for (; rows - m >= 4; m += 4) {
      f(std::integral_constant<int, 4>{}, m);
    }
  }
  for (; rows - m >= 2; m += 2) {
    f(std::integral_constant<int, 2>{}, m);
  }
  if (rows - m == 1) {
    f(std::integral_constant<int, 1>{}, m);
  }
}

// Sums of up to a register file's worth of columns, for all rows: the values stay in the nearest cache between rows.
template <typename T, int kLoads>
inline void weigh_columns(
    const Wide<T>* weights, int64_t rows, const T* value, int64_t value_slot, int64_t slots, int64_t rest,
    Wide<T>* sums, int64_t sums_row, const T* ahead, int64_t ahead_slot) {
  in_tiles<4>(rows, [&](auto tile, int64_t m) {
    weigh_tile<T, tile, kLoads>(
        weights + m * kBlock, value, value_slot, slots, rest, sums + m * sums_row, sums_row,
        m == 0 ? ahead : nullptr, ahead_slot);
  });
}

template <typename T>
inline void weigh(
    const Wide<T>* weights, int64_t rows, const T* value, int64_t value_slot, int64_t slots, int64_t value_dim,
    Wide<T>* sums, int64_t sums_row, const T* ahead, int64_t ahead_slot) {
  constexpr int64_t kNumbers = Widen<T>::kNumbers;
  constexpr int kLoads = (Vec<T>::size() * sizeof(Wide<T>) == 32 ? 2 : 4) / Widen<T>::kVectors;
  for (int64_t c = 0; c < value_dim;) {
    const T* next = ahead ? ahead + c : nullptr;
    if (c + kLoads * kNumbers <= value_dim) {
      weigh_columns<T, kLoads>(
          weights, rows, value + c, value_slot, slots, 0, sums + c, sums_row, next, ahead_slot);
      c += kLoads * kNumbers;
    } else {
      const int64_t rest = c + kNumbers <= value_dim ? 0 : value_dim - c;
      weigh_columns<T, 1>(weights, rows, value + c, value_slot, slots, rest, sums + c, sums_row, next, ahead_slot);
      c += kNumbers;
    }
  }
}

// Scores of a block to weights relative to the largest score so far; the sums of what came before are scaled to it.
// Slots from `seen` on are not seen by this query.
template <typename A>
inline void softmax_row(
    A* scores, int64_t seen, A scale, A& largest, A& total, A* sums, int64_t columns) {
  using V = Vectorized<A>;
  constexpr A kNone = -std::numeric_limits<A>::infinity();
  for (int64_t n = 0; n < kBlock; n += V::size()) {
    (V::loadu(scores + n) * V(scale)).store(scores + n);
  }
  std::fill(scores + std::max<int64_t>(seen, 0), scores + kBlock, kNone);
  V top(kNone);
  for (int64_t n = 0; n < kBlock; n += V::size()) {
    top = at::vec::maximum(top, V::loadu(scores + n));
  }
  A parts[V::size()];
  top.store(parts);
  A highest = largest;
  for (const A part : parts) {
    highest = part > highest || std::isnan(part) ? part : highest;
  }
  const A origin = highest == kNone ? A(0) : highest;
  V sum(A(0));
  for (int64_t n = 0; n < kBlock; n += V::size()) {
    const V weight = (V::loadu(scores + n) - V(origin)).exp();
    weight.store(scores + n);
    sum = sum + weight;
  }
  if (highest != largest) { // also where it is NaN
    const A shrink = std::exp(largest - origin);
    total *= shrink;
    for (int64_t c = 0; c < columns; c += V::size()) {
      (V::loadu(sums + c) * V(shrink)).store(sums + c);
    }
  }
  total += sum_lanes(sum);
  largest = highest;
}

} // namespace fastattn
