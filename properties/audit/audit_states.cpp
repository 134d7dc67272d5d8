// What state layers read, write and copy: vllm/v1/worker/mamba_utils.py, and in 0.33.0 the second
// model runner (v1/worker/gpu/model_states/mamba_hybrid.py), whose places of states are its own
// count of what stands. A block that a request no longer names in a table may still be named by the
// worker, which appends to its row and never takes back.
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

// The recurrent state lies `accepted` entries behind, one for each draft that was accepted; the
// inputs of the convolution lie in the entry itself, as far behind.
void Auditor::Impl::read_state(const AuditRow& row, std::size_t group, std::int32_t entry,
                               std::int32_t accepted, std::int32_t count) {
  BlockId block{};
  BlockId input_block{};
  if (row.request->wrong[group] || count == 0 ||
      !state_block(row, group, entry + accepted, block) ||
      !state_block(row, group, entry, input_block))
    return;
  ++reads_;
  const std::uint64_t content = content_at(row, count);
  const LedgerState& state = ledger_.state(block);
  const LedgerState& inputs = ledger_.state(input_block);
  const auto g = static_cast<std::int32_t>(group);
  const bool is_recurrent_right =
      state.num_tokens == count && state.content == content && ledger_.belongs_to(block, g);
  const bool are_inputs_right = inputs.inputs_before + accepted == count &&
                                accepted < std::ssize(inputs.inputs) &&
                                inputs.inputs[static_cast<std::size_t>(accepted)] == content &&
                                ledger_.belongs_to(input_block, g);
  // A layer of one part has either; the header does not say which.
  const bool has_one_part = groups_[group].spec.states.size() == 1;
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
  const std::string found =
      state.num_tokens < 0 ? std::string("none that was written since the block was handed out")
                           : fmt::format("the one after {} tokens of request {}", state.num_tokens,
                                         name_at(state.writer));
  report(AuditRule::state_read, *row.request, group, count, block,
         fmt::format("the state after {} tokens is read from block {}, which holds {}{}", count,
                     index_of(block), found,
                     state.num_tokens == count
                         ? key_difference_to(*row.request, count - 1, state.content, state.writer)
                         : std::string()));
}

// The inputs before tokens [first_count, last_count]; several with drafts.
void Auditor::Impl::write_inputs(const AuditRow& row, std::size_t group, std::int32_t entry,
                                 std::int32_t first_count, std::int32_t last_count) {
  BlockId block{};
  if (!state_block(row, group, entry, block)) return;
  LedgerState& state = ledger_.state(block);
  state.inputs_before = first_count;
  state.inputs.clear();
  for (std::int32_t count = first_count; count <= last_count; ++count)
    state.inputs.push_back(content_at(row, count));
}

void Auditor::Impl::write_recurrent(const AuditRow& row, std::size_t group, std::int32_t entry,
                                    std::int32_t count) {
  BlockId block{};
  if (!state_block(row, group, entry, block)) return;
  LedgerState& state = ledger_.state(block);
  state.content = content_at(row, count);
  state.num_tokens = count;
  state.writer = row.request->index;
  if (count % hit_alignment_ == 0) note_content(group, state.content, block);
}

// Into the block of entry `to`, what stands after `accepted` drafts of the step before.
void Auditor::Impl::copy_state(const AuditRow& row, std::size_t group, std::int32_t from,
                               std::int32_t accepted, std::int32_t to) {
  BlockId recurrent{};
  BlockId inputs{};
  BlockId target{};
  if (!state_block(row, group, from + accepted, recurrent) ||
      !state_block(row, group, from, inputs) || !state_block(row, group, to, target))
    return;
  LedgerState copied = ledger_.state(recurrent);
  const LedgerState& shifted = ledger_.state(inputs);
  const std::ptrdiff_t num_gone =
      std::min(static_cast<std::ptrdiff_t>(accepted), std::ssize(shifted.inputs));
  copied.inputs.assign(shifted.inputs.begin() + num_gone, shifted.inputs.end());
  copied.inputs_before = shifted.inputs_before + accepted;
  ledger_.state(target) = std::move(copied);
  note_content(group, ledger_.state(target).content, target);
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
    copy_state(row, g, previous, request.num_accepted - 1, current);
  }
}

