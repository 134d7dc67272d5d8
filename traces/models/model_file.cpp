#include "traces/models/model_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "base/data_root.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "base/line_reader.h"
#include "reference/plan/limits.h"
#include "reference/plan/page_size.h"
#include "traces/configs/config_reader.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

bool is_folder(const fs::path& path) {
  std::error_code error;
  return fs::is_directory(path, error);
}

std::optional<fs::path> first_folder(std::initializer_list<fs::path> candidates) {
  for (const fs::path& candidate : candidates) {
    if (is_folder(candidate)) return candidate;
  }
  return std::nullopt;
}

const char* data_variable() {
  const char* value = std::getenv("LOCKSTEP_DATA");
  return value == nullptr || *value == '\0' ? nullptr : value;
}

}  // namespace

std::optional<fs::path> find_data_dir() {
  // Where it is named, it is there or nowhere: another folder's data must not replace it.
  if (const char* named = data_variable()) return first_folder({named});
  return first_folder({fs::path(LOCKSTEP_SOURCE_DIR).parent_path() / "shared", "../shared"});
}

std::string data_dir_hint() {
  if (const char* named = data_variable()) {
    return fmt::format("no folder {} ($LOCKSTEP_DATA)", named);
  }
  return "no folder ../shared next to the project, and $LOCKSTEP_DATA is not set";
}

std::optional<fs::path> find_samples_dir() {
  return first_folder({data_root() / "traces" / "samples", "traces/samples"});
}

