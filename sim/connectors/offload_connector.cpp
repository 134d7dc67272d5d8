#include "sim/connectors/offload_connector.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "sim/step/model_step.h"

namespace lockstep {

HostBlockPool::HostBlockPool(std::int64_t num_blocks)
    : blocks_(static_cast<std::size_t>(num_blocks)) {
  // free_ is a stack: blocks are allocated from 0 upward, as vLLM numbers fresh blocks.
  for (std::int64_t block = num_blocks - 1; block >= 0; --block)
    free_.push_back(static_cast<HostBlockId>(block));
}

HostBlockPool::Block& HostBlockPool::at(HostBlockId host) {
  LS_CHECK(index_of(host) >= 0 && static_cast<std::size_t>(index_of(host)) < blocks_.size(),
           "host block {} of {}", index_of(host), blocks_.size());
  return blocks_[host];
}

bool HostBlockPool::is_ready(const HostKey& key) const {
  const auto entry = entries_.find(key);
  return entry != entries_.end() && blocks_[entry->second].ready;
}

HostBlockId HostBlockPool::use(const HostKey& key) {
  const auto entry = entries_.find(key);
  LS_CHECK(entry != entries_.end() && at(entry->second).ready, "a missing block is used");
  Block& block = at(entry->second);
  // A pinned block has no entry in by_use_; unpin() renews its use.
  if (block.pins == 0) {
    by_use_.erase(block.used);
    allow_eviction(entry->second);
  }
  return entry->second;
}

void HostBlockPool::allow_eviction(HostBlockId host) {
  Block& block = at(host);
  block.used = ++clock_;
  by_use_.emplace(block.used, host);
}

void HostBlockPool::pin(HostBlockId host) {
  Block& block = at(host);
  LS_CHECK(block.ready, "host block {} is pinned before it is stored", index_of(host));
  if (block.pins++ == 0) by_use_.erase(block.used);
}

void HostBlockPool::unpin(HostBlockId host) {
  Block& block = at(host);
  LS_CHECK(block.pins > 0, "host block {} is not pinned", index_of(host));
  if (--block.pins == 0) allow_eviction(host);
}

std::optional<HostBlockId> HostBlockPool::take(const HostKey& key) {
  LS_CHECK(!entries_.contains(key), "a key of group {} is stored twice", key.group);
  HostBlockId host{};
  if (!free_.empty()) {
    host = free_.back();
    free_.pop_back();
  } else {
    // The smallest clock value is the least recently used block.
    if (by_use_.empty()) return std::nullopt;
    host = by_use_.begin()->second;
    by_use_.erase(by_use_.begin());
    entries_.erase(*at(host).key);
    ++num_evicted_;
  }
  // Resets ready and pins: no lookup finds the block until set_ready().
  at(host) = {.key = key};
  entries_.emplace(key, host);
  return host;
}

void HostBlockPool::set_ready(HostBlockId host) {
  Block& block = at(host);
  LS_CHECK(block.key && !block.ready, "host block {} was not to be stored", index_of(host));
  block.ready = true;
  allow_eviction(host);
}

void HostBlockPool::drop(HostBlockId host) {
  Block& block = at(host);
  LS_CHECK(block.key && !block.ready, "host block {} was not to be stored", index_of(host));
  entries_.erase(*block.key);
  block = {};
  free_.push_back(host);
}

// True if later tokens attend to the whole prefix, so that a gap anywhere ends the hit.
static bool sees_everything(const KVCacheSpec& spec) { return !is_windowed(spec.kind); }

OffloadConnector::OffloadConnector(const OffloadOptions& options, const KVCacheConfig& plan,
                                   std::int32_t num_ranks)
    : options_(options), hosts_(options.num_host_blocks), unheard_(options.async_scheduling) {
  for (const KVCacheGroupSpec& group : plan.groups) {
    specs_.push_back(group.spec);
    block_tokens_.push_back(group.spec.block_size * (is_dealt_out(group.spec) ? num_ranks : 1));
    // A hit must end at a block boundary of every group: 16 and 48 tokens give 48.
    alignment_ = std::lcm(alignment_, block_tokens_.back());
  }
}

// In a chain of hashes, the last one of a block identifies the block and all before it. Example:
// hash blocks of 16, blocks of 48 tokens: entry 1 ends at token 96 and has hash 5.
HostKey OffloadConnector::key_of(const Question& what, std::int32_t group,
                                 std::int64_t entry) const {
  const std::int64_t tokens = (entry + 1) * block_tokens_[group];
  const auto last = static_cast<std::size_t>(tokens / what.hash_block_size - 1);
  LS_CHECK(last < what.keys.size(), "hash {} of {}", last, what.keys.size());
  return {.high = what.keys[last].high, .low = what.keys[last].low, .group = group};
}

OffloadConnector::Entries OffloadConnector::needed(const Question& what, std::int32_t group,
                                                   std::int64_t last) const {
  const std::int64_t tokens = block_tokens_[group];
  const KVCacheSpec& spec = specs_[group];
  // The next token to compute; the last token is always computed here, even after a full load.
  const std::int64_t next = std::min(last, what.num_tokens - 1);
  return {std::max(what.first, first_attended(spec, next)) / tokens, last / tokens};
}

std::int64_t OffloadConnector::longest_held(const Question& what, std::int64_t most) const {
  const auto num_groups = static_cast<std::int32_t>(specs_.size());
  for (std::int32_t g = 0; g < num_groups; ++g) {
    // First shortens by the chains of full attention, which cost one pass from the left. Windows
    // are only checked at the remaining candidates.
    if (!sees_everything(specs_[g])) continue;
    const std::int64_t tokens = block_tokens_[g];
    std::int64_t entry = what.first / tokens;
    while ((entry + 1) * tokens <= most && hosts_.is_ready(key_of(what, g, entry))) ++entry;
    most = std::min(most, entry * tokens);
  }
  const auto all_hold = [&](std::int64_t last) {
    for (std::int32_t g = 0; g < num_groups; ++g) {
      const Entries entries = needed(what, g, last);
      for (std::int64_t entry = entries.begin; entry < entries.end; ++entry)
        if (!hosts_.is_ready(key_of(what, g, entry))) return false;
    }
    return true;
  };
  // From the right: the first candidate at which every group has what it reads is the longest. Each
  // candidate costs the needed entries of all groups.
  std::int64_t last = most / alignment_ * alignment_;
  while (last > what.first && !all_hold(last)) last -= alignment_;
  return last;
}

ExternalHit OffloadConnector::get_num_new_matched_tokens(const ExternalQuery& query) {
  SeededRandom& random =
      random_.try_emplace(query.request, options_.seed, query.name).first->second;
  Question& what = asked_[query.request];
  what = {.first = query.num_local_tokens,
          .last = query.num_local_tokens,
          .num_tokens = query.num_tokens,
          .is_async = random.chance(options_.async_percent),
          .keys = {query.block_keys.begin(), query.block_keys.end()},
          .hash_block_size = query.hash_block_size};
  // A hit inside a block of some group, for example after a local hit of its own granularity: no
  // load can start there, since a load fills whole blocks.
  if (what.first % alignment_ != 0) return {};
  // A load within the step leaves at least one token to compute, whose logits the step needs. A
  // longer load may cover all tokens: the engine recomputes the last one when it resumes.
  const std::int64_t hashed = std::ssize(what.keys) * what.hash_block_size;
  const std::int64_t most =
      std::min<std::int64_t>(hashed, what.is_async ? query.num_tokens : query.num_tokens - 1);
  what.last = std::max(what.first, longest_held(what, most));
  const auto external = static_cast<std::int32_t>(what.last - what.first);
  return {.num_tokens = external, .is_async = what.is_async && external > 0};
}

void OffloadConnector::update_state_after_alloc(RequestId request, std::span<const BlockId> blocks,
                                                std::int32_t num_external_tokens) {
  // Entry 0 again, also without a load: a resumed request has a new table. Blocks that the tier
  // already holds are skipped by their hash.
  num_seen_[request].assign(specs_.size(), 0);
  if (num_external_tokens == 0) return;
  SeededRandom& random = random_.at(request);
  const Question& what = asked_.at(request);
  LS_CHECK(what.last - what.first == num_external_tokens, "{} tokens were found, {} are loaded",
           what.last - what.first, num_external_tokens);
  Load& load = loads_.emplace_back();
  load.request = request;
  load.what = what;
  // A load within the step is due in the step that is being decided.
  load.due_step = step_;
  if (what.is_async) load.due_step += random.below(options_.delay_steps_max + 1);
  for (std::size_t g = 0; g < specs_.size(); ++g) {
    const auto group = static_cast<std::int32_t>(g);
    const Entries entries = needed(what, group, what.last);
    // Pinned from the allocation until carry_out(): a store of another request must not evict the
    // block in between.
    for (std::int64_t entry = entries.begin; entry < entries.end; ++entry)
      hosts_.pin(load.pinned.emplace_back(hosts_.use(key_of(what, group, entry))));
    // Loaded blocks are in the tier already.
    num_seen_[request][g] = entries.end;
  }
  // With several groups vLLM assigns a block id to no group, so no load may fail there: invariant
  // (4).
  if (specs_.size() != 1 || !random.chance(options_.failed_percent)) return;
  const Entries entries = needed(what, 0, what.last);
  if (entries.begin == entries.end) return;  // a window of one token reads nothing of a prefix
  const auto begin = entries.begin + random.below(entries.end - entries.begin);
  // From `begin` on everything is lost: a transfer that fails stops.
  for (std::int64_t entry = begin; entry < entries.end; ++entry)
    if (blocks[entry] != kNullBlock) load.lost.push_back(blocks[entry]);
}

bool OffloadConnector::request_finished(RequestId request, std::string_view) {
  asked_.erase(request);
  random_.erase(request);
  num_seen_.erase(request);
  // A load in flight keeps the blocks by itself; holding them twice would free them twice.
  if (std::ranges::find(loads_, request, &Load::request) != loads_.end()) return false;
  if (unheard_.contains(request)) return false;
  const auto is_its = [&](const Store& store) { return store.block.request == request; };
  if (std::ranges::none_of(stores_, is_its)) return false;
  // The planted defect: the blocks are freed while stores of them wait, and the stores run anyway.
  if (options_.defect == ConnectorDefect::free_send_in_flight) {
    for (Store& store : stores_)
      if (is_its(store)) store.is_guarded = false;
    return false;
  }
  finishing_.push_back(request);
  ++num_frees_delayed_;
  return true;
}

KVConnectorOutput OffloadConnector::report() {
  KVConnectorOutput report;
  for (const Load& load : loads_) {
    if (load.due_step > step_) continue;
    // The engine does not wait for a load within the step, so only its losses are reported.
    if (load.what.is_async) report.finished_recving.push_back(load.request);
    if (options_.defect != ConnectorDefect::transfer_failed_marked_ok)
      report.invalid_block_ids.insert(report.invalid_block_ids.end(), load.lost.begin(),
                                      load.lost.end());
  }
  // A finished request is reported with its last store, in the step that carries it out.
  std::erase_if(finishing_, [&](RequestId request) {
    for (const Store& store : stores_)
      if (store.block.request == request && store.due_step > step_) return false;
    report.finished_sending.push_back(request);
    return true;
  });
  unheard_.report(report.finished_recving);
  return report;
}

void OffloadConnector::plan(const DecidedStep& step, StepTransfers& transfers) {
  for (Load& load : loads_)
    if (!load.has_begun) begin(step, load, transfers);
  std::erase_if(loads_, [&](const Load& load) {
    if (load.due_step > step_) return false;
    carry_out(load, transfers);
    return true;
  });
  // After a loss the rows of later tokens are void (sim/step/transfer_step.h), and which tokens
  // these are is known only once the engine has processed the report. Nothing new is stored in such
  // a step.
  if (transfers.lost.empty())
    for (const ScheduledRequest& scheduled : step.decision.scheduled)
      take_full_blocks(step, scheduled);
  carry_out_stores(step, transfers);
  transfers.num_evicted = hosts_.num_evicted();
  transfers.num_frees_delayed = num_frees_delayed_;
  ++step_;
}

void OffloadConnector::begin(const DecidedStep& step, Load& load, StepTransfers& transfers) {
  load.has_begun = true;
  // The block tables exist only now, after the decision.
  load.blocks = blocks_of(step, load.request, load.what.first, load.what.last);
  std::erase_if(load.blocks, [&](const BlockTransfer& block) { return !is_needed(load, block); });
  for (BlockTransfer& block : load.blocks)
    block.host = hosts_.use(key_of(load.what, block.group, block.entry));
  transfers.begun.insert(transfers.begun.end(), load.blocks.begin(), load.blocks.end());
}

bool OffloadConnector::is_needed(const Load& load, const BlockTransfer& block) const {
  const Entries entries = needed(load.what, block.group, load.what.last);
  return block.entry >= entries.begin && block.entry < entries.end;
}

void OffloadConnector::carry_out(const Load& load, StepTransfers& transfers) {
  for (const HostBlockId host : load.pinned) hosts_.unpin(host);
  for (const BlockTransfer& block : load.blocks)
    if (std::ranges::find(load.lost, block.block) == load.lost.end())
      transfers.loads.push_back(block);
}

void OffloadConnector::take_full_blocks(const DecidedStep& step,
                                        const ScheduledRequest& scheduled) {
  // Scheduled tokens may include drafts, which the model may reject. Only blocks of known tokens
  // have a hash.
  const std::int64_t known = step.decisions.num_tokens(scheduled.id);
  const std::int64_t tokens =
      std::min<std::int64_t>(known, std::int64_t{scheduled.computed} + scheduled.num_tokens);
  for (std::size_t g = 0; g < specs_.size(); ++g)
    if (!take_full_blocks_of(step, scheduled.id, static_cast<std::int32_t>(g),
                             tokens / block_tokens_[g]))
      return;
}

// False: the tier has no free block. The remaining entries are processed in the next step in which
// the request is scheduled.
bool OffloadConnector::take_full_blocks_of(const DecidedStep& step, RequestId request,
                                           std::int32_t group, std::int64_t end) {
  const std::span<const BlockId> table = step.decisions.block_table(request, group);
  const auto seen = num_seen_.find(request);
  LS_CHECK(seen != num_seen_.end() && random_.contains(request),
           "request {} runs, but its connector was not queried and notified of its blocks",
           step.decisions.name(request));
  std::int64_t& entry = seen->second[group];
  // A table of another engine may be too short.
  end = std::min<std::int64_t>(end, std::ssize(table));
  // Avoids the copy of all keys in the common step that fills no block.
  if (entry >= end) return true;
  const std::span<const BlockKey> keys = step.decisions.block_keys(request);
  const Question what{.keys = {keys.begin(), keys.end()},
                      .hash_block_size = step.decisions.hash_block_size()};
  for (; entry < end; ++entry) {
    const BlockId block = table[entry];
    // A window block that was already freed.
    if (block == kNullBlock) continue;
    const HostKey key = key_of(what, group, entry);
    // Stored before, or its store is pending: one copy is enough.
    if (hosts_.contains(key)) continue;
    const auto host = hosts_.take(key);
    if (!host) return false;
    stores_.push_back(
        {.block = {.request = request,
                   .group = group,
                   .entry = static_cast<std::int32_t>(entry),
                   .block = block,
                   .host = *host,
                   .num_tokens = (entry + 1) * block_tokens_[group]},
         .due_step = step_ + random_.at(request).below(options_.delay_steps_max + 1)});
  }
  return true;
}

void OffloadConnector::carry_out_stores(const DecidedStep& step, StepTransfers& transfers) {
  const auto has_it = [&](const BlockTransfer& block) {
    const std::span<const BlockId> table = step.decisions.block_table(block.request, block.group);
    return block.entry < std::ssize(table) && table[block.entry] == block.block;
  };
  std::erase_if(stores_, [&](const Store& store) {
    // The request has freed the block: another request may write it before the store runs.
    if (store.is_guarded && !has_it(store.block)) {
      hosts_.drop(store.block.host);
      return true;
    }
    if (store.due_step > step_) return false;
    transfers.stores.push_back(store.block);
    // Ready in the step that stores: loads of the next step read after it.
    hosts_.set_ready(store.block.host);
    return true;
  });
}

PageWorkers::PageWorkers(const PageWorkerOptions& options)
    : delay_steps_max_(options.delay_steps_max),
      random_(options.seed, kHostPagesWord),
      num_workers_(static_cast<std::int32_t>(random_.between(1, 2))) {}

void PageWorkers::start_pages(const HostPageCommand& command) {
  // Copies to the host wait one step: they run after the forward pass that writes their pages.
  started_ = std::exchange(next_, {});
  for (const PageTransfer& transfer : command.transfers)
    (transfer.restores ? started_ : next_).push_back(transfer.id);
}

KVConnectorOutput PageWorkers::report() {
  KVConnectorOutput report;
  // Each worker draws its own delay, so completions of one id may arrive in different steps.
  for (const std::int64_t id : std::exchange(started_, {})) {
    report.enqueued.push_back({id, num_workers_});
    for (std::int32_t worker = 0; worker < num_workers_; ++worker)
      moving_[id].push_back(step_ + random_.between(0, delay_steps_max_));
  }
  for (auto& [id, due] : moving_) {
    const auto done = std::erase_if(due, [&](std::int64_t step) { return step <= step_; });
    // Number of workers that completed the copy in this step, not in total: TransferCount.
    if (done > 0) report.completed.push_back({id, static_cast<std::int32_t>(done)});
  }
  std::erase_if(moving_, [](const auto& transfer) { return transfer.second.empty(); });
  ++step_;
  return report;
}

}  // namespace lockstep
