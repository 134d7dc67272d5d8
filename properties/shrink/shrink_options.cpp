#include <algorithm>

#include "properties/shrink/case_parts.h"
#include "properties/shrink/shrink_trial.h"

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
      if (is_state_kind(spec.kind)) spec.num_speculative_blocks = count;
    });
}

// A mode without prefix caching, in which a block of states holds the longest request.
void without_saved_states(SavedCase& saved) {
  saved.engine.mamba_cache_mode = MambaCacheMode::none;
  saved.engine.enable_prefix_caching = false;
  for (std::size_t g = 0; g < saved.cache.groups.size(); ++g)
    change_specs(saved, g, [](KVCacheSpec& spec) { spec.mamba_cache_mode = MambaCacheMode::none; });
}

bool is_reset(const RunField& field) {
  return counts_as_set(field) ||
         (field.saved_in != SavedIn::nowhere && field.shrinks == Shrinks::size);
}

// Options of the engine first, then of the backend, and settings from the last to the first.
void reset_options(ShrinkTrial& trial) {
  trial.attempt_with([](SavedCase& saved) { set_drafts(saved, 0); });
  trial.attempt_with(without_saved_states);
  trial.attempt_with(without_checkpoints);
  trial.attempt_with(
      [](SavedCase& saved) { saved.engine.mamba_cache_mode = MambaCacheMode::none; });
  const auto reset = [&](const RunField& field) {
    trial.attempt_with([&](SavedCase& saved) { field.copy(simplest_run(), saved); });
  };
  for (const RunField& field : run_fields())
    if (is_reset(field) && field.saved_in == SavedIn::engine) reset(field);
  trial.lower_with(
      1, [](SavedCase& saved) { return std::int64_t{saved.engine.num_spec_tokens}; }, set_drafts);
  trial.attempt_with([](SavedCase& saved) { saved.backend = "none"; });
  trial.attempt_with([](SavedCase& saved) { saved.check = CheckMode::fast; });
  trial.attempt_with([](SavedCase& saved) {
    if (saved.check == CheckMode::hunt) saved.check = CheckMode::check;
  });
  for (const RunField& field : run_fields())
    if (is_reset(field) && field.saved_in == SavedIn::header) reset(field);
  trial.attempt_with([](SavedCase& saved) { saved.trace.header.engine.reset(); });
  for (std::size_t i = run_fields().size(); i-- > 0;) {
    const RunField& field = run_fields()[i];
    if (is_reset(field) && field.saved_in == SavedIn::settings) reset(field);
  }
}

// One part less, as often as it goes.
void drop_connector_parts(ShrinkTrial& trial) {
  for (std::size_t i = trial.best().connector.parts.size(); i-- > 0;)
    trial.attempt_with([&](SavedCase& saved) {
      std::vector<ConnectorKind>& parts = saved.connector.parts;
      if (parts.size() > 1) parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(i));
    });
}

// Where one rank, or a connector's number by default, does not fail: as few as do.
void lower_numbers(ShrinkTrial& trial) {
  for (const RunField& field : run_fields())
    if (field.shrinks == Shrinks::lowered && !field.is_default(trial.best()))
      trial.lower_with(
          field.lowest, [&](SavedCase& saved) { return field.number(saved); }, field.set_number);
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
  drop_connector_parts(trial);
  lower_numbers(trial);
  trial.lower(1, [](SavedCase& saved) { return &saved.engine.max_num_seqs; });
  trial.lower(longest_request(trial.best()),
              [](SavedCase& saved) { return &saved.engine.max_model_len; });
  trial.lower(1, [](SavedCase& saved) { return &saved.engine.max_num_batched_tokens; });
  if (trial.best().engine.long_prefill_token_threshold > 0)
    trial.lower(1, [](SavedCase& saved) { return &saved.engine.long_prefill_token_threshold; });
}

}  // namespace lockstep
