// Model files as JSON, the catalogue, and the folders of samples and data.
#include "traces/models/model_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <system_error>

#include "base/data_root.h"
#include "base/json_fields.h"
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

// The first candidate that is a folder; absent: none is.
std::optional<fs::path> first_folder(std::initializer_list<fs::path> candidates) {
  for (const fs::path& candidate : candidates)
    if (is_folder(candidate)) return candidate;
  return std::nullopt;
}

// nullptr: not set, or empty.
const char* data_variable() {
  const char* value = std::getenv("LOCKSTEP_DATA");
  return value == nullptr || *value == '\0' ? nullptr : value;
}

}  // namespace

std::optional<fs::path> find_data_dir() {
  // A named folder is used or nothing is: data of another folder must not replace it unnoticed.
  if (const char* named = data_variable()) return first_folder({named});
  return first_folder({fs::path(LOCKSTEP_SOURCE_DIR).parent_path() / "shared", "../shared"});
}

std::string data_dir_hint() {
  if (const char* named = data_variable())
    return fmt::format("no folder {} ($LOCKSTEP_DATA)", named);
  return "no folder ../shared next to the project, and $LOCKSTEP_DATA is not set";
}

std::optional<fs::path> find_samples_dir() {
  return first_folder({data_root() / "traces" / "samples", "traces/samples"});
}

