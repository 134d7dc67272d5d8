#include "properties/relations/reading_model.h"

#include <algorithm>

#include "base/check.h"
#include "reference/memory/content.h"
#include "reference/plan/page_groups.h"
#include "reference/plan/rank_plan.h"
#include "sim/session/session.h"

namespace lockstep {
namespace {

constexpr std::int32_t kVocabulary = 40'000;
// Above all tokens of prompts and stop tokens: no accidental hit.
constexpr std::int32_t kFirstToken = 60'000;

// Returns true if attention reads the group by position. A compressor reads rings.
bool has_rows(const KVCacheSpec& spec) { return !is_state_kind(spec.kind) && !is_ring(spec.kind); }

// Returns the first position that attention at `position` reads. A window of w tokens includes the
// token itself: window 4 at position 9 reads 6 to 9.
std::int64_t lowest_read(const KVCacheSpec& spec, std::int64_t position) {
  if (is_sliding_window(spec.kind))
    return std::max<std::int64_t>(0, position - spec.sliding_window + 1);
  if (is_chunked(spec.kind))
    return position / spec.attention_chunk_size * spec.attention_chunk_size;
  return 0;
}

// Mixes a row with its position, so that exchanged rows change the sum.
std::uint64_t attended(std::uint64_t row, std::int64_t position) {
  return mix(row ^ mix(static_cast<std::uint64_t>(position)));
}

// Returns the row of `token` at `position`; `rows(q)` returns the row at q. Sums make the result
// independent of the order of reading, as in attention.
template <class Rows>
std::uint64_t row_of(const KVCacheSpec& spec, std::size_t group, std::int64_t position,
                     std::int32_t token, const Rows& rows) {
  std::uint64_t sum = mix(static_cast<std::uint64_t>(group) + 1);
  for (std::int64_t q = lowest_read(spec, position); q < position; ++q) sum += attended(rows(q), q);
  return mix(sum ^
             mix(static_cast<std::uint64_t>(position) << 32 | static_cast<std::uint32_t>(token)));
}

// Maps a hash to a token. 40,000 values: a wrong row changes the token almost certainly.
std::int32_t token_of(std::uint64_t hash) {
  return kFirstToken + static_cast<std::int32_t>(hash % kVocabulary);
}

}  // namespace

// Appends missing rows up to `count` in every group. Invariant: rows_[g] is a prefix of the
// positions.
std::int32_t UndisturbedRequest::next_token(std::int64_t count) {
  LS_CHECK(count >= 1 && count <= std::ssize(tokens_), "{} of {} tokens", count, tokens_.size());
  std::uint64_t hash = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const KVCacheSpec& spec = groups_[g].spec;
    if (!has_rows(spec)) continue;
    for (std::int64_t p = std::ssize(rows_[g]); p < count; ++p)
      rows_[g].push_back(
          row_of(spec, g, p, tokens_[p], [&](std::int64_t q) { return rows_[g][q]; }));
    hash = mix(hash ^ rows_[g][count - 1]);
  }
  return token_of(hash);
}

std::uint64_t UndisturbedRequest::row(std::size_t group, std::int64_t position) {
  next_token(position + 1);
  return rows_[group][position];
}

void UndisturbedRequest::truncate(std::int64_t count) {
  const auto size = static_cast<std::size_t>(count);
  if (size >= tokens_.size()) return;
  tokens_.resize(size);
  for (std::vector<std::uint64_t>& rows : rows_) rows.resize(std::min(rows.size(), size));
}

struct ReadingModel::Request {
  explicit Request(UndisturbedRequest request) : alone(std::move(request)) {}
  UndisturbedRequest alone;  // over the sampled tokens; answers what a perfect draft proposes
};

// A scheduled request of the current step, with its block tables at the time of the decision.
struct ReadingModel::Row {
  std::int64_t computed = 0;
  std::int64_t num_tokens = 0;
  std::vector<std::vector<BlockId>> tables;
};

