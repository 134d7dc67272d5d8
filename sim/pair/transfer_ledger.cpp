#include "sim/pair/transfer_ledger.h"

#include <fmt/core.h>

#include <algorithm>
#include <memory>

#include "base/check.h"
#include "reference/memory/memory_model.h"
#include "sim/step/backend_config.h"
#include "sim/step/model_step.h"

namespace lockstep {

HoldsContents content_id_payloads(std::span<const KVCacheGroupSpec> groups) {
  std::vector<std::int64_t> block_sizes;
  for (const KVCacheGroupSpec& group : groups) block_sizes.push_back(group.spec.block_size);
  return [block_sizes](std::int32_t group, std::span<const ContentId> contents,
                       std::span<const std::uint8_t> bytes) {
    // A payload always covers the whole block, also if only its first slots hold tokens.
    if (std::ssize(bytes) != block_sizes[group] * 8) return false;
    for (std::size_t slot = 0; slot < contents.size(); ++slot)
      for (std::size_t byte = 0; byte < 8; ++byte)
        if (bytes[slot * 8 + byte] != static_cast<std::uint8_t>(contents[slot] >> (8 * byte)))
          return false;
    return true;
  };
}

namespace {

// Checks one rank's part of a block. The memory model writes the expected KV entries over the
// received bytes. If the bytes stay equal, they already held these entries, and padding and slots
// after the last token are not compared.
struct DrawnRank {
  MemoryModel model;
  WriterId writer;

