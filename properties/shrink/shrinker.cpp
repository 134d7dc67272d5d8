#include "properties/shrink/shrinker.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace lockstep {

// Returns false if the failure is stated by the end of the recording: then no recorded decision
// leads to it, and removing records proves nothing.
static bool depends_on_decisions(const SavedCase& saved) {
  return saved.decide == Decides::model || !saved.recording ||
         saved.recording->end.failed_check.empty();
}

std::optional<ShrinkResult> shrink(const SavedCase& first, const StillFails& still_fails,
                                   const ShrinkOptions& options) {
  // The case is compared and kept as its file restores it: a field that a file does not contain
  // cannot be the cause of a failure that the file shows.
  auto read = saved_case_from_text(first.name, saved_case_to_text(first));
  if (!read) return std::nullopt;
  SavedCase start = std::move(*read);
  // `expected` describes the first case. The caller sets it again for the result.
  start.expected.reset();
  const std::optional<std::int64_t> steps = still_fails(start, 0);
  if (!steps) return std::nullopt;
  ShrinkTrial trial(std::move(start), *steps, still_fails, options.evaluations_max,
                    options.progress);
  // A round that accepts nothing is the last: every pass has then failed on the same case.
  std::int64_t accepted = -1;
  while (accepted != trial.accepted() && !trial.is_exhausted()) {
    accepted = trial.accepted();
    if (!depends_on_decisions(trial.best())) break;
    shrink_records(trial);
    // Recorded decisions are valid only for the recorded prompts, cache and options.
    if (trial.best().decide == Decides::recording) continue;
    // Scale comes first: halving everything saves most of the later single steps.
    shrink_scale(trial);
    shrink_plan(trial);
    shrink_requests(trial);
    shrink_options(trial);
    shrink_arrivals(trial);
  }
  return ShrinkResult{.smallest = trial.best(),
                      .steps = trial.steps(),
                      .first_steps = *steps,
                      .evaluations = trial.evaluations() + 1,
                      .accepted = trial.accepted(),
                      .is_minimal = !trial.is_exhausted()};
}

namespace {

// Returns 128 bits of a text. Two candidates with equal digests count as the same; a collision
// would skip one candidate.
std::pair<std::uint64_t, std::uint64_t> digest_of(const std::string& text) {
  std::uint64_t a = kEmptyPrefix, b = ~kEmptyPrefix;
  for (std::size_t at = 0; at < text.size(); at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data() + at, std::min(sizeof(word), text.size() - at));
    a = mix(a ^ word);
    b = mix(b + word * kWordStep);
  }
  return {a, b};
}

}  // namespace

ShrinkTrial::ShrinkTrial(SavedCase first, std::int64_t steps, StillFails still_fails,
                         std::int64_t evaluations_max, ShrinkProgress progress)
    : best_(std::move(first)),
      steps_(steps),
      rank_(rank_of(best_, steps)),
      broken_rules_(broken_rules(best_)),
      still_fails_(std::move(still_fails)),
      evaluations_max_(evaluations_max),
      progress_(std::move(progress)) {}

// The steps of a candidate are known only after a run. It is worth one only if it is smaller than
// the best case under the assumption that it runs as many steps.
bool ShrinkTrial::could_be_smaller(const CaseRank& candidate) const {
  CaseRank at_best = candidate;
  at_best[kRankOfSteps] = rank_[kRankOfSteps];
  return at_best < rank_;
}

// With as many layers, more steps make a case larger, whatever else it has less of. A failure that
// counts no steps (a crash) has none to compare.
std::int64_t ShrinkTrial::steps_max(const CaseRank& candidate) const {
  const auto end = candidate.begin() + kRankOfSteps;
  return std::equal(candidate.begin(), end, rank_.begin()) ? steps_ : 0;
}

// Cheap tests come first: rank, rules, known candidates, the file. Only then is the case judged.
bool ShrinkTrial::attempt(const SavedCase& changed) {
  if (!could_be_smaller(rank_of(changed, 0))) return false;
  if ((broken_rules(changed) & ~broken_rules_) != 0) return false;
  const std::string text = saved_case_to_text(changed);
  // A candidate that did not fail is dropped. One that failed is compared again, without judging,
  // because the best case may have changed.
  const auto digest = digest_of(text);
  auto tried = tried_.find(digest);
  if (tried != tried_.end() && !tried->second) return false;
  // As its file restores it: without fields that its kind of cache does not use, and with
  // consecutive runs of one source joined.
  auto read = saved_case_from_text(changed.name, text);
  if (!read) return false;
  CaseRank rank = rank_of(*read, 0);
  if (!could_be_smaller(rank)) return false;
  if (tried == tried_.end()) {
    if (is_exhausted()) return false;
    ++evaluations_;
    tried = tried_.emplace(digest, still_fails_(*read, steps_max(rank))).first;
    if (progress_) progress_(evaluations_, best_);
  }
  if (!tried->second) return false;
  // The real number of steps decides: more steps can make a candidate larger than the best case.
  rank[kRankOfSteps] = *tried->second;
  if (!(rank < rank_)) return false;
  best_ = std::move(*read);
  steps_ = *tried->second;
  rank_ = rank;
  ++accepted_;
  return true;
}

