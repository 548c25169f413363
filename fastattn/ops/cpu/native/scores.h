// Scores of cached keys, and the merging of partial attention results.
#pragma once

#include "codes.h"

namespace fastattn {

constexpr int64_t kScoreBlock = 256; // slots of one head that a thread scores at a time

// Key buffer [batch, heads, slots, dim] with columns next to each other, and the lengths of its rows and heads.
template <typename T>
struct Keys {
  const T* data;
  int64_t batch_stride, head_stride, slot_stride;
  int64_t batch, heads, capacity, dim;
  std::vector<int64_t> lengths; // 0 for a row that is not to be scored
  Coded coded{}; // read in place of `data` where it has a format, T float

  // Where the numbers of slots [first, last) of a head lie, a block at most, and how far from each other: in a thread's
  // scratch memory, until it asks again, where they are coded.
  std::pair<const T*, int64_t> slots(int64_t head, int64_t first, int64_t last) const {
    if constexpr (std::is_same_v<T, float>) {
      if (coded.format != Format::kNone) {
        const int64_t row = round_up(dim, 32);
        auto& scratch = Scratch::of_this_thread();
        scratch.reserve(kScoreBlock * row * sizeof(float) + 64);
        float* out = scratch.take<float>(kScoreBlock * row);
        coded.read(head / heads, head % heads, first, last - first, dim, out, row);
        return {out, row};
      }
    }
    return {data + head / heads * batch_stride + head % heads * head_stride + first * slot_stride, slot_stride};
  }
  int64_t blocks() const {
    return (capacity + kScoreBlock - 1) / kScoreBlock;
  }
};

// Calls f(head, block, first slot, last slot) for the valid slots of all rows and heads; no slots where none is valid.
template <typename T, typename F>
inline void over_blocks(const Keys<T>& keys, const F& f) {
  const int64_t blocks = keys.blocks(), grain = std::max<int64_t>(1, (1 << 15) / (kScoreBlock * (keys.dim + 1)) + 1);
  at::parallel_for(0, keys.batch * keys.heads * blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / blocks, first = i % blocks * kScoreBlock;
      f(head, i % blocks, first, std::max(first, std::min(first + kScoreBlock, keys.lengths[head])));
    }
  });
}

// out[n] = the sum over columns of combine(column vectors of slot n), four slots at a time.
template <typename T, typename Combine>
inline void reduce_slots(const T* key, int64_t stride, int64_t slots, int64_t dim, Wide<T>* out, const Combine& combine) {
  constexpr int64_t kLanes = Vec<T>::size();
  int64_t n = 0;
  const auto reduce = [&](auto count) {
    Vec<T> sums[4] = {Vec<T>(0), Vec<T>(0), Vec<T>(0), Vec<T>(0)};
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
      FASTATTN_UNROLL
      for (int i = 0; i < count; ++i) {
        sums[i] = combine(load_wide(key + (n + i) * stride + d), d, sums[i]);
      }
    }
    if (d < dim) {
      for (int i = 0; i < count; ++i) {
        sums[i] = combine(load_wide(key + (n + i) * stride + d, dim - d), d, sums[i]);
      }
    }
    Wide<T> lanes[4];
    sum_lanes_of_four(sums, lanes);
    std::copy_n(lanes, static_cast<int>(count), out + n);
    n += count;
  };
  while (n + 4 <= slots) {
    reduce(std::integral_constant<int, 4>{});
  }
  while (n < slots) {
    reduce(std::integral_constant<int, 1>{});
  }
}

template <typename T>
inline void square_norms(const T* key, int64_t stride, int64_t slots, int64_t dim, Wide<T>* out) {
  reduce_slots(key, stride, slots, dim, out, [](const Vec<T>& x, int64_t, const Vec<T>& sum) {
    return at::vec::fmadd(x, x, sum);
  });
}

// out [batch, heads, slots], contiguous; -inf at slots that are not valid.
template <typename T>
inline void knorm(const Keys<T>& keys, Wide<T>* out) {
  over_blocks(keys, [&](int64_t head, int64_t, int64_t first, int64_t last) {
    Wide<T>* scores = out + head * keys.capacity;
    const auto [key, stride] = keys.slots(head, first, last);
    square_norms(key, stride, last - first, keys.dim, scores + first);
    for (int64_t n = first; n < last; ++n) {
      scores[n] = -std::sqrt(scores[n]);
    }
    std::fill(scores + last, scores + std::min(first + kScoreBlock, keys.capacity), -std::numeric_limits<Wide<T>>::infinity());
  });
}

