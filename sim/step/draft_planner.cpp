#include "sim/step/draft_planner.h"

#include <fmt/core.h>

#include <algorithm>

#include "reference/plan/block_sizes.h"
#include "reference/profiles/engine_profile.h"
#include "reference/profiles/releases.h"
#include "sim/step/model_step.h"
#include "sim/step/program_builder.h"

namespace lockstep {
namespace {

// Returns the invented token of a step's n-th unknown draft: negative, so it is never a real token.
constexpr std::int32_t unnamed(std::size_t n) { return -1 - static_cast<std::int32_t>(n); }

// Returns true for caches with one row per token that no replay recomputes.
bool has_plain_rows(const KVCacheSpec& spec) {
  const bool is_kept = attends_to_all(spec.kind) || is_sliding_window(spec.kind);
  return is_kept && !spec.bounded_replay && is_one_row(spec.tokens_per_state);
}

// Returns how many tokens after its own position a row depends on: none for a separate model, the
// next token for EAGLE and the first MTP module, one more per further module.
std::int64_t tokens_ahead(DraftShape shape, std::int32_t module) {
  return shape == DraftShape::standalone ? 0 : 1 + module;
}

// Returns why the passes cannot be followed; empty: they can.
std::string why_not_followed(const EngineConfig& engine, const BackendConfig& backend,
                             DraftRunner runner, DraftShape shape) {
  const KVCacheConfig& plan = backend.plan;
  if (runner == DraftRunner::unknown)
    return fmt::format("the draft model of {} is not modelled", engine.engine);
  if (backend.context.num_ranks * backend.parallel.tp_size * backend.parallel.pp_size > 1)
    return "several ranks";
  if (replayed_tokens(plan) > 0) return "with windows that are recomputed after a hit";
  for (const KVCacheGroupSpec& group : plan.groups)
    for (std::size_t i = 0; i < group.layer_names.size(); ++i)
      if (draft_module_of(plan, group.layer_names[i]) >= 0 && !has_plain_rows(group.layer_spec(i)))
        return fmt::format("{} keeps other rows than one a token", group.layer_names[i]);
  if (shape != DraftShape::modules) return {};
  if (engine.async_scheduling) return "several modules, whose drafts in flight are unknown";
  if (engine.num_prefill_lookahead_tokens < engine.num_spec_tokens)
    return fmt::format("several modules, and chunks that end {} tokens before what they read",
                       engine.num_prefill_lookahead_tokens);
  if (engine.num_spec_tokens > std::ssize(plan.draft_modules))
    return fmt::format("{} drafts of {} modules, each of which runs several times",
                       engine.num_spec_tokens, plan.draft_modules.size());
  return {};
}

}  // namespace

FollowedDrafter followed_drafter(const EngineConfig& engine, const BackendConfig& backend,
                                 bool has_connector) {
  FollowedDrafter followed;
  const bool is_eagle = engine.spec_method == SpecMethod::eagle;
  if (backend.plan.draft_modules.empty() || num_lookahead_tokens(engine) == 0) return followed;
  const EngineProfile* profile = find_engine_profile(engine.engine);
  const DraftRunner runner =
      profile == nullptr ? DraftRunner::unknown : profile->release->draft_runner;
  const auto num_modules =
      std::min<std::int64_t>(std::ssize(backend.plan.draft_modules), engine.num_spec_tokens);
  // Only model runner V2 runs each module once per step; V1 runs the first module for every draft.
  const DraftShape shape = !is_eagle ? DraftShape::standalone
                           : num_modules > 1 && runner == DraftRunner::second
                               ? DraftShape::modules
                               : DraftShape::one_by_one;
  followed.why_not =
      has_connector ? "a KV connector" : why_not_followed(engine, backend, runner, shape);
  if (followed.why_not.empty())
    followed.config = {.shape = shape,
                       .runner = runner,
                       .num_drafts = engine.num_spec_tokens,
                       .max_model_len = engine.max_model_len};
  return followed;
}

// Finds the modules that run in each group. A layer's lane is its module + 1; lane 0 is the target
// model.
DraftPlanner::DraftPlanner(const EngineConfig& engine, const BackendConfig& config,
                           MemoryModel& model, Worker& worker, RunCounts& counts)
    : drafter_(config.drafter),
      drops_a_block_(engine.spec_method == SpecMethod::eagle &&
                     num_hash_lookahead_tokens_of(engine) == 0),
      groups_(config.plan.groups),
      model_(model),
      worker_(worker),
      counts_(counts),
      block_size_(engine.block_size),
      modules_(config.plan.groups.size()) {
  const std::int32_t num_run = drafter_.shape == DraftShape::modules ? drafter_.num_drafts : 1;
  for (const ModelLayer& layer : model.layers()) {
    std::vector<std::int32_t>& of_group = modules_[layer.group];
    const std::int32_t module = layer.lane - 1;
    if (module >= 0 && module < num_run && std::ranges::find(of_group, module) == of_group.end())
      of_group.push_back(module);
  }
}

DraftPlanner::Tokens DraftPlanner::tokens_of(const ScheduledRequest& scheduled,
                                             const WorkerRequest& request,
                                             std::span<const std::int32_t> sampled,
                                             std::span<const std::int32_t> proposed) const {
  Tokens tokens;
  tokens.num_before = request.num_known;
  ContentId content = request.prefix.content(request.num_known - 1);
  for (const std::int32_t token : sampled)
    tokens.sampled.push_back(content = next_content(content, token));
  const std::int64_t end = std::int64_t{scheduled.computed} + scheduled.num_tokens;
  // A verified step keeps its known tokens and the accepted drafts. Of `sampled`, the last one is
  // new: its position is not computed yet. Example: 1 known token and 3 drafts, 2 tokens sampled: 1
  // draft was accepted, 2 rejected.
  const std::int64_t standing =
      std::min(end, tokens.num_before + std::max<std::int64_t>(0, std::ssize(sampled) - 1));
  tokens.num_rejected = end - standing;
  tokens.last = standing - 1;
  const bool is_known = standing < tokens.num_known();
  // In a chunk of a prompt, the next token is known. After the last known token it is invented.
  content = content_at(request, tokens, standing - (is_known ? 0 : 1));
  if (!is_known) content = next_content(content, unnamed(drafter_.num_drafts));
  if (standing + 1 < tokens.num_known()) proposed = {};  // of a chunk: never used
  for (std::size_t i = 0; std::cmp_less(i, drafter_.num_drafts); ++i) {
    tokens.drafts.push_back(content);
    content = next_content(content, i < proposed.size() ? proposed[i] : unnamed(i));
  }
  return tokens;
}

// REQUIRES: position <= last + number of drafts.
ContentId DraftPlanner::content_at(const WorkerRequest& request, const Tokens& tokens,
                                   std::int64_t position) {
  if (position < tokens.num_before) return request.prefix.content(position);
  if (position < tokens.num_known()) return tokens.sampled[position - tokens.num_before];
  return tokens.drafts[position - tokens.last - 1];
}

void DraftPlanner::plan(const SchedulerOutput& decision, const ModelOutput& output,
                        std::span<const RequestId> requests, StepProgram& program) {
  tokens_.clear();
  if (!is_followed() || requests.empty()) return;
  std::int64_t longest = 0;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const auto row_of = [i](const auto& values, const auto& ends) {
      const std::size_t begin = i == 0 || ends.size() <= i ? 0 : ends[i - 1];
      const std::size_t end = ends.size() <= i ? 0 : ends[i];
      return std::span<const std::int32_t>(values).subspan(begin, end - begin);
    };
    tokens_.push_back(tokens_of(decision.scheduled[i], worker_.at(requests[i]),
                                row_of(output.tokens, output.token_ends),
                                row_of(output.draft_tokens, output.draft_ends)));
    tokens_.back().is_next_cached =
        is_next_cached(worker_.at(requests[i]), tokens_.back(), decision.scheduled[i]);
    const RowSlice& slice = program.rows[i];
    longest = std::max<std::int64_t>(longest, slice.first_position + slice.num_tokens);
  }
  // Model runner V1 skips its draft model in a step in which one request has no capacity for drafts
  // (gpu_model_runner.py, _input_fits_in_drafter).
  if (drafter_.runner == DraftRunner::first &&
      longest + drafter_.num_drafts > drafter_.max_model_len)
    return;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    WorkerRequest& request = worker_.at(requests[i]);
    if (drafter_.shape == DraftShape::modules)
      add_modules(program.rows[i], request, tokens_[i], program);
    else
      add_passes(program.rows[i], request, tokens_[i], program);
  }
}

