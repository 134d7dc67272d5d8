#include "sim/step/program_builder.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "reference/plan/block_sizes.h"
#include "reference/plan/page_size.h"
#include "reference/plan/rank_plan.h"
#include "sim/step/backend_config.h"
#include "sim/step/model_step.h"

namespace lockstep {
namespace {

// Rounds up to the multiple, but not above `max`, and never below `tokens`.
std::int32_t round_up_to(std::int64_t tokens, std::int64_t multiple, std::int64_t max) {
  return static_cast<std::int32_t>(
      std::max(tokens, std::min((tokens + multiple - 1) / multiple * multiple, max)));
}

// Empties the program. Each list keeps its capacity, so later steps do not allocate memory.
void reset(StepProgram& program, std::int64_t step) {
  const auto clear = [](auto&... lists) { (lists.clear(), ...); };
  clear(program.settled, program.clear_rows, program.poison, program.zero, program.loads,
        program.parts, program.copies, program.table_updates, program.table_block_ids,
        program.table_edits, program.rows, program.contents, program.encoder_slices,
        program.encoder_contents, program.residency, program.mirrors, program.hot_reads,
        program.hot_positions, program.state_updates, program.draft_rows, program.draft_contents,
        program.stores, program.probes, program.queries, program.extractions);
  program.step = step;
  program.num_padded_tokens = 0;
  program.agreed = {};
}

}  // namespace

Divergence decision_finding(std::int64_t step, std::string request, std::int32_t group,
                            std::string message) {
  return Divergence{.phase = Phase::decide,
                    .step = step,
                    .request = std::move(request),
                    .group = group,
                    .doing = "turning the decision into work",
                    .message = std::move(message)};
}

ProgramBuilder::ProgramBuilder(const EngineConfig& engine, const BackendConfig& config,
                               const MemoryModel& model, Worker& worker)
    : engine_(engine),
      config_(config),
      hits_(hit_ends_of(engine, config.plan)),
      num_replayed_(replayed_tokens(config.plan)),
      model_(model),
      worker_(worker),
      group_of_block_(static_cast<std::size_t>(model.num_blocks()), -1),
      to_be_zeroed_(static_cast<std::size_t>(model.num_blocks())),
      loaded_for_(static_cast<std::size_t>(model.num_blocks())),
      restored_for_(static_cast<std::size_t>(model.num_blocks())) {}

ProgramBuilder::HitEnds ProgramBuilder::hit_ends_of(const EngineConfig& engine,
                                                    const KVCacheConfig& plan) {
  const auto sizes = resolve_block_sizes(engine, plan.groups);
  if (!sizes) return {};  // the scheduler refuses these
  const std::int32_t lookahead = num_hash_lookahead_tokens_of(engine);
  return {.hash_block_size = sizes->hash_block_size,
          .alignment = sizes->cache_hit_alignment_tokens(),
          .lookahead = lookahead,
          .drop_last_block = engine.spec_method == SpecMethod::eagle && lookahead == 0};
}

// Blocks that leave come before blocks that are allocated: a step may reuse the blocks of a request
// that it reports as finished.
Checked ProgramBuilder::build(const SchedulerOutput& decision, const StepTransfers& transfers,
                              StepProgram& program) {
  reset(program, decision.step);
  std::swap(program.settled, settled_);
  std::swap(program.clear_rows, preempted_rows_);
  row_requests_.clear();
  void_rows_.clear();
  mark_to_be_zeroed(decision, true);
  leave(decision, transfers, program);
  begin_loads(transfers, program);
  restore_pages(decision, program);
  std::size_t first_spec = 0;
  std::span<const std::int32_t> items = decision.encode;
  for (std::size_t i = 0; i < decision.scheduled.size(); ++i) {
    const ScheduledRequest& scheduled = decision.scheduled[i];
    LS_RETURN_UNLESS_FINE(enter(decision, i, program));
    LS_RETURN_UNLESS_FINE(add_encoder_rows(scheduled, items.first(scheduled.num_encoded), program));
    items = items.subspan(scheduled.num_encoded);
    append_blocks(decision, i, program);
    void_rows_.push_back(counts_on_lost(scheduled, transfers.lost));
    LS_RETURN_UNLESS_FINE(add_tokens(decision, i, first_spec, program));
    LS_RETURN_UNLESS_FINE(add_state_updates(scheduled, program.rows.back(), program));
    first_spec += static_cast<std::size_t>(scheduled.num_spec);
  }
  LS_CHECK(row_requests_.size() == program.rows.size() && void_rows_.size() == program.rows.size(),
           "{} rows of {} requests", program.rows.size(), row_requests_.size());
  LS_CHECK(items.empty(), "{} encoder items of no request", items.size());
  LS_RETURN_UNLESS_FINE(copy_parts(decision, program));
  LS_RETURN_UNLESS_FINE(add_zeros(decision, program));
  for (const BlockId block : handed_) group_of_block_[block] = -1;
  handed_.clear();
  mark_to_be_zeroed(decision, false);
  hit_.clear();
  // Without a graph the batch is padded to a multiple of 8, so that slot mappings have padding.
  const std::int64_t captured =
      captured_batch(std::ssize(program.contents), config_.max_cudagraph_capture_size,
                     config_.max_tokens_per_step);
  program.num_padded_tokens =
      captured > 0 ? static_cast<std::int32_t>(captured)
                   : round_up_to(std::ssize(program.contents), 8, config_.max_tokens_per_step);
  return {};
}

// Removes finished requests from the batch. A connector may keep their blocks.
void ProgramBuilder::leave(const SchedulerOutput& decision, const StepTransfers& transfers,
                           StepProgram& program) {
  left_.clear();
  for (const RequestId id : decision.finished) {
    if (!worker_.is_known(id)) continue;
    left_.insert(worker_.at(id).name);
    if (const std::int32_t row = worker_.leave_row(id); row >= 0) program.clear_rows.push_back(row);
    if (std::ranges::find(transfers.held, id) == transfers.held.end())
      forget(id);
    else
      held_.push_back(id);
  }
  for (const RequestId id : decision.preempted) {
    if (!worker_.is_known(id)) continue;  // preempted by a reset, then aborted
    WorkerRequest& request = worker_.at(id);
    const bool is_replaced = std::ranges::find(decision.replaced, id) != decision.replaced.end();
    request.replaced_tables.clear();
    if (is_replaced) request.replaced_tables = request.tables;
    if (const std::int32_t row = worker_.leave_row(id); row >= 0) program.clear_rows.push_back(row);
  }
}

void ProgramBuilder::preempt(RequestId id) {
  if (!worker_.is_known(id)) return;  // it has never run
  if (const std::int32_t row = worker_.leave_row(id); row >= 0) preempted_rows_.push_back(row);
}

void ProgramBuilder::release(std::span<const HeldRequest> held) {
  std::erase_if(held_, [&](RequestId id) {
    if (std::ranges::find(held, id, &HeldRequest::id) != held.end()) return false;
    forget(id);
    return true;
  });
}

// Forgets a request. A new request may get its id, and its unfinished loads have no owner.
void ProgramBuilder::forget(RequestId id) {
  worker_.forget(id);
  for (LoadedFor* marks : {&loaded_for_, &restored_for_})
    for (std::optional<RequestId>& mark : *marks)
      if (mark == id) mark.reset();
  std::erase_if(host_loads_, [&](const auto& load) { return load.second == id; });
}

// Blocks of loads are allocated now, often steps before their request runs.
void ProgramBuilder::begin_loads(const StepTransfers& transfers, StepProgram& program) {
  for (const BlockTransfer& load : transfers.begun) {
    worker_.know(load.request);
    if (model_.is_source_group(load.group)) {
      host_loads_.insert_or_assign(load.block, load.request);
      continue;
    }
    hand_out(load.group, load.block, program);
    loaded_for_[load.block] = load.request;
  }
}

// Restores a page that was loaded on the host to the device, possibly before its request is
// admitted, and possibly when its request has already been aborted.
void ProgramBuilder::restore_pages(const SchedulerOutput& decision, StepProgram& program) {
  for (const PageTransfer& transfer : decision.host_pages.transfers) {
    if (!transfer.restores) continue;
    const auto load = host_loads_.find(transfer.host);
    auto block = transfer.resident.begin();
    for (std::int32_t g = 0; g < model_.num_groups(); ++g) {
      if (!model_.is_resident_group(g)) continue;
      LS_CHECK(block != transfer.resident.end(), "a restored page without a block in group {}", g);
      hand_out(g, *block, program);
      restored_for_[*block] =
          load == host_loads_.end() ? std::nullopt : std::optional(load->second);
      program.loads.push_back(
          {.group = g, .block = *block++, .host = HostBlockId{index_of(transfer.host)}});
    }
  }
}

// True if the row reads a lost block. The worker's table still has the entries that a window has
// left, and those blocks may belong to another request.
bool ProgramBuilder::counts_on_lost(const ScheduledRequest& scheduled,
                                    std::span<const BlockId> lost) {
  if (lost.empty()) return false;
  const WorkerRequest& request = worker_.at(scheduled.id);
  for (std::size_t g = 0; g < request.tables.size(); ++g) {
    const KVCacheSpec& spec = spec_of(static_cast<std::int32_t>(g));
    const std::int64_t tokens = spec.block_size * rank_in(config_.context, spec).num_ranks;
    const auto end =
        std::min<std::int64_t>(cdiv(scheduled.computed, tokens), std::ssize(request.tables[g]));
    for (std::int64_t entry = first_attended(spec, scheduled.computed) / tokens; entry < end;
         ++entry)
      if (std::ranges::find(lost, request.tables[g][entry]) != lost.end()) return true;
  }
  return false;
}

// Gives a new or resumed request a row of the batch. Any other request must have one.
Checked ProgramBuilder::enter(const SchedulerOutput& decision, std::size_t index,
                              StepProgram& program) {
  const ScheduledRequest& scheduled = decision.scheduled[index];
  if (!worker_.is_known(scheduled.id))
    return decision_finding(
        decision.step, "", -1,
        fmt::format("request id {} is scheduled but not live", index_of(scheduled.id)));
  WorkerRequest& request = worker_.at(scheduled.id);
  if (!scheduled.is_new && !scheduled.is_resumed) {
    if (request.row >= 0) return {};
    return decision_finding(decision.step, request.name, -1,
                            "it is scheduled as running, but was preempted or never started");
  }
  if (const std::int32_t row = worker_.leave_row(scheduled.id); row >= 0)
    program.clear_rows.push_back(row);
  if (worker_.enter_row(scheduled.id)) return {};
  return decision_finding(decision.step, request.name, -1,
                          fmt::format("the batch has {} rows and all are taken", config_.num_rows));
}

// Adds a request's blocks to its tables and poisons the newly allocated ones. Blocks that hold
// known content keep it: hits, loads, restored pages, state blocks that only move, and blocks that
// a replaced table also has in that entry.
void ProgramBuilder::append_blocks(const SchedulerOutput& decision, std::size_t index,
                                   StepProgram& program) {
  const ScheduledRequest& scheduled = decision.scheduled[index];
  WorkerRequest& request = worker_.at(scheduled.id);
  const bool whole_table = scheduled.is_new || scheduled.is_resumed;
  auto replaced = std::exchange(request.replaced_tables, {});
  replaced.resize(static_cast<std::size_t>(decision.num_groups));
  for (std::int32_t g = 0; g < decision.num_groups; ++g) {
    const std::span<const BlockId> blocks = decision.blocks(index, g);
    std::vector<BlockId>& table = request.tables[g];
    if (blocks.empty() && !whole_table) continue;
    // The first blocks of an admitted request are hits, as far as its computed tokens reach.
    // Example: block_size 16 and 48 computed tokens: blocks 0 to 2 are hits. All later blocks are
    // allocated.
    const std::int64_t tokens_in_block =
        spec_of(g).block_size * rank_in(config_.context, spec_of(g)).num_ranks;
    const bool continues = scheduled.is_new && left_.contains(request.name);
    const bool can_hit = is_prefix_cacheable(spec_of(g)) || model_.is_resident_group(g);
    const std::int64_t to_end = continues ? tokens_in_block - 1 : num_replayed_;
    const std::size_t hit =
        whole_table && scheduled.computed > 0 && (can_hit || continues)
            ? static_cast<std::size_t>((scheduled.computed + to_end) / tokens_in_block)
            : 0;
    // State blocks of drafts move to the end of the same table and keep their content. Any other
    // entry may be stale: retired long ago, and reused by another request since.
    const auto moving =
        std::min(static_cast<std::size_t>(spec_of(g).num_speculative_blocks), table.size());
    const std::vector<BlockId> kept(table.end() - static_cast<std::ptrdiff_t>(moving), table.end());
    for (std::size_t b = 0; b < blocks.size() && !model_.is_source_group(g); ++b) {
      if (was_restored(scheduled, blocks[b], b) && whole_table && model_.is_resident_group(g))
        continue;
      // A mark counts only when the request is admitted: the block may be freed later.
      auto& mark = loaded_for_[blocks[b]];
      const bool was_loaded = whole_table && mark == scheduled.id;
      mark.reset();
      if (was_loaded || std::ranges::find(kept, blocks[b]) != kept.end()) continue;
      const std::vector<BlockId>& held = replaced[g];
      if (scheduled.computed > 0 && b < held.size() && held[b] == blocks[b]) continue;
      if (b < hit || (whole_table && keeps_rows(decision, scheduled, g, b, blocks[b], program)))
        hit_.emplace(blocks[b], scheduled.id);
      else
        hand_out(g, blocks[b], program);
    }
    program.table_updates.push_back(
        {.row = request.row,
         .group = g,
         .first = static_cast<std::int32_t>(table.size()),
         .begin = static_cast<std::uint32_t>(program.table_block_ids.size()),
         .count = static_cast<std::uint32_t>(blocks.size())});
    program.table_block_ids.insert(program.table_block_ids.end(), blocks.begin(), blocks.end());
    table.insert(table.end(), blocks.begin(), blocks.end());
  }
}

// Returns true if the request's computed tokens end inside the block and it continues there, not in
// a copy: only the rows of those tokens keep their content.
bool ProgramBuilder::keeps_rows(const SchedulerOutput& decision, const ScheduledRequest& scheduled,
                                std::int32_t group, std::size_t entry, BlockId block,
                                StepProgram& program) {
  const KVCacheSpec& spec = spec_of(group);
  if (!is_prefix_cacheable(spec) || is_state_kind(spec.kind) ||
      rank_in(config_.context, spec).num_ranks > 1 || model_.block(block).group != group ||
      scheduled.computed % spec.block_size == 0 ||
      std::cmp_not_equal(entry, scheduled.computed / spec.block_size) ||
      std::ranges::count(decision.copies, block, &KVCacheBlockCopy::to) > 0)
    return false;
  program.parts.push_back(
      {.group = group,
       .source = block,
       .target = block,
       .num_rows = static_cast<std::int32_t>(scheduled.computed % spec.block_size)});
  return true;
}

// Returns true if the block holds the page at the end of the request's computed tokens, restored
// from the host. Clears the mark.
bool ProgramBuilder::was_restored(const ScheduledRequest& scheduled, BlockId block,
                                  std::size_t page) {
  if (std::exchange(restored_for_[block], std::nullopt) != scheduled.id || scheduled.computed == 0)
    return false;
  const std::int64_t size = spec_of(model_.source_group()).block_size;
  return std::cmp_equal(page, (scheduled.computed - 1) / size) ||
         std::cmp_equal(page, scheduled.computed / size);
}

void ProgramBuilder::mark_to_be_zeroed(const SchedulerOutput& decision, bool mark) {
  for (const BlockId block : decision.zero) to_be_zeroed_[block] = mark;
}

// Poisons a block that held something, so that a read before the first write is found. Blocks on
// the zero list get their own poison: a missing zeroing is then reported as such.
void ProgramBuilder::hand_out(std::int32_t group, BlockId block, StepProgram& program) {
  if (block == kNullBlock) return;
  group_of_block_[block] = group;
  handed_.push_back(block);
  const bool zeroed = to_be_zeroed_[block];
  if (zeroed || model_.block(block).group != -1)
    program.poison.push_back({.block = block, .kind = zeroed ? Poison::zeroed : Poison::freed});
}

// Adds the copies of partial hits. The worker copies whole blocks, of any request. Some targets are
// in no request's table: the request continues in the published block, and later hits find the
// copy.
Checked ProgramBuilder::copy_parts(const SchedulerOutput& decision, StepProgram& program) {
  for (const KVCacheBlockCopy& copy : decision.copies) {
    // The target of an earlier copy of the step holds what that copy brings.
    const auto earlier = std::ranges::find(program.parts, copy.from, &PartCopy::target);
    const std::int32_t group =
        earlier == program.parts.end() ? model_.block(copy.from).group : earlier->group;
    if (group < 0)
      return decision_finding(decision.step, "", -1,
                              fmt::format("block {} is copied to block {}, but holds nothing",
                                          index_of(copy.from), index_of(copy.to)));
    if (group_of_block_[copy.to] < 0) hand_out(group, copy.to, program);
    PartCopy& part = program.parts.emplace_back();
    part = {.group = group, .source = copy.from, .target = copy.to};
    for (const ScheduledRequest& scheduled : decision.scheduled) {
      const std::vector<BlockId>& table = worker_.at(scheduled.id).tables[group];
      const auto num_rows =
          static_cast<std::int32_t>(scheduled.computed % spec_of(group).block_size);
      const auto entry = static_cast<std::size_t>(scheduled.computed / spec_of(group).block_size);
      if (entry < table.size() && table[entry] == copy.to) part.num_rows = num_rows;
    }
  }
  return {};
}

// The zero list names blocks of the attention groups. A block whose request was preempted in the
// same step belongs to no group: its content is lost, and a read of it is a finding. If it is part
// of a hit, the request that hit it reads zeros.
Checked ProgramBuilder::add_zeros(const SchedulerOutput& decision, StepProgram& program) {
  for (const BlockId block : decision.zero) {
    const std::int32_t group = group_of_block_[block];
    if (group >= 0) {
      program.zero.push_back({.group = group, .block = block});
      continue;
    }
    ++ignored_zeros_;
    if (const auto hit = hit_.find(block); hit != hit_.end())
      return decision_finding(
          decision.step, worker_.at(hit->second).name, -1,
          fmt::format("block {} counts as computed, but the step zeroes it", index_of(block)));
    if (model_.block(block).group != -1)
      program.poison.push_back({.block = block, .kind = Poison::freed});
  }
  return {};
}

// Adds the request's scheduled tokens with their contents. Drafts extend the known tokens for this
// step only: truncate() removes those of the previous step first.
Checked ProgramBuilder::add_tokens(const SchedulerOutput& decision, std::size_t index,
                                   std::size_t first_spec, StepProgram& program) {
  const ScheduledRequest& scheduled = decision.scheduled[index];
  WorkerRequest& request = worker_.at(scheduled.id);
  request.prefix.truncate(request.num_known);
  for (std::int32_t s = 0; s < scheduled.num_spec; ++s)
    request.prefix.append(decision.spec_tokens[first_spec + static_cast<std::size_t>(s)]);
  const std::int64_t last = std::int64_t{scheduled.computed} + scheduled.num_tokens;
  if (scheduled.num_tokens <= 0 || last > request.prefix.size())
    return decision_finding(
        decision.step, request.name, -1,
        fmt::format(
            "{} tokens are scheduled after {} computed ones, but it has {} tokens and {} drafts",
            scheduled.num_tokens, scheduled.computed, request.num_known, scheduled.num_spec));
  if (scheduled.is_new || scheduled.is_resumed) {
    request.first_own = scheduled.computed;
    request.scheduled_max = 0;
  }
  request.scheduled_max = std::max(request.scheduled_max, last);
  program.rows.push_back(
      {.row = request.row,
       .first_position = scheduled.computed,
       .num_tokens = scheduled.num_tokens,
       .first_token = static_cast<std::int32_t>(program.contents.size()),
       .replay_start = num_replayed_ > 0 ? static_cast<std::int32_t>(request.first_own) : 0});
  const auto contents = request.prefix.contents();
  program.contents.insert(program.contents.end(), contents.begin() + scheduled.computed,
                          contents.begin() + static_cast<std::ptrdiff_t>(last));
  if (void_rows_.back())
    for (ContentId& content : std::span(program.contents).last(scheduled.num_tokens))
      content = void_content(content);
  row_requests_.push_back(scheduled.id);
  return {};
}

// Adds what the request's encoder computes in this step. Each row's content depends on the whole
// item, so its identifier seeds all of them.
Checked ProgramBuilder::add_encoder_rows(const ScheduledRequest& scheduled,
                                         std::span<const std::int32_t> items,
                                         StepProgram& program) {
  if (!has_cross_attention(config_.plan.groups)) return {};
  WorkerRequest& request = worker_.at(scheduled.id);
  const bool comes_in = scheduled.is_new || scheduled.is_resumed;
  if (comes_in) request.encoder = PrefixContent(config_.context);
  if (comes_in && items.size() < request.items.size())
    return decision_finding(
        program.step, request.name, -1,
        fmt::format("it is admitted with {} items for its encoder, of which {} are computed",
                    request.items.size(), items.size()));
  if (items.empty()) return {};
  for (const std::int32_t i : items) {
    const PromptItem& item = request.items.at(static_cast<std::size_t>(i));
    std::uint64_t key = 0x656E636F646572ull;
    for (const char letter : item.identifier) key = mix(key ^ static_cast<unsigned char>(letter));
    for (std::int32_t row = 0; row < item.num_rows(); ++row)
      request.encoder.append(static_cast<std::int32_t>(mix(key + row)));
  }
  program.encoder_slices.push_back(
      {.row = request.row,
       .num_rows = static_cast<std::int32_t>(request.encoder.size()),
       .first_row = static_cast<std::int32_t>(program.encoder_contents.size())});
  const auto contents = request.encoder.contents();
  program.encoder_contents.insert(program.encoder_contents.end(), contents.begin(), contents.end());
  return {};
}

}  // namespace lockstep