namespace {

// Far above any model; small enough that the bytes of all its layers together fit in 63 bits.
constexpr std::int64_t kHeadsMax = 1 << 14;
constexpr std::int64_t kStateDimMax = 1 << 14;
constexpr std::int64_t kHeadSizeMax = 1 << 16;
constexpr std::int64_t kChannelsMax = 1 << 20;
constexpr std::int64_t kBlockSizeMax = 1 << 20;
constexpr std::int64_t kTokensMax = std::int64_t{1} << 31;
constexpr std::int64_t kLayersMax = 100'000;
constexpr std::size_t kModelBytesMax = std::size_t{4} << 20;

void read_figure(JsonObject& object, std::string_view key, std::int64_t max, std::int64_t& figure) {
  if (JsonValue value = object.optional(key)) figure = value.integer(1, max);
}

void read_dtype(JsonObject& object, std::string_view key, std::optional<DType>& dtype) {
  if (JsonValue value = object.optional(key))
    dtype = read_word<DType>(value, dtype_from_name, "an element type (bf16, fp32, fp8, ...)");
}

// The figures that each family needs; a key of another family is refused as unknown.
void read_states(JsonObject& object, LayerKind& kind) {
  StateFigures& figures = kind.states;
  figures.family = read_word<StateFamily>(
      object.required("states"), state_family_from_name,
      "gated_delta_net, kda, mamba2, mamba1, linear_attention or short_conv");
  const auto need = [&](std::string_view key, std::int64_t max, std::int64_t& figure) {
    figure = object.required(key).integer(1, max);
  };
  const StateFamily family = figures.family;
  const bool delta = family == StateFamily::gated_delta_net || family == StateFamily::kda;
  const bool mamba = family == StateFamily::mamba1 || family == StateFamily::mamba2;
  if (family != StateFamily::mamba1 && family != StateFamily::short_conv) {
    need("num_heads", kHeadsMax, figures.num_heads);
    need("head_dim", kStateDimMax, figures.head_dim);
  }
  if (delta) {
    need("num_k_heads", kHeadsMax, figures.num_k_heads);
    need("head_k_dim", kStateDimMax, figures.head_k_dim);
  }
  if (mamba || family == StateFamily::short_conv)
    need("intermediate_size", kChannelsMax, figures.intermediate_size);
  if (mamba) need("state_size", kStateDimMax, figures.state_size);
  if (family == StateFamily::mamba2) need("n_groups", kHeadsMax, figures.n_groups);
  if (family != StateFamily::linear_attention)
    need("conv_kernel", kStateDimMax, figures.conv_kernel);
  read_dtype(object, "conv_dtype", kind.conv_dtype);
  read_dtype(object, "ssm_dtype", kind.ssm_dtype);
  if (JsonValue tokens = object.optional("prefill_checkpoint_alignment"))
    kind.prefill_checkpoint_alignment = tokens.integer(0, kBlockSizeMax);
}

void read_rows(JsonObject& object, LayerKind& kind) {
  KVCacheSpec& spec = kind.spec;
  spec.num_kv_heads = 1;
  JsonValue heads = is_full_of_latents(spec.kind) ? object.optional("num_kv_heads")
                                                  : object.required("num_kv_heads");
  if (heads) spec.num_kv_heads = heads.integer(1, kHeadsMax);
  spec.head_size = object.required("head_size").integer(1, kHeadSizeMax);
  read_figure(object, "head_size_v", kHeadSizeMax, spec.head_size_v);
  const auto extent = [&](bool is_needed, const char* key, std::int64_t& tokens) {
    JsonValue value = is_needed ? object.required(key) : object.optional(key);
    if (value) tokens = value.integer(1, kTokensMax);
  };
  extent(is_sliding_window(spec.kind), "sliding_window", spec.sliding_window);
  extent(is_chunked(spec.kind), "attention_chunk_size", spec.attention_chunk_size);
  if (is_full_of_pairs(spec.kind)) {
    read_figure(object, "sink_len", kTokensMax, spec.sink_len);
    read_figure(object, "rswa_window", kTokensMax, spec.rswa_window);
    settle_full_attention(spec);
  }
  spec.block_size = 0;
  read_figure(object, "block_size", kBlockSizeMax, spec.block_size);
  if (JsonValue value = object.optional("compress_ratio")) {
    const auto read = tokens_per_state_from_json(value.text());
    if (!read) value.refuse(kTokensPerStateExpected);
    spec.tokens_per_state = read.value_or(TokensPerState{});
  }
  read_figure(object, "alignment", kBlockSizeMax, spec.alignment);
  if (JsonValue value = object.optional("is_draft")) kind.is_draft = value.boolean();
  if (JsonValue value = object.optional("dcp_sharded")) spec.dcp_sharded = value.boolean();
  read_figure(object, "index_topk", kTokensMax, kind.index_topk);
  if (JsonValue value = object.optional("backend")) kind.backend = value.nonempty_string();
  if (JsonValue value = object.optional("mla_rows"); value && value.boolean()) {
    spec.keys_alone = is_ring(spec.kind);
    if (is_sliding_window(spec.kind)) spec.kind = CacheKind::sliding_window_mla;
  }
  if (JsonValue value = object.optional("bounded_replay")) spec.bounded_replay = value.boolean();
  if (JsonValue value = object.optional("cache_dtype_str")) spec.cache_dtype_str = value.string();
  if (JsonValue value = object.optional("model_version")) spec.model_version = value.string();
  std::optional<DType> dtype;
  read_dtype(object, "dtype", dtype);
  kind.has_own_dtype = dtype.has_value();
  spec.dtype = dtype.value_or(DType::bf16);
  if (spec.block_size != 0 && !fills_rows(spec.tokens_per_state, spec.block_size))
    object.refuse_because(fmt::format("a block of {} tokens does not hold whole rows of {} tokens",
                                      spec.block_size, text_of(spec.tokens_per_state)));
}

LayerKind read_kind(const JsonEntry& entry) {
  LayerKind kind;
  kind.name = entry.key;
  JsonValue value = entry.value;
  JsonObject object = value.object();
  kind.spec.kind = read_word<CacheKind>(object.required("kind"), cache_kind_from_name,
                                        "a kind of cache (full, mla, sliding_window, ...)");
  if (is_state_kind(kind.spec.kind))
    read_states(object, kind);
  else
    read_rows(object, kind);
  object.finish();
  return kind;
}

void add_layer(ModelSpec& model, std::int64_t index, JsonValue name) {
  const auto kind = std::ranges::find(model.kinds, name.string(), &LayerKind::name);
  if (kind == model.kinds.end())
    name.refuse("the name of one of the layer_kinds");
  else
    model.layers.push_back({index, static_cast<std::size_t>(kind - model.kinds.begin())});
}

// "attn": a layer; ["attn", "indexer"]: a layer with several caches; {"repeat": N, "of": [...]}.
void read_layers(JsonValue value, ModelSpec& model, std::int64_t& next) {
  for (JsonValue element : value.array()) {
    if (next > kLayersMax) return element.refuse(fmt::format("at most {} layers", kLayersMax));
    if (element.is_string()) {
      add_layer(model, next++, element);
    } else if (element.is_array()) {
      for (JsonValue name : element.array()) add_layer(model, next, name);
      ++next;
    } else {
      JsonObject run = element.object();
      const auto times = run.required("repeat").integer(1, kLayersMax);
      JsonValue of = run.required("of");
      if (of.array().size() == 0) return of.refuse("at least one layer");
      for (std::int64_t i = 0; i < times && next <= kLayersMax; ++i) read_layers(of, model, next);
      run.finish();
    }
  }
}

ModelSpec read_model(JsonValue root) {
  ModelSpec model;
  JsonObject object = root.object();
  object.required("model_file").integer(1, 1);
  model.name = object.required("name").nonempty_string();
  std::optional<DType> dtype;
  read_dtype(object, "dtype", dtype);
  model.dtype = dtype.value_or(DType::bf16);
  read_figure(object, "max_model_len", kTokensMax, model.max_model_len);
  read_figure(object, "mamba_chunk_size", kBlockSizeMax, model.mamba_chunk_size);
  read_figure(object, "mtp_modules", kSpecTokensMax, model.mtp_modules);
  if (JsonValue value = object.optional("kv_cache_dtype")) model.kv_cache_dtype = value.string();
  for (const JsonEntry& entry : object.required("layer_kinds").object().entries())
    model.kinds.push_back(read_kind(entry));
  std::int64_t next = 0;
  read_layers(object.required("layers"), model, next);
  object.finish();
  return model;
}

void write_kind(JsonWriter& out, const LayerKind& kind) {
  const auto figure = [&](std::string_view key, std::int64_t value) {
    if (value != 0) out.integer(key, value);
  };
  out.key(kind.name).begin_object().string("kind", name_of(kind.spec.kind));
  if (is_state_kind(kind.spec.kind)) {
    const StateFigures& figures = kind.states;
    out.string("states", name_of(figures.family));
    figure("num_heads", figures.num_heads);
    figure("head_dim", figures.head_dim);
    figure("num_k_heads", figures.num_k_heads);
    figure("head_k_dim", figures.head_k_dim);
    figure("intermediate_size", figures.intermediate_size);
    figure("state_size", figures.state_size);
    figure("n_groups", figures.n_groups);
    figure("conv_kernel", figures.conv_kernel);
    if (kind.conv_dtype) out.string("conv_dtype", name_of(*kind.conv_dtype));
    if (kind.ssm_dtype) out.string("ssm_dtype", name_of(*kind.ssm_dtype));
    if (kind.prefill_checkpoint_alignment)
      out.integer("prefill_checkpoint_alignment", *kind.prefill_checkpoint_alignment);
  } else {
    const KVCacheSpec& spec = kind.spec;
    out.integer("num_kv_heads", spec.num_kv_heads).integer("head_size", spec.head_size);
    figure("head_size_v", spec.head_size_v);
    figure("sliding_window", spec.sliding_window);
    figure("attention_chunk_size", spec.attention_chunk_size);
    figure("sink_len", spec.sink_len);
    figure("rswa_window", spec.rswa_window);
    figure("block_size", spec.block_size);
    if (!is_one_row(spec.tokens_per_state))
      out.key("compress_ratio").raw(json_of(spec.tokens_per_state));
    figure("alignment", spec.alignment);
    if (kind.is_draft) out.boolean("is_draft", true);
    if (!spec.dcp_sharded) out.boolean("dcp_sharded", false);
    figure("index_topk", kind.index_topk);
    if (!kind.backend.empty()) out.string("backend", kind.backend);
    if (spec.keys_alone || is_mla_window(spec.kind)) out.boolean("mla_rows", true);
    if (spec.bounded_replay) out.boolean("bounded_replay", true);
    if (!spec.cache_dtype_str.empty()) out.string("cache_dtype_str", spec.cache_dtype_str);
    if (!spec.model_version.empty()) out.string("model_version", spec.model_version);
    if (kind.has_own_dtype) out.string("dtype", name_of(spec.dtype));
  }
  out.end_object();
}

std::filesystem::path catalogue() {
  const auto samples = find_samples_dir();
  return samples ? samples->parent_path() / "models" : std::filesystem::path{};
}

}  // namespace