// Adds the passes of one module. The first pass has as many tokens as the target's, rejected drafts
// included: the host does not wait for the device to report their number.
void DraftPlanner::add_passes(const RowSlice& slice, const WorkerRequest& request,
                              const Tokens& tokens, StepProgram& program) const {
  const bool is_standalone = drafter_.shape == DraftShape::standalone;
  const std::int64_t ahead = tokens_ahead(drafter_.shape, 0);
  const std::int64_t last = tokens.last + (is_standalone ? 1 : 0);
  const bool pads_rejected = is_standalone && drafter_.runner == DraftRunner::first;
  const std::int64_t num_rejected = pads_rejected ? 0 : tokens.num_rejected;
  program.draft_rows.push_back(
      {.row = slice.row,
       .first_position = slice.first_position,
       .num_tokens = static_cast<std::int32_t>(last + 1 + num_rejected - slice.first_position),
       .num_rejected = static_cast<std::int32_t>(num_rejected),
       .first_content = static_cast<std::int32_t>(program.draft_contents.size())});
  // Model runner V1 puts the last known token after a chunk of a prompt, whatever comes next
  // (llm_base_proposer.py, prepare_next_token_ids_padded); V2 takes the next one.
  const bool is_misled = drafter_.runner == DraftRunner::first &&
                         tokens.last + 2 < tokens.num_known() && tokens.sampled.empty();
  for (std::int64_t p = slice.first_position; p <= last; ++p) {
    const bool is_wrong = is_misled && p == last;
    program.draft_contents.push_back(
        drafter_row(is_wrong ? mix(content_at(request, tokens, tokens.last) ^
                                   content_at(request, tokens, tokens.num_known() - 1))
                             : content_at(request, tokens, p + ahead),
                    is_wrong ? DraftMark::wrong_token : DraftMark::settled));
  }
  for (std::int64_t i = 1; i <= num_rejected; ++i)
    program.draft_contents.push_back(drafter_row(
        next_content(content_at(request, tokens, last), unnamed(i)), DraftMark::rejected));
  for (std::size_t pass = 1; std::cmp_less(pass, drafter_.num_drafts); ++pass)
    program.draft_contents.push_back(drafter_row(
        tokens.drafts[pass], is_standalone ? DraftMark::of_drafts : DraftMark::proposed));
}

