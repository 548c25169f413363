// The private operators that fastattn's CPU functions call: namespace fastattn_native.
#include "attention.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace fastattn {
namespace {

using at::Tensor;

constexpr auto kLengths = at::kInt;

Tensor empty_lse(const Tensor& query) {
  const auto dtype = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(dtype));
}

template <typename T>
QueryPart<T> query_part(const Tensor& query) {
  return {
      query.const_data_ptr<T>(), query.stride(0), query.stride(1), query.stride(2), query.stride(3), query.size(3)};
}

std::vector<int64_t> clamped(const Tensor& lengths, int64_t capacity) {
  const auto rows = lengths.accessor<int32_t, 2>();
  std::vector<int64_t> out;
  out.reserve(lengths.numel());
  for (int64_t b = 0; b < rows.size(0); ++b) {
    for (int64_t h = 0; h < rows.size(1); ++h) {
      out.push_back(std::clamp<int64_t>(rows[b][h], 0, capacity));
    }
  }
  return out;
}

std::tuple<Tensor, Tensor> decode_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& lengths, double scale, bool causal) {
  TORCH_CHECK(key.stride(3) == 1 && value.stride(3) == 1, "key and value must have columns next to each other");
  Tensor out = at::empty({query.size(0), query.size(1), query.size(2), value.size(3)}, query.options());
  Tensor lse = empty_lse(query);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, query.scalar_type(), "decode_attention", [&] {
    attend<scalar_t>(
        {{query_part<scalar_t>(query), {nullptr, 0, 0, 0, 0, 0}}, query.size(1), key.size(1), query.size(2),
         key.const_data_ptr<scalar_t>(), key.stride(0), key.stride(1), key.stride(2), key.size(3),
         value.const_data_ptr<scalar_t>(), value.stride(0), value.stride(1), value.stride(2), value.size(3),
         clamped(lengths, key.size(2)), scale, causal,
         out.data_ptr<scalar_t>(), lse.data_ptr<Wide<scalar_t>>()});
  });
  return {out, lse};
}

std::tuple<Tensor, Tensor> latent_decode(
    const Tensor& query_latent, const Tensor& query_rope, const Tensor& cache, const Tensor& lengths, double scale,
    bool causal) {
  TORCH_CHECK(cache.stride(2) == 1, "cache must have columns next to each other");
  Tensor out = at::empty(query_latent.sizes(), query_latent.options());
  Tensor lse = empty_lse(query_latent);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, cache.scalar_type(), "latent_decode", [&] {
    const auto* data = cache.const_data_ptr<scalar_t>();
    attend<scalar_t>(
        {{query_part<scalar_t>(query_latent), query_part<scalar_t>(query_rope)},
         query_latent.size(1), 1, query_latent.size(2),
         data, cache.stride(0), 0, cache.stride(1), cache.size(2),
         data, cache.stride(0), 0, cache.stride(1), query_latent.size(3),
         clamped(lengths.unsqueeze(1), cache.size(1)), scale, causal,
         out.data_ptr<scalar_t>(), lse.data_ptr<Wide<scalar_t>>()});
  });
  return {out, lse};
}

// What this library was built from and for: the loader refuses any other.
std::string build() {
  return FASTATTN_BUILD;
}

} // namespace

TORCH_LIBRARY(fastattn_native, m) {
  m.def("build() -> str", build);
  m.def(
      "decode_attention(Tensor query, Tensor key, Tensor value, Tensor lengths, float scale, bool causal)"
      " -> (Tensor, Tensor)");
  m.def(
      "latent_decode(Tensor query_latent, Tensor query_rope, Tensor cache, Tensor lengths, float scale, bool causal)"
      " -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(fastattn_native, CPU, m) {
  m.impl("decode_attention", decode_attention);
  m.impl("latent_decode", latent_decode);
}

} // namespace fastattn
