#include "traces/formats/plan_recording.h"

#include <algorithm>
#include <array>

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

// Of a plan; null is as good as no key.
template <class Form>
constexpr form::OrNull<Form> or_null(Form as) {
  return {as};
}
constexpr auto kPlanSize = or_null(form::Between{0, kPoolBytesMax});
constexpr auto kPlanCount = or_null(form::Between{1, kPoolBytesMax});
constexpr auto kPlanText = or_null(form::AnyText{});
constexpr form::Word<DType> kTorchType{kTorchWords};
constexpr form::Named<DType> kElementType{dtype_from_name, "an element type"};
constexpr form::Word<MambaCacheMode> kCacheMode{kJsonWords<MambaCacheMode>};

// An option that may be null or absent.
void may_set(FieldReader& io, std::string_view key, std::optional<std::int64_t>& size,
             std::int64_t min = 0) {
  if (JsonValue value = io.object.optional(key); value && !value.is_null())
    size = value.integer(min, kPoolBytesMax);
}

template <class Io>
void planned_states(Io& io, FieldsOf<Io, KVCacheSpec>& spec) {
  state_tensor_fields(io, spec, {1, kHeadSizeMax}, kTorchType);
  io.required("mamba_type", spec.plan.mamba_type, form::AnyText{});
  io.required("mamba_cache_mode", spec.mamba_cache_mode, kCacheMode);
  io.defaulted("num_speculative_blocks", spec.num_speculative_blocks, kPlanSize);
  io.optional("num_prefill_checkpoint_blocks", spec.num_prefill_checkpoint_blocks, kPlanSize);
  io.optional("prefill_checkpoint_alignment", spec.prefill_checkpoint_alignment, kPlanCount);
}

// A number of bytes, or {"multiple_of": tokens}.
template <class Io>
void stride_field(Io& io, FieldsOf<Io, KVCacheSpec>& spec) {
  constexpr std::string_view kKey = "block_stride_alignment";
  if constexpr (Io::kReads) {
    JsonValue value = io.object.optional(kKey);
    if (value && value.is_object())
      spec.plan.stride_kernel_tokens =
          value.object().required("multiple_of").integer(1, kBlocksMax);
    else if (value)
      spec.block_stride_alignment = value.integer(1, kPoolBytesMax);
  } else if (spec.block_stride_alignment != 1) {
    io.out.integer(kKey, spec.block_stride_alignment);
  } else if (spec.plan.stride_kernel_tokens != 0) {
    io.out.key(kKey).begin_object().integer("multiple_of", spec.plan.stride_kernel_tokens);
    io.out.end_object();
  }
}

template <class Io>
void planned_rows(Io& io, FieldsOf<Io, KVCacheSpec>& spec) {
  constexpr form::Code kMode{
      [](JsonValue value) {
        return read_word<KVQuantMode>(value, kv_quant_mode_from_planned_name,
                                      "a quantization mode");
      },
      [](JsonWriter& out, KVQuantMode mode) { out.string(planned_name_of(mode)); }};
  io.required("num_kv_heads", spec.num_kv_heads, form::Between{1, kHeadsMax});
  io.required("head_size", spec.head_size, form::Between{1, kHeadSizeMax});
  io.required("head_size_v", spec.head_size_v, form::Between{0, kHeadSizeMax});
  io.required("dtype", spec.dtype, kTorchType);
  io.unless(KVQuantMode::none, "kv_quant_mode", spec.kv_quant_mode, kMode);
  io.optional("num_head_slots", spec.plan.num_head_slots, or_null(form::Between{1, kHeadsMax}));
  io.optional("state_content_bytes", spec.plan.state_content_bytes, kPlanCount);
  io.unless(TokensPerState{}, "tokens_per_state", spec.tokens_per_state, kTokensPerState);
  io.optional("max_tp_shards", spec.plan.max_tp_shards, kPlanCount);
  stride_field(io, spec);
  io.optional("sliding_window", spec.sliding_window, kPlanCount);
  io.optional("extra_retained_tokens", spec.extra_retained_tokens, kPlanSize);
  io.optional("attention_chunk_size", spec.attention_chunk_size, kPlanCount);
  io.optional("rswa_window", spec.rswa_window, kPlanCount);
  io.optional("sink_len", spec.sink_len, kPlanSize);
  io.optional("cache_dtype_str", spec.cache_dtype_str, kPlanText);
  io.optional("topk_buffer_width", spec.plan.topk_buffer_width, kPlanCount);
  io.optional("alignment", spec.alignment, kPlanCount);
  io.optional("model_version", spec.model_version, kPlanText);
  std::string role = spec.plan.is_indexer ? "indexer" : "";
  io.optional("cache_role", role, kPlanText);
  if constexpr (Io::kReads) spec.plan.is_indexer = role == "indexer";
  io.optional("is_index_group_leader", spec.plan.is_index_group_leader);
  io.optional("bounded_replay", spec.bounded_replay);
}

