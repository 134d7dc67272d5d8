#include <algorithm>
#include <string>

#include "properties/shrink/case_parts.h"
#include "properties/shrink/shrink_passes.h"
#include "sim/connectors/connector_config.h"
#include "traces/formats/engine_options.h"

namespace lockstep {
namespace {

// Drafts and the blocks that state groups keep for them.
void set_drafts(SavedCase& saved, std::int64_t count) {
  saved.engine.num_spec_tokens = static_cast<std::int32_t>(count);
  if (count == 0) {
    saved.engine.spec_method = SpecMethod::none;
    saved.engine.num_hash_lookahead_tokens = kEngineHashLookahead;
  }
  for (std::size_t g = 0; g < saved.cache.groups.size(); ++g)
    change_specs(saved, g, [&](KVCacheSpec& spec) {
      if (spec.kind == CacheKind::mamba) spec.num_speculative_blocks = count;
    });
}

// A mode without prefix caching, in which a block of states holds the longest request.
void without_saved_states(SavedCase& saved) {
  saved.engine.mamba_cache_mode = MambaCacheMode::none;
  saved.engine.enable_prefix_caching = false;
  for (std::size_t g = 0; g < saved.cache.groups.size(); ++g)
    change_specs(saved, g, [](KVCacheSpec& spec) { spec.mamba_cache_mode = MambaCacheMode::none; });
}

void reset_options(ShrinkTrial& trial) {
  const EngineConfig defaults;
  trial.attempt_with([](SavedCase& saved) { set_drafts(saved, 0); });
  trial.attempt_with(without_saved_states);
  trial.attempt_with(
      [](SavedCase& saved) { saved.engine.mamba_cache_mode = MambaCacheMode::none; });
  for (const std::string& name : all_engine_options(defaults).given) {
    if (name.starts_with("max_") || name == "engine" || name == "mamba_cache_mode") continue;
    trial.attempt_with([&](SavedCase& saved) {
      apply_engine_options({.config = defaults, .given = {name}}, saved.engine);
    });
  }
  trial.lower_with(
      1, [](SavedCase& saved) { return std::int64_t{saved.engine.num_spec_tokens}; }, set_drafts);
}

void reset_choices(ShrinkTrial& trial) {
  trial.attempt_with([](SavedCase& saved) { saved.backend = "none"; });
  trial.attempt_with([](SavedCase& saved) { saved.check = "fast"; });
  trial.attempt_with([](SavedCase& saved) {
    if (saved.check == "hunt") saved.check = "check";
  });
  trial.attempt_with([](SavedCase& saved) { saved.layout = CacheLayout::NHD; });
  trial.attempt_with(
      [](SavedCase& saved) { saved.attention_backend = AttentionBackend::flash_attn; });
  trial.attempt_with([](SavedCase& saved) { saved.layout_rule = LayoutRule::isolated; });
  trial.attempt_with([](SavedCase& saved) { saved.seed = 0; });
  trial.attempt_with([](SavedCase& saved) { saved.trace.header.engine.reset(); });
  for (std::size_t i = trial.best().settings.size(); i-- > 0;)
    trial.attempt_with([i](SavedCase& saved) {
      saved.settings.erase(saved.settings.begin() + static_cast<std::ptrdiff_t>(i));
    });
}

// Where one rank alone does not fail, as few as do.
void lower_degrees(ShrinkTrial& trial) {
  for (std::size_t i = 0; i < trial.best().settings.size(); ++i) {
    if (!trial.best().settings[i].first.ends_with("_parallel_size")) continue;
    trial.lower_with(
        2, [i](SavedCase& saved) { return saved.settings[i].second; },
        [i](SavedCase& saved, std::int64_t value) { saved.settings[i].second = value; });
  }
}

// One part less, as often as it goes.
void drop_connector_parts(ShrinkTrial& trial) {
  const auto parts = [](const SavedCase& saved) {
    return connector_parts_from_number(setting_of(saved, "connector").value_or(0));
  };
  for (std::size_t i = parts(trial.best()).size(); i-- > 0;)
    trial.attempt_with([&](SavedCase& saved) {
      std::vector<ConnectorKind> fewer = parts(saved);
      if (fewer.size() < 2) return;
      fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(i));
      set_setting(saved, "connector", connector_parts_number(fewer));
    });
}

void lower_connector(ShrinkTrial& trial) {
  drop_connector_parts(trial);
  for (std::size_t i = 0; i < trial.best().settings.size(); ++i) {
    if (!is_connector_number(trial.best().settings[i].first)) continue;
    trial.lower_with(
        1, [i](SavedCase& saved) { return saved.settings[i].second; },
        [i](SavedCase& saved, std::int64_t value) { saved.settings[i].second = value; });
  }
}

// What the longest request takes: a limit below it would have it refused.
std::int64_t longest_request(const SavedCase& saved) {
  std::int64_t longest = 1;
  for (const RequestSpec* request : requests_of(saved))
    longest = std::max(longest, request->prompt.size() + request->max_tokens);
  return longest;
}

}  // namespace

void shrink_options(ShrinkTrial& trial) {
  reset_options(trial);
  reset_choices(trial);
  lower_degrees(trial);
  lower_connector(trial);
  trial.lower(1, [](SavedCase& saved) { return &saved.engine.max_num_seqs; });
  trial.lower(longest_request(trial.best()),
              [](SavedCase& saved) { return &saved.engine.max_model_len; });
  trial.lower(1, [](SavedCase& saved) { return &saved.engine.max_num_batched_tokens; });
  if (trial.best().engine.long_prefill_token_threshold > 0)
    trial.lower(1, [](SavedCase& saved) { return &saved.engine.long_prefill_token_threshold; });
}

}  // namespace lockstep
