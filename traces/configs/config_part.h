// One object of a Hugging Face config.json, with what its configuration class adds: defaults of
// keys that the file leaves out, and the names under which the class stores them.
//
// Invariants
// (1) A key that the file has wins, null included: null means that the class derives the value.
// (2) Every key that a rule reads is remembered, by all copies of the part; unread_keys() lists the
//     others.
//
// Sources of config_classes.inc: the configuration classes of transformers 5.20.2 and vLLM 0.33.0.
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

namespace lockstep {

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

}  // namespace lockstep
