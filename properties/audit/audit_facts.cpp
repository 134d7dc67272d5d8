// What the engine's own worker says it did with a step, held against the decisions and against what
// the audit makes of them: its batch and positions, its tables and slots, what it zeroed, and which
// bytes changed. Digests of pages are not judged: they are of an engine's own numbers.
#include <fmt/format.h>

#include <algorithm>

#include "properties/audit/audit_impl.h"

namespace lockstep {

void Auditor::Impl::check_facts(const RecordedStep& step, const std::vector<AuditRow>& rows) {
  if (!step.facts) {
    has_gap_of_facts_ |= !step.scheduled.empty();
    return;
  }
  const WorkerStepFacts& facts = *step.facts;
  if (has_gap_of_facts_)
    report(AuditRule::worker_batch, std::string(),
           "the worker says nothing of a step before and goes on here");
  check_fact_rows(step, facts);
  check_zeroed(step, facts);
  if (config_.dcp * config_.pcp > 1) return;  // each rank has slots of its own
  std::size_t at = 0;
  std::size_t first = 0;
  for (const FactRow& said : facts.rows) {
    const auto row = std::ranges::find(
        rows, said.id, [](const AuditRow& one) -> const std::string& { return one.request->name; });
    if (row != rows.end() && row->last - row->first == said.tokens)
      check_fact_row(facts, *row, at, first);
    ++at;
    first += static_cast<std::size_t>(said.tokens);
  }
  check_changed(step, facts, rows);
}

// Whom it ran, and how many tokens of each.
void Auditor::Impl::check_fact_rows(const RecordedStep& step, const WorkerStepFacts& facts) {
  for (const FactRow& said : facts.rows) {
    const auto row = std::ranges::find(step.scheduled, said.id, &RecordedScheduled::id);
    if (row == step.scheduled.end())
      report(AuditRule::worker_batch, said.id, "the worker runs it, and it is not scheduled");
    else if (row->tokens != said.tokens)
      report(AuditRule::worker_batch, said.id,
             fmt::format("the worker runs {} tokens of it; scheduled are {}", said.tokens,
                         row->tokens));
  }
  for (const RecordedScheduled& row : step.scheduled)
    if (std::ranges::find(facts.rows, row.id, &FactRow::id) == facts.rows.end())
      report(AuditRule::worker_batch, row.id, "it is scheduled, and the worker has no row of it");
}

void Auditor::Impl::check_zeroed(const RecordedStep& step, const WorkerStepFacts& facts) {
  const auto tell_of = [&](BlockId block, std::string what) {
    tell({.rule = AuditRule::worker_zeroing,
          .step = step.step,
          .block = index_of(block),
          .what = std::move(what)},
         fmt::format("worker_zeroing block {}", index_of(block)));
  };
  for (const BlockId block : step.zero)
    if (std::ranges::find(facts.zeroed, block) == facts.zeroed.end())
      tell_of(block, "the worker is told to zero a block and has not when the step is over");
  for (const BlockId block : facts.zeroed)
    if (std::ranges::find(step.zero, block) == step.zero.end())
      tell_of(block, "the worker zeroes a block that it was not told to");
}

// A row of the worker's batch: its `at`-th, whose tokens begin with the `first` one of the batch.
void Auditor::Impl::check_fact_row(const WorkerStepFacts& facts, const AuditRow& row,
                                   std::size_t at, std::size_t first) {
  const AuditedRequest& request = *row.request;
  for (std::int32_t i = 0; i < row.last - row.first; ++i)
    if (facts.positions[first + static_cast<std::size_t>(i)] != row.first + i)
      return report(
          AuditRule::worker_batch, request.name,
          fmt::format("token {} of its row has position {}; expected {}", i,
                      facts.positions[first + static_cast<std::size_t>(i)], row.first + i));
  for (std::size_t g = 0; g < groups_.size(); ++g)
    if (keeps_tokens(groups_[g].spec) && check_fact_table(facts.groups[g].tables[at], row, g))
      check_fact_slots(facts.groups[g].slots, row, g, first);
}

bool Auditor::Impl::check_fact_table(const std::vector<BlockId>& said, const AuditRow& row,
                                     std::size_t group) {
  const AuditedRequest& request = *row.request;
  const std::vector<BlockId>& table = request.tables[group];
  if (said.size() != table.size()) {
    report(AuditRule::worker_table, request, group, -1, kNullBlock,
           fmt::format("the worker's table has {} entries; handed over were {}", said.size(),
                       table.size()));
    return false;
  }
  // Below what attention reads, releases differ in whether an entry stays when its block goes.
  const auto kept = static_cast<std::size_t>(first_read(group, row.first) / block_size(group));
  for (std::size_t i = 0; i < table.size(); ++i) {
    if (said[i] == table[i]) continue;
    if (i < kept && (said[i] == kNullBlock || table[i] == kNullBlock)) continue;
    report(AuditRule::worker_table, request, group,
           static_cast<std::int64_t>(i) * block_size(group), table[i],
           fmt::format("entry {} of the worker's table is block {}; handed over was {}", i,
                       index_of(said[i]), index_of(table[i])));
    return false;
  }
  return true;
}

void Auditor::Impl::check_fact_slots(const std::vector<Slot>& said, const AuditRow& row,
                                     std::size_t group, std::size_t first) {
  const AuditedRequest& request = *row.request;
  const std::int32_t size = block_size(group);
  for (std::int32_t p = row.first; p < row.last; ++p) {
    const Slot slot = said[first + static_cast<std::size_t>(p - row.first)];
    const BlockId block = block_of(request, group, p);
    if (block == kNullBlock) continue;  // the decision's own fault, told elsewhere
    const Slot expected = static_cast<Slot>(index_of(block)) * size + p % size;
    if (slot == expected) continue;
    // What a hit holds is left alone where only windows are computed again.
    if (slot == PAD_SLOT_ID && p < request.last_replayed) continue;
    return report(AuditRule::worker_slot, request, group, p, block,
                  fmt::format("the worker writes the token to slot {}; it belongs to slot {}", slot,
                              expected));
  }
}

// Slots that rows of the step write, by block, and whether the ledger has other content there now.
std::map<BlockId, std::map<std::int32_t, bool>> Auditor::Impl::slots_to_write(
    const std::vector<AuditRow>& rows) const {
  std::map<BlockId, std::map<std::int32_t, bool>> slots;
  for (const AuditRow& row : rows)
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      if (!keeps_tokens(groups_[g].spec)) continue;
      for (std::int32_t p = row.first; p < row.last; ++p) {
        const BlockId block = block_of(*row.request, g, p);
        if (block == kNullBlock) continue;
        const std::uint64_t content = row.contents[static_cast<std::size_t>(p - row.first)];
        slots[block][p % block_size(g)] = p >= row.request->last_replayed &&
                                          ledger_.read(block, p % block_size(g)).content != content;
      }
    }
  return slots;
}