// Adds one pass per module. Rejected drafts are left out. Rows of later modules that depended on
// them are recomputed from kept inputs (multi_module_mtp/speculator.py).
void DraftPlanner::add_modules(const RowSlice& slice, WorkerRequest& request, const Tokens& tokens,
                               StepProgram& program) {
  const std::int32_t num_kept = drafter_.num_drafts - 1;
  // A prompt of one token that was padded with drafts makes the release recompute positions below 0
  // (docs/findings.md, 43); these are left out.
  const std::int64_t again =
      std::clamp<std::int64_t>(tokens.num_rejected - 1, 0, slice.first_position);
  const std::int64_t first = slice.first_position - again;
  std::vector<std::int64_t>& window = request.drafter.window;
  window.resize(num_kept, -1);
  const auto is_kept = [&](std::int64_t p) {
    return p >= slice.first_position || window[num_kept - slice.first_position + p] == p;
  };
  counts_.draft_rows_again += again;
  program.draft_rows.push_back(
      {.row = slice.row,
       .first_position = static_cast<std::int32_t>(first),
       .num_tokens = static_cast<std::int32_t>(tokens.last + 1 - first),
       .first_content = static_cast<std::int32_t>(program.draft_contents.size())});
  for (std::int32_t module = 0; module < drafter_.num_drafts; ++module)
    for (std::int64_t p = first; p <= tokens.last; ++p) {
      const std::int64_t behind = p + tokens_ahead(drafter_.shape, module);
      const ContentId content = content_at(request, tokens, behind);
      const DraftMark mark = !is_kept(p)                   ? DraftMark::wrong_window
                             : behind < tokens.num_known() ? DraftMark::settled
                                                           : DraftMark::of_drafts;
      program.draft_contents.push_back(drafter_row(content, mark));
    }
  for (std::int64_t p = std::max(first, tokens.last - num_kept + 1); p <= tokens.last; ++p)
    window[num_kept - 1 - tokens.last + p] = is_kept(p) ? p : -1;
}

