#include "properties/story/story_transfers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace lockstep {
namespace {

std::string tokens_are(std::int64_t count) {
  return count == 1 ? "1 token before is" : fmt::format("{} tokens before are", count);
}

const RecordedConnectorAnswer* answer_about(const RecordedStep& step, const std::string& name) {
  if (!step.connector) return nullptr;
  const auto found = std::ranges::find(*step.connector, name, &RecordedConnectorAnswer::id);
  return found == step.connector->end() ? nullptr : &*found;
}

}  // namespace

std::vector<std::string> answers_told(const RecordedStep& step) {
  std::vector<std::string> told;
  if (!step.connector) return told;
  for (const RecordedConnectorAnswer& answer : *step.connector) {
    if (!answer.external)
      told.push_back(fmt::format("The connector does not know yet what it has of {}.", answer.id));
    else if (*answer.external > 0)
      told.push_back(fmt::format(
          "The connector has {} token{} of {} behind {} computed here{}.", *answer.external,
          *answer.external == 1 ? "" : "s", answer.id, answer.local,
          answer.async ? fmt::format("; {} waits while they are loaded", answer.id) : ""));
  }
  return told;
}

std::string origin_told(const RecordedStep& step, const RecordedScheduled& scheduled) {
  const RecordedConnectorAnswer* answer = answer_about(step, scheduled.id);
  if (answer == nullptr)
    return tokens_are(scheduled.computed) +
           (step.skipped ? " here, hit or loaded" : " a prefix hit");
  const std::int64_t local = std::min(answer->local, scheduled.computed);
  const std::int64_t loaded = scheduled.computed - local;
  if (loaded == 0) return tokens_are(local) + " a prefix hit";
  if (local == 0) return tokens_are(loaded) + " loaded within the step";
  return fmt::format("{} a prefix hit, and {} more loaded within the step", tokens_are(local),
                     loaded);
}

std::vector<std::string> reports_told(const RecordedStep& step) {
  std::vector<std::string> told;
  for (const std::string& name : step.held)
    told.push_back(name + " leaves its blocks to the connector until they are sent.");
  if (!step.worker) return told;
  std::vector<std::int32_t> lost;
  for (const BlockId block : step.worker->invalid_blocks) lost.push_back(index_of(block));
  std::ranges::sort(lost);
  if (!lost.empty())
    told.push_back(fmt::format("A load has failed: block{} {} {} not filled.",
                               lost.size() == 1 ? "" : "s", fmt::join(lost, ", "),
                               lost.size() == 1 ? "is" : "are"));
  for (const std::string& name : step.worker->received)
    told.push_back(name + ": its load is over.");
  for (const std::string& name : step.worker->sent)
    told.push_back(name + ": its blocks are sent, and given back.");
  return told;
}

}  // namespace lockstep
