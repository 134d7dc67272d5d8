// Parameters of kernels and of their launchers: plain structs, passed by value or as arrays in
// device memory. Offsets and strides are 64-bit and count bytes, unless a name says otherwise.
//
// 1. A pointer is a device pointer. 2. A count of zero launches nothing.
// 3. Strides and offsets describe a layout. No struct has its name.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/ids.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep::cuda {

// Division by a number known on the host, for dividends below 2^32: ((n * multiplier >> 32) + n) >>
// shift.
struct Divisor {
  std::uint32_t value = 1;
  std::uint32_t multiplier = 1;
  std::uint32_t shift = 0;
};
constexpr Divisor make_divisor(std::uint32_t value) {
  std::uint32_t shift = 0;
  while ((std::uint64_t{1} << shift) < value) ++shift;
  const std::uint64_t excess = (std::uint64_t{1} << shift) - value;
  return {value, static_cast<std::uint32_t>((excess << 32) / value + 1), shift};
}

// The rows of a layer's tokens. A row covers tokens_per_row tokens and is written with the last of
// them; or a token has rows_per_token rows. A launch that writes the rows of tokens has a source
// row for each row that they may complete: source row i belongs to token i / rows_per_token.
struct TokenRows {
  Divisor tokens_per_row;
  Divisor rows_per_token;
};
constexpr TokenRows token_rows(const TokensPerState& per_row) {
  return {.tokens_per_row = make_divisor(static_cast<std::uint32_t>(per_row.tokens)),
          .rows_per_token = make_divisor(static_cast<std::uint32_t>(per_row.rows))};
}
// Rows that the first num_tokens tokens complete.
constexpr std::int64_t rows_before(const TokenRows& rows, std::int64_t num_tokens) {
  return num_tokens / rows.tokens_per_row.value * rows.rows_per_token.value;
}
// Source rows of num_tokens tokens.
constexpr std::int32_t source_rows(const TokenRows& rows, std::int32_t num_tokens) {
  return num_tokens * static_cast<std::int32_t>(rows.rows_per_token.value);
}

// Host pages: the rows of a layer whose pages are not on the device. All are on the host; rows that
// were read are also in their request's hot region. A host row is host block * block size + row.
struct AwayRows {
  std::byte* host = nullptr;  // row 0 of host block 0
  std::int64_t host_block_stride = 0;
  const std::int32_t* host_table = nullptr;  // host block ids, [num_rows, host_width]
  std::int64_t host_width = 0;               // entries
  std::byte* hot = nullptr;                  // row 0 of block 0
  std::int64_t hot_block_stride = 0;
  const std::int32_t* hot_table = nullptr;  // block ids, [num_rows, hot_width]
  std::int64_t hot_width = 0;               // entries
  // Host rows by slot of the region, [num_rows, num_slots]; below zero: none.
  const std::int32_t* held = nullptr;
  // Slots by position, [num_rows, num_positions]: where the row lies if it is held there.
  const std::int32_t* places = nullptr;
  std::int32_t num_slots = 0;
  std::int32_t num_positions = 0;
  Divisor block_size;          // rows, of all three
  std::int64_t row_bytes = 0;  // and from row to row
  std::int32_t unit_bytes = 1;
};

// The rows of one layer that keeps a K (and V) row per token and head.
struct RowCache {
  std::byte* base = nullptr;      // K row of kernel block 0, token 0, head 0
  std::int64_t block_stride = 0;  // between kernel blocks
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t part_stride = 0;         // from a K row to its V row
  const std::int32_t* table = nullptr;  // kernel block ids, [num_rows, table_width]
  std::int64_t table_width = 0;         // entries
  Divisor block_size;                   // rows in a kernel block
  TokenRows token_rows;
  std::int32_t num_parts = 2;  // K and V; 1: K alone (MLA, hidden states)
  std::int32_t num_kv_heads = 1;
  std::int32_t head_size = 0;  // elements of a row
  std::int32_t row_bytes = 0;
  std::int32_t unit_bytes = 1;  // widest access that every row allows: 16, 8, 4, 2 or 1
  std::int32_t layer = 0;       // position in the order of the whole plan
  std::int32_t first_head = 0;  // of the whole model, KV and query head
  std::int32_t first_query_head = 0;
  std::int32_t queries_per_kv = 1;
  DType dtype = DType::bf16;
  bool is_ring = false;  // positions go round the block of the table's first entry
  // Kernel blocks of sinks before every table, and the first of them.
  std::int32_t sink_blocks = 0;
  std::int32_t first_sink_block = 0;
  const AwayRows* away = nullptr;  // rows of null-block entries; null: every row has a block
};