// A slot per token of all ranks. Groups without rows have none.
ReadingModel::ReadingModel(Workload& inner, const SavedCase& saved) : inner_(inner), saved_(saved) {
  for (const KVCacheGroupSpec& group : saved.cache.groups) {
    tokens_in_block_.push_back(group.spec.block_size * num_context_ranks(saved.engine, group.spec));
    slots_.emplace_back(has_rows(group.spec) ? static_cast<std::size_t>(saved.cache.num_blocks *
                                                                        tokens_in_block_.back())
                                             : 0);
  }
}
ReadingModel::~ReadingModel() = default;

// A new request of the same name replaces the old one, which has ended.
void ReadingModel::take(const std::vector<WorkloadEvent>& events) {
  for (const WorkloadEvent& event : events)
    if (event.kind == WorkloadEvent::Kind::add)
      requests_[event.request.name] = std::make_unique<Request>(
          UndisturbedRequest(saved_.cache.groups, event.request.prompt.materialize()));
}

Result<Turn> ReadingModel::next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) {
  Result<Turn> turn = inner_.next_turn(state, events);
  take(events);
  return turn;
}

void ReadingModel::while_running(std::vector<WorkloadEvent>& events) {
  inner_.while_running(events);
  take(events);
}

void ReadingModel::request_left(std::string_view name, std::uint64_t ticket) {
  // A load in flight delivers the request's rows even if it has ended.
  if (inner_.connector() == nullptr) requests_.erase(std::string(name));
  inner_.request_left(name, ticket);
}

// Copies a block before the step. The copy is made in every group: a block belongs to one group,
// and the others never read it.
void ReadingModel::copy_block(const KVCacheBlockCopy& copy) {
  for (std::size_t g = 0; g < slots_.size(); ++g) {
    if (slots_[g].empty()) continue;
    const auto size = static_cast<std::ptrdiff_t>(tokens_in_block_[g]);
    std::copy_n(slots_[g].begin() + index_of(copy.from) * size, size,
                slots_[g].begin() + index_of(copy.to) * size);
  }
}

// Copies tables, because the scheduler changes them before the output of the step is processed.
bool ReadingModel::decided(const StepView& view) {
  for (const KVCacheBlockCopy& copy : view.decision.copies) copy_block(copy);
  rows_.clear();
  for (const ScheduledRequest& scheduled : view.decision.scheduled) {
    Row& row = rows_.emplace_back();
    row.computed = scheduled.computed;
    row.num_tokens = scheduled.num_tokens;
    for (std::int32_t g = 0; g < view.decision.num_groups; ++g) {
      const auto table = view.decisions.block_table(scheduled.id, g);
      row.tables.emplace_back(table.begin(), table.end());
    }
  }
  return true;
}

// Returns what the cache holds at a position: 0 past the end of the table, and whatever is stored
// in the null block for a null entry. A wrong table thus gives a wrong row and no error.
std::uint64_t ReadingModel::read(const Row& row, std::size_t group, std::int64_t position) const {
  const std::int64_t size = tokens_in_block_[group];
  const auto entry = static_cast<std::size_t>(position / size);
  if (entry >= row.tables[group].size()) return 0;
  const auto slot = index_of(row.tables[group][entry]) * size + position % size;
  return slots_[group][slot];
}

// Writes the rows of a token in every group and returns the token that follows. Writes to null
// entries and past the table are dropped, as a worker does.
std::int32_t ReadingModel::compute(const Row& row, std::int64_t position, std::int32_t token) {
  std::uint64_t hash = 0;
  for (std::size_t g = 0; g < slots_.size(); ++g) {
    const KVCacheSpec& spec = saved_.cache.groups[g].spec;
    if (!has_rows(spec)) continue;
    const std::uint64_t value =
        row_of(spec, g, position, token, [&](std::int64_t q) { return read(row, g, q); });
    const std::int64_t size = tokens_in_block_[g];
    const auto entry = static_cast<std::size_t>(position / size);
    if (entry < row.tables[g].size() && row.tables[g][entry] != kNullBlock)
      slots_[g][index_of(row.tables[g][entry]) * size + position % size] = value;
    hash = mix(hash ^ value);
  }
  return token_of(hash);
}

