#include "properties/relations/device_reading.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "properties/judge/forwarding_backend.h"
#include "properties/shrink/case_parts.h"
#include "reference/memory/content.h"
#include "reference/plan/context_share.h"
#include "sim/session/session.h"
#include "sim/step/model_step.h"
#include "sim/step/program_builder.h"

namespace lockstep {
namespace {

struct RowLayer {
  std::int32_t index = 0;  // in the plan's order, as probes count
  const KVCacheSpec* spec = nullptr;
};

std::vector<RowLayer> row_layers(const KVCacheConfig& plan) {
  std::vector<RowLayer> layers;
  std::int32_t index = 0;
  for (const KVCacheGroupSpec& group : plan.groups)
    for (std::size_t i = 0; i < group.layer_names.size(); ++i, ++index)
      if (group.layer_spec(i).kind != CacheKind::mamba)
        layers.push_back({index, &group.layer_spec(i)});
  return layers;
}

// Who is in the rows of the step at hand; the ranks' readers share it.
class Rows final : public StepObserver {
 public:
  struct Row {
    std::string request;
    std::int32_t num_known = 0;  // of its scheduled tokens, those that are no drafts
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

// A backend that is asked for more than the loop asks for, and keeps the answers.
class ReadingBackend final : public ForwardingBackend {
 public:
  ReadingBackend(std::unique_ptr<Backend> inner, const BackendConfig& config, const Rows& rows,
                 bool with_pages, DeviceReading& reading)
      : ForwardingBackend(std::move(inner)),
        config_(config),
        layers_(row_layers(config_.plan)),
        rows_(rows),
        with_pages_(with_pages),
        reading_(reading) {}

  Result<void> execute(const StepProgram& program, StepReadback& readback) override;

 private:
  void ask(std::size_t row, const RowLayer& layer);
  void keep(StepReadback& readback);
  Result<void> fingerprint_all();

  const BackendConfig config_;
  const std::vector<RowLayer> layers_;
  const Rows& rows_;
  const bool with_pages_;
  DeviceReading& reading_;
  StepProgram program_;
  std::vector<ReadPlace> probed_, queried_;  // behind those of the loop
};

Result<void> ReadingBackend::execute(const StepProgram& program, StepReadback& readback) {
  if (program.rows.empty()) return inner_->execute(program, readback);  // a question of the loop's
  program_ = program;
  probed_.clear();
  queried_.clear();
  for (std::size_t row = 0; row < program.rows.size(); ++row)
    for (const RowLayer& layer : layers_) ask(row, layer);
  if (auto done = inner_->execute(program_, readback); !done) return done;
  keep(readback);
  return with_pages_ ? fingerprint_all() : Result<void>();
}

void ReadingBackend::ask(std::size_t row, const RowLayer& layer) {
  const RowSlice& slice = program_.rows[row];
  const std::int32_t last = slice.first_position + rows_.at(row).num_known;
  if (last == slice.first_position) return;
  const auto lowest = static_cast<std::int32_t>(first_attended(*layer.spec, last - 1));
  const auto place = [&](std::int32_t first, std::int32_t end) {
    return ReadPlace{rows_.at(row).request, layer.index, first, end};
  };
  const auto probe = [&](std::int32_t first, std::int32_t end) {
    program_.probes.push_back(
        {.row = slice.row, .layer = layer.index, .first = first, .last = end});
    probed_.push_back(place(first, end));
  };
  if (config_.context.num_ranks == 1) {
    for (std::int32_t p = slice.first_position; p < last; ++p) probe(p, p + 1);
    probe(lowest, last);
  }
  if (!inner_->answers_queries() || layer.spec->kind == CacheKind::hidden_state) return;
  if (num_kept(config_.context, lowest) == num_kept(config_.context, last)) return;
  const auto token = static_cast<std::size_t>(slice.first_token + rows_.at(row).num_known - 1);
  program_.queries.push_back({.row = slice.row,
                              .layer = layer.index,
                              .first = lowest,
                              .last = last,
                              .content = program_.contents[token]});
  queried_.push_back(place(lowest, last));
}

// Takes the own answers off the end of the readback.
void ReadingBackend::keep(StepReadback& readback) {
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
    outputs.of_ranks.resize(static_cast<std::size_t>(config_.context.num_ranks));
    outputs.of_ranks[static_cast<std::size_t>(config_.context.rank)].assign(
        readback.outputs.end() - count, readback.outputs.end());
    readback.outputs.resize(readback.outputs.size() - static_cast<std::size_t>(count));
  }
}

Result<void> ReadingBackend::fingerprint_all() {
  std::vector<PageId> pages;
  for (std::size_t t = 0; t < config_.plan.tensors.size(); ++t)
    for (std::int64_t b = 0; b < config_.plan.num_blocks; ++b)
      pages.push_back({static_cast<std::int32_t>(t), BlockId{static_cast<std::int32_t>(b)}});
  std::vector<Fingerprint> fingerprints(pages.size());
  if (auto done = inner_->fingerprint_pages(pages, fingerprints); !done) return done;
  Fingerprint& all = reading_.pages.emplace_back();
  for (const Fingerprint& page : fingerprints) all = {mix(all.a ^ page.a), mix(all.b ^ page.b)};
  return {};
}

}  // namespace

std::string why_not_read(const SavedCase& saved) {
  if (saved.backend == "none") return "the case runs without a backend";
  const LockstepConfig config = config_of(saved);
  if (may_lose_blocks(saved))
    return "rows behind a block that a load did not fill are read as well";
  if (!config.backend.parallel.is_whole() || config.data_parallel.dp_size > 1)
    return "the case runs over tensor, pipeline or data parallel ranks";  // rank_outputs.h
  for (const KVCacheGroupSpec& group : saved.cache.groups)
    if (group.spec.kv_quant_mode != KVQuantMode::none)
      return "rows have scales of their own, which are no part of an answer";
  const auto supported = ProgramBuilder::check_supported(saved.engine, saved.cache);
  return supported ? "" : supported.error().message;
}

Result<DeviceReading> read_on_device(const SavedCase& saved, const BackendFactory& make_backend,
                                     bool with_pages) {
  DeviceReading reading;
  Rows rows;
  const auto reads = [&](const BackendConfig& device) -> Result<std::unique_ptr<Backend>> {
    auto backend = make_backend(device);
    if (!backend) return backend;
    return std::make_unique<ReadingBackend>(std::move(*backend), device, rows, with_pages, reading);
  };
  const auto attach = [&](std::int32_t, Workload*) { return Onlooker{.observer = &rows}; };
  const auto session = open_undisturbed(saved, config_of(saved), reads, attach);
  if (!session) return tl::unexpected(session.error());
  const auto report = (*session)->run();
  if (!report) return tl::unexpected(report.error());
  reading.diverged = report->summary.verdict == Verdict::divergence;
  return reading;
}

}  // namespace lockstep