// A block that is poisoned has no rows, so it also has no skipped ones. Passes run before the
// check: they overwrite rows of drafts that the next step would read.
Checked DraftPlanner::apply(const StepProgram& program, std::span<const RequestId> requests) {
  if (!is_followed() || requests.empty()) return {};
  for (const PoisonBlock& poison : program.poison) skipped_.erase(poison.block);
  if (program.draft_rows.empty()) skip_rows(program, requests);
  for (std::size_t i = 0; i < program.draft_rows.size(); ++i)
    LS_RETURN_UNLESS_FINE(write_passes(program, program.draft_rows[i], worker_.at(requests[i])));
  for (std::size_t i = 0; i < requests.size(); ++i)
    LS_RETURN_UNLESS_FINE(
        check_reads(program, program.rows[i], worker_.at(requests[i]), tokens_[i]));
  return {};
}

// All rows of the step, drafts excluded. A later pass over a row clears its mark.
void DraftPlanner::skip_rows(const StepProgram& program, std::span<const RequestId> requests) {
  for (std::size_t i = 0; i < requests.size(); ++i)
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      if (modules_[g].empty()) continue;
      const auto group = static_cast<std::int32_t>(g);
      const std::vector<BlockId>& table = worker_.at(requests[i]).tables[g];
      for (std::int64_t p = program.rows[i].first_position; p <= tokens_[i].last; ++p) {
        const auto [entry, offset] = place_of_token(model_, worker_, group, p);
        std::vector<std::uint8_t>& slots = skipped_[table[entry]];
        slots.resize(model_.block_size(group));
        slots[offset] = 1;
      }
    }
}

// Positions at max_model_len and after it share the last position: the engine clamps them.
Checked DraftPlanner::write_passes(const StepProgram& program, const DraftRow& row,
                                   WorkerRequest& request) {
  const std::uint64_t* content = program.draft_contents.data() + row.first_content;
  const std::int64_t end = std::int64_t{row.first_position} + row.num_tokens;
  const std::int32_t num_modules = drafter_.shape == DraftShape::modules ? drafter_.num_drafts : 1;
  for (std::int32_t module = 0; module < num_modules; ++module)
    for (std::int64_t p = row.first_position; p < end; ++p)
      LS_RETURN_UNLESS_FINE(write_row(program, request, module, p, *content++));
  request.drafter.end = end;
  if (drafter_.shape == DraftShape::modules) return {};
  const std::int64_t limit = drafter_.max_model_len - 1;
  for (std::int64_t pass = 1; pass < drafter_.num_drafts; ++pass, ++content) {
    const std::int64_t p = end - 1 - row.num_rejected + pass;
    LS_RETURN_UNLESS_FINE(write_row(program, request, 0, std::min(p, limit), *content));
    if (p > limit) ++counts_.draft_rows_at_end;
    if (p / block_size_ != (p - pass) / block_size_) ++counts_.draft_rows_next_block;
    request.drafter.end = std::max(request.drafter.end, std::min(p, limit) + 1);
  }
  return {};
}

