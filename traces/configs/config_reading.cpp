// Keys of a config.json with the defaults and aliases of its class, the types of its layers, and
// the kinds of layers that the rules combine.
#include "traces/configs/config_reading.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/number_text.h"

namespace lockstep {
namespace {

constexpr std::int64_t kFigureMax = 1 << 24;  // heads, sizes, tokens of any model
constexpr std::string_view kClasses =
#include "traces/configs/config_classes.inc"
    ;

// Parses config_classes.inc. A word without a sign starts a class; the words after it are
// KEY=DEFAULT, KEY~ALIAS, TEXT_PATH@TEXT_TYPE and arch=ARCHITECTURE:
//
//   gemma3 text_config@gemma3_text
//   bloom arch=BloomForCausalLM num_hidden_layers~n_layer hidden_size=64
std::map<std::string_view, ConfigClass> read_classes() {
  std::map<std::string_view, ConfigClass> classes;
  ConfigClass* at = nullptr;
  for (const std::string_view word : words_of(kClasses)) {
    const std::size_t sign = word.find_first_of("=~@");
    if (sign == std::string_view::npos) {
      at = &classes[word];
      continue;
    }
    const std::string_view key = word.substr(0, sign), value = word.substr(sign + 1);
    if (word[sign] == '~') {
      at->aliases[key] = value;
    } else if (word[sign] == '@') {
      at->text_path = key;
      at->text_type = value;
    } else if (key == "arch") {
      at->architecture = value;
    } else {
      at->defaults[key] = value;
    }
  }
  return classes;
}

}  // namespace

std::vector<std::string_view> words_of(std::string_view text) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find_first_of(" \n"), text.size());
    if (end > 0) parts.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

const ConfigClass* find_config_class(std::string_view model_type) {
  static const std::map<std::string_view, ConfigClass> classes = read_classes();
  const auto at = classes.find(model_type);
  return at == classes.end() ? nullptr : &at->second;
}

ConfigPart::ConfigPart(JsonObject object, std::string_view model_type)
    : object_(object),
      type_(model_type),
      class_(find_config_class(model_type)),
      read_(std::make_shared<std::set<std::string, std::less<>>>()) {}

ConfigPart ConfigPart::with_type(std::string_view model_type) const {
  return type_.empty() && !model_type.empty() ? as_type(model_type) : *this;
}

// The copy shares `read_`: a key that a rule reads under either type counts as read.
ConfigPart ConfigPart::as_type(std::string_view model_type) const {
  ConfigPart part = *this;
  part.type_ = model_type;
  part.class_ = find_config_class(model_type);
  return part;
}

// Tries the key, then the alias of the class: transformers assigns the key after the alias. Without
// a class, and for hidden_size, the names of older files count too. Both names are recorded as
// read, so an alias is never refused as unknown.
JsonValue ConfigPart::value(std::string_view key) {
  read_->emplace(key);
  const bool has_alias = class_ != nullptr && class_->aliases.contains(key);
  if (has_alias) read_->emplace(class_->aliases.at(key));
  if (JsonValue found = object_.optional(key)) return found;
  if (has_alias) return object_.optional(class_->aliases.at(key));
  return class_ == nullptr || key == "hidden_size" ? plain_alias(key) : JsonValue{};
}

// Names in the style of GPT-2, for files whose class neither package has.
JsonValue ConfigPart::plain_alias(std::string_view key) {
  constexpr auto kAliases = std::to_array<std::pair<std::string_view, std::string_view>>(
      {{"num_hidden_layers", "num_layers"},
       {"num_hidden_layers", "n_layer"},
       {"num_attention_heads", "n_head"},
       {"hidden_size", "n_embed"},
       {"hidden_size", "n_embd"}});
  for (const auto& [name, alias] : kAliases)
    if (name == key)
      if (JsonValue found = object_.optional(alias)) {
        read_->emplace(alias);
        return found;
      }
  return {};
}

std::optional<std::string_view> ConfigPart::class_default(std::string_view key) {
  if (class_ == nullptr) return std::nullopt;
  const auto at = class_->defaults.find(key);
  return at == class_->defaults.end() ? std::nullopt : std::optional(at->second);
}

bool ConfigPart::has(std::string_view key) {
  const JsonValue found = value(key);
  return found && !found.is_null();
}

