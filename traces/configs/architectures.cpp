#include "traces/configs/architectures.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "base/check.h"

namespace lockstep {
namespace {

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
     decoder<DecoderTraits{.reads_types = false,
                           .reads_head_dim = false,
                           .refuses_mixes = true}>},  // windows in all layers or in none
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

// A line of the table: RULE: ARCHITECTURE ..., with RULE a name of kRules, pooling_ before it for
// pooling models, or text=ARCHITECTURE (empty: that of the text part's configuration).
constexpr std::string_view kTable =
#include "traces/configs/architectures.inc"
    ;

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

const Architecture* find_architecture(std::string_view name) {
  static const auto table = [] {
    std::map<std::string_view, Architecture> architectures;
    Architecture current;
    for (const std::string_view word : words_of(kTable)) {
      if (word.ends_with(':'))
        current = listed_rule(word.substr(0, word.size() - 1));
      else
        architectures[word] = current;
    }
    return architectures;
  }();
  const auto at = table.find(name);
  return at == table.end() ? nullptr : &at->second;
}

}  // namespace lockstep
