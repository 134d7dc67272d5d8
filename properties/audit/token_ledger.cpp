#include "properties/audit/token_ledger.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

namespace lockstep {

void TokenLedger::step(std::span<const AuditRow> rows, std::size_t group) {
  if (is_ring(spec_of(group))) {
    for (const AuditRow& row : rows) use_ring(row, group);
    return;
  }
  for (const AuditRow& row : rows) write(row, group);
  if (!setup_.checks_rules()) return;
  for (const AuditRow& row : rows) read(row, group);
}

bool TokenLedger::load(const AuditRequest& request, std::size_t group, std::int32_t position,
                       BlockId block) {
  if (!pool_.belongs_to(block, static_cast<std::int32_t>(group))) {
    report(AuditRule::token_write, request, group, position, block,
           fmt::format("a load writes to block {}, which was not allocated to this group",
                       index_of(block)));
    return false;
  }
  const auto at = static_cast<std::size_t>(position);
  LS_CHECK(at < request.contents.size(), "token {} of {}", position, request.contents.size());
  pool_.write(block, position % block_size(group), {request.contents[at], request.index, position},
              position == 0 ? request.root : request.contents[at - 1]);
  return true;
}

void TokenLedger::write(const AuditRow& row, std::size_t group) {
  const AuditRequest& request = *row.request;
  const std::vector<BlockId>& table = request.tables[group];
  const std::int32_t size = block_size(group);
  LS_CHECK(std::cmp_equal(row.contents.size(), row.last - row.first), "{} contents of [{}, {})",
           row.contents.size(), row.first, row.last);
  // Only windows that are computed again write into a hit.
  const std::int32_t first = spec_of(group).bounded_replay
                                 ? row.first
                                 : std::max(row.first, blocks_.last_replayed(request));
  // With a step in flight, the output may end before the last token.
  const bool is_last_sure = !setup_.config.async_scheduling || row.last <= request.num_prompt;
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
    if (!pool_.belongs_to(block, static_cast<std::int32_t>(group))) {
      report(AuditRule::token_write, request, group, p, block,
             "a token is written to a block of another group");
      return;
    }
    const PoolSlot before = pool_.read(block, p % size);
    const std::uint64_t content = row.contents[static_cast<std::size_t>(p - row.first)];
    if (before.content != content && before.content != 0 && before.writer != request.index)
      check_overwritten(row, group, p, before, block);
    pool_.write(block, p % size, {content, request.index, p}, row.content_at(p));
    if ((p + 1) % size == 0 && p < num_sure && hits_ != nullptr) hits_->note(group, content, block);
  }
  if (hits_ == nullptr) return;
  // Drafts and tokens of previous steps that stand since their output.
  for (std::int32_t p = std::max(0, row.first - setup_.config.num_spec_tokens - 1); p < row.first;
       ++p)
    if ((p + 1) % size == 0) hits_->note(group, row.content_at(p + 1), block_of(request, group, p));
}

void TokenLedger::check_overwritten(const AuditRow& row, std::size_t group, std::int32_t position,
                                    const PoolSlot& before, BlockId block) const {
  const auto index = static_cast<std::size_t>(position / block_size(group));
  for (const auto& [name, other] : requests_) {
    if (!other.keeps_blocks() || other.index == row.request->index) continue;
    if (position >= setup_.first_read(group, other.computed) && position < other.computed &&
        index < other.tables[group].size() && other.tables[group][index] == block)
      report(AuditRule::token_write, *row.request, group, position, block,
             fmt::format("a token is written over {} that request {} still reads",
                         content_text(before, block), name));
  }
}

