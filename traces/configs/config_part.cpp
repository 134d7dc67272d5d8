#include "traces/configs/config_part.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/number_text.h"

namespace lockstep {
namespace {

constexpr std::int64_t kFigureMax = 1 << 24;  // heads, sizes, tokens of any model
constexpr std::string_view kClasses =
#include "traces/configs/config_classes.inc"
    ;

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

ConfigPart ConfigPart::as_type(std::string_view model_type) const {
  ConfigPart part = *this;
  part.type_ = model_type;
  part.class_ = find_config_class(model_type);
  return part;
}

JsonValue ConfigPart::value(std::string_view key) {
  read_->emplace(key);
  if (JsonValue found = object_.optional(key)) return found;
  if (class_ == nullptr) return plain_alias(key);
  const auto alias = class_->aliases.find(key);
  if (alias == class_->aliases.end()) return key == "hidden_size" ? plain_alias(key) : JsonValue{};
  read_->emplace(alias->second);
  return object_.optional(alias->second);
}

// Names of older files whose class is in neither package.
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

std::optional<std::int64_t> ConfigPart::number(std::string_view key) {
  JsonValue found = value(key);
  if (!found) {
    const auto text = class_default(key);
    return text ? scaled_decimal_of(*text, 0) : std::nullopt;
  }
  if (!found.is_number()) return std::nullopt;
  return found.integer(0, kFigureMax);
}

std::int64_t ConfigPart::need(std::string_view key) {
  if (const auto found = number(key)) return *found;
  refuse(fmt::format("found no key `{}`, which model_type '{}' needs", key, type_));
  return 1;
}

std::string ConfigPart::text(std::string_view key) {
  JsonValue found = value(key);
  if (!found) return std::string(class_default(key).value_or(""));
  return found.is_string() ? std::string(found.string()) : std::string();
}

bool ConfigPart::flag(std::string_view key, bool otherwise) {
  JsonValue found = value(key);
  if (!found) {
    const auto text = class_default(key);
    return text ? *text == "true" : otherwise;
  }
  return found.is_null() ? otherwise : found.text() == "true";
}

bool ConfigPart::has_list(std::string_view key) {
  const JsonValue found = value(key);
  return found && found.is_array();
}

std::vector<std::string> ConfigPart::words(std::string_view key) {
  std::vector<std::string> list;
  if (has_list(key))
    for (JsonValue word : value(key).array()) list.emplace_back(word.string());
  return list;
}

std::vector<std::int64_t> ConfigPart::numbers(std::string_view key) {
  std::vector<std::int64_t> list;
  if (!has_list(key)) return list;
  for (JsonValue number : value(key).array()) {
    const std::string text = number.text();
    const bool is_word = text == "true" || text == "false" || number.is_null();
    list.push_back(number.is_null() ? -1
                   : is_word        ? text == "true"
                                    : number.integer(-1, kFigureMax));
  }
  return list;
}

std::optional<ConfigPart> ConfigPart::part(std::string_view key) {
  JsonValue found = value(key);
  if (!found || !found.is_object()) return std::nullopt;
  JsonObject object = found.object();
  JsonValue type = object.optional("model_type");
  return ConfigPart(object, type && type.is_string() ? type.string() : std::string_view{});
}

std::vector<ConfigPart> ConfigPart::parts(std::string_view key) {
  std::vector<ConfigPart> list;
  if (has_list(key))
    for (JsonValue entry : value(key).array()) list.emplace_back(entry.object(), "");
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

}  // namespace lockstep
