#include "sim/ranks/rank_union.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/check.h"
#include "reference/memory/page_image.h"
#include "reference/plan/layout.h"
#include "reference/plan/page_size.h"

namespace lockstep {
namespace {

// State groups hold no rows of tokens.
bool keeps_tokens(const KVCacheGroupSpec& group) { return !is_state_kind(group.spec.kind); }

// K and V, or one latent or hidden-state row.
std::int64_t num_parts(const KVCacheSpec& spec) { return has_single_rows(spec) ? 1 : 2; }

// Layers are found by name: a rank's own plan numbers them differently. Null: a different pipeline
// stage has the layer.
const ModelLayer* layer_named(const MemoryModel& model, std::string_view name) {
  const auto found = std::ranges::find(model.layers(), name, &ModelLayer::name);
  return found == model.layers().end() ? nullptr : &*found;
}

// Returns the minimum number of ranks that hold a row of the whole model. A sharded cache has each
// token once. A replicated cache is on all ranks with the same heads: with tp 8 and 2 KV heads,
// each head is on 4 ranks; a latent row is on all 8.
std::int64_t least_holders(const BackendConfig& config, const KVCacheSpec& spec) {
  if (is_dealt_out(spec)) return 1;
  const std::int64_t tp = config.parallel.tp_size;
  if (tp == 1) return config.context.num_ranks;
  return std::max<std::int64_t>(1, tp / (has_single_rows(spec) ? 1 : spec.num_kv_heads));
}

// Rows are keys of a hash map, as strings of their bytes.
void append(std::string& key, std::span<const std::uint8_t> bytes) {
  key.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

}  // namespace

UnshardedCache::UnshardedCache(const KVCacheConfig& plan, std::int32_t context_ranks,
                               std::int32_t num_rows)
    : plan_(plan),
      context_ranks_(context_ranks),
      blocks_(static_cast<std::size_t>(plan.num_blocks)),
      tables_(plan.groups.size(),
              std::vector<std::vector<BlockId>>(static_cast<std::size_t>(num_rows))) {}

void UnshardedCache::forget(BlockId block) { blocks_[block] = {}; }

std::int32_t UnshardedCache::group_of(BlockId block) const { return blocks_[block].group; }
const std::vector<UnshardedCache::Token>& UnshardedCache::tokens(BlockId block) const {
  return blocks_[block].tokens;
}

// Follows one rank's program and needs no other: all ranks have the same tables and tokens. Blocks
// whose content is unknown (loaded, zeroed, poisoned) are cleared and not checked. The order is
// that of StepProgram: poison before writes, so a reallocated block starts empty.
void UnshardedCache::apply(const StepProgram& program) {
  step_ = program.step;
  for (const std::int32_t row : program.clear_rows)
    for (auto& tables : tables_) tables[row].clear();
  for (const PoisonBlock& poison : program.poison) forget(poison.block);
  for (const GroupBlock& zero : program.zero) forget(zero.block);
  for (const HostTransfer& load : program.loads) forget(load.block);
  for (const TableUpdate& update : program.table_updates) {
    auto& table = tables_[update.group][update.row];
    table.resize(update.first);
    const auto ids = std::span(program.table_block_ids).subspan(update.begin, update.count);
    table.insert(table.end(), ids.begin(), ids.end());
  }
  for (const TableEdit& edit : program.table_edits)
    tables_[edit.group][edit.row][edit.index] = edit.block;
  for (std::size_t g = 0; g < plan_.groups.size(); ++g)
    for (const RowSlice& slice : program.rows)
      if (keeps_tokens(plan_.groups[g])) write(program, slice, static_cast<std::int32_t>(g));
}

void UnshardedCache::write(const StepProgram& program, const RowSlice& slice, std::int32_t group) {
  const auto g = static_cast<std::size_t>(group);
  const KVCacheSpec& spec = plan_.groups[g].spec;
  const std::int64_t in_block = spec.block_size * (is_dealt_out(spec) ? context_ranks_ : 1);
  const std::vector<BlockId>& table = tables_[g][slice.row];
  for (std::int32_t t = 0; t < slice.num_tokens; ++t) {
    const std::int64_t position = slice.first_position + t;
    const auto entry = is_ring(spec) ? 0 : static_cast<std::size_t>(position / in_block);
    // A ring has one block per request, in entry 0.
    LS_CHECK(entry < table.size(), "position {} in a table of {}", position, table.size());
    // A block keeps the tokens of its last writer. In a ring, a new token replaces the one that is
    // block_size positions older.
    Block& block = blocks_[table[entry]];
    block.group = group;
    block.tokens.resize(in_block);
    block.tokens[position % in_block] = {.content = program.contents[slice.first_token + t],
                                         .position = static_cast<std::int32_t>(position)};
  }
}

// whole_ stays empty with one rank, and the other methods then do nothing.
void RankUnion::begin(const BackendConfig& config, std::span<const RankMemory> ranks,
                      RunSummary& summary) {
  if (ranks.size() == 1) return;
  config_ = config;
  whole_.emplace(config_.plan, config_.context.num_ranks, config_.num_rows);
  for (const RankMemory& rank : ranks) ranks_.push_back(rank);
  summary_ = &summary;
}

Checked RankUnion::step_compared() {
  if (!whole_) return {};
  whole_->apply(ranks_.front().program);
  return check_next();
}

Checked RankUnion::finish(bool agreed) {
  if (!whole_ || !agreed) return {};
  auto checked = check_all();
  summary_->union_rows_checked += rows_checked_;
  if (blocks_left_out_ > 0)
    summary_->not_checked.push_back(
        fmt::format("{} blocks at the end of the cache of all ranks; {} are checked",
                    blocks_left_out_, kBlocksAtEnd));
  return checked;
}

// Checks one block per step in rotation, so the cost per step does not grow with the pool.
Checked RankUnion::check_next() {
  for (std::int64_t tried = 0; tried < whole_->num_blocks(); ++tried) {
    next_ = (next_ + 1) % whole_->num_blocks();
    const auto block = static_cast<BlockId>(next_);
    if (whole_->group_of(block) >= 0) return check_block(block);
  }
  return {};
}

// Checks the blocks that hold tokens, in id order. kBlocksAtEnd bounds the pages read from each
// rank.
Checked RankUnion::check_all() {
  std::int64_t checked = 0;
  blocks_left_out_ = 0;
  for (std::int64_t b = 0; b < whole_->num_blocks(); ++b) {
    const auto block = static_cast<BlockId>(b);
    if (whole_->group_of(block) < 0) continue;
    if (checked++ >= kBlocksAtEnd) {
      ++blocks_left_out_;
      continue;
    }
    LS_RETURN_UNLESS_FINE(check_block(block));
  }
  return {};
}

// Derives the rows of the unsharded cache, then counts the ranks whose memory holds each of them.
// Rows are found by their bytes, at any address of the rank's block: the check shares no address
// arithmetic with the ranks.
Checked RankUnion::check_block(BlockId block) {
  const auto g = static_cast<std::size_t>(whole_->group_of(block));
  const KVCacheGroupSpec& group = config_.plan.groups[g];
  std::int32_t number = 0;  // position of the layer in the whole plan
  for (std::size_t before = 0; before < g; ++before)
    number += static_cast<std::int32_t>(config_.plan.groups[before].layer_names.size());
  std::vector<Pages> pages(ranks_.size());
  for (std::size_t i = 0; i < group.layer_names.size(); ++i, ++number) {
    RowsByBytes by_bytes;
    Rows rows = rows_of(block, g, i, number, by_bytes);
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      const ModelLayer* layer = layer_named(ranks_[r].model, group.layer_names[i]);
      if (layer == nullptr) continue;  // in another pipeline stage
      LS_RETURN_IF_ERROR(count_holders(ranks_[r], *layer, block, pages[r], by_bytes, rows));
    }
    LS_RETURN_UNLESS_FINE(check_even(block, g, i, number, rows));
    rows_checked_ += std::ssize(rows);
  }
  return {};
}

// A rank may pad or quantize its rows, so a rank's own size comes first. A layer of no rank gets
// the size of the spec, and check_even() then reports its rows as missing.
std::int64_t RankUnion::row_size_bytes(std::size_t group, std::size_t layer) const {
  const KVCacheGroupSpec& of = config_.plan.groups[group];
  for (const RankMemory& rank : ranks_)
    if (const ModelLayer* held = layer_named(rank.model, of.layer_names[layer]))
      return held->row_size_bytes;
  const KVCacheSpec& spec = of.layer_spec(layer);  // of no rank
  return row_elements(spec) * itemsize_bytes(spec.dtype);
}

RankUnion::Rows RankUnion::rows_of(BlockId block, std::size_t group, std::size_t layer,
                                   std::int32_t number, RowsByBytes& by_bytes) const {
  const KVCacheSpec& spec = config_.plan.groups[group].layer_spec(layer);
  const std::vector<UnshardedCache::Token>& tokens = whole_->tokens(block);
  const WordShape shape = row_words(config_.numbers, spec, number);
  const LatentFormat latent = latent_format(config_.numbers, spec);
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(row_size_bytes(group, layer)));
  Rows rows;
  std::string key;
  for (std::int64_t offset = 0; offset < std::ssize(tokens); ++offset) {
    const UnshardedCache::Token& token = tokens[offset];
    if (token.position < 0) continue;
    const auto [first, last] = rows_of_token(spec.tokens_per_state, token.position);
    for (std::int64_t row = first; row < last; ++row)
      for (std::int64_t part = 0; part < num_parts(spec); ++part)
        for (std::int64_t head = 0; head < spec.num_kv_heads; ++head) {
          const std::uint64_t coord = coordinate(number, part, head);
          const ContentId content = row_content(spec.tokens_per_state, token.content, row);
          if (latent != LatentFormat::none)
            draw_latent_row(row_key(content, coord), latent, bytes);
          else
            draw_row(content, coord, shape, bytes);
          // Rows with equal bytes (short rows of different tokens) cannot be distinguished, so none
          // of them counts as unique. Only the first match can still be marked as unique: all later
          // ones were added without the mark.
          key.clear();
          append(key, bytes);
          const auto [like, end] = by_bytes.equal_range(key);
          const bool is_unique = like == end;
          if (!is_unique) rows[like->second].is_unique = false;
          by_bytes.emplace(key, rows.size());
          rows.push_back({.offset = offset, .part = part, .head = head, .is_unique = is_unique});
        }
  }
  return rows;
}

