#include "properties/relations/backend_relations.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "properties/judge/forwarding_backend.h"
#include "properties/shrink/case_parts.h"
#include "reference/memory/attention_oracle.h"
#include "reference/memory/content.h"
#include "reference/plan/page_groups.h"
#include "reference/plan/rank_plan.h"
#include "reference/types/token_rows.h"
#include "sim/session/session.h"
#include "sim/step/model_step.h"

namespace lockstep {
namespace {

// A layer whose rows are read. `spec` points into the plan of the reader's configuration.
struct RowLayer {
  std::int32_t index = 0;  // in the plan's order, as probes count
  const KVCacheSpec* spec = nullptr;
};

// Returns the layers that can be read by position. States have no rows. What a draft model's layers
// read depends on drafts, which change no answer. Encoders, sinks and gaps have their own
// positions.
std::vector<RowLayer> row_layers(const KVCacheConfig& plan, const KVCacheConfig& told) {
  std::vector<RowLayer> layers;
  std::int32_t index = 0;
  for (const KVCacheGroupSpec& group : plan.groups)
    for (std::size_t i = 0; i < group.layer_names.size(); ++i, ++index)
      if (!is_state_kind(group.layer_spec(i).kind) && !reads_beside_tokens(group.layer_spec(i)) &&
          draft_module_of(told, group.layer_names[i]) < 0)
        layers.push_back({index, &group.layer_spec(i)});
  return layers;
}

// The requests in the rows of the current step, in scheduling order. The readers of all ranks share
// it.
class Rows final : public StepObserver {
 public:
  struct Row {
    std::string request;
    std::int32_t num_known = 0;  // scheduled tokens that are not drafts
  };
  bool decided(const StepView& view) override {
    rows_.clear();
    for (const ScheduledRequest& scheduled : view.decision.scheduled)
      rows_.push_back(
          {std::string(view.name(scheduled.id)), scheduled.num_tokens - scheduled.num_spec});
    return true;
  }
  const Row& at(std::size_t i) const { return rows_[i]; }

 private:
  std::vector<Row> rows_;
};

// A backend that executes additional reads with every step and keeps their results. The loop's own
// reads and results pass through unchanged.
class ReadingBackend final : public ForwardingBackend {
 public:
  ReadingBackend(std::unique_ptr<Backend> inner, const BackendConfig& config,
                 const KVCacheConfig& told, const Rows& rows, bool with_pages,
                 BackendReading& reading)
      : ForwardingBackend(std::move(inner)),
        config_(config),
        layers_(row_layers(config_.plan, told)),
        rows_(rows),
        with_pages_(with_pages),
        reading_(reading) {}

  Result<void> execute(const StepProgram& program, StepReadback& readback) override {
    if (program.rows.empty()) return inner_->execute(program, readback);  // a query of the loop
    program_ = program;
    probed_.clear();
    queried_.clear();
    for (std::size_t row = 0; row < program.rows.size(); ++row)
      for (const RowLayer& layer : layers_) ask(row, layer);
    LS_RETURN_IF_ERROR(inner_->execute(program_, readback));
    keep(readback);
    return with_pages_ ? fingerprint_all() : Result<void>();
  }

 private:
  // Adds reads for one row of the step in one layer: a digest per written token and one of
  // everything that the last token attends to; with queries, also the output of attention.
  void ask(std::size_t row, const RowLayer& layer) {
    const RowSlice& slice = program_.rows[row];
    const std::int32_t last = slice.first_position + rows_.at(row).num_known;
    // Only drafts: nothing to read.
    if (last == slice.first_position) return;
    auto lowest = static_cast<std::int32_t>(first_attended(*layer.spec, last - 1));
    if (layer.spec->bounded_replay) lowest = std::max(lowest, slice.replay_start);
    const auto place = [&](std::int32_t first, std::int32_t end) {
      return ReadPlace{rows_.at(row).request, layer.index, first, end};
    };
    const auto probe = [&](std::int32_t first, std::int32_t end) {
      program_.probes.push_back(
          {.row = slice.row, .layer = layer.index, .first = first, .last = end});
      probed_.push_back(place(first, end));
    };
    // A ring has overwritten tokens more than its length ago.
    if (is_ring(*layer.spec)) {
      const auto end = slice.first_position + slice.num_tokens;
      const auto kept = static_cast<std::int32_t>(end - layer.spec->block_size);
      for (std::int32_t p = std::max(slice.first_position, kept); p < last; ++p) probe(p, p + 1);
      return;
    }
    const ContextRank rank = rank_in(config_.context, *layer.spec);
    // A rank with a share of the tokens numbers its rows differently, so digests are not
    // comparable.
    if (rank.num_ranks == 1) {
      for (std::int32_t p = slice.first_position; p < last; ++p) probe(p, p + 1);
      probe(lowest, last);
    }
    if (!inner_->answers_queries() || is_hidden_state(layer.spec->kind)) return;
    // A rank that keeps none of the positions has no output.
    if (num_kept(rank, lowest) == num_kept(rank, last)) return;
    const TokensPerState& per_row = layer.spec->tokens_per_state;
    // A compressed row that is not complete yet is not read.
    if (rows_in(per_row, lowest) == rows_in(per_row, last)) return;
    const auto token = static_cast<std::size_t>(slice.first_token + rows_.at(row).num_known - 1);
    program_.queries.push_back({.row = slice.row,
                                .layer = layer.index,
                                .first = lowest,
                                .last = last,
                                .content = program_.contents[token]});
    queried_.push_back(place(lowest, last));
  }

