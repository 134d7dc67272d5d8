// Two engines and what lies between them, as the tests of them need it.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/pair/engine_pair.h"
#include "tests/sim/world.h"

namespace lockstep {

std::vector<KVCacheGroupSpec> one_group();
// Full attention and a window.
std::vector<KVCacheGroupSpec> hybrid();

PairOptions pair_of(std::vector<KVCacheGroupSpec> groups, std::int64_t prefill_blocks,
                    std::int64_t decode_blocks);

// Every kind of fault at once.
NetworkOptions worst_network(std::uint64_t seed);
// A tight lease and few tries: blocks are lost for good, and held ones given up, now and then.
TransferTimes hasty();

PairReport run_to_end(const PairOptions& options, const Trace& trace);
// ... on two backends of the CPU executor.
PairReport run_with_pages(PairOptions options, const Trace& trace);

}  // namespace lockstep
