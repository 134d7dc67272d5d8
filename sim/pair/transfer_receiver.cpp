#include "sim/pair/transfer_receiver.h"

#include <algorithm>

#include "base/check.h"
#include "reference/plan/page_size.h"
#include "sim/step/model_step.h"

namespace lockstep {

StagedLoads::StagedLoads(std::int64_t capacity, TransferDefect defect)
    : capacity_(static_cast<std::size_t>(capacity)), defect_(defect) {
  LS_CHECK(capacity > 0, "a staging buffer of {} blocks", capacity);
}

void StagedLoads::add(RequestId request, std::vector<ArrivedBlock> blocks,
                      std::vector<BlockId> invalid) {
  waiting_.push_back({request, std::move(blocks), std::move(invalid), 0});
}

bool StagedLoads::drop(RequestId request) {
  return std::erase_if(waiting_, [&](const Waiting& load) { return load.request == request; }) > 0;
}

// A load may take several steps: 100 blocks through a buffer of 64 take two, and the report follows
// with the second one. The next load may use the rest of that buffer.
void StagedLoads::report(KVConnectorOutput& report) {
  LS_CHECK(chosen_.empty(), "{} blocks of the last step were never planned", chosen_.size());
  while (!waiting_.empty()) {
    Waiting& load = waiting_.front();
    for (; load.num_loaded < load.blocks.size() && chosen_.size() < capacity_; ++load.num_loaded)
      chosen_.push_back(std::move(load.blocks[load.num_loaded]));
    if (load.num_loaded < load.blocks.size()) return;
    report.finished_recving.push_back(load.request);
    report.invalid_block_ids.insert(report.invalid_block_ids.end(), load.invalid.begin(),
                                    load.invalid.end());
    waiting_.pop_front();
  }
}

void StagedLoads::plan(const DecidedStep&, StepTransfers& transfers) {
  transfers.begun = std::exchange(begun_, {});
  for (std::size_t host = 0; host < chosen_.size(); ++host) {
    auto& [block, bytes] = chosen_[host];
    block.host = HostBlockId{static_cast<std::int32_t>(host)};
    transfers.brought.push_back(block);
    transfers.loads.push_back(block);
    transfers.payloads.push_back(seen_by_loads(host, std::move(bytes)));
  }
  chosen_.clear();
}

// Returns the content of the buffer when the loads run. With a planted defect they run before the
// bytes arrive, and read those of the previous step.
std::vector<std::uint8_t> StagedLoads::seen_by_loads(std::size_t host,
                                                     std::vector<std::uint8_t> bytes) {
  if (defect_ != TransferDefect::load_before_arrival) return bytes;
  written_.resize(std::max(written_.size(), host + 1));
  std::vector<std::uint8_t> before = written_[host];
  before.resize(bytes.size());
  written_[host] = std::move(bytes);
  return before;
}

// Returns the table entries that a load of tokens [first, last) must fill before the next token can
// be computed. Entries before a window are left out, as are null blocks, which hold no tokens.
// Example: block_size 16, window 32, tokens 0 to 99 loaded: the next token, 100, reads from 69 on,
// so only entries 4 to 6 are loaded. vLLM clips to the last blocks instead (nixl/scheduler.py,
// get_sw_clipped_blocks()).
static std::vector<LoadPiece> pieces_of_load(std::span<const KVCacheGroupSpec> groups,
                                             const Scheduler& scheduler, RequestId request,
                                             std::int32_t first, std::int32_t last,
                                             std::int32_t num_tokens) {
  // The engine computes the last token of a request even if it was loaded, so the window of that
  // token must be complete.
  const std::int32_t next = std::min(last, num_tokens - 1);
  std::vector<LoadPiece> pieces;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const KVCacheSpec& spec = groups[g].spec;
    const auto group = static_cast<std::int32_t>(g);
    const auto table = scheduler.block_table(request, group);
    const std::int64_t begin = std::max<std::int64_t>(first, first_attended(spec, next));
    for (std::int64_t i = begin / spec.block_size; i < cdiv(last, spec.block_size); ++i) {
      LS_CHECK(i < std::ssize(table), "a load needs entry {} of a table of {}", i, table.size());
      const BlockId block = table[i];
      if (block != kNullBlock) pieces.push_back({{group, static_cast<std::int32_t>(i)}, block});
    }
  }
  return pieces;
}

