// What attention writes and reads.
#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "properties/audit/audit_impl.h"

namespace lockstep {

// Tokens from the prompt's end up to here are not read from `position` on.
std::int32_t Auditor::Impl::gap_end(const AuditedRequest& request, std::size_t group,
                                    std::int32_t position) const {
  const auto window = static_cast<std::int32_t>(groups_[group].spec.rswa_window);
  return window == 0 ? 0 : std::max(request.num_prompt, position + 1 - window);
}

std::int32_t Auditor::Impl::first_read(std::size_t group, std::int32_t position) const {
  const KVCacheSpec& spec = groups_[group].spec;
  if (spec.kind == CacheKind::sliding_window)
    return std::max(0, position - static_cast<std::int32_t>(spec.sliding_window) + 1);
  if (spec.kind == CacheKind::chunked_local) {
    const auto chunk = static_cast<std::int32_t>(spec.attention_chunk_size);
    return position / chunk * chunk;
  }
  return 0;
}

// Tokens that nobody knows. If an output that should have named them was not seen, it may still be
// on its way when the recording ends.
void Auditor::Impl::accuse_of_unknown_tokens(const AuditRow& row, const RecordedStep& step) {
  const AuditedRequest& request = *row.request;
  AuditFinding finding{
      .rule = AuditRule::scheduled_tokens, .step = step.step, .request = request.name};
  finding.what = fmt::format("tokens [{}, {}) are scheduled, but only {} are known and {} drafted",
                             row.first, row.last, request.tokens.size(), row.num_spec);
  if (config_.async_scheduling && request.unheard_step >= 0)
    unheard_.push_back({std::move(finding), request.unheard_step});
  else
    tell(std::move(finding), cause_of(AuditRule::scheduled_tokens, request.name, {}));
}

// `computed` already excludes lost blocks and rejected drafts, and a reset ends the run. An engine
// may count an output that it dropped as rejected drafts.
void Auditor::Impl::check_computed(const AuditRow& row) {
  AuditedRequest& request = *row.request;
  if (row.first >= request.computed || request.withdrawn_in >= 0) return;
  request.starts_over = true;
  starts_over_.insert(request.index);
  report(AuditRule::computed_again, request.name,
         fmt::format("computes tokens [{}, {}) again: it had {} computed after step {}, and no "
                     "preemption, reset, rejected draft or lost block sent it back",
                     row.first, std::min(row.last, request.computed), request.computed,
                     request.computed_in));
}

// An allocation covers the tokens of the step and the slots for drafts after them; blocks of an
// earlier step stay when drafts are rejected.
void Auditor::Impl::check_room(const AuditRow& row) {
  AuditedRequest& request = *row.request;
  if (request.starts_over) return;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const std::int32_t needed = ceil_div32(request.reserved_to, block_size(g));
    const auto held = std::ssize(request.tables[g]);
    if (!keeps_tokens(groups_[g].spec) || held <= needed) continue;
    report(AuditRule::excess_blocks, request, g, row.counted_to, request.tables[g].back(),
           fmt::format("the table has {} blocks, and {} tokens with {} slots for drafts need {}",
                       held, row.counted_to, draft_slots_, needed));
  }
}

