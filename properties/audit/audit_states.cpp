// What state layers read, write and copy (vllm/v1/worker/mamba_utils.py).
#include <fmt/core.h>

#include <algorithm>

#include "properties/audit/audit_impl.h"

namespace lockstep {

bool Auditor::Impl::state_block(const AuditRow& row, std::size_t group, std::int32_t entry,
                                BlockId& block) {
  const std::vector<BlockId>& table = row.request->tables[group];
  if (entry < 0 || static_cast<std::size_t>(entry) >= table.size() ||
      table[static_cast<std::size_t>(entry)] == kNullBlock) {
    report(AuditRule::state_read, *row.request, group, row.first, kNullBlock,
           fmt::format("the state of entry {} is needed, and the table has no block there", entry));
    return false;
  }
  block = table[static_cast<std::size_t>(entry)];
  return true;
}

void Auditor::Impl::read_state(const AuditRow& row, std::size_t group, std::int32_t entry,
                               std::int32_t count) {
  BlockId block{};
  if (row.request->wrong[group] || count == 0 || !state_block(row, group, entry, block)) return;
  ++reads_;
  const LedgerState& state = ledger_.state(block);
  if (state.num_tokens == count && state.content == content_at(row, count) &&
      ledger_.belongs_to(block, static_cast<std::int32_t>(group)))
    return;
  const std::string found =
      state.num_tokens < 0 ? std::string("none that was written since the block was handed out")
                           : fmt::format("the one after {} tokens of request {}", state.num_tokens,
                                         names_[static_cast<std::size_t>(state.writer)]);
  report(AuditRule::state_read, *row.request, group, count, block,
         fmt::format("the state after {} tokens is read from block {}, which holds {}", count,
                     index_of(block), found));
}

void Auditor::Impl::write_state(const AuditRow& row, std::size_t group, std::int32_t entry,
                                std::int32_t count) {
  BlockId block{};
  if (state_block(row, group, entry, block))
    ledger_.write_state(block, {content_at(row, count), count, row.request->index});
}

void Auditor::Impl::prepare_states(AuditRow& row) {
  AuditedRequest& request = *row.request;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const KVCacheSpec& spec = groups_[g].spec;
    if (!is_state(spec) || spec.mamba_cache_mode != MambaCacheMode::align) continue;
    const std::int32_t size = block_size(g);
    const std::int32_t previous =
        request.state_idx >= 0 ? request.state_idx : (row.first == 0 ? -1 : (row.first - 1) / size);
    const std::int32_t current = ceil_div32(row.last, size) - 1;
    if (previous < 0 || previous == current) continue;
    BlockId from{};
    BlockId to{};
    if (!state_block(row, g, previous + request.num_accepted - 1, from) ||
        !state_block(row, g, current, to))
      continue;
    ledger_.write_state(to, ledger_.state(from));
  }
}

void Auditor::Impl::advance_states(const AuditRow& row, std::size_t group) {
  const KVCacheSpec& spec = groups_[group].spec;
  const std::int32_t size = block_size(group);
  const AuditedRequest& request = *row.request;
  if (spec.mamba_cache_mode == MambaCacheMode::all) {
    read_state(row, group, (row.first - 1) / size, row.first);
    for (std::int32_t end = (row.first / size + 1) * size; end <= row.last; end += size)
      write_state(row, group, end / size - 1, end);
    write_state(row, group, (row.last - 1) / size, row.last);
    return;
  }
  const bool align = spec.mamba_cache_mode == MambaCacheMode::align;
  const std::int32_t current = align ? ceil_div32(row.last, size) - 1 : 0;
  const bool moved = align && request.state_idx != current;
  read_state(row, group, moved ? current : current + request.num_accepted - 1, row.first);
  // With drafts, a state after each of the last tokens: whichever draft is rejected, one of them is
  // right.
  for (std::int32_t draft = 0; draft <= row.num_spec; ++draft)
    write_state(row, group, current + draft, row.last - row.num_spec + draft);
}

void Auditor::Impl::settle_states(AuditRow& row, std::int32_t num_sampled) {
  AuditedRequest& request = *row.request;
  const std::int32_t num_accepted = row.num_spec > 0 && num_sampled > 0 ? num_sampled : 1;
  request.num_accepted = num_accepted;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const KVCacheSpec& spec = groups_[g].spec;
    if (!is_state(spec) || spec.mamba_cache_mode != MambaCacheMode::align) continue;
    const std::int32_t size = block_size(g);
    request.state_idx = ceil_div32(row.last, size) - 1;
    if (row.num_spec == 0) continue;
    const std::int32_t running = row.last - row.num_spec;
    const std::int32_t aligned = (running + num_accepted - 1) / size * size;
    if (aligned < running) continue;
    BlockId from{};
    BlockId to{};
    if (!state_block(row, g, request.state_idx + aligned - running, from) ||
        !state_block(row, g, aligned / size - 1, to))
      continue;
    ledger_.write_state(to, ledger_.state(from));
    if (request.state_idx == aligned / size - 1) request.num_accepted = 1;
  }
}

}  // namespace lockstep
