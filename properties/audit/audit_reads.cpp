// What attention writes and reads.
#include <fmt/core.h>

#include <algorithm>
#include <utility>

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
  if (found == requests_.end() || found->second.has_left) {
    report(AuditRule::scheduled_tokens, scheduled.id, "a request that has left is scheduled");
    return false;
  }
  AuditedRequest& request = found->second;
  if (std::exchange(request.scheduled_in, step.step) == step.step) {
    report(AuditRule::scheduled_tokens, request.name, "scheduled twice in one step");
    return false;
  }
  take_tables(step, scheduled, request);
  row.request = &request;
  row.first = scheduled.computed;
  // The engine counts drafts in flight as computed; the worker starts where the request stands.
  if (drafts_in_flight_ && !scheduled.is_new) row.first = std::min(row.first, request.computed);
  row.last = row.first + scheduled.tokens;
  row.counted_to = scheduled.computed + scheduled.tokens;
  if (is_dropped(step, scheduled, request)) return false;
  row.num_spec = static_cast<std::int32_t>(scheduled.spec.size());
  if (row.num_spec > scheduled.tokens) {
    report(AuditRule::scheduled_tokens, request.name,
           fmt::format("{} drafts are to be verified in a step of {} tokens", row.num_spec,
                       scheduled.tokens));
    return false;
  }
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

// What state layers read, write and copy (vllm/v1/worker/mamba_utils.py).

bool Auditor::Impl::state_block(const AuditRow& row, std::size_t group, std::int32_t entry,
                                BlockId& block) {
  const std::vector<BlockId>& table = row.request->tables[group];
  if (entry < 0 || static_cast<std::size_t>(entry) >= table.size() ||
      table[static_cast<std::size_t>(entry)] == kNullBlock) {
    report(AuditRule::state_read, *row.request, group, row.first, kNullBlock,
           fmt::format("the state of entry {} is needed, and the table has no block there", entry));
    return false;
  }
  block = table[static_cast<std::size_t>(entry)];
  return true;
}

void Auditor::Impl::read_state(const AuditRow& row, std::size_t group, std::int32_t entry,
                               std::int32_t count) {
  BlockId block{};
  if (row.request->wrong[group] || count == 0 || !state_block(row, group, entry, block)) return;
  ++reads_;
  const LedgerState& state = ledger_.state(block);
  if (state.num_tokens == count && state.content == content_at(row, count) &&
      ledger_.belongs_to(block, static_cast<std::int32_t>(group)))
    return;
  const std::string found =
      state.num_tokens < 0 ? std::string("none that was written since the block was handed out")
                           : fmt::format("the one after {} tokens of request {}", state.num_tokens,
                                         names_[static_cast<std::size_t>(state.writer)]);
  report(AuditRule::state_read, *row.request, group, count, block,
         fmt::format("the state after {} tokens is read from block {}, which holds {}", count,
                     index_of(block), found));
}

void Auditor::Impl::write_state(const AuditRow& row, std::size_t group, std::int32_t entry,
                                std::int32_t count) {
  BlockId block{};
  if (state_block(row, group, entry, block))
    ledger_.write_state(block, {content_at(row, count), count, row.request->index});
}

void Auditor::Impl::prepare_states(AuditRow& row) {
  AuditedRequest& request = *row.request;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const KVCacheSpec& spec = groups_[g].spec;
    if (!is_state(spec) || spec.mamba_cache_mode != MambaCacheMode::align) continue;
    const std::int32_t size = block_size(g);
    const std::int32_t previous =
        request.state_idx >= 0 ? request.state_idx : (row.first == 0 ? -1 : (row.first - 1) / size);
    const std::int32_t current = ceil_div32(row.last, size) - 1;
    if (previous < 0 || previous == current) continue;
    BlockId from{};
    BlockId to{};
    if (!state_block(row, g, previous + request.num_accepted - 1, from) ||
        !state_block(row, g, current, to))
      continue;
    ledger_.write_state(to, ledger_.state(from));
  }
}

void Auditor::Impl::advance_states(const AuditRow& row, std::size_t group) {
  const KVCacheSpec& spec = groups_[group].spec;
  const std::int32_t size = block_size(group);
  const AuditedRequest& request = *row.request;
  if (spec.mamba_cache_mode == MambaCacheMode::all) {
    read_state(row, group, (row.first - 1) / size, row.first);
    for (std::int32_t end = (row.first / size + 1) * size; end <= row.last; end += size)
      write_state(row, group, end / size - 1, end);
    write_state(row, group, (row.last - 1) / size, row.last);
    return;
  }
  const bool align = spec.mamba_cache_mode == MambaCacheMode::align;
  const std::int32_t current = align ? ceil_div32(row.last, size) - 1 : 0;
  const bool moved = align && request.state_idx != current;
  read_state(row, group, moved ? current : current + request.num_accepted - 1, row.first);
  // With drafts, a state after each of the last tokens: whichever draft is rejected, one of them is
  // right.
  for (std::int32_t draft = 0; draft <= row.num_spec; ++draft)
    write_state(row, group, current + draft, row.last - row.num_spec + draft);
}

void Auditor::Impl::settle_states(AuditRow& row, std::int32_t num_sampled) {
  AuditedRequest& request = *row.request;
  const std::int32_t num_accepted = row.num_spec > 0 && num_sampled > 0 ? num_sampled : 1;
  request.num_accepted = num_accepted;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const KVCacheSpec& spec = groups_[g].spec;
    if (!is_state(spec) || spec.mamba_cache_mode != MambaCacheMode::align) continue;
    const std::int32_t size = block_size(g);
    request.state_idx = ceil_div32(row.last, size) - 1;
    if (row.num_spec == 0) continue;
    const std::int32_t running = row.last - row.num_spec;
    const std::int32_t aligned = (running + num_accepted - 1) / size * size;
    if (aligned < running) continue;
    BlockId from{};
    BlockId to{};
    if (!state_block(row, g, request.state_idx + aligned - running, from) ||
        !state_block(row, g, aligned / size - 1, to))
      continue;
    ledger_.write_state(to, ledger_.state(from));
    if (request.state_idx == aligned / size - 1) request.num_accepted = 1;
  }
}

}  // namespace lockstep
