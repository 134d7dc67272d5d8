// A step, written down: what the simulator has decided, in ids, counts and contents, for a backend
// to execute. The rules that its parts name are those of sim/protocol/backend.h.
//
// 1. No address is in it, and nothing that says where in a page anything lies.
// 2. Its parts run in the order of the members of StepProgram.
// Not checked here: whether each block belongs to its request (the builder of the program does).
#pragma once

#include <cstdint>
#include <vector>

#include "base/ids.h"

namespace lockstep {

// Why a byte is unwritten: never allocated, allocated again, outside of every page (guard zones),
// allocated and to be zeroed in the same step.
enum class Poison : std::uint8_t { fresh = 0, freed = 1, padding = 2, zeroed = 3 };

// Sets entries [first, first + count) of a row's block table to block_ids[begin ..) and its length
// to first + count. Entries before `first` stay.
struct TableUpdate {
  std::int32_t row = 0;
  std::int32_t group = 0;
  std::int32_t first = 0;
  std::uint32_t begin = 0;
  std::uint32_t count = 0;
};

// One entry of a row's block table becomes another block: a retired window block the null block.
struct TableEdit {
  std::int32_t row = 0;
  std::int32_t group = 0;
  std::int32_t index = 0;
  BlockId block{};
};

// The scheduled tokens of one request: positions [first_position, first_position + num_tokens),
// whose contents are contents[first_token ..).
struct RowSlice {
  std::int32_t row = 0;
  std::int32_t first_position = 0;
  std::int32_t num_tokens = 0;
  std::int32_t first_token = 0;
  // Rule (18): position at which the request was admitted after a hit whose last window is computed
  // again; 0: none.
  std::int32_t replay_start = 0;
};

// Rule (21): what the encoder of a row's request has computed for this step: rows 0 to num_rows,
// whose contents are encoder_contents[first_row ..).
struct EncoderSlice {
  std::int32_t row = 0;
  std::int32_t num_rows = 0;
  std::int32_t first_row = 0;
};

struct BlockCopy {
  std::int32_t group = 0;
  BlockId source{};
  BlockId target{};
  // Rule (15): block with the inputs that convolutions keep, after the accepted drafts.
  BlockId conv_source{};
  std::int32_t conv_offset = 0;
};

// Rule (17): a hit that ends inside a block continues in a copy of it.
struct PartCopy {
  std::int32_t group = 0;
  BlockId source{};
  BlockId target{};
  std::int32_t num_rows = 0;  // that the hit covers; what is copied behind them is overwritten
};

struct GroupBlock {
  std::int32_t group = 0;
  BlockId block{};
};

// A group's block and its place in the host tier; loads go to the block, stores to the host.
struct HostTransfer {
  std::int32_t group = 0;
  BlockId block{};
  HostBlockId host{};
};

// Rule (25): rows [first_row, first_row + num_rows) of a resident block, of which those that the
// step has written are copied to the same rows of a host block.
struct HostMirror {
  std::int32_t group = 0;
  BlockId block{};
  HostBlockId host{};
  std::int32_t first_row = 0;
  std::int32_t num_rows = 0;
};

// Rule (25): positions of a row's request that are read and not on a resident page:
// hot_positions[first ..), distinct.
struct HotRead {
  std::int32_t row = 0;
  std::int32_t first = 0;
  std::int32_t num_positions = 0;
};

struct PoisonBlock {
  BlockId block{};
  Poison kind{};
};

// Advances the states of a row's request in one group: reads the state after `first_position`
// tokens from `source` (absent: the zero state) and leaves the state after first_position +
// num_tokens in `target`. Updates of one row and group follow each other in one pass over the
// tokens: mode `all`, a checkpoint, drafts.
struct StateUpdate {
  std::int32_t row = 0;
  std::int32_t group = 0;
  BlockId source{};  // the null block: start from the zero state
  BlockId target{};
  std::int32_t first_position = 0;
  std::int32_t num_tokens = 0;
  std::int32_t first_token = 0;
  // Rule (15): as in BlockCopy. The updates of num_drafts drafts follow, one each.
  BlockId conv_source{};
  std::int32_t conv_offset = 0;
  std::int32_t num_drafts = 0;
  bool is_draft = false;
  // Rule (16): the target keeps the state on its way through a chunk.
  bool is_checkpoint = false;
};

// Digest of everything read through the block table of `row` for `layer`: rule (4).
struct AttentionProbe {
  std::int32_t row = 0;
  std::int32_t layer = 0;
  std::int32_t first = 0;  // positions [first, last)
  std::int32_t last = 0;
};

// Rule (5), for all query heads of one query token with content `content`.
struct AttentionQuery {
  std::int32_t row = 0;
  std::int32_t layer = 0;
  std::int32_t first = 0;
  std::int32_t last = 0;
  std::uint64_t content = 0;
  std::int32_t gap_first = 0;  // rule (23): none where both are equal
  std::int32_t gap_last = 0;
};

// The rows of a request's first num_tokens tokens in a layer, read through that layer's group into
// contiguous memory: how an engine hands the hidden states of a finished request to a trainer.
struct RowExtraction {
  std::int32_t row = 0;
  std::int32_t layer = 0;
  std::int32_t num_tokens = 0;
};

// Rule (24). A request's part in the passes of a drafter. The first pass has positions
// [first_position, first_position + num_tokens), of which the last num_rejected hold drafts that
// were rejected. Contents of its passes follow each other in draft_contents, from first_content on.
struct DraftRow {
  std::int32_t row = 0;
  std::int32_t first_position = 0;
  std::int32_t num_tokens = 0;
  std::int32_t num_rejected = 0;
  std::int32_t first_content = 0;
};

// What data parallel ranks have agreed to run in a step.
struct AgreedBatch {
  std::int32_t num_tokens = 0;  // of this rank; 0: there is one engine
  // One of them has no graph for its tokens, so none replays one.
  bool is_eager = false;
};

// One step, in the order in which its parts run.
struct StepProgram {
  std::int64_t step = 0;
  // States that the previous step's drafts carried past the end of a block, copied into that block:
  // the sampled tokens decide which. First of all operations, since the blocks may be allocated
  // again in this step.
  std::vector<BlockCopy> settled;
  std::vector<std::int32_t> clear_rows;  // finished requests: their rows have length 0
  // blocks whose content is dead or that are newly allocated
  std::vector<PoisonBlock> poison;
  std::vector<GroupBlock> zero;  // the engine's zero list
  std::vector<HostTransfer> loads;
  std::vector<PartCopy> parts;
  std::vector<BlockCopy> copies;  // states from block to block
  std::vector<TableUpdate> table_updates;
  std::vector<BlockId> table_block_ids;
  std::vector<TableEdit> table_edits;
  std::vector<RowSlice> rows;           // scheduled requests, in the engine's order
  std::vector<std::uint64_t> contents;  // one per scheduled token
  std::int32_t num_padded_tokens = 0;   // slot mappings are filled with PAD_SLOT_ID up to here
  std::vector<EncoderSlice> encoder_slices;
  std::vector<std::uint64_t> encoder_contents;  // one per row
  AgreedBatch agreed;
  // Where pages lie from now on, one entry a resident group; the null block: on the host alone.
  std::vector<TableEdit> residency;
  std::vector<HostMirror> mirrors;
  std::vector<HotRead> hot_reads;
  std::vector<std::int32_t> hot_positions;
  std::vector<StateUpdate> state_updates;
  std::vector<DraftRow> draft_rows;
  std::vector<std::uint64_t> draft_contents;
  std::vector<HostTransfer> stores;
  std::vector<AttentionProbe> probes;
  std::vector<AttentionQuery> queries;
  std::vector<RowExtraction> extractions;
};

}  // namespace lockstep
