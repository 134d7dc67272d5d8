// The content ids of one request's tokens, and the attention digests of any range of them in O(1).
//
// Invariants
// (1) content(p) depends only on the tokens 0..p.
// (2) Digests are prefix sums per layer, extended on demand: each position costs its rows once per
//     layer, and 8 bytes per queried layer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "reference/memory/content.h"
#include "reference/memory/memory_model.h"
#include "reference/types/engine_config.h"

namespace lockstep {

class PrefixContent {
 public:
  PrefixContent() = default;
  // Digests cover what this rank keeps of the tokens.
  explicit PrefixContent(const ContextRank& rank) : rank_(rank) {}
  void append(std::int32_t token);
  // Keeps the first `size` tokens: a draft was rejected.
  void truncate(std::int64_t size);
  std::int64_t size() const { return static_cast<std::int64_t>(contents_.size()); }
  // Of the prefix that ends with the token at `position`; -1: the empty prefix.
  ContentId content(std::int64_t position) const {
    return position < 0 ? kEmptyPrefix : contents_[position];
  }
  std::span<const ContentId> contents() const { return contents_; }
  // At a position as the layer's attention counts them: its sinks come first.
  ContentId content_in(const ModelLayer& layer, std::int64_t position) const {
    return position < layer.num_sinks ? sink_content(position)
                                      : content(position - layer.num_sinks);
  }

  // Rule (4) of sim/protocol/backend.h over positions [first, last), on the rank, sinks counted.
  // REQUIRES: 0 <= first <= last <= size() and the layer's sinks.
  std::uint64_t attention_digest(const ModelLayer& layer, std::int64_t first, std::int64_t last);

 private:
  ContextRank rank_;
  std::vector<ContentId> contents_;
  std::vector<std::vector<std::uint64_t>> digests_;  // [layer][n]: sum over the first n positions
};

// The sum over the rows of one token at one position.
std::uint64_t token_digest(const ModelLayer& layer, ContentId content, std::int64_t position);

}  // namespace lockstep