// A value of another type than the key's. Null and false switch a feature off.
void ConfigPart::refuse_unless_off(JsonValue found, std::string_view expected) {
  if (found && !found.is_null() && found.text() != "false") found.refuse(expected);
}

// A null in the file hides the class's default on purpose: the class then derives the value
// (num_key_value_heads: null means num_attention_heads), which is the rule's business.
std::optional<std::int64_t> ConfigPart::number(std::string_view key) {
  JsonValue found = value(key);
  if (!found) {
    const auto text = class_default(key);
    return text ? scaled_decimal_of(*text, 0) : std::nullopt;
  }
  if (found.is_number()) return found.integer(0, kFigureMax);
  // Some files switch windows off by a flag.
  if (found.is_null() || (key.find("window") != std::string_view::npos && found.text() == "false"))
    return std::nullopt;
  found.refuse("an integer");
  return std::nullopt;
}

std::int64_t ConfigPart::need(std::string_view key) {
  if (const auto found = number(key)) return *found;
  refuse(fmt::format("found no key `{}`, which model_type '{}' needs", key, type_));
  return 1;
}

double ConfigPart::decimal(std::string_view key, double otherwise) {
  JsonValue found = value(key);
  if (!found || !found.is_number()) {
    refuse_unless_off(found, "a number");
    return otherwise;
  }
  const double factor = found.binary64();
  if (factor > 0 && factor <= 1 << 20) return factor;
  found.refuse("a factor above 0, at most 2^20");
  return 1;
}

std::string ConfigPart::text(std::string_view key) {
  JsonValue found = value(key);
  if (!found) return std::string(class_default(key).value_or(""));
  if (found.is_string()) return std::string(found.string());
  refuse_unless_off(found, "a string");
  return {};
}

bool ConfigPart::has_text(std::string_view key) {
  const JsonValue found = value(key);
  return found && found.is_string();
}

bool ConfigPart::flag(std::string_view key, bool otherwise) {
  JsonValue found = value(key);
  if (!found) {
    const auto text = class_default(key);
    return text ? *text == "true" : otherwise;
  }
  if (found.is_null()) return otherwise;
  const bool is_on = found.text() == "true";
  if (!is_on) refuse_unless_off(found, "true or false");
  return is_on;
}

// True if the key holds an array, an empty one included.
bool ConfigPart::has_list(std::string_view key) {
  const JsonValue found = value(key);
  return found && found.is_array();
}

JsonArray ConfigPart::list(std::string_view key) {
  JsonValue found = value(key);
  if (found && found.is_array()) return found.array();
  refuse_unless_off(found, "a list");
  return {};
}

std::vector<std::string> ConfigPart::words(std::string_view key) {
  std::vector<std::string> list;
  for (JsonValue word : this->list(key)) list.emplace_back(word.string());
  return list;
}

// Flags count as numbers because no_rope_layers is a list of 0 and 1 in some files, of flags in
// others. -1 for null marks a layer without a window.
std::vector<std::int64_t> ConfigPart::numbers(std::string_view key) {
  std::vector<std::int64_t> list;
  for (JsonValue number : this->list(key)) {
    const std::string text = number.text();
    const bool is_word = text == "true" || text == "false" || number.is_null();
    list.push_back(number.is_null() ? -1
                   : is_word        ? text == "true"
                                    : number.integer(-1, kFigureMax));
  }
  return list;
}

// A part has its own record of reads: keys of a nested object are checked only by the caller that
// passes it to refuse_unread().
std::optional<ConfigPart> ConfigPart::part(std::string_view key) {
  JsonValue found = value(key);
  if (!found || !found.is_object()) {
    refuse_unless_off(found, "an object");
    return std::nullopt;
  }
  JsonObject object = found.object();
  JsonValue type = object.optional("model_type");
  return ConfigPart(object, type && type.is_string() ? type.string() : std::string_view{});
}

std::vector<ConfigPart> ConfigPart::parts(std::string_view key) {
  std::vector<ConfigPart> list;
  for (JsonValue entry : this->list(key)) list.emplace_back(entry.object(), "");
  return list;
}

std::vector<ConfigPart> ConfigPart::nested_parts() {
  std::vector<ConfigPart> list;
  for (JsonEntry& entry : object_.entries())
    if (entry.value.is_object()) list.emplace_back(entry.value.object(), "");
  return list;
}

