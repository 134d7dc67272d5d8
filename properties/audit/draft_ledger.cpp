#include "properties/audit/draft_ledger.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace lockstep {

static std::string list_text(std::span<const std::int32_t> tokens) {
  return fmt::format("[{}]", fmt::join(tokens, ", "));
}

DraftLedger::DraftLedger(AuditCore& core, const TokenLedger& tokens, const RecordingHeader& header)
    : Ledger(core),
      tokens_(tokens),
      proposes_in_time_(setup_.config.num_spec_tokens > 0 && !setup_.config.async_scheduling &&
                        std::ranges::find(header.beyond_format, "pipeline_parallel_size") ==
                            header.beyond_format.end()) {}

// -1 fills a row up after the proposed drafts.
void DraftLedger::step(const RecordedScheduled& row, const AuditRequest& request) {
  const std::vector<std::int32_t> proposed = std::exchange(drafts_[request].proposed, {});
  if (!proposes_in_time_ || !are_proposals_shown_) return;
  for (std::size_t i = 0; i < row.spec.size(); ++i) {
    const std::int32_t draft = row.spec[i];
    if (i < proposed.size() ? proposed[i] == draft : draft < 0) continue;
    const std::string known = proposed.empty()
                                  ? "none was proposed after them"
                                  : fmt::format("step {} proposed {} after them",
                                                drafts_[request].step, list_text(proposed));
    const std::string preempted =
        request.preempted_in >= 0
            ? fmt::format("; it was preempted in step {}", request.preempted_in)
            : "";
    return report(AuditRule::drafts, request.name,
                  fmt::format("has {} tokens and verifies the drafts {}, and {}{}",
                              request.tokens.size(), list_text(row.spec), known, preempted));
  }
}

// A preempted request computes the tokens again that its drafts depend on.
void DraftLedger::check_held(const RecordedStep& step) const {
  for (const RecordedTokens& held : step.held_drafts) {
    const auto accuse = [&](std::string why) {
      report(AuditRule::drafts, held.id,
             fmt::format("keeps the drafts {} for a later step, {}", list_text(held.tokens), why));
    };
    const AuditRequest* request = requests_.find(held.id);
    if (request == nullptr || request->has_left) {
      accuse("and there is no such request");
      continue;
    }
    const Drafts& drafts = drafts_[*request];
    if (!request->running)
      accuse(request->preempted_in >= 0
                 ? fmt::format(
                       "and was preempted in step {}: the tokens before them are computed again",
                       request->preempted_in)
                 : std::string("and does not run"));
    else if (std::ssize(held.tokens) > setup_.config.num_spec_tokens)
      accuse(fmt::format("and the engine makes {}", setup_.config.num_spec_tokens));
    else if (proposes_in_time_ && are_proposals_shown_ && held.tokens != drafts.proposed)
      accuse(drafts.proposed.empty()
                 ? std::string("and none were proposed after its last token")
                 : fmt::format("and step {} proposed {}", drafts.step, list_text(drafts.proposed)));
  }
}

void DraftLedger::end(const RecordedStep& step, std::span<const AuditRow> rows) {
  if (setup_.hash_lookahead > 0) {  // it writes the whole batch before it attends
    for (const AuditRow& row : rows) finish_rows(row);
    if (setup_.checks_rules()) {
      for (const AuditRow& row : rows) read_hit(row);
      for (const AuditRow& row : rows) read_window(row);
    }
  }
  if (!proposes_in_time_ || !step.drafts) return;
  are_proposals_shown_ = true;
  for (const RecordedTokens& drafts : *step.drafts) {
    const AuditRequest* request = requests_.find(drafts.id);
    if (request == nullptr) continue;
    const bool is_scheduled = std::ranges::find(step.scheduled, drafts.id,
                                                &RecordedScheduled::id) != step.scheduled.end();
    if (!is_scheduled && !drafts.tokens.empty())
      report(AuditRule::drafts, drafts.id,
             fmt::format("is given the drafts {}, and no row of it was scheduled that they could "
                         "be made of",
                         list_text(drafts.tokens)));
    drafts_[*request] = {drafts.tokens, step.step};
  }
}

// Tokens before the row that the draft model computes again: with several modules, their KV entries
// depend on drafts, and more than one of these was rejected.
std::int32_t DraftLedger::num_run_again(const AuditRow& row) const {
  const std::int32_t num_rejected = row.last - row.request->computed;
  return setup_.hash_lookahead > 1 ? std::max(0, num_rejected - 1) : 0;
}