namespace {

// Bounds far above any model, and small enough that the bytes of all its layers together fit into
// 63 bits. kTokensMax is that of model files; reference/plan/limits.h has a lower one for runs.
constexpr std::int64_t kHeadsMax = 1 << 14;
constexpr std::int64_t kStateDimMax = 1 << 14;
constexpr std::int64_t kHeadSizeMax = 1 << 16;
constexpr std::int64_t kChannelsMax = 1 << 20;
constexpr std::int64_t kBlockSizeMax = 1 << 20;
constexpr std::int64_t kTokensMax = std::int64_t{1} << 31;
constexpr std::int64_t kLayersMax = 100'000;
constexpr std::size_t kModelBytesMax = std::size_t{4} << 20;

constexpr form::Named<DType> kDType{dtype_from_name, "an element type (bf16, fp32, fp8, ...)"};
constexpr form::Between kHeads{1, kHeadsMax}, kStateDim{1, kStateDimMax}, kTokens{1, kTokensMax};

// `compress_ratio`: 4 (tokens per row) or "1/4" (rows per token).
struct PerState {
  static void read(JsonValue value, TokensPerState& tokens) {
    const auto read = tokens_per_state_from_json(value.text());
    if (!read) value.refuse(kTokensPerStateExpected);
    tokens = read.value_or(TokensPerState{});
  }
  static void write(JsonWriter& out, const TokensPerState& tokens) { out.raw(json_of(tokens)); }
};

// The figures that each family of states needs, in the notation of reference/plan/model_spec.h. A
// figure of another family is not read, and is therefore refused as unknown.
template <class Io>
void state_fields(Io& io, FieldsOf<Io, LayerKind>& kind) {
  auto& figures = kind.states;
  io.required("states", figures.family,
              form::Named<StateFamily>{
                  from_name<StateFamily>,
                  "gated_delta_net, kda, mamba2, mamba1, linear_attention or short_conv"});
  const StateFamily family = figures.family;
  const bool delta = family == StateFamily::gated_delta_net || family == StateFamily::kda;
  const bool mamba = family == StateFamily::mamba1 || family == StateFamily::mamba2;
  const bool convolves = family == StateFamily::short_conv;
  // Every figure that a family has is required: a default would be a guess about the model.
  const auto figure = [&](bool has, std::string_view key, auto& member, const form::Between& in) {
    if (Io::kReads && !has) return;
    io.required_if(true, key, member, in);
  };
  figure(family != StateFamily::mamba1 && !convolves, "num_heads", figures.num_heads, kHeads);
  figure(family != StateFamily::mamba1 && !convolves, "head_dim", figures.head_dim, kStateDim);
  figure(delta, "num_k_heads", figures.num_k_heads, kHeads);
  figure(delta, "head_k_dim", figures.head_k_dim, kStateDim);
  figure(mamba || convolves, "intermediate_size", figures.intermediate_size,
         form::Between{1, kChannelsMax});
  figure(mamba, "state_size", figures.state_size, kStateDim);
  figure(family == StateFamily::mamba2, "n_groups", figures.n_groups, kHeads);
  // Of its norm.
  if (Io::kReads && family == StateFamily::linear_attention)
    io.optional("n_groups", figures.n_groups, kHeads);
  figure(family != StateFamily::linear_attention, "conv_kernel", figures.conv_kernel, kStateDim);
  io.optional("conv_dtype", kind.conv_dtype, kDType);
  io.optional("ssm_dtype", kind.ssm_dtype, kDType);
  io.optional("prefill_checkpoint_alignment", kind.prefill_checkpoint_alignment,
              form::Between{0, kBlockSizeMax});
}

// The keys of layers with rows per token. block_size 0 leaves the block to the planner; MLA has one
// head unless the file states more.
template <class Io>
void row_fields(Io& io, FieldsOf<Io, LayerKind>& kind) {
  constexpr form::Between kBytes{1, kBlockSizeMax};
  auto& spec = kind.spec;
  if constexpr (Io::kReads) {
    spec.num_kv_heads = 1;
    spec.block_size = 0;
    if (is_full_of_latents(spec.kind))
      io.optional("num_kv_heads", spec.num_kv_heads, kHeads);
    else
      io.required("num_kv_heads", spec.num_kv_heads, kHeads);
  } else {
    io.out.integer("num_kv_heads", spec.num_kv_heads);
  }
  io.required("head_size", spec.head_size, form::Between{1, kHeadSizeMax});
  io.optional("head_size_v", spec.head_size_v, form::Between{1, kHeadSizeMax});
  io.required_if(is_sliding_window(spec.kind), "sliding_window", spec.sliding_window, kTokens);
  io.required_if(is_chunked(spec.kind), "attention_chunk_size", spec.attention_chunk_size, kTokens);
  if (!Io::kReads || is_full_of_pairs(spec.kind)) {
    io.optional("sink_len", spec.sink_len, kTokens);
    io.optional("rswa_window", spec.rswa_window, kTokens);
    if constexpr (Io::kReads) settle_full_attention(spec);
  }
  io.optional("block_size", spec.block_size, kBytes);
  io.unless(TokensPerState{}, "compress_ratio", spec.tokens_per_state, PerState{});
  io.optional("alignment", spec.alignment, kBytes);
  io.optional("is_draft", kind.is_draft);
  io.unless(true, "dcp_sharded", spec.dcp_sharded);
  io.optional("index_topk", kind.index_topk, kTokens);
  io.optional("backend", kind.backend);
  // `mla_rows` turns a window into a window of MLA rows, and a ring into one of keys without
  // values. It has no key of its own in the model, hence the local.
  bool has_mla_rows = spec.keys_alone || is_mla_window(spec.kind);
  io.optional("mla_rows", has_mla_rows);
  if constexpr (Io::kReads)
    if (has_mla_rows) {
      spec.keys_alone = is_ring(spec.kind);
      if (is_sliding_window(spec.kind)) spec.kind = CacheKind::sliding_window_mla;
    }
  io.optional("bounded_replay", spec.bounded_replay);
  io.optional("cache_dtype_str", spec.cache_dtype_str, form::AnyText{});
  io.optional("model_version", spec.model_version, form::AnyText{});
  // A layer's own dtype takes precedence over --dtype, as for indexers, whose rows are bytes.
  std::optional<DType> dtype;
  if (kind.has_own_dtype) dtype = spec.dtype;
  io.optional("dtype", dtype, kDType);
  if constexpr (Io::kReads) {
    kind.has_own_dtype = dtype.has_value();
    spec.dtype = dtype.value_or(DType::bf16);
    // Example: rows of 128 tokens do not fill a block of 64 tokens.
    if (spec.block_size != 0 && !fills_rows(spec.tokens_per_state, spec.block_size))
      io.object.refuse_because(
          fmt::format("a block of {} tokens does not hold whole entries of {} tokens",
                      spec.block_size, text_of(spec.tokens_per_state)));
  }
}

}  // namespace

template <class Io>
void fields(Io& io, FieldsOf<Io, LayerKind>& kind) {
  io.required("kind", kind.spec.kind,
              form::Named<CacheKind>{cache_kind_from_name,
                                     "a kind of cache (full, mla, sliding_window, ...)"});
  if (is_state_kind(kind.spec.kind))
    state_fields(io, kind);
  else
    row_fields(io, kind);
}

