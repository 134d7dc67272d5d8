// A Hugging Face config.json read as a model: which of its keys say what the layers keep. Each
// family of architectures is one function; the keys are those of the transformers configuration
// classes.

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/json_reader.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

constexpr std::int64_t kFigureMax = 1 << 24;  // heads, sizes, tokens of any model

// Reads keys, some of which may be missing or null.
class Config {
 public:
  explicit Config(JsonObject object) : object_(object) {}

  bool has(std::string_view key) {
    JsonValue value = object_.optional(key);
    return value && !value.is_null();
  }
  std::int64_t number(std::string_view key) { return object_.required(key).integer(0, kFigureMax); }
  std::int64_t number(std::string_view key, std::int64_t otherwise) {
    return has(key) ? number(key) : otherwise;
  }
  std::string text(std::string_view key) {
    return has(key) ? std::string(object_.required(key).string()) : std::string();
  }
  bool flag(std::string_view key) { return has(key) && object_.required(key).boolean(); }
  std::vector<std::string> words(std::string_view key) {
    std::vector<std::string> list;
    if (has(key))
      for (JsonValue word : object_.required(key).array()) list.emplace_back(word.string());
    return list;
  }
  std::vector<std::int64_t> numbers(std::string_view key) {
    std::vector<std::int64_t> list;
    if (has(key))
      for (JsonValue value : object_.required(key).array())
        list.push_back(value.integer(0, kFigureMax));
    return list;
  }
  Config part(std::string_view key) { return Config(object_.required(key).object()); }
  void refuse(std::string_view reason) { object_.refuse_because(reason); }

 private:
  JsonObject object_;
};

// A model under construction: kinds by name, layers in order.
class Builder {
 public:
  explicit Builder(ModelSpec& model) : model_(model) {}

  LayerKind& kind(std::string name, CacheKind cache) {
    LayerKind& kind = model_.kinds.emplace_back();
    kind.name = std::move(name);
    kind.spec.kind = cache;
    kind.spec.block_size = 0;
    return kind;
  }
  void layer(std::initializer_list<std::string_view> kinds) {
    for (std::string_view name : kinds) {
      const auto at = std::ranges::find(model_.kinds, name, &LayerKind::name);
      model_.layers.push_back({next_, static_cast<std::size_t>(at - model_.kinds.begin())});
    }
    ++next_;
  }

 private:
  ModelSpec& model_;
  std::int64_t next_ = 0;
};

std::int64_t head_dim(Config& config) {
  if (config.has("head_dim")) return config.number("head_dim");
  const std::int64_t heads = std::max<std::int64_t>(config.number("num_attention_heads"), 1);
  return config.number("hidden_size") / heads;
}

std::int64_t kv_heads(Config& config) {
  return config.number("num_key_value_heads", config.number("num_attention_heads", 1));
}

LayerKind& attention(Config& config, Builder& builder) {
  LayerKind& kind = builder.kind("attn", CacheKind::full_attention);
  kind.spec.num_kv_heads = kv_heads(config);
  kind.spec.head_size = head_dim(config);
  return kind;
}

// Layers named one by one ("full_attention", "sliding_attention", ...), or none.
std::vector<std::string> layer_types(Config& config) {
  std::vector<std::string> types = config.words("layer_types");
  const std::int64_t count = config.number("num_hidden_layers");
  if (!types.empty()) return types;
  // Llama 4: 1 for a layer with rotary positions (in chunks), 0 for one without (full attention).
  for (std::int64_t chunked : config.numbers("no_rope_layers"))
    types.emplace_back(chunked != 0 ? "chunked_attention" : "full_attention");
  if (!types.empty()) return types;
  // Older configurations give the rhythm instead.
  const std::int64_t full = config.number("full_attention_interval", 0);
  const std::int64_t windows = config.number("sliding_window_pattern", 0);
  for (std::int64_t i = 1; i <= count; ++i) {
    if (full > 0)
      types.emplace_back(i % full == 0 ? "full_attention" : "linear_attention");
    else if (windows > 0)
      types.emplace_back(i % windows == 0 ? "full_attention" : "sliding_attention");
    else
      types.emplace_back("full_attention");
  }
  return types;
}

DType dtype_of(Config& config, std::string_view key, DType otherwise) {
  const std::string word = config.text(key);
  if (word == "float32") return DType::fp32;
  if (word == "float16") return DType::fp16;
  if (word == "bfloat16") return DType::bf16;
  return otherwise;
}

