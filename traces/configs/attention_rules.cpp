// Rules for layers that keep one cache entry per token: K and V by head, latent rows, indexers. The
// functions follow the order of config_reading.h; each names the model class whose keys it reads.
#include <fmt/format.h>

#include <algorithm>

#include "traces/configs/config_reading.h"

namespace lockstep {
namespace {

// Returns what per_layer_config of a heterogeneous configuration states for one layer. transformers
// pads the layer's number to the width of the largest one
// (integrations/heterogeneity/configuration_utils.py): "3", "03" or "003".
std::optional<ConfigPart> layer_config(ConfigPart& text, std::int64_t index) {
  auto all = text.part("per_layer_config");
  if (!all) return std::nullopt;
  for (const std::string& key :
       {fmt::format("{}", index), fmt::format("{:02}", index), fmt::format("{:03}", index)})
    if (all->has(key)) return all->part(key);
  return std::nullopt;
}

// Rows of K and V for layer `index`: the model's figures, or the layer's own where it overrides
// them.
LayerKind layer_rows(ConfigReading& reading, std::int64_t index, std::int64_t heads,
                     std::int64_t head_size) {
  if (auto own = layer_config(reading.text, index)) {
    heads = own->number("num_key_value_heads", heads);
    head_size = own->number("head_dim", head_size);
  }
  return ConfigReading::rows("attn", heads, head_size);
}

}  // namespace

void refuse_layers(ConfigReading& reading, std::string_view reason) {
  reading.text.refuse(
      fmt::format("{}; write a model file with `lockstep model CONFIG --from vllm:DIR`", reason));
}

// Reads windows in the order of precedence of the model classes: per-layer `sliding_windows`, then
// layer_types with the common window, then the window of the whole model.
void decoder_layers(ConfigReading& reading, const DecoderTraits& traits) {
  const std::int64_t count = reading.num_layers(), heads = reading.kv_heads();
  const std::int64_t size = reading.head_size(traits.reads_head_dim);
  const std::vector<std::string>& types = reading.layer_types();
  const std::vector<std::int64_t> windows = reading.text.numbers("sliding_windows");
  const std::int64_t of_model = traits.keeps_model_window ? reading.model_window() : 0;
  // Read also where no layer has a window, so that the key does not count as unread.
  reading.window();
  for (const std::int64_t type : reading.text.numbers("attn_type_list"))
    if (type != 1)
      return refuse_layers(reading, fmt::format("attn_type_list: {} is not attention", type));
  // vLLM 0.33.0 asserts for Qwen2 that max_window_layers equals num_hidden_layers (qwen2.py).
  if (traits.refuses_mixes && std::ranges::find(types, "sliding_attention") != types.end() &&
      std::ranges::find(types, "full_attention") != types.end())
    return refuse_layers(reading, fmt::format("layer_types or max_window_layers: vLLM serves {} "
                                              "with windows in all layers or in none",
                                              reading.architecture));
  for (std::int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    std::int64_t tokens = of_model;
    if (at < types.size()) {
      const std::string& type = types[at];
      if (type != "full_attention" && type != "sliding_attention")
        return refuse_layers(
            reading, fmt::format("layer_types: '{}' of layer {} is unknown for architecture {}",
                                 type, i, reading.architecture));
      if (traits.reads_types && type == "sliding_attention") {
        tokens = at < windows.size() ? windows[at] : reading.window();
        if (tokens > 0) tokens += traits.window_extra;
      }
    }
    reading.add(i, ConfigReading::windowed(layer_rows(reading, i, heads, size), tokens));
  }
}

// Llama 4 (vLLM 0.33.0, model_executor/models/llama4.py): layers with rotary positions attend
// within chunks, every fourth layer without them attends to all tokens. Without
// attention_chunk_size all layers are full.
void chunked_layers(ConfigReading& reading) {
  const std::int64_t tokens = reading.text.number("attention_chunk_size", 0);
  const std::vector<std::string>& types = reading.layer_types();
  const LayerKind full = ConfigReading::rows("attn", reading.kv_heads(), reading.head_size());
  const LayerKind chunk = ConfigReading::chunked(full, tokens);
  // The class reads no_rope_layers; layer_types are derived from them.
  const std::vector<std::int64_t> rope = reading.text.numbers("no_rope_layers");
  for (std::int64_t i = 0; i < reading.num_layers(); ++i) {
    const auto at = static_cast<std::size_t>(i);
    const bool is_chunked =
        at < rope.size() ? rope[at] != 0 : type_at(types, i) == "chunked_attention";
    reading.add(i, is_chunked && tokens > 0 ? chunk : full);
  }
}

// gpt-oss (gpt_oss.py): even layers have the window, odd ones are full.
void alternating_layers(ConfigReading& reading) {
  const LayerKind full = ConfigReading::rows("attn", reading.kv_heads(), reading.head_size());
  const LayerKind window = ConfigReading::windowed(full, reading.window());
  reading.layer_types();  // the class does not follow them
  for (std::int64_t i = 0; i < reading.num_layers(); ++i)
    reading.add(i, i % 2 == 0 ? window : full);
}

// Falcon (falcon.py): num_kv_heads counts only with new_decoder_architecture; otherwise multi_query
// means one KV head for all query heads. GPTBigCode has the same switch.
void falcon_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  std::int64_t heads = text.flag("multi_query", true) ? 1 : reading.heads();
  if (text.flag("new_decoder_architecture")) heads = reading.kv_heads();
  // Both names are valid and may be ignored above: read them, so that they do not count as unread.
  text.number("num_kv_heads");
  text.number("num_key_value_heads");
  LayerKind full = ConfigReading::rows("attn", heads, reading.head_size(false));
  // Falcon's layers are created without the cache's configuration.
  full.has_own_dtype = reading.architecture == "FalconForCausalLM";
  if (full.has_own_dtype) full.spec.dtype = reading.model().dtype;
  for (std::int64_t i = 0; i < reading.num_layers(); ++i) reading.add(i, full);
}

