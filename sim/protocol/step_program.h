// One step, written down for a backend to execute: what the simulator has decided, in ids, counts
// and contents. The rules that its parts name are those of sim/protocol/backend.h.
//
// Invariants
// (1) A program contains no address and no offset inside a page. The backend derives both.
// (2) Its parts run in the order of the members of StepProgram.
// (3) Ranges of a part ([begin, begin + count) and the like) index an array of the same program.
//
// Not checked here: whether each block belongs to its request (the builder of the program does).
#pragma once

#include <cstdint>
#include <vector>

#include "base/ids.h"

namespace lockstep {

// Reason why a byte is unwritten: never allocated, allocated again, outside of every page (guard
// zones), allocated and to be zeroed in the same step. The values enter the pattern of rule (6).
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

// Replaces one entry of a row's block table: a retired window block becomes the null block.
struct TableEdit {
  std::int32_t row = 0;
  std::int32_t group = 0;
  std::int32_t index = 0;
  BlockId block{};
};

// The scheduled tokens of one request: positions [first_position, first_position + num_tokens),
// whose contents are contents[first_token ..). num_tokens is at least 1.
struct RowSlice {
  std::int32_t row = 0;
  std::int32_t first_position = 0;
  std::int32_t num_tokens = 0;
  std::int32_t first_token = 0;
  // Rule (18): position at which the request was admitted after a hit whose last window is computed
  // again; 0: none, as position 0 is never a hit.
  std::int32_t replay_start = 0;
};

// Rule (21): rows that the encoder of a row's request has computed for this step: rows 0 to
// num_rows - 1, whose contents are encoder_contents[first_row ..).
struct EncoderSlice {
  std::int32_t row = 0;
  std::int32_t num_rows = 0;
  std::int32_t first_row = 0;
};

// Copies the state of a request from one block to another, mode align: from the hit block, or from
// the previous block.
struct BlockCopy {
  std::int32_t group = 0;
  BlockId source{};
  BlockId target{};
  // Rule (15): block with the inputs that convolutions keep, after the accepted drafts.
  BlockId conv_source{};
  std::int32_t conv_offset = 0;
};

// Rule (17): a hit that ends inside a block continues in a copy of it, or in the block itself:
// source and target are then equal.
struct PartCopy {
  std::int32_t group = 0;
  BlockId source{};
  BlockId target{};
  std::int32_t num_rows = 0;  // rows that the hit covers; the step overwrites those after them
};

// A block as one group uses it. The group decides which bytes of the block are zeroed.
struct GroupBlock {
  std::int32_t group = 0;
  BlockId block{};
};

// A group's block and its host block: a load copies from the host block, a store to it.
struct HostTransfer {
  std::int32_t group = 0;
  BlockId block{};
  HostBlockId host{};
};

// Rule (25): of rows [first_row, first_row + num_rows) of a resident block, those that the step has
// written are copied to the same rows of a host block.
struct HostMirror {
  std::int32_t group = 0;
  BlockId block{};
  HostBlockId host{};
  std::int32_t first_row = 0;
  std::int32_t num_rows = 0;
};

// Rule (25): positions that a row's request reads and that are not on a resident page:
// hot_positions[first ..), distinct.
struct HotRead {
  std::int32_t row = 0;
  std::int32_t first = 0;
  std::int32_t num_positions = 0;
};

// Rule (8): poisons all bytes that belong to the block.
struct PoisonBlock {
  BlockId block{};
  Poison kind{};
};

// Advances the recurrent states of a row's request in one group. Reads the state after
// `first_position` tokens from `source` and leaves the state after first_position + num_tokens in
// `target`. Several updates of one row and group run back to back, in one pass over the tokens:
// mode `all`, a checkpoint, drafts. Example: 40 tokens in mode `all` with block_size 16 are updates
// of 16, 16 and 8 tokens, each with the previous target as its source.
struct StateUpdate {
  std::int32_t row = 0;
  std::int32_t group = 0;
  BlockId source{};  // the null block: start from the zero state
  BlockId target{};
  std::int32_t first_position = 0;
  std::int32_t num_tokens = 0;
  std::int32_t first_token = 0;
  // Rule (15): as in BlockCopy. If num_drafts is not 0, that many updates of one draft each follow.
  BlockId conv_source{};
  std::int32_t conv_offset = 0;
  std::int32_t num_drafts = 0;
  bool is_draft = false;
  // Rule (16): the target receives a state from the middle of a chunk.
  bool is_checkpoint = false;

