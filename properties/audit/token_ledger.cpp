#include "properties/audit/token_ledger.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

namespace lockstep {

void TokenLedger::step(std::span<const AuditRow> rows, std::size_t group) {
  if (is_ring(spec_of(group))) {
    for (const AuditRow& row : rows) use_ring(row, group);
    return;
  }
  for (const AuditRow& row : rows) write(row, group);
  if (!setup_.checks_rules()) return;
  for (const AuditRow& row : rows) read(row, group);
}

bool TokenLedger::load(const AuditRequest& request, std::size_t group, std::int32_t position,
                       BlockId block) {
  if (!pool_.belongs_to(block, static_cast<std::int32_t>(group))) {
    report(AuditRule::token_write, request, group, position, block,
           fmt::format("a load writes to block {}, which was not allocated to this group",
                       index_of(block)));
    return false;
  }
  const auto at = static_cast<std::size_t>(position);
  LS_CHECK(at < request.contents.size(), "token {} of {}", position, request.contents.size());
  pool_.write(block, position % block_size(group), {&request.contents[at], 1}, request.index,
              position, position == 0 ? request.root : request.contents[at - 1]);
  return true;
}

void TokenLedger::write(const AuditRow& row, std::size_t group) {
  const AuditRequest& request = *row.request;
  const std::vector<BlockId>& table = request.tables[group];
  const std::int32_t size = block_size(group);
  LS_CHECK(std::cmp_equal(row.contents.size(), row.last - row.first), "{} contents of [{}, {})",
           row.contents.size(), row.first, row.last);
  // Only windows that are computed again write into a hit.
  const std::int32_t first = spec_of(group).bounded_replay
                                 ? row.first
                                 : std::max(row.first, blocks_.last_replayed(request));
  // With a step in flight, the output may end before the last token.
  const bool is_last_sure = !setup_.config.async_scheduling || row.last <= request.num_prompt;
  const std::int32_t num_sure = row.last - row.num_spec - (is_last_sure ? 0 : 1);
  for (std::int32_t p = first; p < row.last;) {
    const auto index = static_cast<std::size_t>(p / size);
    if (index >= table.size() || table[index] == kNullBlock) {
      report(AuditRule::token_write, request, group, p, kNullBlock,
             index >= table.size() ? "a token is written beyond the block table"
                                   : "a token is written to the null block");
      return;
    }
    const BlockId block = table[index];
    if (!pool_.belongs_to(block, static_cast<std::int32_t>(group))) {
      report(AuditRule::token_write, request, group, p, block,
             "a token is written to a block that is not allocated to its group");
      return;
    }
    const std::int32_t begin = static_cast<std::int32_t>(index) * size;
    const std::int32_t end = std::min(row.last, begin + size);
    const auto contents = std::span(row.contents).subspan(p - row.first, end - p);
    const std::span<const PoolSlot> slots = pool_.slots(block);
    const auto offset = static_cast<std::size_t>(p - begin);
    for (std::size_t i = 0; i < contents.size() && offset + i < slots.size(); ++i)
      if (const PoolSlot& before = slots[offset + i];
          before.content != 0 && before.content != contents[i] && before.writer != request.index)
        check_overwritten(row, group, p + static_cast<std::int32_t>(i), before, block);
    pool_.write(block, p - begin, contents, request.index, p, row.content_at(p));
    if (end == begin + size && end <= num_sure && hits_ != nullptr)
      hits_->note(group, contents.back(), block);
    p = end;
  }
  if (hits_ == nullptr) return;
  // Drafts and tokens of previous steps that stand since their output.
  for (std::int32_t p = std::max(0, row.first - setup_.config.num_spec_tokens - 1); p < row.first;
       ++p)
    if ((p + 1) % size == 0) hits_->note(group, row.content_at(p + 1), block_of(request, group, p));
}

void TokenLedger::check_overwritten(const AuditRow& row, std::size_t group, std::int32_t position,
                                    const PoolSlot& before, BlockId block) const {
  const auto index = static_cast<std::size_t>(position / block_size(group));
  for (const auto& [name, other] : requests_) {
    if (!other.keeps_blocks() || other.index == row.request->index) continue;
    if (position >= setup_.first_read(group, other.computed) && position < other.computed &&
        index < other.tables[group].size() && other.tables[group][index] == block)
      report(AuditRule::token_write, *row.request, group, position, block,
             fmt::format("a token is written over {} that request {} still reads",
                         content_text(before, block), name));
  }
}

void TokenLedger::read(const AuditRow& row, std::size_t group) {
  const AuditRequest& request = *row.request;
  if (findings_.is_wrong(request, group) || row.is_void) return;
  const std::vector<BlockId>& table = request.tables[group];
  const std::int32_t size = block_size(group);
  std::int32_t first = setup_.first_read(group, row.first);
  // A window that is computed again starts with it: earlier tokens have no keys and are masked.
  if (spec_of(group).bounded_replay) first = std::max(first, blocks_.first_replayed(request));
  const std::int32_t gap_last = blocks_.gap_end(request, group, row.first);
  for (std::int32_t p = first; p < row.last; ++p) {
    if (p >= request.num_prompt && p < gap_last) p = gap_last;
    const auto index = static_cast<std::size_t>(p / size);
    const BlockId block = index < table.size() ? table[index] : kNullBlock;
    const std::int32_t last = std::min(row.last, (p / size + 1) * size) - 1;
    if (last > p && block != kNullBlock &&
        pool_.is_run_of(block, static_cast<std::int32_t>(group), p % size, last % size + 1,
                        row.content_at(last + 1))) {
      core_.num_reads += last - p + 1;
      p = last;
      continue;
    }
    ++core_.num_reads;
    if (block == kNullBlock)
      return report(
          AuditRule::attention_read, request, group, p, block,
          "attention reads a token that has no block: the table has the null block there");
    const PoolSlot slot = pool_.read(block, p % size);
    const bool right_group = pool_.belongs_to(block, static_cast<std::int32_t>(group));
    if (slot.content == row.content_at(p + 1) && right_group) continue;
    return report(
        AuditRule::attention_read, request, group, p, block,
        fmt::format("attention of tokens [{}, {}) reads token {} from slot {} of block {}, which "
                    "holds {}{}{}",
                    row.first, row.last, p, p % size, index_of(block), content_text(slot, block),
                    difference(request, p, slot),
                    right_group ? "" : "; the block is not one of this group"));
  }
}

void TokenLedger::use_ring(const AuditRow& row, std::size_t group) const {
  const std::vector<BlockId>& table = row.request->tables[group];
  const bool is_there = table.size() == 1 && table[0] != kNullBlock &&
                        pool_.belongs_to(table[0], static_cast<std::int32_t>(group));
  if (is_there) return;
  report(AuditRule::token_write, *row.request, group, row.first,
         table.empty() ? kNullBlock : table[0],
         fmt::format("a ring has one block, and the table of this group has {}{}", table.size(),
                     table.size() == 1 ? ", which is not one of this group" : ""));
}

// The request that should have written to the block since it was allocated.
std::string TokenLedger::why_nothing(BlockId block) const {
  const BlockOwner& last = pool_.holders(block)[0];
  if (const std::int64_t step = pool_.not_loaded_in(block); step >= 0)
    return fmt::format(": the load of step {} is reported not to have filled it", step);
  for (const auto& [name, request] : requests_) {
    if (request.index != last.request) continue;
    if (request.transfer == Transfer::loading)
      return fmt::format(": request {} is still loading it", name);
    if (request.preempted_in >= last.since)
      return fmt::format(": request {} was preempted in step {}", name, request.preempted_in);
  }
  return {};
}

std::string TokenLedger::content_text(const PoolSlot& slot, BlockId block) const {
  if (slot.content == 0) {
    const std::int64_t zeroed = pool_.zeroed_in(block);
    return (zeroed < 0
                ? "nothing that was written since the block was allocated"
                : fmt::format("nothing that was written since step {} zeroed the block", zeroed)) +
           why_nothing(block);
  }
  return fmt::format("token {} of request {}", slot.position, requests_.name_at(slot.writer));
}

std::string TokenLedger::key_difference_to(const AuditRequest& request, std::int32_t position,
                                           std::uint64_t content, std::int32_t writer) const {
  const KeyedRequest* keys = requests_.keys_at(writer);
  if (keys == nullptr || std::cmp_greater_equal(position, request.tokens.size())) return {};
  const std::string difference = key_difference(request.keyed, *keys, position);
  if (difference.empty()) return {};
  // The request's own tokens under the writer's keys.
  const std::vector<std::int32_t> tokens(request.tokens.begin(),
                                         request.tokens.begin() + position + 1);
  if (contents_of(*keys, tokens).back() != content) return {};
  return ": the same tokens" + difference;
}

// How a slot that holds this position differs from the request's token there.
std::string TokenLedger::difference(const AuditRequest& request, std::int32_t position,
                                    const PoolSlot& slot) const {
  if (slot.content == 0 || slot.position != position) return {};
  if (std::string keys = key_difference_to(request, position, slot.content, slot.writer);
      !keys.empty())
    return keys;
  const AuditRequest* writer = requests_.find(requests_.name_at(slot.writer));
  if (writer == nullptr || writer->index != slot.writer) return ": of another prefix than here";
  const auto at = static_cast<std::size_t>(position);
  if (at >= writer->contents.size() || writer->contents[at] != slot.content)
    return ": a draft that was rejected";
  const auto num = std::min({at + 1, writer->tokens.size(), request.tokens.size()});
  const auto end = request.tokens.begin() + static_cast<std::ptrdiff_t>(num);
  const auto [mine, theirs] = std::mismatch(request.tokens.begin(), end, writer->tokens.begin());
  if (mine == end) return key_difference(request.keyed, writer->keyed, position);
  return fmt::format(": token {} is {} there and {} here", mine - request.tokens.begin(), *theirs,
                     *mine);
}

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
  for (std::size_t g = 0; g < num_groups(); ++g) {
    const KVCacheSpec& spec = spec_of(g);
    if (!is_state(spec) || spec.mamba_cache_mode != MambaCacheMode::align) continue;
    const Running& running = running_[*row.request][g];
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
  const Running& running = running_[*row.request][group];
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
  const std::int32_t num_accepted = row.num_spec > 0 && num_sampled > 0 ? num_sampled : 1;
  for (std::size_t g = 0; g < num_groups(); ++g) {
    const KVCacheSpec& spec = spec_of(g);
    Running& running = running_[*row.request][g];
    running.num_accepted = num_accepted;
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