// Llama, Qwen, Mistral, Gemma, gpt-oss, Llama 4, Qwen-Next and others that list layer types.
void typed_layers(Config& config, ModelSpec& model) {
  Builder builder(model);
  attention(config, builder);
  const std::vector<std::string> types = layer_types(config);
  const auto any = [&](std::string_view type) {
    return std::ranges::find(types, type) != types.end();
  };
  if (any("sliding_attention")) {
    LayerKind& kind = builder.kind("window", CacheKind::sliding_window);
    kind.spec.num_kv_heads = kv_heads(config);
    kind.spec.head_size = head_dim(config);
    kind.spec.sliding_window = config.number("sliding_window");
  }
  if (any("chunked_attention")) {
    LayerKind& kind = builder.kind("chunk", CacheKind::chunked_local);
    kind.spec.num_kv_heads = kv_heads(config);
    kind.spec.head_size = head_dim(config);
    kind.spec.attention_chunk_size = config.number("attention_chunk_size");
  }
  if (any("linear_attention")) {
    LayerKind& kind = builder.kind("linear", CacheKind::mamba);
    kind.states = {.family = StateFamily::gated_delta_net,
                   .num_heads = config.number("linear_num_value_heads"),
                   .head_dim = config.number("linear_value_head_dim"),
                   .num_k_heads = config.number("linear_num_key_heads"),
                   .head_k_dim = config.number("linear_key_head_dim"),
                   .conv_kernel = config.number("linear_conv_kernel_dim")};
    kind.ssm_dtype = dtype_of(config, "mamba_ssm_dtype", DType::fp32);
  }
  if (any("conv")) {
    LayerKind& kind = builder.kind("conv", CacheKind::mamba);
    kind.states = {.family = StateFamily::short_conv,
                   .intermediate_size = config.number("hidden_size"),
                   .conv_kernel = config.number("conv_L_cache")};
  }
  for (const std::string& type : types) {
    if (type == "full_attention" || type == "attention")
      builder.layer({"attn"});
    else if (type == "sliding_attention")
      builder.layer({"window"});
    else if (type == "chunked_attention")
      builder.layer({"chunk"});
    else if (type == "linear_attention")
      builder.layer({"linear"});
    else if (type == "conv")
      builder.layer({"conv"});
    else
      config.refuse(fmt::format("layer_types: '{}' keeps a cache that is not known", type));
  }
}

// One window for all layers, switched on or always there (Mistral; Qwen2 with use_sliding_window).
void one_window(Config& config, ModelSpec& model) {
  const bool windowed = config.has("sliding_window") &&
                        (!config.has("use_sliding_window") || config.flag("use_sliding_window"));
  typed_layers(config, model);
  if (!windowed || config.has("layer_types")) return;
  model.kinds.front().spec.kind = CacheKind::sliding_window;
  model.kinds.front().spec.sliding_window = config.number("sliding_window");
}

// DeepSeek: one latent row a token, and the indexer's row where there is one (V3.2).
void latent_layers(Config& config, ModelSpec& model) {
  Builder builder(model);
  LayerKind& main = builder.kind("attn", CacheKind::mla);
  main.spec.num_kv_heads = 1;
  main.spec.head_size = config.number("kv_lora_rank") + config.number("qk_rope_head_dim");
  main.spec.cache_dtype_str = "auto";
  const bool indexer = config.has("index_head_dim");
  if (indexer) {
    LayerKind& rows = builder.kind("indexer", CacheKind::mla);
    // fp8 values, and an fp32 scale for each 128 of them.
    rows.spec.head_size =
        config.number("index_head_dim") + config.number("index_head_dim") / 128 * 4;
    rows.spec.dtype = DType::uint8;
    rows.has_own_dtype = true;
  }
  for (std::int64_t i = 0; i < config.number("num_hidden_layers"); ++i)
    indexer ? builder.layer({"attn", "indexer"}) : builder.layer({"attn"});
}

// Nemotron-H: M is Mamba2, * attention, - and E keep nothing.
void nemotron_layers(Config& config, ModelSpec& model) {
  Builder builder(model);
  attention(config, builder);
  LayerKind& kind = builder.kind("linear", CacheKind::mamba);
  const std::int64_t heads = config.number("mamba_num_heads");
  const std::int64_t dim = config.number("mamba_head_dim");
  kind.states = {.family = StateFamily::mamba2,
                 .num_heads = heads,
                 .head_dim = dim,
                 .intermediate_size = heads * dim,
                 .n_groups = config.number("n_groups"),
                 .state_size = config.number("ssm_state_size"),
                 .conv_kernel = config.number("conv_kernel")};
  kind.ssm_dtype = dtype_of(config, "mamba_ssm_cache_dtype", DType::fp32);
  model.mamba_chunk_size = config.number("chunk_size", 128);
  for (char layer : config.text("hybrid_override_pattern")) {
    if (layer == 'M')
      builder.layer({"linear"});
    else if (layer == '*')
      builder.layer({"attn"});
    else
      builder.layer({});
  }
}