BlockTransfer TransferReceiver::transfer_of(const Load& load, BlockPlace place, BlockId block) {
  return {.request = load.request,
          .group = place.group,
          .entry = place.index,
          .block = block,
          .num_tokens = load.num_tokens};
}

bool can_compute_lost_blocks(std::span<const KVCacheGroupSpec> groups) {
  const CacheKind kind = groups.front().spec.kind;
  return groups.size() == 1 && attends_to_all(kind);
}

ExternalHit TransferReceiver::get_num_new_matched_tokens(const ExternalQuery& query) {
  asked_[query.request] = query.name;
  const auto found = offers_.find(query.name);
  if (found == offers_.end()) return {};
  // The load itself starts at the admission. It needs both counts of the last query.
  Offer& offer = found->second;
  offer.num_local_tokens = query.num_local_tokens;
  offer.num_request_tokens = query.num_tokens;
  const std::int32_t count = std::min(offer.num_tokens, query.num_tokens) - query.num_local_tokens;
  if (count <= 0) return {};
  return {.num_tokens = count, .is_async = true};
}

void TransferReceiver::update_state_after_alloc(RequestId request, std::span<const BlockId>,
                                                std::int32_t num_external_tokens) {
  // The engine also calls this after a load has completed. That admission has no new query: the
  // load's blocks count as local.
  const auto asked = asked_.find(request);
  if (asked == asked_.end()) return;
  const std::string name = std::move(asked->second);
  asked_.erase(asked);
  const auto found = offers_.find(name);
  if (found == offers_.end()) return;
  const Offer offer = found->second;
  offers_.erase(found);
  if (num_external_tokens == 0) {
    ++link_.counts.full_hits;
    release(offer.transfer);
    return;
  }
  LS_CHECK(scheduler_ != nullptr, "{} loads before the receiver knows any block table", name);
  ++link_.counts.loads;
  const std::int32_t last = offer.num_local_tokens + num_external_tokens;
  Load load{.request = request, .name = name, .num_tokens = last, .missing = {}, .there = {}};
  for (const LoadPiece& piece : pieces_of_load(
           groups_, *scheduler_, request, offer.num_local_tokens, last, offer.num_request_tokens)) {
    // `begun` informs the backends that the block now belongs to this request, before any load.
    load.missing.insert({piece.place, piece.block});
    staged_.begin(transfer_of(load, piece.place, piece.block));
  }
  LS_CHECK(!load.missing.empty(), "a load of {} tokens of {} brings no block", num_external_tokens,
           name);
  load.num_left = std::ssize(load.missing);
  const auto opened = loads_.emplace(offer.transfer, std::move(load)).first;
  read_missing(opened->first, opened->second);
}

// One message per block. The retry repeats only blocks that have not arrived.
void TransferReceiver::read_missing(TransferId transfer, Load& load) {
  for (const auto& [place, block] : load.missing)
    link_.say(
        now_ns_,
        {.kind = TransferMessage::Kind::read, .transfer = transfer, .place = place, .bytes = {}});
  const auto count = std::ssize(load.missing);
  (load.tries == 0 ? link_.counts.reads : link_.counts.reads_again) += count;
  load.retry_ns = link_.next_try_ns(now_ns_, load.tries++);
}

// `gone` means that the lease has expired: a load cannot continue after it.
void TransferReceiver::take(const TransferMessage& message) {
  const auto load = loads_.find(message.transfer);
  if (message.kind == TransferMessage::Kind::released)
    releases_.erase(message.transfer);
  else if (load == loads_.end())
    ++link_.counts.stale;
  else if (message.kind == TransferMessage::Kind::gone)
    close(load, true);
  else if (message.kind == TransferMessage::Kind::block)
    take_block(message);
  else
    ++link_.counts.stale;  // not a message to a decode engine
}

