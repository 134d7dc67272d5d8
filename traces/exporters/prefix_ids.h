// Hash ids for prompts of any kind: which blocks of which prompts have the same content after the
// same prefix.
//
// Invariants
// (1) Two prompts have as many leading ids in common as whole blocks, and a partial last block only
//     if the prompts are equal. So ids state exactly what is shared when the block divides every
//     length that two different prompts share. Prompts of different salts share nothing.
// (2) Ids count from 0 in order of appearance.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "traces/formats/request_trace.h"

namespace lockstep {

// What prompts have in common.
struct SharedPrefixes {
  // Tokens that every length that two unequal prompts share is a multiple of; 0: nothing is shared.
  std::int64_t unit = 0;
  // Two requests that share a length that is not a multiple of the requested block.
  struct Between {
    std::string first, second;
    std::int64_t tokens = 0;
  };
  std::vector<Between> pairs;  // each length of neighbours in the order of content
};
SharedPrefixes shared_prefixes(const std::vector<const TraceRequest*>& requests);

// The largest power of two, up to `block_max`, in which ids lose nothing.
std::int32_t block_that_tells_all(const SharedPrefixes& shared, std::int32_t block_max);

// Per request its ids, one per `block_tokens`; the last covers what is left.
std::vector<std::vector<std::uint64_t>> prefix_ids(const std::vector<const TraceRequest*>& requests,
                                                   std::int32_t block_tokens);

}  // namespace lockstep
