#include "traces/formats/layout_recording.h"

#include <array>
#include <charconv>
#include <span>

#include "base/json_reader.h"
#include "base/line_reader.h"
#include "traces/formats/spec_json.h"

namespace lockstep {
namespace {

constexpr std::int64_t kBytesMax = std::int64_t{1} << 50;

// The words that torch has for element types; results use them, inputs use the short ones.
constexpr auto kTorchTypes = std::to_array<JsonWord<DType>>({
    {"bfloat16", DType::bf16},
    {"float16", DType::fp16},
    {"float32", DType::fp32},
    {"float8_e4m3fn", DType::fp8_e4m3},
    {"float8_e5m2", DType::fp8_e5m2},
    {"int8", DType::int8},
    {"uint8", DType::uint8},
});

std::optional<std::int64_t> read_optional(JsonObject& object, std::string_view key) {
  JsonValue value = object.optional(key);
  if (!value || value.is_null()) return std::nullopt;
  return value.integer(0, kBytesMax);
}

std::vector<std::int64_t> read_integers(JsonValue value, std::int64_t min) {
  std::vector<std::int64_t> numbers;
  for (JsonValue number : value.array()) numbers.push_back(number.integer(min, kBytesMax));
  return numbers;
}

// A spec as the engine prints it when it has planned. It may print more than what a plan is made
// of.
KVCacheSpec read_planned_spec(JsonObject& object, std::int64_t& page_size_bytes) {
  KVCacheSpec spec;
  spec.kind =
      read_word<CacheKind>(object.required("type"), cache_kind_from_name, "a kind of cache");
  spec.block_size = object.required("block_size").integer(1, kBlocksMax);
  page_size_bytes = object.required("page_size_bytes").integer(0, kBytesMax);
  spec.page_size_padded = read_optional(object, "page_size_padded");
  if (is_state_kind(spec.kind)) {
    spec.mamba_cache_mode = read_word<MambaCacheMode>(object.required("mamba_cache_mode"),
                                                      mamba_cache_mode_from_name, "a cache mode");
    spec.num_speculative_blocks = object.required("num_speculative_blocks").integer(0, kBlocksMax);
    for (JsonValue shape : object.required("shapes").array())
      spec.states.push_back({read_integers(shape, 1), DType::bf16});
    std::size_t i = 0;
    for (JsonValue dtype : object.required("dtypes").array())
      if (i < spec.states.size()) spec.states[i++].dtype = dtype.word<DType>(kTorchTypes);
    return spec;
  }
  spec.num_kv_heads = object.required("num_kv_heads").integer(1, kBytesMax);
  spec.head_size = object.required("head_size").integer(1, kBytesMax);
  spec.head_size_v = read_optional(object, "head_size_v").value_or(0);
  spec.dtype = object.required("dtype").word<DType>(kTorchTypes);
  spec.sliding_window = read_optional(object, "sliding_window").value_or(0);
  spec.attention_chunk_size = read_optional(object, "attention_chunk_size").value_or(0);
  spec.compress_ratio = read_optional(object, "compress_ratio").value_or(1);
  if (auto text = object.optional("cache_dtype_str"); text && !text.is_null())
    spec.cache_dtype_str = text.string();
  if (auto text = object.optional("model_version"); text && !text.is_null())
    spec.model_version = text.string();
  return spec;
}

RecordedGroup read_group(JsonValue value) {
  RecordedGroup recorded;
  JsonObject object = value.object();
  recorded.group.layer_names = read_names(object.required("layers"));
  JsonObject spec = object.required("spec").object();
  const JsonValue layers = spec.optional("layers");
  if (JsonValue specs = layers) {
    spec.required("type");  // "uniform_type"
    recorded.group.spec.block_size = spec.required("block_size").integer(1, kBlocksMax);
    recorded.page_size_bytes = spec.required("page_size_bytes").integer(0, kBytesMax);
    JsonObject by_name = specs.object();
    for (const std::string& name : recorded.group.layer_names) {
      JsonObject layer = by_name.required(name).object();
      std::int64_t page = 0;
      recorded.group.layer_specs.push_back(read_planned_spec(layer, page));
    }
  } else {
    recorded.group.spec = read_planned_spec(spec, recorded.page_size_bytes);
  }
  object.finish();
  return recorded;
}

TensorView read_view(JsonValue value) {
  JsonObject object = value.object();
  TensorView view;
  view.shape = read_integers(object.required("shape"), 0);
  view.stride = read_integers(object.required("stride"), 0);
  view.storage_offset = object.required("offset").integer(0, kBytesMax);
  view.dtype = object.required("dtype").word<DType>(kTorchTypes);
  object.finish();
  return view;
}

NamedViews read_named_views(JsonObject object) {
  NamedViews views;
  for (const JsonEntry& entry : object.entries()) {
    auto& layer = views.emplace_back(entry.key, std::vector<TensorView>{}).second;
    JsonValue value = entry.value;
    if (value.is_array())
      for (JsonValue state : value.array()) layer.push_back(read_view(state));
    else
      layer.push_back(read_view(value));
  }
  return views;
}

// "NHD/2": the layout and the pool.
void read_views(const JsonEntry& entry, std::vector<RecordedViews>& all) {
  RecordedViews& recorded = all.emplace_back();
  recorded.name = entry.key;
  JsonValue value = entry.value;
  const std::size_t slash = recorded.name.find('/');
  const auto layout = cache_layout_from_name(recorded.name.substr(0, slash));
  if (!layout || is_overlaid(*layout) || slash == std::string::npos) {
    value.refuse_because("a key LAYOUT/BLOCKS is expected");
    return;
  }
  recorded.layout = *layout;
  // A pool that is looked at is small: its tensors must fit in 63 bits.
  constexpr std::int64_t kPoolMax = 1 << 16;
  const std::string_view blocks = std::string_view(recorded.name).substr(slash + 1);
  const auto [end, status] =
      std::from_chars(blocks.data(), blocks.data() + blocks.size(), recorded.num_blocks);
  if (status != std::errc{} || end != blocks.data() + blocks.size() || recorded.num_blocks < 1 ||
      recorded.num_blocks > kPoolMax) {
    value.refuse_because("a key LAYOUT/BLOCKS with 1 to 65536 blocks is expected");
    return;
  }
  JsonObject object = value.object();
  recorded.kernel_block_sizes = read_integers(object.required("kernel_block_sizes"), 1);
  recorded.views = read_named_views(object.required("views").object());
  JsonValue second = object.required("second_runner");
  if (second.is_object()) {
    JsonObject other = second.object();
    if (auto refused = other.optional("refused"))
      recorded.second_runner_refused = refused.nonempty_string();
    else
      recorded.second_runner = read_named_views(other);
  }
  object.finish();
}

void read_inputs(JsonObject& line, LayoutRecording& plan) {
  line.required("layout_recording");
  line.required("engine");
  plan.model = line.required("model").nonempty_string();
  PlanOptions& options = plan.options;
  options.tp = line.required("tp").integer(1, kBlocksMax);
  options.kv_dtype =
      read_word<DType>(line.required("kv_dtype"), dtype_from_name, "an element type");
  options.ssm_dtype =
      read_word<DType>(line.required("ssm_dtype"), dtype_from_name, "an element type");
  options.num_spec = line.required("num_spec").integer(0, kBlocksMax);
  options.mamba_cache_mode = read_word<MambaCacheMode>(line.required("mamba_cache_mode"),
                                                       mamba_cache_mode_from_name, "a cache mode");
  options.backend = read_word<AttentionBackend>(line.required("backend"),
                                                attention_backend_from_name, "a backend");
  options.memory_bytes = line.required("memory_bytes").integer(0, kBytesMax);
  options.max_model_len = line.required("max_model_len").integer(1, kBlocksMax);
  options.default_block_size = line.required("default_block_size").integer(1, kBlocksMax);
  // Options that a recording may leave at their defaults.
  const auto may_say = [&](std::string_view key, std::int64_t& option) {
    if (const auto value = read_optional(line, key)) option = *value;
  };
  may_say("mamba_chunk_size", options.mamba_chunk_size);
  may_say("max_num_batched_tokens", options.max_num_batched_tokens);
  may_say("dcp", options.dcp);
  may_say("pcp", options.pcp);
  options.block_size = read_optional(line, "block_size");
  options.mamba_block_size = read_optional(line, "mamba_block_size");
  options.num_gpu_blocks_override = read_optional(line, "num_gpu_blocks_override");
  for (const JsonEntry& entry : line.required("layers").object().entries())
    plan.layers.push_back({std::string(entry.key), read_kv_cache_spec(entry.value)});
}

LayoutRecording read_recording(JsonValue root, std::int64_t number) {
  LayoutRecording plan;
  plan.line = number;
  JsonObject line = root.object();
  read_inputs(line, plan);
  JsonObject aligned = line.required("aligned").object();
  plan.aligned.block_size = aligned.required("block_size").integer(1, kBlocksMax);
  plan.aligned.mamba_block_size = read_optional(aligned, "mamba_block_size");
  plan.aligned.mamba_page_size_padded = read_optional(aligned, "mamba_page_size_padded");
  aligned.finish();
  if (auto refused = line.optional("refused")) {
    plan.refused = refused.nonempty_string();
    line.finish();
    return plan;
  }
  JsonObject planned = line.required("plan").object();
  plan.num_blocks = planned.required("num_blocks").integer(0, kBlocksMax);
  for (JsonValue group : planned.required("groups").array())
    plan.groups.push_back(read_group(group));
  for (JsonValue value : planned.required("tensors").array()) {
    JsonObject tensor = value.object();
    const std::int64_t size = tensor.required("size").integer(0, kBytesMax);
    plan.tensors.push_back({size, read_names(tensor.required("shared_by"))});
    tensor.finish();
  }
  planned.finish();
  plan.max_concurrency = line.required("max_concurrency").binary64();
  plan.capacity_tokens = line.required("capacity_tokens").integer(0, kBytesMax);
  for (const JsonEntry& entry : line.required("views").object().entries())
    read_views(entry, plan.views);
  line.finish();
  return plan;
}

}  // namespace

Result<void> read_layout_lines(const std::string& path, const ReadLayoutLine& read) {
  LS_ASSIGN_OR_RETURN(auto lines, LineReader::open(path));
  JsonReader reader(path);
  std::string_view text;
  for (;;) {
    LS_ASSIGN_OR_RETURN(const bool more, lines.next(text));
    if (!more) return {};
    if (!reader.parse(text, lines.number(), lines.is_cut_off())) return reader.failure();
    read(reader.root(), lines.number(), text);
    if (!reader.ok()) return reader.failure();
  }
}

Result<std::vector<LayoutRecording>> read_layout_recordings(const std::string& path) {
  std::vector<LayoutRecording> recordings;
  LS_RETURN_IF_ERROR(
      read_layout_lines(path, [&](JsonValue root, std::int64_t line, std::string_view) {
        recordings.push_back(read_recording(root, line));
      }));
  return recordings;
}

}  // namespace lockstep