// Computes a row of the step and samples: the token after the last known one, and one more after
// each draft that equals the sampled token.
void ReadingModel::sample_row(const Row& row, const SampledRow& sampled, Request& request,
                              std::vector<std::int32_t>& tokens) {
  const std::vector<std::int32_t>& known_tokens = request.alone.tokens();
  const std::int64_t known = std::ssize(known_tokens);
  std::int64_t accepted = 0;
  for (std::int64_t p = row.computed; p < row.computed + row.num_tokens; ++p) {
    const std::int64_t draft = p - known;
    if (draft >= std::ssize(sampled.drafts)) break;  // a slot for a token that is not known yet
    const std::int32_t token = draft < 0 ? known_tokens[p] : sampled.drafts[draft];
    const std::int32_t next = compute(row, p, token);
    if (draft + 1 != accepted) continue;
    tokens.push_back(next);
    if (accepted < std::ssize(sampled.drafts) && sampled.drafts[accepted] == next) ++accepted;
  }
}

// Proposes drafts: the tokens that the request would sample on its own, or, with the case's
// probability, a different token. The choice depends on seed, token and position only, so that both
// runs of a relation accept the same drafts.
void ReadingModel::propose(const Request& request, std::int64_t num_drafts,
                           ModelOutput& output) const {
  UndisturbedRequest ahead = request.alone;
  const std::int64_t percent = workload_options_of(saved_).draft_acceptance_percent;
  for (std::int64_t i = 0; i < num_drafts; ++i) {
    const std::int64_t count = std::ssize(ahead.tokens());
    const std::int32_t right = ahead.next_token(count);
    const std::uint64_t coin = mix(saved_.seed ^ mix(static_cast<std::uint64_t>(right) << 32 ^
                                                     static_cast<std::uint64_t>(count)));
    const bool accepted = static_cast<std::int64_t>(coin % 100) < percent;
    output.draft_tokens.push_back(accepted ? right : right + 1);
    ahead.append(right);
  }
}

// Samples for all rows of the step. Proposals follow only rows that sample, as in an engine.
Result<void> ReadingModel::sample(std::int64_t step, std::span<const SampledRow> rows,
                                  ModelOutput& output) {
  LS_CHECK(rows.size() == rows_.size(), "{} rows, {} decided", rows.size(), rows_.size());
  // The trace decides after how many tokens a client disconnects; its samples are not used.
  ModelOutput planned;
  LS_RETURN_IF_ERROR(inner_.sample(step, rows, planned));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    Request& request = *requests_.at(std::string(rows[i].name));
    std::vector<std::int32_t> tokens;
    sample_row(rows_[i], rows[i], request, tokens);
    for (const std::int32_t token : tokens) {
      request.alone.append(token);
      answers_.tokens[std::string(rows[i].name)].push_back(token);
    }
    output.tokens.insert(output.tokens.end(), tokens.begin(), tokens.end());
    output.token_ends.push_back(static_cast<std::uint32_t>(output.tokens.size()));
    if (saved_.engine.num_spec_tokens == 0) continue;
    // A short draft plan of the workload (short_drafts_percent) limits the number.
    const std::int64_t num_drafts =
        planned.draft_ends.empty()
            ? saved_.engine.num_spec_tokens
            : planned.draft_ends[i] - (i == 0 ? 0 : planned.draft_ends[i - 1]);
    if (rows[i].samples) propose(request, num_drafts, output);
    output.draft_ends.push_back(static_cast<std::uint32_t>(output.draft_tokens.size()));
  }
  return {};
}

// Returns the slots of a block. REQUIRES: the group has rows.
std::span<std::uint64_t> ReadingModel::rows_of(const BlockTransfer& block) {
  const auto group = static_cast<std::size_t>(block.group);
  const auto size = static_cast<std::size_t>(tokens_in_block_[group]);
  return std::span(slots_[group])
      .subspan(static_cast<std::size_t>(index_of(block.block)) * size, size);
}

