// Compares what all ranks hold together, read from their memory, with one device that holds the
// whole model: every row of every token exists, equally often. It finds a head or token that a
// wrong sharding rule leaves out on every rank, which no rank's own comparison can find.
//
// Invariants
// (1) The unsharded side keeps content ids by group, block and token, in blocks of as many tokens
//     as all context parallel ranks together. It does not depend on ranks, pages or layouts.
// (2) A row is found by its bytes: each row of a rank's block is looked up among all rows that the
//     whole model has in that block. The rank that should hold a head is not checked.
// (3) All rows of a layer, over tokens, parts and heads, exist on equally many ranks, at least one;
//     rows of a replicated cache on all ranks with the same heads. Short rows of different tokens
//     may have equal bytes: at least one rank must have them.
//
// Not checked here: recurrent states, tokens loaded from a host tier, and a row's position on its
// rank (each rank's own comparison checks all of it).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "reference/memory/content.h"
#include "reference/memory/memory_model.h"
#include "sim/engine/run_memory.h"

namespace lockstep {

// The tokens of every block, as a cache on one device would hold them. It follows the step
// programs. A token whose content a program does not state is left out, so an incomplete cache is
// never wrong.
class UnshardedCache {
 public:
  struct Token {
    ContentId content = 0;
    std::int32_t position = -1;  // in its request; -1: unknown or unwritten
  };

  // `context_ranks`: ranks that share the tokens of a block. REQUIRES: `plan` outlives the object.
  UnshardedCache(const KVCacheConfig& plan, std::int32_t context_ranks, std::int32_t num_rows);

  // Applies one rank's program of a step. REQUIRES: programs of consecutive steps.
  void apply(const StepProgram& program);

  std::int64_t num_blocks() const { return std::ssize(blocks_); }
  std::int64_t step() const { return step_; }
  // Returns the group whose tokens are in the block; -1: none.
  std::int32_t group_of(BlockId block) const;
  // Returns the block's tokens: [block_size * context_ranks] for a sharded cache, [block_size] for
  // a replicated one, empty for an unwritten block.
  const std::vector<Token>& tokens(BlockId block) const;

 private:
  struct Block {
    std::int32_t group = -1;
    std::vector<Token> tokens;
  };
  void forget(BlockId block);
  void write(const StepProgram& program, const RowSlice& slice, std::int32_t group);

  const KVCacheConfig& plan_;
  const std::int32_t context_ranks_;
  std::int64_t step_ = -1;
  IdVector<BlockId, Block> blocks_;
  std::vector<std::vector<std::vector<BlockId>>> tables_;  // [group][row]
};

// The check. Reading a block back from all ranks is expensive, so each step checks one block, and
// the end of a run checks at most kBlocksAtEnd.
class RankUnion final : public MemoryCheck {
 public:
  static constexpr std::int64_t kBlocksAtEnd = 256;

  // Does nothing for one rank: its own comparison covers everything.
  void begin(const BackendConfig& config, std::span<const RankMemory> ranks,
             RunSummary& summary) override;
  // Checks the next block that holds tokens, in rotation.
  Checked step_compared() override;
  // Checks the blocks that hold tokens, up to kBlocksAtEnd. Blocks after them are listed as not
  // checked. Skipped after a divergence, whose cause is already known.
  Checked finish(bool agreed) override;

 private:
  // A row of the whole model in one layer of a block, and the number of ranks found to hold it.
  struct Row {
    std::int64_t offset = 0;  // index of its token in UnshardedCache::tokens()
    std::int64_t part = 0;
    std::int64_t head = 0;
    std::int64_t holders = 0;
    bool is_unique = true;  // True if no other row has its bytes
  };
  using Rows = std::vector<Row>;
  using RowsByBytes = std::unordered_multimap<std::string, std::size_t>;  // looked up only
  // A rank's pages that hold bytes of the block, each read once.
  using Pages = std::map<ModelPage, std::vector<std::uint8_t>>;

  Checked check_next();
  Checked check_all();
  Checked check_block(BlockId block);
  // Bytes of one row of the layer, as some rank stores it.
  std::int64_t row_size_bytes(std::size_t group, std::size_t layer) const;
  // Returns the rows that the whole model has in the block, and indexes them by their bytes.
  // `number`: position of the layer in the whole plan, which enters the bytes (backend.h, rule 14).
  Rows rows_of(BlockId block, std::size_t group, std::size_t layer, std::int32_t number,
               RowsByBytes& by_bytes) const;
  // Reads the rank's part of the block and counts it as a holder of each row found there.
  Result<void> count_holders(const RankMemory& rank, const ModelLayer& layer, BlockId block,
                             Pages& pages, const RowsByBytes& by_bytes, Rows& rows) const;
  // Returns a divergence if a row is missing, or is on fewer ranks than the others: invariant (3).
  // `number`: as above.
  Checked check_even(BlockId block, std::size_t group, std::size_t layer, std::int32_t number,
                     const Rows& rows) const;

  BackendConfig config_;  // of the whole model
  std::optional<UnshardedCache> whole_;
  std::vector<RankMemory> ranks_;
  RunSummary* summary_ = nullptr;
  std::int64_t next_ = 0;  // block checked last, for the rotation
  std::int64_t rows_checked_ = 0;
  std::int64_t blocks_left_out_ = 0;  // at the end of the run
};

}  // namespace lockstep
