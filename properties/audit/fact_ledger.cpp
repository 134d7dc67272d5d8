#include "properties/audit/fact_ledger.h"

#include <fmt/format.h>

#include <algorithm>

namespace lockstep {

void FactLedger::step(const RecordedStep& step, std::span<const AuditRow> rows) {
  if (!step.facts) {
    has_gap_ |= !step.scheduled.empty();
    return;
  }
  const WorkerStepFacts& facts = *step.facts;
  if (has_gap_)
    report(AuditRule::worker_batch, std::string(),
           "the worker reports nothing of an earlier step and continues here");
  check_batch(step, facts);
  check_zeroed(step, facts);
  if (setup_.config.dcp * setup_.config.pcp > 1) return;  // each rank has its own slots
  std::size_t at = 0;
  std::size_t first = 0;
  for (const FactRow& said : facts.rows) {
    const auto row = std::ranges::find(
        rows, said.id, [](const AuditRow& one) -> const std::string& { return one.request->name; });
    if (row != rows.end() && row->last - row->first == said.tokens)
      check_row(facts, *row, at, first);
    ++at;
    first += static_cast<std::size_t>(said.tokens);
  }
  check_changed(step, facts, rows);
}

void FactLedger::check_batch(const RecordedStep& step, const WorkerStepFacts& facts) const {
  for (const FactRow& said : facts.rows) {
    const auto row = std::ranges::find(step.scheduled, said.id, &RecordedScheduled::id);
    if (row == step.scheduled.end())
      report(AuditRule::worker_batch, said.id, "the worker runs it, but it is not scheduled");
    else if (row->tokens != said.tokens)
      report(AuditRule::worker_batch, said.id,
             fmt::format("the worker runs {} tokens of it; scheduled are {}", said.tokens,
                         row->tokens));
  }
  for (const RecordedScheduled& row : step.scheduled)
    if (std::ranges::find(facts.rows, row.id, &FactRow::id) == facts.rows.end())
      report(AuditRule::worker_batch, row.id, "it is scheduled, but the worker has no row for it");
}

void FactLedger::check_zeroed(const RecordedStep& step, const WorkerStepFacts& facts) const {
  const auto report_block = [&](BlockId block, std::string what) {
    findings_.add({.rule = AuditRule::worker_zeroing,
                   .step = step.step,
                   .block = index_of(block),
                   .what = std::move(what)},
                  fmt::format("worker_zeroing block {}", index_of(block)));
  };
  for (const BlockId block : step.zero)
    if (std::ranges::find(facts.zeroed, block) == facts.zeroed.end())
      report_block(block, "the worker is to zero a block and has not zeroed it when the step ends");
  for (const BlockId block : facts.zeroed)
    if (std::ranges::find(step.zero, block) == step.zero.end())
      report_block(block, "the worker zeroes a block that the step does not zero");
}

// Row `at` of the worker's batch, whose tokens start at `first` in the batch.
void FactLedger::check_row(const WorkerStepFacts& facts, const AuditRow& row, std::size_t at,
                           std::size_t first) const {
  LS_CHECK(first + static_cast<std::size_t>(row.last - row.first) <= facts.positions.size(),
           "tokens from {} of {}", first, facts.positions.size());
  for (std::int32_t i = 0; i < row.last - row.first; ++i)
    if (facts.positions[first + static_cast<std::size_t>(i)] != row.first + i)
      return report(
          AuditRule::worker_batch, row.request->name,
          fmt::format("token {} of its row has position {}; expected {}", i,
                      facts.positions[first + static_cast<std::size_t>(i)], row.first + i));
  for (std::size_t g = 0; g < num_groups(); ++g)
    if (keeps_tokens(spec_of(g)) && check_table(facts.groups[g].tables[at], row, g))
      check_slots(facts.groups[g].slots, row, g, first);
}

bool FactLedger::check_table(const std::vector<BlockId>& said, const AuditRow& row,
                             std::size_t group) const {
  const AuditRequest& request = *row.request;
  const std::vector<BlockId>& table = request.tables[group];
  if (said.size() != table.size()) {
    report(AuditRule::worker_table, request, group, -1, kNullBlock,
           fmt::format("the worker's table has {} entries; the scheduler sent {}", said.size(),
                       table.size()));
    return false;
  }
  // Before the first token that attention reads, some releases keep the entry of a released block.
  const auto kept =
      static_cast<std::size_t>(setup_.first_read(group, row.first) / block_size(group));
  for (std::size_t i = 0; i < table.size(); ++i) {
    if (said[i] == table[i]) continue;
    if (i < kept && (said[i] == kNullBlock || table[i] == kNullBlock)) continue;
    report(AuditRule::worker_table, request, group,
           static_cast<std::int64_t>(i) * block_size(group), table[i],
           fmt::format("entry {} of the worker's table is block {}; the scheduler sent {}", i,
                       index_of(said[i]), index_of(table[i])));
    return false;
  }
  return true;
}

void FactLedger::check_slots(const std::vector<Slot>& said, const AuditRow& row, std::size_t group,
                             std::size_t first) const {
  const AuditRequest& request = *row.request;
  const std::int32_t size = block_size(group);
  for (std::int32_t p = row.first; p < row.last; ++p) {
    const Slot slot = said[first + static_cast<std::size_t>(p - row.first)];
    const BlockId block = block_of(request, group, p);
    if (block == kNullBlock) continue;  // the token ledger reports it
    const Slot expected = static_cast<Slot>(index_of(block)) * size + p % size;
    if (slot == expected) continue;
    // Only windows that are computed again write into a hit.
    if (slot == PAD_SLOT_ID && p < blocks_.last_replayed(request)) continue;
    return report(AuditRule::worker_slot, request, group, p, block,
                  fmt::format("the worker writes the token to slot {}; it belongs to slot {}", slot,
                              expected));
  }
}

// Slots that the rows write, by block; true if they hold other content now.
std::map<BlockId, std::map<std::int32_t, bool>> FactLedger::slots_to_write(
    std::span<const AuditRow> rows) const {
  std::map<BlockId, std::map<std::int32_t, bool>> slots;
  for (const AuditRow& row : rows)
    for (std::size_t g = 0; g < num_groups(); ++g) {
      if (!keeps_tokens(spec_of(g))) continue;
      for (std::int32_t p = row.first; p < row.last; ++p) {
        const BlockId block = block_of(*row.request, g, p);
        if (block == kNullBlock) continue;
        const std::uint64_t content = row.contents[static_cast<std::size_t>(p - row.first)];
        slots[block][p % block_size(g)] = p >= blocks_.last_replayed(*row.request) &&
                                          pool_.read(block, p % block_size(g)).content != content;
      }
    }
  return slots;
}

void FactLedger::check_changed(const RecordedStep& step, const WorkerStepFacts& facts,
                               std::span<const AuditRow> rows) const {
  if (rows.size() != step.scheduled.size()) return;  // the writes of the other rows are not known
  if (std::ranges::any_of(rows, &AuditRow::is_void)) return;
  const auto report_block = [&](BlockId block, std::string what) {
    AuditFinding finding{.rule = AuditRule::worker_page,
                         .step = step.step,
                         .block = index_of(block),
                         .what = std::move(what)};
    findings_.name_holders(finding);
    findings_.add(std::move(finding), fmt::format("worker_page block {}", index_of(block)));
  };
  const auto to_write = slots_to_write(rows);
  for (const ChangedPage& page : facts.changed) {
    if (blocks_.is_zeroed_now(page.block) ||
        std::ranges::find(step.copies, page.block, &KVCacheBlockCopy::to) != step.copies.end())
      continue;
    const std::string where =
        fmt::format("page {} of tensor {}", index_of(page.block), page.tensor);
    if (may_change_entirely(page.block, rows)) continue;
    if (page.beside)
      report_block(page.block,
                   fmt::format("bytes of {} changed that no row of its group has", where));
    const auto written = to_write.find(page.block);
    if (written == to_write.end()) {
      report_block(page.block,
                   fmt::format("{} changed, and no token of the step is written to it", where));
      continue;
    }
    for (const std::int32_t slot : page.slots)
      if (!written->second.contains(slot))
        report_block(page.block, fmt::format("slot {} of {} changed, and no token of the step is "
                                             "written to it",
                                             slot, where));
  }
  for (const auto& [block, slots] : to_write)
    for (const auto& [slot, is_new] : slots)
      if (is_new) check_written(block, slot, facts, report_block);
}

// New content in a slot changes its bytes in every tensor of the group.
void FactLedger::check_written(BlockId block, std::int32_t slot, const WorkerStepFacts& facts,
                               const Report& report_block) const {
  std::size_t group = 0;
  while (!pool_.belongs_to(block, static_cast<std::int32_t>(group))) ++group;
  LS_CHECK(group < num_groups(), "block {} of no group", index_of(block));
  const KVCacheGroupSpec& of = setup_.groups[group];
  const std::int64_t tensors = ceil_div32(static_cast<std::int32_t>(of.layer_names.size()),
                                          static_cast<std::int32_t>(of.layers_per_page));
  for (std::int32_t tensor = 0; tensor < tensors; ++tensor) {
    const auto page = std::ranges::find_if(facts.changed, [&](const ChangedPage& one) {
      return one.block == block && one.tensor == tensor;
    });
    if (page != facts.changed.end() && std::ranges::binary_search(page->slots, slot)) continue;
    return report_block(block, fmt::format("a token is written to slot {} of page {}, which has "
                                           "not changed in tensor {}",
                                           slot, index_of(block), tensor));
  }
}

// Pages of states and rings of keys: a row may change its own entirely.
bool FactLedger::may_change_entirely(BlockId block, std::span<const AuditRow> rows) const {
  for (const AuditRow& row : rows)
    for (std::size_t g = 0; g < num_groups(); ++g)
      if (!keeps_tokens(spec_of(g)) &&
          std::ranges::find(row.request->tables[g], block) != row.request->tables[g].end())
        return true;
  return false;
}

}  // namespace lockstep