// Overwriting another request's right row with other content is a finding, as both requests own the
// slot. Wrong rows may be overwritten by anything.
Checked DraftPlanner::write_row(const StepProgram& program, const WorkerRequest& request,
                                std::int32_t module, std::int64_t position, ContentId now) {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (std::ranges::find(modules_[g], module) == modules_[g].end()) continue;
    const auto group = static_cast<std::int32_t>(g);
    const std::vector<BlockId>& table = request.tables[g];
    const auto [entry, offset] = place_of_token(model_, worker_, group, position);
    const auto finding = [&](std::string message) {
      Divergence found = decision_finding(program.step, request.name, group, std::move(message));
      found.token = position;
      return found;
    };
    if (entry >= std::ssize(table)) {
      // In a request's first step there are no slots for drafts (scheduler.py,
      // effective_lookahead_tokens): the table's rest is the null block.
      if (drafter_.runner == DraftRunner::first) continue;
      return finding(fmt::format("the draft model's row {} needs entry {} of a block table of {}",
                                 position, entry, table.size()));
    }
    const BlockId block = table[entry];
    if (block == kNullBlock)
      return finding(fmt::format("the draft model's row {} goes to the null block", position));
    const SlotContent* old = model_.slot_content(group, block, offset, 1 + module);
    if (old != nullptr && old->writer != request.writer &&
        (old->content | kDraftMarks) != (now | kDraftMarks) &&
        mark_of(now) != DraftMark::wrong_window && mark_of(old->content) <= DraftMark::of_drafts)
      return finding(
          fmt::format("the draft model (module {}) overwrites slot {} with row {}; it holds {}, "
                      "row {} of {} of step {}",
                      module, index_of(block) * model_.block_size(group) + offset, position,
                      words_of(mark_of(old->content)), old->position,
                      model_.writer_name(old->writer), old->step));
    if (old != nullptr && mark_of(old->content) >= DraftMark::proposed)
      ++counts_.draft_rows_replaced;
    model_.write_token(group, block, offset, now, request.writer, position, 1 + module);
    if (const auto skipped = skipped_.find(block); skipped != skipped_.end())
      skipped->second[offset] = 0;
    ++counts_.draft_rows_written;
  }
  return {};
}

// Checks the rows before the step's first token that the request has not read before. num_read
// starts at 0, so a new request checks its whole hit.
Checked DraftPlanner::check_reads(const StepProgram& program, const RowSlice& slice,
                                  WorkerRequest& request, const Tokens& tokens) {
  for (std::size_t g = 0; g < groups_.size(); ++g)
    for (const std::int32_t module : modules_[g]) {
      if (request.drafter.num_read == 0) counts_.draft_rows_hit += slice.first_position;
      const std::int64_t lowest = first_readable(groups_[g].spec, request, slice.first_position);
      for (std::int64_t p = std::max(lowest, request.drafter.num_read); p < slice.first_position;
           ++p)
        LS_RETURN_UNLESS_FINE(
            check_read(program, request, static_cast<std::int32_t>(g), module, p, tokens));
    }
  request.drafter.num_read = slice.first_position;
  return {};
}