Result<ModelSpec> model_from_text(std::string_view text, const std::string& file) {
  JsonReader reader(file);
  if (!reader.parse(text)) return reader.failure();
  ModelSpec model = read_model(reader.root());
  if (!reader.ok()) return reader.failure();
  if (model.layers.empty())
    return fail(fmt::format("{}: field `layers`: no layer with a cache", file));
  return model;
}

namespace {

// A config.json whose figures are within the bounds of model files.
Result<ModelSpec> checked_config(std::string_view text, const std::string& path) {
  LS_ASSIGN_OR_RETURN(ModelSpec model, model_from_hf_config(text, path));
  if (!model.layers.empty())
    LS_RETURN_IF_ERROR(
        model_from_text(model_to_json(model), fmt::format("{} (as a model file)", path)));
  return model;
}

}  // namespace

Result<ModelSpec> read_model_file(const std::string& path) {
  LS_ASSIGN_OR_RETURN(const auto text, read_text_file(path, kModelBytesMax));
  JsonReader reader(path);
  if (!reader.parse(text)) return reader.failure();
  if (reader.root().is_object() && !reader.root().object().has("model_file"))
    return checked_config(text, path);
  return model_from_text(text, path);
}

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  std::error_code status;
  for (const auto& entry : std::filesystem::directory_iterator(catalogue(), status))
    if (entry.path().extension() == ".json") names.push_back(entry.path().stem().string());
  std::ranges::sort(names);
  return names;
}

