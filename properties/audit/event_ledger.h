// The cache events of an engine, compared with the blocks that they describe and with what requests
// hit. Present only in recordings with events.
//
// Invariants, each reported as cache_events:
// (1) A stored event describes blocks of a live request. Its tokens are whole blocks and are the
//     request's, the block before them is its parent, the group has the blocks and none of them was
//     stored before, the keys and the adapter are those of the request, and the window is the
//     group's.
// (2) The index that a router rebuilds from the events is consistent (CacheIndex).
// (3) The events of a step are as many as its changes of the prefix cache.
// (4) A block that a request hits is in the index before the step or is stored in it.
//
// An event that is wrong is reported once: the index then takes what the block really has.
// Not checked: hashes; the digest of an embedding, apart from its presence; which tokens belong to
// which hash, and a parent that no event has named, where groups leave blocks out (windows,
// states); sessions, media and words for kinds.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "properties/audit/audit_setup.h"

namespace lockstep {

// The blocks that a stored event describes, one entry per block of its range.
struct DescribedBlocks {
  std::vector<std::uint64_t> contents{};  // content ids of their last tokens; 0: not known
  std::vector<BlockId> blocks{};          // null: not known
  std::int32_t end = -1;                  // tokens up to the end of the range; -1: not known
  bool is_wrong = false;                  // the event differs from them, which is reported
};

// The prefix cache as a router sees it: rebuilt only from the events of an engine. `refuse`
// receives what breaks an invariant:
// (a) A removed hash was stored in that group, as often as it is removed.
// (b) A hash stands for one block: its tokens, its keys and the block before it.
// (c) In a group of full attention, the block before a stored block is in the index.
class CacheIndex {
 public:
  using Refuse = std::function<void(std::string)>;
  // Content and number of the tokens up to the end of a hash's block.
  struct Prefix {
    std::uint64_t content = 0;
    std::int32_t end = -1;
  };

  // Per group, tokens of a block if the group leaves none out, or 0.
  explicit CacheIndex(std::vector<std::int32_t> block_sizes)
      : block_sizes_(std::move(block_sizes)), groups_(block_sizes_.size()) {}

  // Requires: the tokens of a stored event are whole blocks, one or more per hash.
  void store(const RecordedCacheEvent& event, const DescribedBlocks& described,
             const Refuse& refuse);
  void remove(const RecordedCacheEvent& event, const Refuse& refuse);
  void clear();

  // True if a block can be hit whose last token has this content.
  bool has(std::size_t group, std::uint64_t content) const {
    return groups_[group].num_of.contains(content);
  }
  // True if the content of every stored block of the group is known.
  bool is_complete(std::size_t group) const {
    return block_sizes_[group] > 0 && groups_[group].num_unknown == 0;
  }
  // Of any group that has the hash.
  std::optional<Prefix> prefix_of(const std::string& hash) const;
  // True if the block is stored, under any hash.
  bool is_stored(std::size_t group, BlockId block) const {
    return groups_[group].blocks.contains(block);
  }

 private:
  struct Entry {
    std::uint64_t content = 0;      // 0: not known
    std::uint64_t identity = 0;     // of tokens, keys and the hash before; 0: not known
    std::int32_t num = 0;           // blocks
    std::int32_t end = -1;          // tokens up to its end; -1: not known
    std::vector<BlockId> blocks{};  // those that are known
  };
  struct Group {
    std::unordered_map<std::string, Entry> of_hash;
    std::unordered_map<std::uint64_t, std::int32_t> num_of;  // blocks, by content
    std::int64_t num_unknown = 0;
    std::set<BlockId> blocks;  // of all hashes, where they are known
  };

  std::vector<std::int32_t> block_sizes_;
  std::vector<Group> groups_;
};

class EventLedger : Ledger {
 public:
  explicit EventLedger(AuditCore& core);

  // After the step's samples are known.
  void step(const RecordedStep& step, std::span<const AuditRow> rows);

 private:
  // A block at `token` that was hit and that the index does not have.
  struct UntoldHit {
    const AuditRequest* request = nullptr;
    std::size_t group = 0;
    std::int32_t token = 0;
  };
  // How an event differs from a request's blocks.
  struct Difference {
    std::string what;        // empty: it does not
    const char* cause = "";  // what the engine does wrong
    std::int32_t token = -1;
  };
  // The blocks of a request that an event may describe: from token `first` onward.
  struct Candidate {
    const AuditRequest* request = nullptr;
    std::int32_t first = 0;
  };
  std::vector<UntoldHit> untold_hits(std::span<const AuditRow> rows) const;
  void check_counts(const RecordedStep& step, std::int64_t num_stored, std::int64_t num_removed,
                    bool is_cleared) const;
  DescribedBlocks describe(const RecordedCacheEvent& event, const RecordedStep& step);
  std::vector<std::int32_t> firsts_of(const RecordedCacheEvent& event,
                                      const AuditRequest& request) const;
  bool has_tokens_at(const RecordedCacheEvent& event, const Candidate& of) const;
  Candidate most_like(const RecordedCacheEvent& event, const RecordedStep& step) const;
  Difference difference(const RecordedCacheEvent& event, const Candidate& of) const;
  Difference difference_in_block(const RecordedCacheEvent& event, const AuditRequest& request,
                                 std::size_t i, std::int32_t token) const;
  DescribedBlocks blocks_of(const RecordedCacheEvent& event, const Candidate& of,
                            bool is_wrong) const;
  void report_event(const RecordedCacheEvent& event, const AuditRequest* request,
                    Difference difference) const;
  std::string block_text(const AuditRequest& request, std::size_t group, std::int32_t token) const;

  CacheIndex index_;
  bool tells_keys_ = false;  // some event had a key that is not a salt
};

}  // namespace lockstep
