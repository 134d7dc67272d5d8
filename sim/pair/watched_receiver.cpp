#include "sim/pair/watched_receiver.h"

#include <algorithm>

#include "base/check.h"
#include "sim/step/model_step.h"

namespace lockstep {

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
    for (std::int32_t p = first; p < last; ++p) {
      const BlockId block = table[static_cast<std::size_t>(p / size)];
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
    const bool has_left = std::ranges::find(held, id, &HeldRequest::id) != held.end();
    ledger_.load_over(load->second, report.invalid_block_ids, has_left);
    loading_.erase(load);
  }
}

}  // namespace lockstep
