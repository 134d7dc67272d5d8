#include "sim/connectors/simulated_connector.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace lockstep {

// Each request has its own random generator, so the answers do not depend on the order in which
// requests are queried.
SimulatedConnector::Knowledge& SimulatedConnector::knowledge_of(const ExternalQuery& query) {
  const auto known = known_.find(query.name);
  if (known != known_.end()) return known->second;
  Knowledge knowledge{.random = SeededRandom(options_.seed, query.name)};
  SeededRandom& random = knowledge.random;
  const std::int32_t num_blocks = query.num_tokens / options_.block_size;
  // A prefix of whole blocks, from one block up to the whole prompt.
  if (num_blocks > 0 && random.chance(options_.known_percent))
    knowledge.num_tokens = random.between(1, num_blocks) * options_.block_size;
  if (random.chance(options_.undetermined_percent))
    knowledge.num_silent = static_cast<std::int32_t>(random.between(1, 3));
  knowledge.is_async = random.chance(options_.async_percent);
  return known_.emplace(query.name, knowledge).first->second;
}

ExternalHit SimulatedConnector::get_num_new_matched_tokens(const ExternalQuery& query) {
  Knowledge& knowledge = knowledge_of(query);
  if (knowledge.num_silent > 0) {
    --knowledge.num_silent;
    // Keeps the engine's idle steps running: the next query may be answered.
    owes_answer_ = true;
    return {.num_tokens = std::nullopt};
  }
  // A load within the step leaves at least one token to compute. Rounded down to blocks, a prompt
  // of 32 tokens with blocks of 16 loads at most 16 of them.
  const std::int64_t most = knowledge.is_async ? query.num_tokens : query.num_tokens - 1;
  const std::int64_t tokens =
      std::min(knowledge.num_tokens, most) / options_.block_size * options_.block_size;
  // A local hit may be longer than what the peers have.
  const auto external =
      static_cast<std::int32_t>(std::max<std::int64_t>(tokens - query.num_local_tokens, 0));
  const bool is_async = knowledge.is_async && external > 0;
  asked_[query.request] = {std::string(query.name), query.num_local_tokens, is_async};
  return {.num_tokens = external, .is_async = is_async};
}

void SimulatedConnector::update_state_after_alloc(RequestId request,
                                                  std::span<const BlockId> blocks,
                                                  std::int32_t num_external_tokens) {
  if (num_external_tokens == 0) return;
  const auto asked = asked_.find(request);
  LS_CHECK(asked != asked_.end(), "request {} loads without a query", index_of(request));
  SeededRandom& random = known_.find(asked->second.name)->second.random;
  const std::int32_t first = asked->second.num_local_tokens / options_.block_size;
  const std::int32_t count = num_external_tokens / options_.block_size;
  const bool is_dead = asked->second.is_async && random.chance(options_.dead_percent);
  std::vector<BlockId> lost;
  if (options_.num_groups == 1 && (is_dead || random.chance(options_.lossy_percent))) {
    // Everything from the first lost block to the end is lost. A dead peer delivers nothing.
    const std::int64_t begin = first + (is_dead ? 0 : random.below(count));
    lost.assign(blocks.begin() + begin, blocks.begin() + first + count);
    // Null blocks are before the window: they are neither read nor loaded.
    std::erase(lost, kNullBlock);
  }
  // A load within the step ends in it: its losses go into the next report, and nothing is tracked.
  if (!asked->second.is_async) {
    invalid_.insert(invalid_.end(), lost.begin(), lost.end());
    if (!lost.empty()) losing_.push_back(request);
    return;
  }
  const std::int64_t delay =
      is_dead ? options_.timeout_steps : random.below(options_.delay_steps_max);
  transfers_.push_back({step_ + delay, request, true, std::move(lost)});
}

bool SimulatedConnector::request_finished(RequestId request, std::string_view name) {
  const auto known = known_.find(name);
  if (known == known_.end()) return false;  // never queried: nothing to send
  SeededRandom random = known->second.random;
  known_.erase(known);
  asked_.erase(request);
  // The engine fails requests before it processes loads that the same report completes. So a
  // request may finish while the report of its own load is on the way; unheard_ covers that.
  const bool is_loading = unheard_.contains(request) ||
                          (loads_elsewhere_ && loads_elsewhere_(request)) ||
                          std::ranges::any_of(transfers_, [&](const Transfer& transfer) {
                            return transfer.request == request && transfer.is_load;
                          });
  // A send lasts at least one step; its blocks are held in between.
  if (is_loading || !random.chance(options_.kept_percent)) return false;
  transfers_.push_back({step_ + random.between(1, options_.delay_steps_max), request, false, {}});
  return true;
}