// Adds the transfers of the step. `brought` blocks receive the rows that the request would compute
// on its own; positions past its tokens stay 0. Loads come before what the step computes, stores
// after it.
void ReadingModel::plan(const DecidedStep& step, StepTransfers& transfers) {
  inner_.transfers()->plan(step, transfers);
  for (const BlockTransfer& block : transfers.brought) {
    const auto group = static_cast<std::size_t>(block.group);
    const std::int64_t size = tokens_in_block_[group];
    std::vector<std::uint64_t>& rows = host_rows_[block.host];
    rows.assign(size, 0);
    UndisturbedRequest& alone =
        requests_.at(std::string(step.decisions.name(block.request)))->alone;
    const std::int64_t last = std::min(block.num_tokens, (block.entry + 1) * size);
    for (std::int64_t p = block.entry * size; p < last; ++p) rows[p % size] = alone.row(group, p);
  }
  for (const BlockTransfer& block : transfers.loads)
    std::ranges::copy(host_rows_.at(block.host), rows_of(block).begin());
  stores_ = transfers.stores;
}

// Drops tokens that the engine has dropped: those sampled after rows that did not arrive.
void ReadingModel::drop_void_tokens(const StepView& view, RequestId id) {
  const std::string name(view.name(id));
  const auto request = requests_.find(name);
  if (request == requests_.end()) return;
  UndisturbedRequest& alone = request->second->alone;
  const std::int64_t num_void = std::ssize(alone.tokens()) - view.decisions.num_tokens(id);
  if (num_void <= 0) return;
  alone.truncate(view.decisions.num_tokens(id));
  std::vector<std::int32_t>& tokens = answers_.tokens[name];
  tokens.resize(tokens.size() - num_void);
}

// Stores read the rows after the step has computed them.
bool ReadingModel::finished(const StepView& view) {
  for (const BlockTransfer& block : std::exchange(stores_, {})) {
    const std::span<const std::uint64_t> rows = rows_of(block);
    host_rows_[block.host].assign(rows.begin(), rows.end());
  }
  for (const StoppedRequest& stopped : view.stopped)
    answers_.ended_in[std::string(view.name(stopped.id))] = view.decision.step;
  if (connector() == nullptr) return true;
  for (const RequestId id : view.decisions.running()) drop_void_tokens(view, id);
  for (const StoppedRequest& stopped : view.stopped)
    if (stopped.reason == FinishReason::error) drop_void_tokens(view, stopped.id);
  return true;
}

// Excluded are cases whose rows or samples this model cannot follow.
std::string why_not_answered(const SavedCase& saved) {
  if (saved.recording) return "a recording has its own sampled tokens";
  if (has_host_pages(saved.cache.groups)) return "rows of host pages are in two pools";
  if (saved.engine.async_scheduling && saved.engine.num_spec_tokens > 0)
    return "drafts in flight are not in the decisions";
  if (std::ranges::any_of(saved.cache.groups, [](const KVCacheGroupSpec& group) {
        return reads_beside_tokens(group.spec);
      }))
    return "rows of encoders, sinks and gaps are not in the answers";
  const bool any = std::ranges::any_of(
      saved.cache.groups, [](const KVCacheGroupSpec& group) { return has_rows(group.spec); });
  return any ? "" : "no group keeps rows of tokens";
}

// The model exists only after the session has created the workload, hence the optional.
Result<Answers> answers_of(const SavedCase& saved, const DecisionsFactory& decisions) {
  LS_CHECK(why_not_answered(saved).empty(), "{}", why_not_answered(saved));
  std::optional<ReadingModel> model;
  const auto attach = [&](std::int32_t, Workload* workload) {
    model.emplace(*workload, saved);
    return Onlooker{.workload = &*model, .observer = &*model};
  };
  LS_ASSIGN_OR_RETURN(const auto session,
                      open_undisturbed(saved, config_of(saved), {}, attach, decisions));
  LS_ASSIGN_OR_RETURN(const auto report, session->run());
  if (const auto& failure = report.summary.engine_failure)
    return fail("the engine failed ({}): {}", failure->kind, failure->what);
  Answers answers = model->answers();
  answers.steps = report.summary.steps;
  answers.verdict = report.summary.verdict;
  return answers;
}

}  // namespace lockstep
