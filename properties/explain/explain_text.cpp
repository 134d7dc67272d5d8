#include "properties/explain/explain_text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <ranges>

#include "properties/judge/known_findings.h"
#include "properties/shrink/case_parts.h"
#include "properties/shrink/case_size.h"
#include "reference/plan/page_size.h"
#include "sim/session/session.h"

namespace lockstep {
namespace {

const std::string kIndent = "  ";

std::string count_of(std::int64_t count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

// "two layers of sliding window 20, blocks of 8 tokens, 2 heads of 16 bf16"
std::string group_text(const KVCacheGroupSpec& group) {
  const KVCacheSpec& spec = group.spec;
  std::string text =
      fmt::format("{} of {}", count_of(std::ssize(group.layer_names), "layer"), name_of(spec.kind));
  if (spec.sliding_window > 0) text += fmt::format(" ({} tokens)", spec.sliding_window);
  if (spec.attention_chunk_size > 0) text += fmt::format(" ({} tokens)", spec.attention_chunk_size);
  if (is_state_kind(spec.kind)) text += fmt::format(" in mode {}", name_of(spec.mamba_cache_mode));
  text += fmt::format(", blocks of {}", count_of(spec.block_size, "token"));
  if (!is_state_kind(spec.kind))
    text += fmt::format(", {} of {} {}", count_of(spec.num_kv_heads, "head"), spec.head_size,
                        name_of(spec.dtype));
  return text + fmt::format(", pages of {} bytes", page_size_bytes(spec));
}

std::string fault_text(const Fault& fault) {
  std::string text = fmt::format("{} from step {} on", fault.kind, fault.step);
  for (const auto& [name, value] : fault.arguments) text += fmt::format(", {} {}", name, value);
  return text;
}

std::string head_text(const SavedCase& saved) {
  const CaseSize size = size_of(saved);
  const EngineConfig& engine = saved.engine;
  std::string text = wrapped(
      "The case  ", fmt::format("{}, {} and {} of cache, a pool of {}; {}, at most {} a step in {}",
                                count_of(size.requests, "request"), count_of(size.tokens, "token"),
                                count_of(size.layers, "layer"), count_of(size.blocks, "block"),
                                engine.engine, count_of(engine.max_num_batched_tokens, "token"),
                                count_of(engine.max_num_seqs, "request")));
  for (std::size_t g = 0; g < saved.cache.groups.size(); ++g)
    text += wrapped(fmt::format("  group {}  ", g), group_text(saved.cache.groups[g]));
  if (has_connector(saved))
    text += wrapped("  with     ", connector_text(config_of(saved).connector));
  if (!saved.mutants.empty())
    text += wrapped("  planted  ", fmt::format("{}", fmt::join(saved.mutants, ", ")));
  for (const Fault& fault : saved.faults) text += wrapped("  fault    ", fault_text(fault));
  if (const std::string cut_off = cut_off_text(saved); !cut_off.empty())
    text += fmt::format("  The recording is {}.\n", cut_off);
  return text +
         "  A cell is a block, [its id: the tokens in it]; * is allocated in this step, - is the "
         "null block.\n";
}

// What a request asks for, in a few words.
std::string request_text(const SavedCase& saved, const std::string& name) {
  for (const RequestSpec* request : requests_of(saved)) {
    if (request->name != name) continue;
    std::string text = fmt::format("{} arrives: a prompt of {}, up to {} to sample", name,
                                   count_of(request->prompt.size(), "token"), request->max_tokens);
    if (!request->cache_salt.empty()) text += fmt::format(", salt \"{}\"", request->cache_salt);
    if (request->priority != 0) text += fmt::format(", priority {}", request->priority);
    return text + ".";
  }
  return name + " arrives.";
}

std::string tokens_are(std::int64_t count) {
  return count == 1 ? "1 token before is" : fmt::format("{} tokens before are", count);
}

const RecordedConnectorAnswer* answer_about(const RecordedStep& step, const std::string& name) {
  if (!step.connector) return nullptr;
  const auto found = std::ranges::find(*step.connector, name, &RecordedConnectorAnswer::id);
  return found == step.connector->end() ? nullptr : &*found;
}

// The KV connector's answers to the queries of the step.
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

// Where the tokens before the first one that is scheduled come from: "16 tokens before are a prefix
// hit". REQUIRES: there are some, and the request begins to run in this step.
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

// What moved, or did not, while the step ran.
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
    told.push_back(name + ": its load has completed.");
  for (const std::string& name : step.worker->sent)
    told.push_back(name + ": its blocks are sent and freed.");
  return told;
}

std::string scheduled_text(const SavedCase& saved, const RecordedStep& step,
                           const RecordedScheduled& scheduled) {
  std::int64_t prompt = 0;
  for (const RequestSpec* request : requests_of(saved))
    if (request->name == scheduled.id) prompt = request->prompt.size();
  const std::int64_t last = std::int64_t{scheduled.computed} + scheduled.tokens;
  std::string text = scheduled.tokens == 1
                         ? fmt::format("{} is scheduled: token {}", scheduled.id, last - 1)
                         : fmt::format("{} is scheduled: tokens {} to {}", scheduled.id,
                                       scheduled.computed, last - 1);
  if (scheduled.spec.size() == 1)
    text += ", the last of them a draft";
  else if (!scheduled.spec.empty())
    text += fmt::format(", the last {} of them drafts", scheduled.spec.size());
  else if (last < prompt)
    text += ", a chunk of its prompt";
  else if (scheduled.computed < prompt)
    text += scheduled.computed == 0 ? ", its whole prompt" : ", the rest of its prompt";
  if (scheduled.is_new && scheduled.computed > 0) text += "; " + origin_told(step, scheduled);
  if (scheduled.resumed) text += "; it resumes after a preemption";
  return text + ".";
}

// The blocks that a step handed to a request in a group.
std::vector<BlockId> handed_out(const ExplainedStep& step, const std::string& name,
                                std::size_t group) {
  const auto found = std::ranges::find(step.recorded.scheduled, name, &RecordedScheduled::id);
  if (found == step.recorded.scheduled.end() || !found->blocks) return {};
  return (*found->blocks)[group];
}

std::string tables_text(const SavedCase& saved, const ExplainedStep& step) {
  std::string text;
  for (std::size_t g = 0; g < saved.cache.groups.size(); ++g) {
    for (const RecordedTable& table : step.tables) {
      const auto scheduled =
          std::ranges::find(step.recorded.scheduled, table.id, &RecordedScheduled::id);
      const bool runs = scheduled != step.recorded.scheduled.end();
      const auto known = step.known.find(table.id);
      const std::int64_t tokens = runs ? std::int64_t{scheduled->computed} + scheduled->tokens
                                  : known == step.known.end() ? 0
                                                              : known->second;
      text += wrapped(fmt::format("    group {}  {}  ", g, table.id),
                      table_picture(table.blocks[g], saved.cache.groups[g].spec, tokens,
                                    handed_out(step, table.id, g)));
    }
    for (const RecordedTable& table : step.waiting_tables)
      text += wrapped(
          fmt::format("    group {}  {}  ", g, table.id),
          table_picture(table.blocks[g], saved.cache.groups[g].spec, step.loaded.at(table.id), {}));
  }
  if (!step.pool.empty()) text += wrapped("    pool     ", pool_picture(step.pool));
  return text;
}

std::string step_text(const SavedCase& saved, const ExplainedStep& step) {
  std::string text = fmt::format("\nStep {}\n", step.recorded.step);
  const auto say = [&](const std::string& sentence) { text += wrapped(kIndent, sentence); };
  if (step.resets > 0) say("The prefix cache is reset.");
  for (const std::string& name : step.arrived) say(request_text(saved, name));
  for (const std::string& name : step.gone) say(name + " is aborted: its client disconnected.");
  for (const std::string& sentence : answers_told(step.recorded)) say(sentence);
  for (const std::string& name : step.recorded.preempted)
    say(name + " is preempted: its blocks are freed, and it will compute all of it again.");
  for (const RecordedScheduled& scheduled : step.recorded.scheduled)
    say(scheduled_text(saved, step.recorded, scheduled));
  if (step.recorded.scheduled.empty()) say("Nothing is scheduled.");
  if (step.recorded.skipped)
    for (const RecordedSkipped& skipped : *step.recorded.skipped)
      say(skipped.id + (skipped.status == "WAITING_FOR_REMOTE_KVS"
                            ? " waits for what it loads."
                            : " waits, and was passed over."));
  for (const std::string& name : step.recorded.waiting) say(name + " waits.");
  text += tables_text(saved, step);
  for (const std::string& sentence : reports_told(step.recorded)) say(sentence);
  for (const auto& [name, tokens] : step.sampled)
    say(fmt::format("The model answers {} with {}.", name, count_of(tokens, "token")));
  for (const RecordedStopped& stopped : step.recorded.stopped)
    say(fmt::format(
        "{} ends: {}.", stopped.id,
        stopped.reason == "length" ? "it has all the tokens it asked for" : stopped.reason));
  return text;
}

std::string line(std::string_view label, const std::string& text) {
  return text.empty() ? "" : wrapped(fmt::format("  {:<10}", label), text);
}

std::string divergence_text(const Divergence& found) {
  std::string where;
  const auto add = [&](std::string_view what, const std::string& value) {
    if (!value.empty() && value != "-1")
      where += fmt::format("{}{} {}", where.empty() ? "" : ", ", what, value);
  };
  add("request", found.request);
  add("its token", fmt::format("{}", found.token));
  add("group", fmt::format("{}", found.group));
  add("layer", found.layer_name);
  add("block", fmt::format("{}", found.block));
  add("slot", fmt::format("{}", found.slot));
  add("byte", fmt::format("{}", found.byte));
  std::string text = line("where", where) + line("doing", found.doing);
  if (const std::string page = page_picture(found); !page.empty())
    text += fmt::format("  the page  bytes, what belongs there, and whether it does\n{}", page);
  else
    text += line("expected", found.expected) + line("found", found.found);
  text += line("found is", found.owner);
  return text + line("writer", found.writer);
}

// The holders of a block by step: "steps 0 to 11 r0, steps 12 to 24 free, step 25 r7".
std::string history_of(const std::vector<ExplainedStep>& steps, std::int32_t block) {
  constexpr std::size_t kSpansShown = 4;
  struct Span {
    BlockState state;
    std::int64_t first = 0, last = 0;
  };
  std::vector<Span> spans;
  for (const ExplainedStep& step : steps) {
    if (static_cast<std::size_t>(block) >= step.pool.size()) continue;
    const BlockState& state = step.pool[static_cast<std::size_t>(block)];
    if (spans.empty() || !(spans.back().state == state))
      spans.push_back({.state = state, .first = step.recorded.step});
    spans.back().last = step.recorded.step;
  }
  std::vector<std::string> parts;
  for (std::size_t i = spans.size() > kSpansShown ? spans.size() - kSpansShown : 0;
       i < spans.size(); ++i) {
    const Span& span = spans[i];
    const std::string when = span.first == span.last
                                 ? fmt::format("step {}", span.first)
                                 : fmt::format("steps {} to {}", span.first, span.last);
    parts.push_back(fmt::format("{} {}", when,
                                span.state.kind == BlockState::Kind::held
                                    ? fmt::format("{}", fmt::join(span.state.holders, " and "))
                                : span.state.kind == BlockState::Kind::cached ? "cached"
                                                                              : "free"));
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

// The step after which the finding could no longer be avoided: the request was given the block in
// it, or the block was given to another one. -1: not known.
std::int64_t inevitable_since(const std::vector<ExplainedStep>& steps,
                              const AuditFinding& finding) {
  if (finding.block < 0 || finding.holder.request.empty()) return -1;
  const auto block = static_cast<std::size_t>(finding.block);
  std::int64_t since = finding.step;
  for (const ExplainedStep& step : std::views::reverse(steps)) {
    if (step.recorded.step > finding.step) continue;
    if (block >= step.pool.size() || std::ranges::find(step.pool[block].holders, finding.request) ==
                                         step.pool[block].holders.end())
      break;
    since = step.recorded.step;
  }
  return std::max(since, finding.holder.since);
}

std::string findings_text(const Explanation& explanation) {
  if (explanation.findings.empty()) return {};
  const AuditFinding& finding = explanation.findings.front();
  std::string where;
  const auto add = [&](std::string_view what, std::string_view value) {
    where += fmt::format("{}{} {}", where.empty() ? "" : ", ", what, value);
  };
  if (!finding.request.empty()) add("request", finding.request);
  if (finding.group >= 0) add("group", fmt::format("{}", finding.group));
  if (finding.token >= 0) add("token", fmt::format("{}", finding.token));
  if (finding.entry >= 0) add("entry of its table", fmt::format("{}", finding.entry));
  if (finding.block >= 0) add("block", fmt::format("{}", finding.block));
  std::string text = line("where", where);
  if (finding.block > 0) text += line("the block", history_of(explanation.steps, finding.block));
  if (const std::int64_t since = inevitable_since(explanation.steps, finding); since >= 0)
    text += line("since", fmt::format("step {}: from there on it was inevitable", since));
  return text;
}

std::string failure_text(const Explanation& explanation) {
  const Outcome& outcome = explanation.outcome;
  if (!outcome.failed() && explanation.recorded)
    return "\n" +
           wrapped("", fmt::format("The model's decisions do not fail; {}.",
                                   summary_of(*explanation.recorded))) +
           details_of(*explanation.recorded);
  if (!outcome.failed())
    return wrapped("\n", fmt::format("The case does not fail: it is {}. {}", name_of(outcome.kind),
                                     outcome.what));
  std::string text = fmt::format("\nHere it fails: {} ({}) in step {}\n", outcome.check,
                                 name_of(outcome.kind), outcome.step);
  text += line("the rule", std::string(reason_of_check(outcome.check)));
  if (explanation.divergence) text += divergence_text(*explanation.divergence);
  text += findings_text(explanation);
  for (const StuckRequest& stuck : explanation.stuck) text += line(stuck.name, stuck.why);
  return text + "\n" + wrapped("", outcome.what);
}

}  // namespace

std::string to_text(const SavedCase& saved, const Explanation& explanation,
                    const ExplanationTextOptions& options) {
  std::string text = head_text(saved);
  if (explanation.dp_size > 1)
    text += fmt::format(
        "  {} data parallel ranks share the requests; these are the steps of rank {}.\n",
        explanation.dp_size, explanation.dp_rank);
  std::size_t first = 0;
  if (options.steps_max > 0 && explanation.steps.size() > options.steps_max) {
    first = explanation.steps.size() - options.steps_max;
    text += fmt::format("\n... {} before are left out\n",
                        count_of(static_cast<std::int64_t>(first), "step"));
  }
  const auto* parts =
      explanation.recorded && explanation.recorded->parts ? &*explanation.recorded->parts : nullptr;
  for (std::size_t i = first; i < explanation.steps.size(); ++i) {
    text += step_text(saved, explanation.steps[i]);
    if (parts != nullptr && explanation.steps[i].recorded.step == parts->step)
      text += wrapped(kIndent, parting_of(*parts));
  }
  return text + failure_text(explanation);
}

}  // namespace lockstep
