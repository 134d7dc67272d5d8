// Rules for layers with recurrent states: which layers keep states, and the figures that determine
// the shapes. Attention layers of these hybrids are rows of K and V or latent rows, as in
// attention_rules.cpp.
#include <fmt/format.h>

#include <algorithm>

#include "traces/configs/config_reading.h"

namespace lockstep {
namespace {

// Adds `attention` or `states` for each layer by its type; any other type is refused. A "conv"
// layer keeps a state as well.
void mixed_layers(ConfigReading& reading, const LayerKind& attention, const LayerKind& states) {
  const std::vector<std::string>& types = reading.layer_types();
  if (types.empty()) return refuse_layers(reading, "found no key `layer_types`");
  for (std::int64_t i = 0; i < reading.num_layers(); ++i) {
    const std::string_view type = type_at(types, i);
    // Qwen4 without an indexer serves its sparse layers densely; gated_delta_layers() refuses the
    // others.
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

// Names of one family's keys for the figures of Mamba 2.
struct Mamba2Keys {
  const char *heads, *head_dim, *groups, *state_size, *conv_kernel, *expand;
};
constexpr Mamba2Keys kPlainKeys = {"num_heads",  "head_dim",    "n_groups",
                                   "state_size", "conv_kernel", "expand"};
constexpr Mamba2Keys kPrefixedKeys = {"mamba_n_heads", "mamba_d_head", "mamba_n_groups",
                                      "mamba_d_state", "mamba_d_conv", "mamba_expand"};
constexpr Mamba2Keys kZambaKeys = {"n_mamba_heads", "mamba_headdim", "mamba_ngroups",
                                   "mamba_d_state", "mamba_d_conv",  "mamba_expand"};

// States of a Mamba 2 mixer. `derives_head_dim`: the class ignores head_dim and divides the
// channels by the heads. mamba_d_ssm (Falcon-H1) replaces expand * hidden_size as the number of
// channels.
LayerKind mamba2_states(ConfigReading& reading, const Mamba2Keys& keys, bool derives_head_dim) {
  ConfigPart& text = reading.text;
  const std::int64_t wide = text.number(keys.expand, 2) * text.need("hidden_size");
  const std::int64_t channels = text.number("mamba_d_ssm").value_or(wide);
  const std::int64_t heads = std::max<std::int64_t>(text.need(keys.heads), 1);
  const bool is_auto = text.has_text(keys.head_dim) && text.text(keys.head_dim) == "auto";
  const std::int64_t given = is_auto ? 0 : text.number(keys.head_dim, 0);
  return ConfigReading::states(
      "linear", {.family = StateFamily::mamba2,
                 .num_heads = heads,
                 .head_dim = derives_head_dim || given == 0 ? channels / heads : given,
                 .intermediate_size = channels,
                 .n_groups = text.need(keys.groups),
                 .state_size = text.need(keys.state_size),
                 .conv_kernel = text.need(keys.conv_kernel)});
}

// States of a Mamba 1 mixer of `channels` channels.
LayerKind mamba1_states(ConfigReading& reading, std::int64_t channels, const char* state_size,
                        const char* conv_kernel) {
  return ConfigReading::states("linear", {.family = StateFamily::mamba1,
                                          .intermediate_size = channels,
                                          .state_size = reading.text.need(state_size),
                                          .conv_kernel = reading.text.need(conv_kernel)});
}

// Kimi delta attention: queries, keys and values have the same heads, so one head_dim describes
// all.
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

// Qwen3-Next, Qwen3.5, Qwen4 and OLMo hybrid. Figures come from linear_* keys, which are required
// except for OLMo, whose configuration class derives them: head_k_dim is 3/4 of an attention head,
// head_dim twice that.
void gated_delta_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  const bool is_olmo = reading.architecture == "OlmoHybridForCausalLM";
  const std::int64_t heads = reading.heads();
  // OLMo derives its figures from the attention heads.
  const std::int64_t key_dim = is_olmo ? reading.text.need("hidden_size") / heads * 3 / 4 : 0;
  // OLMo's keys are optional; all others are refused without them.
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
               ConfigReading::rows("attn", reading.kv_heads(), reading.head_size(!is_olmo, true)),
               states);
}

// Kimi Linear: linear_attn_config.kda_layers lists the recurrent layers, counted from 1
// (vllm/transformers_utils/configs/kimi_linear.py, is_kda_layer()); all others are MLA.
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

// Bailing MoE 2.5 and 3 (bailing_moe_linear.py, is_linear_layer(); bailing_moe_v3.py,
// _is_kda_layer()): the last layer of each group of layer_group_size is MLA. Version 3 also makes
// the layers after the last whole group MLA: 20 layers in groups of 6: layers 5, 11, 17, 18 and 19.
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
  if (!has_kda) states.states.n_groups = text.number("group_norm_size", 1);
  if (has_kda) states = kda_states(heads, rope, text.number("short_conv_kernel_size", 4));
  const std::int64_t count = reading.num_layers();
  for (std::int64_t i = 0; i < count; ++i) {
    const bool is_row = (i + 1) % period == 0 || (has_kda && i >= count / period * period);
    reading.add(i, is_row ? row : states);
  }
}

// LFM2 (lfm2.py): a short convolution with a state of conv_L_cache - 1 columns, or attention. Older
// files list the attention layers in full_attn_idxs, newer ones the types of all layers.
void short_conv_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  const LayerKind full =
      ConfigReading::rows("attn", reading.kv_heads(), reading.head_size(false, true));
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

// Mamba 1 and Falcon Mamba: every layer keeps states. intermediate_size takes precedence over
// expand * hidden_size.
void mamba_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  const std::int64_t channels = text.number("intermediate_size")
                                    .value_or(text.number("expand", 2) * text.need("hidden_size"));
  const LayerKind states = mamba1_states(reading, channels, "state_size", "conv_kernel");
  // Ignored where the file has intermediate_size.
  text.number("expand");
  for (std::int64_t i = 0; i < reading.num_layers(); ++i) reading.add(i, states);
}