void TokenLedger::read(const AuditRow& row, std::size_t group) {
  const AuditRequest& request = *row.request;
  if (findings_.is_wrong(request, group) || row.is_void) return;
  const std::vector<BlockId>& table = request.tables[group];
  const std::int32_t size = block_size(group);
  std::int32_t first = setup_.first_read(group, row.first);
  // A window that is computed again starts with it: earlier tokens have no keys and are masked.
  if (spec_of(group).bounded_replay) first = std::max(first, blocks_.first_replayed(request));
  const std::int32_t gap_last = blocks_.gap_end(request, group, row.first);
  for (std::int32_t p = first; p < row.last; ++p) {
    if (p >= request.num_prompt && p < gap_last) p = gap_last;
    const auto index = static_cast<std::size_t>(p / size);
    const BlockId block = index < table.size() ? table[index] : kNullBlock;
    const std::int32_t last = std::min(row.last, (p / size + 1) * size) - 1;
    if (last > p && block != kNullBlock && pool_.is_run(block, p % size, last % size + 1) &&
        pool_.read(block, last % size).content == row.content_at(last + 1) &&
        pool_.belongs_to(block, static_cast<std::int32_t>(group))) {
      core_.num_reads += last - p + 1;
      p = last;
      continue;
    }
    ++core_.num_reads;
    if (block == kNullBlock)
      return report(
          AuditRule::attention_read, request, group, p, block,
          "attention reads a token that has no block: the table has the null block there");
    const PoolSlot slot = pool_.read(block, p % size);
    const bool right_group = pool_.belongs_to(block, static_cast<std::int32_t>(group));
    if (slot.content == row.content_at(p + 1) && right_group) continue;
    return report(
        AuditRule::attention_read, request, group, p, block,
        fmt::format("attention of tokens [{}, {}) reads token {} from slot {} of block {}, which "
                    "holds {}{}{}",
                    row.first, row.last, p, p % size, index_of(block), content_text(slot, block),
                    difference(request, p, slot),
                    right_group ? "" : "; the block is not one of this group"));
  }
}

void TokenLedger::use_ring(const AuditRow& row, std::size_t group) const {
  const std::vector<BlockId>& table = row.request->tables[group];
  const bool is_there = table.size() == 1 && table[0] != kNullBlock &&
                        pool_.belongs_to(table[0], static_cast<std::int32_t>(group));
  if (is_there) return;
  report(AuditRule::token_write, *row.request, group, row.first,
         table.empty() ? kNullBlock : table[0],
         fmt::format("a ring has one block, and the table of this group has {}{}", table.size(),
                     table.size() == 1 ? ", which is not one of this group" : ""));
}

// The request that should have written to the block since it was allocated.
std::string TokenLedger::why_nothing(BlockId block) const {
  const BlockOwner& last = pool_.holders(block)[0];
  if (const std::int64_t step = pool_.not_loaded_in(block); step >= 0)
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

std::string TokenLedger::content_text(const PoolSlot& slot, BlockId block) const {
  if (slot.content == 0) {
    const std::int64_t zeroed = pool_.zeroed_in(block);
    return (zeroed < 0
                ? "nothing that was written since the block was allocated"
                : fmt::format("nothing that was written since step {} zeroed the block", zeroed)) +
           why_nothing(block);
  }
  return fmt::format("token {} of request {}", slot.position, requests_.name_at(slot.writer));
}

std::string TokenLedger::key_difference_to(const AuditRequest& request, std::int32_t position,
                                           std::uint64_t content, std::int32_t writer) const {
  const KeyedRequest* keys = requests_.keys_at(writer);
  if (keys == nullptr || std::cmp_greater_equal(position, request.tokens.size())) return {};
  const std::string difference = key_difference(request.keyed, *keys, position);
  if (difference.empty()) return {};
  // The request's own tokens under the writer's keys.
  const std::vector<std::int32_t> tokens(request.tokens.begin(),
                                         request.tokens.begin() + position + 1);
  if (contents_of(*keys, tokens).back() != content) return {};
  return ": the same tokens" + difference;
}

// How a slot that holds this position differs from the request's token there.
std::string TokenLedger::difference(const AuditRequest& request, std::int32_t position,
                                    const PoolSlot& slot) const {
  if (slot.content == 0 || slot.position != position) return {};
  if (std::string keys = key_difference_to(request, position, slot.content, slot.writer);
      !keys.empty())
    return keys;
  const AuditRequest* writer = requests_.find(requests_.name_at(slot.writer));
  if (writer == nullptr || writer->index != slot.writer) return ": of another prefix than here";
  const auto at = static_cast<std::size_t>(position);
  if (at >= writer->contents.size() || writer->contents[at] != slot.content)
    return ": a draft that was rejected";
  const auto num = std::min({at + 1, writer->tokens.size(), request.tokens.size()});
  const auto end = request.tokens.begin() + static_cast<std::ptrdiff_t>(num);
  const auto [mine, theirs] = std::mismatch(request.tokens.begin(), end, writer->tokens.begin());
  if (mine == end) return key_difference(request.keyed, writer->keyed, position);
  return fmt::format(": token {} is {} there and {} here", mine - request.tokens.begin(), *theirs,
                     *mine);
}

}  // namespace lockstep
