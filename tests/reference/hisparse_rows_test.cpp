// HiSparse's groups as memory keeps them: resident pages and hot regions have the source's rows,
// and the source keeps nothing on the device.
#include "reference/plan/page_groups.h"

#include <gtest/gtest.h>

#include "reference/plan/page_size.h"

namespace lockstep {
namespace {

KVCacheGroupSpec group_of(CacheKind kind, std::vector<std::string> layers) {
  KVCacheGroupSpec group;
  group.layer_names = std::move(layers);
  group.spec.kind = kind;
  group.spec.block_size = 4;
  group.spec.head_size = 72;
  group.spec.page_copy_bytes = kind == CacheKind::mla ? 0 : 4 * 72 * 2;
  group.spec.blocks_per_request = kind == CacheKind::hisparse_hot ? 3 : 0;
  return group;
}

KVCacheConfig plan() {
  KVCacheConfig plan;
  plan.num_blocks = 16;
  plan.groups = {group_of(CacheKind::mla, {"a", "b"}),
                 group_of(CacheKind::mla, {"a.indexer"}),
                 group_of(CacheKind::hisparse_resident, {"a.hisparse_resident"}),
                 group_of(CacheKind::hisparse_resident, {"b.hisparse_resident"}),
                 group_of(CacheKind::hisparse_hot, {"a.hisparse_hot"}),
                 group_of(CacheKind::hisparse_hot, {"b.hisparse_hot"})};
  plan.groups[0].role = kPageSourceRole;
  plan.groups[1].role = kPageIndexerRole;
  return plan;
}

TEST(HiSparseRows, DeviceGroupsHaveTheRowsOfTheSource) {
  const auto rows = with_page_rows(plan());
  ASSERT_TRUE(rows) << rows.error().message;
  EXPECT_FALSE(is_on_device(rows->groups[0]));
  EXPECT_EQ(rows->groups[1], plan().groups[1]);
  for (const std::size_t g : {2, 3, 4, 5}) {
    EXPECT_EQ(rows->groups[g].spec.kind, CacheKind::mla);
    EXPECT_EQ(page_size_bytes(rows->groups[g].spec), 4 * 72 * 2);
    EXPECT_EQ(rows->groups[g].role, g > 3 ? kHotRole : kResidentRole);
  }
  EXPECT_EQ(rows->groups[4].spec.blocks_per_request, 3);
  const auto again = with_page_rows(*rows);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(*again, *rows);
}

TEST(HiSparseRows, APlanWithoutHiSparseStaysAsItIs) {
  KVCacheConfig other = plan();
  other.groups = {plan().groups[1]};
  const auto rows = with_page_rows(other);
  ASSERT_TRUE(rows);
  EXPECT_EQ(*rows, other);
}

TEST(HiSparseRows, PagesOfAnotherSizeAreRefused) {
  KVCacheConfig other = plan();
  other.groups[2].spec.page_copy_bytes += 8;
  const auto rows = with_page_rows(other);
  ASSERT_FALSE(rows);
  EXPECT_NE(rows.error().message.find("584 bytes"), std::string::npos) << rows.error().message;
}

}  // namespace
}  // namespace lockstep
