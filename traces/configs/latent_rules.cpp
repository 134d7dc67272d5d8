#include <fmt/format.h>

#include <algorithm>

#include "traces/configs/layer_rules.h"

namespace lockstep {
namespace {

constexpr std::int64_t kScaledElements = 128, kScaleBytes = 4;  // of an indexer's fp8 keys

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
  if (text.has("index_topk")) return indexed_layers(reading);
  const LayerKind row = latent_row(reading);
  read_projections(reading);
  // LongCat: two attention layers in each decoder layer.
  const bool is_double = reading.architecture.starts_with("LongcatFlash");
  const std::int64_t count =
      is_double ? 2 * text.number("num_layers", text.number("num_hidden_layers", 0) / 2)
                : reading.num_layers();
  if (is_double) text.number("num_hidden_layers");
  for (std::int64_t i = 0; i < count; ++i) reading.add(i, row);
}

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
  const std::string pattern = text.text("index_topk_pattern");
  const std::vector<std::string> listed = text.words("index_topk_pattern");
  text.words("indexer_types");
  for (std::int64_t i = 0; i < reading.num_layers(); ++i) {
    const auto at = static_cast<std::size_t>(i);
    bool shares = std::max<std::int64_t>(i - offset + 1, 0) % period != 0;
    if (!pattern.empty()) shares = at < pattern.size() && pattern[at] == 'S';
    if (!listed.empty()) shares = at < listed.size() && listed[at].starts_with("S");
    if (!shares) reading.add(i, indexer);
    reading.add(i, row);
  }
}

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

// DeepSeek V4: a window of every token, rows for 4 or 128 tokens, the window of keys that are not
// yet compressed, and for rows of 4 tokens an indexer that has such a window itself.
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
      return refuse_layers(reading, fmt::format("compress_ratios: {} of layer {} is neither 0, 4 "
                                                "nor 128",
                                                ratio, i));
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