bool Auditor::Impl::make_row(const RecordedStep& step, const RecordedScheduled& scheduled,
                             AuditRow& row) {
  const auto found = requests_.find(scheduled.id);
  if (found == requests_.end() || found->second.has_left) {
    report(AuditRule::scheduled_tokens, scheduled.id, "a request that has left is scheduled");
    return false;
  }
  AuditedRequest& request = found->second;
  if (std::exchange(request.scheduled_in, step.step) == step.step) {
    report(AuditRule::scheduled_tokens, request.name, "scheduled twice in one step");
    return false;
  }
  check_limit(request);
  check_grammar(request);
  if (!scheduled.is_new && !request.running && request.preempted_in >= 0)
    report(AuditRule::handed_out, request.name,
           fmt::format("was preempted in step {} and is handed over like one that runs: the worker "
                       "appends to the blocks that it had",
                       request.preempted_in));
  const bool was_loaded = request.transfer == Transfer::loaded;
  const bool was_running = request.running && !scheduled.is_new;
  const bool is_session_again = request.is_between_chunks;
  if (scheduled.is_new && !is_session_again && !was_loaded) request.reserved_to = 0;
  take_tables(step, scheduled, request);
  row.request = &request;
  row.first = scheduled.computed;
  // The engine counts drafts in flight as computed; the worker starts where the request stands.
  if (drafts_in_flight_ && !scheduled.is_new) row.first = std::min(row.first, request.computed);
  row.last = row.first + scheduled.tokens;
  row.counted_to = scheduled.computed + scheduled.tokens;
  request.reserved_to =
      std::max(request.reserved_to, std::max(row.counted_to, request.last_replayed) + draft_slots_);
  if (is_dropped(step, scheduled, request)) return false;
  row.num_spec = static_cast<std::int32_t>(scheduled.spec.size());
  if (row.num_spec >= scheduled.tokens) {
    request.is_past_telling = true;
    report(AuditRule::scheduled_tokens, request.name,
           fmt::format("{} drafts are to be verified in a step of {} tokens", row.num_spec,
                       scheduled.tokens));
    return false;
  }
  const auto known = static_cast<std::int32_t>(request.tokens.size());
  if (row.last > known + row.num_spec || row.first > known) {
    request.is_past_telling = true;
    accuse_of_unknown_tokens(row, step);
    return false;
  }
  if (was_running) check_computed(row);
  check_room(row);
  check_drafts(scheduled, request);
  check_draft_slots(scheduled, row, was_loaded);
  if (scheduled.is_new && !is_session_again) row.num_hit = scheduled.computed;
  const std::span<const std::int32_t> sampled = sampled_of(step, scheduled.id);
  std::uint64_t content =
      row.first == 0 ? request.root : request.contents[static_cast<std::size_t>(row.first) - 1];
  for (std::int32_t p = row.first; p < row.last; ++p) {
    const auto draft = static_cast<std::size_t>(p - known);
    // What was accepted came back as sampled tokens, whatever draft the engine knew of.
    if (p < known)
      content = request.contents[static_cast<std::size_t>(p)];
    else
      content = content_after(content,
                              draft + 1 < sampled.size() ? sampled[draft] : scheduled.spec[draft]);
    row.contents.push_back(content);
  }
  return true;
}

std::uint64_t Auditor::Impl::content_at(const AuditRow& row, std::int32_t count) const {
  if (count == 0) return row.request->root;
  if (count > row.first) return row.contents[static_cast<std::size_t>(count - row.first) - 1];
  return row.request->contents[static_cast<std::size_t>(count) - 1];
}

// Who should have written to the block since it was handed out, and did not.
std::string Auditor::Impl::why_nothing(BlockId block) const {
  const LedgerHolder& last = ledger_.holders(block)[0];
  if (const std::int64_t step = ledger_.not_loaded_in(block); step >= 0)
    return fmt::format(": the load of step {} is reported not to have filled it", step);
  for (const auto& [name, request] : requests_) {
    if (request.index != last.request) continue;
    if (request.transfer == Transfer::loading)
      return fmt::format(": request {} is still loading it", name);
    if (request.preempted_in >= last.since)
      return fmt::format(": request {} was preempted in step {}", name, request.preempted_in);
  }
  return {};
}

std::string Auditor::Impl::holds(const LedgerSlot& slot, BlockId block) const {
  if (slot.content == 0) {
    const std::int64_t zeroed = ledger_.zeroed_in(block);
    return (zeroed < 0
                ? "nothing that was written since the block was handed out"
                : fmt::format("nothing that was written since step {} zeroed the block", zeroed)) +
           why_nothing(block);
  }
  return fmt::format("token {} of request {}", slot.position, name_at(slot.writer));
}

