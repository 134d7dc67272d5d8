// A config.json while its layers are derived: the parts of the file, the model under construction,
// and the code that rules of several families share. It answers which caches vLLM 0.33.0 would
// create for the file, without importing vLLM or reading weights.
//
// Invariants
// (1) model().kinds has no two entries that differ in the name only, and no two of one name; every
//     layer names its kind by index.
// (2) model().assumptions only grows: one line for each value that no key of the file states.
//
// Not checked here: whether the resulting model fits a GPU, and whether the checkpoint's weights
// match the file.
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

// What a configuration class adds to a file of its model_type.
//
// config_classes.inc is the table of the classes of transformers 5.20.2 and vLLM 0.33.0, maintained
// by hand; tests/configs/config_classes_test.py compares it with transformers.
struct ConfigClass {
  // Architecture of a file that lists none; empty: such a file has no rule.
  std::string_view architecture;
  // Keys that lead to the text part, joined by points ("thinker_config.text_config"); empty: the
  // file itself is the text part.
  std::string_view text_path;
  // model_type of a text part that states none.
  std::string_view text_type;
  // Values of keys that the file omits, as text: "16", "true". layer_types has a pattern of letters
  // instead ("SSSF"); "?": the class computes the types by a rule that the table cannot express.
  std::map<std::string_view, std::string_view> defaults;
  // From a key to the name that files use for it: num_hidden_layers to n_layer.
  std::map<std::string_view, std::string_view> aliases;
};
// Splits a table into its words, which spaces and line ends separate. The views point into `table`.
std::vector<std::string_view> words_of(std::string_view table);

// Returns the class of a model_type; nullptr: neither package has one. The pointer is valid
// forever.
const ConfigClass* find_config_class(std::string_view model_type);

// One object of a Hugging Face config.json, with the additions of its configuration class: defaults
// of keys that the file omits, and the names under which the class stores them.
//
// Invariants
// (1) A key that the file has wins, null included: null means that the class derives the value.
// (2) Every key that a rule reads is recorded, and all copies of the part share the record;
//     unread_keys() lists the others. A rule that ignores a key on purpose therefore still reads
//     it.
class ConfigPart {
 public:
  // An empty model_type, or one that no class has, gives a part without defaults; plain_alias()
  // then covers the oldest names.
  ConfigPart(JsonObject object, std::string_view model_type);

  const std::string& type() const { return type_; }
  // Returns the same part, with `model_type` only if the file states no type. Reads of either part
  // count for both.
  ConfigPart with_type(std::string_view model_type) const;
  // Returns the same part with that type in any case: its defaults and aliases replace the present
  // ones.
  ConfigPart as_type(std::string_view model_type) const;
  // True if both are copies of one part, whatever their types.
  bool is_same(const ConfigPart& other) const { return read_ == other.read_; }
  const ConfigClass* config_class() const { return class_; }
  // True if the file has the key, or an alias, with a value other than null. Defaults of the class
  // do not count. Reads the key.
  bool has(std::string_view key);
  // The integer of the file, or of the class. Absent: neither has the key, or the file has null.
  // Another type and a number outside 0 to 2^24 are refused.
  std::optional<std::int64_t> number(std::string_view key);
  std::int64_t number(std::string_view key, std::int64_t otherwise) {
    return number(key).value_or(otherwise);
  }
  // The same, required: refuses the file without the key, and returns 1 then, so that divisions by
  // the result stay defined until the error is reported.
  std::int64_t need(std::string_view key);
  // A factor of the file, with or without a point; `otherwise`: the file has none or null. Refused
  // outside 0 to 2^20.
  double decimal(std::string_view key, double otherwise);
  // Empty: neither the file nor the class has a text there. Another type is refused.
  std::string text(std::string_view key);
  bool has_text(std::string_view key);
  // The file's flag, else the class's, else `otherwise`; null in the file gives `otherwise` without
  // asking the class.
  bool flag(std::string_view key, bool otherwise = false);
  // The texts of a list; empty: no list. Another type, and an element that is not a text, is
  // refused.
  std::vector<std::string> words(std::string_view key);
  // The numbers of a list, flags as 0 and 1, null as -1; empty: no list.
  std::vector<std::int64_t> numbers(std::string_view key);
  bool has_list(std::string_view key);
  // The object at the key, with its own model_type; absent: the key is missing or null. Another
  // type is refused.
  std::optional<ConfigPart> part(std::string_view key);
  std::vector<ConfigPart> parts(std::string_view key);  // a list of objects
  std::vector<ConfigPart> nested_parts();               // the objects under any key
  void refuse(std::string_view reason) { object_.refuse_because(reason); }
  // Lists the keys with a value that no rule read, in file order. Keys whose value is null, false,
  // 0 or empty are omitted: they switch a feature off.
  std::vector<std::string> unread_keys();

 private:
  // Records the read and returns the value under the key or its alias; false: the file has neither.
  JsonValue value(std::string_view key);
  JsonValue plain_alias(std::string_view key);
  JsonArray list(std::string_view key);
  static void refuse_unless_off(JsonValue found, std::string_view expected);
  std::optional<std::string_view> class_default(std::string_view key);

  JsonObject object_;
  std::string type_;
  const ConfigClass* class_ = nullptr;
  std::shared_ptr<std::set<std::string, std::less<>>> read_;  // shared by copies of the part
};

