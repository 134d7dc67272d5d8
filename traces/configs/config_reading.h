// A config.json while its layers are derived: the parts of the file, the model under construction,
// and what rules of several families share.
//
// Invariants
// (1) model().kinds has no two entries that differ in the name alone, and no two of one name; every
//     layer names its kind by index.
// (2) model().assumptions only grows: one line for each value that no key of the file says.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "reference/plan/model_spec.h"
#include "traces/configs/config_part.h"

namespace lockstep {

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

}  // namespace lockstep