  // Moves the results of the additional reads from the end of the readback into the reading.
  // Outputs come off the end in reverse order, since their sizes differ by layer.
  void keep(StepReadback& readback) {
    const std::size_t first_probe = readback.digests.size() - probed_.size();
    for (std::size_t i = 0; i < probed_.size(); ++i) {
      const std::uint64_t digest = readback.digests[first_probe + i];
      const auto [known, is_new] = reading_.digests.emplace(probed_[i], digest);
      if (!is_new && known->second != digest && !reading_.unlike_itself)
        reading_.unlike_itself = probed_[i];
    }
    readback.digests.resize(first_probe);
    for (std::size_t i = queried_.size(); i-- > 0;) {
      const auto layer = std::ranges::find(layers_, queried_[i].layer, &RowLayer::index);
      const std::int64_t head_size = layer->spec->head_size;
      const std::int64_t count = layer->spec->num_kv_heads * config_.queries_per_kv * head_size;
      ReadOutputs& outputs = reading_.outputs[queried_[i]];
      outputs.head_size = head_size;
      outputs.of_ranks.resize(config_.context.num_ranks);
      outputs.is_dealt_out = is_dealt_out(*layer->spec);
      outputs.of_ranks[config_.context.rank].assign(readback.outputs.end() - count,
                                                    readback.outputs.end());
      readback.outputs.resize(readback.outputs.size() - count);
    }
  }

  // Mixes the fingerprints of all pages in a fixed order, the null block's included.
  Result<void> fingerprint_all() {
    std::vector<PageId> pages;
    for (std::size_t t = 0; t < config_.plan.tensors.size(); ++t)
      for (std::int64_t b = 0; b < config_.plan.num_blocks; ++b)
        pages.push_back({static_cast<std::int32_t>(t), BlockId{static_cast<std::int32_t>(b)}});
    std::vector<Fingerprint> fingerprints(pages.size());
    LS_RETURN_IF_ERROR(inner_->fingerprint_pages(pages, fingerprints));
    Fingerprint& all = reading_.pages.emplace_back();
    for (const Fingerprint& page : fingerprints) all = {mix(all.a ^ page.a), mix(all.b ^ page.b)};
    return {};
  }