void TransferReceiver::take_block(const TransferMessage& message) {
  const auto found = loads_.find(message.transfer);
  Load& load = found->second;
  auto piece = load.missing.find(message.place);
  if (piece == load.missing.end()) {
    ++link_.counts.duplicates;
    if (link_.defect != TransferDefect::delivery_twice) return;
    const BlockId block = load.there.at(message.place).block.block;
    // The planted defect applies and counts the duplicate, so the load may close with a block
    // missing.
    take_block_(message.transfer, message.place, block, message.bytes);
  } else {
    take_block_(message.transfer, message.place, piece->second, message.bytes);
    ++link_.counts.blocks_received;
    load.there[message.place] = {transfer_of(load, message.place, piece->second), message.bytes};
    load.missing.erase(piece);
  }
  // Any arrival resets the count of unanswered reads: a slow network is not a dead peer.
  load.tries = 1;
  load.retry_ns = link_.next_try_ns(now_ns_, 0);
  if (--load.num_left == 0) close(found, false);
}

// Ends a load on the network. A successful one is released at once, because its blocks have all
// arrived. A failed one is released with its report, when the engine no longer counts it as open.
void TransferReceiver::close(Loads::iterator load, bool has_failed) {
  const TransferId transfer = load->first;
  const Load over = std::move(load->second);
  loads_.erase(load);
  if (!has_failed) {
    release(transfer);
    return stage(over, {});
  }
  ++link_.counts.loads_failed;
  link_.counts.blocks_lost += std::ssize(over.missing);
  given_up_[over.request] = transfer;
  if (link_.defect == TransferDefect::recv_failed_marked_ok) {
    stage(over, {});
  } else if (can_compute_lost_blocks(groups_)) {
    std::vector<BlockId> invalid;
    for (const auto& [place, block] : over.missing) invalid.push_back(block);
    stage(over, std::move(invalid));
  } else {
    failed_.push_back(over.name);
    cancelled_.insert(over.request);
  }
}

void TransferReceiver::stage(const Load& load, std::vector<BlockId> invalid) {
  std::vector<ArrivedBlock> blocks;
  for (const auto& [place, arrived] : load.there) blocks.push_back(arrived);
  staged_.add(load.request, std::move(blocks), std::move(invalid));
}

void TransferReceiver::withdraw(std::string_view name) {
  const auto offer = offers_.find(name);
  if (offer == offers_.end()) return;
  release(offer->second.transfer);
  offers_.erase(offer);
}

bool TransferReceiver::request_finished(RequestId request, std::string_view name) {
  asked_.erase(request);
  withdraw(name);
  // A request may end while its load is open, or after the load failed or arrived but before a step
  // loaded it. Each case needs its report in finished_recving, which frees the blocks that the
  // engine keeps for the load.
  const auto load =
      std::ranges::find(loads_, request, [](const auto& entry) { return entry.second.request; });
  if (load != loads_.end()) {
    given_up_[request] = load->first;
    loads_.erase(load);
    received_.push_back(request);
  } else if (cancelled_.erase(request) > 0 || staged_.drop(request)) {
    received_.push_back(request);
  }
  return false;
}

void TransferReceiver::release(TransferId transfer) {
  ++link_.counts.releases;
  say_release(transfer, releases_[transfer]);
}

void TransferReceiver::say_release(TransferId transfer, Release& release) {
  link_.say(
      now_ns_,
      {.kind = TransferMessage::Kind::release, .transfer = transfer, .place = {}, .bytes = {}});
  release.retry_ns = link_.next_try_ns(now_ns_, release.tries++);
}

void TransferReceiver::at(std::int64_t now_ns) {
  now_ns_ = now_ns;
  // close() erases its load, so the iterator advances first.
  for (auto load = loads_.begin(); load != loads_.end();) {
    const auto next = std::next(load);
    if (load->second.retry_ns <= now_ns) {
      if (load->second.tries > link_.times.retries_max)
        close(load, true);
      else
        read_missing(load->first, load->second);
    }
    load = next;
  }
  std::erase_if(releases_, [&](const auto& entry) {
    const Release& release = entry.second;  // the peer's lease ends it
    return release.retry_ns <= now_ns && release.tries > link_.times.retries_max;
  });
  for (auto& [transfer, release] : releases_) {
    if (release.retry_ns > now_ns) continue;
    ++link_.counts.releases_again;
    say_release(transfer, release);
  }
}