std::vector<std::string> ConfigPart::unread_keys() {
  std::vector<std::string> keys;
  for (JsonEntry& entry : object_.entries()) {
    if (read_->contains(entry.key)) continue;
    const std::string text = entry.value.text();
    if (text == "null" || text == "false" || text == "0" || text == "0.0" || text == "[]" ||
        text == "{}" || text == "\"\"")
      continue;
    keys.emplace_back(entry.key);
  }
  return keys;
}

namespace {

// Keys that give the period of the rarer type where the file lists no types: 4 means three windows
// and one full layer.
constexpr auto kPeriods = std::to_array<std::string_view>(
    {"full_attention_interval", "sliding_window_pattern", "_sliding_window_pattern",
     "global_attn_every_n_layers", "no_rope_layer_interval", "window_pattern"});

// Maps the types of older files to those of transformers 5. Sparse attention of both families is
// "indexed_attention", since the cache needs rows and an indexer in either case.
std::string current_name(const std::string& type) {
  if (type == "mamba") return "linear_attention";
  if (type == "attention") return "full_attention";
  if (type == "deepseek_sparse_attention" || type == "qwen_sparse_attention")
    return "indexed_attention";
  return type;
}

// A pattern that ends in "!" makes the last layer full, in a list of the file too (Gemma 4).
bool ends_full(const ConfigClass* known) {
  if (known == nullptr) return false;
  const auto at = known->defaults.find("layer_types");
  return at != known->defaults.end() && at->second.ends_with('!');
}

// The type for a letter of a class's pattern (config_classes.inc); empty: an unknown letter.
std::string type_of(char letter) {
  constexpr auto kTypes =
      std::to_array<std::pair<char, std::string_view>>({{'F', "full_attention"},
                                                        {'S', "sliding_attention"},
                                                        {'C', "chunked_attention"},
                                                        {'L', "linear_attention"},
                                                        {'V', "conv"},
                                                        {'H', "hybrid"}});
  for (const auto& [known, name] : kTypes)
    if (known == letter) return std::string(name);
  return {};
}

}  // namespace

std::optional<DType> config_dtype(std::string_view name) {
  if (name.starts_with("torch.")) name.remove_prefix(6);
  if (name == "float32" || name == "float") return DType::fp32;
  if (name == "float16" || name == "half") return DType::fp16;
  if (name == "bfloat16") return DType::bf16;
  return std::nullopt;
}

// Compares whole kinds except for their names: two layers share a kind only if every figure is
// equal. Names stay readable in plans ("window", "window2") and unique, as a model file requires.
void ConfigReading::add(std::int64_t index, const LayerKind& kind) {
  const auto same = [&](const LayerKind& known) {
    LayerKind renamed = kind;
    renamed.name = known.name;
    return renamed == known;
  };
  auto at = std::ranges::find_if(model_.kinds, same);
  if (at == model_.kinds.end()) {
    LayerKind added = kind;
    for (int n = 2;
         std::ranges::find(model_.kinds, added.name, &LayerKind::name) != model_.kinds.end(); ++n)
      added.name = fmt::format("{}{}", kind.name, n);
    at = model_.kinds.insert(model_.kinds.end(), std::move(added));
  }
  model_.layers.push_back({index, static_cast<std::size_t>(at - model_.kinds.begin())});
}

// The first key that the file or its class has, most specific first: Falcon's n_head_kv and
// num_kv_heads, the usual name, ChatGLM's groups, Step's groups. Without any, attention has one KV
// head per query head.
std::int64_t ConfigReading::heads() {
  const std::int64_t heads = text.need("num_attention_heads");
  if (heads == 0) text.refuse("num_attention_heads is 0; attention has at least one head");
  return std::max<std::int64_t>(heads, 1);
}

std::int64_t ConfigReading::kv_heads() {
  for (const std::string_view key : {"n_head_kv", "num_kv_heads", "num_key_value_heads",
                                     "multi_query_group_num", "num_attention_groups"})
    if (const auto found = text.number(key)) {
      if (*found == 0 && !text.has("per_layer_config"))
        text.refuse(fmt::format("{} is 0; attention has at least one KV head", key));
      const std::int64_t kv = std::max<std::int64_t>(*found, 1);
      // model_executor/layers/attention/attention.py. Layers with their own heads may differ.
      const std::int64_t queries = text.number("num_attention_heads") ? heads() : 0;
      if (queries % kv != 0 && !text.has("per_layer_config"))
        text.refuse(
            fmt::format("num_attention_heads {} is not divisible by {} {}", queries, key, kv));
      return kv;
    }
  return heads();
}