  bool holds(std::int32_t group, std::span<const ContentId> contents,
             std::span<const std::uint8_t> bytes) {
    model.begin_step(0);
    model.fill_host_block(group, HostBlockId{0}, 0, contents, writer, bytes);
    const auto drawn = std::span(*model.host_block(HostBlockId{0}).bytes).first(bytes.size());
    return std::ranges::equal(drawn, bytes);
  }
};

}  // namespace

// Each rank has its own model, since each stores its own heads. A host tier of one block is enough:
// one block is checked at a time.
Result<HoldsContents> page_payloads(const BackendConfig& config) {
  const auto ranks = std::make_shared<std::vector<DrawnRank>>();
  BackendConfig of_one_block = config;
  of_one_block.num_host_blocks = 1;
  for (std::int32_t rank = 0; rank < num_ranks(config); ++rank) {
    LS_ASSIGN_OR_RETURN(auto one, rank_model(of_one_block, rank));
    ranks->push_back({std::move(one.model), {}});
    ranks->back().writer = ranks->back().model.add_writer("peer");
  }
  return [ranks](std::int32_t group, std::span<const ContentId> contents,
                 std::span<const std::uint8_t> bytes) {
    std::size_t begin = 0;
    for (DrawnRank& rank : *ranks) {
      const auto size = static_cast<std::size_t>(rank.model.host_bytes_of(group));
      if (begin + size > bytes.size() || !rank.holds(group, contents, bytes.subspan(begin, size)))
        return false;
      begin += size;
    }
    // Bytes after the last rank's part are an error of the sender.
    return begin == bytes.size();
  };
}

// Only the first finding counts: what follows is often its consequence.
void TransferLedger::found(std::string check, std::string what) {
  if (!finding_) finding_ = {std::move(check), std::move(what)};
}

std::string TransferLedger::name_of(TransferId transfer) const {
  const auto journey = journeys_.find(transfer.request);
  return fmt::format("{} (attempt {})",
                     journey == journeys_.end() ? "an unknown request" : journey->second.name,
                     transfer.attempt);
}

void TransferLedger::arrived(std::uint64_t request, const std::string& name) {
  const bool is_first = journeys_.emplace(request, Journey{name, false}).second;
  LS_CHECK(is_first, "request {} arrives twice", request);
}

void TransferLedger::ended(std::uint64_t request, RequestEnd how) {
  Journey& journey = journeys_.at(request);
  if (journey.has_ended)
    found("transfer.ended_twice", fmt::format("{} ends a second time, now {}", journey.name,
                                              how == RequestEnd::finished  ? "finished"
                                              : how == RequestEnd::aborted ? "aborted"
                                                                           : "refused"));
  journey.has_ended = true;
}

// Two holds of one attempt would leave the release of one of them unexplained.
void TransferLedger::held(TransferId transfer, std::int64_t now_ns,
                          std::vector<ContentId> contents) {
  const Sending sending{
      .contents = std::move(contents), .since_ns = now_ns, .is_held = true, .is_done = false};
  if (!sendings_.emplace(transfer, sending).second)
    found("transfer.held_twice", fmt::format("{} is kept for sending twice", name_of(transfer)));
}

// Example: block_size 16, 40 contents, entry 2: contents 32 to 39, 8 of 16 slots.
std::span<const ContentId> TransferLedger::contents_at(const Sending& sending, BlockPlace place,
                                                       std::int64_t last) const {
  const std::int64_t size = groups_[place.group].spec.block_size;
  const std::int64_t begin = place.index * size;
  const std::int64_t end = std::min({last, begin + size, std::ssize(sending.contents)});
  if (begin >= end) return {};
  return std::span(sending.contents).subspan(begin, end - begin);
}

std::span<const ContentId> TransferLedger::contents(TransferId transfer, BlockPlace place) const {
  const auto sending = sendings_.find(transfer);
  if (sending == sendings_.end()) return {};
  return contents_at(sending->second, place, std::ssize(sending->second.contents));
}

void TransferLedger::read(TransferId transfer, BlockPlace place,
                          std::span<const std::uint8_t> bytes) {
  const auto sending = sendings_.find(transfer);
  if (sending == sendings_.end() || !sending->second.is_held)
    return found("transfer.read_free",
                 fmt::format("block {} of group {} of {} is read, but is not held for it",
                             place.index, place.group, name_of(transfer)));
  // A block may be held and still be wrong: overwritten by another request, or not yet written.
  if (!holds_contents_(place.group, contents(transfer, place), bytes))
    found("transfer.read_content",
          fmt::format(
              "block {} of group {} of {} does not hold what was computed for it when it is read",
              place.index, place.group, name_of(transfer)));
}

void TransferLedger::given_back(TransferId transfer, std::int64_t now_ns) {
  const auto sending = sendings_.find(transfer);
  if (sending == sendings_.end() || !sending->second.is_held)
    return found("transfer.freed_twice",
                 fmt::format("the blocks of {} are freed, but are not held", name_of(transfer)));
  // Before the load is complete only the end of the lease may free the blocks: the decode engine
  // may be gone.
  if (!sending->second.is_done && now_ns < sending->second.since_ns + lease_ns_)
    found("transfer.freed_early",
          fmt::format("the blocks of {} are freed while the decode engine may still read them",
                      name_of(transfer)));
  sending->second.is_held = false;
  forget_if_over(transfer);
}

// A load without held blocks is also an error: its reads cannot be answered.
void TransferLedger::loading(TransferId transfer, std::int32_t last,
                             const std::vector<LoadPiece>& pieces) {
  Loading load{.last = last, .missing = {}, .there = {}};
  for (const LoadPiece& piece : pieces) load.missing.emplace(piece.place, piece.block);
  if (!loadings_.emplace(transfer, std::move(load)).second || !sendings_.contains(transfer))
    found("transfer.loaded_twice",
          fmt::format("{} is loaded twice, or was never prefilled", name_of(transfer)));
}

// The checks go from the transfer to the bytes, so that the finding names the first cause: a late
// duplicate is late, not wrong.
void TransferLedger::delivered(TransferId transfer, BlockPlace place, BlockId block,
                               std::span<const std::uint8_t> bytes) {
  ++num_deliveries_;
  const auto where = [&] {
    return fmt::format("block {} of group {} of {}, written to block {}", place.index, place.group,
                       name_of(transfer), index_of(block));
  };
  const auto load = loadings_.find(transfer);
  const auto sending = sendings_.find(transfer);
  if (load == loadings_.end() || sending == sendings_.end())
    return found("transfer.delivered_late", where() + ", arrives when no load of it is open");
  if (load->second.there.contains(place))
    return found("transfer.delivered_twice", where() + ", was delivered before");
  auto piece = load->second.missing.find(place);
  if (piece == load->second.missing.end() || piece->second != block)
    return found("transfer.wrong_place", where() + ", was not to be written there");
  if (!holds_contents_(place.group, contents_at(sending->second, place, load->second.last), bytes))
    found("transfer.content", where() + ", is not what was computed for it");
  load->second.there.insert(load->second.missing.extract(piece));
  sending->second.is_done |= load->second.missing.empty();
}

void TransferLedger::load_over(TransferId transfer, std::span<const BlockId> invalid,
                               bool request_has_left) {
  const auto load = loadings_.find(transfer);
  if (load == loadings_.end())
    return found("transfer.over_twice",
                 fmt::format("the load of {} completes, and none is open", name_of(transfer)));
  // A block may be missing if the report names it invalid, or if its request has ended and never
  // reads it.
  for (const auto& [place, block] : load->second.missing) {
    if (request_has_left || std::ranges::find(invalid, block) != invalid.end()) continue;
    found("transfer.incomplete",
          fmt::format("the load of {} counts as complete, and block {} of group {} never arrived",
                      name_of(transfer), place.index, place.group));
  }
  loadings_.erase(load);
  not_needed(transfer);
}

void TransferLedger::not_needed(TransferId transfer) {
  const auto sending = sendings_.find(transfer);
  if (sending == sendings_.end()) return;
  sending->second.is_done = true;
  forget_if_over(transfer);
}

void TransferLedger::forget_if_over(TransferId transfer) {
  const Sending& sending = sendings_.at(transfer);
  if (sending.is_done && !sending.is_held && !loadings_.contains(transfer))
    sendings_.erase(transfer);
}

// Requests come first: a request that never ended explains its open load and its held blocks.
void TransferLedger::finish() {
  for (const auto& [request, journey] : journeys_)
    if (!journey.has_ended)
      found("transfer.request_lost",
            fmt::format("{} neither finished nor was refused", journey.name));
  for (const auto& [transfer, load] : loadings_)
    found("transfer.load_open", fmt::format("the load of {} never ended", name_of(transfer)));
  for (const auto& [transfer, sending] : sendings_)
    if (sending.is_held)
      found("transfer.never_freed",
            fmt::format("the blocks of {} were never freed", name_of(transfer)));
}

ExternalHit WatchedReceiver::get_num_new_matched_tokens(const ExternalQuery& query) {
  asked_[query.request] = {std::string(query.name), query.num_tokens, query.num_local_tokens};
  return receiver_.get_num_new_matched_tokens(query);
}

void WatchedReceiver::update_state_after_alloc(RequestId request, std::span<const BlockId> blocks,
                                               std::int32_t num_external_tokens) {
  if (const auto asked = asked_.extract(request))
    begin(request, asked.mapped(), num_external_tokens);
  receiver_.update_state_after_alloc(request, blocks, num_external_tokens);
}

bool WatchedReceiver::request_finished(RequestId request, std::string_view name) {
  asked_.erase(request);
  return receiver_.request_finished(request, name);
}

void WatchedReceiver::begin(RequestId request, const Question& asked,
                            std::int32_t num_external_tokens) {
  const TransferId transfer = transfer_of_(asked.name);
  if (num_external_tokens == 0) return ledger_.not_needed(transfer);
  LS_CHECK(scheduler_ != nullptr, "{} loads before its block table is known", asked.name);
  const std::int32_t first = asked.num_local_tokens;
  const std::int32_t last = first + num_external_tokens;
  std::vector<LoadPiece> pieces;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const auto table = scheduler_->block_table(request, static_cast<std::int32_t>(g));
    const auto size = static_cast<std::int32_t>(groups_[g].spec.block_size);
    const std::int64_t needed =
        first_attended(groups_[g].spec, std::min(last, asked.num_tokens - 1));
    // Derives the required blocks token by token, deliberately in another way than pieces_of_load()
    // in transfer_receiver.cpp. Blocks before the window of the next computed token are not needed.
    for (std::int32_t p = first; p < last; ++p) {
      const BlockId block = table[p / size];
      const BlockPlace place{static_cast<std::int32_t>(g), p / size};
      if (p / size < needed / size || block == kNullBlock) continue;
      if (pieces.empty() || pieces.back().place != place) pieces.push_back({place, block});
    }
  }
  ledger_.loading(transfer, last, pieces);
  loading_[request] = transfer;
}

void WatchedReceiver::report(KVConnectorOutput& report) {
  receiver_.report(report);
  const std::vector<HeldRequest> held = scheduler_->held();
  for (const RequestId id : report.finished_recving) {
    const auto load = loading_.find(id);
    LS_CHECK(load != loading_.end(), "request {} has received what it never loaded", index_of(id));
    // A request that has ended with an open load holds its blocks until this report.
    const bool has_left = std::ranges::find(held, id, &HeldRequest::id) != held.end();
    ledger_.load_over(load->second, report.invalid_block_ids, has_left);
    loading_.erase(load);
  }
}

}  // namespace lockstep
