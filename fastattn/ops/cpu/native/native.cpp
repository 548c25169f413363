// The private operators that fastattn's CPU functions call: namespace fastattn_native.
#include "attention.h"
#include "quantize.h"
#include "scores.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace fastattn {
namespace {

using at::Tensor;

Tensor empty_lse(const Tensor& query) {
  const auto dtype = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(dtype));
}

template <typename T>
QueryPart<T> query_part(const Tensor& query) {
  return {
      query.const_data_ptr<T>(), query.stride(0), query.stride(1), query.stride(2), query.stride(3), query.size(3)};
}

// The valid slots of every row and head.
std::vector<int64_t> checked(const Tensor& lengths, int64_t capacity) {
  const auto rows = lengths.accessor<int32_t, 2>();
  std::vector<int64_t> out;
  out.reserve(lengths.numel());
  for (int64_t b = 0; b < rows.size(0); ++b) {
    for (int64_t h = 0; h < rows.size(1); ++h) {
      out.push_back(length_within(rows[b][h], capacity));
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
         checked(lengths, key.size(2)), scale, causal,
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
         checked(lengths.unsqueeze(1), cache.size(1)), scale, causal,
         out.data_ptr<scalar_t>(), lse.data_ptr<Wide<scalar_t>>()});
  });
  return {out, lse};
}

Scales scales_of(const Tensor& scale) {
  return {scale.const_data_ptr<float>(), scale.stride(0), scale.stride(1), scale.stride(2)};
}

Coded coded(const Tensor& codes, const Tensor& scale) {
  Coded out{
      Format::kInt4, static_cast<const uint8_t*>(codes.const_data_ptr()), codes.stride(0), codes.stride(1),
      codes.stride(2)};
  if (scale.dim() == 4) {
    out.group_scale = scale.const_data_ptr<Half>();
    out.group_batch = scale.stride(0), out.group_head = scale.stride(1), out.group_slot = scale.stride(2);
  } else {
    out.format = codes.scalar_type() == at::kChar ? Format::kInt8 : Format::kE4m3;
    out.scale = scales_of(scale);
  }
  return out;
}

// Attention over codes: the value is the first `value_dim` numbers of what its codes say. Codes become numbers in
// registers for a few queries, a block of slots at a time for many, which share them; in bfloat16, which holds codes of
// 8 bits exactly, for bfloat16 queries that are many enough for matrix products.
std::tuple<Tensor, Tensor> decode_codes(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_scale, const Tensor& value_scale,
    const Tensor& lengths, double scale, bool causal, int64_t value_dim) {
  TORCH_CHECK(key.stride(3) == 1 && value.stride(3) == 1, "key and value must have columns next to each other");
  const bool groups = key_scale.dim() == 4;
  TORCH_CHECK(
      !groups || (key_scale.stride(3) == 1 && value_scale.stride(3) == 1),
      "key_scale and value_scale must have columns next to each other");
  const int64_t rows = std::min(query.size(1) / std::max<int64_t>(key.size(1), 1) * query.size(2), kMaxRows);
  bool products = false;
#if defined(FASTATTN_DPBF16)
  products = !groups && query.scalar_type() == at::kBFloat16 && products_pay(rows, query.size(3), value_dim);
#endif
  const Tensor inputs = products ? query : query.to(at::kFloat);
  Tensor out = at::empty({query.size(0), query.size(1), query.size(2), value_dim}, inputs.options());
  Tensor lse = empty_lse(inputs);
  const auto run = [&]<typename T>(const T* keys, const T* values) {
    Problem<T> problem{
        {query_part<Outer<T>>(inputs), {nullptr, 0, 0, 0, 0, 0}}, query.size(1), key.size(1), query.size(2),
        keys, key.stride(0), key.stride(1), key.stride(2), query.size(3),
        values, value.stride(0), value.stride(1), value.stride(2), groups ? 2 * value.size(3) : value_dim,
        checked(lengths, key.size(2)), scale, causal,
        out.data_ptr<Outer<T>>(), lse.data_ptr<float>()};
    problem.out_dim = value_dim;
    if constexpr (kIsCode<T>) {
      problem.key_scale = scales_of(key_scale), problem.value_scale = scales_of(value_scale);
    } else {
      problem.coded_key = coded(key, key_scale), problem.coded_value = coded(value, value_scale);
    }
    attend<T>(problem);
  };
  const void *keys = key.const_data_ptr(), *values = value.const_data_ptr();
  if (products) {
    run(static_cast<const BFloat16*>(nullptr), static_cast<const BFloat16*>(nullptr));
  } else if (groups || rows > 8) {
    run(static_cast<const float*>(nullptr), static_cast<const float*>(nullptr));
  } else if (key.scalar_type() == at::kChar) {
    run(static_cast<const Int8*>(keys), static_cast<const Int8*>(values));
  } else {
    run(static_cast<const E4m3*>(keys), static_cast<const E4m3*>(values));
  }
  return {out.to(query.scalar_type()), lse};
}

