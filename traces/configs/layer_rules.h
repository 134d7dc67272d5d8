// Which caches the layers of each family of architectures keep. A rule reads the keys that its
// model class reads (vllm/model_executor/models and vllm/models of 0.33.0) and adds one kind per
// cache, in the order in which the class creates them.
#pragma once

#include "traces/configs/config_reading.h"

namespace lockstep {

struct DecoderTraits {
  bool reads_types = true;         // the class passes each layer its own window, by layer_types
  bool reads_head_dim = true;      // otherwise hidden_size / num_attention_heads
  std::int64_t window_extra = 0;   // tokens that the class adds to the configured window
  bool refuses_mixes = false;      // vLLM refuses windows in some layers
  bool keeps_model_window = true;  // layers without their own window take the whole model's
};
void decoder_layers(ConfigReading& reading, const DecoderTraits& traits);

// A refusal names the key and the way out.
void refuse_layers(ConfigReading& reading, std::string_view reason);
LayerKind latent_row(ConfigReading& reading);  // kv_lora_rank and the rotary part
// Reads keys of projections that leave the size of a row unchanged.
void read_projections(ConfigReading& reading);
// Empty: the list ends before layer i.
inline std::string_view type_at(const std::vector<std::string>& types, std::int64_t i) {
  const auto at = static_cast<std::size_t>(i);
  return at < types.size() ? std::string_view(types[at]) : std::string_view();
}

// Attention with rows of K and V.
void chunked_layers(ConfigReading& reading);          // Llama 4
void alternating_layers(ConfigReading& reading);      // gpt-oss: windows on even layers
void falcon_layers(ConfigReading& reading);           // Falcon and GPTBigCode: multi_query
void chatglm_layers(ConfigReading& reading);          // multi_query_group_num
void grouped_layers(ConfigReading& reading);          // Step: num_attention_groups
void attn_config_layers(ConfigReading& reading);      // DBRX: attn_config.kv_n_heads
void block_config_layers(ConfigReading& reading);     // Nemotron NAS: block_configs
void gemma_shared_layers(ConfigReading& reading);     // Gemma 3n and 4: num_kv_shared_layers
void mimo_layers(ConfigReading& reading);             // hybrid_layer_pattern, swa_*
void listed_window_layers(ConfigReading& reading);    // PLaMo 3, Pangu: interleaved_sliding_window
void looped_layers(ConfigReading& reading);           // HRM-Text: a cache per step
void encoder_decoder_layers(ConfigReading& reading);  // Whisper: self and cross attention
void encoder_layers(ConfigReading& reading);          // nothing is kept
void unread_layers(ConfigReading& reading);           // caches that no rule derives: refused

// Rows of latent keys, with or without an indexer.
void latent_layers(ConfigReading& reading);
void expanded_latent_layers(ConfigReading& reading);  // MiniCPM3: whole keys of latent projections
void indexed_layers(ConfigReading& reading);          // DeepSeek V3.2, GLM-5
void sparse_block_layers(ConfigReading& reading);     // MiniMax-M3
void compressed_layers(ConfigReading& reading);       // DeepSeek V4

// Recurrent states.
void gated_delta_layers(ConfigReading& reading);  // Qwen3-Next and 3.5, OLMo hybrid
void kimi_layers(ConfigReading& reading);         // KDA and latent rows
void bailing_layers(ConfigReading& reading);      // linear attention or KDA, and latent rows
void short_conv_layers(ConfigReading& reading);   // LFM2
void mamba_layers(ConfigReading& reading);        // Mamba 1, Falcon Mamba
void mamba2_layers(ConfigReading& reading);
void jamba_layers(ConfigReading& reading);
void zamba_layers(ConfigReading& reading);
void falcon_h1_layers(ConfigReading& reading);
void granite_hybrid_layers(ConfigReading& reading);
void nemotron_h_layers(ConfigReading& reading);

}  // namespace lockstep
