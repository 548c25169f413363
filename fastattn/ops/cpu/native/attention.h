// Attention of a few queries over a cache buffer: decode_attention and latent_decode.
//
// The queries of a group share their key head, so each key is read once for all of them. The valid slots of all rows and
// heads, laid end to end, are cut into as many equal pieces as there are threads; a row that a cut falls into is merged
// from its parts afterwards. Within a piece slots stream through in blocks: scores of a block for all queries, online
// softmax, weighted sum of the block's values.
#pragma once

#include "block_products.h"
#include "codes.h"
#include "tiles.h"

namespace fastattn {

constexpr int64_t kMaxRows = 128; // queries handled together
constexpr int64_t kGrain = 1 << 15; // numbers of the cache that are worth waking a thread for

// One tensor whose columns are part of the query, any strides.
template <typename T>
struct QueryPart {
  const T* data;
  int64_t batch, head, token, column; // strides
  int64_t width;
};

// What queries and results of a cache of T are in.
template <typename T>
using Outer = std::conditional_t<kIsCode<T>, float, T>;

template <typename T>
struct Problem {
  QueryPart<Outer<T>> parts[2];
  int64_t heads, kv_heads, queries;
  const T* key;
  int64_t key_batch, key_head, key_slot, dim;
  const T* value;
  int64_t value_batch, value_head, value_slot, value_dim;
  std::vector<int64_t> lengths; // [batch * kv_heads], within the capacity
  double scale;
  bool causal;
  Outer<T>* out; // [batch, heads, queries, value_dim]
  Wide<T>* lse; // [batch, heads, queries]
  Scales key_scale{}, value_scale{}; // where T is a code
  Coded coded_key{}, coded_value{}; // read in place of `key` and `value` where they have a format, T float or BFloat16
  int64_t out_dim = value_dim; // columns of `out`: the first of the value's
};

// The state of up to kMaxRows queries that attend to the slots of one row and head.
template <typename T>
class Attending {
 public:
  using A = Wide<T>;
  using Query = typename Dot<T>::Query;

  Attending(const Problem<T>& problem, A* partial_sums, A* partial_stats)
      : problem_(problem),
        query_row_(round_up(problem.dim, Dot<T>::kStep)),
        sums_row_(padded(problem.value_dim)),
        partial_sums_(partial_sums),
        partial_stats_(partial_stats) {
    auto& scratch = Scratch::of_this_thread();
    size_t bytes = kMaxRows * (query_row_ * sizeof(Query) + (kBlock + sums_row_ + 2) * sizeof(A)) + 5 * 64;
    if (coded()) {
      bytes += kProductBlock * (numbers_row(problem.dim) + numbers_row(problem.value_dim)) * sizeof(T) + 2 * 64;
    }
#if defined(FASTATTN_DPBF16)
    if constexpr (kProducts) {
      bytes += BlockProducts::bytes(kMaxRows, problem.dim, problem.value_dim);
    }
#endif
    scratch.reserve(bytes);
    query_ = scratch.take<Query>(kMaxRows * query_row_);
    scores_ = scratch.take<A>(kMaxRows * kBlock);
    sums_ = scratch.take<A>(kMaxRows * sums_row_);
    largest_ = scratch.take<A>(kMaxRows);
    total_ = scratch.take<A>(kMaxRows);
    if (coded()) {
      keys_ = scratch.take<T>(kProductBlock * numbers_row(problem.dim));
      values_ = scratch.take<T>(kProductBlock * numbers_row(problem.value_dim));
      if (std::is_same_v<T, float> && problem.value_dim <= problem.dim) { // as near as the keys, which are done with
        values_ = keys_;
      }
    }
#if defined(FASTATTN_DPBF16)
    if constexpr (kProducts) {
      products_.emplace(scratch, kMaxRows, problem.dim, problem.value_dim);
    }
#endif
  }

  static int64_t padded(int64_t value_dim) {
    return round_up(value_dim, Widen<T>::kNumbers);
  }