// The step's output shows which tokens follow every token that stands, apart from the last ones:
// their entries depend on drafts, and the next step accepts or rejects these.
void DraftLedger::finish_rows(const AuditRow& row) {
  const AuditRequest& request = *row.request;
  const std::int32_t lookahead = setup_.hash_lookahead;
  const auto num_known = static_cast<std::int32_t>(request.contents.size());
  const std::int32_t again = num_run_again(row);
  for (std::size_t g = 0; g < num_groups(); ++g) {
    if (!keeps_tokens(spec_of(g))) continue;
    const auto settle = [&](std::int32_t position, bool is_made_now) {
      const BlockId block = block_of(request, g, position);
      if (block == kNullBlock) return;
      const PoolSlot slot = pool_.read(block, position % block_size(g));
      if (!is_made_now && slot.next_content != kDraftBehind) return;
      const std::int32_t last = position + lookahead;
      // An entry that is not computed again is right if all its drafts were accepted: the token
      // sampled last, at `computed`, was not a draft.
      const bool is_known =
          last < (is_made_now ? num_known : std::min(num_known, request.computed));
      pool_.set_behind(block, position % block_size(g),
                       is_known      ? request.contents[static_cast<std::size_t>(last)]
                       : is_made_now ? kDraftBehind
                                     : kWrongDraftBehind);
    };
    const std::int32_t first_open = std::max(row.num_hit, row.first - lookahead + 1);
    for (std::int32_t p = first_open; p < row.first - again; ++p) settle(p, false);
    for (std::int32_t p = std::max(0, row.first - again); p < request.computed; ++p)
      settle(p, true);
  }
}

// Before its last tokens, a hit has the same next tokens as its prefix. A window that is computed
// again has no entries of the hit; the other groups continue to its end.
void DraftLedger::read_hit(const AuditRow& row) {
  const AuditRequest& request = *row.request;
  const std::int32_t end = row.num_hit == 0 ? 0 : row.num_hit + setup_.num_replayed;
  for (std::int32_t p = std::max(0, end - setup_.hash_lookahead); p < end; ++p) {
    const std::int32_t last = p + setup_.hash_lookahead;
    if (last >= std::ssize(request.contents)) return;
    // The content of a token in a digest also depends on the tokens behind it.
    const PromptEmbeds& embeds = request.keyed.keys.embeds;
    if (embeds.digest_tokens > 1 && last / embeds.digest_tokens < std::ssize(embeds.digests)) {
      meets_digest_ = true;
      return;
    }
    for (std::size_t g = 0; g < num_groups(); ++g) {
      const KVCacheSpec& spec = spec_of(g);
      if (!keeps_tokens(spec) || spec.bounded_replay || p < setup_.first_read(g, end)) continue;
      const BlockId block = block_of(request, g, p);
      if (block == kNullBlock) continue;
      const PoolSlot slot = pool_.read(block, p % block_size(g));
      if (slot.next_content == request.contents[static_cast<std::size_t>(last)]) continue;
      const bool is_less = slot.next_content <= kWrongDraftBehind;
      report(AuditRule::draft_read, request, g, p, block,
             fmt::format("a hit ends with token {} in slot {} of block {}, which holds {} and was "
                         "drafted from with {} after it than here",
                         p, p % block_size(g), index_of(block), tokens_.content_text(slot, block),
                         is_less ? "less" : "another token"));
    }
  }
}

// The window of tokens that are computed again starts before the row's.
void DraftLedger::read_window(const AuditRow& row) const {
  const AuditRequest& request = *row.request;
  const std::int32_t again = num_run_again(row);
  if (again == 0) return;
  for (std::size_t g = 0; g < num_groups(); ++g) {
    if (spec_of(g).extra_retained_tokens == 0) continue;
    const std::int32_t first = setup_.first_read(g, std::max(0, row.first - again));
    for (std::int32_t p = first; p < setup_.first_read(g, row.first); ++p) {
      ++core_.num_reads;
      const BlockId block = block_of(request, g, p);
      const PoolSlot slot = block == kNullBlock ? PoolSlot{} : pool_.read(block, p % block_size(g));
      if (slot.content == row.content_at(p + 1)) continue;
      report(AuditRule::draft_read, request, g, p, block,
             fmt::format("the draft model runs {} tokens before token {} again and reads token {}, "
                         "where the table has {}",
                         again, row.first, p,
                         block == kNullBlock ? "no block of this group"
                                             : tokens_.content_text(slot, block)));
      break;
    }
  }
}

}  // namespace lockstep