// A rank may hold a row more than once; it still counts as one holder. Reads only this block's own
// slots, so a row that a rank wrote into another block is missing here.
Result<void> RankUnion::count_holders(const RankMemory& rank, const ModelLayer& layer,
                                      BlockId block, Pages& pages, const RowsByBytes& by_bytes,
                                      Rows& rows) const {
  std::vector<bool> seen(rows.size());
  std::string key;
  for (std::int64_t kv = 0; kv < layer.num_kv; ++kv)
    for (std::int64_t slot = 0; slot < layer.rows_per_block; ++slot)
      for (std::int64_t head = 0; head < layer.num_kv_heads; ++head) {
        const RowPieces pieces = row_pieces(layer, block, kv, slot, head);  // of one page
        const ModelPage page = rank.model.place_of(layer, pieces.begin()->offset).page;
        const auto [entry, is_first] = pages.try_emplace(page);
        if (is_first) {
          LS_ASSIGN_OR_RETURN(entry->second,
                              rank.backend.read_page({.tensor = page.tensor,
                                                      .block = static_cast<BlockId>(page.index)}));
        }
        key.clear();
        for (const RowPiece& piece : pieces)
          append(key,
                 std::span(entry->second)
                     .subspan(rank.model.place_of(layer, piece.offset).byte, piece.size_bytes));
        const auto [first, last] = by_bytes.equal_range(key);
        for (auto row = first; row != last; ++row) seen[row->second] = true;
      }
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i].holders += seen[i] ? 1 : 0;
  return {};
}