  // Queries [begin, end) of the group of (batch, kv head) `at`, before any slot.
  void start(int64_t at, int64_t begin, int64_t end) {
    const auto& p = problem_;
    at_ = at, begin_ = begin, rows_ = end - begin;
    const int64_t batch = at / p.kv_heads, first_head = at % p.kv_heads * (p.heads / p.kv_heads);
    for (int64_t m = 0; m < rows_; ++m) {
      const int64_t head = first_head + (begin + m) / p.queries, token = (begin + m) % p.queries;
      Query* row = query_ + m * query_row_;
      for (const auto& part : p.parts) {
        const auto* source = part.data + batch * part.batch + head * part.head + token * part.token;
        for (int64_t d = 0; d < part.width; ++d) {
          *row++ = static_cast<Query>(source[d * part.column]);
        }
      }
      std::fill(row, query_ + (m + 1) * query_row_, Query(0));
      if constexpr (std::is_same_v<T, float>) {
        if (transformed()) {
          hadamard(query_ + m * query_row_, p.dim);
        }
      }
    }
    const int64_t padded_rows = round_up(rows_, 16);
    std::fill_n(sums_, padded_rows * sums_row_, A(0));
    std::fill_n(largest_, padded_rows, -std::numeric_limits<A>::infinity());
    std::fill_n(total_, padded_rows, A(0));
#if defined(FASTATTN_DPBF16)
    if constexpr (kProducts) {
      by_products_ = products_pay(rows_, p.dim, p.value_dim) && sums_row_ == p.value_dim;
      if (by_products_) {
        products_->start(query_, query_row_, rows_);
      }
    }
#endif
  }

  void attend(int64_t first, int64_t last) {
    const auto& p = problem_;
    const int64_t length = p.lengths[at_];
#if defined(FASTATTN_DPBF16)
    if constexpr (kProducts) {
      for (int64_t n = first; by_products_ && n < last; n += kProductBlock) {
        const int64_t slots = std::min(kProductBlock, last - n);
        const auto key = keys(n, slots), value = values(n, slots, key);
        products_->attend(
            key.data, key.slot, value.data, value.slot, slots, static_cast<float>(p.scale),
            [&](int64_t m) { return length - unseen(m) - n; }, key.factors, value.factors, largest_, total_, sums_,
            key.in_place && n + 2 * kProductBlock <= last ? key.data + kProductBlock * p.key_slot : nullptr, p.key_slot);
      }
      if (by_products_) {
        return;
      }
    }
#endif
    for (int64_t n = first; n < last; n += kBlock) {
      const int64_t slots = std::min(kBlock, last - n);
      const auto key = keys(n, slots);
      const T* values_ahead = key.in_place && p.value != p.key ? value_at(n) : nullptr;
      in_tiles<kDotRows>(rows_, [&](auto rows, int64_t m) {
        dot_rows<T, rows>(
            query_ + m * query_row_, query_row_, key.data, key.slot, slots, p.dim, scores_ + m * kBlock,
            m == 0 ? values_ahead : nullptr, p.value_slot, p.value_dim);
      });
      const auto value = values(n, slots, key);
      for (int64_t m = 0; m < rows_; ++m) {
        A* scores = scores_ + m * kBlock;
        if (key.factors) {
          multiply_by(scores, key.factors, kBlock);
        }
        softmax_row<A>(
            scores, std::min(slots, length - unseen(m) - n), static_cast<A>(p.scale), largest_[m], total_[m],
            sums_ + m * sums_row_, sums_row_);
        if (value.factors) {
          multiply_by(scores, value.factors, kBlock);
        }
      }
      weigh<T>(
          scores_, rows_, value.data, value.slot, slots, p.value_dim, sums_, sums_row_,
          key.in_place && n + 2 * kBlock <= last ? key.data + kBlock * p.key_slot : nullptr, p.key_slot);
    }
  }

  // The state so far, into place `index` of the workspace.
  void put_aside(int64_t index) {
    std::copy_n(sums_, rows_ * sums_row_, partial_sums_ + index * kMaxRows * sums_row_);
    std::copy_n(largest_, rows_, partial_stats_ + index * 2 * kMaxRows);
    std::copy_n(total_, rows_, partial_stats_ + (index * 2 + 1) * kMaxRows);
  }

