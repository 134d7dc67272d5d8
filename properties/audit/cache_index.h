// The prefix cache as those see it who route by its events: rebuilt from what an engine says it
// stored, removed and cleared, and from nothing else.
//
// (1) What is removed was stored, in that group, as often as it is removed. (2) A hash stands for
// one block: its tokens, its extra key and what lies before it. (3) In a group of full attention
// the block before a whole one that is stored is there, or nobody can place it. (4) Tokens come in
// whole blocks, and there are as many of them as the hashes need.
//
// Tokens of groups that leave blocks out (windows, states) are not matched with their hashes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "traces/formats/recording.h"

namespace lockstep {

class CacheIndex {
 public:
  // Per group, tokens of a block if it leaves none out, or 0.
  explicit CacheIndex(std::vector<std::int32_t> block_sizes)
      : block_sizes_(std::move(block_sizes)), groups_(block_sizes_.size()) {}

  // What is known of the blocks that a stored event describes: `contents` of their last tokens, 0
  // where it is not known, and `blocks`, null where they are not known; one of each per hash.
  struct StoredBlocks {
    std::vector<std::uint64_t> contents{};
    std::vector<BlockId> blocks{};
    std::int32_t end = -1;  // tokens up to the end of the event; -1: not known
    bool is_wrong = false;  // the event differs from them, which is reported
  };
  // `refuse` is given the sentence of each rule that the event breaks.
  void take(const RecordedCacheEvent& event, const StoredBlocks& stored,
            const std::function<void(std::string)>& refuse);
  // Content and number of the tokens up to a hash's end, of any group that has it.
  struct Prefix {
    std::uint64_t content = 0;
    std::int32_t end = -1;
  };
  std::optional<Prefix> prefix_of(const std::string& hash) const;
  // Whether the block is stored already, under any hash.
  bool is_stored(std::size_t group, BlockId block) const {
    return groups_[group].blocks.contains(block);
  }
  // Whether a block whose last token has this content can be hit.
  bool has(std::size_t group, std::uint64_t content) const {
    return groups_[group].num_of.contains(content);
  }
  // Whether all that is stored there is known by content.
  bool knows(std::size_t group) const {
    return block_sizes_[group] > 0 && groups_[group].num_unknown == 0;
  }

 private:
  struct Entry {
    std::uint64_t content = 0;      // 0: not known
    std::uint64_t identity = 0;     // of tokens, key and hash before; 0: not known
    std::int32_t num = 0;           // blocks
    std::int32_t end = -1;          // tokens up to its end; -1: not known
    std::vector<BlockId> blocks{};  // those that are known
  };
  struct Group {
    std::unordered_map<std::string, Entry> of_hash;
    std::unordered_map<std::uint64_t, std::int32_t> num_of;  // blocks, by content
    std::int64_t num_unknown = 0;
    std::set<BlockId> blocks;  // those of the hashes that are known
  };
  void store(const RecordedCacheEvent& event, const StoredBlocks& stored,
             const std::function<void(std::string)>& refuse);
  void remove(Group& group, const std::string& hash);

  std::vector<std::int32_t> block_sizes_;
  std::vector<Group> groups_;
};

}  // namespace lockstep