template <class Io>
void planned_fields(Io& io, FieldsOf<Io, KVCacheSpec>& spec) {
  constexpr form::Code kKind{
      [](JsonValue value) {
        return read_word<CacheKind>(value, cache_kind_from_planned_name, "a kind of cache");
      },
      [](JsonWriter& out, CacheKind kind) { out.string(planned_name_of(kind)); }};
  io.required("type", spec.kind, kKind);
  io.required("block_size", spec.block_size, form::Between{1, kBlockTokensMax});
  if constexpr (Io::kReads) {
    may_set(io, "page_size_padded", spec.page_size_padded);
    spec.dcp_sharded = is_attention(spec.kind);
  } else {
    io.optional("page_size_padded", spec.page_size_padded, kPlanSize);
  }
  if (!has_layer_views(spec.kind))
    io.defaulted("dcp_sharded", spec.dcp_sharded);
  else if (Io::kReads || !is_state_kind(spec.kind))
    io.unless(true, "dcp_sharded", spec.dcp_sharded);
  io.optional("is_draft", spec.plan.is_draft.value);
  io.optional("non_causal", spec.plan.non_causal);
  io.optional("non_causal_multi_token_decode", spec.plan.non_causal_multi_token_decode);
  io.optional("tp_replicated", spec.plan.tp_replicated);
  if (!has_layer_views(spec.kind)) {
    io.required(kHotPageKey, spec.page_copy_bytes, form::Between{1, kPoolBytesMax});
    if (Io::kReads || is_hot_pages(spec.kind))
      io.defaulted("blocks_per_request", spec.blocks_per_request, kPlanSize);
  } else if (is_state_kind(spec.kind)) {
    planned_states(io, spec);
  } else {
    planned_rows(io, spec);
  }
}

KVCacheSpec read_planned_spec(JsonValue value) {
  KVCacheSpec spec;
  JsonObject object = value.object();
  FieldReader io(object);
  planned_fields(io, spec);
  // What follows from the rest.
  for (const char* derived : {"page_size_bytes", "hnc", "stride_alignment_bytes"})
    object.optional(derived);
  object.finish();
  return spec;
}

