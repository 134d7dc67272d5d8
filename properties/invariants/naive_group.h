// The cache of one group in a page of code, kind by kind as its rule reads: which blocks a request
// holds there, what a prefix hit is, what is let go. The managers of reference/ are held against
// it, operation by operation.
//
//   full attention  every block; a hit is the longest chain from the left
//   sliding window  the blocks of the last window - 1 tokens and the new ones; a hit is the
//                   right-most place before which as many blocks as the window needs are cached, or
//                   all there are
//   chunked local   the blocks of the current chunk; what lies before it counts as hit
//   states, none    one block for the whole request; no hits
//   states, align   the running state and saved ones at block boundaries; one block is taken for a
//                   step however many it crosses; a hit is the right-most saved state
//   states, all     a state a block, of which the running one is kept; hits as in align
//
// Not modelled: several groups, blocks longer than a hash, EAGLE's dropped block, drafts, sparse
// retention, the rules of vllm-0.22.1 for retiring states.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "properties/invariants/naive_block_pool.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

class NaiveGroup {
 public:
  NaiveGroup(const KVCacheSpec& spec, NaiveBlockPool& pool) : spec_(spec), pool_(pool) {}

  struct Table {
    std::vector<BlockId> blocks;
    std::int64_t num_published = 0;
  };

  // keys[i]: the content of block i and all before it. At most max_length tokens.
  std::vector<BlockId> hit(std::span<const BlockKey> keys, std::int64_t max_length) const;
  void take_hit(Table& table, const std::vector<BlockId>& hit, std::int64_t num_tokens);
  void retire(Table& table, std::int64_t num_computed);
  void grow(Table& table, std::int64_t num_tokens);
  void publish(Table& table, std::span<const BlockKey> keys, std::int64_t num_tokens);
  void free(Table& table);

 private:
  // Blocks at the head that nobody reads when num_computed tokens are computed.
  std::int64_t num_unread(std::int64_t num_computed) const;
  BlockId cached(std::span<const BlockKey> keys, std::int64_t index) const {
    return pool_.find(keys[static_cast<std::size_t>(index)], 0);
  }
  bool all_cached(std::span<const BlockKey> keys, std::int64_t first, std::int64_t last) const;

  const KVCacheSpec& spec_;
  NaiveBlockPool& pool_;
};

}  // namespace lockstep