// ChatGLM (chatglm.py): multi_query_group_num KV heads with multi_query_attention, else one per
// query head.
void chatglm_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  const std::int64_t groups = text.number("multi_query_group_num", 1);
  const std::int64_t heads = text.flag("multi_query_attention") ? groups : reading.heads();
  text.number("kv_channels");  // the class divides hidden_size instead
  const LayerKind full = ConfigReading::rows("attn", heads, reading.head_size(false));
  for (std::int64_t i = 0; i < reading.num_layers(); ++i) reading.add(i, full);
}

// Step (step1.py, step3_text.py, step3p5.py): num_attention_groups are the KV heads. Step 3 shares
// one KV head among all query heads; only Step 3.5 has windows, by layer_types.
void grouped_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  const bool is_step3 = reading.architecture == "Step3TextForCausalLM";
  const std::int64_t heads =
      is_step3 ? 1 : text.number("num_attention_groups", text.number("num_key_value_heads", 1));
  text.number("num_attention_groups");
  text.number("num_key_value_heads");
  const std::int64_t size = reading.head_size(reading.architecture != "Step1ForCausalLM");
  const LayerKind full = ConfigReading::rows("attn", std::max<std::int64_t>(heads, 1), size);
  const LayerKind window = ConfigReading::windowed(full, reading.window());
  const std::vector<std::string>& types = reading.layer_types();
  const bool is_typed = reading.architecture == "Step3p5ForCausalLM";
  for (std::int64_t i = 0; i < reading.num_layers(); ++i)
    reading.add(i, is_typed && type_at(types, i) == "sliding_attention" ? window : full);
  text.part("attention_other_setting");  // query heads of windows
}

// DBRX (dbrx.py): KV heads are in attn_config.kv_n_heads, one by default.
void attn_config_layers(ConfigReading& reading) {
  auto attention = reading.text.part("attn_config");
  const std::int64_t heads = attention ? attention->number("kv_n_heads", 1) : 1;
  const LayerKind full = ConfigReading::rows("attn", heads, reading.head_size(false));
  for (std::int64_t i = 0; i < reading.num_layers(); ++i) reading.add(i, full);
}