// Gaps of the whole range, half of it, and so on down to 1: a value that must be exact is reached
// in a logarithmic number of rounds.
bool ShrinkTrial::lower_with(std::int64_t least, const std::function<std::int64_t(SavedCase&)>& get,
                             const std::function<void(SavedCase&, std::int64_t)>& set) {
  bool any = false;
  for (bool went = true; went;) {
    went = false;
    SavedCase now = best_;
    const std::int64_t value = get(now);
    for (std::int64_t gap = value - least; gap > 0 && !went; gap /= 2)
      went = attempt_with([&](SavedCase& saved) { set(saved, value - gap); });
    any |= went;
  }
  return any;
}

namespace {

// Sets the drafts, the method and the state blocks that groups keep for them.
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

// Sets mode none, without prefix caching: in it a state block holds the longest request.
void without_saved_states(SavedCase& saved) {
  saved.engine.mamba_cache_mode = MambaCacheMode::none;
  saved.engine.enable_prefix_caching = false;
  for (std::size_t g = 0; g < saved.cache.groups.size(); ++g)
    change_specs(saved, g, [](KVCacheSpec& spec) { spec.mamba_cache_mode = MambaCacheMode::none; });
}

// Sizes are reset here too, although they do not count as options.
bool is_reset(const RunField& field) {
  return counts_as_set(field) ||
         (field.saved_in != SavedIn::nowhere && field.shrinks == Shrinks::size);
}

// Resets options: of the engine first, then of the backend, then settings from the last to the
// first.
void reset_options(ShrinkTrial& trial) {
  // Combined resets come first, because each of their parts alone breaks a rule.
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
  // check is simpler than hunt, if fast does not fail.
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

// Removes the parts of a connector one by one, but never the last: that is an option of its own.
void drop_connector_parts(ShrinkTrial& trial) {
  for (std::size_t i = trial.best().connector.parts.size(); i-- > 0;)
    trial.attempt_with([&](SavedCase& saved) {
      std::vector<ConnectorKind>& parts = saved.connector.parts;
      if (parts.size() > 1) parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(i));
    });
}

// Lowers ranks and a connector's numbers where their defaults do not fail.
void lower_numbers(ShrinkTrial& trial) {
  for (const RunField& field : run_fields())
    if (field.shrinks == Shrinks::lowered && !field.is_default(trial.best()))
      trial.lower_with(
          field.lowest, [&](SavedCase& saved) { return field.number(saved); }, field.set_number);
}

// Returns the tokens of the longest request: with a lower limit it would be refused, a different
// outcome.
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

namespace {

using Change = std::function<void(SavedCase&)>;

// Attempts a change of the plan, with tensors planned for it. If that loses the failure, with the
// tensors as they were: padding may be part of the failure.
bool attempt_plan(ShrinkTrial& trial, const Change& change) {
  SavedCase candidate = trial.best();
  change(candidate);
  SavedCase planned = candidate;
  return (plan_again(planned) && trial.attempt(planned)) || trial.attempt(candidate);
}

// As ShrinkTrial::lower(), for a number in the specs of a group. `set` may change others with it.
void lower_in_plan(ShrinkTrial& trial, std::int64_t least,
                   const std::function<std::int64_t(const SavedCase&)>& get,
                   const std::function<void(SavedCase&, std::int64_t)>& set) {
  for (bool went = true; went;) {
    went = false;
    const std::int64_t value = get(trial.best());
    for (std::int64_t gap = value - least; gap > 0 && !went; gap /= 2)
      went = attempt_plan(trial, [&](SavedCase& saved) { set(saved, value - gap); });
  }
}

void lower_spec(ShrinkTrial& trial, std::size_t group, std::int64_t least,
                std::int64_t KVCacheSpec::*number) {
  lower_in_plan(
      trial, least, [&](const SavedCase& saved) { return saved.cache.groups[group].spec.*number; },
      [&](SavedCase& saved, std::int64_t value) {
        change_specs(saved, group, [&](KVCacheSpec& spec) { spec.*number = value; });
      });
}

// Removes whole groups first, then single layers, from the last to the first, so that indexes stay
// valid.
void remove_layers(ShrinkTrial& trial) {
  for (std::size_t g = trial.best().cache.groups.size(); g-- > 0;) {
    const auto drop_group = [&](SavedCase& saved) { saved = without_group(saved, g); };
    if (trial.best().cache.groups.size() > 1 && attempt_plan(trial, drop_group)) continue;
    for (std::size_t i = trial.best().cache.groups[g].layer_names.size(); i-- > 0;)
      if (trial.best().cache.groups[g].layer_names.size() > 1)
        attempt_plan(trial, [&](SavedCase& saved) { saved = without_layer(saved, g, i); });
  }
}

// Lowers a block size with its kernel block and, if they are equal, the engine's block sizes. The
// kernel block stays if it divides the new size; otherwise the block is no longer split. All state
// groups change together: their blocks have one size.
void set_block_size(SavedCase& saved, std::size_t group, std::int64_t size) {
  const auto is_of_states = [&](std::size_t g) {
    return is_state_kind(saved.cache.groups[g].spec.kind);
  };
  for (std::size_t g = 0; g < saved.cache.groups.size(); ++g) {
    if (g != group && !(is_of_states(g) && is_of_states(group))) continue;
    change_specs(saved, g, [&](KVCacheSpec& spec) { spec.block_size = size; });
    std::int64_t& kernel = saved.kernel_block_sizes[g];
    if (size % kernel != 0) kernel = size;
  }
}

void lower_block_size(ShrinkTrial& trial, std::size_t group) {
  const auto get = [&](const SavedCase& saved) {
    return saved.cache.groups[group].spec.block_size;
  };
  const auto set = [&](SavedCase& saved, std::int64_t size) {
    const std::int64_t before = get(saved);
    set_block_size(saved, group, size);
    if (saved.engine.block_size == before)
      saved.engine.block_size = static_cast<std::int32_t>(size);
    if (saved.engine.mamba_block_size == before)
      saved.engine.mamba_block_size = static_cast<std::int32_t>(size);
  };
  lower_in_plan(trial, 1, get, set);
  // A state block in mode none is as long as the longest request, and shrinks with it.
  trial.attempt_with([&](SavedCase& saved) {
    set_block_size(saved, group, std::min<std::int64_t>(get(saved), saved.engine.max_model_len));
    saved.kernel_block_sizes[group] = get(saved);
  });
}

// Removes state tensors, then lowers the dimensions of the remaining ones.
void shrink_states(ShrinkTrial& trial, std::size_t group) {
  const auto states = [&](SavedCase& saved) -> std::vector<StateTensorSpec>& {
    return saved.cache.groups[group].spec.states;
  };
  for (std::size_t i = trial.best().cache.groups[group].spec.states.size(); i-- > 0;) {
    const bool removed = attempt_plan(trial, [&](SavedCase& saved) {
      if (states(saved).size() > 1)
        states(saved).erase(states(saved).begin() + static_cast<std::ptrdiff_t>(i));
    });
    if (removed) continue;
    const std::size_t dims = trial.best().cache.groups[group].spec.states[i].dims.size();
    for (std::size_t d = 0; d < dims; ++d)
      lower_in_plan(
          trial, 1,
          [&](const SavedCase& saved) { return saved.cache.groups[group].spec.states[i].dims[d]; },
          [&](SavedCase& saved, std::int64_t value) { states(saved)[i].dims[d] = value; });
  }
}

// Returns the smallest head size to try: rows of 8 bytes. Shorter rows would often be equal, and
// their content could not be distinguished.
std::int64_t least_head_size(const KVCacheSpec& spec) {
  return std::min(spec.head_size, 8 / itemsize_bytes(spec.dtype));
}

// Shrinks a group: packing and separate V sizes first, then rows, windows, states and blocks.
void shrink_group(ShrinkTrial& trial, std::size_t group) {
  attempt_plan(trial, [&](SavedCase& saved) { saved.cache.groups[group].layers_per_page = 1; });
  attempt_plan(trial, [&](SavedCase& saved) {
    change_specs(saved, group, [](KVCacheSpec& spec) { spec.head_size_v = 0; });
  });
  if (!is_state_kind(trial.best().cache.groups[group].spec.kind)) {
    lower_spec(trial, group, 1, &KVCacheSpec::num_kv_heads);
    lower_spec(trial, group, least_head_size(trial.best().cache.groups[group].spec),
               &KVCacheSpec::head_size);
  }
  if (trial.best().cache.groups[group].spec.sliding_window > 0)
    lower_spec(trial, group, 1, &KVCacheSpec::sliding_window);
  if (trial.best().cache.groups[group].spec.attention_chunk_size > 0)
    lower_spec(trial, group, 1, &KVCacheSpec::attention_chunk_size);
  shrink_states(trial, group);
  lower_block_size(trial, group);
}

}  // namespace

void shrink_plan(ShrinkTrial& trial) {
  // Whole kernel blocks.
  trial.attempt_with([](SavedCase& saved) {
    for (std::size_t g = 0; g < saved.cache.groups.size(); ++g)
      saved.kernel_block_sizes[g] = saved.cache.groups[g].spec.block_size;
  });
  remove_layers(trial);
  // Plans the tensors again without other changes: drops padding.
  attempt_plan(trial, [](SavedCase&) {});
  for (std::size_t g = 0; g < trial.best().cache.groups.size(); ++g) shrink_group(trial, g);
  // Two blocks: the null block and one more.
  trial.lower_with(
      2, [](SavedCase& saved) { return saved.cache.num_blocks; },
      [](SavedCase& saved, std::int64_t blocks) { set_num_blocks(saved, blocks); });
}

namespace {

// 0 and 1 stay; 5 becomes 3.
template <class T>
T half(T count) {
  return count > 1 ? (count + 1) / 2 : count;
}

// Halves all counts of tokens. A failure that needs three blocks needs three blocks of any size:
// prompts, blocks and limits must shrink together where each one alone would lose it.
void halve(SavedCase& saved) {
  for (std::size_t g = 0; g < saved.cache.groups.size(); ++g) {
    change_specs(saved, g, [](KVCacheSpec& spec) {
      spec.block_size = half(spec.block_size);
      spec.sliding_window = half(spec.sliding_window);
      spec.attention_chunk_size = half(spec.attention_chunk_size);
    });
    saved.kernel_block_sizes[g] = half(saved.kernel_block_sizes[g]);
  }
  EngineConfig& engine = saved.engine;
  for (std::int32_t* limit :
       {&engine.block_size, &engine.mamba_block_size, &engine.max_num_batched_tokens,
        &engine.max_model_len, &engine.long_prefill_token_threshold})
    *limit = half(*limit);
  for (RequestSpec* request : requests_of(saved)) {
    for (TokenRun& run : request->prompt.runs) run.count = half(run.count);
    drop_unused_tokens(request->prompt);
  }
  for (TraceRequest* request : trace_requests_of(saved)) {
    request->set_output_length(half(request->output.length));
    request->spec.max_tokens = half(request->spec.max_tokens);
    if (request->abort && request->abort->after_tokens)
      *request->abort->after_tokens = half(*request->abort->after_tokens);
  }
}

// Drops the last tokens of a prompt, all but one.
void cut_prompt(Prompt& prompt, std::int64_t tokens) {
  while (tokens > 0 && prompt.size() > 1) {
    TokenRun& last = prompt.runs.back();
    const std::int64_t cut = std::min({tokens, std::int64_t{last.count}, prompt.size() - 1});
    last.count -= static_cast<std::uint32_t>(cut);
    tokens -= cut;
    if (last.count == 0) prompt.runs.pop_back();
  }
  drop_unused_tokens(prompt);
}

// Lowers the longest request that the engine takes, and cuts the requests that would run past it:
// a failure at the end of a request needs both. Outputs first, then prompts.
void lower_model_length(ShrinkTrial& trial) {
  for (const bool cuts_prompts : {false, true})
    trial.lower_with(
        2, [](SavedCase& saved) { return std::int64_t{saved.engine.max_model_len}; },
        [&](SavedCase& saved, std::int64_t length) {
          saved.engine.max_model_len = static_cast<std::int32_t>(length);
          for (TraceRequest* request : trace_requests_of(saved)) {
            RequestSpec& spec = request->spec;
            const std::int64_t past = spec.prompt.size() + spec.max_tokens - length;
            if (past > 0 && cuts_prompts) cut_prompt(spec.prompt, past);
            const std::int64_t left = std::max<std::int64_t>(1, length - spec.prompt.size());
            if (left < spec.max_tokens) request->end_at_length(static_cast<std::int32_t>(left));
          }
        });
}

}  // namespace

// Logarithmic: a case with blocks of 16 tokens takes at most four rounds.
void shrink_scale(ShrinkTrial& trial) {
  for (bool went = true; went;) {
    went = trial.attempt_with([](SavedCase& saved) {
      halve(saved);
      plan_again(saved);
    });
  }
  lower_model_length(trial);
}

}  // namespace lockstep