// Mamba 2: every layer keeps states.
void mamba2_layers(ConfigReading& reading) {
  const LayerKind states = mamba2_states(reading, kPlainKeys, false);
  for (std::int64_t i = 0; i < reading.num_layers(); ++i) reading.add(i, states);
}

// Jamba (jamba.py): one attention layer per attn_layer_period, at attn_layer_offset; Mamba 1
// elsewhere.
void jamba_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  const LayerKind full =
      ConfigReading::rows("attn", reading.kv_heads(), reading.head_size(false, true));
  const LayerKind states =
      mamba1_states(reading, text.number("mamba_expand", 2) * text.need("hidden_size"),
                    "mamba_d_state", "mamba_d_conv");
  const std::int64_t period = std::max<std::int64_t>(text.number("attn_layer_period", 8), 1);
  const std::int64_t offset = text.number("attn_layer_offset", 4);
  text.words("layer_types");
  for (std::int64_t i = 0; i < reading.num_layers(); ++i)
    reading.add(i, i % period == offset ? full : states);
}

// Zamba 2 (zamba2.py): every layer is Mamba 2, and a "hybrid" layer runs a shared attention block
// first. The weights are shared, the caches are not. The block reads the hidden state joined with
// the embedding, so its heads are 2 * hidden_size / heads wide.
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
  // The class creates the blocks of all layers first, and groups follow in that order.
  for (std::size_t i = 0; i < types.size(); ++i)
    if (types[i] == "hybrid") reading.add(static_cast<std::int64_t>(i), shared);
  for (std::size_t i = 0; i < types.size(); ++i) reading.add(static_cast<std::int64_t>(i), states);
}

// Falcon-H1 (falcon_h1.py): attention and Mamba 2 run in parallel in every layer, so each layer has
// two caches.
void falcon_h1_layers(ConfigReading& reading) {
  const LayerKind full = ConfigReading::rows("attn", reading.kv_heads(), reading.head_size());
  const LayerKind states = mamba2_states(reading, kPrefixedKeys, false);
  reading.text.words("layers_block_type");
  for (std::int64_t i = 0; i < reading.num_layers(); ++i) {
    reading.add(i, full);
    reading.add(i, states);
  }
}

// Granite 4 hybrid: attention or Mamba 2 by layer type, with head_dim derived from the hidden size.
void granite_hybrid_layers(ConfigReading& reading) {
  mixed_layers(reading,
               ConfigReading::rows("attn", reading.kv_heads(), reading.head_size(false, true)),
               mamba2_states(reading, kPrefixedKeys, false));
}

// Nemotron-H (nemotron_h.py): hybrid_override_pattern has one letter per layer: M for Mamba 2, *
// for attention, - for an MLP and E for experts, which keep nothing. Newer files list layer types
// instead. States are fp32 unless mamba_ssm_cache_dtype names another dtype.
void nemotron_h_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  const LayerKind full = ConfigReading::rows("attn", reading.kv_heads(), reading.head_size());
  const std::int64_t heads = text.need("mamba_num_heads"), dim = text.need("mamba_head_dim");
  // Takes the name of older files where present. need() runs in either case; the class's defaults
  // keep it from refusing such a file.
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