// Jamba: attention every attn_layer_period layers, Mamba1 between.
void jamba_layers(Config& config, ModelSpec& model) {
  Builder builder(model);
  attention(config, builder);
  LayerKind& kind = builder.kind("linear", CacheKind::mamba);
  kind.states = {.family = StateFamily::mamba1,
                 .intermediate_size = config.number("mamba_expand") * config.number("hidden_size"),
                 .state_size = config.number("mamba_d_state"),
                 .conv_kernel = config.number("mamba_d_conv")};
  model.mamba_chunk_size = 2048;  // Mamba1 has no chunks; vLLM's default
  const std::int64_t period = std::max<std::int64_t>(config.number("attn_layer_period"), 1);
  const std::int64_t offset = config.number("attn_layer_offset");
  for (std::int64_t i = 0; i < config.number("num_hidden_layers"); ++i)
    i % period == offset ? builder.layer({"attn"}) : builder.layer({"linear"});
}

// Zamba2: every layer is Mamba2; a hybrid one has an attention layer beside it, twice as wide.
void zamba_layers(Config& config, ModelSpec& model) {
  Builder builder(model);
  LayerKind& shared = builder.kind("attn", CacheKind::full_attention);
  const std::int64_t heads = std::max<std::int64_t>(config.number("num_attention_heads"), 1);
  shared.spec.num_kv_heads = kv_heads(config);
  shared.spec.head_size =
      config.number("attention_head_dim", 2 * config.number("hidden_size") / heads);
  LayerKind& kind = builder.kind("linear", CacheKind::mamba);
  kind.states = {.family = StateFamily::mamba2,
                 .num_heads = config.number("n_mamba_heads"),
                 .head_dim = config.number("mamba_headdim"),
                 .intermediate_size = config.number("mamba_expand") * config.number("hidden_size"),
                 .n_groups = config.number("mamba_ngroups"),
                 .state_size = config.number("mamba_d_state"),
                 .conv_kernel = config.number("mamba_d_conv")};
  model.mamba_chunk_size = config.number("chunk_size", 256);
  for (const std::string& type : config.words("layers_block_type"))
    type == "hybrid" ? builder.layer({"attn", "linear"}) : builder.layer({"linear"});
}

// Kimi Linear: KDA states and latent rows, listed from 1.
void kimi_layers(Config& config, ModelSpec& model) {
  Builder builder(model);
  LayerKind& main = builder.kind("attn", CacheKind::mla);
  main.spec.head_size = config.number("kv_lora_rank") + config.number("qk_rope_head_dim");
  main.spec.cache_dtype_str = "auto";
  Config linear = config.part("linear_attn_config");
  LayerKind& kind = builder.kind("linear", CacheKind::mamba);
  kind.states = {.family = StateFamily::kda,
                 .num_heads = linear.number("num_heads"),
                 .head_dim = linear.number("head_dim"),
                 .num_k_heads = linear.number("num_heads"),
                 .head_k_dim = linear.number("head_dim"),
                 .conv_kernel = linear.number("short_conv_kernel_size")};
  const std::vector<std::int64_t> recurrent = linear.numbers("kda_layers");
  for (std::int64_t i = 1; i <= config.number("num_hidden_layers"); ++i)
    std::ranges::find(recurrent, i) != recurrent.end() ? builder.layer({"linear"})
                                                       : builder.layer({"attn"});
}

void read_layers(Config& config, ModelSpec& model) {
  const std::string type = config.text("model_type");
  if (type == "nemotron_h") return nemotron_layers(config, model);
  if (type == "jamba") return jamba_layers(config, model);
  if (type == "zamba2") return zamba_layers(config, model);
  if (config.has("linear_attn_config")) return kimi_layers(config, model);
  if (config.has("compress_ratios"))
    return config.refuse(
        "layers with compress_ratios keep several caches each; write a model file");
  if (config.has("kv_lora_rank")) return latent_layers(config, model);
  constexpr std::array kUnknownStates{"ssm_cfg", "mamba_d_ssm", "attn_type_list", "state_size"};
  for (const char* key : kUnknownStates)
    if (config.has(key))
      return config.refuse(
          fmt::format("model_type '{}' keeps states that are not known (key {}); write "
                      "a model file",
                      type, key));
  one_window(config, model);
}

}  // namespace

Result<ModelSpec> model_from_hf_config(std::string_view text, const std::string& file) {
  JsonReader reader(file);
  if (!reader.parse(text)) return reader.failure();
  Config whole(reader.root().object());
  Config config = whole.has("text_config") ? whole.part("text_config") : whole;
  ModelSpec model;
  model.name = whole.text("model_type");
  model.dtype = dtype_of(config, config.has("dtype") ? "dtype" : "torch_dtype", DType::bf16);
  model.max_model_len = config.number("max_position_embeddings", model.max_model_len);
  read_layers(config, model);
  if (!reader.ok()) return reader.failure();
  // What was found must be a model that a file could have said: its bounds are the file's.
  return model_from_text(model_to_json(model), fmt::format("{} (as a model file)", file));
}

}  // namespace lockstep