// Nemotron NAS (nemotron_nas.py): each block states its query heads per KV head; a block whose
// attention is a no-op or a linear layer keeps no cache but counts as a layer.
void block_config_layers(ConfigReading& reading) {
  const std::int64_t size = reading.head_size(), heads = reading.heads();
  std::int64_t i = 0;
  for (ConfigPart& block : reading.text.parts("block_configs")) {
    auto attention = block.part("attention");
    if (!attention) return refuse_layers(reading, "block_configs: a block without `attention`");
    if (!attention->flag("no_op") && !attention->flag("replace_with_linear"))
      reading.add(
          i, ConfigReading::rows(
                 "attn", heads / std::max<std::int64_t>(attention->need("n_heads_in_group"), 1),
                 size));
    ++i;
  }
}

// Gemma 3n and 4 (gemma3n.py, gemma4.py): the last num_kv_shared_layers layers read the cache of an
// earlier layer and keep none. Gemma 4's full layers have head_dim global_head_dim (512) and, with
// attention_k_eq_v, num_global_key_value_heads.
void gemma_shared_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  const bool is_gemma4 = text.type().starts_with("gemma4") || text.type().starts_with("diffusion");
  const std::int64_t count = reading.num_layers(), heads = reading.kv_heads();
  const std::int64_t size = reading.head_size();
  LayerKind full = ConfigReading::rows("attn", heads, size);
  const std::int64_t global_heads = text.number("num_global_key_value_heads", 0);
  const std::int64_t global_size = text.number("global_head_dim", is_gemma4 ? 512 : size);
  if (is_gemma4) {
    full.spec.head_size = global_size;
    if (global_heads > 0 && text.flag("attention_k_eq_v", true))
      full.spec.num_kv_heads = global_heads;
  }
  std::int64_t tokens = reading.window();
  // Attention in both directions reaches half of the window to each side.
  if (text.has_text("use_bidirectional_attention") &&
      text.text("use_bidirectional_attention") == "all")
    tokens = tokens / 2 + 1;
  const LayerKind window =
      ConfigReading::windowed(ConfigReading::rows("attn", heads, size), tokens);
  const std::vector<std::string>& types = reading.layer_types();
  const std::int64_t owned = count - text.number("num_kv_shared_layers", 0);
  const bool is_explicit = text.part("per_layer_config").has_value();
  for (std::int64_t i = 0; i < count; ++i) {
    if (owned > 0 && i >= owned) {  // reads the cache of the last owned layer of its type
      std::int64_t read = owned - 1;
      while (read > 0 && type_at(types, read) != type_at(types, i)) --read;
      auto& first = reading.model().first_shared_layer;
      first = std::min(first.value_or(read), read);
      continue;
    }
    const bool is_window = type_at(types, i) == "sliding_attention";
    if (!is_explicit) {
      reading.add(i, is_window ? window : full);
      continue;
    }
    const LayerKind own = layer_rows(reading, i, heads, size);
    reading.add(i, is_window ? ConfigReading::windowed(own, tokens) : own);
  }
}

// MiMo-V2 (mimo_v2.py): hybrid_layer_pattern has 1 for windows, whose heads and sizes of K and V
// have keys of their own (swa_*). vLLM deletes attention_chunk_size before it reads the file
// (model_arch_config_convertor.py, _strip_mimo_v2_attention_chunk_size()).
void mimo_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  text.number("attention_chunk_size");  // vLLM drops it
  LayerKind full =
      ConfigReading::rows("attn", text.need("num_key_value_heads"), reading.head_size());
  full.spec.head_size_v = text.number("v_head_dim", 0);
  LayerKind window =
      ConfigReading::rows("attn", text.need("swa_num_key_value_heads"), text.need("swa_head_dim"));
  window.spec.head_size_v = text.number("swa_v_head_dim", 0);
  std::int64_t tokens = text.number("sliding_window_size", 0);
  if (tokens == 0) tokens = reading.window();
  reading.window();
  window = ConfigReading::windowed(window, tokens);
  const std::vector<std::int64_t> pattern = text.numbers("hybrid_layer_pattern");
  const std::vector<std::string>& types = reading.layer_types();
  if (pattern.empty() && types.empty())
    return refuse_layers(reading, "found no key `hybrid_layer_pattern`");
  for (std::int64_t i = 0; i < reading.num_layers(); ++i) {
    const auto at = static_cast<std::size_t>(i);
    const bool is_window =
        at < pattern.size() ? pattern[at] == 1 : type_at(types, i) == "sliding_attention";
    reading.add(i, is_window ? window : full);
  }
}

