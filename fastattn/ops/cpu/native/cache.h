// In-place updates of a cache: appending tokens and moving the best slots to the front. Slots move as bytes.
#pragma once

#include "common.h"

#include <cstring>

namespace fastattn {

// A buffer [batch, heads, slots, width] whose columns lie next to each other; strides in bytes.
struct Rows {
  explicit Rows(const at::Tensor& tensor)
      : data(static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()))),
        batch(tensor.stride(0) * tensor.itemsize()),
        head(tensor.stride(1) * tensor.itemsize()),
        slot(tensor.stride(2) * tensor.itemsize()),
        width(tensor.size(3) * tensor.itemsize()) {}

  char* at(int64_t b, int64_t h, int64_t n) const {
    return data + b * batch + h * head + n * slot;
  }

  char* data;
  int64_t batch, head, slot, width;
};

// Bytes that are worth waking a thread for.
constexpr int64_t kCopyGrain = 1 << 17;

template <typename F>
inline void over_heads(int64_t batch, int64_t heads, int64_t bytes_each, const F& f) {
  const int64_t grain = std::max<int64_t>(1, kCopyGrain / std::max<int64_t>(1, bytes_each));
  at::parallel_for(0, batch * heads, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      f(i / heads, i % heads);
    }
  });
}

// Tokens of each row that are appended; refused where a head has no room for them.
inline std::vector<int32_t> real_tokens(const at::Tensor& position, const at::Tensor& lengths, int64_t capacity) {
  const auto place = position.accessor<int32_t, 2>();
  const auto filled = lengths.accessor<int32_t, 2>();
  std::vector<int32_t> real(position.size(0), 0);
  for (int64_t b = 0; b < position.size(0); ++b) {
    int32_t longest = 0;
    for (int64_t h = 0; h < lengths.size(1); ++h) {
      longest = std::max<int32_t>(longest, length_within(filled[b][h], capacity));
    }
    for (int64_t t = 0; t < position.size(1); ++t) {
      real[b] += place[b][t] >= 0;
    }
    TORCH_CHECK_VALUE(
        longest + int64_t(real[b]) <= capacity, "key must fit the cache's ", capacity, " slots, but ",
        longest + int64_t(real[b]), " would be filled");
  }
  return real;
}

inline void append(
    const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& positions, const at::Tensor& lengths,
    const at::Tensor& key, const at::Tensor& value, const at::Tensor& position) {
  const int64_t batch = key.size(0), heads = key.size(1), tokens = key.size(2);
  const auto place = position.accessor<int32_t, 2>();
  auto filled = lengths.accessor<int32_t, 2>();
  auto stored = positions.accessor<int32_t, 3>();
  const std::vector<int32_t> real = real_tokens(position, lengths, key_cache.size(2));
  const std::pair<Rows, Rows> buffers[] = {{Rows(key_cache), Rows(key)}, {Rows(value_cache), Rows(value)}};
  over_heads(batch, heads, tokens * (buffers[0].first.width + buffers[1].first.width), [&](int64_t b, int64_t h) {
    const int64_t start = filled[b][h];
    for (const auto& [cache, fresh] : buffers) {
      if (cache.width == 0) {
        continue;
      }
      if (real[b] == tokens && cache.slot == cache.width && fresh.slot == fresh.width) {
        std::memcpy(cache.at(b, h, start), fresh.at(b, h, 0), tokens * cache.width);
        continue;
      }
      int64_t slot = start;
      for (int64_t t = 0; t < tokens; ++t) {
        if (place[b][t] >= 0) {
          std::memcpy(cache.at(b, h, slot++), fresh.at(b, h, t), cache.width);
        }
      }
    }
    int64_t slot = start;
    for (int64_t t = 0; t < tokens; ++t) {
      if (place[b][t] >= 0) {
        stored[b][h][slot++] = place[b][t];
      }
    }
    filled[b][h] += real[b];
  });
}

// Integers in the order of the scores: -0.0 equals 0.0, and NaN lies below -inf.
template <typename A>
inline auto ordered(A score) {
  using Int = std::conditional_t<std::is_same_v<A, double>, int64_t, int32_t>;
  if (std::isnan(score)) {
    return std::numeric_limits<Int>::min();
  }
  score += A(0);
  Int bits;
  std::memcpy(&bits, &score, sizeof(A));
  return bits < 0 ? static_cast<Int>(bits ^ std::numeric_limits<Int>::max()) : bits;
}

constexpr int64_t kAhead = 8; // rows that are fetched before they move

// The best `budget` of `length` scores, in order of slots; of equal ones the later slots.
template <typename A>
inline std::vector<int64_t> best_slots(const A* scores, int64_t stride, int64_t length, int64_t budget) {
  using Int = decltype(ordered(A(0)));
  std::vector<Int> order(length);
  for (int64_t n = 0; n < length; ++n) {
    order[n] = ordered(scores[n * stride]);
  }
  std::vector<Int> sorted = order;
  std::nth_element(sorted.begin(), sorted.begin() + (length - budget), sorted.end());
  const Int threshold = sorted[length - budget];
  int64_t above = 0, tied = 0;
  for (const Int value : order) {
    above += value > threshold;
    tied += value == threshold;
  }
  int64_t skip = tied - (budget - above); // the oldest of the tied slots go
  std::vector<int64_t> kept(length); // written without a branch, one slot further at most
  int64_t count = 0;
  for (int64_t n = 0; n < length; ++n) {
    const bool equal = order[n] == threshold;
    kept[count] = n;
    count += order[n] > threshold || (equal && skip <= 0);
    skip -= equal;
  }
  return kept;
}

template <typename A>
inline void compact(
    std::initializer_list<at::Tensor> moved, const at::Tensor& positions, const at::Tensor& lengths,
    const at::Tensor& scores, int64_t budget, int64_t min_length) {
  const int64_t batch = lengths.size(0), heads = lengths.size(1), capacity = positions.size(2);
  auto filled = lengths.accessor<int32_t, 2>();
  auto stored = positions.accessor<int32_t, 3>();
  const auto rated = scores.accessor<A, 3>();
  const std::vector<Rows> buffers(moved.begin(), moved.end());
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      length_within(filled[b][h], capacity);
    }
  }
  int64_t bytes = 0;
  for (const Rows& buffer : buffers) {
    bytes += 2 * budget * buffer.width;
  }
  over_heads(batch, heads, bytes, [&](int64_t b, int64_t h) {
    const int64_t length = filled[b][h];
    if (length <= budget || length < min_length) {
      return;
    }
    const std::vector<int64_t> kept = best_slots(&rated[b][h][0], rated.stride(2), length, budget);
    for (int64_t to = 0; to < budget; ++to) {
      // Slot `to` does not lie behind the slot that moves there, and what it held has moved or goes.
      const int64_t from = kept[to], later = kept[std::min(to + kAhead, budget - 1)];
      for (const Rows& buffer : buffers) {
        prefetch(buffer.at(b, h, later), buffer.width);
        if (from != to) {
          std::memcpy(buffer.at(b, h, to), buffer.at(b, h, from), buffer.width);
        }
      }
      stored[b][h][to] = stored[b][h][from];
    }
    for (int64_t n = budget; n < capacity; ++n) {
      stored[b][h][n] = -1;
    }
    filled[b][h] = budget;
  });
}

} // namespace fastattn
