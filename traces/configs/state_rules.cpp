#include <fmt/format.h>

#include <algorithm>

#include "traces/configs/config_reading.h"

namespace lockstep {
namespace {

// Layers that are either attention or states, by type; anything else is refused.
void mixed_layers(ConfigReading& reading, const LayerKind& attention, const LayerKind& states) {
  const std::vector<std::string>& types = reading.layer_types();
  if (types.empty()) return refuse_layers(reading, "found no key `layer_types`");
  for (std::int64_t i = 0; i < reading.num_layers(); ++i) {
    const std::string_view type = type_at(types, i);
    const bool is_dense =
        type == "indexed_attention" && reading.architecture == "Qwen4ExpForCausalLM";
    if (type == "full_attention" || is_dense)
      reading.add(i, attention);
    else if (type == "linear_attention" || type == "conv")
      reading.add(i, states);
    else
      return refuse_layers(
          reading, fmt::format("layer_types: '{}' of layer {} is unknown for architecture {}", type,
                               i, reading.architecture));
  }
}

struct Mamba2Keys {
  const char *heads, *head_dim, *groups, *state_size, *conv_kernel, *expand, *chunk;
};
constexpr Mamba2Keys kPlainKeys = {"num_heads",   "head_dim", "n_groups",  "state_size",
                                   "conv_kernel", "expand",   "chunk_size"};
constexpr Mamba2Keys kPrefixedKeys = {"mamba_n_heads",   "mamba_d_head", "mamba_n_groups",
                                      "mamba_d_state",   "mamba_d_conv", "mamba_expand",
                                      "mamba_chunk_size"};
constexpr Mamba2Keys kZambaKeys = {"n_mamba_heads", "mamba_headdim", "mamba_ngroups",
                                   "mamba_d_state", "mamba_d_conv",  "mamba_expand",
                                   "chunk_size"};

LayerKind mamba2_states(ConfigReading& reading, const Mamba2Keys& keys, bool derives_head_dim) {
  ConfigPart& text = reading.text;
  const std::int64_t wide = text.number(keys.expand, 2) * text.need("hidden_size");
  const std::int64_t channels = text.number("mamba_d_ssm").value_or(wide);
  const std::int64_t heads = std::max<std::int64_t>(text.need(keys.heads), 1);
  const std::int64_t given = text.number(keys.head_dim, 0);
  reading.model().mamba_chunk_size = text.number(keys.chunk, 256);
  return ConfigReading::states(
      "linear", {.family = StateFamily::mamba2,
                 .num_heads = heads,
                 .head_dim = derives_head_dim || given == 0 ? channels / heads : given,
                 .intermediate_size = channels,
                 .n_groups = text.need(keys.groups),
                 .state_size = text.need(keys.state_size),
                 .conv_kernel = text.need(keys.conv_kernel)});
}

LayerKind mamba1_states(ConfigReading& reading, std::int64_t channels, const char* state_size,
                        const char* conv_kernel) {
  reading.model().mamba_chunk_size = 2048;  // Mamba 1 has no chunks; vLLM's default
  return ConfigReading::states("linear", {.family = StateFamily::mamba1,
                                          .intermediate_size = channels,
                                          .state_size = reading.text.need(state_size),
                                          .conv_kernel = reading.text.need(conv_kernel)});
}

LayerKind kda_states(std::int64_t heads, std::int64_t head_dim, std::int64_t conv_kernel) {
  LayerKind kind = ConfigReading::states("linear", {.family = StateFamily::kda,
                                                    .num_heads = heads,
                                                    .head_dim = head_dim,
                                                    .num_k_heads = heads,
                                                    .head_k_dim = head_dim,
                                                    .conv_kernel = conv_kernel});
  return kind;
}

}  // namespace

void gated_delta_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  const bool is_olmo = reading.architecture == "OlmoHybridForCausalLM";
  const std::int64_t heads = reading.heads();
  // OLMo derives its figures from the attention heads.
  const std::int64_t key_dim = is_olmo ? reading.text.need("hidden_size") / heads * 3 / 4 : 0;
  const auto figure = [&](const char* key, std::int64_t otherwise) {
    return is_olmo ? text.number(key, otherwise) : text.need(key);
  };
  const std::int64_t key_heads = figure("linear_num_key_heads", heads);
  const std::int64_t head_k_dim = figure("linear_key_head_dim", key_dim);
  LayerKind states =
      ConfigReading::states("linear", {.family = StateFamily::gated_delta_net,
                                       .num_heads = figure("linear_num_value_heads", heads),
                                       .head_dim = figure("linear_value_head_dim", 2 * head_k_dim),
                                       .num_k_heads = key_heads,
                                       .head_k_dim = head_k_dim,
                                       .conv_kernel = text.need("linear_conv_kernel_dim")});
  // Only the classes of Qwen3.5 read the dtype of states.
  const std::string dtype = text.text("mamba_ssm_dtype");
  if (reading.architecture.starts_with("Qwen3_5")) states.ssm_dtype = config_dtype(dtype);
  if (is_olmo) states.prefill_checkpoint_alignment = 0;  // its mixer exports no states
  if (reading.architecture == "Qwen4ExpForCausalLM" &&
      (text.number("indexer_n_heads", 0) != 0 || !text.numbers("ple_layer_ids").empty()))
    return refuse_layers(reading, "indexer_n_heads, ple_layer_ids: their caches are not derived");
  mixed_layers(reading,
               ConfigReading::rows("attn", reading.kv_heads(), reading.head_size(!is_olmo)),
               states);
}

