// Specs, groups and plans as JSON. Which keys a spec has follows from its kind: the traits of
// reference/types/cache_kinds.h decide, not a list per kind.
#include "traces/formats/spec_json.h"

#include <algorithm>

#include "traces/formats/plan_recording.h"

namespace lockstep {
namespace {

constexpr std::int64_t kSizeMax = std::int64_t{1} << 40;  // bytes, elements, tokens of one layer
constexpr std::string_view kDefaultRole = "default";      // of a group

// No kind needs a size of 0: an absent key means that.
constexpr form::Between kSize{1, kSizeMax};
constexpr form::Named<DType> kDType{dtype_from_name,
                                    "an element type (bf16, fp16, fp32, fp8, ...)"};

// The file's word for windows of MLA rows. The table of kinds has one word, "sliding_window", for
// both kinds of windows.
constexpr std::string_view kSlidingWindowMla = "sliding_window_mla";

// Reads `type`; an unknown word is refused with the list of kinds.
void read_kind(JsonValue value, KVCacheSpec& spec) {
  if (value.string() == kSlidingWindowMla) {
    spec.kind = CacheKind::sliding_window_mla;
    return;
  }
  spec.kind =
      read_word<CacheKind>(value, cache_kind_from_name,
                           "a kind of cache (full, mla, sliding_window, sliding_window_mla, "
                           "chunked_local, mamba, hidden_state, cross_attention, encoder_only, "
                           "circular_buffer, hisparse_resident, hisparse_hot)");
}

// Reads `mla_rows` of older files: on a window it means the kind sliding_window_mla, on a ring keys
// without values. On kinds that have single rows anyway it is redundant.
void read_mla_rows(JsonValue value, KVCacheSpec& spec) {
  if (!value.boolean()) return;
  if (is_sliding_window(spec.kind))
    spec.kind = CacheKind::sliding_window_mla;
  else if (is_ring(spec.kind))
    spec.keys_alone = true;
  else if (!has_single_rows(spec))
    value.refuse("false, or a cache with one token per entry");
}

template <class Io>
void state_fields(Io& io, FieldsOf<Io, KVCacheSpec>& spec) {
  state_tensor_fields(io, spec, kSize, kDType);
  io.required("mamba_cache_mode", spec.mamba_cache_mode,
              form::Named<MambaCacheMode>{from_name<MambaCacheMode>, "none, align or all"});
  io.required("num_speculative_blocks", spec.num_speculative_blocks, form::Between{0, kBlocksMax});
}

// `head_size_v` 0 on a ring means keys without values; elsewhere the key is omitted when V is as
// wide as K.
template <class Io>
void head_size_v_field(Io& io, FieldsOf<Io, KVCacheSpec>& spec) {
  if constexpr (Io::kReads) {
    JsonValue value = io.object.optional("head_size_v");
    if (!value) return;
    spec.head_size_v = value.integer(is_ring(spec.kind) ? 0 : 1, kSizeMax);
    spec.keys_alone |= spec.head_size_v == 0;
  } else if (is_ring(spec.kind) && spec.keys_alone) {
    io.out.integer("head_size_v", 0);
  } else {
    io.optional("head_size_v", spec.head_size_v, kSize);
  }
}

// Keys that any kind may have, and those of windows and states. Keys of one kind are read only on
// that kind, so that finish() refuses them elsewhere; written, they have their default there and
// are omitted.
template <class Io>
void rare_fields(Io& io, FieldsOf<Io, KVCacheSpec>& spec) {
  io.optional("page_size_padded", spec.page_size_padded, kSize);
  head_size_v_field(io, spec);
  io.unless(KVQuantMode::none, "kv_quant_mode", spec.kv_quant_mode,
            form::Named<KVQuantMode>{from_name<KVQuantMode>, "a quantization"});
  if constexpr (Io::kReads)
    // Plans of 0.33.0 have modes that no backend can store.
    if (is_planned_only(spec.kv_quant_mode))
      io.object.required("kv_quant_mode").refuse("a quantization");
  io.optional("cache_dtype_str", spec.cache_dtype_str, form::AnyText{});
  io.optional("model_version", spec.model_version, form::AnyText{});
  io.unless(TokensPerState{}, "tokens_per_state", spec.tokens_per_state, kTokensPerState);
  // `tokens_per_state` as recordings of older releases name it.
  if constexpr (Io::kReads) io.optional("compress_ratio", spec.tokens_per_state, kTokensPerState);
  io.optional("alignment", spec.alignment, kSize);
  io.unless(std::int64_t{1}, "block_stride_alignment", spec.block_stride_alignment, kSize);
  io.unless(true, "dcp_sharded", spec.dcp_sharded);
  if (!Io::kReads || is_sliding_window(spec.kind)) {
    io.optional("extra_retained_tokens", spec.extra_retained_tokens, form::Between{0, kSizeMax});
    io.optional("bounded_replay", spec.bounded_replay);
    if constexpr (Io::kReads)
      if (spec.bounded_replay && !is_mla_window(spec.kind))
        io.object.required("bounded_replay").refuse("false, or a sliding_window_mla");
  }
  if (Io::kReads && !is_state_kind(spec.kind)) return;
  io.optional("num_prefill_checkpoint_blocks", spec.num_prefill_checkpoint_blocks,
              form::Between{0, kBlocksMax});
  io.optional("prefill_checkpoint_alignment", spec.prefill_checkpoint_alignment,
              form::OrNull{kSize});
}

}  // namespace

// A spec: `type` first, then the figures that its kind requires.
template <class Io>
void fields(Io& io, FieldsOf<Io, KVCacheSpec>& spec) {
  if constexpr (Io::kReads) {
    read_kind(io.object.required("type"), spec);
    if (auto rows = io.object.optional("mla_rows")) read_mla_rows(rows, spec);
  } else {
    io.out.string("type", type_name_of(spec.kind));
  }
  io.required("block_size", spec.block_size, form::Between{1, kBlocksMax});
  if (is_state_kind(spec.kind)) {
    state_fields(io, spec);
  } else if (keeps_pages(spec)) {
    io.required(kHotPageKey, spec.page_copy_bytes, kSize);
    if (is_hot_pages(spec.kind))
      io.required("blocks_per_request", spec.blocks_per_request, form::Between{1, kBlocksMax});
  } else {
    io.required("num_kv_heads", spec.num_kv_heads, kSize);
    io.required("head_size", spec.head_size, kSize);
    io.required("dtype", spec.dtype, kDType);
  }
  // Full attention may have a window or a chunk too: an engine without hybrid groups keeps all
  // blocks of such a layer, while attention still reads only the window.
  io.required_if(is_sliding_window(spec.kind), "sliding_window", spec.sliding_window, kSize);
  io.required_if(is_chunked(spec.kind), "attention_chunk_size", spec.attention_chunk_size, kSize);
  if (!Io::kReads || is_full_of_pairs(spec.kind)) {
    io.optional("sink_len", spec.sink_len, kSize);
    io.optional("rswa_window", spec.rswa_window, kSize);
    if constexpr (Io::kReads) settle_full_attention(spec);
  }
  rare_fields(io, spec);
}

// A group. A group of uniform type has one spec per layer in `layer_specs`; `spec` is then the
// first of them.
template <class Io>
void fields(Io& io, FieldsOf<Io, KVCacheGroupSpec>& group) {
  io.required("layers", group.layer_names);
  if constexpr (Io::kReads)
    if (group.layer_names.empty()) io.object.required("layers").refuse("at least one layer");
  io.required("spec", group.spec);
  io.optional("layer_specs", group.layer_specs);
  if constexpr (Io::kReads)
    if (auto specs = io.object.optional("layer_specs");
        specs && group.layer_specs.size() != group.layer_names.size())
      specs.refuse(fmt::format("one spec for each of the {} layers", group.layer_names.size()));
  io.unless(std::int64_t{1}, "layers_per_page", group.layers_per_page,
            form::Between{1, kBlocksMax});
  io.optional("is_eagle_group", group.is_eagle_group);
  io.optional("role", group.role);
  if constexpr (Io::kReads)
    // vLLM's default role and an absent one are the same.
    if (group.role == kDefaultRole) group.role.clear();
}

// 2^50 bytes exceed any pool and leave room for sums of tensors.
template <class Io>
void fields(Io& io, FieldsOf<Io, KVCacheTensor>& tensor) {
  io.required("size", tensor.size_bytes, form::Between{1, std::int64_t{1} << 50});
  io.required("shared_by", tensor.shared_by);
}

TokensPerState read_tokens_per_state(JsonValue value) {
  const auto read = tokens_per_state_from_json(value.text());
  if (!read) value.refuse(kTokensPerStateExpected);
  return read.value_or(TokensPerState{});
}

std::string_view type_name_of(CacheKind kind) {
  return is_mla_window(kind) ? kSlidingWindowMla : name_of(kind);
}

KVCacheSpec read_kv_cache_spec(JsonValue value) { return row_of_fields<KVCacheSpec>(value); }

std::vector<std::string> read_names(JsonValue value) {
  std::vector<std::string> names;
  for (JsonValue name : value.array()) names.emplace_back(name.nonempty_string());
  return names;
}

std::vector<KVCacheGroupSpec> read_kv_cache_groups(JsonValue value) {
  std::vector<KVCacheGroupSpec> groups;
  form::Plain::read(value, groups);
  if (groups.empty()) value.refuse("at least one group");
  return groups;
}

void write_kv_cache_groups(JsonWriter& out, const std::vector<KVCacheGroupSpec>& groups) {
  form::Plain::write(out, groups);
}

// Reads the layers of one module of the draft model. Each must be a layer of a group that keeps
// rows, and belong to one module only; draft_module_of() checks the modules read so far.
static std::vector<std::string> read_draft_layers(JsonValue value, const KVCacheConfig& config) {
  std::vector<std::string> names = read_names(value);
  if (names.empty()) value.refuse("at least one layer");
  for (const std::string& name : names) {
    const bool is_there = std::ranges::any_of(config.groups, [&](const KVCacheGroupSpec& group) {
      return std::ranges::find(group.layer_names, name) != group.layer_names.end() &&
             !is_state_kind(group.spec.kind);
    });
    if (!is_there || draft_module_of(config, name) >= 0 || std::ranges::count(names, name) != 1)
      value.refuse(fmt::format("layers with rows, each in one module; '{}' is none", name));
  }
  return names;
}

// Returns a layer that keeps a cache and that no tensor lists; empty: every layer has a tensor.
static std::string layer_without_tensor(const KVCacheConfig& config) {
  for (const KVCacheGroupSpec& group : config.groups)
    for (const std::string& name : group.layer_names)
      if (!keeps_nothing(group.spec.kind) &&
          std::ranges::none_of(config.tensors, [&](const KVCacheTensor& tensor) {
            return std::ranges::find(tensor.shared_by, name) != tensor.shared_by.end();
          }))
        return name;
  return {};
}

// A plan. The check of tensors needs all groups, so it follows them.
template <class Io>
void fields(Io& io, FieldsOf<Io, KVCacheConfig>& config) {
  constexpr form::Code kGroups{read_kv_cache_groups, write_kv_cache_groups};
  io.required("num_blocks", config.num_blocks, form::Between{1, kBlocksMax});
  io.required("groups", config.groups, kGroups);
  io.required("tensors", config.tensors);
  if constexpr (Io::kReads) {
    if (const std::string layer = layer_without_tensor(config); !layer.empty())
      io.object.required("tensors").refuse(
          fmt::format("a tensor for each layer; '{}' has none", layer));
    for (const KVCacheTensor& tensor : config.tensors)
      if (tensor.size_bytes % std::max<std::int64_t>(config.num_blocks, 1) != 0)
        io.object.required("tensors").refuse(
            fmt::format("whole pages of {} blocks; a tensor has {} bytes", config.num_blocks,
                        tensor.size_bytes));
    if (auto modules = io.object.optional("draft_modules"))
      for (JsonValue module : modules.array())
        config.draft_modules.push_back(read_draft_layers(module, config));
  } else {
    io.optional("draft_modules", config.draft_modules);
  }
}

KVCacheConfig read_kv_cache_config(JsonValue value) { return row_of_fields<KVCacheConfig>(value); }

void write_kv_cache_config(JsonWriter& out, const KVCacheConfig& config) {
  write_fields(out, config);
}

}  // namespace lockstep
