// From an architecture to its rule, the figures that all rules share (dtype, length, cache format),
// and the refusal of unread keys. The rules are in attention_rules.cpp and state_rules.cpp.
#include "traces/configs/config_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <iterator>
#include <map>
#include <utility>

#include "base/check.h"
#include "base/json_reader.h"

namespace lockstep {
namespace {

// Instantiates decoder_layers() for one set of traits, so that kRules can store it as a plain
// function pointer.
template <DecoderTraits traits>
void decoder(ConfigReading& reading) {
  decoder_layers(reading, traits);
}

using LayerRule = void (*)(ConfigReading&);

// Rules by the names that architectures.inc has for them.
constexpr std::pair<std::string_view, LayerRule> kRules[] = {
    {"typed", decoder<DecoderTraits{}>},  // windows by layer_types
    {"typed_alone",
     decoder<DecoderTraits{.keeps_model_window = false}>},  // and no window of the whole model
    {"typed_derived", decoder<DecoderTraits{.reads_head_dim = false}>},
    {"one_more", decoder<DecoderTraits{.window_extra = 1}>},  // windows of one token more
    {"plain", decoder<DecoderTraits{.reads_types = false}>},  // one window for the whole model
    {"plain_derived", decoder<DecoderTraits{.reads_types = false, .reads_head_dim = false}>},
    {"all_or_none",
     decoder<DecoderTraits{.reads_types = false, .refuses_mixes = true}>},  // of all layers or none
    {"all_or_none_derived",
     decoder<DecoderTraits{.reads_types = false, .reads_head_dim = false, .refuses_mixes = true}>},
    {"chunked", chunked_layers},
    {"alternating", alternating_layers},
    {"falcon", falcon_layers},
    {"chatglm", chatglm_layers},
    {"grouped", grouped_layers},
    {"attn_config", attn_config_layers},
    {"block_config", block_config_layers},
    {"gemma_shared", gemma_shared_layers},
    {"mimo", mimo_layers},
    {"listed_window", listed_window_layers},
    {"looped", looped_layers},
    {"encoder", encoder_layers},
    {"encoder_decoder", encoder_decoder_layers},
    {"latent", latent_layers},
    {"expanded_latent", expanded_latent_layers},
    {"indexed", indexed_layers},
    {"sparse_block", sparse_block_layers},
    {"compressed", compressed_layers},
    {"gated_delta", gated_delta_layers},
    {"kimi", kimi_layers},
    {"bailing", bailing_layers},
    {"short_conv", short_conv_layers},
    {"mamba", mamba_layers},
    {"mamba2", mamba2_layers},
    {"jamba", jamba_layers},
    {"zamba", zamba_layers},
    {"falcon_h1", falcon_h1_layers},
    {"granite_hybrid", granite_hybrid_layers},
    {"nemotron_h", nemotron_h_layers},
    {"unread", unread_layers},
};

// The table: each line reads RULE: ARCHITECTURE ..., with RULE a name of kRules, pooling_ before it
// for pooling models, or text=ARCHITECTURE (empty: the architecture that the text part's
// configuration states). The last lines list classes of earlier lines: without_pp those without
// SupportsPP, reads_is_causal those whose attention follows that key.
constexpr std::string_view kTable =
#include "traces/configs/architectures.inc"
    ;

// Parses the word before a colon. A rule that kRules does not have is a mistake in the table, hence
// a check and not a refusal.
Architecture listed_rule(std::string_view rule) {
  constexpr std::string_view kText = "text=", kPooling = "pooling_";
  Architecture architecture;
  if (rule.starts_with(kText)) {
    architecture.text_architecture = rule.substr(kText.size());
    return architecture;
  }
  architecture.is_pooling = rule.starts_with(kPooling);
  if (architecture.is_pooling) rule.remove_prefix(kPooling.size());
  const auto* at = std::ranges::find(kRules, rule, &std::pair<std::string_view, LayerRule>::first);
  LS_CHECK(at != std::end(kRules), "no rule {}", rule);
  architecture.layers = at->second;
  return architecture;
}

}  // namespace

// The table is parsed once, on first use; its pointers stay valid. A name that two lines list takes
// the later one.
const Architecture* find_architecture(std::string_view name) {
  static const auto table = [] {
    std::map<std::string_view, Architecture> architectures;
    Architecture current;
    bool Architecture::*listed = nullptr;
    for (const std::string_view word : words_of(kTable)) {
      if (word == "without_pp:")
        listed = &Architecture::supports_pp;
      else if (word == "reads_is_causal:")
        listed = &Architecture::reads_is_causal;
      else if (listed != nullptr)
        architectures[word].*listed = !(Architecture{}.*listed);
      else if (word.ends_with(':'))
        current = listed_rule(word.substr(0, word.size() - 1));
      else
        architectures[word] = current;
    }
    return architectures;
  }();
  const auto at = table.find(name);
  return at == table.end() ? nullptr : &at->second;
}

namespace {

// True if the key's name may describe the cache. The list errs on the side of refusing: a false
// positive costs an entry in leaves_cache_alone(), a false negative a wrong plan.
bool could_shape(std::string_view key) {
  constexpr auto kParts = std::to_array<std::string_view>(
      {"head",   "kv_",    "_kv",   "layer_type", "window",      "chunk",    "state",  "conv",
       "latent", "rank",   "share", "block",      "skip",        "index",    "cache",  "sliding",
       "attn",   "linear", "mamba", "ssm",        "sink",        "compress", "loop",   "recurrent",
       "cycles", "kpool",  "swa_",  "global_",    "multi_query", "hybrid",   "pattern"});
  return std::ranges::any_of(
             kParts,
             [&](std::string_view part) { return key.find(part) != std::string_view::npos; }) ||
         (key.starts_with("num_") && key.ends_with("_layers"));
}

// True for keys with such names that leave the cache unchanged: queries, experts, norms, scales and
// tokens; and for keys that repeat what the rules take from other keys. q_lora_rank is one: it is
// the rank of the query projection, which stores nothing.
bool leaves_cache_alone(std::string_view key) {
  constexpr auto kBegins = std::to_array<std::string_view>(
      {"mlp_",     "moe_",       "audio_",    "video_",      "image_",      "vision_",
       "mtp_",     "rope_",      "n_shared_", "num_shared_", "shared_",     "share_",
       "block_",   "layernorm_", "mamba_dt_", "linear_dt_",  "linear_a",    "ssm_in_",
       "ssm_out_", "ssm_mult",   "ngram_",    "_attn",       "_flash_attn", "reorder_"});
  constexpr auto kEnds = std::to_array<std::string_view>(
      {"_bias",        "_token_index",    "_ignore_index", "ignore_index", "_multiplier",
       "_multipliers", "_scale",          "_eps",          "_pdrop",       "_theta",
       "_act",         "_dropout",        "_attn_weights", "_init",        "_interleave",
       "_gate",        "_sinkhorn_iters", "layer_index",   "start_index",  "end_index"});
  constexpr std::string_view kWords =
      " use_cache compression_ratio enable_moe_block full_attn_mod use_parallel_block "
      "num_attention_heads num_hidden_layers max_window_layers L_bp_cycles "
      "acoustic_tokenizer_chunk_size activation_sparsity_pattern attention_kv_lora_dim "
      "attn_logit_softcapping attn_temperature_tuning cache_implementation conv_dim_out "
      "conv_use_xavier_init encoder_attention_heads hc_lowrank heads_per_ngram latent_patch_size "
      "linear_attn_norm_group_size linear_lower_bound linear_allow_neg_eigval linear_silu "
      "mamba_norm_before_gate mamba_rms_norm mamba_use_mlp max_latent_size mla_scale_kv_lora "
      "mla_scale_q_lora norm_head num_attention_heads_per_layer num_dense_layers num_mtp_layers "
      "num_nextn_predict_layers num_sliding_attention_heads parallel_attn q_lora_rank num_layers "
      "prefix_dense_sliding_window_pattern qk_head_dim query_pre_attn_scalar seconds_per_chunk "
      "swa_num_attention_heads use_conv_bias use_mamba_kernels use_shared_mlp_adapter adapter_rank "
      "attention_head_dim cla_share_factor number_of_conv_states time_step_rank mamba_dt_rank "
      "laurel_rank ple_conv_kernel_size sliding_window_size attn_implementation "
      "_attn_implementation head_dtype rotary_dim num_query_groups key_value_head_ratio "
      "use_qk_norm_per_head lm_head no_rope_layer_interval num_decoder_layers num_encoder_layers "
      "num_key_value_groups chunk_size_feed_forward router_num_layers logits_to_keep "
      "use_shared_attention_adapter shared_head num_ln_in_parallel_attn mamba_inner_layernorms ";
  return std::ranges::any_of(kBegins,
                             [&](std::string_view begin) { return key.starts_with(begin); }) ||
         std::ranges::any_of(kEnds, [&](std::string_view end) { return key.ends_with(end); }) ||
         kWords.find(fmt::format(" {} ", key)) != std::string_view::npos;
}

// Refuses the first unread key that could shape the cache. `is_outer`: the part surrounds the text
// part and has the keys of other towers (a vision encoder's heads), so that only names of caches
// count.
void refuse_unread(ConfigPart& part, bool is_outer) {
  constexpr auto kOuter = std::to_array<std::string_view>(
      {"num_key_value", "num_kv", "sliding", "layer_types", "rswa", "kv_lora", "attention_chunk"});
  for (const std::string& key : part.unread_keys())
    if (is_outer ? std::ranges::any_of(
                       kOuter, [&](std::string_view begin) { return key.starts_with(begin); })
                 : could_shape(key) && !leaves_cache_alone(key))
      part.refuse(
          fmt::format("key `{}` could shape the cache, and the rule for model_type '{}' does not "
                      "read it; write a model file with `lockstep model CONFIG --from vllm:DIR`",
                      key, part.type()));
}

// The object at keys joined by points; absent: one of them is missing or is not an object.
std::optional<ConfigPart> part_at(ConfigPart whole, std::string_view path) {
  std::optional<ConfigPart> part = whole;
  while (part && !path.empty()) {
    const std::size_t end = std::min(path.find('.'), path.size());
    part = part->part(path.substr(0, end));
    path.remove_prefix(std::min(end + 1, path.size()));
  }
  return part;
}

// The part that describes the decoder; the file itself where it has no such part. Absent: the class
// expects a text part, and the file has neither that nor the decoder's keys at its top.
std::optional<ConfigPart> text_part(ConfigPart& whole) {
  const ConfigClass* known = whole.config_class();
  if (known != nullptr && !known->text_path.empty()) {
    auto part = part_at(whole, known->text_path);
    if (part) return part->with_type(known->text_type);
  }
  // Names of the text part in files whose class no package has.
  for (const std::string_view path :
       {"text_config", "llm_config", "language_config", "thinker_config.text_config"})
    if (auto part = part_at(whole, path)) return part->with_type("");
  if (known == nullptr || known->text_path.empty()) return whole;
  // Older files have the text part's keys at the top.
  if (!whole.has("num_hidden_layers")) return std::nullopt;
  return whole.as_type(known->text_type);
}

// transformers 5 writes `dtype`, earlier releases `torch_dtype`. Empty: neither.
std::string dtype_at(ConfigPart& part) {
  return part.text(part.has("dtype") ? "dtype" : "torch_dtype");
}

// True if torch has the type, but vLLM serves no model in it.
bool is_other_dtype(std::string_view name) {
  constexpr std::string_view kOthers =
      " bool cdouble cfloat complex128 complex32 complex64 double float4_e2m1fn_x2 float64 "
      "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int int16 int32 "
      "int64 int8 long qint8 quint8 short uint16 uint32 uint64 uint8 ";
  return kOthers.find(fmt::format(" {} ", name)) != std::string_view::npos;
}

// The dtype in which `vllm serve` runs the model under --dtype auto (vLLM 0.33.0, config/model.py,
// _resolve_auto_dtype()): float32 is served in the preferred dtype, fp16 becomes bf16 for the types
// that are numerically unstable in it. From other types of torch vLLM falls back to the preferred
// dtype, and transformers fails on words that torch does not define. Without a dtype vLLM looks
// into the weights; here it is an assumption.
DType served_dtype(ConfigReading& reading, bool is_pooling) {
  std::string name = dtype_at(reading.whole);
  if (name.empty()) name = dtype_at(reading.text);
  for (const char* key : {"vision_config", "encoder_config"})
    if (auto part = reading.whole.part(key); part && name.empty()) name = dtype_at(*part);
  const std::string& type = reading.whole.type();
  const bool takes_fp16 =
      type != "gemma2" && type != "gemma3" && type != "gemma3_text" && type != "glm4";
  const DType preferred = is_pooling && takes_fp16 ? DType::fp16 : DType::bf16;
  if (name.empty())
    reading.assume(fmt::format(
        "no dtype: served in {}, as a float32 model is; the engine would look into the weights",
        name_of(preferred)));
  const bool is_other = is_other_dtype(name);
  if (is_other)
    reading.assume(fmt::format("dtype {} is not served: the engine falls back to {}", name,
                               name_of(preferred)));
  const bool is_torch_name = !name.starts_with("torch.");
  const std::optional<DType> dtype = is_torch_name ? config_dtype(name) : std::nullopt;
  if (!dtype && !is_other && !name.empty())
    reading.whole.refuse(
        fmt::format("dtype '{}' is no type of torch; name one, such as bfloat16", name));
  if (!dtype || *dtype == DType::fp32) return preferred;
  return *dtype == DType::fp16 && !takes_fp16 ? DType::bf16 : *dtype;
}

std::string rope_type(ConfigPart& rope) {
  return rope.text(rope.has("rope_type") ? "rope_type" : "type");
}

// The factor by which rope scaling extends the model's length. YaRN's and its relatives' lengths
// are already scaled; Gemma 3's too.
double length_factor(ConfigReading& reading, const std::vector<ConfigPart>& ropes) {
  constexpr std::string_view kScaled =
      " su longrope llama3 yarn deepseek_yarn deepseek_llama_scaling telechat3-yarn ";
  double factor = 1;
  if (reading.text.type().find("gemma3") != std::string::npos) return factor;
  for (ConfigPart rope : ropes)
    if (kScaled.find(fmt::format(" {} ", rope_type(rope))) == std::string_view::npos)
      factor = rope.decimal("factor", factor);
  return factor;
}

// max_model_len in tokens, only the default of --max-model-len: the smallest of the keys that vLLM
// reads, or model_max_length where the file has it, as for Command-R
// (transformers_utils/model_arch_config_convertor.py, derive_max_model_len_and_key()), extended by
// rope scaling; with LongRoPE the length before scaling (config/model.py,
// _get_and_verify_max_len()).
std::int64_t longest(ConfigReading& reading) {
  constexpr std::int64_t kUnknownLength = 2048;  // of a file without any of the keys
  std::optional<std::int64_t> shortest;
  for (const char* key :
       {"max_position_embeddings", "n_positions", "max_seq_len", "seq_length",
        "max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"})
    if (const auto tokens = reading.text.number(key); tokens && *tokens > 0)
      shortest = std::min(shortest.value_or(*tokens), *tokens);
  if (const auto tokens = reading.text.number("model_max_length"); tokens && *tokens > 0)
    shortest = *tokens;
  if (!shortest)
    reading.assume(fmt::format("no key states the longest request: {} tokens", kUnknownLength));
  auto rope = reading.text.part("rope_scaling");
  if (!rope) rope = reading.text.part("rope_parameters");
  // One object, or one per layer type.
  std::vector<ConfigPart> ropes;
  if (rope) ropes = rope->nested_parts();
  if (rope && ropes.empty()) ropes.push_back(*rope);
  const auto original = reading.text.number("original_max_position_embeddings");
  const auto derived = static_cast<std::int64_t>(
      static_cast<double>(shortest.value_or(kUnknownLength)) * length_factor(reading, ropes));
  if (shortest) reading.model().max_model_len_limit = derived;
  if (original && std::ranges::any_of(ropes, [](ConfigPart part) {
        return rope_type(part) == "longrope" || rope_type(part) == "su";
      }))
    return *original;
  return derived;
}

std::string in_lower_case(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

// The cache format at `key`, in lower case; empty: none. An unsupported scheme gives its
// description.
std::string format_at(ConfigPart& place, std::string_view key, bool is_modelopt) {
  std::string format;
  if (place.has_text(key)) {
    format = place.text(key);
  } else if (auto scheme = place.part(key)) {
    // ModelOpt's scales are static; compressed-tensors has no cache of 4 bits.
    const bool is_fp8 = !is_modelopt || (scheme->has("dynamic") && !scheme->flag("dynamic"));
    format = fmt::format("{} of {} bits", scheme->text("type"), scheme->number("num_bits", 0));
    if (format == "float of 8 bits" && is_fp8) return "fp8";
    if (format == "float of 4 bits" && is_modelopt) return "nvfp4";
  }
  return in_lower_case(std::move(format));
}

// The cache format that a quantized checkpoint requests; empty: the model's dtype. ModelOpt states
// a scheme or a word, nested under `quantization` or at the top, and older files name their
// producer instead of the method (vllm/utils/torch_utils.py, get_kv_cache_quant_algo_string();
// transformers_utils/model_arch_config_convertor.py, _normalize_quantization_config()). Layers of K
// and V also follow the scheme of compressed-tensors
// (model_executor/layers/attention/attention.py). A format that vLLM would replace by the model's
// dtype with a warning, or not serve, is refused. REQUIRES: the model has its layers.
std::string cache_scheme(ConfigReading& reading) {
  auto config = reading.whole.part("quantization_config");
  const bool is_outer = config.has_value();
  if (!config) config = reading.text.part("quantization_config");
  if (!config) return {};
  std::string method = in_lower_case(config->text("quant_method"));
  auto own = config->part("quantization");
  auto producer = config->part("producer");
  if (own && own->has("quant_algo") &&
      (own->has("modelopt_quant_config") || (producer && producer->text("name") == "modelopt")))
    method = "modelopt";
  const bool is_modelopt = method.starts_with("modelopt");
  if (!is_modelopt && method != "compressed-tensors" && method != "compressed_tensors") return {};
  std::string format;
  std::string_view key;
  for (const char* name : {"kv_cache_scheme", "kv_cache_quant_algo"})
    for (ConfigPart* place : {own ? &*own : nullptr, &*config})
      if (place != nullptr && format.empty()) format = format_at(*place, key = name, is_modelopt);
  if (format.empty() || format == "none") return {};
  const bool has_pairs = std::ranges::any_of(reading.model().kinds, keeps_pairs, &LayerKind::spec);
  if (is_modelopt ? !is_outer : !has_pairs || key != "kv_cache_scheme") {
    reading.assume(fmt::format("cache in the model's dtype: vLLM does not read {} here", key));
    return {};
  }
  if (format == "fp8" || format == "nvfp4") return format;
  refuse_layers(reading, fmt::format("quantization_config: {} '{}' is unknown", key, format));
  return {};
}

// The first of `architectures`, or the default of the configuration class.
std::string architecture_of(ConfigPart& part) {
  const std::vector<std::string> listed = part.words("architectures");
  if (!listed.empty()) return listed.front();
  return part.config_class() == nullptr ? "" : std::string(part.config_class()->architecture);
}

// Finds the rule for `name`, or for the text part of a multimodal architecture, and records in
// reading.architecture which one it was. nullptr: the table has neither.
const Architecture* rule_of(ConfigReading& reading, const std::string& name) {
  const Architecture* found = find_architecture(name);
  // A classifier on a decoder has the decoder's layers.
  constexpr std::string_view kClassifier = "ForSequenceClassification";
  if (found == nullptr && name.ends_with(kClassifier))
    found = find_architecture(name.substr(0, name.size() - kClassifier.size()) + "ForCausalLM");
  if (found == nullptr || found->layers != nullptr) return found;
  reading.architecture = found->text_architecture;
  if (reading.architecture.empty()) reading.architecture = architecture_of(reading.text);
  const Architecture* inner = find_architecture(reading.architecture);
  return inner != nullptr && inner->layers != nullptr ? inner : nullptr;
}

// Adds the MTP layers of families whose draft model repeats the last attention layer
// (config/speculative.py, hf_config_override()).
void add_draft_layers(ConfigReading& reading) {
  constexpr std::string_view kTypes =
      " deepseek_v3 deepseek_v32 glm_moe_dsa glm4_moe glm4_moe_lite qwen3_next ";
  const std::string& type = reading.text.type();
  const std::int64_t count =
      reading.text.number("num_nextn_predict_layers", type == "qwen3_next" ? 1 : 0);
  ModelSpec& model = reading.model();
  const auto is_attention_layer = [&](const ModelSpec::Layer& layer) {
    return !is_state_kind(model.kinds[layer.kind].spec.kind);
  };
  const auto layers = model.layers;
  const auto last = std::ranges::find_if(layers.rbegin(), layers.rend(), is_attention_layer);
  if (count == 0 || last == layers.rend() ||
      kTypes.find(fmt::format(" {} ", type)) == std::string_view::npos)
    return;
  model.mtp_modules = count;
  for (std::int64_t i = 0; i < count; ++i)
    for (const ModelSpec::Layer& layer : layers) {
      if (layer.index != last->index) continue;
      LayerKind kind = model.kinds[layer.kind];
      kind.name = kind.name == "attn" ? "draft" : "draft_" + kind.name;
      kind.is_draft = true;
      reading.add(model.num_hidden_layers + i, kind);
    }
}

// Drops the layers of a class that follows `is_causal: false` (llama.py, deepseek_v2.py). Refused:
// hybrids, whose pages change, and AXK1, which expands its keys (config/model.py, use_mla).
void drop_bidirectional(ConfigReading& reading, bool reads_is_causal) {
  if (reading.is_causal()) return;
  const std::string& name = reading.architecture;
  ModelSpec& model = reading.model();
  if (!reads_is_causal)
    return reading.assume(fmt::format("is_causal false: {} does not read it", name));
  if (has_states(model.kinds) || name == "AXK1ForCausalLM")
    return refuse_layers(reading, "is_causal: false leaves caches that are not derived");
  model.layers.clear();
  model.kinds.clear();
}

// Fills reading.model() by the rule of architecture `name`, then refuses unread keys. An unknown
// causal decoder is read by its layer_types, which the assumptions state; any other unknown
// architecture is refused, because its class may keep caches of its own.
void read_layers(ConfigReading& reading, const std::string& name) {
  const Architecture* outer = find_architecture(name);  // `name` may be what rule_of() changes
  const Architecture* rule = rule_of(reading, name);
  ModelSpec& model = reading.model();
  model.dtype = served_dtype(reading, outer != nullptr && outer->is_pooling);
  model.max_model_len = longest(reading);
  model.supports_pp = outer == nullptr || outer->supports_pp;
  if (rule != nullptr) {
    rule->layers(reading);
  } else if (!name.empty() && !name.ends_with("ForCausalLM")) {
    return refuse_layers(reading,
                         fmt::format("architectures: '{}' is unknown to this reader", name));
  } else {
    reading.assume(
        fmt::format("architecture '{}' has no rule of its own: read as a decoder whose layer_types "
                    "name its windows",
                    name.empty() ? "(none)" : name));
    decoder_layers(reading, {});
  }
  drop_bidirectional(reading, rule != nullptr && rule->reads_is_causal);
  // An encoder keeps nothing, so none of its keys can shape a cache.
  if (model.layers.empty()) return;
  model.kv_cache_dtype = cache_scheme(reading);
  model.num_attention_heads = reading.text.number("num_attention_heads", 0);
  if (model.num_hidden_layers == 0)
    model.num_hidden_layers = reading.text.number("num_hidden_layers", 0);
  add_draft_layers(reading);
  // config/model.py, get_mamba_chunk_size(); 2048 where the model has no chunks, as in Mamba 1.
  const auto chunk = reading.text.number("mamba_chunk_size");  // also in files without states
  if (has_states(model.kinds))
    model.mamba_chunk_size = chunk.value_or(reading.text.number("chunk_size", 2048));
  refuse_unread(reading.text, false);
  if (reading.has_text_part) refuse_unread(reading.whole, true);
}

}  // namespace

std::string with_quoted_literals(std::string_view text) {
  std::string out;
  bool is_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '"') is_string = !is_string;
    if (is_string && text[i] == '\\' && i + 1 < text.size()) out += text[i++];
    std::string_view literal;
    for (const std::string_view word : {"-Infinity", "Infinity", "NaN"})
      if (!is_string && literal.empty() && text.substr(i).starts_with(word)) literal = word;
    out += literal.empty() ? std::string(1, text[i]) : fmt::format("\"{}\"", literal);
    if (!literal.empty()) i += literal.size() - 1;
  }
  return out;
}

Result<ModelSpec> model_from_hf_config(std::string_view text, const std::string& file) {
  const std::string quoted = with_quoted_literals(text);
  JsonReader reader(file);
  if (!reader.parse(quoted)) return reader.failure();
  JsonObject object = reader.root().object();
  JsonValue type = object.optional("model_type");
  ConfigPart whole(object, type && type.is_string() ? type.string() : std::string_view{});
  if (!reader.ok()) return reader.failure();
  ModelSpec model;
  model.name = whole.type().empty() ? "config" : whole.type();
  auto part = text_part(whole);
  if (!part) {
    whole.refuse(fmt::format("found no text part `{}` of model_type '{}'",
                             whole.config_class()->text_path, whole.type()));
    return reader.failure();
  }
  ConfigReading reading(whole, *part, architecture_of(whole), model);
  reading.has_text_part = !part->is_same(whole);
  read_layers(reading, reading.architecture);
  if (!reader.ok()) return reader.failure();
  return model;
}

}  // namespace lockstep
