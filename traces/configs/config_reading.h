// A config.json while its layers are derived: the parts of the file, the model under construction,
// and what rules of several families share.
//
// Invariants
// (1) model().kinds has no two entries that differ in the name alone, and no two of one name; every
//     layer names its kind by index.
// (2) model().assumptions only grows: one line for each value that no key of the file says.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_reader.h"
#include "reference/plan/model_spec.h"

namespace lockstep {

// One object of a Hugging Face config.json, with what its configuration class adds: defaults of
// keys that the file leaves out, and the names under which the class stores them.
//
// Invariants
// (1) A key that the file has wins, null included: null means that the class derives the value.
// (2) Every key that a rule reads is remembered, by all copies of the part; unread_keys() lists the
//     others.
//
// Not here: config_classes.inc, a table kept by hand of the configuration classes of transformers
// 5.20.2 and vLLM 0.33.0; tests/configs/config_classes_test.py compares it with transformers.

struct ConfigClass {
  std::string_view architecture;  // of a file without one; empty: none
  std::string_view text_path;  // keys that lead to the text part, joined by points; empty: itself
  std::string_view text_type;  // its model_type where the file has none
  std::map<std::string_view, std::string_view> defaults;
  std::map<std::string_view, std::string_view> aliases;  // of a key, the name that files use
};
// Words of a table, separated by spaces and line ends.
std::vector<std::string_view> words_of(std::string_view table);

// nullptr: a class that neither package has.
const ConfigClass* find_config_class(std::string_view model_type);

class ConfigPart {
 public:
  ConfigPart(JsonObject object, std::string_view model_type);

  const std::string& type() const { return type_; }
  // The same part; of that type where the file gives it none.
  ConfigPart with_type(std::string_view model_type) const;
  ConfigPart as_type(std::string_view model_type) const;
  bool is_same(const ConfigPart& other) const { return read_ == other.read_; }
  const ConfigClass* config_class() const { return class_; }
  // True if the file has the key, or an alias, with a value.
  bool has(std::string_view key);
  std::optional<std::int64_t> number(std::string_view key);  // absent: neither file nor class
  std::int64_t number(std::string_view key, std::int64_t otherwise) {
    return number(key).value_or(otherwise);
  }
  std::int64_t need(std::string_view key);  // refuses the file without it
  std::string text(std::string_view key);
  bool flag(std::string_view key, bool otherwise = false);
  std::vector<std::string> words(std::string_view key);
  std::vector<std::int64_t> numbers(std::string_view key);  // null: -1
  bool has_list(std::string_view key);
  std::optional<ConfigPart> part(std::string_view key);
  std::vector<ConfigPart> parts(std::string_view key);  // a list of objects
  void refuse(std::string_view reason) { object_.refuse_because(reason); }
  // Keys with a value that no rule read; null, false, 0 and empty ones are left out.
  std::vector<std::string> unread_keys();

 private:
  JsonValue value(std::string_view key);
  JsonValue plain_alias(std::string_view key);
  std::optional<std::string_view> class_default(std::string_view key);

  JsonObject object_;
  std::string type_;
  const ConfigClass* class_ = nullptr;
  std::shared_ptr<std::set<std::string, std::less<>>> read_;  // shared by copies of the part
};

class ConfigReading {
 public:
  ConfigReading(ConfigPart file, ConfigPart decoder, std::string name, ModelSpec& model)
      : whole(std::move(file)),
        text(std::move(decoder)),
        architecture(std::move(name)),
        model_(model) {}

  ConfigPart whole, text;  // the same part where the file has no text part
  bool has_text_part = false;
  std::string architecture;

  ModelSpec& model() { return model_; }
  std::int64_t num_layers() { return text.need("num_hidden_layers"); }
  // Adds a cache of layer `index`. Kinds that are equal except for the name become one.
  void add(std::int64_t index, const LayerKind& kind);
  void assume(std::string what) { model_.assumptions.push_back(std::move(what)); }

  std::int64_t heads() { return std::max<std::int64_t>(text.need("num_attention_heads"), 1); }
  std::int64_t kv_heads();
  // `own`: the class reads head_dim; others divide the hidden size by the heads.
  std::int64_t head_size(bool own = true);
  // Tokens of the windows; 0: no window.
  std::int64_t window();
  // One type per layer: as the file lists them, or by the rule of the configuration class. Empty:
  // the class has no types.
  const std::vector<std::string>& layer_types();
  // The window of layers for which the model class passes none: that of the whole model, unless
  // layer types mix.
  std::int64_t model_window();
  bool is_causal();
  bool uses_latent_rows();

  static LayerKind rows(std::string name, std::int64_t heads, std::int64_t head_size);
  static LayerKind windowed(LayerKind kind, std::int64_t tokens);  // 0: the kind itself
  static LayerKind chunked(LayerKind kind, std::int64_t tokens);
  static LayerKind cross(LayerKind kind);
  static LayerKind single_rows(LayerKind kind);  // one row per token instead of K and V
  static LayerKind latent(std::int64_t head_size);
  static LayerKind states(std::string name, const StateFigures& figures);

 private:
  std::vector<std::string> derived_types();

  ModelSpec& model_;
  std::optional<std::vector<std::string>> types_;
};

std::optional<DType> config_dtype(std::string_view name);  // float32, bfloat16, ...

// Which caches the layers of each family of architectures keep. A rule reads the keys that its
// model class reads (vllm/model_executor/models and vllm/models of 0.33.0) and adds one kind per
// cache, in the order in which the class creates them.

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
