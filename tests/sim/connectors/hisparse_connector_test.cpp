// HiSparse's workers as a connector: what they start when, and what they report.
#include "sim/connectors/offload_connector.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "reference/plan/page_groups.h"
#include "sim/connectors/connect.h"

namespace lockstep {
namespace {

HostPageCommand told(std::vector<PageTransfer> transfers) {
  HostPageCommand command;
  command.is_told = true;
  command.transfers = std::move(transfers);
  return command;
}
PageTransfer copy_of(std::int64_t id, bool restores) {
  return {.id = id, .host = BlockId{1}, .resident = {BlockId{2}}, .restores = restores};
}

TEST(PageWorkers, RestoresStartInTheirStepAndOtherCopiesInTheNextOne) {
  PageWorkers workers({.seed = 1, .delay_steps_max = 0});
  EXPECT_FALSE(workers.is_busy());
  workers.start_pages(told({copy_of(7, false), copy_of(8, true)}));
  EXPECT_TRUE(workers.is_busy());
  const KVConnectorOutput first = workers.report();
  ASSERT_EQ(first.enqueued.size(), 1u);
  EXPECT_EQ(first.enqueued[0].id, 8);
  EXPECT_EQ(first.completed, first.enqueued);  // without a delay: by every worker
  EXPECT_TRUE(workers.is_busy());
  workers.start_pages(told({}));
  const KVConnectorOutput second = workers.report();
  ASSERT_EQ(second.enqueued.size(), 1u);
  EXPECT_EQ(second.enqueued[0].id, 7);
  EXPECT_EQ(second.completed, second.enqueued);
  EXPECT_FALSE(workers.is_busy());
}

TEST(PageWorkers, EveryWorkerReportsItsEndOfACopyWithinTheDelay) {
  std::set<std::int32_t> workers_seen;
  bool any_late = false, any_apart = false;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    PageWorkers workers({.seed = seed, .delay_steps_max = 3});
    workers.start_pages(told({copy_of(5, true)}));
    KVConnectorOutput report = workers.report();
    ASSERT_EQ(report.enqueued.size(), 1u);
    const std::int32_t expected = report.enqueued[0].count;
    workers_seen.insert(expected);
    std::int32_t done = 0;
    for (int step = 0; step <= 3; ++step) {
      for (const TransferCount& one : report.completed) {
        EXPECT_EQ(one.id, 5);
        done += one.count;
        any_late |= step > 0;
        any_apart |= one.count < expected;
      }
      workers.start_pages(told({}));
      report = workers.report();
    }
    EXPECT_EQ(done, expected) << seed;
    EXPECT_FALSE(workers.is_busy()) << seed;
  }
  EXPECT_EQ(workers_seen, (std::set<std::int32_t>{1, 2}));
  EXPECT_TRUE(any_late);
  EXPECT_TRUE(any_apart);
}

KVCacheGroupSpec group_of(CacheKind kind, std::vector<std::string> layers, std::string role = {}) {
  KVCacheGroupSpec group;
  group.layer_names = std::move(layers);
  group.role = std::move(role);
  KVCacheSpec& spec = group.spec;
  spec.kind = kind;
  spec.block_size = 4;
  if (keeps_pages(spec)) {
    spec.page_copy_bytes = 64;
    spec.blocks_per_request = kind == CacheKind::hisparse_hot ? 2 : 0;
  } else {
    spec.num_kv_heads = 1;
    spec.head_size = 8;
    spec.dtype = DType::bf16;
  }
  return group;
}

KVCacheConfig cut_in_two() {
  using enum CacheKind;
  KVCacheConfig plan;
  plan.num_blocks = 60;
  plan.groups = {group_of(mla, {"0", "1", "2"}, kPageSourceRole),
                 group_of(mla, {"i"}, kPageIndexerRole),
                 group_of(hisparse_resident, {"0.hisparse_resident", "1.hisparse_resident"}),
                 group_of(hisparse_resident, {"2.hisparse_resident"}),
                 group_of(hisparse_hot, {"0.hisparse_hot", "1.hisparse_hot"}),
                 group_of(hisparse_hot, {"2.hisparse_hot"})};
  return plan;
}

TEST(HiSparsePlan, HasEveryLayerOfTheSourceOnceInEachKindOfPages) {
  EXPECT_TRUE(check_page_groups(cut_in_two().groups));
  const auto refused = [](auto change) {
    KVCacheConfig plan = cut_in_two();
    change(plan.groups);
    const auto checked = check_page_groups(plan.groups);
    return checked ? std::string() : checked.error().message;
  };
  using Groups = std::vector<KVCacheGroupSpec>;
  EXPECT_EQ(refused([](Groups& groups) { std::swap(groups[0], groups[1]); }),
            "groups: group 0 next to HiSparse's: expected role hisparse_source and mla");
  EXPECT_EQ(refused([](Groups& groups) { groups[1].spec.block_size = 8; }),
            "groups: group 1 next to HiSparse's: expected role hisparse_indexer and mla, of blocks "
            "as long as the source's");
  EXPECT_EQ(refused([](Groups& groups) { std::swap(groups[2], groups[3]); }),
            "groups: layer 2.hisparse_resident of group 2: expected 0.hisparse_resident, by the "
            "source's order");
  EXPECT_EQ(refused([](Groups& groups) { groups.erase(groups.begin() + 3); }),
            "groups: 2 has no hisparse_resident among the groups from 2 on");
  EXPECT_EQ(refused([](Groups& groups) { groups[4].spec.page_copy_bytes = 128; }),
            "groups: group 4: blocks of 4 tokens in pages of 128 bytes; the source has 4 tokens in "
            "64 bytes");
  EXPECT_EQ(refused([](Groups& groups) {
              std::swap(groups[4].layer_names[1], groups[5].layer_names[0]);
              groups[4].layer_names.pop_back();
              groups[5].layer_names = {"1.hisparse_hot", "2.hisparse_hot"};
            }),
            "groups: group 4 next to HiSparse's: expected the layers of group 2");
  EXPECT_EQ(refused([](Groups& groups) { groups[5].layer_names.emplace_back("9.hisparse_hot"); }),
            "groups: layer 9.hisparse_hot of group 5: expected no more layers than the source has");
  EXPECT_EQ(refused([](Groups& groups) { groups.push_back(groups[3]); }),
            "groups: group 6 next to HiSparse's: expected a cache that is not one of HiSparse's");
}

TEST(HiSparsePlan, DemandsItsWorkersAndTheyDemandIt) {
  const auto said_of = [](std::vector<ConnectorKind> parts, const KVCacheConfig& plan) {
    ConnectorConfig connector;
    connector.parts = std::move(parts);
    const auto checked = supported(facts_of({}, plan.groups).with(connector_traits(connector)));
    return checked ? std::string() : checked.error().message;
  };
  using enum ConnectorKind;
  const KVCacheConfig plan = cut_in_two();
  EXPECT_EQ(said_of({page_workers}, plan), "");
  EXPECT_EQ(said_of({peers, page_workers}, plan), "");
  EXPECT_EQ(said_of({peers}, plan),
            "HiSparse (hisparse_source) with other parts of a connector: use --connector hisparse, "
            "or hisparse and peers");
  EXPECT_EQ(said_of({page_workers, host}, plan), said_of({peers}, plan));
  KVCacheConfig plain;
  plain.num_blocks = 10;
  plain.groups = {group_of(CacheKind::mla, {"0"})};
  EXPECT_EQ(
      said_of({page_workers}, plain),
      "HiSparse's workers (--connector hisparse) without HiSparse (hisparse_source): the cache "
      "has no pages for them; leave hisparse out of --connector");
}

}  // namespace
}  // namespace lockstep
