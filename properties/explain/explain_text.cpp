#include "properties/explain/explain_text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <ranges>
#include <span>
#include <sstream>

#include "base/number_text.h"
#include "properties/judge/known_findings.h"
#include "properties/shrink/case_parts.h"
#include "reference/plan/page_size.h"
#include "sim/session/session.h"

namespace lockstep {
namespace {

const std::string kIndent = "  ";

std::string count_of(std::int64_t count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

// Describes a group: "2 layers of sliding_window (20 tokens), blocks of 8 tokens, 2 heads of 16
// bf16, pages of 1024 bytes". In a group of uniform type the group's own spec stands for all
// layers.
std::string group_text(const SavedCase& saved, std::size_t g) {
  const KVCacheGroupSpec& group = saved.cache.groups[g];
  const KVCacheSpec& spec = group.spec;
  std::string text =
      fmt::format("{} of {}", count_of(std::ssize(group.layer_names), "layer"), name_of(spec.kind));
  if (spec.sliding_window > 0) text += fmt::format(" ({} tokens)", spec.sliding_window);
  if (spec.attention_chunk_size > 0) text += fmt::format(" ({} tokens)", spec.attention_chunk_size);
  if (is_state_kind(spec.kind)) text += fmt::format(" in mode {}", name_of(spec.mamba_cache_mode));
  text += fmt::format(", blocks of {}", count_of(spec.block_size, "token"));
  if (g < saved.kernel_block_sizes.size() && saved.kernel_block_sizes[g] < spec.block_size)
    text += fmt::format(" in kernel blocks of {}", saved.kernel_block_sizes[g]);
  if (!is_state_kind(spec.kind))
    text += fmt::format(", {} of {} {}", count_of(spec.num_kv_heads, "head"), spec.head_size,
                        name_of(spec.dtype));
  return text + fmt::format(", pages of {} bytes", page_size_bytes(spec));
}

// Describes a planted fault with its arguments, in the words of a saved case.
std::string fault_text(const Fault& fault) {
  std::string text = fmt::format("{} from step {}", fault.kind, fault.step);
  for (const auto& [name, value] : fault.arguments) text += fmt::format(", {} {}", name, value);
  return text;
}

// Formats the head: sizes, groups, connector, planted defects and faults, and the legend of the
// cells.
std::string head_text(const SavedCase& saved) {
  const CaseSize size = size_of(saved);
  const EngineConfig& engine = saved.engine;
  std::string text =
      wrapped("The case  ",
              fmt::format("{}, {} and {} of cache, a pool of {}; {}, at most {} per step in {}",
                          count_of(size.requests, "request"), count_of(size.tokens, "token"),
                          count_of(size.layers, "layer"), count_of(size.blocks, "block"),
                          engine.engine, count_of(engine.max_num_batched_tokens, "token"),
                          count_of(engine.max_num_seqs, "request")));
  for (std::size_t g = 0; g < saved.cache.groups.size(); ++g)
    text += wrapped(fmt::format("  group {}  ", g), group_text(saved, g));
  if (has_connector(saved))
    text += wrapped("  with     ", connector_text(config_of(saved).connector));
  if (!saved.mutants.empty())
    text += wrapped("  planted  ", fmt::format("{}", fmt::join(saved.mutants, ", ")));
  for (const Fault& fault : saved.faults) text += wrapped("  fault    ", fault_text(fault));
  if (const std::string cut_off = cut_off_text(saved); !cut_off.empty())
    text += fmt::format("  The recording is {}.\n", cut_off);
  return text +
         "  A cell is a block, [its id: the tokens in it]; * is new to its table, - is "
         "the null block.\n";
}

// Describes what a request asks for. A name that the case does not contain only "arrives": a
// recording may have requests that were removed from the saved case.
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

// Returns the connector's answer about a request in this step. Null: the connector was not queried,
// or there is none.
const RecordedConnectorAnswer* answer_about(const RecordedStep& step, const std::string& name) {
  if (!step.connector) return nullptr;
  const auto found = std::ranges::find(*step.connector, name, &RecordedConnectorAnswer::id);
  return found == step.connector->end() ? nullptr : &*found;
}

// Describes the connector's answers. An answer of 0 tokens is left out: it is the normal case.
std::vector<std::string> answers_told(const RecordedStep& step) {
  std::vector<std::string> told;
  if (!step.connector) return told;
  for (const RecordedConnectorAnswer& answer : *step.connector) {
    if (!answer.external)
      told.push_back(fmt::format("The connector has no answer for {} yet.", answer.id));
    else if (*answer.external > 0)
      told.push_back(fmt::format(
          "The connector has {} token{} of {} after {} computed here{}.", *answer.external,
          *answer.external == 1 ? "" : "s", answer.id, answer.local,
          answer.async ? fmt::format("; {} waits while they are loaded", answer.id) : ""));
  }
  return told;
}

// Describes where the tokens before the first scheduled one come from: "16 tokens before are a
// prefix hit". Without an answer in this step, a connector may have loaded them earlier. REQUIRES:
// computed > 0, and the request is scheduled for the first time.
std::string origin_told(const RecordedStep& step, const RecordedScheduled& scheduled) {
  const RecordedConnectorAnswer* answer = answer_about(step, scheduled.id);
  if (answer == nullptr)
    return tokens_are(scheduled.computed) +
           (step.skipped ? " here, hit or loaded" : " a prefix hit");
  // The answer's `local` may exceed `computed`: the scheduler shortens a full hit, because at least
  // one token must be computed.
  const std::int64_t local = std::min(answer->local, scheduled.computed);
  const std::int64_t loaded = scheduled.computed - local;
  if (loaded == 0) return tokens_are(local) + " a prefix hit";
  if (local == 0) return tokens_are(loaded) + " loaded within the step";
  return fmt::format("{} a prefix hit, and {} more loaded within the step", tokens_are(local),
                     loaded);
}

// Describes what moved, or failed to, while the step ran. Lost blocks are sorted: workers report
// them in any order.
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

// Describes the tokens of one scheduled request. Positions count from 0: computed 16 and 4 tokens
// are "tokens 16 to 19". Drafts are the last tokens of the range; a prompt chunk is one that ends
// before the prompt does.
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

// Returns the blocks that the step allocated to a request in a group. A request that is new or
// resumed reports its whole table, so a prefix hit also counts as allocated. Empty: not scheduled,
// or the recording has null.
std::vector<BlockId> handed_out(const ExplainedStep& step, const std::string& name,
                                std::size_t group) {
  const auto found = std::ranges::find(step.recorded.scheduled, name, &RecordedScheduled::id);
  if (found == step.recorded.scheduled.end() || !found->blocks) return {};
  return (*found->blocks)[group];
}

// Draws the tables by group, since blocks of different groups differ in size, and the pool once. A
// running request that the step does not schedule shows the tokens that it knows.
std::string tables_text(const SavedCase& saved, const ExplainedStep& step) {
  std::string text;
  for (std::size_t g = 0; g < saved.cache.groups.size(); ++g) {
    for (const RecordedTable& table : step.tables) {
      const auto scheduled =
          std::ranges::find(step.recorded.scheduled, table.id, &RecordedScheduled::id);
      const bool runs = scheduled != step.recorded.scheduled.end();
      const auto known = step.known.find(table.id);
      // After the step the table holds the tokens before it and those of the step.
      const std::int64_t tokens = runs ? std::int64_t{scheduled->computed} + scheduled->tokens
                                  : known == step.known.end() ? 0
                                                              : known->second;
      text += wrapped(fmt::format("    group {}  {}  ", g, on_one_line(table.id)),
                      table_picture(table.blocks[g], saved.cache.groups[g].spec, tokens,
                                    handed_out(step, table.id, g)));
    }
    for (const RecordedTable& table : step.waiting_tables)
      text += wrapped(
          fmt::format("    group {}  {}  ", g, on_one_line(table.id)),
          table_picture(table.blocks[g], saved.cache.groups[g].spec, step.loaded.at(table.id), {}));
  }
  if (!step.pool.empty()) text += wrapped("    pool     ", pool_picture(step.pool));
  return text;
}

std::string pause_text(PauseState state) {
  if (state == PauseState::unpaused) return "The engine resumes.";
  return state == PauseState::paused_new ? "The engine pauses: it admits no new request."
                                         : "The engine pauses: it schedules nothing.";
}

// Formats one step in the order in which its parts happen: resets, pauses, arrivals, aborts,
// connector answers, preemptions, scheduled requests, queues, tables, reports, output.
std::string step_text(const SavedCase& saved, const ExplainedStep& step) {
  std::string text = fmt::format("\nStep {}\n", step.recorded.step);
  const auto say = [&](const std::string& sentence) { text += wrapped(kIndent, sentence); };
  for (const RecordedEvent& event : step.recorded.before)
    if (event.kind == RecordedEvent::Kind::pause_state)
      say(pause_text(event.pause_state));
    else if (event.kind == RecordedEvent::Kind::reset_prefix_cache)
      say(event.resets_running ? "All running requests are preempted; the prefix cache is reset."
                               : "The prefix cache is reset.");
  for (const std::string& name : step.arrived) say(request_text(saved, name));
  for (const std::string& name : step.gone) say(name + " is aborted: its client disconnected.");
  for (const std::string& sentence : answers_told(step.recorded)) say(sentence);
  for (const std::string& name : step.recorded.preempted)
    say(name + (step.recorded.runs(name)
                    ? "'s table is sent again: the prefix cache has replaced blocks in it."
                    : " is preempted: its blocks are freed, and it will compute all of it again."));
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
    say(fmt::format("{} ends: {}.", stopped.id,
                    stopped.reason == "length" ? "it has max_tokens tokens" : stopped.reason));
  return text;
}

// Formats a labelled line of the failure; an empty text gives no line, so absent fields need no
// test.
std::string line(std::string_view label, const std::string& text) {
  return text.empty() ? "" : wrapped(fmt::format("  {:<10}", label), text);
}

// Formats the position of a divergence. Fields that are -1 or empty do not apply. A
// divergence with a page shows the page, any other shows the two values.
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

// Describes the last four uses of a block: "steps 0 to 11 r0, steps 12 to 24 free, step 25 r7".
// Consecutive steps with equal use form one span.
std::string history_of(const std::vector<ExplainedStep>& steps, std::int32_t block) {
  constexpr std::size_t kSpansShown = 4;
  struct Span {
    BlockState state;
    std::int64_t first = 0, last = 0;
  };
  std::vector<Span> spans;
  for (const ExplainedStep& step : steps) {
    // Without a pool (empty), or for a block id outside it, the step adds nothing.
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

// Returns the step since which the finding was inevitable: the later of the step that allocated the
// block to the request, and the step that allocated it to its present holder. -1: the finding has
// no block or no holder. The search runs backward from the finding and stops at the first step in
// which the request does not hold the block.
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

// Formats the first finding only. The others follow from it most of the time, and the JSON record
// has them all.
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
  // Block 0 is the null block; its history says nothing.
  if (finding.block > 0) text += line("the block", history_of(explanation.steps, finding.block));
  if (const std::int64_t since = inevitable_since(explanation.steps, finding); since >= 0)
    text += line("since", fmt::format("step {}: from there on it was inevitable", since));
  return text;
}

// Formats the end: the failure with its rule, or that the case agrees. A run of a recording may
// agree while the recorded decisions differ; then the difference is the result.
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
  std::string text =
      fmt::format("\nHere it fails: {} ({}){}\n", outcome.check, name_of(outcome.kind),
                  outcome.step < 0 ? "" : fmt::format(" in step {}", outcome.step));
  text += line("the rule", std::string(reason_of_check(outcome.check)));
  if (explanation.divergence) text += divergence_text(*explanation.divergence);
  text += findings_text(explanation);
  for (const StuckRequest& stuck : explanation.stuck)
    text += line(on_one_line(stuck.name), stuck.why);
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
  // Only the last steps are shown; the failure is at their end.
  if (options.steps_max > 0 && explanation.steps.size() > options.steps_max) {
    first = explanation.steps.size() - options.steps_max;
    text += fmt::format("\n... {} before these are omitted\n",
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

namespace {

// Printed as a space, but wrapped() does not break there: "[4: 0-3]" stays whole.
constexpr char kNoBreak = '\xff';
// A longer table shows its first and last six cells, a larger pool only counts, a longer run of
// bytes its first twelve, and a page with more spans only the wrong ones.
constexpr std::size_t kCellsShown = 12;
constexpr std::size_t kBlocksNamed = 64;
constexpr std::size_t kBytesShown = 12;
constexpr std::size_t kRowsShown = 16;

// Formats a closed range: "4" or "4-7".
std::string range(std::int64_t first, std::int64_t last) {
  return first == last ? fmt::format("{}", first) : fmt::format("{}-{}", first, last);
}

// Draws one cell. A state block in modes `none` and `align` holds one state and no token range. A
// block that starts at or after `tokens` is allocated ahead: lookahead, or a chunk not yet
// computed.
std::string cell(BlockId block, std::int64_t index, const KVCacheSpec& spec, std::int64_t tokens,
                 bool is_new) {
  const std::string name = block == kNullBlock ? "-" : fmt::format("{}", index_of(block));
  const std::string mark = is_new ? "*" : "";
  const std::int64_t first = index * spec.block_size;
  if (is_state_kind(spec.kind) && spec.mamba_cache_mode != MambaCacheMode::all)
    return fmt::format("[{}{}]", name, mark);
  if (first >= tokens) return fmt::format("[{}{}:{}empty]", name, mark, kNoBreak);
  const std::int64_t last = std::min(tokens, first + spec.block_size) - 1;
  return fmt::format("[{}{}:{}{}]", name, mark, kNoBreak, range(first, last));
}

// Formats at most kBytesShown bytes of a page in hexadecimal.
std::string hex_of(const std::vector<std::uint8_t>& page, std::size_t first, std::size_t size) {
  const std::string text = hex_bytes(std::span(page).subspan(first, std::min(size, kBytesShown)));
  return size > kBytesShown ? text + " ..." : text;
}

// One span of a page as text, and whether any of its bytes is wrong.
struct PageRow {
  std::string text;
  bool wrong = false;
};

// Compares one span. REQUIRES: both pages have the bytes of the span. The bytes shown start at the
// first wrong one, not at the start of the span.
PageRow page_row(const Divergence& found, const PageSpan& span) {
  const auto first = static_cast<std::size_t>(span.first_byte);
  const auto size = static_cast<std::size_t>(span.size_bytes);
  std::size_t at = first;
  while (at < first + size && found.expected_page[at] == found.found_page[at]) ++at;
  PageRow row{
      .text = fmt::format("    {:>11}  {:<48}",
                          range(span.first_byte, span.first_byte + span.size_bytes - 1), span.what),
      .wrong = at < first + size};
  if (!row.wrong) {
    row.text += "  right\n";
    return row;
  }
  row.text += fmt::format("  WRONG from byte {}\n", at);
  const std::size_t left = first + size - at;
  row.text +=
      fmt::format("                 should be  {}\n                 is         {}\n",
                  hex_of(found.expected_page, at, left), hex_of(found.found_page, at, left));
  return row;
}

}  // namespace

std::string wrapped(const std::string& label, const std::string& text) {
  std::string out;
  std::string line = label;
  std::istringstream words(on_one_line(text));
  bool first = true;
  for (std::string word; words >> word; first = false) {
    if (!first && line.size() + 1 + word.size() > kTextColumns) {
      out += line + "\n";
      line = std::string(label.size(), ' ') + word;
    } else {
      line += (first ? "" : " ") + word;
    }
  }
  out += line + "\n";
  std::ranges::replace(out, kNoBreak, ' ');
  return out;
}

std::string table_picture(const std::vector<BlockId>& table, const KVCacheSpec& spec,
                          std::int64_t tokens, const std::vector<BlockId>& handed_out) {
  std::vector<std::string> cells;
  for (std::size_t i = 0; i < table.size(); ++i) {
    const bool is_new =
        table[i] != kNullBlock && std::ranges::find(handed_out, table[i]) != handed_out.end();
    cells.push_back(cell(table[i], static_cast<std::int64_t>(i), spec, tokens, is_new));
  }
  // Keeps the first and last kCellsShown / 2 cells: the start shows shared blocks, the end the
  // growth.
  if (cells.size() > kCellsShown) {
    const auto middle = static_cast<std::ptrdiff_t>(kCellsShown / 2);
    const std::size_t left_out = cells.size() - kCellsShown;
    cells.erase(cells.begin() + middle, cells.end() - middle);
    cells.insert(cells.begin() + middle, fmt::format("({}{}more)", left_out, kNoBreak));
  }
  return cells.empty() ? "no blocks" : fmt::format("{}", fmt::join(cells, " "));
}

std::string pool_picture(const std::vector<BlockState>& pool) {
  std::string text;
  std::int64_t held = 0;
  std::int64_t cached = 0;
  std::int64_t free = 0;
  // Runs of blocks with equal use form one entry. Block 0, the null block, is skipped.
  for (std::size_t i = 1; i < pool.size();) {
    std::size_t end = i + 1;
    while (end < pool.size() && pool[end] == pool[i]) ++end;
    const auto count = static_cast<std::int64_t>(end - i);
    std::string what = "free";
    if (pool[i].kind == BlockState::Kind::held) {
      what = fmt::format("{}", fmt::join(pool[i].holders, " and "));
      held += count;
    } else if (pool[i].kind == BlockState::Kind::cached) {
      what = "free but cached";
      cached += count;
    } else {
      free += count;
    }
    // A name list must not be broken between "r0" and "and".
    std::ranges::replace(what, ' ', kNoBreak);
    text += fmt::format("{}{}:{}{}", i == 1 ? "" : ", ",
                        range(static_cast<std::int64_t>(i), static_cast<std::int64_t>(end) - 1),
                        kNoBreak, what);
    i = end;
  }
  if (pool.size() <= kBlocksNamed) return text;
  return fmt::format("{} held, {} free but cached, {} free", held, cached, free);
}

std::string page_picture(const Divergence& found) {
  if (found.found_page.empty() || found.found_page.size() != found.expected_page.size()) return {};
  std::string out;
  std::size_t shown = 0;
  std::size_t right = 0;
  const auto flush_right = [&] {
    if (right > 0)
      out += fmt::format("    {:>11}  ({} more that {} right)\n", "...", right,
                         right == 1 ? "is" : "are");
    right = 0;
  };
  // Counted before drawing, so that the last line can report how many wrong spans are missing.
  const std::size_t wrong_rows = static_cast<std::size_t>(std::ranges::count_if(
      found.spans, [&](const PageSpan& span) { return page_row(found, span).wrong; }));
  const bool all = found.spans.size() <= kRowsShown;
  for (const PageSpan& span : found.spans) {
    const PageRow row = page_row(found, span);
    if (!all && (!row.wrong || shown >= kRowsShown)) {
      right += row.wrong ? 0 : 1;
      continue;
    }
    flush_right();
    out += row.text;
    ++shown;
  }
  flush_right();
  if (wrong_rows > kRowsShown && !all)
    out += fmt::format("    {:>11}  ({} more that are wrong)\n", "...", wrong_rows - shown);
  return out;
}

}  // namespace lockstep