std::optional<std::int64_t> TransferReceiver::next_timer_ns() const {
  std::optional<std::int64_t> next;
  for (const auto& [transfer, load] : loads_) take_sooner(next, load.retry_ns);
  for (const auto& [transfer, release] : releases_) take_sooner(next, release.retry_ns);
  return next;
}

void TransferReceiver::report(KVConnectorOutput& report) {
  report.finished_recving.insert(report.finished_recving.end(), received_.begin(), received_.end());
  received_.clear();
  staged_.report(report);
  for (const RequestId request : report.finished_recving)
    if (const auto transfer = given_up_.extract(request)) release(transfer.mapped());
}

// Holds the blocks of a prefilled request until their release. Requests that no decode engine
// reads, such as aborted ones, free their blocks at once.
bool TransferSender::request_finished(RequestId request, std::string_view name) {
  const auto expected = expected_.find(name);
  if (expected == expected_.end()) return false;
  LS_CHECK(scheduler_ != nullptr, "{} finishes before the sender knows any block table", name);
  Held held{
      .request = request, .num_tokens = scheduler_->num_computed_tokens(request), .tables = {}};
  for (std::int32_t g = 0; g < num_groups_; ++g) {
    const auto table = scheduler_->block_table(request, g);
    held.tables.emplace_back(table.begin(), table.end());
  }
  const bool is_first = held_.emplace(expected->second, std::move(held)).second;
  LS_CHECK(is_first, "transfer {}.{} is held twice", expected->second.request,
           expected->second.attempt);
  expected_.erase(expected);
  ++num_frees_delayed_;
  return true;
}

// Finds the held blocks of a transfer. A planted defect accepts any attempt of the request.
std::map<TransferId, TransferSender::Held>::iterator TransferSender::find(TransferId transfer) {
  const auto exact = held_.find(transfer);
  if (exact != held_.end() || link_.defect != TransferDefect::completion_stale) return exact;
  const auto later = held_.lower_bound({transfer.request, 0});
  return later != held_.end() && later->first.request == transfer.request ? later : held_.end();
}

void TransferSender::take(const TransferMessage& message) {
  if (message.kind == TransferMessage::Kind::read)
    answer_read(message);
  else if (message.kind == TransferMessage::Kind::release)
    release(message);
  else
    ++link_.counts.stale;  // not a message to a prefill engine
}

// Queues a requested block for the next step. A receiver only reads entries that its request needs,
// and the sender holds all of these, so a read of a null block is an error of the protocol. A
// repeated read of a queued block is dropped: one answer serves both.
void TransferSender::answer_read(const TransferMessage& message) {
  const Asked asked{message.transfer, message.place};
  const auto found = held_.find(message.transfer);
  if (found == held_.end()) return say_gone(asked);
  Held& held = found->second;
  held.expires_ns = now_ns_ + link_.times.lease_ns;
  const auto [group, index] = message.place;
  const std::vector<BlockId>& table = held.tables.at(static_cast<std::size_t>(group));
  LS_CHECK(index >= 0 && index < std::ssize(table), "entry {} of a table of {} is read", index,
           table.size());
  LS_CHECK(table[index] != kNullBlock, "entry {} of group {} is read, where nothing is kept", index,
           group);
  if (std::ranges::find(asked_, asked) == asked_.end()) asked_.push_back(asked);
}

void TransferSender::say_gone(const Asked& asked) {
  ++link_.counts.gone;
  link_.say(now_ns_, {.kind = TransferMessage::Kind::gone,
                      .transfer = asked.transfer,
                      .place = asked.place,
                      .bytes = {}});
}

