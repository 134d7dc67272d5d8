// What a drafter of EAGLE or MTP writes and reads. Its row of a token is made of the tokens behind
// it, too: of one, or with several modules of as many as there are modules (vllm/v1/worker/gpu/
// spec_decode/multi_module_mtp/speculator.py).
#include <fmt/core.h>

#include <algorithm>

#include "properties/audit/audit_impl.h"

namespace lockstep {

std::int32_t hash_lookahead_of(const RecordingHeader& header) {
  if (header.connector) return 0;
  const EngineConfig& config = header.options.config;
  if (config.num_hash_lookahead_tokens != kEngineHashLookahead)
    return config.num_hash_lookahead_tokens;
  const EngineProfile* profile = find_engine_profile(header.engine.profile());
  return profile == nullptr ? 0 : hash_lookahead_of(config, *profile);
}

// Tokens before the row that the drafter runs again: with several modules, rows of theirs were made
// of drafts, and more than one of those was rejected.
static std::int32_t num_run_again(const AuditRow& row, std::int32_t num_modules,
                                  std::int32_t computed) {
  const std::int32_t num_rejected = row.last - computed;
  return num_modules > 1 ? std::max(0, num_rejected - 1) : 0;
}

// With the step's output the tokens behind are known of every token that stands, but for the last
// ones: their rows are made of drafts, and the next step says whether those stand.
void Auditor::Impl::finish_draft_rows(const AuditRow& row) {
  const AuditedRequest& request = *row.request;
  const auto num_known = static_cast<std::int32_t>(request.contents.size());
  const std::int32_t again = num_run_again(row, hash_lookahead_, request.computed);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (!keeps_tokens(groups_[g].spec)) continue;
    const auto settle = [&](std::int32_t position, bool is_made_now) {
      const BlockId block = block_of(request, g, position);
      if (block == kNullBlock) return;
      const LedgerSlot slot = ledger_.read(block, position % block_size(g));
      if (!is_made_now && slot.next_content != kDraftBehind) return;
      const std::int32_t last = position + hash_lookahead_;
      // A row that is not made again is right if all its drafts were accepted: the token sampled
      // last, at `computed`, was none.
      const bool is_known =
          last < (is_made_now ? num_known : std::min(num_known, request.computed));
      ledger_.set_behind(block, position % block_size(g),
                         is_known      ? request.contents[static_cast<std::size_t>(last)]
                         : is_made_now ? kDraftBehind
                                       : kWrongDraftBehind);
    };
    const std::int32_t first_open = std::max(row.num_hit, row.first - hash_lookahead_ + 1);
    for (std::int32_t p = first_open; p < row.first - again; ++p) settle(p, false);
    for (std::int32_t p = std::max(0, row.first - again); p < request.computed; ++p)
      settle(p, true);
  }
}

// Before its last tokens a hit agrees in those behind as in all. A window that is computed again
// has no rows of it, and the others go on to its end.
void Auditor::Impl::read_draft_rows(const AuditRow& row) {
  const AuditedRequest& request = *row.request;
  const std::int32_t end = row.num_hit == 0 ? 0 : row.num_hit + num_replayed_;
  for (std::int32_t p = std::max(0, end - hash_lookahead_); p < end; ++p) {
    const std::int32_t last = p + hash_lookahead_;
    if (last >= std::ssize(request.contents)) return;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      const KVCacheSpec& spec = groups_[g].spec;
      if (!keeps_tokens(spec) || spec.bounded_replay || p < first_read(g, end)) continue;
      const BlockId block = block_of(request, g, p);
      if (block == kNullBlock) continue;
      const LedgerSlot slot = ledger_.read(block, p % block_size(g));
      if (slot.next_content == request.contents[static_cast<std::size_t>(last)]) continue;
      const bool is_less = slot.next_content <= kWrongDraftBehind;
      report(AuditRule::draft_read, request, g, p, block,
             fmt::format("a hit ends with token {} in slot {} of block {}, which holds {} and was "
                         "drafted from with {} behind it than here",
                         p, p % block_size(g), index_of(block), holds(slot, block),
                         is_less ? "less" : "another token"));
    }
  }
}

// The tokens that are run again have a window too, which begins before the row's.
void Auditor::Impl::read_drafter_window(const AuditRow& row) {
  const AuditedRequest& request = *row.request;
  const std::int32_t again = num_run_again(row, hash_lookahead_, request.computed);
  if (again == 0) return;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (groups_[g].spec.extra_retained_tokens == 0) continue;
    const std::int32_t first = first_read(g, std::max(0, row.first - again));
    for (std::int32_t p = first; p < first_read(g, row.first); ++p) {
      ++reads_;
      const BlockId block = block_of(request, g, p);
      const LedgerSlot slot =
          block == kNullBlock ? LedgerSlot{} : ledger_.read(block, p % block_size(g));
      if (slot.content == content_at(row, p + 1)) continue;
      report(AuditRule::draft_read, request, g, p, block,
             fmt::format("the drafter runs {} tokens before token {} again and reads token {}, "
                         "where the table has {}",
                         again, row.first, p,
                         block == kNullBlock ? "no block of this group" : holds(slot, block)));
      break;
    }
  }
}

}  // namespace lockstep