  // Adds a state put aside, of the same queries over other slots.
  void add(int64_t index) {
    const A* largest = partial_stats_ + index * 2 * kMaxRows;
    const A* total = largest + kMaxRows;
    for (int64_t m = 0; m < rows_; ++m) {
      const A* other = partial_sums_ + (index * kMaxRows + m) * sums_row_;
      A* sums = sums_ + m * sums_row_;
      const A highest = largest[m] > largest_[m] || std::isnan(largest[m]) ? largest[m] : largest_[m];
      const A origin = std::isinf(highest) && highest < 0 ? A(0) : highest;
      const A mine = std::exp(largest_[m] - origin), theirs = std::exp(largest[m] - origin);
      total_[m] = total_[m] * mine + total[m] * theirs;
      largest_[m] = highest;
      using V = Vectorized<A>;
      for (int64_t c = 0; c < sums_row_; c += V::size()) {
        (V::loadu(sums + c) * V(mine) + V::loadu(other + c) * V(theirs)).store(sums + c);
      }
    }
  }

  void finish() {
    const auto& p = problem_;
    const int64_t first = at_ * (p.heads / p.kv_heads) * p.queries + begin_;
    for (int64_t m = 0; m < rows_; ++m) {
      const A share = total_[m] == A(0) ? A(0) : A(1) / total_[m];
      Outer<T>* out = p.out + (first + m) * p.out_dim;
      A* sums = sums_ + m * sums_row_;
      if constexpr (std::is_same_v<T, float>) {
        if (transformed()) {
          hadamard(sums, p.value_dim);
        }
      }
      constexpr int64_t kNumbers = Widen<T>::kNumbers;
      for (int64_t c = 0; c < p.out_dim; ++c) {
        const int64_t at = by_products_ ? c : c / kNumbers * kNumbers + Widen<T>::lane(c % kNumbers);
        out[c] = static_cast<Outer<T>>(sums[at] * share);
      }
      p.lse[first + m] = total_[m] == A(0) ? -std::numeric_limits<A>::infinity() : largest_[m] + std::log(total_[m]);
    }
  }

 private:
  static constexpr bool kProducts = std::is_same_v<T, BFloat16>;

  // The keys or values of a block of slots: where they lie, what their scores or weights are to be multiplied by (null
  // for 1), and whether they lie in the cache, in codes or numbers, so that what follows can be asked for.
  struct Block {
    const T* data;
    int64_t slot;
    const A* factors;
    bool in_place;
  };

  Block keys(int64_t n, int64_t slots) {
    const auto& p = problem_;
    const int64_t batch = at_ / p.kv_heads, head = at_ % p.kv_heads;
    if (coded()) {
      return read(p.coded_key, n, slots, p.dim, keys_, key_factors_);
    }
    if constexpr (kIsCode<T>) {
      p.key_scale.copy(batch, head, n, slots, T::kUnit, key_factors_, kBlock);
    }
    return {p.key + batch * p.key_batch + head * p.key_head + n * p.key_slot, p.key_slot,
            kIsCode<T> ? key_factors_ : nullptr, true};
  }

  // Once the scores of `key` are taken, a value may lie where it lay.
  Block values(int64_t n, int64_t slots, const Block& key) {
    const auto& p = problem_;
    const int64_t batch = at_ / p.kv_heads, head = at_ % p.kv_heads;
    if (coded()) {
      const bool same = p.coded_key.same(p.coded_value) && p.value_dim <= p.dim;
      return same ? key : read(p.coded_value, n, slots, p.value_dim, values_, value_factors_);
    }
    if constexpr (kIsCode<T>) {
      p.value_scale.copy(batch, head, n, slots, T::kUnit, value_factors_, kBlock);
    }
    return {value_at(n), p.value_slot, kIsCode<T> ? value_factors_ : nullptr, true};
  }

  const T* value_at(int64_t n) const {
    const auto& p = problem_;
    return p.value + at_ / p.kv_heads * p.value_batch + at_ % p.kv_heads * p.value_head + n * p.value_slot;
  }

  Block read(const Coded& codes, int64_t n, int64_t slots, int64_t dim, T* out, A* factors) {
    const int64_t batch = at_ / problem_.kv_heads, head = at_ % problem_.kv_heads, row = numbers_row(dim);
    if constexpr (std::is_same_v<T, float>) {
      codes.read(batch, head, n, slots, dim, out, row);
      return {out, row, nullptr, false};
    } else if constexpr (std::is_same_v<T, BFloat16>) {
      codes.read(batch, head, n, slots, dim, out, row, factors, kProductBlock);
    }
    return {out, row, factors, false};
  }

