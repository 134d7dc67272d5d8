#include "traces/formats/spec_json.h"

#include <fmt/format.h>

#include <algorithm>

#include "reference/types/token_rows.h"
#include "traces/formats/plan_recording.h"

namespace lockstep {
namespace {

constexpr std::int64_t kSizeMax = std::int64_t{1} << 40;  // bytes, elements, tokens of one layer
constexpr std::string_view kDefaultRole = "default";      // of a group

// A word that `from_name` knows.
template <class T>
T read_name(JsonValue value, std::optional<T> (*from_name)(std::string_view),
            std::string_view expected) {
  const auto found = from_name(value.string());
  if (!found) value.refuse(expected);
  return found.value_or(T{});
}

DType read_dtype(JsonValue value) {
  return read_name<DType>(value, dtype_from_name, "an element type (bf16, fp16, fp32, fp8, ...)");
}

constexpr std::string_view kSlidingWindowMla = "sliding_window_mla";

void read_kind(JsonValue value, KVCacheSpec& spec) {
  if (value.string() == kSlidingWindowMla) {
    spec.kind = CacheKind::sliding_window_mla;
    return;
  }
  spec.kind = read_name<CacheKind>(value, cache_kind_from_name,
                                   "a kind of cache (full, mla, sliding_window, "
                                   "sliding_window_mla, chunked_local, mamba, hidden_state, "
                                   "cross_attention, encoder_only, circular_buffer, "
                                   "hisparse_resident, hisparse_hot)");
}

// Older files have it: of a window, where a kind of its own is written now, and of a ring.
void read_mla_rows(JsonValue value, KVCacheSpec& spec) {
  if (!value.boolean()) return;
  if (is_sliding_window(spec.kind))
    spec.kind = CacheKind::sliding_window_mla;
  else if (is_ring(spec.kind))
    spec.keys_alone = true;
  else if (!has_single_rows(spec))
    value.refuse("false, or a cache of single rows");
}

void read_states(JsonObject& object, KVCacheSpec& spec) {
  JsonValue shapes = object.required("shapes");
  JsonValue dtypes = object.required("dtypes");
  for (JsonValue shape : shapes.array()) {
    StateTensorSpec& state = spec.states.emplace_back();
    for (JsonValue dim : shape.array()) state.dims.push_back(dim.integer(1, kSizeMax));
  }
  const JsonArray types = dtypes.array();
  if (types.size() != spec.states.size()) {
    dtypes.refuse(fmt::format("one element type for each of the {} shapes", spec.states.size()));
    return;
  }
  std::size_t i = 0;
  for (JsonValue dtype : types) spec.states[i++].dtype = read_dtype(dtype);
}

void read_checkpoints(JsonObject& object, KVCacheSpec& spec) {
  if (auto blocks = object.optional("num_prefill_checkpoint_blocks"))
    spec.num_prefill_checkpoint_blocks = blocks.integer(0, kBlocksMax);
  if (auto tokens = object.optional("prefill_checkpoint_alignment"); tokens && !tokens.is_null())
    spec.prefill_checkpoint_alignment = tokens.integer(1, kSizeMax);
}

void read_window_keys(JsonObject& object, KVCacheSpec& spec) {
  if (auto tokens = object.optional("extra_retained_tokens"))
    spec.extra_retained_tokens = tokens.integer(0, kSizeMax);
  auto replay = object.optional("bounded_replay");
  if (!replay) return;
  spec.bounded_replay = replay.boolean();
  if (spec.bounded_replay && !is_mla_window(spec.kind))
    replay.refuse("false, or a sliding_window_mla");
}

// Keys that any kind may have.
void read_rare_keys(JsonObject& object, KVCacheSpec& spec) {
  if (auto value = object.optional("page_size_padded")) {
    spec.page_size_padded = value.integer(1, kSizeMax);
  }
  if (auto value = object.optional("head_size_v")) {
    spec.head_size_v = value.integer(is_ring(spec.kind) ? 0 : 1, kSizeMax);
    spec.keys_alone |= spec.head_size_v == 0;
  }
  if (auto value = object.optional("kv_quant_mode")) {
    spec.kv_quant_mode = read_name<KVQuantMode>(value, kv_quant_mode_from_name, "a quantization");
    if (is_planned_only(spec.kv_quant_mode)) value.refuse("a quantization");
  }
  if (auto value = object.optional("cache_dtype_str")) spec.cache_dtype_str = value.string();
  if (auto value = object.optional("model_version")) spec.model_version = value.string();
  // Named after the release that a recording is of.
  for (const char* key : {"tokens_per_state", "compress_ratio"})
    if (auto value = object.optional(key)) spec.tokens_per_state = read_tokens_per_state(value);
  if (auto value = object.optional("alignment")) spec.alignment = value.integer(1, kSizeMax);
  if (auto value = object.optional("block_stride_alignment"))
    spec.block_stride_alignment = value.integer(1, kSizeMax);
  if (auto value = object.optional("dcp_sharded")) spec.dcp_sharded = value.boolean();
}

void write_rare_keys(JsonWriter& out, const KVCacheSpec& spec) {
  const KVCacheSpec defaults;
  if (spec.page_size_padded) out.integer("page_size_padded", *spec.page_size_padded);
  const bool keys_alone = is_ring(spec.kind) && spec.keys_alone;
  if (keys_alone || spec.head_size_v != defaults.head_size_v)
    out.integer("head_size_v", keys_alone ? 0 : spec.head_size_v);
  if (spec.kv_quant_mode != defaults.kv_quant_mode) {
    out.string("kv_quant_mode", name_of(spec.kv_quant_mode));
  }
  if (!spec.cache_dtype_str.empty()) out.string("cache_dtype_str", spec.cache_dtype_str);
  if (!spec.model_version.empty()) out.string("model_version", spec.model_version);
  if (!is_one_row(spec.tokens_per_state))
    out.key("tokens_per_state").raw(json_of(spec.tokens_per_state));
  if (spec.alignment != defaults.alignment) out.integer("alignment", spec.alignment);
  if (spec.block_stride_alignment != defaults.block_stride_alignment)
    out.integer("block_stride_alignment", spec.block_stride_alignment);
  if (!spec.dcp_sharded) out.boolean("dcp_sharded", false);
  if (spec.extra_retained_tokens != 0)
    out.integer("extra_retained_tokens", spec.extra_retained_tokens);
  if (spec.bounded_replay) out.boolean("bounded_replay", true);
  if (spec.num_prefill_checkpoint_blocks != 0)
    out.integer("num_prefill_checkpoint_blocks", spec.num_prefill_checkpoint_blocks);
  if (spec.prefill_checkpoint_alignment != 0)
    out.integer("prefill_checkpoint_alignment", spec.prefill_checkpoint_alignment);
}

}  // namespace

TokensPerState read_tokens_per_state(JsonValue value) {
  const auto read = tokens_per_state_from_json(value.text());
  if (!read) value.refuse(kTokensPerStateExpected);
  return read.value_or(TokensPerState{});
}

KVCacheSpec read_kv_cache_spec(JsonValue value) {
  JsonObject object = value.object();
  KVCacheSpec spec;
  read_kind(object.required("type"), spec);
  if (auto rows = object.optional("mla_rows")) read_mla_rows(rows, spec);
  if (auto size = object.optional("block_size")) spec.block_size = size.integer(1, kBlocksMax);
  if (is_state_kind(spec.kind)) {
    read_states(object, spec);
    spec.mamba_cache_mode = read_name<MambaCacheMode>(
        object.required("mamba_cache_mode"), mamba_cache_mode_from_name, "none, align or all");
    spec.num_speculative_blocks = object.required("num_speculative_blocks").integer(0, kBlocksMax);
    read_checkpoints(object, spec);
  } else if (keeps_pages(spec)) {
    spec.page_copy_bytes = object.required(kHotPageKey).integer(1, kSizeMax);
    if (is_hot_pages(spec.kind))
      spec.blocks_per_request = object.required("blocks_per_request").integer(1, kBlocksMax);
  } else {
    spec.num_kv_heads = object.required("num_kv_heads").integer(1, kSizeMax);
    spec.head_size = object.required("head_size").integer(1, kSizeMax);
    spec.dtype = read_dtype(object.required("dtype"));
  }
  // Full attention may carry a window or a chunk too: an engine without hybrid groups keeps all
  // blocks of such a layer.
  const auto extent = [&](bool is_needed, const char* key, std::int64_t& field) {
    const auto found = is_needed ? object.required(key) : object.optional(key);
    if (auto tokens = found) field = tokens.integer(1, kSizeMax);
  };
  extent(is_sliding_window(spec.kind), "sliding_window", spec.sliding_window);
  extent(is_chunked(spec.kind), "attention_chunk_size", spec.attention_chunk_size);
  if (is_sliding_window(spec.kind)) read_window_keys(object, spec);
  if (is_full_of_pairs(spec.kind)) {
    if (auto sinks = object.optional("sink_len")) spec.sink_len = sinks.integer(1, kSizeMax);
    if (auto window = object.optional("rswa_window"))
      spec.rswa_window = window.integer(1, kSizeMax);
    settle_full_attention(spec);
  }
  read_rare_keys(object, spec);
  object.finish();
  return spec;
}

void write_kv_cache_spec(JsonWriter& out, const KVCacheSpec& spec) {
  out.begin_object();
  out.string("type", is_mla_window(spec.kind) ? kSlidingWindowMla : name_of(spec.kind));
  out.integer("block_size", spec.block_size);
  if (is_state_kind(spec.kind)) {
    out.key("shapes").begin_array();
    for (const StateTensorSpec& state : spec.states) out.integers(state.dims);
    out.end_array().key("dtypes").begin_array();
    for (const StateTensorSpec& state : spec.states) out.string(name_of(state.dtype));
    out.end_array().string("mamba_cache_mode", name_of(spec.mamba_cache_mode));
    out.integer("num_speculative_blocks", spec.num_speculative_blocks);
  } else if (keeps_pages(spec)) {
    out.integer(kHotPageKey, spec.page_copy_bytes);
    if (is_hot_pages(spec.kind)) out.integer("blocks_per_request", spec.blocks_per_request);
  } else {
    out.integer("num_kv_heads", spec.num_kv_heads).integer("head_size", spec.head_size);
    out.string("dtype", name_of(spec.dtype));
  }
  if (spec.sliding_window != 0) out.integer("sliding_window", spec.sliding_window);
  if (spec.attention_chunk_size != 0) {
    out.integer("attention_chunk_size", spec.attention_chunk_size);
  }
  if (spec.sink_len != 0) out.integer("sink_len", spec.sink_len);
  if (spec.rswa_window != 0) out.integer("rswa_window", spec.rswa_window);
  write_rare_keys(out, spec);
  out.end_object();
}

std::vector<std::string> read_names(JsonValue value) {
  std::vector<std::string> names;
  for (JsonValue name : value.array()) names.emplace_back(name.nonempty_string());
  return names;
}

std::vector<KVCacheGroupSpec> read_kv_cache_groups(JsonValue value) {
  std::vector<KVCacheGroupSpec> groups;
  for (JsonValue element : value.array()) {
    JsonObject object = element.object();
    KVCacheGroupSpec& group = groups.emplace_back();
    JsonValue layers = object.required("layers");
    group.layer_names = read_names(layers);
    if (group.layer_names.empty()) layers.refuse("at least one layer");
    group.spec = read_kv_cache_spec(object.required("spec"));
    if (auto specs = object.optional("layer_specs")) {
      for (JsonValue spec : specs.array()) group.layer_specs.push_back(read_kv_cache_spec(spec));
      if (group.layer_specs.size() != group.layer_names.size()) {
        specs.refuse(fmt::format("one spec for each of the {} layers", group.layer_names.size()));
      }
    }
    if (auto packed = object.optional("layers_per_page")) {
      group.layers_per_page = packed.integer(1, kBlocksMax);
    }
    if (auto eagle = object.optional("is_eagle_group")) group.is_eagle_group = eagle.boolean();
    if (auto role = object.optional("role")) {
      group.role = role.nonempty_string();
      if (group.role == kDefaultRole) group.role.clear();
    }
    object.finish();
  }
  if (groups.empty()) value.refuse("at least one group");
  return groups;
}

void write_kv_cache_groups(JsonWriter& out, const std::vector<KVCacheGroupSpec>& groups) {
  out.begin_array();
  for (const KVCacheGroupSpec& group : groups) {
    out.begin_object().key("layers").strings(group.layer_names);
    write_kv_cache_spec(out.key("spec"), group.spec);
    if (group.is_uniform_type()) {
      out.key("layer_specs").begin_array();
      for (const KVCacheSpec& spec : group.layer_specs) write_kv_cache_spec(out, spec);
      out.end_array();
    }
    if (group.layers_per_page != 1) out.integer("layers_per_page", group.layers_per_page);
    if (group.is_eagle_group) out.boolean("is_eagle_group", true);
    if (!group.role.empty()) out.string("role", group.role);
    out.end_object();
  }
  out.end_array();
}

// The layers of one module of a drafter.
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

// Empty: each has one.
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

KVCacheConfig read_kv_cache_config(JsonValue value) {
  JsonObject object = value.object();
  KVCacheConfig config;
  config.num_blocks = object.required("num_blocks").integer(1, kBlocksMax);
  config.groups = read_kv_cache_groups(object.required("groups"));
  JsonValue tensors = object.required("tensors");
  for (JsonValue element : tensors.array()) {
    JsonObject tensor = element.object();
    KVCacheTensor& read = config.tensors.emplace_back();
    read.size_bytes = tensor.required("size").integer(1, std::int64_t{1} << 50);
    read.shared_by = read_names(tensor.required("shared_by"));
    tensor.finish();
  }
  if (const std::string layer = layer_without_tensor(config); !layer.empty())
    tensors.refuse(fmt::format("a tensor for each layer; '{}' has none", layer));
  if (auto modules = object.optional("draft_modules"))
    for (JsonValue module : modules.array())
      config.draft_modules.push_back(read_draft_layers(module, config));
  object.finish();
  return config;
}

void write_kv_cache_config(JsonWriter& out, const KVCacheConfig& config) {
  out.begin_object().integer("num_blocks", config.num_blocks);
  write_kv_cache_groups(out.key("groups"), config.groups);
  out.key("tensors").begin_array();
  for (const KVCacheTensor& tensor : config.tensors) {
    out.begin_object().integer("size", tensor.size_bytes);
    out.key("shared_by").strings(tensor.shared_by).end_object();
  }
  out.end_array();
  if (!config.draft_modules.empty()) {
    out.key("draft_modules").begin_array();
    for (const std::vector<std::string>& module : config.draft_modules) out.strings(module);
    out.end_array();
  }
  out.end_object();
}

}  // namespace lockstep