// PLaMo 3 and Pangu (plamo3.py, openpangu.py): a window, or a list of windows that repeats over the
// layers; null: a full layer. vLLM renames a list under `sliding_window` to
// `interleaved_sliding_window`.
void listed_window_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  const LayerKind full = ConfigReading::rows("attn", reading.kv_heads(), reading.head_size());
  const std::string_view key =
      text.has("interleaved_sliding_window") ? "interleaved_sliding_window" : "sliding_window";
  std::vector<std::int64_t> listed;
  if (text.has_list(key)) listed = text.numbers(key);
  const std::int64_t single = text.has_list(key) ? 0 : text.number(key, 0);
  reading.layer_types();
  for (std::int64_t i = 0; i < reading.num_layers(); ++i)
    reading.add(i, ConfigReading::windowed(
                       full, listed.empty() ? single
                                            : listed[static_cast<std::size_t>(i) % listed.size()]));
}

// HRM-Text (hrm_text.py): each of H_cycles rounds runs the lower stack L_cycles times and the upper
// one once, and every run keeps its own cache. H_cycles 2, L_cycles 2, 4 layers per stack:
// 2 * (2 + 1) * 4 = 24 caches.
void looped_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  const LayerKind full = ConfigReading::rows("attn", reading.heads(), reading.head_size());
  text.number("num_key_value_heads");
  const std::int64_t high = text.need("H_cycles"), low = text.need("L_cycles");
  const std::int64_t layers = text.need("num_layers_per_stack");
  text.number("num_hidden_layers");
  for (std::int64_t i = 0; i < high * (low + 1) * layers; ++i) reading.add(i, full);
}

// Whisper (whisper.py): each decoder layer keeps rows of its own tokens and rows of the encoder's
// output.
void encoder_decoder_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  const std::int64_t heads = text.need("decoder_attention_heads");
  const LayerKind self =
      ConfigReading::rows("attn", heads, text.need("d_model") / std::max<std::int64_t>(heads, 1));
  const LayerKind cross = ConfigReading::cross(self);
  for (std::int64_t i = 0; i < text.need("decoder_layers"); ++i) {
    reading.add(i, self);
    reading.add(i, cross);
  }
}

// Encoders recompute everything in each pass. model_from_hf_config() returns a model without
// layers.
void encoder_layers(ConfigReading&) {}

// Known architectures whose caches depend on more than the file. The refusal is better than the
// plain decoder of an unknown name, which would omit caches.
void unread_layers(ConfigReading& reading) {
  refuse_layers(
      reading,
      fmt::format(
          "architectures: {} keeps caches that its config.json does not determine for this reader",
          reading.architecture));
}

namespace {

// Of an indexer's fp8 keys: one fp32 scale per 128 elements
// (vllm/model_executor/models/deepseek_v2.py, class Indexer).
constexpr std::int64_t kScaledElements = 128, kScaleBytes = 4;

// Keys of an indexer, one row per token in bytes: 128 elements and one scale are 132 bytes.
LayerKind indexer_row(std::int64_t elements) {
  LayerKind kind =
      ConfigReading::rows("indexer", 1, elements + elements / kScaledElements * kScaleBytes);
  kind = ConfigReading::single_rows(kind);
  kind.spec.dtype = DType::uint8;
  kind.has_own_dtype = true;
  return kind;
}

}  // namespace

LayerKind latent_row(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  return ConfigReading::latent(text.need("kv_lora_rank") + text.number("qk_rope_head_dim", 0));
}

void read_projections(ConfigReading& reading) {
  for (const char* key :
       {"qk_nope_head_dim", "v_head_dim", "num_key_value_heads", "head_dim", "num_attention_heads"})
    reading.text.number(key);
}

// MiniCPM3 (minicpm3.py) expands the latent projection before it stores K and V: one K row of
// qk_nope_head_dim + qk_rope_head_dim elements per query head, V padded to the same size.
void expanded_latent_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  const std::int64_t size = text.need("qk_nope_head_dim") + text.need("qk_rope_head_dim");
  read_projections(reading);
  text.number("kv_lora_rank");
  const LayerKind full = ConfigReading::rows("attn", reading.heads(), size);
  for (std::int64_t i = 0; i < reading.num_layers(); ++i) reading.add(i, full);
}