void Auditor::Impl::check_changed(const RecordedStep& step, const WorkerStepFacts& facts,
                                  const std::vector<AuditRow>& rows) {
  if (rows.size() != step.scheduled.size()) return;  // what the others write is not known
  if (std::ranges::any_of(rows, &AuditRow::is_void)) return;
  const auto tell_of = [&](BlockId block, std::string what) {
    AuditFinding finding{.rule = AuditRule::worker_page,
                         .step = step.step,
                         .block = index_of(block),
                         .what = std::move(what)};
    name_holders(finding);
    tell(std::move(finding), fmt::format("worker_page block {}", index_of(block)));
  };
  const auto to_write = slots_to_write(rows);
  for (const ChangedPage& page : facts.changed) {
    if (zeroed_now_.contains(page.block) ||
        std::ranges::find(step.copies, page.block, &KVCacheBlockCopy::to) != step.copies.end())
      continue;
    const std::string where =
        fmt::format("page {} of tensor {}", index_of(page.block), page.tensor);
    if (may_change_as_a_whole(page.block, rows)) continue;
    if (page.beside)
      tell_of(page.block, fmt::format("bytes of {} changed that no row of its group has", where));
    const auto written = to_write.find(page.block);
    if (written == to_write.end()) {
      tell_of(page.block,
              fmt::format("{} changed, and no token of the step is written to it", where));
      continue;
    }
    for (const std::int32_t slot : page.slots)
      if (!written->second.contains(slot))
        tell_of(page.block, fmt::format("slot {} of {} changed, and no token of the step is "
                                        "written to it",
                                        slot, where));
  }
  for (const auto& [block, slots] : to_write)
    for (const auto& [slot, is_new] : slots)
      if (is_new) check_written(block, slot, facts, tell_of);
}

// Other content came into a slot: its bytes differ in every tensor of the group.
void Auditor::Impl::check_written(
    BlockId block, std::int32_t slot, const WorkerStepFacts& facts,
    const std::function<void(BlockId block, std::string what)>& tell_of) {
  std::size_t group = 0;
  while (!ledger_.belongs_to(block, static_cast<std::int32_t>(group))) ++group;
  const KVCacheGroupSpec& of = groups_[group];
  const std::int64_t tensors = ceil_div32(static_cast<std::int32_t>(of.layer_names.size()),
                                          static_cast<std::int32_t>(of.layers_per_page));
  for (std::int32_t tensor = 0; tensor < tensors; ++tensor) {
    const auto page = std::ranges::find_if(facts.changed, [&](const ChangedPage& one) {
      return one.block == block && one.tensor == tensor;
    });
    if (page != facts.changed.end() && std::ranges::binary_search(page->slots, slot)) continue;
    return tell_of(block, fmt::format("a token is written to slot {} of page {}, which has not "
                                      "changed in tensor {}",
                                      slot, index_of(block), tensor));
  }
}

// Of groups without slots: states, and rings of keys. Whoever runs may change its own.
bool Auditor::Impl::may_change_as_a_whole(BlockId block, const std::vector<AuditRow>& rows) const {
  for (const AuditRow& row : rows)
    for (std::size_t g = 0; g < groups_.size(); ++g)
      if (!keeps_tokens(groups_[g].spec) &&
          std::ranges::find(row.request->tables[g], block) != row.request->tables[g].end())
        return true;
  return false;
}

}  // namespace lockstep
