#include "sim/step/model_step.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/check.h"
#include "reference/plan/rank_plan.h"
#include "sim/step/program_builder.h"

namespace lockstep {
namespace {

// The protocol has its own type, because backends do not depend on the memory model. The values
// enter the same pattern, rule (6).
static_assert(static_cast<int>(Poison::fresh) == static_cast<int>(Unwritten::fresh));
static_assert(static_cast<int>(Poison::freed) == static_cast<int>(Unwritten::freed));
static_assert(static_cast<int>(Poison::padding) == static_cast<int>(Unwritten::padding));
static_assert(static_cast<int>(Poison::zeroed) == static_cast<int>(Unwritten::zeroed));

std::string whose(const MemoryModel& model, const SlotContent& slot) {
  return fmt::format("{}'s token {} of step {}", model.writer_name(slot.writer), slot.position,
                     slot.step);
}

}  // namespace

std::int64_t first_attended(const KVCacheSpec& spec, std::int64_t first) {
  if (is_sliding_window(spec.kind))
    return std::max<std::int64_t>(0, first - spec.sliding_window + 1);
  if (is_chunked(spec.kind)) return first / spec.attention_chunk_size * spec.attention_chunk_size;
  return 0;
}

// A ring keeps block_size positions before the furthest one scheduled since the admission: rejected
// drafts have also overwritten older rows.
std::int64_t first_readable(const KVCacheSpec& spec, const WorkerRequest& request,
                            std::int64_t first) {
  if (is_ring(spec)) return std::max(request.first_own, request.scheduled_max - spec.block_size);
  const std::int64_t attended = first_attended(spec, first);
  return spec.bounded_replay ? std::max(attended, request.first_own) : attended;
}

// Cross attention reads all rows of the encoder in every step, whichever tokens are computed.
Reach reach_in(const KVCacheSpec& spec, const WorkerRequest& request, const RowSlice& slice,
               bool is_encoded, bool of_last) {
  if (is_cross_attention(spec)) {
    const std::int64_t rows = request.encoder.size();
    return {.lowest = 0, .first = is_encoded ? 0 : rows, .last = rows};
  }
  const std::int64_t end = std::int64_t{slice.first_position} + slice.num_tokens;
  const std::int64_t from = of_last ? end - 1 : slice.first_position;
  Reach reach{.lowest = first_readable(spec, request, from),
              .first = spec.sink_len + slice.first_position,
              .last = spec.sink_len + end};
  if (spec.rswa_window > 0) {
    reach.gap_first = request.num_prompt;
    reach.gap_last = std::max(reach.gap_first, from + 1 - spec.rswa_window);
  }
  return reach;
}

const PrefixContent& contents_in(const KVCacheSpec& spec, const WorkerRequest& request) {
  return is_cross_attention(spec) ? request.encoder : request.prefix;
}

std::int64_t replayed_tokens(const KVCacheConfig& plan) {
  std::int64_t tokens = 0;
  for (const KVCacheGroupSpec& group : plan.groups)
    if (group.spec.bounded_replay) tokens = std::max(tokens, group.spec.sliding_window);
  return tokens;
}

// Example: block_size 16, 2 context parallel ranks, interleave 1: position 40 is the 21st token of
// rank 0, so it is in entry 1, offset 4.
TokenPlace place_of_token(const MemoryModel& model, const Worker& worker, std::int32_t group,
                          std::int64_t position) {
  const std::int64_t size = model.block_size(group);
  if (model.is_ring_group(group)) return {.entry = 0, .offset = position % size};
  const std::int64_t row = num_kept(worker.context(group), position);
  return {.entry = row / size, .offset = row % size};
}

ModelStep::ModelStep(const KVCacheConfig& plan, MemoryModel& model, Worker& worker)
    : plan_(plan), num_replayed_(replayed_tokens(plan)), model_(model), worker_(worker) {}

// Returns at the first finding: later operations would build on a state that cannot exist.
Checked ModelStep::apply(const StepProgram& program, std::span<const RequestId> requests,
                         StepExpectation& expected) {
  LS_CHECK(program.rows.size() == requests.size(), "{} rows, {} requests", program.rows.size(),
           requests.size());
  // The order of rule (9): blocks change owners before tokens are written, and stores copy rows
  // that this step wrote.
  model_.begin_step(program.step);
  if (const auto wrong = model_.write_sinks())
    return decision_finding(program.step, "", -1, *wrong);
  LS_RETURN_UNLESS_FINE(apply_blocks(program));
  expected.slot_mappings.resize(model_.num_groups());
  for (std::int32_t g = 0; g < model_.num_groups(); ++g) {
    std::vector<Slot>& slots = expected.slot_mappings[g];
    slots.clear();
    if (model_.is_state_group(g)) continue;
    if (model_.is_encoder_group(g)) {
      LS_RETURN_UNLESS_FINE(write_encoder_rows(program, requests, g, slots));
      continue;
    }
    slots.assign(program.num_padded_tokens, PAD_SLOT_ID);
    if (model_.is_hot_group(g)) continue;  // rows come only from the host
    for (std::size_t i = 0; i < program.rows.size(); ++i)
      LS_RETURN_UNLESS_FINE(write_tokens(program, program.rows[i], requests[i], g, slots));
  }
  LS_RETURN_UNLESS_FINE(advance_states(program, requests, expected));
  for (const HostTransfer& store : program.stores)
    if (auto wrong = model_.store(store.group, store.block, store.host))
      return decision_finding(program.step, "", store.group, *wrong);
  return {};
}

// Applies the operations on whole blocks. A finding here is the scheduler's: it copies content that
// does not exist, or allocates a block in use. The memory model refuses it before a backend runs.
Checked ModelStep::apply_blocks(const StepProgram& program) {
  for (const BlockCopy& copy : program.settled)
    if (auto wrong = model_.copy_state(copy.group, copy.source, copy.target, copy.conv_source,
                                       copy.conv_offset))
      return decision_finding(program.step, "", copy.group, *wrong);
  for (const PoisonBlock& poison : program.poison) {
    if (model_.holds_sinks(poison.block))
      return decision_finding(
          program.step, "", -1,
          fmt::format("block {} holds sinks and is allocated", index_of(poison.block)));
    model_.poison(poison.block, static_cast<Unwritten>(poison.kind));
  }
  for (const GroupBlock& zero : program.zero) model_.zero(zero.group, zero.block);
  for (const HostTransfer& load : program.loads)
    if (auto wrong = model_.load(load.group, load.block, load.host))
      return decision_finding(program.step, "", load.group, *wrong);
  for (const PartCopy& part : program.parts)
    if (auto wrong = model_.copy_block(part.group, part.source, part.target, part.num_rows))
      return decision_finding(program.step, "", part.group, *wrong);
  for (const BlockCopy& copy : program.copies)
    if (auto wrong = model_.copy_state(copy.group, copy.source, copy.target, copy.conv_source,
                                       copy.conv_offset))
      return decision_finding(program.step, "", copy.group, *wrong);
  return {};
}

// Writes the tokens of a row into one group and derives their slots. Tokens of other ranks keep
// PAD_SLOT_ID.
Checked ModelStep::write_tokens(const StepProgram& program, const RowSlice& slice, RequestId id,
                                std::int32_t group, std::vector<Slot>& slots) {
  const WorkerRequest& request = worker_.at(id);
  const KVCacheSpec& spec = plan_.groups[group].spec;
  const std::int64_t end = std::int64_t{slice.first_position} + slice.num_tokens;
  // Only the last tokens of a chunk longer than a ring have a row. Tokens that are recomputed for a
  // window keep the rows of the hit in other groups: other requests read them.
  const std::int64_t first =
      is_ring(spec) ? std::max<std::int64_t>(slice.first_position, end - spec.block_size)
      : is_prefix_cacheable(spec) && slice.replay_start > 0
          ? std::max<std::int64_t>(slice.first_position, slice.replay_start + num_replayed_)
          : slice.first_position;
  for (auto t = static_cast<std::int32_t>(first - slice.first_position); t < slice.num_tokens;
       ++t) {
    if (!keeps(worker_.context(group), slice.first_position + t)) continue;
    const auto token = static_cast<std::size_t>(slice.first_token + t);
    if (auto finding = write_token(program, request, group, slice.first_position + t,
                                   program.contents[token], slots[token]);
        !finding)
      return finding;
  }
  return {};
}

// Writes the rows of the step's encoders. Slots follow encoder_contents, without padding: rule
// (21).
Checked ModelStep::write_encoder_rows(const StepProgram& program,
                                      std::span<const RequestId> requests, std::int32_t group,
                                      std::vector<Slot>& slots) {
  slots.assign(program.encoder_contents.size(), PAD_SLOT_ID);
  for (const EncoderSlice& slice : program.encoder_slices) {
    const auto row = std::ranges::find(program.rows, slice.row, &RowSlice::row);
    LS_CHECK(row != program.rows.end(), "row {} encodes and does not run", slice.row);
    const WorkerRequest& request = worker_.at(requests[row - program.rows.begin()]);
    for (std::int32_t i = 0; i < slice.num_rows; ++i) {
      const auto at = static_cast<std::size_t>(slice.first_row + i);
      LS_RETURN_UNLESS_FINE(
          write_token(program, request, group, i, program.encoder_contents[at], slots[at]));
    }
  }
  return {};
}

Checked ModelStep::write_token(const StepProgram& program, const WorkerRequest& request,
                               std::int32_t group, std::int64_t position, ContentId now,
                               Slot& slot) {
  const std::vector<BlockId>& table = request.tables[group];
  const auto [entry, offset] = place_of_token(model_, worker_, group, position);
  const auto finding = [&](std::string message) {
    Divergence found = decision_finding(program.step, request.name, group, std::move(message));
    found.token = position;
    return found;
  };
  if (entry >= static_cast<std::int64_t>(table.size()))
    return finding(fmt::format("token {} needs entry {} of a block table of {}", position, entry,
                               table.size()));
  const BlockId block = table[entry];
  slot = index_of(block) * model_.block_size(group) + offset;
  if (block == kNullBlock)
    return finding(fmt::format("token {} would be written to the null block", position));
  if (model_.is_source_group(group)) return {};  // a mirror writes it
  // Equal content may be written twice (a resumed request, a shared block). Different content of
  // another request means that two requests own the slot.
  const BlockContent& content = model_.block(block);
  if (content.group != -1 && content.group != group)
    return finding(fmt::format("block {} is written for group {} while it belongs to group {}",
                               index_of(block), group, content.group));
  const SlotContent* old = model_.slot_content(group, block, offset);
  if (old != nullptr && old->writer != request.writer && old->content != now)
    return finding(fmt::format("token {} overwrites slot {}, which holds {}", position, slot,
                               whose(model_, *old)));
  model_.write_token(group, block, offset, now, request.writer, position);
  return {};
}

// Taken before the update runs: the comparison needs the input of a recurrence, which the update
// may overwrite in place.
StateBefore ModelStep::state_before(const StateUpdate& update) const {
  const auto words = [&](BlockId block) {
    return block == kNullBlock ? nullptr : model_.block(block).state.words;
  };
  return {.source = words(update.source),
          .conv_source = words(update.conv_source),
          .target = model_.state_words(update.group, update.target)};
}

Checked ModelStep::advance_states(const StepProgram& program, std::span<const RequestId> requests,
                                  StepExpectation& expected) {
  expected.states_before.clear();
  // Updates and rows are both in batch order, so one pass suffices.
  std::size_t row = 0;
  for (const StateUpdate& update : program.state_updates) {
    while (program.rows[row].row != update.row) ++row;
    const WorkerRequest& request = worker_.at(requests[row]);
    const auto contents =
        std::span(program.contents).subspan(update.first_token, update.num_tokens);
    if (model_.has_real_states() && update.target != kNullBlock)
      expected.states_before.push_back(state_before(update));
    const auto wrong = model_.advance_state(
        update.group, update.source, update.target, update.first_position,
        request.prefix.content(update.first_position - 1), contents, request.writer);
    if (!wrong) continue;
    Divergence finding = decision_finding(program.step, request.name, update.group, *wrong);
    finding.block = index_of(update.source);
    finding.token = update.first_position;
    return finding;
  }
  return {};
}

Checked check_hit(const MemoryModel& model, const Worker& worker, const WorkerRequest& request,
                  const KVCacheConfig& plan, std::int64_t step, std::int64_t first) {
  const auto slot_in = [&](std::int32_t group, BlockId block, std::int64_t offset) {
    if (!model.is_source_group(group)) return model.slot_content(group, block, offset);
    const std::vector<SlotContent>& slots = model.host_block(HostBlockId{index_of(block)}).slots;
    return offset < std::ssize(slots) && slots[offset].writer != kNobody ? &slots[offset] : nullptr;
  };
  // Only rows that the next token attends to must be correct: a window's older blocks may be lost.
  // State groups are checked when the state is advanced.
  for (std::int32_t g = 0; g < model.num_groups(); ++g) {
    const KVCacheSpec& spec = plan.groups[g].spec;
    if (model.is_state_group(g) || !is_prefix_cacheable(spec)) continue;
    const std::vector<BlockId>& table = request.tables[g];
    const std::int64_t size = model.block_size(g);
    const std::int64_t end = first == 0 ? 0 : first + replayed_tokens(plan);
    for (std::int64_t p = first_attended(spec, first); p < end; ++p) {
      if (!keeps(worker.context(g), p)) continue;
      const auto [entry, offset] = place_of_token(model, worker, g, p);
      const BlockId block = table[entry];
      const SlotContent* slot = slot_in(g, block, offset);
      if (slot != nullptr && slot->content == request.prefix.content(p)) continue;
      Divergence finding =
          decision_finding(step, request.name, g,
                           fmt::format("token {} counts as computed, but slot {} holds {}", p,
                                       index_of(block) * size + offset,
                                       slot == nullptr ? "nothing" : whose(model, *slot)));
      finding.block = index_of(block);
      finding.slot = index_of(block) * size + offset;
      finding.token = p;
      return finding;
    }
  }
  return {};
}

}  // namespace lockstep
