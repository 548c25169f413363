// Appending to a quantised cache, and compacting it: tokens become codes as ops/_formats.py says, in float.
#pragma once

#include "cache.h"
#include "codes.h"

namespace fastattn {

inline float largest_magnitude(const float* numbers, int64_t count) {
  using V = Vectorized<float>;
  float most = 0;
  bool finite = true;
  int64_t i = 0;
  if (count >= V::size()) {
    V top(0.0f), nothing(0.0f);
    for (; i + V::size() <= count; i += V::size()) {
      const V x = V::loadu(numbers + i);
      top = at::vec::maximum(top, x.abs());
      nothing = nothing + (x - x); // NaN from what is not finite
    }
    float lanes[V::size()], rests[V::size()];
    top.store(lanes);
    nothing.store(rests);
    for (int lane = 0; lane < V::size(); ++lane) {
      most = std::max(most, lanes[lane]);
      finite &= rests[lane] == 0;
    }
  }
  for (; i < count; ++i) {
    most = std::max(most, std::abs(numbers[i]));
    finite &= std::isfinite(numbers[i]);
  }
  return finite ? most : std::numeric_limits<float>::quiet_NaN();
}

// The nearest of e4m3fn's numbers, of equally near ones the even, for magnitudes of at most 448; NaN for NaN.
inline uint8_t to_e4m3(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, 4);
  const uint32_t sign = bits & 0x80000000u, magnitude = bits ^ sign;
  // Below 2^-6 the codes lie 2^-9 apart: an addition that leaves no finer bits rounds to them.
  constexpr uint32_t kStep = (127 - 9 + 23) << 23;
  float step, absolute;
  std::memcpy(&step, &kStep, 4);
  std::memcpy(&absolute, &magnitude, 4);
  const float small = absolute + step;
  uint32_t near_zero;
  std::memcpy(&near_zero, &small, 4);
  near_zero -= kStep;
  const uint32_t normal = (magnitude + 0x7ffff + (magnitude >> 20 & 1) - (120u << 23)) >> 20;
  const uint32_t code = magnitude > 0x7f800000u ? 0x7f : magnitude < (121u << 23) ? near_zero : normal;
  return static_cast<uint8_t>(code | sign >> 24);
}

// Quotients by a vector's scale, as the formats round them; NaN counts as 0, a scale that is not positive as 1.
inline float encode(const float* numbers, int64_t dim, float limit, int8_t* codes) {
  const float scale = largest_magnitude(numbers, dim) / limit, divisor = scale > 0 ? scale : 1.0f;
  for (int64_t d = 0; d < dim; ++d) {
    const float quotient = numbers[d] / divisor, rounded = std::nearbyint(quotient);
    codes[d] = static_cast<int8_t>(rounded > limit ? limit : rounded < -limit ? -limit : rounded == rounded ? rounded : 0);
  }
  return scale;
}

inline float encode(const float* numbers, int64_t dim, float limit, uint8_t* codes) {
  const float scale = largest_magnitude(numbers, dim) / limit, divisor = scale > 0 ? scale : 1.0f;
  for (int64_t d = 0; d < dim; ++d) {
    const float quotient = numbers[d] / divisor;
    codes[d] = to_e4m3(quotient > limit ? limit : quotient < -limit ? -limit : quotient);
  }
  return scale;
}

// `numbers` are transformed in place.
inline void encode_groups(float* numbers, int64_t dim, uint8_t* codes, Half* scales) {
  hadamard(numbers, dim);
  const bool bad = std::isnan(largest_magnitude(numbers, dim));
  for (int64_t g = 0; g < dim / kGroup; ++g, numbers += kGroup, codes += kGroup / 2) {
    const float* top = std::max_element(
        numbers, numbers + kGroup, [](float one, float two) { return std::abs(one) < std::abs(two); });
    const float scale = std::clamp(*top / -8, -65504.0f, 65504.0f);
    scales[g] = bad ? std::numeric_limits<float>::quiet_NaN() : scale;
    const float divisor = scales[g] == Half(0.0f) || bad ? 1.0f : static_cast<float>(scales[g]);
    const auto code = [&](int64_t i) {
      const float rounded = std::nearbyint(numbers[i] / divisor);
      return static_cast<int>(rounded > 7 ? 7 : rounded < -8 ? -8 : rounded == rounded ? rounded : 0) + 8;
    };
    for (int64_t i = 0; i < kGroup / 2; ++i) {
      codes[i] = static_cast<uint8_t>(code(i) | code(i + kGroup / 2) << 4);
    }
  }
}

// Appends keys (values) of T, whose columns lie next to each other, to codes and scales [batch, heads, slots, n].
template <typename T>
class Encoder {
 public:
  Encoder(const at::Tensor& cache, const at::Tensor& scale, const at::Tensor& fresh)
      : cache_(cache), scale_(scale), fresh_(fresh), dim_(fresh.size(3)),
        format_(scale.scalar_type() == at::kHalf ? Format::kInt4
                    : cache.scalar_type() == at::kChar ? Format::kInt8 : Format::kE4m3) {}

  // `row` has room for a vector, padded to whole vectors of floats.
  void write(int64_t b, int64_t h, int64_t slot, int64_t token, float* row) const {
    const T* source = reinterpret_cast<const T*>(fresh_.at(b, h, token));
    constexpr int64_t kLanes = Vec<T>::size();
    for (int64_t d = 0; d < dim_; d += kLanes) {
      (d + kLanes <= dim_ ? load_wide(source + d) : load_wide(source + d, dim_ - d)).store(row + d);
    }
    char *codes = cache_.at(b, h, slot), *scale = scale_.at(b, h, slot);
    if (format_ == Format::kInt4) {
      encode_groups(row, dim_, reinterpret_cast<uint8_t*>(codes), reinterpret_cast<Half*>(scale));
    } else {
      const float found = format_ == Format::kInt8 ? encode(row, dim_, 127, reinterpret_cast<int8_t*>(codes))
                                                   : encode(row, dim_, 448, reinterpret_cast<uint8_t*>(codes));
      std::memcpy(scale, &found, sizeof(float));
    }
  }

  int64_t dim() const {
    return dim_;
  }

 private:
  const Rows cache_, scale_, fresh_;
  const int64_t dim_;
  const Format format_;
};

template <typename T>
inline void append_codes(
    const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& positions, const at::Tensor& lengths,
    const at::Tensor& key_scale, const at::Tensor& value_scale, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& position) {
  const auto place = position.accessor<int32_t, 2>();
  auto filled = lengths.accessor<int32_t, 2>();
  auto stored = positions.accessor<int32_t, 3>();
  const std::vector<int32_t> real = real_tokens(position, lengths, key_cache.size(2));
  const Encoder<T> encoders[] = {{key_cache, key_scale, key}, {value_cache, value_scale, value}};
  const int64_t tokens = key.size(2), widest = std::max(key.size(3), value.size(3));
  over_heads(key.size(0), key.size(1), 8 * tokens * (key.size(3) + value.size(3)), [&](int64_t b, int64_t h) {
    std::vector<float> row(round_up(widest, Vec<T>::size()));
    int64_t slot = filled[b][h];
    for (int64_t t = 0; t < tokens; ++t) {
      if (place[b][t] >= 0) {
        for (const auto& encoder : encoders) {
          if (encoder.dim()) {
            encoder.write(b, h, slot, t, row.data());
          }
        }
        stored[b][h][slot++] = place[b][t];
      }
    }
    filled[b][h] += real[b];
  });
}

} // namespace fastattn