// In which keys alone the content of a writer differs from the request's at a position.
std::string Auditor::Impl::key_difference_to(const AuditedRequest& request, std::int32_t position,
                                             std::uint64_t content, std::int32_t writer) const {
  const auto found = names_.find(writer);
  const auto at = static_cast<std::size_t>(position);
  if (found == names_.end() || at >= request.tokens.size()) return {};
  const std::string unlike = key_difference(request.keyed, found->second, position);
  if (unlike.empty()) return {};
  // The request's own tokens under the writer's keys.
  const std::vector<std::int32_t> tokens(request.tokens.begin(),
                                         request.tokens.begin() + position + 1);
  if (contents_of(found->second, tokens).back() != content) return {};
  return ": the same tokens" + unlike;
}

// In what a slot that holds this very position differs from what the request has there.
std::string Auditor::Impl::difference(const AuditedRequest& request, std::int32_t position,
                                      const LedgerSlot& slot) const {
  if (slot.content == 0 || slot.position != position) return {};
  if (std::string keys = key_difference_to(request, position, slot.content, slot.writer);
      !keys.empty())
    return keys;
  const auto found = requests_.find(name_at(slot.writer));
  if (found == requests_.end() || found->second.index != slot.writer)
    return ": of another prefix than here";
  const AuditedRequest& writer = found->second;
  const auto at = static_cast<std::size_t>(position);
  if (at >= writer.contents.size() || writer.contents[at] != slot.content)
    return ": a draft that was rejected";
  const auto num = std::min({at + 1, writer.tokens.size(), request.tokens.size()});
  const auto [mine, theirs] = std::mismatch(
      request.tokens.begin(), request.tokens.begin() + static_cast<std::ptrdiff_t>(num),
      writer.tokens.begin());
  if (mine == request.tokens.begin() + static_cast<std::ptrdiff_t>(num))
    return key_difference(request.keyed, writer.keyed, position);
  return fmt::format(": token {} is {} there and {} here", mine - request.tokens.begin(), *theirs,
                     *mine);
}

void Auditor::Impl::write_tokens(const AuditRow& row, std::size_t group) {
  const AuditedRequest& request = *row.request;
  const std::vector<BlockId>& table = request.tables[group];
  const std::int32_t size = block_size(group);
  // What a hit holds is left alone where only windows are computed again.
  const std::int32_t first =
      groups_[group].spec.bounded_replay ? row.first : std::max(row.first, request.last_replayed);
  // With a step in flight the last token may be one that its output ends with.
  const bool is_last_sure = !config_.async_scheduling || row.last <= request.num_prompt;
  const std::int32_t num_sure = row.last - row.num_spec - (is_last_sure ? 0 : 1);
  for (std::int32_t p = first; p < row.last; ++p) {
    const auto index = static_cast<std::size_t>(p / size);
    if (index >= table.size() || table[index] == kNullBlock) {
      report(AuditRule::token_write, request, group, p, kNullBlock,
             index >= table.size() ? "a token is written beyond the block table"
                                   : "a token is written to the null block");
      return;
    }
    const BlockId block = table[index];
    if (!ledger_.belongs_to(block, static_cast<std::int32_t>(group))) {
      report(AuditRule::token_write, request, group, p, block,
             "a token is written to a block of another group");
      return;
    }
    const LedgerSlot before = ledger_.read(block, p % size);
    const std::uint64_t content = row.contents[static_cast<std::size_t>(p - row.first)];
    if (before.content != content && before.content != 0 && before.writer != request.index) {
      for (const auto& [name, other] : requests_) {
        if (!other.keeps_blocks() || other.index == request.index) continue;
        if (p >= first_read(group, other.computed) && p < other.computed &&
            index < other.tables[group].size() && other.tables[group][index] == block)
          report(AuditRule::token_write, request, group, p, block,
                 fmt::format("a token is written over {} that request {} still reads",
                             holds(before, block), name));
      }
    }
    ledger_.write(block, p % size, {content, request.index, p}, content_at(row, p));
    if ((p + 1) % size == 0 && p < num_sure) note_content(group, content, block);
  }
  // Drafts and tokens of steps before that stand by now.
  for (std::int32_t p = std::max(0, row.first - config_.num_spec_tokens - 1); p < row.first; ++p)
    if ((p + 1) % size == 0)
      note_content(group, content_at(row, p + 1), block_of(request, group, p));
}

