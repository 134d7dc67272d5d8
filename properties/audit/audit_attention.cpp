// What attention writes and reads.
#include <fmt/core.h>

#include <algorithm>

#include "properties/audit/audit_impl.h"
#include "reference/profiles/engine_profile.h"

namespace lockstep {

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

bool Auditor::Impl::make_row(const RecordedStep& step, const RecordedScheduled& scheduled,
                             AuditRow& row) {
  const auto found = requests_.find(scheduled.id);
  if (found == requests_.end()) {
    report(AuditRule::scheduled_tokens, scheduled.id, "a request that has left is scheduled");
    return false;
  }
  AuditedRequest& request = found->second;
  take_tables(step, scheduled, request);
  row.request = &request;
  row.first = scheduled.computed;
  // The engine counts drafts in flight as computed; the worker starts where the request stands.
  if (drafts_in_flight_ && !scheduled.is_new) row.first = std::min(row.first, request.computed);
  row.last = row.first + scheduled.tokens;
  row.counted_to = scheduled.computed + scheduled.tokens;
  if (is_dropped(step, scheduled, request)) return false;
  row.num_spec = static_cast<std::int32_t>(scheduled.spec.size());
  const auto known = static_cast<std::int32_t>(request.tokens.size());
  if (row.last > known + row.num_spec || row.first > known) {
    report(AuditRule::scheduled_tokens, request.name,
           fmt::format("tokens [{}, {}) are scheduled, but only {} are known and {} drafted",
                       row.first, row.last, known, row.num_spec));
    return false;
  }
  if (scheduled.is_new) row.num_hit = scheduled.computed;
  const std::span<const std::int32_t> sampled = sampled_of(step, scheduled.id);
  std::uint64_t content =
      row.first == 0 ? request.root : request.contents[static_cast<std::size_t>(row.first) - 1];
  for (std::int32_t p = row.first; p < row.last; ++p) {
    const auto draft = static_cast<std::size_t>(p - known);
    std::int32_t token =
        p < known ? request.tokens[static_cast<std::size_t>(p)] : scheduled.spec[draft];
    // A draft that the engine never saw: accepted ones came back as sampled tokens.
    if (p >= known && token < 0 && draft + 1 < sampled.size()) token = sampled[draft];
    row.contents.push_back(content = content_after(content, token));
  }
  return true;
}

std::uint64_t Auditor::Impl::content_at(const AuditRow& row, std::int32_t count) const {
  if (count == 0) return row.request->root;
  if (count > row.first) return row.contents[static_cast<std::size_t>(count - row.first) - 1];
  return row.request->contents[static_cast<std::size_t>(count) - 1];
}

std::string Auditor::Impl::holds(const LedgerSlot& slot) const {
  if (slot.content == 0) return "nothing that was written since the block was handed out";
  return fmt::format("token {} of request {}", slot.position,
                     names_[static_cast<std::size_t>(slot.writer)]);
}

void Auditor::Impl::write_tokens(const AuditRow& row, std::size_t group) {
  const AuditedRequest& request = *row.request;
  const std::vector<BlockId>& table = request.tables[group];
  const std::int32_t size = block_size(group);
  for (std::int32_t p = row.first; p < row.last; ++p) {
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
                             holds(before), name));
      }
    }
    ledger_.write(block, p % size, {content, request.index, p});
  }
}

void Auditor::Impl::read_tokens(const AuditRow& row, std::size_t group) {
  const AuditedRequest& request = *row.request;
  if (request.wrong[group] || row.is_void) return;
  const std::vector<BlockId>& table = request.tables[group];
  const std::int32_t size = block_size(group);
  for (std::int32_t p = first_read(group, row.first); p < row.last; ++p) {
    ++reads_;
    const auto index = static_cast<std::size_t>(p / size);
    const BlockId block = index < table.size() ? table[index] : kNullBlock;
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
                    "holds {}{}",
                    row.first, row.last, p, p % size, index_of(block), holds(slot),
                    right_group ? "" : "; the block is not one of this group"));
  }
}

bool hashes_look_ahead(const RecordingHeader& header) {
  if (header.connector) return false;
  const EngineConfig& config = header.options.config;
  if (config.num_hash_lookahead_tokens != kEngineHashLookahead)
    return config.num_hash_lookahead_tokens > 0;
  const EngineProfile* profile =
      find_engine_profile(header.engine.name + "-" + header.engine.version);
  return profile != nullptr && hash_lookahead_of(config, *profile) > 0;
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

// An EAGLE drafter makes a token's row of the token behind it, too. With the step's output that one
// is known of every token that stands.
void Auditor::Impl::finish_draft_rows(const AuditRow& row) {
  const AuditedRequest& request = *row.request;
  const auto num_known = static_cast<std::int32_t>(request.contents.size());
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (is_state(groups_[g].spec)) continue;
    for (std::int32_t p = row.first; p < std::min(request.computed, num_known - 1); ++p) {
      const BlockId block = block_of(request, g, p);
      if (block == kNullBlock) break;
      LedgerSlot slot = ledger_.read(block, p % block_size(g));
      slot.next_content = request.contents[static_cast<std::size_t>(p) + 1];
      ledger_.write(block, p % block_size(g), slot);
    }
  }
}

// Before its last token a hit agrees in the next one as it agrees in all.
void Auditor::Impl::read_draft_row(const AuditRow& row) {
  const AuditedRequest& request = *row.request;
  const std::int32_t p = row.num_hit - 1;
  if (p < 0 || row.num_hit >= std::ssize(request.contents)) return;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (is_state(groups_[g].spec) || p < first_read(g, row.num_hit)) continue;
    const BlockId block = block_of(request, g, p);
    if (block == kNullBlock) continue;
    const LedgerSlot slot = ledger_.read(block, p % block_size(g));
    if (slot.next_content == request.contents[static_cast<std::size_t>(row.num_hit)]) continue;
    report(AuditRule::draft_read, request, g, p, block,
           fmt::format("a hit ends with token {} in slot {} of block {}, which holds {} and was "
                       "drafted from with {} behind it than here",
                       p, p % block_size(g), index_of(block), holds(slot),
                       slot.next_content == 0 ? "less" : "another token"));
  }
}

}  // namespace lockstep
