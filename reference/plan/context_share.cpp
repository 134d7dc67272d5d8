#include "reference/plan/context_share.h"

#include <algorithm>

#include "base/check.h"
#include "reference/profiles/engine_profile.h"

namespace lockstep {

bool keeps(const ContextRank& at, std::int64_t position) {
  return position / at.interleave % at.num_ranks == at.rank;
}

ContextRank rank_in(const ContextRank& at, const KVCacheSpec& spec) {
  return is_dealt_out(spec) ? at : ContextRank{};
}

std::int64_t num_kept(const ContextRank& at, std::int64_t position) {
  LS_CHECK(position >= 0 && at.rank < at.num_ranks, "position {} on rank {} of {}", position,
           at.rank, at.num_ranks);
  const std::int64_t round = std::int64_t{at.interleave} * at.num_ranks;
  const std::int64_t into_own = position % round - std::int64_t{at.rank} * at.interleave;
  return position / round * at.interleave + std::clamp<std::int64_t>(into_own, 0, at.interleave);
}

std::int32_t num_context_ranks(const EngineConfig& config, const KVCacheSpec& spec) {
  const EngineProfile* profile = find_engine_profile(config.engine);
  if (profile == nullptr) return 1;
  if (profile->shards_by_pcp) return config.dcp * config.pcp;
  return is_dealt_out(spec) ? config.dcp : 1;
}

}  // namespace lockstep
