#include "reference/types/cache_kinds.h"

#include <gtest/gtest.h>

#include <set>

#include "reference/types/kv_cache_spec.h"

namespace lockstep {
namespace {

TEST(CacheKinds, EachClassOfAPlanHasAWordOfItsOwn) {
  std::set<std::string_view> words;
  for (const CacheKindTraits& traits : kCacheKinds) {
    const std::string_view word = planned_name_of(traits.kind);
    EXPECT_TRUE(words.insert(word).second) << word;
    EXPECT_EQ(cache_kind_from_planned_name(word), traits.kind);
  }
  EXPECT_FALSE(cache_kind_from_planned_name("cross_attention").has_value());
}

TEST(CacheKinds, AWordThatClassesShareNamesTheClassThatTheOthersDeriveFrom) {
  EXPECT_EQ(cache_kind_from_name("full"), CacheKind::full_attention);
  EXPECT_EQ(cache_kind_from_name("sliding_window"), CacheKind::sliding_window);
  EXPECT_EQ(name_of(CacheKind::sink_full), "full");
  EXPECT_EQ(name_of(CacheKind::sliding_window_mla), "sliding_window");
  EXPECT_FALSE(cache_kind_from_name("sink_full").has_value());
}

TEST(CacheKinds, SinksAndAGapMakeFullAttentionAClassOfItsOwn) {
  KVCacheSpec spec;
  spec.rswa_window = 16;
  settle_full_attention(spec);
  EXPECT_EQ(spec.kind, CacheKind::rswa);
  spec.sink_len = 32;
  settle_full_attention(spec);
  EXPECT_EQ(spec.kind, CacheKind::sink_full);
  spec.kind = CacheKind::mla;
  settle_full_attention(spec);
  EXPECT_EQ(spec.kind, CacheKind::mla);
}

TEST(CacheKinds, ModesOfQuantizationHaveOneNameInTwoSpellings) {
  EXPECT_EQ(planned_name_of(KVQuantMode::turboquant_k8v4), "TURBOQUANT_K8V4");
  EXPECT_EQ(kv_quant_mode_from_planned_name("NVFP4_DS_MLA"), KVQuantMode::nvfp4_ds_mla);
  EXPECT_FALSE(kv_quant_mode_from_planned_name("nvfp4").has_value());
  EXPECT_TRUE(is_planned_only(KVQuantMode::turboquant_3bit_nc));
  EXPECT_FALSE(is_planned_only(KVQuantMode::int4_per_token_head));
}

}  // namespace
}  // namespace lockstep