// The block tables of one KV cache group, or a mapped one of some of its layers.
struct GroupTable {
  std::int32_t* entries = nullptr;  // manager block ids, [num_rows, width]
  std::int32_t* lengths = nullptr;  // entries in use, [num_rows]
  // Kernel block ids, [num_rows, width * blocks_per_kv_block]; entries itself where both are 1.
  std::int32_t* kernel_entries = nullptr;
  std::int32_t width = 0;  // of a row of entries
  std::int32_t blocks_per_kv_block = 1;
  std::int32_t kernel_block_stride = 1;  // from a block's first one to the next block's
  std::int32_t kernel_block_size = 1;    // tokens
  std::int32_t slot_block_size = 1;      // tokens; what slots are computed with
  bool is_ring = false;                  // its tokens go round the block of the first entry
  bool is_replayed = false;  // written too by tokens that are computed again after a hit
  bool is_encoder = false;   // keeps rows of encoders, not of tokens
  bool is_hot = false;       // keeps copies of rows that were read
  bool is_whole = false;     // every rank of a context keeps all of its tokens
};

// What a step's slots need of a row's request: the position after its last scheduled token, and the
// position from which a hit was recomputed (0: it was not).
struct RowReach {
  std::int32_t end = 0;
  std::int32_t replay_start = 0;
};

struct TableAppend {
  std::int32_t row, group, first;
  std::uint32_t begin, count;
};
struct TableEntry {
  std::int32_t row, group, index, block;
};
struct TableClearParams {
  const GroupTable* groups;
  const std::int32_t* rows;
  std::int32_t num_groups;
  std::int32_t num_rows;
};
struct TableAppendParams {
  const GroupTable* groups;
  const TableAppend* appends;
  const std::int32_t* block_ids;
  std::int32_t num_appends;
};
struct TableEditParams {
  const GroupTable* groups;
  const TableEntry* edits;
  std::int32_t num_edits;
};

struct SlotMappingParams {
  const GroupTable* groups;
  const std::int32_t* positions;   // [num_tokens]
  const std::int32_t* token_rows;  // [num_tokens], the row of each token's request
  Slot* slots;                     // [num_groups, slots_stride]
  std::int64_t slots_stride;       // elements
  std::int32_t num_groups;
  std::int32_t num_tokens;
  // num_tokens in device memory, for a launch that is repeated for other batches; null: num_tokens.
  const std::int32_t* num_live_tokens;
  std::int32_t num_padded_tokens;
  Slot pad_slot;
  std::int32_t context_ranks;  // that share the tokens of a request, of which this is the
  std::int32_t context_rank;   // context_rank-th
  std::int32_t interleave;     // tokens in a row that go to the same rank
  // [num_rows]; null: every token has a slot, without rings and recomputed windows.
  const RowReach* reach;
  std::int32_t num_replayed_tokens;  // after a hit, in groups that are not is_replayed
  bool of_encoders = false;          // positions are rows of encoders; other groups get pad_slot
};

// A draft model's pass: tokens whose positions advance by `advance`, up to last_position.
struct DraftSlotsParams {
  const GroupTable* groups;
  const std::int32_t* rows;   // [num_tokens], the row of each token's request
  std::int32_t* positions;    // [num_tokens], of the previous pass; of this pass afterwards
  Slot* slots;                // [num_groups, slots_stride]
  std::int64_t slots_stride;  // elements
  std::int32_t num_groups;
  std::int32_t num_tokens;
  std::int32_t advance;
  std::int32_t last_position;
  Slot pad_slot;
};

// Rule (1): the source rows of one layer, made from content ids. Contiguous [num_rows,
// num_kv_heads, row_bytes].
struct FillRowsParams {
  const std::uint64_t* contents;  // of the tokens
  std::byte* key;
  std::byte* value;                   // unused when num_parts is 1
  std::uint64_t keep_mask, set_mask;  // shape(): (word & keep_mask) | set_mask
  std::int32_t num_rows, num_kv_heads, num_parts, row_bytes, layer, first_head;
  TokenRows token_rows = {};
  std::int32_t first_part = 0;  // what `key` is; `value` is the one behind it
};

// Rows of the cache into contiguous [num_tokens, num_kv_heads, row_bytes]. Rows of padded slots do
// not change.
struct GatherRowsParams {
  RowCache cache;
  const Slot* slots;
  std::byte* key;
  std::byte* value;
  std::int32_t num_tokens;
};

// Rows of resident pages that a step also copies to the host: device rows
// [first_row, first_row + num_rows), block * block size + row, and their host rows.
struct RowMirrorItem {
  std::int64_t first_row, host_row;
  std::int32_t num_rows;
};
struct MirrorLayer {
  const std::byte* base;  // row 0 of block 0 of the resident layer
  std::int64_t block_stride;
  const Slot* slots;        // [num_tokens]
  std::int32_t begin, end;  // of the items, which ascend by first_row
  std::int32_t layer;       // of AwayRows
};
struct MirrorRowsParams {
  const MirrorLayer* layers;
  const AwayRows* away;
  const RowMirrorItem* items;
  std::int32_t num_layers, num_tokens;
  std::int64_t max_row_bytes;
};

