// KV cache specs, groups and plans as JSON, with the keys and words of recordings. docs/formats.md,
// "Specs and groups".
//
// Not checked here: whether a plan is consistent (page sizes, tensor sizes);
// reference/plan/limits.h bounds the figures.
#pragma once

#include <string_view>

#include <fmt/format.h>

#include "base/json_fields.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/token_rows.h"

namespace lockstep {

// Block ids have 31 bits.
inline constexpr std::int64_t kBlocksMax = (std::int64_t{1} << 31) - 1;

// The word of the kind in `type` of a spec.
std::string_view type_name_of(CacheKind kind);

// Reads {"type":"full","block_size":16,"num_kv_heads":2,...}: keys that the kind needs are
// required, all others optional. Layers of a model before planning may omit `block_size`, which is
// 16 then.
KVCacheSpec read_kv_cache_spec(JsonValue value);

// Reads `tokens_per_state` of a spec: 4 (tokens per row) or "1/4" (four rows per token).
TokensPerState read_tokens_per_state(JsonValue value);
inline constexpr form::Code kTokensPerState{
    read_tokens_per_state,
    [](JsonWriter& out, TokensPerState tokens) { out.raw(json_of(tokens)); }};

// The tensors of a state page: `shapes` and `dtypes` have one entry per tensor, in page order.
template <class Io, class DTypeForm>
void state_tensor_fields(Io& io, FieldsOf<Io, KVCacheSpec>& spec, form::Between size,
                         const DTypeForm& dtype_form) {
  if constexpr (Io::kReads) {
    for (JsonValue shape : io.object.required("shapes").array()) {
      form::Each{size}.read(shape, spec.states.emplace_back().dims);
      if (spec.states.back().dims.empty()) shape.refuse("a shape of one dimension or more");
    }
    JsonValue dtypes = io.object.required("dtypes");
    const JsonArray types = dtypes.array();
    if (types.size() != spec.states.size())
      return dtypes.refuse(
          fmt::format("one element type for each of the {} shapes", spec.states.size()));
    std::size_t i = 0;
    for (JsonValue dtype : types) dtype_form.read(dtype, spec.states[i++].dtype);
  } else {
    io.out.key("shapes").each(spec.states, [&](const auto& state) { io.out.integers(state.dims); });
    io.out.key("dtypes");
    io.out.each(spec.states, [&](const auto& state) { dtype_form.write(io.out, state.dtype); });
  }
}

// [{"layers":[..],"spec":{..}},...], at least one group.
std::vector<KVCacheGroupSpec> read_kv_cache_groups(JsonValue value);
void write_kv_cache_groups(JsonWriter& out, const std::vector<KVCacheGroupSpec>& groups);

// {"num_blocks":..,"groups":[..],"tensors":[{"size":..,"shared_by":[..]},...]}. Every layer with a
// cache must have a tensor.
KVCacheConfig read_kv_cache_config(JsonValue value);
void write_kv_cache_config(JsonWriter& out, const KVCacheConfig& config);

// Reads a list of texts that are not empty.
std::vector<std::string> read_names(JsonValue value);

}  // namespace lockstep