void latent_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  if (!reading.uses_latent_rows()) {
    const bool has_parts =
        text.number("qk_nope_head_dim", 0) != 0 || text.number("qk_rope_head_dim", 0) != 0;
    if (has_parts) return expanded_latent_layers(reading);
    return decoder_layers(reading, {.reads_types = false, .reads_head_dim = false});
  }
  // vLLM's class serves a file with index_topk as V3.2 (deepseek_v2.py, is_v32).
  if (text.has("index_topk")) return indexed_layers(reading);
  const LayerKind row = latent_row(reading);
  read_projections(reading);
  // LongCat: two attention layers in each decoder layer.
  const bool is_double = reading.architecture.starts_with("LongcatFlash");
  const std::int64_t count =
      is_double ? text.number("num_layers", text.number("num_hidden_layers", 0) / 2)
                : reading.num_layers();
  if (is_double) reading.model().num_hidden_layers = count;
  for (std::int64_t i = 0; i < count; ++i) {
    reading.add(i, row);
    if (is_double) reading.add(i, row);
  }
}

// DeepSeek V3.2 and GLM-5 (deepseek_v2.py): a latent row per layer, and the keys of an indexer
// where the layer selects its own tokens. A layer that shares the selection of an earlier one has
// no indexer: index_topk_pattern has "S" for it, or index_topk_freq and index_skip_topk_offset give
// the period.
void indexed_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  LayerKind row = latent_row(reading);
  row.index_topk = text.number("index_topk", 2048);
  const LayerKind indexer = indexer_row(text.number("index_head_dim", 128));
  read_projections(reading);
  text.number("index_n_heads");
  text.words("layer_types");
  const std::int64_t period = std::max<std::int64_t>(text.number("index_topk_freq", 1), 1);
  const std::int64_t offset = text.number("index_skip_topk_offset", 2);
  std::string pattern;
  std::vector<std::string> listed;
  if (text.has_text("index_topk_pattern"))
    pattern = text.text("index_topk_pattern");
  else
    listed = text.words("index_topk_pattern");
  text.words("indexer_types");
  for (std::int64_t i = 0; i < reading.num_layers(); ++i) {
    const auto at = static_cast<std::size_t>(i);
    // Example: offset 2, freq 4: layers 0, 1, 5, 9, ... have an indexer.
    bool shares = std::max<std::int64_t>(i - offset + 1, 0) % period != 0;
    if (!pattern.empty()) shares = at < pattern.size() && pattern[at] == 'S';
    if (!listed.empty()) shares = at < listed.size() && listed[at].starts_with("S");
    if (!shares) reading.add(i, indexer);
    reading.add(i, row);
  }
}

// MiniMax-M3 (vllm/models/minimax_m3): sparse layers choose blocks by the keys of an indexer, which
// keeps bf16 rows of sparse_index_dim elements. Both caches carry model_version "minimax_m3".
void sparse_block_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  const LayerKind full = ConfigReading::rows("attn", reading.kv_heads(), reading.head_size());
  LayerKind sparse = full;
  sparse.name = "sparse";
  sparse.spec.model_version = "minimax_m3";
  auto config = text.part("sparse_attention_config");
  const std::int64_t elements =
      config ? config->number("sparse_index_dim", 128) : text.number("index_head_dim", 128);
  LayerKind indexer = ConfigReading::rows("indexer", 1, elements);
  indexer = ConfigReading::single_rows(indexer);
  indexer.spec.model_version = "minimax_m3";
  indexer.has_own_dtype = true;
  indexer.spec.dtype = DType::bf16;
  for (const char* key : {"index_n_heads", "index_block_size", "index_topk_blocks",
                          "index_local_blocks", "index_head_dim"})
    text.number(key);
  // Without the key the class makes all layers but the first three sparse; it reads no layer_types.
  constexpr std::int64_t kDenseLayers = 3;
  std::vector<std::int64_t> every;
  if (config) every = config->numbers("sparse_attention_freq");
  text.words("layer_types");
  if (!config)
    reading.assume("no sparse_attention_config: all layers but the first three are sparse");
  for (std::int64_t i = 0; i < reading.num_layers(); ++i) {
    const auto at = static_cast<std::size_t>(i);
    const bool is_sparse = config ? at < every.size() && every[at] != 0 : i >= kDenseLayers;
    if (is_sparse) reading.add(i, indexer);
    reading.add(i, is_sparse ? sparse : full);
  }
}

