#include "cuda_backend/step/sparse_pages.h"

#include <fmt/format.h>

#include <algorithm>

namespace lockstep::cuda {

SparsePages::SparsePages(Device& device, const BackendConfig& config, const LayerCaches& layers,
                         const BlockTables& tables, const HostTier& tier)
    : device_(device), config_(config), layers_(layers), tables_(tables), tier_(tier) {}

Result<std::unique_ptr<SparsePages>> SparsePages::create(Device& device,
                                                         const BackendConfig& config,
                                                         const LayerCaches& layers,
                                                         const BlockTables& tables,
                                                         const HostTier* tier) {
  if (source_group(config.plan.groups) < 0) return std::unique_ptr<SparsePages>();
  if (tier == nullptr) return fail("host pages without a host pool: num_host_blocks is 0");
  std::unique_ptr<SparsePages> pages(new SparsePages(device, config, layers, tables, *tier));
  LS_RETURN_IF_ERROR(pages->start());
  return pages;
}

Result<void> SparsePages::start() {
  place_.assign(layers_.rows.size(), -1);
  std::vector<std::size_t> hot;
  std::size_t layer = 0;
  for (std::int32_t g = 0; g < std::ssize(config_.plan.groups); ++g) {
    const KVCacheGroupSpec& group = config_.plan.groups[g];
    if (is_resident_pages(group)) groups_.push_back(g);
    for (std::size_t i = 0; i < group.layer_names.size(); ++i, ++layer) {
      if (is_hot_region(group)) hot.push_back(layer);
      if (group.role != kResidentRole) continue;
      place_[layer] = static_cast<std::int32_t>(sparse_.size());
      sparse_.push_back({.resident = layer,
                         .region = layers_.regions_of_group[g].begin + static_cast<std::int32_t>(i),
                         .table = static_cast<std::int32_t>(groups_.size()) - 1});
    }
    const RegionRange regions = layers_.regions_of_group[g];
    if (is_resident_pages(group) && regions.end - regions.begin != std::ssize(group.layer_names))
      return fail("host pages: pages of group {} are not contiguous", g);
    if (group.role != kHotRole) continue;
    const auto slots =
        static_cast<std::int32_t>(group.spec.blocks_per_request * group.spec.block_size);
    if (num_slots_ != 0 && num_slots_ != slots)
      return fail("hot regions of {} and {} rows", num_slots_, slots);
    num_slots_ = slots;
  }
  LS_CHECK(hot.size() == sparse_.size(), "{} hot and {} resident layers", hot.size(),
           sparse_.size());
  LS_CHECK(!groups_.empty() && source() >= 0, "{} groups of resident pages, source {}",
           groups_.size(), source());
  for (std::size_t i = 0; i < hot.size(); ++i) sparse_[i].hot = hot[i];

  const std::int64_t rows = config_.num_rows;
  for (const std::int32_t group : groups_) {
    auto entries = std::make_unique<DeviceArray<std::int32_t>>(
        device_, fmt::format("residency of group {}", group));
    GroupTable& table = residency_.host.emplace_back();
    table.width = config_.max_blocks_per_row[group];
    table.entries = table.kernel_entries = entries->reserve(rows * table.width);
    device_.zero(table.entries, rows * table.width * 4);
    entries_.push_back(std::move(entries));
  }
  residency_.upload();
  // Each row of the batch has an entry for every position that its table of the source can hold.
  const std::int64_t positions = std::int64_t{config_.max_blocks_per_row[source()]} *
                                 config_.plan.groups[source()].spec.block_size;
  const std::vector<std::int32_t> nowhere(static_cast<std::size_t>(rows * positions), -1);
  places_.upload(nowhere);
  used_.reserve(rows * num_slots_);
  device_.zero(used_.data(), rows * num_slots_ * 4);
  held_.reserve(rows * num_slots_);
  order_.reserve(rows * num_slots_);
  std::vector<std::int32_t> all(static_cast<std::size_t>(rows));
  for (std::int32_t row = 0; row < rows; ++row) all[static_cast<std::size_t>(row)] = row;
  clear_regions(all);
  // The parameters of all layers stay on the device: one launch serves every layer of a step.
  std::vector<AwayRows> away;
  for (const Layer& one : sparse_) {
    LS_ASSIGN_OR_RETURN(away.emplace_back(), away_rows(one));
    max_row_bytes_ = std::max(max_row_bytes_, away.back().row_bytes);
  }
  away_.upload(away);
  return device_.finish();
}

Result<AwayRows> SparsePages::away_rows(const Layer& layer) const {
  const RowCache& resident = layers_.rows[layer.resident];
  const RowCache& hot = layers_.rows[layer.hot];
  const std::int64_t page = std::int64_t{resident.block_size.value} * resident.row_bytes;
  const std::int32_t hot_group = layers_.group_of_layer[layer.hot];
  const HostTier::Place host = tier_.place_of(layer.region);
  for (const RowCache* rows : {&resident, &hot})
    if (rows->num_parts != 1 || rows->num_kv_heads != 1 || rows->token_stride != rows->row_bytes ||
        rows->row_bytes != resident.row_bytes ||
        rows->block_size.value != resident.block_size.value)
      return fail(
          "host pages: rows of layers {} and {} are not contiguous with the same stride in blocks "
          "of {} rows",
          layer.resident, layer.hot, resident.block_size.value);
  AwayRows away;
  away.host = host.base;
  away.host_block_stride = host.block_stride;
  away.host_table = tables_.kernel_table(source());
  away.host_width = tables_.kernel_table_width(source());
  away.hot = hot.base;
  away.hot_block_stride = hot.block_stride;
  away.hot_table = tables_.kernel_table(hot_group);
  away.hot_width = tables_.kernel_table_width(hot_group);
  away.held = held_.data();
  away.places = places_.data();
  away.num_slots = num_slots_;
  away.num_positions = static_cast<std::int32_t>(away.host_width * resident.block_size.value);
  away.block_size = resident.block_size;
  away.row_bytes = resident.row_bytes;
  // Its lowest set bit is the largest unit of which every address on the host is a multiple.
  const std::int64_t host_unit = host.block_stride | host.offset | page;
  away.unit_bytes = static_cast<std::int32_t>(
      std::min<std::int64_t>({resident.unit_bytes, hot.unit_bytes, host_unit & -host_unit, 8}));
  return away;
}

MemoryRange SparsePages::cache_range() const {
  const BlockRegion& first = layers_.pages.front();
  return range_of(first.base, first.block_stride * config_.plan.num_blocks);
}

void SparsePages::add_reads(Operation& operation) const {
  operation.read_all(away_, held_, places_).read(cache_range()).read(tier_.range());
  operation.read(tables_.table_range(source()));
  for (const auto& entries : entries_) operation.read(entries->range());
  for (const Layer& layer : sparse_)
    operation.read(tables_.table_range(layers_.group_of_layer[layer.hot]));
}

void SparsePages::clear_regions(const std::vector<std::int32_t>& rows) {
  device_.launch(device_.kernels().clear_regions,
                 ClearRegionsParams{.rows = cleared_.upload(rows),
                                    .held = held_.data(),
                                    .order = order_.data(),
                                    .num_rows = static_cast<std::int32_t>(rows.size()),
                                    .num_slots = num_slots_},
                 [&](Operation& operation) {
                   operation.named("clear_regions").read_all(cleared_).write_all(held_, order_);
                 });
}

// The residency tables change before the step's kernels read them, as the block tables do.
void SparsePages::apply(const StepProgram& program) {
  if (!program.clear_rows.empty()) clear_regions(program.clear_rows);
  edits_.host.clear();
  for (const TableEdit& edit : program.residency) {
    const auto table = std::ranges::find(groups_, edit.group) - groups_.begin();
    LS_CHECK(table < std::ssize(groups_), "group {} has no residency", edit.group);
    edits_.host.push_back(
        {edit.row, static_cast<std::int32_t>(table), edit.index, index_of(edit.block)});
  }
  device_.launch(device_.kernels().edit_entries,
                 TableEditParams{.groups = residency_.data(),
                                 .edits = edits_.upload(),
                                 .num_edits = static_cast<std::int32_t>(edits_.host.size())},
                 [&](Operation& operation) {
                   operation.named("edit_entries").read_all(residency_, edits_);
                   for (const auto& entries : entries_) operation.write_all(*entries);
                 });
}

void SparsePages::mirror(const StepProgram& program) {
  if (program.mirrors.empty()) return;
  const std::int64_t size = config_.plan.groups[source()].spec.block_size;
  mirrors_.host.clear();
  mirror_layers_.host.clear();
  std::size_t next = 0;
  for (const std::int32_t group : groups_) {
    const auto begin = static_cast<std::int32_t>(mirrors_.host.size());
    for (const HostMirror& mirror : program.mirrors)
      if (mirror.group == group)
        mirrors_.host.push_back({index_of(mirror.block) * size + mirror.first_row,
                                 index_of(mirror.host) * size + mirror.first_row, mirror.num_rows});
    // A kernel finds the mirror of a slot by binary search.
    std::sort(mirrors_.host.begin() + begin, mirrors_.host.end(),
              [](const auto& a, const auto& b) { return a.first_row < b.first_row; });
    const auto end = static_cast<std::int32_t>(mirrors_.host.size());
    for (; next < sparse_.size() && groups_[sparse_[next].table] == group; ++next) {
      const RowCache& rows = layers_.rows[sparse_[next].resident];
      mirror_layers_.host.push_back({.base = rows.base,
                                     .block_stride = rows.block_stride,
                                     .slots = tables_.slots(group),
                                     .begin = begin,
                                     .end = end,
                                     .layer = static_cast<std::int32_t>(next)});
    }
  }
  LS_CHECK(next == sparse_.size() && mirrors_.host.size() == program.mirrors.size(),
           "{} of {} layers, {} of {} mirrors", next, sparse_.size(), mirrors_.host.size(),
           program.mirrors.size());
  device_.launch(
      device_.kernels().mirror_rows,
      MirrorRowsParams{.layers = mirror_layers_.upload(),
                       .away = away_.data(),
                       .items = mirrors_.upload(),
                       .num_layers = static_cast<std::int32_t>(mirror_layers_.host.size()),
                       .num_tokens = static_cast<std::int32_t>(program.contents.size()),
                       .max_row_bytes = max_row_bytes_},
      [&](Operation& operation) {
        operation.named("mirror_rows").read_all(mirror_layers_, mirrors_, away_);
        operation.read(cache_range()).write(tier_.range());
        for (const std::int32_t group : groups_) operation.read(tables_.slots_range(group));
      });
}

void SparsePages::swap_in(const StepProgram& program) {
  if (program.hot_reads.empty()) return;
  reads_.host.clear();
  for (const HotRead& read : program.hot_reads)
    reads_.host.push_back({read.row, read.first, read.num_positions});
  const auto num_positions = static_cast<std::int32_t>(program.hot_positions.size());
  const auto num_reads = static_cast<std::int32_t>(reads_.host.size());
  for (const HotReadItem& read : reads_.host)
    LS_CHECK(read.first >= 0 && read.first + read.num_positions <= num_positions &&
                 read.num_positions <= num_slots_,
             "positions {} to {} of {} in {} slots", read.first, read.first + read.num_positions,
             num_positions, num_slots_);
  device_.launch(device_.kernels().hot_reads,
                 HotReadParams{.reads = reads_.upload(),
                               .positions = positions_.upload(program.hot_positions),
                               .away = away_.data(),
                               .held = held_.data(),
                               .places = places_.data(),
                               .order = order_.data(),
                               .used = used_.data(),
                               .swaps = swaps_.reserve(num_positions),
                               .num_reads = num_reads,
                               .read_number = num_reads_ + 1},
                 [&](Operation& operation) {
                   operation.named("hot_reads").read_all(reads_, positions_, away_);
                   operation.read_all(held_, places_, order_, used_);
                   operation.read(tables_.table_range(source()));
                   operation.write_all(held_, places_, order_, used_, swaps_);
                 });
  // Numbers are unique over all steps: a slot whose number is the read's own is not replaced.
  num_reads_ += num_reads;
  device_.launch(device_.kernels().swap_rows,
                 SwapRowsParams{.away = away_.data(),
                                .swaps = swaps_.data(),
                                .num_layers = static_cast<std::int32_t>(sparse_.size()),
                                .num_swaps = num_positions,
                                .max_row_bytes = max_row_bytes_},
                 [&](Operation& operation) {
                   operation.named("swap_rows").read_all(away_, swaps_).read(tier_.range());
                   for (const Layer& layer : sparse_)
                     operation.read(tables_.table_range(layers_.group_of_layer[layer.hot]));
                   operation.write(cache_range());
                 });
}

}  // namespace lockstep::cuda
