#include "sim/step/probe_planner.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "reference/plan/rank_plan.h"
#include "reference/types/token_rows.h"
#include "sim/step/draft_planner.h"

namespace lockstep {
namespace {

// Elements per row that the attention kernel reads. No engine attends to longer rows: they are keys
// that DeepSeek-V4 has not yet compressed.
constexpr std::int64_t kQueryElementsMax = 1024;

constexpr std::int64_t kProbePositionsMax = 1024;  // per probe of earlier positions

// Returns the position after the last row that the step reads in the layer. A draft model's passes
// may reach past the step's tokens.
std::int64_t end_of_read(const RowSlice& slice, const WorkerRequest& request,
                         const ModelLayer& layer) {
  return layer.lane > 0 ? request.drafter.end
                        : std::int64_t{slice.first_position} + slice.num_tokens;
}

std::int64_t rows_in_cache(const MemoryModel& model) {
  std::int64_t rows = 0;
  for (const ModelLayer& layer : model.layers())
    rows += model.num_blocks() * layer.rows_per_block * layer.num_kv * layer.num_kv_heads;
  return rows;
}

}  // namespace

ProbePlanner::ProbePlanner(const BackendConfig& config, const MemoryModel& model, Worker& worker,
                           std::int64_t probe_rows, const QueryPlan& queries, int num_members)
    : config_(config),
      model_(model),
      worker_(worker),
      probe_rows_(probe_rows),
      query_plan_(queries),
      decoded_rows_(static_cast<std::size_t>(num_members), DecodedRows(rows_in_cache(model))) {}

// K and V of each head count separately, since each is read from the cache.
std::int64_t ProbePlanner::rows_of(const ModelLayer& layer, std::int64_t positions) const {
  return positions * layer.num_kv * layer.num_kv_heads;
}

std::int64_t ProbePlanner::rows_kept(const ModelLayer& layer, std::int64_t first,
                                     std::int64_t last) const {
  const ContextRank rank = worker_.context(layer.group);
  const auto before = [&](std::int64_t position) {
    return rows_in(layer.tokens_per_state, num_kept(rank, position));
  };
  return rows_of(layer, before(last) - before(first));
}

// Everything readable counts as left out at first. probe() then subtracts what it reads.
void ProbePlanner::plan(StepProgram& program, std::span<const RequestId> requests,
                        const std::function<bool(std::size_t)>& is_void) {
  probes_.clear();
  queries_.clear();
  pieces_.clear();
  candidates_.clear();
  LS_CHECK(program.rows.size() == requests.size(), "{} rows of {} requests", program.rows.size(),
           requests.size());
  budget_ = probe_rows_;
  for (std::size_t i = 0; i < program.rows.size(); ++i) {
    if (is_void(i)) continue;
    const WorkerRequest& request = worker_.at(requests[i]);
    const bool is_encoded = std::ranges::find(program.encoder_slices, program.rows[i].row,
                                              &EncoderSlice::row) != program.encoder_slices.end();
    for (const ModelLayer& layer : model_.layers()) {
      if (layer.num_kv == 0 || model_.is_hot_group(layer.group)) continue;
      Reach reach = reach_in(spec_of(layer), request, program.rows[i], is_encoded);
      if (layer.lane > 0) reach.last = end_of_read(program.rows[i], request, layer);
      if (reach.lowest >= reach.last) continue;  // no encoder has rows for it, nor its drafter
      candidates_.push_back({.index = i, .layer = layer.index, .reach = reach});
      rows_left_out_ += rows_kept(layer, reach.lowest, reach.last) -
                        rows_kept(layer, reach.gap_first, reach.gap_last);
    }
  }
  if (candidates_.empty()) return;
  probe_written(program, requests);
  probe_before(program, requests);
  if (query_plan_.chunks)
    add_chunks(program, requests);
  else
    add_queries(program, requests);
}

// Probes the two sides of a gap separately.
void ProbePlanner::probe(StepProgram& program, std::span<const RequestId> requests,
                         const Candidate& at, std::int64_t first, std::int64_t last) {
  const Reach& reach = at.reach;
  if (reach.gap_first < reach.gap_last && first < reach.gap_last && last > reach.gap_first) {
    probe(program, requests, at, first, reach.gap_first);
    probe(program, requests, at, reach.gap_last, last);
    return;
  }
  if (first >= last) return;
  const ModelLayer& layer = model_.layers()[at.layer];
  if (layer.data_bytes != 0) return;  // rows in pieces: attention reads them, digests do not
  WorkerRequest& request = worker_.at(requests[at.index]);
  DraftProbe drafted;
  if (layer.lane > 0) {
    drafted = draft_probe(model_, request, layer, first, last);
    rows_left_out_ -= rows_of(layer, drafted.first - first);  // there is nothing to read
    first = drafted.first;
  }
  const std::int64_t rows = rows_kept(layer, first, last);
  LS_CHECK(rows >= 0, "{} rows in [{}, {})", rows, first, last);
  if (rows == 0) return;
  budget_ -= rows;
  rows_read_ += rows;
  rows_left_out_ -= rows;
  program.probes.push_back({.row = program.rows[at.index].row,
                            .layer = at.layer,
                            .first = static_cast<std::int32_t>(first),
                            .last = static_cast<std::int32_t>(last)});
  probes_.push_back({.request = requests[at.index], .digest = drafted.digest});
}

// Probes the written positions of each candidate, the newest if the budget does not cover all.
void ProbePlanner::probe_written(StepProgram& program, std::span<const RequestId> requests) {
  const std::size_t count = candidates_.size();
  for (std::size_t i = 0; i < count && budget_ > 0; ++i) {
    const Candidate& at = candidates_[(turn_ + i) % count];
    const Reach& reach = at.reach;
    const ModelLayer& layer = model_.layers()[at.layer];
    const std::int64_t affordable = std::max<std::int64_t>(1, budget_ / rows_of(layer, 1));
    probe(program, requests, at, std::max({reach.first, reach.lowest, reach.last - affordable}),
          reach.last);
  }
}

// Probes one piece per request in turn until everything is read or the budget is used up. The next
// step resumes with the same request, layer and position.
void ProbePlanner::probe_before(StepProgram& program, std::span<const RequestId> requests) {
  const std::size_t count = candidates_.size();
  std::size_t unread = 0;
  for (Candidate& at : candidates_) {
    at.unread = at.reach.first - at.reach.lowest;
    if (at.unread > 0) ++unread;
  }
  for (std::size_t i = turn_ % count; unread > 0 && budget_ > 0; i = (i + 1) % count) {
    turn_ = i + 1;
    Candidate& at = candidates_[i];
    if (at.unread <= 0) continue;
    const ModelLayer& layer = model_.layers()[at.layer];
    WorkerRequest& request = worker_.at(requests[at.index]);
    // Each request continues where its last probe of this layer ended, and wraps around at the end.
    request.next_probe.resize(model_.layers().size());
    std::int64_t& next = request.next_probe[at.layer];
    const std::int64_t end = at.reach.first;
    if (next < at.reach.lowest || next >= end) next = at.reach.lowest;
    const std::int64_t affordable =
        std::clamp<std::int64_t>(budget_ / rows_of(layer, 1), 1, kProbePositionsMax);
    const std::int64_t last = std::min({end, next + affordable, next + at.unread});
    probe(program, requests, at, next, last);
    at.unread -= last - next;
    LS_CHECK(at.unread >= 0, "row {}: {} rows too many are probed", at.index, -at.unread);
    if (at.unread == 0) --unread;
    next = last;
  }
}

// Draft model layers have rows of their own passes, which no query of a token describes.
bool ProbePlanner::is_queried(const ModelLayer& layer) const {
  return layer.lane == 0 && has_attention_oracle(layer) && layer.head_size <= kQueryElementsMax;
}

Reach ProbePlanner::reach_of_query(const RowSlice& slice, RequestId id, const ModelLayer& layer,
                                   std::int32_t token) const {
  RowSlice to_token = slice;
  to_token.num_tokens = token + 1;
  return reach_in(spec_of(layer), worker_.at(id), to_token, false, true);
}

// Adds queries by the last token of each request in rotation, as far as the budget goes.
void ProbePlanner::add_queries(StepProgram& program, std::span<const RequestId> requests) {
  const auto count = static_cast<std::int64_t>(candidates_.size());
  std::int64_t budget = query_plan_.rows;
  for (std::int64_t tried = 0; tried < count && budget > 0; ++tried, ++query_turn_) {
    const Candidate& at = candidates_[query_turn_ % count];
    if (is_queried(model_.layers()[at.layer]))
      budget -=
          add_query(program, requests[at.index], at, program.rows[at.index].num_tokens - 1, budget);
  }
}

// Queries by all tokens of each request's step, layer by layer in turn. The last token of each
// request comes first; the tokens before it share the rest of the budget equally.
void ProbePlanner::add_chunks(StepProgram& program, std::span<const RequestId> requests) {
  std::ranges::stable_sort(candidates_, {}, &Candidate::layer);
  const auto num_layers = std::ssize(model_.layers());
  std::int64_t budget = query_plan_.rows;
  const std::int64_t turn = query_turn_;
  for (std::int64_t tried = 0; tried < num_layers; ++tried) {
    const ModelLayer& layer = model_.layers()[(turn + tried) % num_layers];
    if (!is_queried(layer)) continue;
    const auto own = std::ranges::equal_range(candidates_, layer.index, {}, &Candidate::layer);
    const bool is_affordable = budget > 0;
    if (is_affordable) query_turn_ = turn + tried + 1;
    std::int64_t left = std::ssize(own);
    for (const Candidate& at : own) {
      const RowSlice& slice = program.rows[at.index];
      const std::int64_t share = std::max<std::int64_t>(budget, 0) / left--;
      std::int32_t first = slice.num_tokens;
      for (std::int64_t rows = 0; is_affordable && first > 0; --first) {
        const Reach reach = reach_of_query(slice, requests[at.index], layer, first - 1);
        rows += rows_of(layer, reach.last - reach.lowest);
        if (first < slice.num_tokens && rows > share) break;
      }
      for (std::int32_t token = first; token < slice.num_tokens; ++token)
        budget -= add_query(program, requests[at.index], at, token, budget);
      tokens_asked_ += slice.num_tokens - first;
      tokens_left_out_ += first;
    }
  }
}

std::int64_t ProbePlanner::add_query(StepProgram& program, RequestId id, const Candidate& at,
                                     std::int32_t token, std::int64_t budget) {
  const ModelLayer& layer = model_.layers()[at.layer];
  const RowSlice& slice = program.rows[at.index];
  const WorkerRequest& request = worker_.at(id);
  const Reach reach = reach_of_query(slice, id, layer, token);
  const std::int64_t affordable = std::max<std::int64_t>(1, budget / rows_of(layer, 1));
  const std::int64_t first =
      query_plan_.whole
          ? reach.lowest
          : std::max(reach.lowest, reach.last - tokens_in(layer.tokens_per_state, affordable));
  const ContentId query = request.prefix.content(std::int64_t{slice.first_position} + token);
  const PrefixContent& keys = contents_in(spec_of(layer), request);
  std::vector<ContentId> contents;
  for (std::int64_t p = first; p < reach.last; ++p) {
    if (!keeps(worker_.context(layer.group), p) || (p >= reach.gap_first && p < reach.gap_last))
      continue;
    const RowRange rows = rows_of_token(layer.tokens_per_state, p);
    for (std::int64_t row = rows.first; row < rows.last; ++row)
      contents.push_back(row_content(layer.tokens_per_state, keys.content_in(layer, p), row));
  }
  if (contents.empty()) return 0;
  program.queries.push_back({.row = slice.row,
                             .layer = at.layer,
                             .first = static_cast<std::int32_t>(first),
                             .last = static_cast<std::int32_t>(reach.last),
                             .content = query,
                             .gap_first = static_cast<std::int32_t>(reach.gap_first),
                             .gap_last = static_cast<std::int32_t>(reach.gap_last)});
  const std::int64_t rows_read = rows_of(layer, std::ssize(contents));
  // The tolerance depends on the number of rows and the head size, since rounding errors of a
  // softmax grow with both. A narrower output type adds its own rounding.
  const std::int64_t positions = std::ssize(contents);
  const double of_sums = config_.numbers == Numbers::real
                             ? real_attention_tolerance(layer.head_size, positions,
                                                        first_factor_of(Numbers::real, query))
                             : attention_tolerance(layer.head_size, positions);
  const double tolerance = of_sums + rounding_tolerance(query_plan_.dtype);
  const std::int64_t elements =
      layer.num_kv_heads * layer.share.queries_per_kv * std::int64_t{layer.head_size};
  for (std::int32_t kv_head = 0; kv_head < layer.num_kv_heads; ++kv_head)
    pieces_.push_back({.query = queries_.size(), .kv_head = kv_head});
  queries_.push_back({.request = id,
                      .layer = at.layer,
                      .query = query,
                      .contents = std::move(contents),
                      .output = std::vector<double>(static_cast<std::size_t>(elements)),
                      .tolerance = tolerance});
  return rows_read;
}

// One thread makes all digests: they extend the sums of their requests. Those of a draft model's
// layers are known.
void ProbePlanner::expect(const StepProgram& program, std::int64_t piece, int member) {
  for (std::size_t i = 0; piece == 0 && i < probes_.size(); ++i) {
    const AttentionProbe& probe = program.probes[i];
    const ModelLayer& layer = model_.layers()[probe.layer];
    if (layer.lane > 0) continue;
    WorkerRequest& request = worker_.at(probes_[i].request);
    PrefixContent& contents = is_cross_attention(spec_of(layer)) ? request.encoder : request.prefix;
    probes_[i].digest = contents.attention_digest(layer, probe.first, probe.last);
  }
  if (piece == 0) return;
  const auto [index, kv_head] = pieces_[static_cast<std::size_t>(piece - 1)];
  QueryExpectation& query = queries_[index];
  const ModelLayer& layer = model_.layers()[query.layer];
  const auto elements = static_cast<std::size_t>(layer.share.queries_per_kv * layer.head_size);
  attend(layer, kv_head, query.contents, query.query, layer.share.queries_per_kv,
         decoded_rows_[static_cast<std::size_t>(member)], query_plan_.dtype,
         first_factor_of(config_.numbers, query.query),
         std::span(query.output).subspan(static_cast<std::size_t>(kv_head) * elements, elements));
}

}  // namespace lockstep