void read_options(JsonValue value, std::string& model, OverlaidPlanInputs& plan) {
  JsonObject object = value.object();
  FieldReader io(object);
  PlacementOptions& options = plan.options;
  model = object.required("model").nonempty_string();
  plan.backend = object.required("backend").string();
  io.optional("tp", options.tp, kPlanCount);
  io.optional("dcp", options.dcp, kPlanCount);
  io.optional("pcp", options.pcp, kPlanCount);
  io.optional("pp", options.pp, kPlanCount);
  io.optional("kv_dtype", options.format, kPlanText);
  io.optional("model_dtype", options.model_dtype, or_null(kElementType));
  io.optional("device", options.device, or_null(form::Word<DeviceFamily>{kDeviceWords}));
  options.memory_bytes = object.required("memory_bytes").integer(0, kPoolBytesMax);
  options.max_model_len = object.required("max_model_len").integer(1, kBlocksMax);
  may_set(io, "block_size", options.block_size, 1);
  may_set(io, "prefix_match_unit", options.prefix_match_unit, 1);
  may_set(io, "num_gpu_blocks_override", options.num_gpu_blocks_override, 1);
  io.optional("prefix_caching", options.prefix_caching);
  io.optional("disable_hybrid", options.disable_hybrid_kv_cache_manager);
  io.optional("mamba_cache_mode", options.mamba_cache_mode, kCacheMode);
  io.optional("num_spec", options.num_spec, kPlanSize);
  io.optional("mtp_modules", options.mtp_modules, kPlanCount);
  io.optional("spec_method", options.spec_method, kPlanText);
  if (JsonValue order = object.optional("layout"); order && !order.is_null())
    options.order = order.string();
  io.optional("connector", options.connector, kPlanText);
  if (JsonValue pages = object.optional(kHostPagesWord); pages && !pages.is_null()) {
    JsonObject sizes = pages.object();
    const double bytes =
        sizes.required("host_pool_gib").binary64() * static_cast<double>(1LL << 30);
    options.host_pool_bytes =
        static_cast<std::int64_t>(std::clamp(bytes, 1.0, static_cast<double>(kPoolBytesMax)));
    FieldReader of_pages(sizes);
    may_set(of_pages, "device_buffer_size", options.device_buffer_rows, 1);
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
  FieldReader io(line);
  PlanOptions& options = inputs.options;
  io.required("tp", options.tp, form::Between{1, kBlocksMax});
  io.required("kv_dtype", options.kv_dtype, kElementType);
  io.required("ssm_dtype", options.ssm_dtype.emplace(), kElementType);
  io.required("num_spec", options.num_spec, form::Between{0, kBlocksMax});
  io.required("mamba_cache_mode", options.mamba_cache_mode,
              form::Named<MambaCacheMode>{from_name<MambaCacheMode>, "a cache mode"});
  io.required("backend", options.backend,
              form::Named<AttentionBackend>{from_name<AttentionBackend>, "a backend"});
  options.memory_bytes = line.required("memory_bytes").integer(0, kPoolBytesMax);
  options.max_model_len = line.required("max_model_len").integer(1, kBlocksMax);
  options.default_block_size = line.required("default_block_size").integer(1, kBlocksMax);
  // Options that a recording may leave at their defaults.
  io.optional("mamba_chunk_size", options.mamba_chunk_size, kPlanSize);
  io.optional("max_num_batched_tokens", options.max_num_batched_tokens, kPlanSize);
  io.optional("dcp", options.dcp, kPlanSize);
  io.optional("pcp", options.pcp, kPlanSize);
  may_set(io, "block_size", options.block_size);
  may_set(io, "mamba_block_size", options.mamba_block_size);
  may_set(io, "num_gpu_blocks_override", options.num_gpu_blocks_override);
  for (const JsonEntry& entry : line.required("layers").object().entries())
    inputs.layers.push_back({std::string(entry.key), read_kv_cache_spec(entry.value)});
  return inputs;
}

OverlaidPlanInputs read_overlaid_inputs(JsonObject& line, std::string& model) {
  OverlaidPlanInputs plan;
  read_options(line.required("options"), model, plan);
  if (JsonValue specs = line.optional("specs"))
    for (JsonValue spec : specs.array()) plan.specs.push_back(read_planned_spec(spec));
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
  engine.required("name").nonempty_string();
  engine.required("version").nonempty_string();
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

std::string planned_spec_json(const KVCacheSpec& spec) {
  return object_line([&](JsonWriter& out) {
    FieldWriter io(out);
    planned_fields(io, spec);
  });
}

std::string_view torch_name_of(DType dtype) {
  return std::ranges::find(kTorchWords, dtype, &JsonWord<DType>::second)->first;
}

}  // namespace lockstep