template <typename T>
inline void key_diff(const Keys<T>& keys, Wide<T>* out) {
  using A = Wide<T>;
  const int64_t blocks = keys.blocks(), dim = keys.dim, padded = round_up(std::max<int64_t>(dim, 1), Vec<T>::size());
  const int64_t heads = keys.batch * keys.heads;
  std::vector<A> parts(heads * blocks * padded, A(0));
  // The norms wait in `out` for the second pass.
  over_blocks(keys, [&](int64_t head, int64_t block, int64_t first, int64_t last) {
    A *norms = out + head * keys.capacity + first, inverse[kScoreBlock];
    const auto [key, stride] = keys.slots(head, first, last);
    square_norms(key, stride, last - first, dim, norms);
    for (int64_t n = 0; n < last - first; ++n) {
      norms[n] = norms[n] == A(0) ? A(1) : std::sqrt(norms[n]);
      inverse[n] = A(1) / norms[n];
    }
    A* sum = parts.data() + (head * blocks + block) * padded;
    for (int64_t d = 0; d < dim; d += Vec<T>::size()) {
      const int64_t rest = std::min<int64_t>(Vec<T>::size(), dim - d);
      Vec<T> total(0);
      for (int64_t n = 0; n < last - first; ++n) {
        const T* data = key + n * stride + d;
        const Vec<T> x = rest == Vec<T>::size() ? load_wide(data) : load_wide(data, rest);
        // The quotient as division rounds it: keys that cancel must cancel exactly.
        const Vec<T> factor(inverse[n]), quotient = x * factor;
        total = total + at::vec::fmadd(at::vec::fnmadd(quotient, Vec<T>(norms[n]), x), factor, quotient);
      }
      total.store(sum + d);
    }
  });
  std::vector<A> anchors(heads * padded, A(0));
  for (int64_t head = 0; head < heads; ++head) {
    std::vector<double> total(padded, 0.0);
    for (int64_t block = 0; block < blocks; ++block) {
      for (int64_t d = 0; d < dim; ++d) {
        total[d] += parts[(head * blocks + block) * padded + d];
      }
    }
    double square = 0;
    for (const double x : total) {
      square += x * x;
    }
    const double norm = square == 0 ? 1.0 : std::sqrt(square);
    std::transform(total.begin(), total.end(), anchors.begin() + head * padded, [&](double x) { return A(x / norm); });
  }
  over_blocks(keys, [&](int64_t head, int64_t, int64_t first, int64_t last) {
    A* scores = out + head * keys.capacity;
    const A* anchor = anchors.data() + head * padded;
    A products[kScoreBlock];
    const auto [key, stride] = keys.slots(head, first, last);
    reduce_slots(
        key, stride, last - first, dim, products, [&](const Vec<T>& x, int64_t d, const Vec<T>& sum) {
          return at::vec::fmadd(x, Vec<T>::loadu(anchor + d), sum);
        });
    for (int64_t n = first; n < last; ++n) {
      scores[n] = -products[n - first] / scores[n];
    }
    std::fill(scores + last, scores + std::min(first + kScoreBlock, keys.capacity), -std::numeric_limits<A>::infinity());
  });
}

// One part of an attention result: rows of `out` with columns next to each other, any strides between rows.
template <typename T>
struct Part {
  const T* out;
  const Wide<T>* lse;
  int64_t out_strides[3], lse_strides[3];
};

template <typename T>
inline void merge(
    const std::vector<Part<T>>& parts, at::IntArrayRef sizes, T* out, Wide<T>* lse) {
  using A = Wide<T>;
  const int64_t rows = sizes[0] * sizes[1] * sizes[2], dim = sizes[3];
  const int64_t grain = std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(1, dim * parts.size()));
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<A> weights(parts.size());
    std::vector<const T*> sources(parts.size());
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at[3] = {row / sizes[2] / sizes[1], row / sizes[2] % sizes[1], row % sizes[2]};
      A highest = -std::numeric_limits<A>::infinity();
      for (size_t p = 0; p < parts.size(); ++p) {
        const auto& part = parts[p];
        const auto offset = [&](const int64_t(&strides)[3]) {
          return at[0] * strides[0] + at[1] * strides[1] + at[2] * strides[2];
        };
        sources[p] = part.out + offset(part.out_strides);
        weights[p] = part.lse[offset(part.lse_strides)];
        highest = weights[p] > highest || std::isnan(weights[p]) ? weights[p] : highest;
      }
      const A origin = std::isinf(highest) && highest < 0 ? A(0) : highest;
      A total = 0;
      for (A& weight : weights) {
        total += weight = std::exp(weight - origin);
      }
      lse[row] = std::isinf(highest) ? highest : origin + std::log(total);
      // What a part holds that saw no key is neutral, NaN included.
      const A share = total == A(0) ? A(0) : A(1) / total;
      constexpr int64_t kLanes = Vec<T>::size();
      for (int64_t d = 0; d < dim; d += kLanes) {
        const int64_t rest = std::min(kLanes, dim - d);
        Vec<T> sum(0);
        for (size_t p = 0; p < parts.size(); ++p) {
          if (weights[p] != A(0)) {
            const Vec<T> x = rest == kLanes ? load_wide(sources[p] + d) : load_wide(sources[p] + d, rest);
            sum = at::vec::fmadd(x, Vec<T>(weights[p] * share), sum);
          }
        }
        A numbers[kLanes];
        sum.store(numbers);
        for (int64_t i = 0; i < rest; ++i) {
          out[row * dim + d + i] = static_cast<T>(numbers[i]);
        }
      }
    }
  });
}

} // namespace fastattn