void cache_append_(
    const Tensor& key_cache, const Tensor& value_cache, const Tensor& positions, const Tensor& lengths,
    const Tensor& key, const Tensor& value, const Tensor& position) {
  append(key_cache, value_cache, positions, lengths, key, value, position);
}

void cache_compact_(
    const Tensor& key_cache, const Tensor& value_cache, const Tensor& positions, const Tensor& lengths,
    const Tensor& scores, int64_t budget, int64_t min_length) {
  AT_DISPATCH_FLOATING_TYPES(scores.scalar_type(), "cache_compact_", [&] {
    compact<scalar_t>({key_cache, value_cache}, positions, lengths, scores, budget, min_length);
  });
}

void cache_append_codes_(
    const Tensor& key_cache, const Tensor& value_cache, const Tensor& positions, const Tensor& lengths,
    const Tensor& key_scale, const Tensor& value_scale, const Tensor& key, const Tensor& value, const Tensor& position) {
  TORCH_CHECK(key.stride(3) == 1 && value.stride(3) == 1, "key and value must have columns next to each other");
  const auto run = [&]<typename T>(T) {
    append_codes<T>(key_cache, value_cache, positions, lengths, key_scale, value_scale, key, value, position);
  };
  switch (key.scalar_type()) {
    case at::kFloat:
      return run(float());
    case at::kBFloat16:
      return run(BFloat16());
    case at::kHalf:
      return run(Half());
    default:
      TORCH_CHECK(false, "key must be float32, bfloat16 or float16");
  }
}

void cache_compact_codes_(
    const Tensor& key_cache, const Tensor& value_cache, const Tensor& positions, const Tensor& lengths,
    const Tensor& key_scale, const Tensor& value_scale, const Tensor& scores, int64_t budget, int64_t min_length) {
  AT_DISPATCH_FLOATING_TYPES(scores.scalar_type(), "cache_compact_codes_", [&] {
    compact<scalar_t>(
        {key_cache, value_cache, key_scale, value_scale}, positions, lengths, scores, budget, min_length);
  });
}

// Valid slots of the rows of which some head has `min_length`; 0 of the others.
std::vector<int64_t> scored_lengths(const Tensor& lengths, int64_t capacity, int64_t min_length) {
  std::vector<int64_t> out = checked(lengths, capacity);
  const int64_t heads = lengths.size(1);
  for (auto row = out.begin(); row != out.end(); row += heads) {
    if (*std::max_element(row, row + heads) < min_length) {
      std::fill(row, row + heads, 0);
    }
  }
  return out;
}

template <typename T>
Keys<T> keys_of(const Tensor& key, const Tensor& lengths, int64_t min_length) {
  return {
      key.const_data_ptr<T>(), key.stride(0), key.stride(1), key.stride(2), key.size(0), key.size(1), key.size(2),
      key.size(3), scored_lengths(lengths, key.size(2), min_length)};
}

