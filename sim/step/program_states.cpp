// The recurrent states in a step's program: the table entry that holds each state, the updates that
// write it, and the copies when the table grows or drafts are accepted.
#include <fmt/core.h>

#include <algorithm>

#include "base/check.h"
#include "sim/step/program_builder.h"

namespace lockstep {

Checked ProgramBuilder::add_state_updates(const ScheduledRequest& scheduled, const RowSlice& slice,
                                          StepProgram& program) {
  for (std::int32_t g = 0; g < model_.num_groups(); ++g) {
    if (!model_.is_state_group(g)) continue;
    LS_RETURN_UNLESS_FINE(advance_state(g, scheduled, slice, program));
  }
  return {};
}

// Adds the chunk's update, and one per draft, each from the previous state into the next block.
// Rejected drafts then need no recomputation: the state after the last accepted one is in its
// block.
static void add_updates(StateUpdate update, const std::vector<BlockId>& table, std::int64_t base,
                        std::int32_t num_drafts, StepProgram& program) {
  program.state_updates.push_back(update);
  update.is_draft = true;
  update.num_drafts = 0;
  for (std::int32_t draft = 0; draft < num_drafts; ++draft) {
    update.source = update.target;
    update.target = table[base + draft + 1];
    update.first_position += update.num_tokens;
    update.first_token += update.num_tokens;
    update.num_tokens = 1;
    program.state_updates.push_back(update);
  }
}

// Adds the updates of one group. Modes none and align keep a running state in one entry of the
// table, followed by one block per draft: the state after draft j is in the j-th of them. In mode
// align the running entry is that of the chunk's last token, and the state is copied when the entry
// changes. Example: block_size 16, tokens 30 to 33 scheduled: the state moves from entry 1 to entry
// 2.
Checked ProgramBuilder::advance_state(std::int32_t group, const ScheduledRequest& scheduled,
                                      const RowSlice& slice, StepProgram& program) {
  WorkerRequest& request = worker_.at(scheduled.id);
  const KVCacheSpec& spec = spec_of(group);
  const std::vector<BlockId>& table = request.tables[group];
  const auto num_entries = static_cast<std::int64_t>(table.size());
  const bool aligned = spec.mamba_cache_mode == MambaCacheMode::align;
  const std::int64_t end = std::int64_t{slice.first_position} + slice.num_tokens;
  const std::int64_t base = aligned ? cdiv(end, spec.block_size) - 1 : 0;
  const std::int64_t last_entry = spec.mamba_cache_mode == MambaCacheMode::all
                                      ? (end - 1) / spec.block_size
                                      : base + scheduled.num_spec;
  if (base < 0 || last_entry >= num_entries)
    return decision_finding(
        program.step, request.name, group,
        fmt::format("its state needs entry {} of a block table of {}", last_entry, num_entries));
  if (spec.mamba_cache_mode == MambaCacheMode::all) {
    advance_every_block(group, slice, table, program);
    return {};
  }
  std::int64_t& entry = request.state_entry[group];
  ConvPlace& inputs = request.conv_places[group];
  if (entry < 0 && slice.first_position > 0) {
    entry = aligned ? (slice.first_position - 1) / spec.block_size : 0;  // end of the hit
    inputs = {.entry = entry, .offset = 0};
  }
  if (slice.first_position > 0)
    for (const std::int64_t from : {entry, inputs.entry})
      if (from < 0 || from >= num_entries)
        return decision_finding(
            program.step, request.name, group,
            fmt::format("its running state is in entry {} of a block table of {}", from,
                        num_entries));
  const BlockId target = table[base];
  const bool is_first = slice.first_position == 0;
  BlockId source = is_first ? kNullBlock : table[entry];
  BlockId conv_source = is_first ? kNullBlock : table[inputs.entry];
  auto conv_offset = is_first ? 0 : static_cast<std::int32_t>(inputs.offset);
  if (aligned && source != kNullBlock && source != target) {
    program.copies.push_back({.group = group,
                              .source = source,
                              .target = target,
                              .conv_source = conv_source,
                              .conv_offset = conv_offset});
    source = conv_source = target;
    conv_offset = 0;
  }
  entry = base;
  inputs = {.entry = base, .offset = 0};
  request.num_drafts = scheduled.num_spec;
  request.scheduled_end = end;
  const std::int32_t known = slice.num_tokens - scheduled.num_spec;
  if (known <= 0)
    return decision_finding(
        program.step, request.name, group,
        fmt::format("{} of its {} tokens are drafts", scheduled.num_spec, slice.num_tokens));
  StateUpdate update{.row = slice.row,
                     .group = group,
                     .source = source,
                     .target = target,
                     .first_position = slice.first_position,
                     .num_tokens = known,
                     .first_token = slice.first_token,
                     .conv_source = conv_source,
                     .conv_offset = conv_offset,
                     .num_drafts = scheduled.num_spec};
  LS_RETURN_UNLESS_FINE(export_checkpoint(request, base, program, update));
  add_updates(update, table, base, scheduled.num_spec, program);
  return {};
}

// Exports a prefill's state at the last possible hit inside its chunk, into the entry before the
// running state's. The worker applies its own rule to its own row
// (vllm/model_executor/layers/mamba/checkpoint.py), independent of the scheduler. `update`, the
// chunk's, then continues from there.
Checked ProgramBuilder::export_checkpoint(const WorkerRequest& request, std::int64_t base,
                                          StepProgram& program, StateUpdate& update) const {
  const KVCacheSpec& spec = spec_of(update.group);
  const std::int64_t alignment = spec.prefill_checkpoint_alignment;
  if (spec.mamba_cache_mode != MambaCacheMode::align || spec.num_prefill_checkpoint_blocks == 0 ||
      alignment == 0 || update.num_drafts > 0)
    return {};
  const std::int64_t first = update.first_position;
  const std::int64_t last = first + update.num_tokens;
  // A hit ends before the last known token, or before the tokens that its last hash covers.
  const std::int64_t proven = last - (hits_.drop_last_block ? 0 : std::max(1, hits_.lookahead));
  const std::int64_t blocks = proven / hits_.alignment - (hits_.drop_last_block ? 1 : 0);
  const std::int64_t position = blocks * hits_.alignment;
  // A checkpoint needs an entry between the chunk's first state and its last one, and must end at
  // the kernel's alignment counted from the chunk's start.
  const std::int64_t first_entry = first == 0 ? -1 : (first - 1) / spec.block_size;
  if (base - 1 <= first_entry || first % hits_.hash_block_size != 0 ||
      position < first + hits_.hash_block_size || position >= last ||
      (position - first) % alignment != 0)
    return {};
  const BlockId block = request.tables[update.group][base - 1];
  // The scheduler has not allocated a block for the checkpoint.
  if (block == kNullBlock) return {};
  if (block == update.target)
    return decision_finding(program.step, request.name, update.group,
                            fmt::format("the state after {} tokens is exported into block {}, "
                                        "where the step leaves the state after {}",
                                        position, index_of(block), last));
  StateUpdate exported = update;
  exported.target = block;
  exported.num_tokens = static_cast<std::int32_t>(position - first);
  exported.is_checkpoint = true;
  program.state_updates.push_back(exported);
  update.source = update.conv_source = block;
  update.conv_offset = 0;
  update.first_position += exported.num_tokens;
  update.first_token += exported.num_tokens;
  update.num_tokens -= exported.num_tokens;
  LS_CHECK(exported.num_tokens > 0 && update.num_tokens > 0,
           "{} tokens before a checkpoint and {} after it", exported.num_tokens, update.num_tokens);
  return {};
}

// Adds the updates of mode all: the state after each block, and the running state in the block that
// is being filled.
void ProgramBuilder::advance_every_block(std::int32_t group, const RowSlice& slice,
                                         const std::vector<BlockId>& table,
                                         StepProgram& program) const {
  const std::int64_t block_size = spec_of(group).block_size;
  const std::int64_t last = std::int64_t{slice.first_position} + slice.num_tokens;
  BlockId source = kNullBlock;
  if (slice.first_position > 0) source = table[(slice.first_position - 1) / block_size];
  for (std::int64_t first = slice.first_position; first < last;) {
    const std::int64_t entry = first / block_size;
    LS_CHECK(entry < std::ssize(table), "token {} has no entry in a table of {}", first,
             table.size());
    const std::int64_t end = std::min(last, (entry + 1) * block_size);
    const BlockId target = table[entry];
    program.state_updates.push_back(
        {.row = slice.row,
         .group = group,
         .source = source,
         .target = target,
         .first_position = static_cast<std::int32_t>(first),
         .num_tokens = static_cast<std::int32_t>(end - first),
         .first_token = slice.first_token + static_cast<std::int32_t>(first - slice.first_position),
         .conv_source = source});
    source = target;
    first = end;
  }
}

// Mode align: if a state after an accepted draft is the state at the end of a block, the prefix
// cache publishes it under that block. It is then copied there (vllm/v1/worker/mamba_utils.py,
// postprocess).
void ProgramBuilder::settle_states(RequestId id, std::int64_t num_sampled) {
  WorkerRequest& request = worker_.at(id);
  if (request.num_drafts == 0 || num_sampled == 0) return;
  for (std::int32_t g = 0; g < model_.num_groups(); ++g) {
    const KVCacheSpec& spec = spec_of(g);
    if (!model_.is_state_group(g) || spec.mamba_cache_mode != MambaCacheMode::align) continue;
    const std::int64_t first = request.scheduled_end - request.num_drafts;  // of the states kept
    const std::int64_t border = (first + num_sampled - 1) / spec.block_size * spec.block_size;
    if (border < first) continue;
    const std::vector<BlockId>& table = request.tables[g];
    const std::int64_t base = cdiv(request.scheduled_end, spec.block_size) - 1;
    const BlockId source = table[base + border - first];
    const BlockId target = table[border / spec.block_size - 1];
    if (source == target || target == kNullBlock) continue;
    const BlockId inputs = table[base];
    settled_.push_back({.group = g,
                        .source = source,
                        .target = target,
                        .conv_source = inputs,
                        .conv_offset = static_cast<std::int32_t>(border - first)});
    // The copy shifts the inputs within their block, so they start at its first row again.
    if (target == inputs) request.conv_places[g].offset -= border - first;
  }
}

}  // namespace lockstep
