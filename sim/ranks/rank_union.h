// Compares what all ranks hold together, read from their memory, with one device that holds the
// whole model: every row of every token exists, equally often.
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
// Not checked here: states, tokens loaded from a host tier, and a row's position on its rank (each
// rank's own comparison checks all of it).
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

// The tokens of every block, as a cache in one piece would have them.
class UnshardedCache {
 public:
  struct Token {
    ContentId content = 0;
    std::int32_t position = -1;  // in its request; -1: none is there
  };

  UnshardedCache(const KVCacheConfig& plan, std::int32_t context_ranks, std::int32_t num_rows);

  void apply(const StepProgram& program);

  std::int64_t num_blocks() const { return std::ssize(blocks_); }
  std::int64_t step() const { return step_; }
  // The group whose tokens lie in the block; -1: none.
  std::int32_t group_of(BlockId block) const;
  // [tokens of a block of all ranks]
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

class RankUnion final : public MemoryCheck {
 public:
  static constexpr std::int64_t kBlocksAtEnd = 256;

  // One rank alone has nothing to be held together with.
  void begin(const BackendConfig& config, std::span<const RankMemory> ranks,
             RunSummary& summary) override;
  // The next block with tokens in it, in rotation.
  Checked step_compared() override;
  // Blocks with tokens in them, up to kBlocksAtEnd.
  Checked finish(bool agreed) override;

 private:
  // A row of the whole model in one layer of a block, and the ranks that were found to hold it.
  struct Row {
    std::int64_t offset = 0;  // of its token in the block
    std::int64_t part = 0;
    std::int64_t head = 0;
    std::int64_t holders = 0;
    bool is_unique = true;  // no other row has its bytes
  };
  using Rows = std::vector<Row>;
  using RowsByBytes = std::unordered_multimap<std::string, std::size_t>;  // looked up only
  // Of a rank's pages that hold bytes of the block: read once.
  using Pages = std::map<ModelPage, std::vector<std::uint8_t>>;

  Checked check_next();
  Checked check_all();
  Checked check_block(BlockId block);
  std::int64_t row_size_bytes(std::size_t group, std::size_t layer) const;
  Rows rows_of(BlockId block, std::size_t group, std::size_t layer, std::int32_t number,
               RowsByBytes& by_bytes) const;
  Result<void> count_holders(const RankMemory& rank, const ModelLayer& layer, BlockId block,
                             Pages& pages, const RowsByBytes& by_bytes, Rows& rows) const;
  Checked check_even(BlockId block, std::size_t group, std::size_t layer, const Rows& rows) const;

  BackendConfig config_;  // of the whole model
  std::optional<UnshardedCache> whole_;
  std::vector<RankMemory> ranks_;
  RunSummary* summary_ = nullptr;
  std::int64_t next_ = 0;
  std::int64_t rows_checked_ = 0;
  std::int64_t blocks_left_out_ = 0;
};

}  // namespace lockstep
