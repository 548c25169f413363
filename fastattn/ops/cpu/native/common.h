// What the kernels share: wide loads of every dtype, horizontal sums, dot products, scratch memory.
//
// Everything is written over ATen's vector types, so that one source serves AVX-512, AVX2 and NEON. Intrinsics appear
// where a processor has an instruction that those types do not name, and in shuffles.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <type_traits>
#include <vector>

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512F__) && defined(__AVX512BW__)
#define FASTATTN_AVX512 1
#endif
#if defined(FASTATTN_AVX512) && defined(__AVX512BF16__)
#define FASTATTN_DPBF16 1
#endif
#if defined(CPU_CAPABILITY_AVX2) && defined(__AVX2__)
#define FASTATTN_AVX2 1
#endif

#if defined(__clang__)
#define FASTATTN_UNROLL _Pragma("unroll")
#else
#define FASTATTN_UNROLL _Pragma("GCC unroll 16")
#endif

namespace fastattn {

using at::vec::Vectorized;
using c10::BFloat16;
using c10::Half;

// Sums are kept in float, in double for double.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
template <typename T>
using Vec = Vectorized<Wide<T>>;

// The valid slots of a row and head, which lie within the buffer's.
inline int64_t length_within(int64_t length, int64_t slots) {
  TORCH_CHECK_VALUE(
      length >= 0 && length <= slots, "lengths must lie within the buffer's ", slots, " slots, got ", length);
  return length;
}

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Codes of a quantised cache (codes.h): `widen` turns one vector's worth into numbers.
template <typename T>
constexpr bool kIsCode = requires(const T* data) { T::widen(data); };

// One vector's worth of numbers, widened.
template <typename T>
inline Vec<T> load_wide(const T* data) {
  if constexpr (std::is_same_v<T, Wide<T>>) {
    return Vec<T>::loadu(data);
  } else if constexpr (kIsCode<T>) {
    return T::widen(data);
  } else {
    Vectorized<float> out;
    at::vec::load_to_float<T>(data, out);
    return out;
  }
}

// The first `count` numbers; zero in the lanes beyond, whatever lies behind them in memory.
template <typename T>
inline Vec<T> load_wide(const T* data, int64_t count) {
  if constexpr (std::is_same_v<T, Wide<T>>) {
    return Vec<T>::loadu(data, count);
  } else {
    T part[Vec<T>::size()] = {};
    std::copy_n(data, count, part);
    return load_wide(part);
  }
}

template <typename A>
inline A sum_lanes(const Vectorized<A>& v) {
  constexpr int lanes = Vectorized<A>::size();
  A parts[lanes];
  v.store(parts);
  FASTATTN_UNROLL
  for (int half = lanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      parts[i] += parts[i + half];
    }
  }
  return parts[0];
}

// out[n] = the sum of v[n]'s lanes.
template <typename A>
inline void sum_lanes_of_four(const Vectorized<A> (&v)[4], A* out) {
#if defined(FASTATTN_AVX512)
  if constexpr (std::is_same_v<A, float>) {
    const __m512 a = v[0], b = v[1], c = v[2], d = v[3];
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(
        _mm512_castps512_ps256(abcd), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(abcd), 1)));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
    return;
  }
#elif defined(FASTATTN_AVX2)
  if constexpr (std::is_same_v<A, float>) {
    const __m256 abcd = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
    return;
  }
#endif
  for (int n = 0; n < 4; ++n) {
    out[n] = sum_lanes(v[n]);
  }
}

// How a dot product with keys of T goes: the dtype `Query` that a query is packed in, numbers per step, loads, and one
// step's multiply-add into a vector of partial sums.
template <typename T>
struct Dot {
  using Query = Wide<T>;
  using Chunk = Vec<T>;
  static constexpr int64_t kStep = Vec<T>::size();
  static Chunk load_key(const T* data) {
    return load_wide(data);
  }
  static Chunk load_key(const T* data, int64_t count) {
    return load_wide(data, count);
  }
  static Chunk load_query(const Query* data) {
    return Chunk::loadu(data);
  }
  static Vec<T> step(const Chunk& query, const Chunk& key, const Vec<T>& sum) {
    return at::vec::fmadd(query, key, sum);
  }
};

#if defined(FASTATTN_DPBF16)
template <>
struct Dot<BFloat16> {
  using Query = BFloat16;
  using Chunk = __m512i;
  static constexpr int64_t kStep = 32;
  static Chunk load_key(const BFloat16* data) {
    return _mm512_loadu_si512(data);
  }
  static Chunk load_key(const BFloat16* data, int64_t count) {
    return _mm512_maskz_loadu_epi16((1u << count) - 1u, data);
  }
  static Chunk load_query(const BFloat16* data) {
    return _mm512_loadu_si512(data);
  }
  static Vectorized<float> step(const Chunk& query, const Chunk& key, const Vectorized<float>& sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)query, (__m512bh)key);
  }
};
#endif

// How values of T are widened into `kVectors` vectors of one load, and which of a load's numbers a lane holds.
template <typename T>
struct Widen {
  static constexpr int kVectors = 1;
  static constexpr int64_t kNumbers = Vec<T>::size();
  static void load_values(const T* data, Vec<T> (&out)[1]) {
    out[0] = load_wide(data);
  }
  static void load_values(const T* data, int64_t count, Vec<T> (&out)[1]) {
    out[0] = load_wide(data, count);
  }
  static int64_t lane(int64_t number) {
    return number;
  }
};

#if defined(FASTATTN_AVX512)
// The even numbers in one vector and the odd ones in another: a shift and a mask, where the right order costs shuffles.
template <>
struct Widen<BFloat16> {
  static constexpr int kVectors = 2;
  static constexpr int64_t kNumbers = 32;
  static void split(__m512i bits, Vectorized<float> (&out)[2]) {
    out[0] = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    out[1] = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static void load_values(const BFloat16* data, Vectorized<float> (&out)[2]) {
    split(_mm512_loadu_si512(data), out);
  }
  static void load_values(const BFloat16* data, int64_t count, Vectorized<float> (&out)[2]) {
    split(_mm512_maskz_loadu_epi16((1u << count) - 1u, data), out);
  }
  static int64_t lane(int64_t number) {
    return number % 2 * 16 + number / 2;
  }
};
#endif

// Asks for `count` numbers that are read soon.
template <typename T>
inline void prefetch(const T* data, int64_t count) {
  for (int64_t d = 0; d < count; d += 64 / static_cast<int64_t>(sizeof(T))) {
    __builtin_prefetch(data + d, 0, 3);
  }
}

// Memory that a thread keeps from call to call: large temporaries would be mapped and faulted in anew on every step.
class Scratch {
 public:
  template <typename A>
  A* take(int64_t count) {
    const size_t begin = used_;
    used_ += round_up(std::max<int64_t>(count, 1) * sizeof(A), 64);
    if (used_ > size_) {
      return nullptr;
    }
    return reinterpret_cast<A*>(data_.get() + begin);
  }
  // To be called once before any take(), with the sum of what will be taken.
  void reserve(size_t bytes) {
    used_ = 0;
    if (bytes > size_) {
      data_.reset();
      size_ = 0;
      data_.reset(static_cast<char*>(::operator new(bytes, std::align_val_t(64))));
      size_ = bytes;
    }
  }
  static Scratch& of_this_thread() {
    static thread_local Scratch scratch;
    return scratch;
  }

 private:
  struct Free {
    void operator()(char* data) const {
      ::operator delete(data, std::align_val_t(64));
    }
  };
  std::unique_ptr<char, Free> data_;
  size_t size_ = 0, used_ = 0;
};

} // namespace fastattn