Checked DraftPlanner::check_read(const StepProgram& program, const WorkerRequest& request,
                                 std::int32_t group, std::int32_t module, std::int64_t position,
                                 const Tokens& tokens) {
  const auto [entry, offset] = place_of_token(model_, worker_, group, position);
  const BlockId block = request.tables[group][entry];
  const SlotContent* slot = model_.slot_content(group, block, offset, 1 + module);
  const std::int64_t behind = position + tokens_ahead(drafter_.shape, module);
  ++counts_.draft_rows_read;
  const ContentId right = drafter_row(content_at(request, tokens, behind), DraftMark::settled);
  if (slot != nullptr && is_right(slot->content, right)) return {};
  if (is_left_so(request, tokens, group, position, slot)) {
    ++counts_.stale_draft_rows;
    return {};
  }
  const Slot at = index_of(block) * model_.block_size(group) + offset;
  Divergence found = decision_finding(
      program.step, request.name, group,
      fmt::format("the draft model (module {}) reads row {} in slot {} of block {}, which holds {}",
                  module, position, at, index_of(block),
                  slot == nullptr
                      ? "nothing"
                      : fmt::format("{}, {}'s of step {}", words_of(mark_of(slot->content)),
                                    model_.writer_name(slot->writer), slot->step)));
  found.doing = "reading the rows that the draft model continues after";
  found.block = index_of(block);
  found.slot = at;
  found.token = position;
  return found;
}

// Findings 40 to 44 of docs/findings.md: rows of steps without a pass, wrong tokens and windows,
// drafts of several modules, and hits whose next token belongs to another request.
bool DraftPlanner::is_left_so(const WorkerRequest& request, const Tokens& tokens,
                              std::int32_t group, std::int64_t position,
                              const SlotContent* slot) const {
  const auto [entry, offset] = place_of_token(model_, worker_, group, position);
  const auto skipped = skipped_.find(request.tables[group][entry]);
  if (skipped != skipped_.end() && skipped->second[offset] != 0) return true;
  if (slot == nullptr) return false;
  switch (mark_of(slot->content)) {
    case DraftMark::wrong_token:
    case DraftMark::wrong_window:
      return true;
    case DraftMark::of_drafts:
      return drafter_.shape == DraftShape::modules;
    case DraftMark::settled:
      break;
    default:
      return false;
  }
  // A block's hash covers its own tokens only. The token after it may be that of another request
  // that shares the prefix and continues differently.
  return drops_a_block_ &&
         (tokens.is_next_cached || holds_token(request, tokens, group, position + 1, true));
}

// Returns true if a block holds the token after a hit that drops its last block.
bool DraftPlanner::is_next_cached(const WorkerRequest& request, const Tokens& tokens,
                                  const ScheduledRequest& scheduled) const {
  if (!drops_a_block_ || scheduled.computed == 0 || !(scheduled.is_new || scheduled.is_resumed))
    return false;
  for (std::size_t g = 0; g < groups_.size(); ++g)
    if (!modules_[g].empty() &&
        holds_token(request, tokens, static_cast<std::int32_t>(g), scheduled.computed, false))
      return true;
  return false;
}

// Searches the whole pool: the prefix cache may have published the token under any block.
bool DraftPlanner::holds_token(const WorkerRequest& request, const Tokens& tokens,
                               std::int32_t group, std::int64_t position, bool by_another) const {
  const std::int64_t offset = place_of_token(model_, worker_, group, position).offset;
  const ContentId wanted = content_at(request, tokens, position);
  for (std::int32_t b = 1; b < model_.num_blocks(); ++b) {
    const SlotContent* slot = model_.slot_content(group, BlockId{b}, offset);
    if (slot != nullptr && slot->content == wanted &&
        (!by_another || slot->writer != request.writer))
      return true;
  }
  return false;
}

DraftProbe draft_probe(const MemoryModel& model, const WorkerRequest& request,
                       const ModelLayer& layer, std::int64_t first, std::int64_t last) {
  DraftProbe probe{.first = first};
  const std::int64_t size = model.block_size(layer.group);
  const std::vector<BlockId>& table = request.tables[layer.group];
  for (std::int64_t p = first; p < last; ++p) {
    const SlotContent* slot =
        p / size < std::ssize(table)
            ? model.slot_content(layer.group, table[p / size], p % size, layer.lane)
            : nullptr;
    if (slot == nullptr)
      probe = {.first = p + 1};
    else
      probe.digest += token_digest(layer, slot->content, p);
  }
  return probe;
}

}  // namespace lockstep
