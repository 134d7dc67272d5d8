// The closed form of layout.h as strided views, in the dimensions that the backend names: what a
// recording of views is compared with, and what a person reads.
#pragma once

#include "base/result.h"
#include "reference/plan/layout.h"
#include "reference/types/view_types.h"

namespace lockstep {

// One view for a token cache, one a state tensor for states. `backend` is the layer's own
// (layer_backend); it says only in which order dimensions are named. Refused: kernel blocks that
// one stride cannot reach (a padded page that is split).
Result<LayerViews> views_of(const LayerLayout& layer, const KVCacheSpec& spec,
                            AttentionBackend chosen);

// All layers of the plan.
Result<PoolViews> pool_views(const KVCacheConfig& config, AttentionBackend chosen,
                             CacheLayout cache_layout, LayoutRule rule = LayoutRule::isolated);

}  // namespace lockstep