void kimi_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  const LayerKind row = latent_row(reading);
  read_projections(reading);
  auto linear = text.part("linear_attn_config");
  if (!linear) return refuse_layers(reading, "found no key `linear_attn_config`");
  const LayerKind states = kda_states(linear->need("num_heads"), linear->need("head_dim"),
                                      linear->need("short_conv_kernel_size"));
  const std::vector<std::int64_t> recurrent = linear->numbers("kda_layers");  // from 1
  text.words("layer_types");
  for (std::int64_t i = 0; i < reading.num_layers(); ++i)
    reading.add(i, std::ranges::find(recurrent, i + 1) != recurrent.end() ? states : row);
}

void bailing_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  const bool has_kda = reading.architecture.starts_with("BailingMoeV3");
  const std::int64_t rope = text.number("qk_rope_head_dim", 64), heads = reading.heads();
  const LayerKind row = ConfigReading::latent(text.number("kv_lora_rank", 512) + rope);
  const std::int64_t period = std::max<std::int64_t>(text.number("layer_group_size", 1), 1);
  // The configuration class sets head_dim to the rotary part, whatever the file has.
  text.number("head_dim");
  if (text.number("head_dim", rope) != rope)
    reading.assume(
        fmt::format("states of {} elements per head, as the configuration class sets head_dim to "
                    "qk_rope_head_dim",
                    rope));
  for (const char* key : {"qk_nope_head_dim", "v_head_dim", "num_key_value_heads"})
    text.number(key);
  text.words("layer_types");
  LayerKind states = ConfigReading::states(
      "linear", {.family = StateFamily::linear_attention, .num_heads = heads, .head_dim = rope});
  if (has_kda) states = kda_states(heads, rope, text.number("short_conv_kernel_size", 4));
  const std::int64_t count = reading.num_layers();
  for (std::int64_t i = 0; i < count; ++i) {
    const bool is_row = (i + 1) % period == 0 || (has_kda && i >= count / period * period);
    reading.add(i, is_row ? row : states);
  }
}

void short_conv_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  const LayerKind full = ConfigReading::rows("attn", reading.kv_heads(), reading.head_size(false));
  const std::int64_t hidden = text.need("hidden_size");
  const LayerKind states =
      ConfigReading::states("conv", {.family = StateFamily::short_conv,
                                     .intermediate_size = text.number("conv_dim", hidden),
                                     .conv_kernel = text.need("conv_L_cache")});
  const bool is_listed = text.has_list("full_attn_idxs");
  const std::vector<std::int64_t> listed = text.numbers("full_attn_idxs");
  text.number("num_heads");  // older names of the attention heads
  if (text.has_list("layer_types")) return mixed_layers(reading, full, states);
  if (!is_listed) reading.assume("no layer_types and no full_attn_idxs: every layer is attention");
  for (std::int64_t i = 0; i < reading.num_layers(); ++i)
    reading.add(i, !is_listed || std::ranges::find(listed, i) != listed.end() ? full : states);
}

void mamba_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  const std::int64_t channels = text.number("intermediate_size")
                                    .value_or(text.number("expand", 2) * text.need("hidden_size"));
  const LayerKind states = mamba1_states(reading, channels, "state_size", "conv_kernel");
  text.number("expand");
  for (std::int64_t i = 0; i < reading.num_layers(); ++i) reading.add(i, states);
}