void Auditor::Impl::read_tokens(const AuditRow& row, std::size_t group) {
  const AuditedRequest& request = *row.request;
  if (request.wrong[group] || row.is_void) return;
  const std::vector<BlockId>& table = request.tables[group];
  const std::int32_t size = block_size(group);
  std::int32_t first = first_read(group, row.first);
  // A window that is computed again begins with it: what lies before has no keys, and is masked.
  if (groups_[group].spec.bounded_replay) first = std::max(first, request.first_replayed);
  const std::int32_t gap_last = gap_end(request, group, row.first);
  for (std::int32_t p = first; p < row.last; ++p) {
    if (p >= request.num_prompt && p < gap_last) p = gap_last;
    const auto index = static_cast<std::size_t>(p / size);
    const BlockId block = index < table.size() ? table[index] : kNullBlock;
    const std::int32_t last = std::min(row.last, (p / size + 1) * size) - 1;
    if (last > p && block != kNullBlock && ledger_.is_run(block, p % size, last % size + 1) &&
        ledger_.read(block, last % size).content == content_at(row, last + 1) &&
        ledger_.belongs_to(block, static_cast<std::int32_t>(group))) {
      reads_ += last - p + 1;
      p = last;
      continue;
    }
    ++reads_;
    if (block == kNullBlock)
      return report(
          AuditRule::attention_read, request, group, p, block,
          "attention reads a token that has no block: the table has the null block there");
    const LedgerSlot slot = ledger_.read(block, p % size);
    const bool right_group = ledger_.belongs_to(block, static_cast<std::int32_t>(group));
    if (slot.content == content_at(row, p + 1) && right_group) continue;
    return report(
        AuditRule::attention_read, request, group, p, block,
        fmt::format("attention of tokens [{}, {}) reads token {} from slot {} of block {}, which "
                    "holds {}{}{}",
                    row.first, row.last, p, p % size, index_of(block), holds(slot, block),
                    difference(request, p, slot),
                    right_group ? "" : "; the block is not one of this group"));
  }
}

// Where a token lies; the null block: nowhere, or in a block of another group by now.
BlockId Auditor::Impl::block_of(const AuditedRequest& request, std::size_t group,
                                std::int32_t position) const {
  const std::vector<BlockId>& table = request.tables[group];
  const auto index = static_cast<std::size_t>(position / block_size(group));
  const bool is_there = index < table.size() && table[index] != kNullBlock &&
                        ledger_.belongs_to(table[index], static_cast<std::int32_t>(group));
  return is_there ? table[index] : kNullBlock;
}

// A ring is the request's own for as long as it runs. What it holds at a hit's end is not followed:
// hits end where a group of compressed tokens does.
void Auditor::Impl::use_ring(const AuditRow& row, std::size_t group) {
  const std::vector<BlockId>& table = row.request->tables[group];
  const bool is_there = table.size() == 1 && table[0] != kNullBlock &&
                        ledger_.belongs_to(table[0], static_cast<std::int32_t>(group));
  if (is_there) return;
  report(AuditRule::token_write, *row.request, group, row.first,
         table.empty() ? kNullBlock : table[0],
         fmt::format("a ring has one block, and the table of this group has {}{}", table.size(),
                     table.size() == 1 ? ", which is not one of this group" : ""));
}

}  // namespace lockstep