Result<ModelSpec> find_model(const std::string& name_or_path) {
  const std::vector<std::string> names = model_names();
  if (std::ranges::find(names, name_or_path) != names.end())
    return read_model_file((catalogue() / (name_or_path + ".json")).string());
  std::error_code status;
  if (std::filesystem::exists(name_or_path, status)) return read_model_file(name_or_path);
  return fail(fmt::format("model '{}': neither a file nor in the catalogue: {}", name_or_path,
                          fmt::join(names, ", ")));
}

std::string model_to_json(const ModelSpec& model) {
  JsonWriter out;
  out.begin_object().integer("model_file", 1).string("name", model.name);
  out.string("dtype", name_of(model.dtype)).integer("max_model_len", model.max_model_len);
  out.integer("mamba_chunk_size", model.mamba_chunk_size);
  if (model.mtp_modules > 1) out.integer("mtp_modules", model.mtp_modules);
  if (!model.kv_cache_dtype.empty()) out.string("kv_cache_dtype", model.kv_cache_dtype);
  out.key("layer_kinds").begin_object();
  for (const LayerKind& kind : model.kinds) write_kind(out, kind);
  out.end_object().key("layers").begin_array();
  std::int64_t index = 0;  // layers that keep nothing are written as empty
  for (std::size_t i = 0; i < model.layers.size(); ++index) {
    out.begin_array();
    for (; i < model.layers.size() && model.layers[i].index == index; ++i)
      out.string(model.kinds[model.layers[i].kind].name);
    out.end_array();
  }
  out.end_array().end_object();
  return out.take_line();
}

}  // namespace lockstep