void mamba2_layers(ConfigReading& reading) {
  const LayerKind states = mamba2_states(reading, kPlainKeys, false);
  for (std::int64_t i = 0; i < reading.num_layers(); ++i) reading.add(i, states);
}

void jamba_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  const LayerKind full = ConfigReading::rows("attn", reading.kv_heads(), reading.head_size(false));
  const LayerKind states =
      mamba1_states(reading, text.number("mamba_expand", 2) * text.need("hidden_size"),
                    "mamba_d_state", "mamba_d_conv");
  const std::int64_t period = std::max<std::int64_t>(text.number("attn_layer_period", 8), 1);
  const std::int64_t offset = text.number("attn_layer_offset", 4);
  text.words("layer_types");
  for (std::int64_t i = 0; i < reading.num_layers(); ++i)
    reading.add(i, i % period == offset ? full : states);
}

void zamba_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  const std::int64_t heads = reading.heads();
  // The configuration class derives both sizes of heads, whatever the file has.
  const LayerKind shared = ConfigReading::rows("attn", heads, 2 * text.need("hidden_size") / heads);
  for (const char* key : {"attention_head_dim", "head_dim", "num_key_value_heads", "kv_channels",
                          "num_mem_blocks", "attention_hidden_size"})
    text.number(key);
  text.numbers("hybrid_layer_ids");
  const LayerKind states = mamba2_states(reading, kZambaKeys, true);
  std::vector<std::string> types = text.words("layers_block_type");
  if (types.empty()) types = text.words("layer_types");
  if (types.empty()) return refuse_layers(reading, "found no key `layers_block_type`");
  for (std::size_t i = 0; i < types.size(); ++i) {
    if (types[i] == "hybrid") reading.add(static_cast<std::int64_t>(i), shared);
    reading.add(static_cast<std::int64_t>(i), states);
  }
}

void falcon_h1_layers(ConfigReading& reading) {
  const LayerKind full = ConfigReading::rows("attn", reading.kv_heads(), reading.head_size());
  const LayerKind states = mamba2_states(reading, kPrefixedKeys, false);
  reading.text.words("layers_block_type");
  for (std::int64_t i = 0; i < reading.num_layers(); ++i) {
    reading.add(i, full);
    reading.add(i, states);
  }
}

void granite_hybrid_layers(ConfigReading& reading) {
  mixed_layers(reading, ConfigReading::rows("attn", reading.kv_heads(), reading.head_size(false)),
               mamba2_states(reading, kPrefixedKeys, false));
}

void nemotron_h_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  const LayerKind full = ConfigReading::rows("attn", reading.kv_heads(), reading.head_size());
  const std::int64_t heads = text.need("mamba_num_heads"), dim = text.need("mamba_head_dim");
  const auto either = [&](const char* older, const char* key) {
    return text.number(older).value_or(text.need(key));
  };
  LayerKind states =
      ConfigReading::states("linear", {.family = StateFamily::mamba2,
                                       .num_heads = heads,
                                       .head_dim = dim,
                                       .intermediate_size = heads * dim,
                                       .n_groups = either("mamba_n_groups", "n_groups"),
                                       .state_size = text.need("ssm_state_size"),
                                       .conv_kernel = either("mamba_d_conv", "conv_kernel")});
  const std::string dtype = text.text("mamba_ssm_cache_dtype");
  states.ssm_dtype = dtype.empty() ? DType::fp32 : config_dtype(dtype);
  reading.model().mamba_chunk_size =
      text.number("mamba_chunk_size").value_or(text.number("chunk_size", 128));
  text.number("expand");
  text.number("mamba_expand");
  text.number("sliding_window");
  std::string pattern = text.text("hybrid_override_pattern");
  const std::vector<std::string> types = text.words("layers_block_type");
  if (!types.empty() || text.has_list("layer_types")) {
    pattern.clear();
    for (const std::string& type : reading.layer_types())
      pattern += type == "linear_attention" ? 'M' : type == "full_attention" ? '*' : '-';
  }
  if (pattern.empty()) return refuse_layers(reading, "found no key `hybrid_override_pattern`");
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] == 'M') reading.add(static_cast<std::int64_t>(i), states);
    if (pattern[i] == '*') reading.add(static_cast<std::int64_t>(i), full);
  }
}

}  // namespace lockstep
