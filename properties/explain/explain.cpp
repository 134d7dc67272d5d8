#include "properties/explain/explain.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>

#include "base/check.h"
#include "properties/judge/known_findings.h"
#include "properties/shrink/case_parts.h"
#include "sim/recording/recorded_terms.h"
#include "sim/session/session.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {

// Returns the known tokens of all live requests: running, waiting, and those in the connector's
// queue, which `waiting` of the decisions does not contain.
static std::map<std::string, std::int64_t> known_tokens(const StepView& view) {
  std::map<std::string, std::int64_t> known;
  const auto take = [&](std::span<const RequestId> ids) {
    for (const RequestId id : ids)
      known[std::string(view.name(id))] = view.decisions.num_tokens(id);
  };
  take(view.decisions.running());
  take(view.decisions.waiting());
  for (const SkippedRequest& request : view.decisions.skipped()) take({&request.id, 1});
  return known;
}

// Appends the tables of requests that hold blocks and do not run: a request whose load is in flight
// or complete, and a finished request whose blocks are still being sent. A request without blocks
// has an empty table in every group, so group 0 suffices as the test.
static void take_waiting_tables(const StepView& view, ExplainedStep& step) {
  const auto take = [&](RequestId id) {
    const RecordedTable& table = step.waiting_tables.emplace_back(table_of(view, id));
    const Scheduler* const model = view.decisions.model();
    step.loaded[table.id] =
        model != nullptr ? model->num_computed_tokens(id) : view.decisions.num_tokens(id);
  };
  for (const SkippedRequest& request : view.decisions.skipped())
    if (!view.decisions.block_table(request.id, 0).empty()) take(request.id);
  for (const HeldRequest& request : view.decisions.held()) take(request.id);
}

std::vector<BlockState> ExplanationKeeper::pool_of(const StepView& view,
                                                   const ExplainedStep& step) {
  std::vector<BlockState> pool(num_blocks_);
  pool[0].kind = BlockState::Kind::null_block;
  const Scheduler* const model = view.decisions.model();  // null: cached blocks are unknown
  // The null block is skipped: it is never allocated, and every request may have it in a table.
  for (std::int32_t i = 1; i < num_blocks_; ++i)
    if (model != nullptr && model->is_cached(BlockId{i})) pool[i].kind = BlockState::Kind::cached;
  const auto hold = [&](const RecordedTable& table) {
    for (const std::vector<BlockId>& blocks : table.blocks)
      for (const BlockId block : blocks) {
        const auto index = static_cast<std::size_t>(index_of(block));
        if (block == kNullBlock || index >= pool.size()) continue;
        BlockState& state = pool[index];
        state.kind = BlockState::Kind::held;
        // A request may have a block twice, in two groups of one step's table; it is named once.
        if (state.holders.empty() || state.holders.back() != table.id)
          state.holders.push_back(table.id);
      }
  };
  std::ranges::for_each(step.tables, hold);
  std::ranges::for_each(step.waiting_tables, hold);
  return pool;
}

bool ExplanationKeeper::decided(const StepView& view) {
  ExplainedStep& step = steps_.emplace_back();
  step.known = known_tokens(view);
  // A request that arrives and ends between two decisions never appears here.
  for (const auto& [name, tokens] : step.known)
    if (!live_.contains(name)) step.arrived.push_back(name);
  for (const auto& [name, tokens] : live_)
    if (!step.known.contains(name)) step.gone.push_back(name);
  step.tables = tables_of(view);
  take_waiting_tables(view, step);
  step.pool = pool_of(view, step);
  live_ = step.known;
  return true;
}

// The output of a step is what the known tokens grow by. Rejected drafts never count as known, so
// the difference is never negative for a live request.
bool ExplanationKeeper::finished(const StepView& view) {
  ExplainedStep& step = steps_.back();
  std::map<std::string, std::int64_t> known = known_tokens(view);
  for (const auto& [name, tokens] : known)
    if (tokens > step.known[name]) step.sampled[name] = tokens - step.known[name];
  live_ = std::move(known);
  return true;
}

Explanation explain(const SavedCase& saved, const BackendFactory& backend) {
  return explain_judged(saved, {.backend = backend});
}

Explanation explain_judged(const SavedCase& saved, JudgeOptions options) {
  ExplanationKeeper keeper(saved.cache.num_blocks);
  Explanation explanation;
  RunSummary summary;
  explanation.dp_size = config_of(saved).data_parallel.dp_size;
  // The failing rank is not known before a run. dp_rank is -1 where the collectives fail, which no
  // single rank explains: rank 0 then stands for all.
  if (explanation.dp_size > 1) explanation.dp_rank = std::max(judge(saved, options).dp_rank, 0);
  options.observed_dp_rank = explanation.dp_rank;
  options.observer = &keeper;
  options.summary = &summary;
  options.findings = &explanation.findings;
  Recording recording;
  options.recording = &recording;
  explanation.outcome = judge(saved, options);
  if (explanation.outcome.kind == OutcomeKind::divergence)
    explanation.divergence = summary.divergence;
  if (explanation.outcome.kind == OutcomeKind::stuck) explanation.stuck = summary.stuck;
  explanation.steps = keeper.take();
  // Both observers see each step before a failure can end the run, so their lengths differ only by
  // a defect in the loop.
  LS_CHECK(recording.steps.size() == explanation.steps.size(), "{} steps recorded, {} shown",
           recording.steps.size(), explanation.steps.size());
  for (std::size_t i = 0; i < recording.steps.size(); ++i)
    explanation.steps[i].recorded = std::move(recording.steps[i]);
  return explanation;
}