KVConnectorOutput SimulatedConnector::report() {
  KVConnectorOutput report;
  report.invalid_block_ids = std::move(invalid_);
  invalid_.clear();
  owes_answer_ = false;
  std::erase_if(transfers_, [&](Transfer& transfer) {
    if (transfer.due_step > step_) return false;
    (transfer.is_load ? report.finished_recving : report.finished_sending)
        .push_back(transfer.request);
    report.invalid_block_ids.insert(report.invalid_block_ids.end(), transfer.lost.begin(),
                                    transfer.lost.end());
    return true;
  });
  // A load within the step that lost blocks counts as unheard: the engine is notified of the loss
  // with this report and must not find the blocks held as well.
  std::vector<RequestId> over = std::exchange(losing_, {});
  over.insert(over.end(), report.finished_recving.begin(), report.finished_recving.end());
  unheard_.report(std::move(over));
  ++step_;
  return report;
}

std::vector<BlockTransfer> blocks_of(const DecidedStep& step, RequestId request, std::int64_t first,
                                     std::int64_t last) {
  std::vector<BlockTransfer> blocks;
  for (std::size_t g = 0; g < step.block_tokens.size(); ++g) {
    const auto group = static_cast<std::int32_t>(g);
    const std::int64_t tokens = step.block_tokens[g];
    const std::span<const BlockId> table = step.decisions.block_table(request, group);
    // The table may be shorter than `last` requires: groups with a fixed number of blocks.
    const std::int64_t end =
        std::min<std::int64_t>(std::ssize(table), (last + tokens - 1) / tokens);
    for (std::int64_t entry = first / tokens; entry < end; ++entry) {
      const BlockId block = table[entry];
      if (block == kNullBlock) continue;
      blocks.push_back({.request = request,
                        .group = group,
                        .entry = static_cast<std::int32_t>(entry),
                        .block = block,
                        .num_tokens = last});
    }
  }
  return blocks;
}

PeerTransfers::PeerTransfers(KVConnector& connector, bool takes_several_groups,
                             std::span<const KVCacheGroupSpec> groups, std::int64_t num_pool_blocks)
    : connector_(connector),
      takes_several_groups_(takes_several_groups),
      num_pool_blocks_(num_pool_blocks) {
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto group = static_cast<std::int32_t>(g);
    // Blocks of the source group are host blocks; resident and hot groups are device pages.
    if (groups[g].role == kPageSourceRole) source_group_ = group;
    if (keeps_pages(groups[g].spec)) device_pages_.insert(group);
    windows_.push_back({groups[g].spec.sliding_window, groups[g].spec.attention_chunk_size});
  }
}

ExternalHit PeerTransfers::get_num_new_matched_tokens(const ExternalQuery& query) {
  const ExternalHit hit = connector_.get_num_new_matched_tokens(query);
  const std::int64_t first = query.num_local_tokens;
  // An undecided answer counts as 0 tokens; the next query overwrites it.
  asked_[query.request] = {query.request, first, first + hit.num_tokens.value_or(0), hit.is_async};
  return hit;
}

void PeerTransfers::update_state_after_alloc(RequestId request, std::span<const BlockId> blocks,
                                             std::int32_t num_external_tokens) {
  connector_.update_state_after_alloc(request, blocks, num_external_tokens);
  if (num_external_tokens == 0) return;
  const auto asked = asked_.find(request);
  LS_CHECK(asked != asked_.end(), "request {} loads without a query", index_of(request));
  begun_.push_back(asked->second);
}

bool PeerTransfers::request_finished(RequestId request, std::string_view name) {
  const bool is_kept = connector_.request_finished(request, name);
  num_frees_delayed_ += is_kept ? 1 : 0;
  return is_kept;
}