Tensor score(
    const Tensor& key, const Tensor& lengths, int64_t min_length, const std::optional<Tensor>& key_scale,
    bool by_difference) {
  TORCH_CHECK(key.stride(3) == 1, "key must have columns next to each other");
  const auto dtype = key.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  Tensor out = at::empty({key.size(0), key.size(1), key.size(2)}, key.options().dtype(dtype));
  if (key_scale) {
    const bool groups = key_scale->dim() == 4;
    TORCH_CHECK(!groups || key_scale->stride(3) == 1, "key_scale must have columns next to each other");
    Keys<float> keys{
        nullptr, 0, 0, 0, key.size(0), key.size(1), key.size(2), key.size(3) * (groups ? 2 : 1),
        scored_lengths(lengths, key.size(2), min_length), coded(key, *key_scale)};
    by_difference ? key_diff(keys, out.data_ptr<float>()) : knorm(keys, out.data_ptr<float>());
    return out;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, key.scalar_type(), "score", [&] {
    const auto keys = keys_of<scalar_t>(key, lengths, min_length);
    auto* scores = out.data_ptr<Wide<scalar_t>>();
    by_difference ? key_diff(keys, scores) : knorm(keys, scores);
  });
  return out;
}

Tensor score_knorm(
    const Tensor& key, const Tensor& lengths, int64_t min_length, const std::optional<Tensor>& key_scale) {
  return score(key, lengths, min_length, key_scale, false);
}

Tensor score_key_diff(
    const Tensor& key, const Tensor& lengths, int64_t min_length, const std::optional<Tensor>& key_scale) {
  return score(key, lengths, min_length, key_scale, true);
}

std::tuple<Tensor, Tensor> merge_attention(at::TensorList outs, at::TensorList lses) {
  Tensor out = at::empty(outs[0].sizes(), outs[0].options()), lse = at::empty(lses[0].sizes(), lses[0].options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out.scalar_type(), "merge_attention", [&] {
    std::vector<Part<scalar_t>> parts;
    for (size_t i = 0; i < outs.size(); ++i) {
      TORCH_CHECK(outs[i].stride(3) == 1, "outs must have columns next to each other");
      parts.push_back(
          {outs[i].const_data_ptr<scalar_t>(), lses[i].const_data_ptr<Wide<scalar_t>>(),
           {outs[i].stride(0), outs[i].stride(1), outs[i].stride(2)},
           {lses[i].stride(0), lses[i].stride(1), lses[i].stride(2)}});
    }
    merge<scalar_t>(parts, out.sizes(), out.data_ptr<scalar_t>(), lse.data_ptr<Wide<scalar_t>>());
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
  m.def(
      "decode_codes(Tensor query, Tensor key, Tensor value, Tensor key_scale, Tensor value_scale, Tensor lengths,"
      " float scale, bool causal, int value_dim) -> (Tensor, Tensor)");
  m.def(
      "cache_append_(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!) positions, Tensor(d!) lengths,"
      " Tensor key, Tensor value, Tensor position) -> ()");
  m.def(
      "cache_compact_(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!) positions, Tensor(d!) lengths,"
      " Tensor scores, int budget, int min_length) -> ()");
  m.def(
      "cache_append_codes_(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!) positions, Tensor(d!) lengths,"
      " Tensor(e!) key_scale, Tensor(f!) value_scale, Tensor key, Tensor value, Tensor position) -> ()");
  m.def(
      "cache_compact_codes_(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!) positions, Tensor(d!) lengths,"
      " Tensor(e!) key_scale, Tensor(f!) value_scale, Tensor scores, int budget, int min_length) -> ()");
  m.def("score_knorm(Tensor key, Tensor lengths, int min_length, Tensor? key_scale=None) -> Tensor");
  m.def("score_key_diff(Tensor key, Tensor lengths, int min_length, Tensor? key_scale=None) -> Tensor");
  m.def("merge_attention(Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(fastattn_native, CPU, m) {
  m.impl("decode_attention", decode_attention);
  m.impl("latent_decode", latent_decode);
  m.impl("decode_codes", decode_codes);
  m.impl("merge_attention", merge_attention);
  m.impl("score_key_diff", score_key_diff);
  m.impl("score_knorm", score_knorm);
  m.impl("cache_compact_", cache_compact_);
  m.impl("cache_append_", cache_append_);
  m.impl("cache_append_codes_", cache_append_codes_);
  m.impl("cache_compact_codes_", cache_compact_codes_);
}

} // namespace fastattn