// Batch rows whose hot regions become empty, with slots in ascending order.
struct ClearRegionsParams {
  const std::int32_t* rows;
  std::int32_t* held;   // [rows of the batch, num_slots]
  std::int32_t* order;  // likewise: slots, least recently used first
  std::int32_t num_rows, num_slots;
};
// Positions of a request that are read from the host.
struct HotReadItem {
  std::int32_t row, first, num_positions;
};
// A row copied from the host to a slot; host_row below zero: the slot already holds it.
struct HotSwap {
  std::int32_t row, host_row, slot;
};
struct HotReadParams {
  const HotReadItem* reads;
  const std::int32_t* positions;  // [num_positions]
  const AwayRows* away;           // tables and sizes, the same for all layers
  std::int32_t* held;
  std::int32_t* places;
  std::int32_t* order;  // [rows of the batch, num_slots]
  std::int32_t* used;   // likewise: the read that used the slot last
  HotSwap* swaps;       // [num_positions]
  std::int32_t num_reads;
  std::int32_t read_number;  // of the first read; reads of a run are counted from 1
};
struct SwapRowsParams {
  const AwayRows* away;  // [num_layers]
  const HotSwap* swaps;
  std::int32_t num_layers, num_swaps;
  std::int64_t max_row_bytes;
};

// A contiguous piece of a tensor per block: the bytes of one layer, a whole page, or the K or the V
// half of a layout that separates them.
struct BlockRegion {
  std::byte* base = nullptr;      // of block 0
  std::int64_t block_stride = 0;  // from block to block
  std::int64_t size_bytes = 0;
  std::int64_t tensor_offset = 0;  // of base in its tensor
  std::int32_t tensor = 0;
  std::int32_t unit_bytes = 1;  // widest access that all regions and pages allow
};
// Regions of a group: regions[begin, end).
struct RegionRange {
  std::int32_t begin = 0;
  std::int32_t end = 0;
};
struct GroupBlockItem {
  std::int32_t group, block;
};
struct BlockCopyItem {
  std::int32_t group, source, target;
};
struct PoisonItem {
  std::int32_t block;
  std::uint32_t kind;
};
struct ZeroBlocksParams {
  const BlockRegion* regions;
  const RegionRange* groups;
  const GroupBlockItem* items;
  std::int32_t num_items;
  std::int32_t max_regions;  // of any group
  std::int64_t max_region_bytes;
};
// A region of every block, in a source and in a target that may be the same memory: copies within
// the cache, loads and stores of the host tier. Each side has its own stride.
struct CopyRegion {
  std::byte* target = nullptr;  // of target block 0
  const std::byte* source = nullptr;
  std::int64_t target_stride = 0;
  std::int64_t source_stride = 0;
  std::int64_t size_bytes = 0;  // bytes copied per block; padding is not
  std::int32_t unit_bytes = 1;  // widest access that both sides allow
};
struct CopyBlocksParams {
  const CopyRegion* regions;
  const RegionRange* groups;
  const BlockCopyItem* items;
  std::int32_t num_items;
  std::int32_t max_regions;
  std::int64_t max_region_bytes;
};
// Rules (6) to (8), over all regions of all tensors. Without items: every block, with kind_of_all.
struct PoisonBlocksParams {
  const BlockRegion* regions;
  const std::int64_t* page_size_bytes;  // per tensor
  const PoisonItem* items;
  std::int32_t num_regions;
  std::int32_t num_items;  // or the number of blocks
  std::uint32_t kind_of_all;
  std::int64_t max_region_bytes;
};

struct FingerprintItem {
  std::int32_t tensor, block;
};
struct FingerprintParams {
  const BlockRegion* tensors;  // whole pages
  const FingerprintItem* items;
  unsigned long long* sums;  // [num_items, 2], zero before the launch
  std::int32_t num_items;
  std::int64_t max_page_bytes;
};

// A piece of a probe: positions [first, last) of one row in one layer. A row below zero is padding.
struct DigestPiece {
  std::int32_t probe, row, layer_index, first, last;
};
struct DigestParams {
  const RowCache* layers;
  const DigestPiece* pieces;
  unsigned long long* digests;  // per probe, zero before the launch
  std::int32_t num_pieces;
  std::int32_t max_positions;  // of any piece
};

// One state tensor of one layer: words strided over padded pages.
struct StateCache {
  std::byte* base = nullptr;  // in the page of block 0
  std::int64_t page_stride = 0;
  std::int64_t size_bytes = 0;
  std::int32_t unit_bytes = 1;
  std::int32_t layer = 0;
  std::int32_t first_head = 0;  // which of the parts that tensor parallelism makes
  std::int32_t state = 0;       // index in the page
};
struct StateUpdateItem {
  std::int32_t group, source, target, num_tokens, first_token;  // group below zero: padding
  // The block that receives the state after checkpoint_tokens of the tokens; 0: none.
  std::int32_t checkpoint = 0, checkpoint_tokens = 0;
};
struct StateUpdateParams {
  const StateCache* states;
  const RegionRange* groups;  // of states
  const StateUpdateItem* items;
  const std::uint64_t* contents;
  std::int32_t num_items;
  std::int32_t max_states;  // of any group
  std::int64_t max_state_bytes;
};

}  // namespace lockstep::cuda
