#include "properties/audit/state_ledger.h"

#include <fmt/core.h>

#include <algorithm>

namespace lockstep {

bool StateLedger::find_block(const AuditRow& row, std::size_t group, std::int32_t entry,
                             BlockId& block) const {
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

// The recurrent state is `accepted` entries further, one per accepted draft. The inputs of the
// convolution are in the entry itself, shifted by as many tokens.
void StateLedger::read(const AuditRow& row, std::size_t group, std::int32_t entry,
                       std::int32_t accepted, std::int32_t count) {
  BlockId block{};
  BlockId input_block{};
  if (!setup_.checks_rules() || findings_.is_wrong(*row.request, group) || count == 0 ||
      !find_block(row, group, entry + accepted, block) ||
      !find_block(row, group, entry, input_block))
    return;
  ++core_.num_reads;
  const std::uint64_t content = row.content_at(count);
  const PoolState& state = pool_.state(block);
  const PoolState& inputs = pool_.state(input_block);
  const auto g = static_cast<std::int32_t>(group);
  const bool is_recurrent_right =
      state.num_tokens == count && state.content == content && pool_.belongs_to(block, g);
  const bool are_inputs_right = inputs.inputs_before + accepted == count &&
                                accepted < std::ssize(inputs.inputs) &&
                                inputs.inputs[static_cast<std::size_t>(accepted)] == content &&
                                pool_.belongs_to(input_block, g);
  // A layer with one part has either; the header does not say which.
  const bool has_one_part = spec_of(group).states.size() == 1;
  if (has_one_part ? is_recurrent_right || are_inputs_right
                   : is_recurrent_right && are_inputs_right)
    return;
  if (is_recurrent_right) {
    report(AuditRule::state_read, *row.request, group, count, input_block,
           fmt::format("the state after {} tokens is read from block {}, which holds the inputs of "
                       "the convolution after {} tokens",
                       count, index_of(input_block), std::max(inputs.inputs_before, 0) + accepted));
    return;
  }
  const std::string found = state.num_tokens < 0
                                ? std::string("none that was written since the block was allocated")
                                : fmt::format("the one after {} tokens of request {}",
                                              state.num_tokens, requests_.name_at(state.writer));
  report(AuditRule::state_read, *row.request, group, count, block,
         fmt::format(
             "the state after {} tokens is read from block {}, which holds {}{}", count,
             index_of(block), found,
             state.num_tokens == count
                 ? tokens_.key_difference_to(*row.request, count - 1, state.content, state.writer)
                 : std::string()));
}

// The inputs before tokens [first_count, last_count]; several with drafts.
void StateLedger::write_inputs(const AuditRow& row, std::size_t group, std::int32_t entry,
                               std::int32_t first_count, std::int32_t last_count) {
  BlockId block{};
  if (!find_block(row, group, entry, block)) return;
  PoolState& state = pool_.state(block);
  state.inputs_before = first_count;
  state.inputs.clear();
  for (std::int32_t count = first_count; count <= last_count; ++count)
    state.inputs.push_back(row.content_at(count));
}

void StateLedger::write_recurrent(const AuditRow& row, std::size_t group, std::int32_t entry,
                                  std::int32_t count) {
  BlockId block{};
  if (!find_block(row, group, entry, block)) return;
  PoolState& state = pool_.state(block);
  state.content = row.content_at(count);
  state.num_tokens = count;
  state.writer = row.request->index;
  if (hits_ != nullptr && count % setup_.hit_alignment == 0)
    hits_->note(group, state.content, block);
}

// Copies the state after `accepted` drafts of the previous step into the block of entry `to`.
void StateLedger::copy(const AuditRow& row, std::size_t group, std::int32_t from,
                       std::int32_t accepted, std::int32_t to) {
  LS_CHECK(accepted >= 0, "{} accepted drafts", accepted);
  BlockId recurrent{};
  BlockId inputs{};
  BlockId target{};
  if (!find_block(row, group, from + accepted, recurrent) ||
      !find_block(row, group, from, inputs) || !find_block(row, group, to, target))
    return;
  PoolState copied = pool_.state(recurrent);
  const PoolState& shifted = pool_.state(inputs);
  const std::ptrdiff_t num_gone =
      std::min(static_cast<std::ptrdiff_t>(accepted), std::ssize(shifted.inputs));
  copied.inputs.assign(shifted.inputs.begin() + num_gone, shifted.inputs.end());
  copied.inputs_before = shifted.inputs_before + accepted;
  pool_.state(target) = std::move(copied);
  if (hits_ != nullptr) hits_->note(group, pool_.state(target).content, target);
}

void StateLedger::begin(const AuditRow& row) {
  const Running& running = running_[*row.request];
  for (std::size_t g = 0; g < num_groups(); ++g) {
    const KVCacheSpec& spec = spec_of(g);
    if (!is_state(spec) || spec.mamba_cache_mode != MambaCacheMode::align) continue;
    const std::int32_t size = block_size(g);
    const std::int32_t previous =
        running.entry >= 0 ? running.entry : (row.first == 0 ? -1 : (row.first - 1) / size);
    const std::int32_t current = ceil_div32(row.last, size) - 1;
    if (previous < 0 || previous == current) continue;
    copy(row, g, previous, running.num_accepted - 1, current);
  }
}

void StateLedger::step(std::span<const AuditRow> rows, std::size_t group) {
  const bool is_all = spec_of(group).mamba_cache_mode == MambaCacheMode::all;
  for (const AuditRow& row : rows)
    is_all ? advance_in_every_block(row, group) : advance(row, group);
}

// Mode `all` keeps a state in every block that a row fills.
void StateLedger::advance_in_every_block(const AuditRow& row, std::size_t group) {
  const std::int32_t size = block_size(group);
  read(row, group, (row.first - 1) / size, 0, row.first);
  const auto write = [&](std::int32_t count) {
    write_inputs(row, group, (count - 1) / size, count, count);
    write_recurrent(row, group, (count - 1) / size, count);
  };
  for (std::int32_t end = (row.first / size + 1) * size; end <= row.last; end += size) write(end);
  write(row.last);
}

void StateLedger::advance(const AuditRow& row, std::size_t group) {
  const Running& running = running_[*row.request];
  const bool align = spec_of(group).mamba_cache_mode == MambaCacheMode::align;
  const std::int32_t current = align ? ceil_div32(row.last, block_size(group)) - 1 : 0;
  const bool moved = align && running.entry != current;
  read(row, group, current, moved ? 0 : running.num_accepted - 1, row.first);
  // With drafts, the row writes a state after each of its last tokens: one of them is right,
  // whichever draft is rejected.
  const std::int32_t stands = row.last - row.num_undone();
  write_inputs(row, group, current, stands, row.last);
  export_checkpoint(row, group, current);
  for (std::int32_t draft = 0; draft <= row.num_undone(); ++draft)
    write_recurrent(row, group, current + draft, stands + draft);
}

// A state from inside a prefill chunk, for the last hit that can end there. The worker writes it
// into the entry before the running state, wherever its own rule allows one
// (model_executor/layers/mamba/checkpoint.py) and the table has a block; the scheduler has no part
// in it. The mixers write a chunk's last inputs, then the checkpoint, then the last recurrent state
// (GatedDeltaNet, KDA, Mamba2).
void StateLedger::export_checkpoint(const AuditRow& row, std::size_t group, std::int32_t current) {
  const KVCacheSpec& spec = spec_of(group);
  if (spec.num_prefill_checkpoint_blocks == 0 || spec.prefill_checkpoint_alignment == 0) return;
  // Without hashes that look ahead, EAGLE drops the last block of a hit.
  const std::int32_t alignment = setup_.hit_alignment;
  const std::int32_t position =
      setup_.drops_last_block
          ? (row.last / alignment - 1) * alignment
          : (row.last - std::max(1, setup_.hash_lookahead)) / alignment * alignment;
  const std::int32_t entry = current - 1;
  const std::int32_t initial = row.first == 0 ? -1 : (row.first - 1) / block_size(group);
  if (row.first % setup_.hash_block_size != 0 || entry <= initial ||
      position < row.first + setup_.hash_block_size || position >= row.last ||
      (position - row.first) % spec.prefill_checkpoint_alignment != 0)
    return;
  const std::vector<BlockId>& table = row.request->tables[group];
  const auto index = static_cast<std::size_t>(entry);
  if (index >= table.size() || table[index] == kNullBlock) return;
  if (!pool_.belongs_to(table[index], static_cast<std::int32_t>(group))) {
    report(AuditRule::token_write, *row.request, group, position, table[index],
           fmt::format("the state after {} tokens is written to block {} of another group",
                       position, index_of(table[index])));
    return;
  }
  write_inputs(row, group, entry, position, position);
  write_recurrent(row, group, entry, position);
}

// The state at the end of a block stays there for later hits.
void StateLedger::end(const AuditRow& row, std::int32_t num_sampled) {
  Running& running = running_[*row.request];
  const std::int32_t num_accepted = row.num_spec > 0 && num_sampled > 0 ? num_sampled : 1;
  running.num_accepted = num_accepted;
  for (std::size_t g = 0; g < num_groups(); ++g) {
    const KVCacheSpec& spec = spec_of(g);
    if (!is_state(spec) || spec.mamba_cache_mode != MambaCacheMode::align) continue;
    const std::int32_t size = block_size(g);
    running.entry = ceil_div32(row.last, size) - 1;
    if (row.num_spec == 0) continue;
    const std::int32_t first_draft = row.last - row.num_spec;
    const std::int32_t aligned = (first_draft + num_accepted - 1) / size * size;
    if (aligned < first_draft) continue;
    const std::int32_t entry = aligned / size - 1;
    if (running.entry != entry || aligned != first_draft)
      copy(row, g, running.entry, aligned - first_draft, entry);
    if (running.entry == entry) running.num_accepted = 1;
  }
}

}  // namespace lockstep