void PeerTransfers::plan(const DecidedStep& step, StepTransfers& transfers) {
  // Another engine's decisions: only its schedule shows how far a request is computed.
  if (step.decisions.model() == nullptr)
    for (const ScheduledRequest& scheduled : step.decision.scheduled)
      scheduled_to_[scheduled.id] = scheduled.computed + scheduled.num_tokens;
  // A report may name blocks of a load before the report that completes it, so they are kept.
  lost_.insert(step.report.invalid_block_ids.begin(), step.report.invalid_block_ids.end());
  for (const Load& load : std::exchange(begun_, {})) {
    const auto blocks = moved(blocks_of(step, load.request, load.first, load.last));
    transfers.begun.insert(transfers.begun.end(), blocks.begin(), blocks.end());
    if (load.is_async)
      loading_[load.request] = blocks;
    else
      carry_out(blocks, transfers);
  }
  for (const RequestId request : step.report.failed_recving) loading_.erase(request);
  for (const RequestId request : step.report.finished_recving)
    if (const auto load = loading_.extract(request)) carry_out(load.mapped(), transfers);
  // Without loads in flight no invalid block can refer to one: a later load of the same id must not
  // be treated as lost.
  if (loading_.empty()) lost_.clear();
  for (const RequestId request : step.report.finished_sending) send(step, request, transfers);
  transfers.num_frees_delayed = num_frees_delayed_;
}

std::vector<BlockTransfer> PeerTransfers::moved(std::vector<BlockTransfer> blocks) const {
  // A connector without SupportsHMA receives the blocks of one group only.
  if (!takes_several_groups_)
    std::erase_if(blocks, [](const BlockTransfer& block) { return block.group != 0; });
  std::erase_if(blocks, [&](const auto& block) { return device_pages_.contains(block.group); });
  return blocks;
}

HostBlockId PeerTransfers::host_of(const BlockTransfer& block) const {
  // Host pool of 64: source block 5 is host block 5, block 5 of another group is host block 69.
  const std::int64_t first = block.group == source_group_ ? 0 : num_pool_blocks_;
  return HostBlockId{static_cast<std::int32_t>(first + index_of(block.block))};
}

void PeerTransfers::carry_out(const std::vector<BlockTransfer>& blocks, StepTransfers& transfers) {
  for (BlockTransfer block : blocks) {
    if (lost_.erase(block.block) > 0) continue;
    block.host = host_of(block);
    transfers.brought.push_back(block);
    // Source blocks are host blocks already: a peer fills them and no load follows.
    if (block.group != source_group_) transfers.loads.push_back(block);
  }
}

// The model's count may include drafts if a client disconnected while the step was in flight, so it
// is limited to known tokens. For another engine, the last known token counts as not computed: it
// may have been sampled by the last step.
std::int64_t PeerTransfers::num_computed(const DecidedStep& step, RequestId request) const {
  const std::int64_t known = step.decisions.num_tokens(request);
  if (const Scheduler* const model = step.decisions.model())
    return std::min(model->num_computed_tokens(request), known);
  const auto scheduled = scheduled_to_.find(request);
  return scheduled == scheduled_to_.end() ? 0 : std::min(scheduled->second, known - 1);
}

// True if the next token reads nothing of the block: it is before the window or the chunk. Another
// engine's table may still name it. Example: window 4, 10 tokens: the next token reads positions 7
// to 10, so blocks of 2 tokens before entry 3 are skipped.
bool PeerTransfers::is_left(const BlockTransfer& block, std::int64_t block_tokens) const {
  const auto group = static_cast<std::size_t>(block.group);
  if (group >= windows_.size()) return false;
  const auto [window, chunk] = windows_[group];
  const std::int64_t begin = window > 0  ? block.num_tokens - window + 1
                             : chunk > 0 ? block.num_tokens / chunk * chunk
                                         : 0;
  return (block.entry + 1) * block_tokens <= begin;
}

// Two requests that share a block may be sent in one step; the block is stored once. What peers
// take from the host pool is not tracked, so source blocks are skipped.
void PeerTransfers::send(const DecidedStep& step, RequestId request, StepTransfers& transfers) {
  const std::int64_t known = num_computed(step, request);
  for (BlockTransfer block : moved(blocks_of(step, request, 0, known))) {
    if (block.group == source_group_ || is_left(block, step.block_tokens[block.group])) continue;
    if (std::ranges::count(transfers.stores, block.block, &BlockTransfer::block) > 0) continue;
    block.host = host_of(block);
    transfers.stores.push_back(block);
  }
}

}  // namespace lockstep
