// What all ranks hold together, read out of their memory, against what one device that holds the
// whole model would: every row of every token is there, and as often as its like.
//
// (1) The unsharded side keeps content ids by group, block and token, with blocks of as many tokens
//     as all ranks of context parallelism put into one: no rank, page or layout is known to it.
// (2) A row is found by its bytes: of what the ranks have in a block, each row is looked up among
//     all that the whole model has in that block. Nobody says which rank should hold which head.
// (3) All rows of a layer, over tokens, parts and heads, lie on equally many ranks, at least one.
//     Short rows of different tokens may have equal bytes: of those, that somebody has them.
//
// Not checked here: states, tokens that come out of a host tier, and where on a rank a row lies
// (each rank's own comparison does all of it).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "reference/memory/content.h"
#include "reference/memory/memory_model.h"
#include "sim/protocol/backend.h"
#include "sim/verdict/divergence.h"

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
  std::vector<Block> blocks_;
  std::vector<std::vector<std::vector<BlockId>>> tables_;  // [group][row]
};

class RankUnion {
 public:
  static constexpr std::int64_t kBlocksAtEnd = 256;

  // `device`: of the whole model; outlives this.
  explicit RankUnion(const BackendConfig& device);

  void add_rank(const MemoryModel& model, Backend& backend);
  // The program of the step that has run; that of any rank.
  void apply(const StepProgram& program) { whole_.apply(program); }

  // The next block with tokens in it, in rotation.
  Result<std::optional<Divergence>> check_next();
  // Blocks with tokens in them, up to kBlocksAtEnd.
  Result<std::optional<Divergence>> check_all();

  std::int64_t rows_checked() const { return rows_checked_; }
  std::int64_t blocks_left_out() const { return blocks_left_out_; }  // by check_all()

 private:
  struct Rank {
    const MemoryModel* model = nullptr;
    Backend* backend = nullptr;
  };
  // A row of the whole model in one layer of a block, and the ranks that were found to hold it.
  struct Row {
    std::int64_t offset = 0;  // of its token in the block
    std::int64_t part = 0;
    std::int64_t head = 0;
    std::int64_t holders = 0;
    bool is_unique = true;  // no other row has its bytes
  };
  using Rows = std::vector<Row>;
  // Of a rank's pages that hold bytes of the block: read once.
  using Pages = std::map<ModelPage, std::vector<std::uint8_t>>;

  Result<std::optional<Divergence>> check_block(BlockId block);
  std::int64_t row_size_bytes(std::size_t group, std::size_t layer) const;
  Rows rows_of(BlockId block, std::size_t group, std::size_t layer, std::int32_t number,
               std::multimap<std::string, std::size_t>& by_bytes) const;
  Result<void> count_holders(const Rank& rank, const ModelLayer& layer, BlockId block, Pages& pages,
                             const std::multimap<std::string, std::size_t>& by_bytes,
                             Rows& rows) const;
  std::optional<Divergence> first_uneven(BlockId block, std::size_t group, std::size_t layer,
                                         const Rows& rows) const;

  const BackendConfig& device_;
  UnshardedCache whole_;
  std::vector<Rank> ranks_;
  std::int64_t next_ = 0;
  std::int64_t rows_checked_ = 0;
  std::int64_t blocks_left_out_ = 0;
};

}  // namespace lockstep