// DeepSeek V4 (vllm/models/deepseek_v4/attention.py, compressor.py). Each layer has a window of
// single tokens ("swa"). compress_ratios adds, per layer:
//
//   0    nothing more
//   4    rows for 4 tokens ("c4"), the window of keys not yet compressed ("c4_state"), and an
//        indexer with rows for 4 tokens that has such a window too ("indexer_state")
//   128  rows for 128 tokens ("c128") and its window ("c128_state")
//
// A compressor's state row holds KV and scores in fp32. At ratio 4 neighbouring groups overlap,
// which doubles both the row (2 * 2 * size) and the window (2 * 4 tokens); at 128 nothing overlaps
// (2 * size, 128 tokens). Its blocks of 4 and 8 tokens are vLLM's constants, chosen so that all
// pages have one size. 576 is the alignment of fp8_ds_mla pages, in bytes.
void compressed_layers(ConfigReading& reading) {
  ConfigPart& text = reading.text;
  constexpr std::int64_t kBlock = 256, kAlignment = 576;
  const std::int64_t size = reading.head_size(), tokens = text.number("sliding_window", 128);
  const std::int64_t index_size = text.number("index_head_dim", 128);
  const auto window = [&](std::string name, std::int64_t elements, std::int64_t extent,
                          std::int64_t block, DType dtype) {
    LayerKind kind = ConfigReading::windowed(ConfigReading::rows("window", 1, elements), extent);
    kind.name = std::move(name);
    kind.spec.kind = CacheKind::sliding_window_mla;
    kind.spec.block_size = block;
    kind.spec.alignment = kAlignment;
    kind.spec.dtype = dtype;
    kind.has_own_dtype = true;
    return kind;
  };
  LayerKind swa = window("swa", size, tokens, 64, DType::uint8);
  swa.spec.cache_dtype_str = "fp8_ds_mla";
  swa.spec.model_version = "deepseek_v4";
  const auto compressed = [&](std::string name, std::int64_t ratio) {
    LayerKind kind = ConfigReading::latent(size);
    kind.name = std::move(name);
    kind.spec.cache_dtype_str = swa.spec.cache_dtype_str;
    kind.spec.model_version = swa.spec.model_version;
    kind.spec.block_size = kBlock;
    kind.spec.tokens_per_state = {ratio};
    kind.spec.alignment = kAlignment;
    kind.spec.dtype = DType::uint8;
    kind.has_own_dtype = true;
    return kind;
  };
  LayerKind indexer = indexer_row(index_size);
  indexer.spec.tokens_per_state = {4};
  indexer.spec.block_size = kBlock;
  indexer.spec.alignment = kAlignment;
  std::vector<std::int64_t> ratios = text.numbers("compress_ratios");
  auto rates = text.part("compress_rates");
  if (ratios.empty())
    for (const std::string& type : text.words("layer_types"))
      ratios.push_back(rates ? rates->number(type, 0) : 0);
  for (const char* key : {"index_n_heads", "index_topk", "num_key_value_heads", "qk_rope_head_dim",
                          "o_lora_rank", "num_nextn_predict_layers"})
    text.number(key);
  for (std::int64_t i = 0; i < reading.num_layers(); ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (at >= ratios.size())
      return refuse_layers(reading, fmt::format("compress_ratios has no entry for layer {}", i));
    const std::int64_t ratio = ratios[at];
    if (ratio != 0 && ratio != 4 && ratio != 128)
      return refuse_layers(
          reading,
          fmt::format("compress_ratios: {} of layer {} is neither 0, 4 nor 128", ratio, i));
    if (ratio == 4) {
      reading.add(i, indexer);
      reading.add(i, window("indexer_state", 4 * index_size, 8, 4, DType::fp32));
    }
    reading.add(i, swa);
    if (ratio == 0) continue;
    reading.add(i, compressed(ratio == 4 ? "c4" : "c128", ratio));
    reading.add(i, ratio == 4 ? window("c4_state", 4 * size, 8, 4, DType::fp32)
                              : window("c128_state", 2 * size, 128, 8, DType::fp32));
  }
}

}  // namespace lockstep