// Blocks may be released between the request and this step. They are answered with `gone`, because
// a new owner may already have written them.
void TransferSender::plan(const DecidedStep&, StepTransfers& transfers) {
  LS_CHECK(staged_.empty(), "{} blocks of the last step were never taken", staged_.size());
  std::size_t num_taken = 0;
  for (; num_taken < asked_.size() && std::ssize(staged_) < staging_blocks_; ++num_taken) {
    const Asked& asked = asked_[num_taken];
    const auto held = held_.find(asked.transfer);
    if (held == held_.end()) {
      say_gone(asked);
      continue;
    }
    const auto& table = held->second.tables.at(static_cast<std::size_t>(asked.place.group));
    const BlockTransfer store{.request = held->second.request,
                              .group = asked.place.group,
                              .entry = asked.place.index,
                              .block = table.at(static_cast<std::size_t>(asked.place.index)),
                              .host = HostBlockId{static_cast<std::int32_t>(staged_.size())},
                              .num_tokens = held->second.num_tokens};
    Staged& staged = staged_.emplace_back(Staged{asked, store, {}});
    if (link_.defect == TransferDefect::stage_read_early)
      staged.read_early = read_block_(asked.transfer, asked.place, store);
    transfers.stores.push_back(store);
  }
  asked_.erase(asked_.begin(), asked_.begin() + static_cast<std::ptrdiff_t>(num_taken));
  // A running total, as StepTransfers requires.
  transfers.num_frees_delayed = num_frees_delayed_;
}

Result<void> TransferSender::take_staged(std::int64_t end_ns) {
  for (auto& [transfer, held] : held_)
    if (held.expires_ns == kNoLease) held.expires_ns = end_ns + link_.times.lease_ns;
  for (Staged& staged : std::exchange(staged_, {})) {
    const auto& [transfer, place] = staged.what;
    LS_ASSIGN_OR_RETURN(auto bytes, staged.read_early ? std::move(*staged.read_early)
                                                      : read_block_(transfer, place, staged.store));
    leaving_.push_back({end_ns,
                        {.kind = TransferMessage::Kind::block,
                         .transfer = transfer,
                         .place = place,
                         .bytes = std::move(bytes)}});
  }
  return {};
}

// Sends a block. The planted defect frees the request's blocks with the last entry of a table,
// although no read has confirmed them.
void TransferSender::say_block(const TransferMessage& message) {
  ++link_.counts.blocks_sent;
  link_.say(now_ns_, message);
  const auto found = held_.find(message.transfer);
  if (link_.defect != TransferDefect::send_freed_early || found == held_.end()) return;
  Held& held = found->second;
  const auto& table = held.tables.at(static_cast<std::size_t>(message.place.group));
  if (message.place.index + 1 != std::ssize(table) || held.is_free) return;
  held.is_free = true;
  sent_.emplace_back(message.transfer, held.request);
}

// Answers every release, also of unknown transfers: the first answer may be lost, and the receiver
// repeats the message until one arrives.
void TransferSender::release(const TransferMessage& message) {
  const auto found = find(message.transfer);
  if (found != held_.end()) {
    if (!found->second.is_free) sent_.emplace_back(found->first, found->second.request);
    held_.erase(found);
  } else {
    ++link_.counts.stale;
  }
  link_.say(now_ns_, {.kind = TransferMessage::Kind::released,
                      .transfer = message.transfer,
                      .place = {},
                      .bytes = {}});
}

void TransferSender::at(std::int64_t now_ns) {
  now_ns_ = now_ns;
  // Blocks leave before leases expire, so that a block staged in time is sent.
  std::erase_if(leaving_, [&](const Outgoing& leaving) {
    if (leaving.at_ns > now_ns) return false;
    say_block(leaving.message);
    return true;
  });
  std::erase_if(held_, [&](const auto& entry) {
    const auto& [transfer, held] = entry;
    if (held.expires_ns > now_ns) return false;
    ++link_.counts.leases_expired;
    if (!held.is_free) sent_.emplace_back(transfer, held.request);
    return true;
  });
}

std::optional<std::int64_t> TransferSender::next_timer_ns() const {
  std::optional<std::int64_t> next;
  for (const auto& [transfer, held] : held_) take_sooner(next, held.expires_ns);
  for (const Outgoing& leaving : leaving_) take_sooner(next, leaving.at_ns);
  return next;
}

void TransferSender::report(KVConnectorOutput& report) {
  for (const auto& [transfer, request] : sent_) {
    report.finished_sending.push_back(request);
    freed_.push_back(transfer);
  }
  sent_.clear();
}

}  // namespace lockstep