  bool coded() const {
    return problem_.coded_key.format != Format::kNone;
  }

  bool transformed() const {
    return problem_.coded_key.format == Format::kInt4;
  }

  static int64_t numbers_row(int64_t dim) {
    return round_up(dim, 32);
  }

  // The newest slots, which query row m does not see.
  int64_t unseen(int64_t m) const {
    return problem_.causal ? problem_.queries - 1 - (begin_ + m) % problem_.queries : 0;
  }

  const Problem<T>& problem_;
  const int64_t query_row_, sums_row_;
  A *partial_sums_, *partial_stats_;
  Query* query_;
  A *scores_, *sums_, *largest_, *total_;
  T *keys_ = nullptr, *values_ = nullptr;
  A key_factors_[kProductBlock], value_factors_[kProductBlock]; // of codes
  int64_t at_ = 0, begin_ = 0, rows_ = 0;
  bool by_products_ = false;
#if defined(FASTATTN_DPBF16)
  std::optional<BlockProducts> products_;
#endif
};

// All slots of all units end to end; a unit is at most kMaxRows queries of one row and head.
template <typename T>
void attend(const Problem<T>& p) {
  const int64_t group = p.heads / p.kv_heads * p.queries, chunks = (group + kMaxRows - 1) / kMaxRows;
  const int64_t units = static_cast<int64_t>(p.lengths.size()) * chunks;
  if (units == 0 || group == 0) {
    return;
  }
  std::vector<int64_t> ends(units); // in slots
  int64_t slots = 0;
  for (int64_t u = 0; u < units; ++u) {
    ends[u] = slots += p.lengths[u / chunks];
  }
  const int64_t rows = std::min(group, kMaxRows), work = slots * (p.dim + p.value_dim) * ((rows + 3) / 4);
  const int64_t threads = at::in_parallel_region() ? 1 : std::clamp<int64_t>(work / kGrain, 1, at::get_num_threads());
  const int64_t piece = std::max(round_up((slots + threads - 1) / threads, 16), int64_t(1));
  // Two places each: a row whose beginning lies in an earlier piece, and one whose end lies in a later piece.
  const int64_t sums_row = Attending<T>::padded(p.value_dim), places = threads == 1 ? 0 : 2 * threads;
  std::unique_ptr<Wide<T>[]> partial_sums(new Wide<T>[places * kMaxRows * sums_row]);
  std::unique_ptr<Wide<T>[]> partial_stats(new Wide<T>[places * 2 * kMaxRows]);
  const auto start = [&](Attending<T>& state, int64_t unit) {
    const int64_t begin = unit % chunks * kMaxRows;
    state.start(unit / chunks, begin, std::min(begin + kMaxRows, group));
  };
  const auto run = [&](int64_t index) {
    const int64_t low = index * piece, high = std::min(low + piece, slots);
    Attending<T> state(p, partial_sums.get(), partial_stats.get());
    int64_t unit = std::upper_bound(ends.begin(), ends.end(), low) - ends.begin();
    for (; unit < units; ++unit) {
      const int64_t begin = ends[unit] - p.lengths[unit / chunks], end = ends[unit];
      if (begin >= high) {
        break;
      }
      start(state, unit);
      state.attend(std::max(low, begin) - begin, std::min(high, end) - begin);
      if (begin >= low && end <= high) {
        state.finish();
      } else {
        state.put_aside(2 * index + (begin >= low));
      }
    }
  };
  if (threads == 1) {
    run(0);
  } else {
    at::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
      for (int64_t index = first; index < last; ++index) {
        run(index);
      }
    });
  }
  Attending<T> state(p, partial_sums.get(), partial_stats.get());
  for (int64_t unit = 0; unit < units; ++unit) {
    const int64_t begin = ends[unit] - p.lengths[unit / chunks], end = ends[unit];
    if (begin == end) {
      start(state, unit);
      state.finish();
    } else if (begin / piece != (end - 1) / piece) {
      start(state, unit);
      for (int64_t index = begin / piece; index <= (end - 1) / piece; ++index) {
        state.add(2 * index + (begin >= index * piece));
      }
      state.finish();
    }
  }
}

} // namespace fastattn