// The types whose configuration class refuses a hidden size that the heads do not divide
// (validate_architecture() in transformers 5.20.2).
constexpr std::string_view kWholeHeads =
    " arcee aria_text clip_text_model cosmos3_edge_text cwm deepseek_v2 gemma2 gemma3_text "
    "gemma3n_text gpt_neox hrm_text hyperclovax jais2 llama minicpm3 muse_glimmer_text ultrabert "
    "vaultgemma ";

std::int64_t ConfigReading::head_size(bool own, bool beside_states) {
  const std::int64_t given = text.number("head_dim", 0);
  if (own && given > 0) return given;
  // PLaMo 2's name (vLLM 0.33.0, model_arch_config_convertor.py, get_head_size()).
  if (own && text.has("hidden_size_per_head")) return text.need("hidden_size_per_head");
  const std::int64_t hidden = text.need("hidden_size"), derived = hidden / heads();
  if (given == 0 && hidden % heads() != 0 &&
      kWholeHeads.find(fmt::format(" {} ", text.type())) != std::string_view::npos)
    text.refuse(
        fmt::format("hidden_size {} is not divisible by num_attention_heads {}, which the class of "
                    "model_type '{}' refuses",
                    hidden, heads(), text.type()));
  if (own || given == 0 || given == derived) return derived;
  if (beside_states)
    text.refuse(
        fmt::format("head_dim {}: {} divides hidden_size and ignores it, but vLLM sizes the blocks "
                    "of states with it; remove the key, or write {}",
                    given, architecture, derived));
  else
    assume(fmt::format("heads of {} elements: {} divides hidden_size and ignores head_dim {}",
                       derived, architecture, given));
  return derived;
}

// Qwen2's class clears sliding_window unless use_sliding_window is set. For a class outside the
// table the effect of the switch is unknown, so a file that switches its window off is refused.
std::int64_t ConfigReading::window() {
  const std::int64_t tokens = text.number("sliding_window", 0);
  // Only classes that have the switch clear the window when it is off.
  const ConfigClass* known = text.config_class();
  if (known == nullptr && tokens > 0 && text.has("use_sliding_window") &&
      !text.flag("use_sliding_window"))
    text.refuse(
        fmt::format("use_sliding_window: whether model_type '{}' ignores its window then is up to "
                    "a class outside vLLM; remove one of the two keys",
                    text.type()));
  const bool has_switch = known != nullptr && known->defaults.contains("use_sliding_window");
  return has_switch && !text.flag("use_sliding_window") ? 0 : tokens;
}

const std::vector<std::string>& ConfigReading::layer_types() {
  if (types_) return *types_;
  types_ = text.words("layer_types");
  if (!types_->empty())
    for (const std::string_view key : kPeriods) text.has(key);  // redundant with the list
  if (types_->empty()) types_ = derived_types();
  for (std::string& type : *types_) type = current_name(type);
  if (!types_->empty() && ends_full(text.config_class())) types_->back() = type_of('F');
  const auto count = static_cast<std::size_t>(text.number("num_hidden_layers", 0));
  if (!types_->empty() && types_->size() < count)
    text.refuse(
        fmt::format("layer_types has {} entries for num_hidden_layers {}", types_->size(), count));
  return *types_;
}