// The expected number of holders is the largest one found, and at least least_holders(): a rank
// that keeps too few or too many heads or tokens breaks the evenness. Rows without unique bytes
// only need a holder.
Checked RankUnion::check_even(BlockId block, std::size_t group, std::size_t layer,
                              std::int32_t number, const Rows& rows) const {
  std::int64_t most = least_holders(config_, config_.plan.groups[group].layer_spec(layer));
  for (const Row& row : rows)
    if (row.is_unique) most = std::max(most, row.holders);
  const auto row = std::ranges::find_if(rows, [&](const Row& one) {
    return one.holders == 0 || (one.is_unique && one.holders != most);
  });
  if (row == rows.end()) return {};
  Divergence found;
  found.phase = Phase::ranks_together;
  found.step = whole_->step();
  found.layer = number;
  found.layer_name = config_.plan.groups[group].layer_names[layer];
  found.group = static_cast<std::int32_t>(group);
  found.block = index_of(block);
  found.head = static_cast<std::int32_t>(row->head);
  found.part = row->part == kPartK ? "K" : "V";
  found.token = whole_->tokens(block)[row->offset].position;
  found.expected = fmt::format("on {} of the ranks, as other rows", most);
  found.found = fmt::format("on {}", row->holders);
  found.doing = "reading one block out of the memory of all ranks";
  found.message = fmt::format(
      "{} of head {} of the whole model's layer {} ({}), token {} in block {}: {} of {} ranks hold "
      "it, and other rows of the layer are on {}",
      found.part, row->head, number, found.layer_name, found.token, found.block, row->holders,
      ranks_.size(), most);
  return found;
}

}  // namespace lockstep