// Mode `all`: a state is left behind in every block that is filled.
void Auditor::Impl::advance_in_every_block(const AuditRow& row, std::size_t group) {
  const std::int32_t size = block_size(group);
  read_state(row, group, (row.first - 1) / size, 0, row.first);
  const auto write = [&](std::int32_t count) {
    write_inputs(row, group, (count - 1) / size, count, count);
    write_recurrent(row, group, (count - 1) / size, count);
  };
  for (std::int32_t end = (row.first / size + 1) * size; end <= row.last; end += size) write(end);
  write(row.last);
}

void Auditor::Impl::advance_states(const AuditRow& row, std::size_t group) {
  const KVCacheSpec& spec = groups_[group].spec;
  if (spec.mamba_cache_mode == MambaCacheMode::all) return advance_in_every_block(row, group);
  const AuditedRequest& request = *row.request;
  const bool align = spec.mamba_cache_mode == MambaCacheMode::align;
  const std::int32_t current = align ? ceil_div32(row.last, block_size(group)) - 1 : 0;
  const bool moved = align && request.state_idx != current;
  read_state(row, group, current, moved ? 0 : request.num_accepted - 1, row.first);
  // With drafts, a state after each of the last tokens: whichever draft is rejected, one of them is
  // right.
  const std::int32_t stands = row.last - row.num_undone();
  write_inputs(row, group, current, stands, row.last);
  export_checkpoint(row, group, current);
  for (std::int32_t draft = 0; draft <= row.num_undone(); ++draft)
    write_recurrent(row, group, current + draft, stands + draft);
}

// A state from inside a prefill chunk, for the last hit that can end there: the worker writes it
// into the entry before the running state's, wherever its own rule allows one
// (model_executor/layers/mamba/checkpoint.py) and the row names a block; the scheduler is not
// asked. The mixers write a chunk's last inputs, then the checkpoint, then the last recurrent state
// (GatedDeltaNet, KDA, Mamba2).
void Auditor::Impl::export_checkpoint(const AuditRow& row, std::size_t group,
                                      std::int32_t current) {
  const KVCacheSpec& spec = groups_[group].spec;
  if (spec.num_prefill_checkpoint_blocks == 0 || spec.prefill_checkpoint_alignment == 0) return;
  // Without hashes that look ahead, EAGLE drops the last block of a hit.
  const std::int32_t position = drops_last_block_ ? (row.last / hit_alignment_ - 1) * hit_alignment_
                                                  : (row.last - std::max(1, hash_lookahead_)) /
                                                        hit_alignment_ * hit_alignment_;
  const std::int32_t entry = current - 1;
  const std::int32_t initial = row.first == 0 ? -1 : (row.first - 1) / block_size(group);
  if (row.first % hash_block_size_ != 0 || entry <= initial ||
      position < row.first + hash_block_size_ || position >= row.last ||
      (position - row.first) % spec.prefill_checkpoint_alignment != 0)
    return;
  const std::vector<BlockId>& table = row.request->tables[group];
  const auto index = static_cast<std::size_t>(entry);
  if (index >= table.size() || table[index] == kNullBlock) return;
  if (!ledger_.belongs_to(table[index], static_cast<std::int32_t>(group))) {
    report(AuditRule::token_write, *row.request, group, position, table[index],
           fmt::format("the state after {} tokens is written to block {} of another group",
                       position, index_of(table[index])));
    return;
  }
  write_inputs(row, group, entry, position, position);
  write_recurrent(row, group, entry, position);
}

// Once it is known how many drafts stand: a state at a block's end is kept there.
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
    const std::int32_t entry = aligned / size - 1;
    if (request.state_idx != entry || aligned != running)
      copy_state(row, g, request.state_idx, aligned - running, entry);
    if (request.state_idx == entry) request.num_accepted = 1;
  }
}

}  // namespace lockstep