  // Rule (15): whether the output of the update's token `token` is read back.
  bool reads_output(std::int32_t token) const {
    return token < 4 || token % 61 == 0 || token == num_tokens - 1;
  }
  std::int64_t num_outputs_read() const {
    std::int64_t reads = 0;
    for (std::int32_t token = 0; token < num_tokens; ++token) reads += reads_output(token);
    return reads;
  }
};

// Rule (4): requests the digest of all positions [first, last) that `layer` reads through the block
// table of `row`.
struct AttentionProbe {
  std::int32_t row = 0;
  std::int32_t layer = 0;
  std::int32_t first = 0;
  std::int32_t last = 0;
};

// Rule (5): requests the outputs of all query heads for one query token. Its queries are made from
// `content`; it attends to positions [first, last).
struct AttentionQuery {
  std::int32_t row = 0;
  std::int32_t layer = 0;
  std::int32_t first = 0;
  std::int32_t last = 0;
  std::uint64_t content = 0;
  std::int32_t gap_first = 0;  // rule (23): [gap_first, gap_last) is not read
  std::int32_t gap_last = 0;
};

// Rule (11): reads the rows of a request's first num_tokens tokens in a layer, through that layer's
// group, into contiguous memory. An engine passes the hidden states of a finished request to a
// trainer in this way.
struct RowExtraction {
  std::int32_t row = 0;
  std::int32_t layer = 0;
  std::int32_t num_tokens = 0;
};

// Rule (24): a request's part in the passes of a draft model. The first pass has positions
// [first_position, first_position + num_tokens); the last num_rejected of them hold rejected
// drafts. The contents of all passes are draft_contents[first_content ..), pass by pass.
struct DraftRow {
  std::int32_t row = 0;
  std::int32_t first_position = 0;
  std::int32_t num_tokens = 0;
  std::int32_t num_rejected = 0;
  std::int32_t first_content = 0;
};

// The batch size on which the data parallel ranks have agreed for a step.
struct AgreedBatch {
  std::int32_t num_tokens = 0;  // of this rank, padding included; 0: there is one engine
  // True if a rank has no graph for its tokens, so no rank replays one.
  bool is_eager = false;
};

// One step. The order of the members is the order of execution, rule (9).
struct StepProgram {
  std::int64_t step = 0;
  // States that the previous step's drafts carried past the end of a block, copied into that block:
  // the sampled tokens decide which. They run before all other operations, since this step may
  // allocate the blocks again.
  std::vector<BlockCopy> settled;
  std::vector<std::int32_t> clear_rows;  // rows of finished requests: their tables get length 0
  // Blocks whose content is dead, and newly allocated ones.
  std::vector<PoisonBlock> poison;
  std::vector<GroupBlock> zero;  // the engine's zero list, in its order
  std::vector<HostTransfer> loads;
  std::vector<PartCopy> parts;    // partial hits
  std::vector<BlockCopy> copies;  // states, mode align
  std::vector<TableUpdate> table_updates;
  std::vector<BlockId> table_block_ids;
  std::vector<TableEdit> table_edits;
  std::vector<RowSlice> rows;           // scheduled requests, in the engine's order
  std::vector<std::uint64_t> contents;  // one per scheduled token
  std::int32_t num_padded_tokens = 0;   // entries per slot mapping, the last ones PAD_SLOT_ID
  std::vector<EncoderSlice> encoder_slices;
  std::vector<std::uint64_t> encoder_contents;  // one per encoder row
  AgreedBatch agreed;
  // Rule (25): new positions of pages, one entry per resident group. The null block: only on the
  // host.
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