// Expands the pattern of the configuration class over all layers. A period of the file replaces the
// pattern's length and keeps its rarer type at the same end:
//
//   SSSF, sliding_window_pattern 6: SSSSSF SSSSSF ...
//   FS, full_attention_interval 3: FSS FSS ...
//
// no_rope_layers turns the pattern of Llama 4 into one type per layer. Qwen2's single F becomes a
// window from layer max_window_layers on, if windows are switched on; Qwen2Moe's at even layers
// before that.
std::vector<std::string> ConfigReading::derived_types() {
  const ConfigClass* known = text.config_class();
  if (known == nullptr) return {};
  const auto at = known->defaults.find("layer_types");
  if (at == known->defaults.end() || at->second == "?") return {};
  std::string pattern(at->second);
  if (ends_full(known)) pattern.pop_back();
  if (pattern.size() > 1)
    for (const std::string_view key : kPeriods) {
      if (!text.has(key)) continue;
      const auto period = static_cast<std::size_t>(std::max<std::int64_t>(text.need(key), 1));
      const bool starts_full = pattern.front() == 'F';
      const char other = starts_full ? pattern.back() : pattern.front();
      pattern = std::string(period - 1, other);
      pattern.insert(starts_full ? 0 : period - 1, 1, 'F');
      break;
    }
  const std::vector<std::int64_t> chunked = text.numbers("no_rope_layers");
  std::vector<std::string> types;
  const std::int64_t count = num_layers(), behind = text.number("max_window_layers", count);
  const bool is_switched = known->defaults.contains("use_sliding_window") && pattern == "F";
  for (std::int64_t i = 0; i < count; ++i) {
    std::string type = type_of(pattern[static_cast<std::size_t>(i) % pattern.size()]);
    if (pattern.front() == 'C' && static_cast<std::size_t>(i) < chunked.size())
      type = type_of(chunked[static_cast<std::size_t>(i)] != 0 ? 'C' : 'F');
    const bool is_window = text.type() == "qwen2_moe" ? i % 2 == 0 && i < behind : i >= behind;
    if (is_switched && window() > 0 && is_window) type = type_of('S');
    types.push_back(std::move(type));
  }
  return types;
}

// vLLM passes the window of the whole model through CacheConfig; layers that receive no window of
// their own use it (model_executor/layers/attention/attention.py). With mixed types the classes
// pass a window to each layer.
std::int64_t ConfigReading::model_window() {
  const bool mixes = std::ranges::any_of(
      layer_types(), [](const std::string& type) { return type != "sliding_attention"; });
  return mixes ? 0 : window();
}

// EmbeddingGemma attends in both directions, although its text class is a decoder's.
bool ConfigReading::is_causal() {
  if (architecture == "Gemma3TextModel" && text.flag("use_bidirectional_attention")) return false;
  return text.flag("is_causal", true);
}

// The model types of is_deepseek_mla(), without DeepSeek V4 and V4.1, whose rows are compressed,
// and without draft models: a config.json describes the target model.
bool ConfigReading::uses_latent_rows() {
  constexpr std::string_view kTypes =
      " axk1 deepseek_v2 deepseek_v3 deepseek_v32 dots3_note glm5_next glm5_next_text glm_moe_dsa "
      "glm4_moe_lite kimi_k2 kimi_linear longcat_flash pangu_ultra_moe bailing_hybrid hy_v4 ";
  return kTypes.find(fmt::format(" {} ", text.type())) != std::string_view::npos &&
         text.number("kv_lora_rank").has_value();
}

LayerKind ConfigReading::rows(std::string name, std::int64_t heads, std::int64_t head_size) {
  LayerKind kind;
  kind.name = std::move(name);
  kind.spec.block_size = 0;
  kind.spec.num_kv_heads = heads;
  kind.spec.head_size = head_size;
  return kind;
}

// The name describes the kind; add() numbers it where windows of two sizes occur.
LayerKind ConfigReading::windowed(LayerKind kind, std::int64_t tokens) {
  if (tokens <= 0) return kind;
  kind.name = "window";
  kind.spec.kind = CacheKind::sliding_window;
  kind.spec.sliding_window = tokens;
  return kind;
}

LayerKind ConfigReading::chunked(LayerKind kind, std::int64_t tokens) {
  kind.name = "chunk";
  kind.spec.kind = CacheKind::chunked_local;
  kind.spec.attention_chunk_size = tokens;
  return kind;
}

LayerKind ConfigReading::cross(LayerKind kind) {
  kind.name = "cross";
  kind.spec.kind = CacheKind::cross_attention;
  return kind;
}

LayerKind ConfigReading::single_rows(LayerKind kind) {
  kind.spec.kind = CacheKind::mla;
  return kind;
}

LayerKind ConfigReading::latent(std::int64_t head_size) {
  return single_rows(rows("attn", 1, head_size));
}

LayerKind ConfigReading::states(std::string name, const StateFigures& figures) {
  LayerKind kind;
  kind.name = std::move(name);
  kind.spec.kind = CacheKind::mamba;
  kind.spec.block_size = 0;
  kind.states = figures;
  return kind;
}

}  // namespace lockstep
