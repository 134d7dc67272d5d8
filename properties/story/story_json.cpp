#include <nlohmann/json.hpp>
#include <string_view>

#include "properties/judge/check_reasons.h"
#include "properties/shrink/case_size.h"
#include "properties/story/story_text.h"

namespace lockstep {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const BlocksPerGroup& tables) {
  Json json = Json::array();
  for (const auto& table : tables) {
    Json blocks = Json::array();
    for (const BlockId block : table) blocks.push_back(index_of(block));
    json.push_back(std::move(blocks));
  }
  return json;
}

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

// What a KV connector answered and reported.
Json transfers_of(const StoryStep& step) {
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

Json json_of(const StoryStep& step) {
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

std::string to_json(const SavedCase& saved, const Story& story) {
  const CaseSize size = size_of(saved);
  const Outcome& outcome = story.outcome;
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
  if (story.dp_size > 1) json["dp_rank"] = story.dp_rank;
  if (story.divergence) json["divergence"] = Json::parse(to_json(*story.divergence));
  for (const AuditFinding& finding : story.findings)
    json["findings"].push_back({{"step", finding.step},
                                {"request", finding.request},
                                {"group", finding.group},
                                {"token", finding.token},
                                {"block", finding.block},
                                {"what", finding.what}});
  for (const StuckRequest& stuck : story.stuck)
    json["stuck"].push_back({{"request", stuck.name}, {"why", stuck.why}});
  json["steps"] = Json::array();
  for (const StoryStep& step : story.steps) json["steps"].push_back(json_of(step));
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace lockstep
