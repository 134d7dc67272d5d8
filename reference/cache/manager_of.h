// Which manager serves the groups of a kind: the one list, for the engine and for planted defects.
#pragma once

#include "base/check.h"
#include "reference/cache/attention_managers.h"
#include "reference/cache/mamba_manager.h"
#include "reference/types/cache_kinds.h"

namespace lockstep {

// make.template operator()<Manager>(). REQUIRES: a kind whose groups are no host pages, and
// keep something.
template <class Make>
auto with_manager_of(CacheKind kind, Make make) {
  using enum CacheKind;
  switch (kind) {
    case full_attention:
    case mla:
    case hidden_state:
      return make.template operator()<FullAttentionManager>();
    case sink_full:
      return make.template operator()<SinkAttentionManager>();
    case rswa:
      return make.template operator()<ReferenceWindowManager>();
    case sliding_window:
    case sliding_window_mla:
      return make.template operator()<SlidingWindowManager>();
    case chunked_local:
      return make.template operator()<ChunkedLocalManager>();
    case mamba:
      return make.template operator()<MambaManager>();
    case circular_buffer:
      return make.template operator()<CircularBufferManager>();
    case cross_attention:
      return make.template operator()<CrossAttentionManager>();
    case encoder_only:
    case hisparse_resident:  // created with their source
    case hisparse_hot:
      break;
  }
  LS_CHECK(false, "no manager for {} groups", name_of(kind));
}

}  // namespace lockstep