  // A copy: the reader outlives the configuration that the factory receives.
  const BackendConfig config_;
  const std::vector<RowLayer> layers_;
  const Rows& rows_;
  const bool with_pages_;
  BackendReading& reading_;
  StepProgram program_;
  // Places of the additional reads, which follow the loop's own.
  std::vector<ReadPlace> probed_, queried_;
};

}  // namespace

// Cases with lost blocks are excluded: attention reads rows after a block that was not filled,
// whose content is undefined until the engine recomputes it.
std::string why_not_read(const SavedCase& saved) {
  if (saved.backend == "none") return "the case runs without a backend";
  if (has_host_pages(saved.cache.groups)) return "rows of host pages are in two pools";
  const LockstepConfig config = config_of(saved);
  if (may_lose_blocks(saved)) return "rows after a block that a load did not fill are also read";
  if (!config.backend.parallel.is_whole() || config.data_parallel.dp_size > 1)
    return "the case runs over tensor, pipeline or data parallel ranks";  // rank_outputs.h
  for (const KVCacheGroupSpec& group : saved.cache.groups)
    if (group.spec.kv_quant_mode != KVQuantMode::none)
      return "rows have their own scales, which are not part of an answer";
  const auto sound = supported_with_memory(facts_of(config));
  return sound ? "" : sound.error().message;
}

// One Rows observer serves the readers of all ranks, because all of them execute the same step.
Result<BackendReading> read_on_backend(const SavedCase& saved, const BackendFactory& make_backend,
                                       bool with_pages) {
  BackendReading reading;
  Rows rows;
  const auto reads = [&](const BackendConfig& config) -> Result<std::unique_ptr<Backend>> {
    auto backend = make_backend(config);
    if (!backend) return backend;
    return std::make_unique<ReadingBackend>(std::move(*backend), config, saved.cache, rows,
                                            with_pages, reading);
  };
  const auto attach = [&](std::int32_t, Workload*) { return Onlooker{.observer = &rows}; };
  LS_ASSIGN_OR_RETURN(const auto session, open_undisturbed(saved, config_of(saved), reads, attach));
  LS_ASSIGN_OR_RETURN(const auto report, session->run());
  reading.diverged = report.summary.verdict == Verdict::divergence;
  return reading;
}

namespace {

std::string name_of(const ReadPlace& at) {
  return fmt::format("tokens [{}, {}) of {} in layer {}", at.first, at.last, at.request, at.layer);
}

Breach breach_at(const ReadPlace& at, std::string what) {
  return {.request = at.request, .index = at.first, .what = std::move(what)};
}

using Outputs = std::span<const float>;

// NaN and infinity never agree.
bool are_close(Outputs one, Outputs other, double tolerance) {
  return std::ranges::equal(one, other, [&](double a, double b) {
    return std::isfinite(a) && std::abs(a - b) <= tolerance;
  });
}

// Returns true if `whole` is a weighted mean of the two parts, with one weight in [0, 1]: the
// weight by least squares, checked within the tolerance.
bool is_mean_of(Outputs whole, Outputs one, Outputs other, double tolerance) {
  double along = 0, length = 0;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    const double apart = double{one[i]} - other[i];
    along += (double{whole[i]} - other[i]) * apart;
    length += apart * apart;
  }
  const double weight = length == 0 ? 0 : std::clamp(along / length, 0.0, 1.0);
  for (std::size_t i = 0; i < whole.size(); ++i) {
    const double mean = weight * one[i] + (1 - weight) * other[i];
    if (!std::isfinite(whole[i]) || !(std::abs(whole[i] - mean) <= tolerance)) return false;
  }
  return true;
}

// Compares the outputs of a whole run with those of ranks. Four times the tolerance of one
// attention allows for the combination of two. An empty result means that a rank keeps no token of
// the place.
bool agree(const ReadPlace& at, const ReadOutputs& whole, const ReadOutputs& parts) {
  const double tolerance = 4 * attention_tolerance(whole.head_size, at.last - at.first);
  const std::vector<float>& all = whole.of_ranks.front();
  const std::vector<float>& first = parts.of_ranks.front();
  const std::vector<float>& last = parts.of_ranks.back();
  if (!parts.is_dealt_out)
    return are_close(all, first, tolerance) && are_close(all, last, tolerance);
  if (parts.of_ranks.size() == 1 || last.empty()) return are_close(all, first, tolerance);
  if (first.empty()) return are_close(all, last, tolerance);
  const auto head_size = static_cast<std::size_t>(whole.head_size);
  for (std::size_t begin = 0; begin < all.size(); begin += head_size)
    if (!is_mean_of(Outputs(all).subspan(begin, head_size),
                    Outputs(first).subspan(begin, head_size),
                    Outputs(last).subspan(begin, head_size), tolerance))
      return false;
  return true;
}

// Compares every place that both runs read. The first breach is reported, but counting continues.
void compare_reads(const BackendReading& one, const BackendReading& other, BackendCheck& check) {
  for (const BackendReading* reading : {&one, &other})
    if (reading->unlike_itself && !check.breach)
      check.breach = breach_at(*reading->unlike_itself,
                               fmt::format("{} are read twice in one run, with different results",
                                           name_of(*reading->unlike_itself)));
  for (const auto& [place, digest] : one.digests) {
    const auto same = other.digests.find(place);
    if (same == other.digests.end()) continue;
    ++check.compared;
    if (digest != same->second && !check.breach)
      check.breach = breach_at(
          place, fmt::format("{} are read as {:016x} in one run and as {:016x} in the other",
                             name_of(place), digest, same->second));
  }
  for (const auto& [place, outputs] : one.outputs) {
    const auto same = other.outputs.find(place);
    if (same == other.outputs.end()) continue;
    ++check.compared;
    if (!agree(place, outputs, same->second) && !check.breach)
      check.breach = breach_at(
          place, fmt::format("attention to {} has another result in the other run, or on its ranks",
                             name_of(place)));
  }
}

// Runs may differ in length; the common steps are compared. The index of a breach is a step.
void compare_pages(const BackendReading& one, const BackendReading& other, BackendCheck& check) {
  const auto steps = std::min(one.pages.size(), other.pages.size());
  check.pages = static_cast<std::int64_t>(steps);
  const auto end = one.pages.begin() + check.pages;
  const auto parted = std::mismatch(one.pages.begin(), end, other.pages.begin()).first;
  if (parted == end || check.breach) return;
  const std::int64_t step = parted - one.pages.begin();
  check.breach =
      Breach{.request = "", .index = step, .what = fmt::format("pages differ after step {}", step)};
}

}  // namespace

// The other case may be refused: some changes need a layout that the backend lacks.
Result<std::optional<BackendCheck>> check_on_backend(const SavedCase& saved,
                                                     const Relation& relation,
                                                     const BackendFactory& make_backend) {
  const std::optional<SavedCase> other = relation.change(saved);
  if (!other || !why_not_read(*other).empty()) return std::optional<BackendCheck>();
  LS_ASSIGN_OR_RETURN(const auto one, read_on_backend(saved, make_backend, relation.moves_nothing));
  const auto two = read_on_backend(*other, make_backend, relation.moves_nothing);
  BackendCheck check;
  if (!two) {
    check.refused = two.error().message;
    return std::optional(check);
  }
  compare_reads(one, *two, check);
  if (relation.moves_nothing) compare_pages(one, *two, check);
  if (check.breach) check.breach->what += fmt::format(" ({}: {})", relation.name, relation.says);
  return std::optional(std::move(check));
}

}  // namespace lockstep