namespace {

// Ordered, so that keys appear in the order of insertion and two records compare as text.
using Json = nlohmann::ordered_json;

// Writes block tables as numbers: `[num_groups][num_blocks]`.
Json json_of(const BlocksPerGroup& tables) {
  Json json = Json::array();
  for (const auto& table : tables) {
    Json blocks = Json::array();
    for (const BlockId block : table) blocks.push_back(index_of(block));
    json.push_back(std::move(blocks));
  }
  return json;
}

// Names the use of a block as the JSON record spells it; docs/formats.md lists the words.
std::string_view name_of(BlockState::Kind kind) {
  switch (kind) {
    case BlockState::Kind::null_block:
      return "null";
    case BlockState::Kind::held:
      return "held";
    case BlockState::Kind::cached:
      return "cached";
    case BlockState::Kind::free:
      break;
  }
  return "free";
}

// Writes the connector's answers to the scheduler and the reports of its workers. `external` is
// null while the connector has not decided. REQUIRES: the step has `skipped`, so a connector is
// there.
Json transfers_of(const ExplainedStep& step) {
  Json json = {{"answers", Json::array()},   {"skipped", Json::array()},
               {"held", step.recorded.held}, {"received", Json::array()},
               {"sent", Json::array()},      {"invalid_blocks", Json::array()}};
  if (step.recorded.connector)
    for (const RecordedConnectorAnswer& answer : *step.recorded.connector)
      json["answers"].push_back({{"id", answer.id},
                                 {"local", answer.local},
                                 {"external", answer.external ? Json(*answer.external) : Json()},
                                 {"async", answer.async}});
  for (const RecordedSkipped& skipped : *step.recorded.skipped)
    json["skipped"].push_back({{"id", skipped.id}, {"status", skipped.status}});
  if (!step.recorded.worker) return json;
  json["received"] = step.recorded.worker->received;
  json["sent"] = step.recorded.worker->sent;
  for (const BlockId block : step.recorded.worker->invalid_blocks)
    json["invalid_blocks"].push_back(index_of(block));
  return json;
}

Json json_of(const ExplainedStep& step) {
  Json json = {{"step", step.recorded.step},
               {"arrived", step.arrived},
               {"gone", step.gone},
               {"preempted", step.recorded.preempted},
               {"running", step.recorded.running},
               {"waiting", step.recorded.waiting},
               {"known_tokens", step.known},
               {"sampled_tokens", step.sampled}};
  json["scheduled"] = Json::array();
  for (const RecordedScheduled& scheduled : step.recorded.scheduled)
    json["scheduled"].push_back({{"id", scheduled.id},
                                 {"first", scheduled.computed},
                                 {"tokens", scheduled.tokens},
                                 {"drafts", scheduled.spec.size()},
                                 {"new", scheduled.is_new},
                                 {"resumed", scheduled.resumed}});
  if (step.recorded.skipped) json["transfers"] = transfers_of(step);
  json["tables"] = Json::object();
  for (const RecordedTable& table : step.tables) json["tables"][table.id] = json_of(table.blocks);
  // A request is in one of the two lists only, so no key is written twice.
  for (const RecordedTable& table : step.waiting_tables)
    json["tables"][table.id] = json_of(table.blocks);
  json["pool"] = Json::array();
  for (const BlockState& block : step.pool)
    json["pool"].push_back({{"is", name_of(block.kind)}, {"holders", block.holders}});
  json["stopped"] = Json::object();
  for (const RecordedStopped& stopped : step.recorded.stopped)
    json["stopped"][stopped.id] = stopped.reason;
  return json;
}

}  // namespace

std::string to_json(const SavedCase& saved, const Explanation& explanation) {
  const CaseSize size = size_of(saved);
  const Outcome& outcome = explanation.outcome;
  Json json = {{"case", saved.name},
               {"size",
                {{"requests", size.requests},
                 {"tokens", size.tokens},
                 {"groups", size.groups},
                 {"layers", size.layers},
                 {"blocks", size.blocks},
                 {"steps", outcome.steps}}},
               {"outcome", lockstep::name_of(outcome.kind)},
               {"check", outcome.check},
               {"rule", reason_of_check(outcome.check)},
               {"step", outcome.step},
               {"request", outcome.request},
               {"what", outcome.what}};
  if (const std::string cut_off = cut_off_text(saved); !cut_off.empty()) json["cut_off"] = cut_off;
  if (explanation.dp_size > 1) json["dp_rank"] = explanation.dp_rank;
  if (explanation.divergence) json["divergence"] = json_of(*explanation.divergence);
  for (const AuditFinding& finding : explanation.findings)
    json["findings"].push_back({{"step", finding.step},
                                {"request", finding.request},
                                {"group", finding.group},
                                {"token", finding.token},
                                {"block", finding.block},
                                {"what", finding.what}});
  if (explanation.recorded) json["recording"] = json_of(*explanation.recorded);
  for (const StuckRequest& stuck : explanation.stuck)
    json["stuck"].push_back({{"request", stuck.name}, {"why", stuck.why}});
  json["steps"] = Json::array();
  for (const ExplainedStep& step : explanation.steps) json["steps"].push_back(json_of(step));
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace lockstep
