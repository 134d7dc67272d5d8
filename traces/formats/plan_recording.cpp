#include "traces/formats/plan_recording.h"

#include <algorithm>
#include <array>

#include "base/json_reader.h"
#include "base/line_reader.h"
#include "reference/types/host_pages.h"
#include "traces/formats/spec_json.h"

namespace lockstep {
namespace {

constexpr std::int64_t kPoolBytesMax = std::int64_t{1} << 50;
// Sizes of a layer: their product stays below 2^63.
constexpr std::int64_t kBlockTokensMax = 1 << 24, kHeadsMax = 1 << 12, kHeadSizeMax = 1 << 16;
constexpr auto kTorchWords = std::to_array<JsonWord<DType>>({
    {"bfloat16", DType::bf16},
    {"float16", DType::fp16},
    {"float32", DType::fp32},
    {"float8_e4m3fn", DType::fp8_e4m3},
    {"float8_e5m2", DType::fp8_e5m2},
    {"int8", DType::int8},
    {"uint8", DType::uint8},
});
constexpr auto kDeviceWords = std::to_array<JsonWord<DeviceFamily>>(
    {{"sm90", DeviceFamily::sm90}, {"sm100", DeviceFamily::sm100}});

std::optional<std::int64_t> size_in(JsonObject& object, std::string_view key,
                                    std::int64_t min = 0) {
  JsonValue value = object.optional(key);
  if (!value || value.is_null()) return std::nullopt;
  return value.integer(min, kPoolBytesMax);
}

template <class T>
void may_set(JsonObject& object, std::string_view key, T& field, std::int64_t min = 0) {
  if (const auto value = size_in(object, key, min)) field = *value;
}

void may_set_flag(JsonObject& object, std::string_view key, bool& field) {
  if (JsonValue value = object.optional(key)) field = value.boolean();
}

std::optional<std::string> text_in(JsonObject& object, std::string_view key) {
  JsonValue value = object.optional(key);
  if (!value || value.is_null()) return std::nullopt;
  return std::string(value.string());
}

void read_states(JsonObject& object, KVCacheSpec& spec) {
  for (JsonValue shape : object.required("shapes").array()) {
    StateTensorSpec& state = spec.states.emplace_back();
    for (JsonValue size : shape.array()) state.dims.push_back(size.integer(1, kHeadSizeMax));
  }
  std::size_t i = 0;
  for (JsonValue dtype : object.required("dtypes").array())
    if (i < spec.states.size()) spec.states[i++].dtype = dtype.word<DType>(kTorchWords);
  spec.plan.mamba_type = object.required("mamba_type").string();
  spec.mamba_cache_mode =
      object.required("mamba_cache_mode").word<MambaCacheMode>(kJsonWords<MambaCacheMode>);
  may_set(object, "num_speculative_blocks", spec.num_speculative_blocks);
  may_set(object, "num_prefill_checkpoint_blocks", spec.num_prefill_checkpoint_blocks);
  may_set(object, "prefill_checkpoint_alignment", spec.prefill_checkpoint_alignment, 1);
}

void read_rows(JsonObject& object, KVCacheSpec& spec) {
  spec.num_kv_heads = object.required("num_kv_heads").integer(1, kHeadsMax);
  spec.head_size = object.required("head_size").integer(1, kHeadSizeMax);
  spec.head_size_v = object.required("head_size_v").integer(0, kHeadSizeMax);
  spec.dtype = object.required("dtype").word<DType>(kTorchWords);
  if (JsonValue mode = object.optional("kv_quant_mode")) {
    if (const auto known = kv_quant_mode_from_planned_name(mode.string()))
      spec.kv_quant_mode = *known;
    else
      mode.refuse("a quantization mode");
  }
  if (JsonValue slots = object.optional("num_head_slots"); slots && !slots.is_null())
    spec.plan.num_head_slots = slots.integer<std::int64_t>(1, kHeadsMax);
  may_set(object, "state_content_bytes", spec.plan.state_content_bytes, 1);
  if (JsonValue tokens = object.optional("tokens_per_state"))
    spec.tokens_per_state = read_tokens_per_state(tokens);
  may_set(object, "max_tp_shards", spec.plan.max_tp_shards, 1);
  if (JsonValue alignment = object.optional("block_stride_alignment")) {
    if (alignment.is_object())
      spec.plan.stride_kernel_tokens =
          alignment.object().required("multiple_of").integer(1, kBlocksMax);
    else
      spec.block_stride_alignment = alignment.integer(1, kPoolBytesMax);
  }
  may_set(object, "sliding_window", spec.sliding_window, 1);
  may_set(object, "extra_retained_tokens", spec.extra_retained_tokens);
  may_set(object, "attention_chunk_size", spec.attention_chunk_size, 1);
  may_set(object, "rswa_window", spec.rswa_window, 1);
  may_set(object, "sink_len", spec.sink_len);
  spec.cache_dtype_str = text_in(object, "cache_dtype_str").value_or("");
  may_set(object, "topk_buffer_width", spec.plan.topk_buffer_width, 1);
  may_set(object, "alignment", spec.alignment, 1);
  spec.model_version = text_in(object, "model_version").value_or("");
  spec.plan.is_indexer = text_in(object, "cache_role") == "indexer";
  may_set_flag(object, "is_index_group_leader", spec.plan.is_index_group_leader);
  may_set_flag(object, "bounded_replay", spec.bounded_replay);
}

KVCacheSpec read_cache_spec(JsonValue value) {
  KVCacheSpec spec;
  JsonObject object = value.object();
  JsonValue type = object.required("type");
  if (const auto known = cache_kind_from_planned_name(type.string()))
    spec.kind = *known;
  else
    type.refuse("a kind of cache");
  spec.block_size = object.required("block_size").integer(1, kBlockTokensMax);
  spec.page_size_padded = size_in(object, "page_size_padded");
  spec.dcp_sharded = is_attention(spec.kind);
  may_set_flag(object, "dcp_sharded", spec.dcp_sharded);
  may_set_flag(object, "is_draft", spec.plan.is_draft.value);
  may_set_flag(object, "non_causal", spec.plan.non_causal);
  may_set_flag(object, "non_causal_multi_token_decode", spec.plan.non_causal_multi_token_decode);
  may_set_flag(object, "tp_replicated", spec.plan.tp_replicated);
  // What follows from the rest.
  for (const char* derived : {"page_size_bytes", "hnc", "stride_alignment_bytes"})
    object.optional(derived);
  if (!has_layer_views(spec.kind)) {
    spec.page_copy_bytes = object.required(kHotPageKey).integer(1, kPoolBytesMax);
    may_set(object, "blocks_per_request", spec.blocks_per_request);
    object.finish();
    return spec;
  }
  if (is_state_kind(spec.kind))
    read_states(object, spec);
  else
    read_rows(object, spec);
  object.finish();
  return spec;
}

void read_options(JsonValue value, std::string& model, OverlaidPlanInputs& plan) {
  JsonObject object = value.object();
  PlacementOptions& options = plan.options;
  model = object.required("model").nonempty_string();
  plan.backend = object.required("backend").string();
  may_set(object, "tp", options.tp, 1);
  may_set(object, "dcp", options.dcp, 1);
  may_set(object, "pcp", options.pcp, 1);
  may_set(object, "pp", options.pp, 1);
  options.format = text_in(object, "kv_dtype").value_or("auto");
  if (JsonValue dtype = object.optional("model_dtype"); dtype && !dtype.is_null()) {
    if (const auto known = dtype_from_name(dtype.string()))
      options.model_dtype = *known;
    else
      dtype.refuse("an element type");
  }
  if (JsonValue device = object.optional("device"); device && !device.is_null())
    options.device = device.word<DeviceFamily>(kDeviceWords);
  options.memory_bytes = object.required("memory_bytes").integer(0, kPoolBytesMax);
  options.max_model_len = object.required("max_model_len").integer(1, kBlocksMax);
  options.block_size = size_in(object, "block_size", 1);
  options.prefix_match_unit = size_in(object, "prefix_match_unit", 1);
  options.num_gpu_blocks_override = size_in(object, "num_gpu_blocks_override", 1);
  may_set_flag(object, "prefix_caching", options.prefix_caching);
  may_set_flag(object, "disable_hybrid", options.disable_hybrid_kv_cache_manager);
  if (JsonValue mode = object.optional("mamba_cache_mode"))
    options.mamba_cache_mode = mode.word<MambaCacheMode>(kJsonWords<MambaCacheMode>);
  may_set(object, "num_spec", options.num_spec);
  may_set(object, "mtp_modules", options.mtp_modules, 1);
  options.spec_method = text_in(object, "spec_method").value_or("");
  options.order = text_in(object, "layout");
  options.connector = text_in(object, "connector").value_or("");
  if (JsonValue pages = object.optional(kHostPagesWord); pages && !pages.is_null()) {
    JsonObject sizes = pages.object();
    const double bytes =
        sizes.required("host_pool_gib").binary64() * static_cast<double>(1LL << 30);
    options.host_pool_bytes =
        static_cast<std::int64_t>(std::clamp(bytes, 1.0, static_cast<double>(kPoolBytesMax)));
    options.device_buffer_rows = size_in(sizes, "device_buffer_size", 1);
    sizes.finish();
  }
  if (JsonValue skipped = object.optional("skip_layers"); skipped && !skipped.is_null())
    options.skip_layers = read_names(skipped);
  // What the layers say already.
  for (const char* known : {"ssm_dtype", "max_num_seqs", "hidden", "drafter_layers", "drafter",
                            "drafter_backend", "bounded_replay", "sparse_logits"})
    object.optional(known);
  object.finish();
}

void read_layer(JsonValue value, OverlaidPlanInputs& plan) {
  const JsonArray entry = value.array();
  if (entry.size() != 3) return value.refuse("[name, spec, backend]");
  PlacementLayer layer;
  layer.name = entry[0].nonempty_string();
  if (JsonValue spec = entry[1]; !spec.is_null()) {
    const auto index = spec.integer<std::int64_t>(0, kBlocksMax);
    if (index >= static_cast<std::int64_t>(plan.specs.size()))
      return spec.refuse("the index of a spec");
    layer.spec = plan.specs[static_cast<std::size_t>(index)];
  }
  if (JsonValue backend = entry[2]; !backend.is_null()) layer.backend = backend.string();
  plan.layers.push_back(std::move(layer));
}

void read_workers(JsonValue value, OverlaidPlanInputs& plan) {
  std::vector<std::string> names;
  for (const PlacementLayer& layer : plan.layers)
    if (layer.spec) names.push_back(layer.name);
  if (!value) {
    plan.workers.push_back({std::move(names), plan.options.memory_bytes});
    return;
  }
  std::size_t at = 0;
  for (JsonValue worker : value.array()) {
    JsonObject object = worker.object();
    const auto count = object.required("layers").integer<std::int64_t>(0, kBlocksMax);
    const std::size_t end = std::min(names.size(), at + static_cast<std::size_t>(count));
    WorkerShare& share = plan.workers.emplace_back();
    for (; at < end; ++at) share.layer_names.push_back(names[at]);
    share.memory_bytes = object.required("memory_bytes").integer(0, kPoolBytesMax);
    object.optional("first");
    object.finish();
  }
  if (plan.workers.empty()) value.refuse("a worker");
}

TensorPlanInputs read_tensor_inputs(JsonObject& line) {
  TensorPlanInputs inputs;
  PlanOptions& options = inputs.options;
  options.tp = line.required("tp").integer(1, kBlocksMax);
  options.kv_dtype =
      read_word<DType>(line.required("kv_dtype"), dtype_from_name, "an element type");
  options.ssm_dtype =
      read_word<DType>(line.required("ssm_dtype"), dtype_from_name, "an element type");
  options.num_spec = line.required("num_spec").integer(0, kBlocksMax);
  options.mamba_cache_mode = read_word<MambaCacheMode>(line.required("mamba_cache_mode"),
                                                       from_name<MambaCacheMode>, "a cache mode");
  options.backend = read_word<AttentionBackend>(line.required("backend"),
                                                from_name<AttentionBackend>, "a backend");
  options.memory_bytes = line.required("memory_bytes").integer(0, kPoolBytesMax);
  options.max_model_len = line.required("max_model_len").integer(1, kBlocksMax);
  options.default_block_size = line.required("default_block_size").integer(1, kBlocksMax);
  // Options that a recording may leave at their defaults.
  may_set(line, "mamba_chunk_size", options.mamba_chunk_size);
  may_set(line, "max_num_batched_tokens", options.max_num_batched_tokens);
  may_set(line, "dcp", options.dcp);
  may_set(line, "pcp", options.pcp);
  options.block_size = size_in(line, "block_size");
  options.mamba_block_size = size_in(line, "mamba_block_size");
  options.num_gpu_blocks_override = size_in(line, "num_gpu_blocks_override");
  for (const JsonEntry& entry : line.required("layers").object().entries())
    inputs.layers.push_back({std::string(entry.key), read_kv_cache_spec(entry.value)});
  return inputs;
}

OverlaidPlanInputs read_overlaid_inputs(JsonObject& line, std::string& model) {
  OverlaidPlanInputs plan;
  read_options(line.required("options"), model, plan);
  if (JsonValue specs = line.optional("specs"))
    for (JsonValue spec : specs.array()) plan.specs.push_back(read_cache_spec(spec));
  if (JsonValue layers = line.optional("layers"))
    for (JsonValue layer : layers.array()) read_layer(layer, plan);
  if (JsonValue shared = line.optional("shared"))
    for (JsonValue pair : shared.array())
      if (read_names(pair).size() != 2) pair.refuse("[layer, layer]");
  read_workers(line.optional("workers"), plan);
  return plan;
}

PlanRecording read_plan(JsonValue root) {
  PlanRecording plan;
  JsonObject line = root.object();
  JsonObject engine = line.required("engine").object();
  engine.required("name");
  engine.required("version");
  if (line.required("layout_recording").integer<std::int64_t>(1, 2) == 2) {
    plan.inputs = read_overlaid_inputs(line, plan.model);
  } else {
    plan.model = line.required("model").nonempty_string();
    plan.inputs = read_tensor_inputs(line);
  }
  for (const char* result :
       {"aligned", "specs_of_first_runner", "layout", "plan", "plans_of_other_workers", "capacity",
        "max_concurrency", "capacity_tokens", "views", "needs_zeroing", "block_sizes", "pools",
        "refused", "defects"})
    line.optional(result);
  line.finish();
  return plan;
}

}  // namespace

Result<std::vector<PlanRecording>> read_plan_recordings(const std::string& path) {
  std::vector<PlanRecording> plans;
  LS_ASSIGN_OR_RETURN(auto lines, LineReader::open(path));
  JsonReader reader(path);
  std::string_view text;
  for (;;) {
    LS_ASSIGN_OR_RETURN(const bool more, lines.next(text));
    if (!more) return plans;
    if (!reader.parse(text, lines.number(), lines.is_cut_off())) return reader.failure();
    plans.push_back(read_plan(reader.root()));
    if (!reader.ok()) return reader.failure();
    plans.back().line = lines.number();
    plans.back().json = text;
  }
}

std::string_view torch_name_of(DType dtype) {
  return std::ranges::find(kTorchWords, dtype, &JsonWord<DType>::second)->first;
}

}  // namespace lockstep