// The state of one derivation: the whole file, its text part, and the model that the rule fills. A
// rule reads parts, adds layers in the order in which the model class creates them, and refuses the
// file or records an assumption where a value is not certain.
class ConfigReading {
 public:
  ConfigReading(ConfigPart file, ConfigPart decoder, std::string name, ModelSpec& model)
      : whole(std::move(file)),
        text(std::move(decoder)),
        architecture(std::move(name)),
        model_(model) {}

  // The file and its decoder; the same part where the file has no text part.
  ConfigPart whole, text;
  bool has_text_part = false;
  // The architecture that chose the rule: the text part's where the file is multimodal.
  std::string architecture;

  ModelSpec& model() { return model_; }
  std::int64_t num_layers() { return text.need("num_hidden_layers"); }
  // Adds a cache of layer `index`. Equal kinds, names aside, are merged; a different kind of a used
  // name gets a number: "window", "window2". A layer with several caches is added several times.
  void add(std::int64_t index, const LayerKind& kind);
  void assume(std::string what) { model_.assumptions.push_back(std::move(what)); }

  std::int64_t heads();
  std::int64_t kv_heads();
  // Elements of a head. `own`: the model class reads head_dim; other classes divide the hidden size
  // by the heads and ignore the key, which becomes an assumption where both disagree.
  // `beside_states`: a refusal, since vLLM aligns blocks to states with the key
  // (vllm/platforms/interface.py), and such a plan is not derived.
  std::int64_t head_size(bool own = true, bool beside_states = false);
  // Tokens of the windows; 0: no window, or use_sliding_window switches it off.
  std::int64_t window();
  // Returns one type per layer under its current name ("full_attention"): as the file lists them,
  // or by the rule of the configuration class. Empty: the class has no types. Computed once. A list
  // shorter than num_hidden_layers is refused.
  const std::vector<std::string>& layer_types();
  // The window of layers for which the model class passes none: that of the whole model, unless
  // layer types mix. 0: none.
  std::int64_t model_window();
  // False: attention in both directions, which keeps no cache where the model class reads the key.
  bool is_causal();
  // True if vLLM serves the text part with MLA (transformers_utils/model_arch_config_convertor.py,
  // is_deepseek_mla()): a known model_type with kv_lora_rank.
  bool uses_latent_rows();

  // Kinds of layers. Block sizes stay 0: the planner chooses them.
  static LayerKind rows(std::string name, std::int64_t heads, std::int64_t head_size);
  // A window of `tokens` over the rows of `kind`; 0 or less: `kind` itself.
  static LayerKind windowed(LayerKind kind, std::int64_t tokens);
  static LayerKind chunked(LayerKind kind, std::int64_t tokens);
  static LayerKind cross(LayerKind kind);
  // One row per token instead of K and V.
  static LayerKind single_rows(LayerKind kind);
  // MLA: one latent row of `head_size` elements per token, in the dtype of the cache.
  static LayerKind latent(std::int64_t head_size);
  // A recurrent layer; `figures` determine the shapes of its states (reference/plan/model_spec.h).
  static LayerKind states(std::string name, const StateFigures& figures);

 private:
  std::vector<std::string> derived_types();

  ModelSpec& model_;
  std::optional<std::vector<std::string>> types_;
};

// Parses a torch dtype ("float32", "torch.bfloat16", "half"); absent: another word, which the
// engine would refuse or resolve from the weights.
std::optional<DType> config_dtype(std::string_view name);

// Which caches the layers of each family of architectures keep. A rule reads the keys that its
// model class reads (vllm/model_executor/models and vllm/models of 0.33.0) and adds one kind per
// cache, in the order in which the class creates them: the order determines the groups.

// How the model classes of plain decoders differ; decoder_layers() covers all of them.
struct DecoderTraits {
  bool reads_types = true;         // the class passes each layer its own window, by layer_types
  bool reads_head_dim = true;      // otherwise hidden_size / num_attention_heads
  std::int64_t window_extra = 0;   // tokens that the class adds to the configured window
  bool refuses_mixes = false;      // vLLM refuses windows in some layers
  bool keeps_model_window = true;  // layers without their own window take the whole model's
};
// Adds rows of K and V for each layer, windows by layer_types or for the whole model. Refuses layer
// types other than full and sliding attention.
void decoder_layers(ConfigReading& reading, const DecoderTraits& traits);

// Refuses the file for `reason`, which names the key, and names the way out: a model file written
// by vLLM itself.
void refuse_layers(ConfigReading& reading, std::string_view reason);
// Returns a row of kv_lora_rank + qk_rope_head_dim elements (576 for DeepSeek-V3: 512 + 64).
LayerKind latent_row(ConfigReading& reading);
// Reads keys of projections that leave the size of a latent row unchanged, so that unread_keys()
// does not list them.
void read_projections(ConfigReading& reading);
// Type of layer i; empty: the list ends before it.
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
void encoder_layers(ConfigReading& reading);          // keep no cache
void unread_layers(ConfigReading& reading);           // caches that no rule derives: refused

// Rows of latent keys, with or without an indexer.
// Chooses among MLA, MLA with an indexer, whole keys of latent projections and a plain decoder: the
// classes of DeepSeek V2 and V3 serve all four (vllm/model_executor/models/deepseek_v2.py).
void latent_layers(ConfigReading& reading);
void expanded_latent_layers(ConfigReading& reading);  // MiniCPM3: whole keys of latent projections
void indexed_layers(ConfigReading& reading);          // DeepSeek V3.2, GLM-5
void sparse_block_layers(ConfigReading& reading);     // MiniMax-M3
void compressed_layers(ConfigReading& reading);       // DeepSeek V4

// Recurrent states.
// Each rule adds attention and states per layer.
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
