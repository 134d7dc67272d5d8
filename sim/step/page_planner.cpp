#include "sim/step/page_planner.h"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "reference/memory/content.h"
#include "sim/step/program_builder.h"

namespace lockstep {

std::vector<HotRegions::Swap> HotRegions::read(std::int32_t row, std::int64_t num_slots,
                                               std::span<const std::int32_t> positions) {
  LS_CHECK(std::ssize(positions) <= num_slots, "{} positions, {} slots", positions.size(),
           num_slots);
  Region& region = regions_[row];
  if (region.order.empty()) {
    region.order.resize(static_cast<std::size_t>(num_slots));
    std::iota(region.order.begin(), region.order.end(), 0);
    region.positions.assign(static_cast<std::size_t>(num_slots), -1);
  }
  // Slots that this read uses are not victims, whatever their age: mark them before any swap.
  std::vector<bool> is_used(region.order.size());
  for (const std::int32_t position : positions)
    if (const auto at = region.slots.find(position); at != region.slots.end())
      is_used[static_cast<std::size_t>(at->second)] = true;
  std::vector<Swap> swaps;
  std::vector<std::int32_t> used;
  auto next = region.order.begin();
  for (const std::int32_t position : positions) {
    auto at = region.slots.find(position);
    if (at == region.slots.end()) {
      while (is_used[static_cast<std::size_t>(*next)]) ++next;
      const std::int32_t slot = *next++;
      std::int32_t& held = region.positions[static_cast<std::size_t>(slot)];
      region.slots.erase(std::exchange(held, position));
      at = region.slots.emplace(position, slot).first;
      swaps.push_back({position, slot});
    }
    used.push_back(at->second);
  }
  // The used slots become the youngest, in the order of the read.
  for (const std::int32_t slot : used) is_used[static_cast<std::size_t>(slot)] = true;
  std::erase_if(region.order,
                [&](std::int32_t slot) { return is_used[static_cast<std::size_t>(slot)]; });
  region.order.insert(region.order.end(), used.begin(), used.end());
  return swaps;
}

namespace {

// Steps for which half of the read rows stay the same: enough for hits in the region, few enough
// that rows are also evicted.
constexpr std::int64_t kReadsStay = 8;

}  // namespace

PagePlanner::PagePlanner(std::int32_t num_spec_tokens, MemoryModel& model, Worker& worker)
    : num_spec_tokens_(num_spec_tokens), model_(model), worker_(worker) {
  for (std::int32_t g = 0; g < model.num_groups(); ++g) {
    if (model.is_source_group(g)) source_ = g;
    if (model.is_resident_group(g)) resident_.push_back(g);
    if (model.is_hot_group(g)) hot_.push_back(g);
  }
}

// Rows are planned one after another: a row's reads depend only on its own residency.
Checked PagePlanner::plan(const SchedulerOutput& decision, std::span<const RequestId> requests,
                          StepProgram& program) {
  if (source_ < 0) return {};
  LS_CHECK(program.rows.size() == requests.size(), "{} rows of {} requests", program.rows.size(),
           requests.size());
  // Reads depend on the residency after this step's update, so the order within a row matters.
  for (std::size_t i = 0; i < requests.size(); ++i) {
    WorkerRequest& request = worker_.at(requests[i]);
    request.residency.resize(resident_.size());
    LS_RETURN_UNLESS_FINE(add_residency(decision.host_pages.rows.at(i), request, program));
    LS_RETURN_UNLESS_FINE(add_mirrors(decision.host_pages.rows.at(i), request, program));
    LS_RETURN_UNLESS_FINE(add_hot_reads(program.rows[i], request, program));
  }
  return {};
}

// Updates the positions of the row's pages. A page that is on the device in only some groups breaks
// rule (1) of the header.
Checked PagePlanner::add_residency(const HostPageRow& row, WorkerRequest& request,
                                   StepProgram& program) {
  const ResidencyUpdate& update = row.residency;
  for (std::size_t p = 0; p < update.pages.size(); ++p) {
    const auto page = static_cast<std::size_t>(update.pages[p]);
    for (std::size_t g = 0; g < resident_.size(); ++g) {
      const BlockId block = update.blocks[g][p];
      if ((block == kNullBlock) != (update.blocks[0][p] == kNullBlock))
        return decision_finding(
            program.step, request.name, resident_[g],
            fmt::format("page {} is on the device in group {}, and not in group {}", page,
                        block == kNullBlock ? resident_[0] : resident_[g],
                        block == kNullBlock ? resident_[g] : resident_[0]));
      std::vector<BlockId>& pages = request.residency[g];
      if (pages.size() <= page) pages.resize(page + 1, kNullBlock);
      pages[page] = block;
      program.residency.push_back({.row = request.row,
                                   .group = resident_[g],
                                   .index = static_cast<std::int32_t>(page),
                                   .block = block});
    }
  }
  return {};
}

// Adds the mirrors of a row. A range of rows has the same offset in both pages, because a host page
// is a copy of the device page. A range that crosses a page is a wrong decision.
Checked PagePlanner::add_mirrors(const HostPageRow& row, const WorkerRequest& request,
                                 StepProgram& program) {
  const std::int64_t size = model_.block_size(source_);
  for (const RowMirror& mirror : row.mirrors)
    for (std::size_t g = 0; g < resident_.size(); ++g) {
      const std::int64_t from = mirror.sources.at(g), to = mirror.destination;
      if (from % size != to % size || from % size + mirror.num_rows > size)
        return decision_finding(
            program.step, request.name, resident_[g],
            fmt::format("{} rows from row {} of the device on are mirrored to row {} of the host",
                        mirror.num_rows, from, to));
      program.mirrors.push_back({.group = resident_[g],
                                 .block = BlockId{static_cast<std::int32_t>(from / size)},
                                 .host = HostBlockId{static_cast<std::int32_t>(to / size)},
                                 .first_row = static_cast<std::int32_t>(from % size),
                                 .num_rows = mirror.num_rows});
    }
  return {};
}

// All resident groups have the same pages on the device, so the first group decides.
std::vector<std::int32_t> PagePlanner::away(const WorkerRequest& request, std::int64_t end) const {
  const auto size = static_cast<std::int32_t>(model_.block_size(source_));
  const std::vector<BlockId>& pages = request.residency.front();
  std::vector<std::int32_t> positions;
  for (std::int32_t page = 0; page < std::ssize(pages) && page * size < end; ++page)
    for (std::int32_t p = page * size; pages[static_cast<std::size_t>(page)] == kNullBlock &&
                                       p < std::min<std::int64_t>((page + 1) * size, end);
         ++p)
      positions.push_back(p);
  return positions;
}

std::int64_t PagePlanner::num_hot_slots(const WorkerRequest& request) const {
  if (hot_.empty()) return 0;
  const auto group = static_cast<std::size_t>(hot_.front());
  return std::ssize(request.tables[group]) * model_.block_size(hot_.front());
}

// Chooses the positions that a decode reads from the host. It reads at most half of the slots, as
// the engine sizes a region: a read never needs all of them.
Checked PagePlanner::add_hot_reads(const RowSlice& slice, const WorkerRequest& request,
                                   StepProgram& program) {
  const std::int64_t end = std::int64_t{slice.first_position} + slice.num_tokens;
  // Only decodes read through a hot region. Prefill chunks are longer than a token and its drafts.
  if (slice.first_position == 0 || slice.num_tokens > 1 + num_spec_tokens_) return {};
  const std::vector<std::int32_t> positions = away(request, end);
  const std::int64_t num_slots = num_hot_slots(request);
  if (positions.empty()) return {};
  if (num_slots == 0)
    return decision_finding(
        program.step, request.name, -1,
        fmt::format("it reads token {} from the host and has no hot region", positions.front()));
  const auto most =
      std::min<std::int64_t>(std::max<std::int64_t>(num_slots / 2, 1), std::ssize(positions));
  HotRead read{.row = request.row,
               .first = static_cast<std::int32_t>(program.hot_positions.size())};
  // In place of an indexer, contents choose: every other row by a token that changes each eighth
  // step, the rest by the last token. Both sides derive the same rows.
  const ContentId stays = request.prefix.content((end - 1) / kReadsStay * kReadsStay);
  const ContentId goes = request.prefix.content(end - 1);
  for (std::int64_t i = 0; i < most; ++i) {
    const ContentId by = mix((i % 2 == 0 ? stays : goes) + static_cast<std::uint64_t>(i));
    const std::int32_t position = positions[by % positions.size()];
    const auto known =
        std::span(program.hot_positions).subspan(static_cast<std::size_t>(read.first));
    if (std::ranges::find(known, position) != known.end()) continue;
    program.hot_positions.push_back(position);
    ++read.num_positions;
  }
  program.hot_reads.push_back(read);
  return {};
}

Checked PagePlanner::apply(const StepProgram& program, std::span<const RequestId> requests) {
  if (source_ < 0) return {};
  for (const std::int32_t row : program.clear_rows) regions_.clear(row);
  for (const HostMirror& one : program.mirrors) LS_RETURN_UNLESS_FINE(mirror(program, one));
  for (const HotRead& read : program.hot_reads) {
    const auto row = std::ranges::find(program.rows, read.row, &RowSlice::row);
    LS_CHECK(row != program.rows.end(), "row {} reads hot regions and is not in the step",
             read.row);
    const RequestId id = requests[static_cast<std::size_t>(row - program.rows.begin())];
    LS_RETURN_UNLESS_FINE(swap_in(program, read, worker_.at(id)));
  }
  return {};
}

// Mirrors the rows that this step wrote, run by run. The range may contain older rows, which the
// host already has.
Checked PagePlanner::mirror(const StepProgram& program, const HostMirror& mirror) {
  const std::int64_t end = std::int64_t{mirror.first_row} + mirror.num_rows;
  LS_CHECK(mirror.first_row >= 0 && end <= model_.block_size(source_),
           "rows [{}, {}) are mirrored in blocks of {}", mirror.first_row, end,
           model_.block_size(source_));
  for (std::int64_t row = mirror.first_row; row < end;) {
    const auto is_new = [&](std::int64_t at) {
      const SlotContent* slot =
          at < end ? model_.slot_content(mirror.group, mirror.block, at) : nullptr;
      return slot != nullptr && slot->step == program.step;
    };
    const std::int64_t first = row;
    while (is_new(row)) ++row;
    if (row > first)
      model_.mirror_rows(mirror.group, mirror.block, mirror.host, first, row - first);
    ++row;
  }
  return {};
}

// Copies the missing rows into the hot region, and checks that each is the request's own.
Checked PagePlanner::swap_in(const StepProgram& program, const HotRead& read,
                             const WorkerRequest& request) {
  const auto positions = std::span(program.hot_positions)
                             .subspan(static_cast<std::size_t>(read.first),
                                      static_cast<std::size_t>(read.num_positions));
  const std::int64_t size = model_.block_size(source_);
  for (const HotRegions::Swap& swap : regions_.read(read.row, num_hot_slots(request), positions)) {
    const BlockId from = request.tables[source_].at(static_cast<std::size_t>(swap.position / size));
    const HostContent& host = model_.host_block(HostBlockId{index_of(from)});
    const auto offset = static_cast<std::size_t>(swap.position % size);
    const SlotContent* row = offset < host.slots.size() ? &host.slots[offset] : nullptr;
    // The host's row must be the request's own: a page that was spilled too late, or over another
    // page, shows here first.
    if (row == nullptr || row->writer == kNobody ||
        row->content != request.prefix.content(swap.position)) {
      const std::string there =
          row == nullptr || row->writer == kNobody
              ? "nothing"
              : fmt::format("{}'s token {} of step {}", model_.writer_name(row->writer),
                            row->position, row->step);
      Divergence finding = decision_finding(
          program.step, request.name, source_,
          fmt::format("token {} is read from row {} of host block {}, which holds {}",
                      swap.position, offset, index_of(from), there));
      finding.host_block = index_of(from);
      finding.token = swap.position;
      finding.owner = there;
      return finding;
    }
    for (const std::int32_t group : hot_) {
      const BlockId block = request.tables[group].at(static_cast<std::size_t>(swap.slot / size));
      model_.write_token(group, block, swap.slot % size, row->content, row->writer, row->position);
    }
  }
  return {};
}

}  // namespace lockstep