namespace {

// Appends a cache of layer `index`; `name` is one of layer_kinds.
void add_layer(ModelSpec& model, std::int64_t index, JsonValue name) {
  const auto kind = std::ranges::find(model.kinds, name.string(), &LayerKind::name);
  if (kind == model.kinds.end())
    name.refuse("the name of one of the layer_kinds");
  else
    model.layers.push_back({index, static_cast<std::size_t>(kind - model.kinds.begin())});
}

// Reads "attn": a layer; ["attn", "indexer"]: a layer with several caches; []: a layer without any;
// {"repeat": N, "of": [...]}. `next` is the index of the next layer. Repetitions nest, so their
// product is bounded by the number of layers read, not by N.
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

// Figures of the whole model. Those that model_to_json() always writes have defaults when absent.
template <class Io>
void size_fields(Io& io, FieldsOf<Io, ModelSpec>& model) {
  io.defaulted("dtype", model.dtype, kDType);
  io.defaulted("max_model_len", model.max_model_len, kTokens);
  io.defaulted("mamba_chunk_size", model.mamba_chunk_size, form::Between{1, kBlockSizeMax});
  io.unless(std::int64_t{1}, "mtp_modules", model.mtp_modules, form::Between{1, kSpecTokensMax});
  io.optional("kv_cache_dtype", model.kv_cache_dtype, form::AnyText{});
  io.unless(std::int64_t{0}, "num_hidden_layers", model.num_hidden_layers,
            form::Between{1, kLayersMax});
  io.unless(std::int64_t{0}, "num_attention_heads", model.num_attention_heads, kHeads);
  io.unless(true, "supports_pp", model.supports_pp);
  io.optional("first_shared_layer", model.first_shared_layer, form::Between{0, kLayersMax});
}

ModelSpec read_model(JsonValue root) {
  ModelSpec model;
  JsonObject object = root.object();
  object.required("model_file").integer(1, 1);
  model.name = object.required("name").nonempty_string();
  FieldReader io(object);
  size_fields(io, model);
  for (const JsonEntry& entry : object.required("layer_kinds").object().entries()) {
    LayerKind& kind = model.kinds.emplace_back();
    kind.name = entry.key;
    read_fields(entry.value, kind);
  }
  std::int64_t next = 0;
  read_layers(object.required("layers"), model, next);
  object.finish();
  return model;
}

// The folder traces/models next to traces/samples; empty: no samples.
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
  if (model.layers.empty()) return fail("{}: field `layers`: no layer with a cache", file);
  return model;
}

Result<ModelSpec> read_model_file(const std::string& path) {
  LS_ASSIGN_OR_RETURN(const auto text, read_text_file(path, kModelBytesMax));
  const std::string quoted = with_quoted_literals(text);
  JsonReader reader(path);
  if (!reader.parse(quoted)) return reader.failure();
  if (!reader.root().is_object() || reader.root().object().has("model_file"))
    return model_from_text(text, path);
  LS_ASSIGN_OR_RETURN(ModelSpec model, model_from_hf_config(text, path));
  // The bounds of model files hold for it too: it is written and read as one. A model without
  // layers (an encoder) is returned as it is.
  if (!model.layers.empty())
    LS_RETURN_IF_ERROR(
        model_from_text(model_to_json(model), fmt::format("{} (as a model file)", path)));
  return model;
}

// A missing folder gives an empty list: directory_iterator is then at its end.
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
  return fail("model '{}': neither a file nor in the catalogue: {}", name_or_path,
              fmt::join(names, ", "));
}

// The layers are written by index, one by one, without repetitions. A class may create them in
// another order (Zamba 2), for which a model file has no key.
std::string model_to_json(const ModelSpec& model) {
  return object_line([&](JsonWriter& out) {
    out.integer("model_file", 1).string("name", model.name);
    FieldWriter io(out);
    size_fields(io, model);
    out.key("layer_kinds").begin_object();
    for (const LayerKind& kind : model.kinds) write_fields(out.key(kind.name), kind);
    out.end_object().key("layers").begin_array();
    auto layers = model.layers;
    std::ranges::stable_sort(layers, {}, &ModelSpec::Layer::index);
    std::int64_t index = 0;  // layers that keep nothing are written as empty
    for (std::size_t i = 0; i < layers.size(); ++index) {
      out.begin_array();
      for (; i < layers.size() && layers[i].index == index; ++i)
        out.string(model.kinds[layers[i].kind].name);
      out.end_array();
    }
    out.end_array();
  });
}

}  // namespace lockstep
