#include "cuda_backend/step/draft_passes.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace lockstep::cuda {

DraftPasses::DraftPasses(Device& device, const BackendConfig& config, const LayerCaches& layers,
                         const BlockTables& tables, RowWriter& writer)
    : device_(device),
      drafter_(config.drafter),
      layers_(layers),
      tables_(tables),
      writer_(writer),
      positions_(device, "draft positions"),
      rows_(device, "draft rows"),
      contents_(device, "draft content ids"),
      slots_(device, "draft slots") {}

void DraftPasses::run(const StepProgram& program) {
  if (program.draft_rows.empty()) return;
  const bool is_by_module = drafter_.shape == DraftShape::modules;
  host_positions_.clear();
  host_rows_.clear();
  host_contents_.clear();
  for (const DraftRow& row : program.draft_rows) add_first_pass(row);
  const auto num_first = static_cast<std::int32_t>(host_positions_.size());
  const auto num_requests = static_cast<std::int32_t>(program.draft_rows.size());
  for (std::int32_t pass = 0; pass < drafter_.num_drafts; ++pass)
    for (const DraftRow& row : program.draft_rows) {
      const bool is_long = is_by_module || pass == 0;
      const std::int32_t begin = row.first_content + (is_by_module ? pass * row.num_tokens
                                                      : pass == 0  ? 0
                                                                   : row.num_tokens + pass - 1);
      LS_CHECK(begin >= 0 && std::cmp_less_equal(begin + (is_long ? row.num_tokens : 1),
                                                 program.draft_contents.size()),
               "pass {}: contents from {} of {}", pass, begin, program.draft_contents.size());
      const auto from = program.draft_contents.begin() + begin;
      host_contents_.insert(host_contents_.end(), from, from + (is_long ? row.num_tokens : 1));
    }
  LS_CHECK(std::ssize(host_contents_) ==
               num_first * std::int64_t{is_by_module ? drafter_.num_drafts : 1} +
                   (is_by_module ? 0 : std::int64_t{drafter_.num_drafts - 1} * num_requests),
           "{} contents of {} passes", host_contents_.size(), drafter_.num_drafts);
  contents_.upload(host_contents_);
  const std::int32_t num_tokens = std::max(num_first, num_requests);
  writer_.reserve_inputs(num_tokens);
  slots_stride_ = std::max<std::int64_t>(slots_stride_, num_tokens);
  slots_.reserve(slots_stride_ * tables_.num_tables());
  positions_.upload(host_positions_);
  rows_.upload(host_rows_);
  map_slots(num_first, 0);
  write(0, 0, num_first, program);
  if (is_by_module) {
    for (std::int32_t module = 1; module < drafter_.num_drafts; ++module)
      write(module, std::int64_t{module} * num_first, num_first, program);
    return;
  }
  if (drafter_.num_drafts == 1) return;
  host_positions_.clear();
  host_rows_.clear();
  for (const DraftRow& row : program.draft_rows) {
    host_positions_.push_back(row.first_position + row.num_tokens - 1 - row.num_rejected);
    host_rows_.push_back(row.row);
  }
  positions_.upload(host_positions_);
  rows_.upload(host_rows_);
  for (std::int32_t pass = 1; pass < drafter_.num_drafts; ++pass) {
    map_slots(num_requests, 1);
    write(0, num_first + std::int64_t{pass - 1} * num_requests, num_requests, program);
  }
}

void DraftPasses::add_first_pass(const DraftRow& row) {
  for (std::int32_t i = 0; i < row.num_tokens; ++i) {
    host_positions_.push_back(row.first_position + i);
    host_rows_.push_back(row.row);
  }
}

void DraftPasses::map_slots(std::int32_t num_tokens, std::int32_t advance) {
  LS_CHECK(num_tokens <= slots_stride_, "{} tokens in a stride of {}", num_tokens, slots_stride_);
  device_.launch(device_.kernels().draft_slots,
                 DraftSlotsParams{.groups = tables_.tables(),
                                  .rows = rows_.data(),
                                  .positions = positions_.data(),
                                  .slots = slots_.data(),
                                  .slots_stride = slots_stride_,
                                  .num_groups = tables_.num_tables(),
                                  .num_tokens = num_tokens,
                                  .advance = advance,
                                  .last_position = drafter_.max_model_len - 1,
                                  .pad_slot = PAD_SLOT_ID},
                 [&](Operation& operation) {
                   operation.named("draft_slots").read_all(rows_, positions_);
                   tables_.read_tables(operation);
                   operation.write_all(positions_, slots_);
                 });
}

void DraftPasses::write(std::int32_t module, std::int64_t first_content, std::int32_t num_tokens,
                        const StepProgram& program) {
  // Up to the furthest position of the step's last pass.
  const auto add_written = [&](std::size_t layer, std::vector<MemoryRange>& ranges) {
    for (const DraftRow& row : program.draft_rows) {
      const std::int32_t end = std::min(row.first_position + row.num_tokens + drafter_.num_drafts,
                                        drafter_.max_model_len);
      for (const std::int32_t block :
           tables_.mirror().blocks(layers_.group_of_layer[layer], row.row, row.first_position, end))
        add_layer_ranges(layers_, layer, block, ranges);
    }
  };
  for (std::size_t layer = 0; layer < layers_.rows.size(); ++layer) {
    if (layers_.draft_module_of_layer[layer] != module) continue;
    const Slot* slots = slots_.data() + layers_.table_of_layer[layer] * slots_stride_;
    writer_.write_layer(layer,
                        {.contents = contents_.data() + first_content,
                         .contents_range = contents_.range(),
                         .slots = slots,
                         .slots_range = slots_.range(),
                         .num_made = num_tokens,
                         .num_written = num_tokens},
                        add_written);
  }
}

}  // namespace lockstep::cuda
