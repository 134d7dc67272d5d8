// HiSparse's groups in the scheduler: what is refused, and one request's pages from the device to
// the host and back to nowhere. What vLLM decides in thousands of steps is in tests/conformance.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "reference/schedule/scheduler.h"
#include "reference/types/host_pages.h"
#include "tests/reference/engine.h"

namespace lockstep {
namespace {

constexpr std::int64_t kBlockSize = 4;

class NoCacheElsewhere final : public KVConnector {
 public:
  ExternalHit get_num_new_matched_tokens(const ExternalQuery&) override { return {}; }
  bool request_finished(RequestId, std::string_view) override { return false; }
};

KVCacheGroupSpec group_of(CacheKind kind, const std::string& name) {
  KVCacheGroupSpec group;
  group.layer_names = {name};
  group.spec.kind = kind;
  group.spec.block_size = kBlockSize;
  if (kind == CacheKind::hisparse_hot) group.spec.blocks_per_request = 2;
  return group;
}

std::vector<KVCacheGroupSpec> four_groups() {
  std::vector<KVCacheGroupSpec> groups = {
      group_of(CacheKind::mla, "source"), group_of(CacheKind::mla, "indexer"),
      group_of(CacheKind::hisparse_resident, "resident"), group_of(CacheKind::hisparse_hot, "hot")};
  groups[0].role = kPageSourceRole;
  groups[1].role = kPageIndexerRole;
  return groups;
}

EngineConfig engine_config() {
  EngineConfig config;
  config.max_num_seqs = 4;
  config.max_num_batched_tokens = 16;
  config.max_model_len = 64;
  config.block_size = kBlockSize;
  config.host_pool_num_blocks = 40;
  return config;
}

// Loads the first tokens of every prompt from elsewhere while other requests run.
class TokensElsewhere final : public KVConnector {
 public:
  explicit TokensElsewhere(std::int32_t num_tokens) : num_tokens_(num_tokens) {}
  ExternalHit get_num_new_matched_tokens(const ExternalQuery&) override {
    return {.num_tokens = num_tokens_, .is_async = true};
  }
  bool request_finished(RequestId, std::string_view) override { return false; }

 private:
  std::int32_t num_tokens_;
};

class HiSparse : public testing::Test {
 protected:
  void open(std::int64_t num_blocks) { open(num_blocks, engine_config(), connector_); }
  void open(std::int64_t num_blocks, const EngineConfig& config, KVConnector& connector) {
    auto made = Scheduler::create(config, four_groups(), num_blocks, {&connector});
    ASSERT_TRUE(made) << made.error().message;
    scheduler_.emplace(*std::move(made));
  }
  RequestId add(const std::string& name, std::uint32_t seed, std::uint32_t tokens) {
    RequestSpec request;
    request.name = name;
    request.prompt = prompt_of(seed, tokens);
    request.max_tokens = 30;
    const auto id = scheduler_->add_request(std::move(request));
    EXPECT_TRUE(id) << id.error().message;
    return *id;
  }
  // A step whose transfers the workers complete with its output, if they are to.
  HostPageCommand step(bool completes = true, std::vector<RequestId> received = {}) {
    const SchedulerOutput& decided = scheduler_->schedule();
    HostPageCommand command = decided.host_pages;
    ModelOutput output;
    output.kv_connector_output.finished_recving = std::move(received);
    for (std::size_t row = 0; row < decided.scheduled.size(); ++row) {
      if (scheduler_->num_sampled_max(row) > 0) output.tokens.push_back(7);
      output.token_ends.push_back(static_cast<std::uint32_t>(output.tokens.size()));
    }
    for (const PageTransfer& transfer : command.transfers) {
      output.kv_connector_output.enqueued.push_back({transfer.id, 1});
      if (completes) output.kv_connector_output.completed.push_back({transfer.id, 1});
    }
    scheduler_->update_from_output(output);
    return command;
  }

  NoCacheElsewhere connector_;
  std::optional<Scheduler> scheduler_;
};

TEST_F(HiSparse, FullPagesGoToTheHostAndTheirRowsAreMirrored) {
  open(60);
  add("r0", 1, 10);
  const HostPageCommand first = step();
  ASSERT_EQ(first.transfers.size(), 2u);  // the third page is not full
  EXPECT_FALSE(first.transfers[0].restores);
  ASSERT_EQ(first.rows.size(), 1u);
  ASSERT_EQ(first.rows[0].mirrors.size(), 3u);
  EXPECT_EQ(first.rows[0].mirrors[2].num_rows, 2);
  EXPECT_EQ(first.rows[0].residency.pages, (std::vector<std::int32_t>{0, 1, 2}));
  EXPECT_TRUE(first.all_resident);
  EXPECT_EQ(first.num_free_host_blocks, 36);
  const HostPageCommand second = step();
  EXPECT_TRUE(second.transfers.empty());
  EXPECT_TRUE(second.rows[0].residency.pages.empty());
}

TEST_F(HiSparse, APageThatIsHandedOutIsReadFromTheHostFromThenOn) {
  open(22);
  const RequestId first = add("r0", 1, 16);
  step();
  // It fills the window that admission reserved, so it has asked for a hot region.
  step();
  EXPECT_EQ(scheduler_->block_table(first, 3).size(), 2u);
  const HostPageCommand unpinned = step();
  EXPECT_TRUE(unpinned.all_resident);
  add("r1", 2, 16);
  bool is_lost = false;
  for (int i = 0; i < 4 && !is_lost; ++i) {
    const HostPageCommand command = step();
    for (const HostPageRow& row : command.rows)
      for (std::size_t page = 0; page < row.residency.pages.size(); ++page)
        is_lost |= row.id == first && row.residency.blocks[0][page] == kNullBlock;
    EXPECT_EQ(command.all_resident, !is_lost);
  }
  EXPECT_TRUE(is_lost);
}

// Without prefix caching the host pool has no cache entries to ask for.
TEST_F(HiSparse, ALoadedPageIsRestoredWithoutPrefixCaching) {
  EngineConfig config = engine_config();
  config.enable_prefix_caching = false;
  TokensElsewhere connector(8);
  open(60, config, connector);
  const RequestId id = add("r0", 1, 10);
  step();
  step(true, {id});
  std::int64_t num_restored = 0;
  for (int i = 0; i < 3; ++i)
    for (const PageTransfer& transfer : step().transfers) num_restored += transfer.restores;
  EXPECT_EQ(num_restored, 1);
  EXPECT_FALSE(scheduler_->has_pages_under_way());
}

TEST_F(HiSparse, APageUnderWayKeepsItsBlocksWhenItsRequestLeaves) {
  open(60);
  const RequestId id = add("r0", 1, 8);
  const HostPageCommand command = step(false);
  scheduler_->abort_request(id);
  step(false);
  for (const PageTransfer& transfer : command.transfers)
    EXPECT_EQ(scheduler_->ref_cnt(transfer.resident[0]), 1);
  EXPECT_FALSE(scheduler_->reset_prefix_cache());
}

std::string refusal_of(std::vector<KVCacheGroupSpec> groups, EngineConfig config,
                       bool has_connector = true) {
  NoCacheElsewhere connector;
  const auto made = Scheduler::create(config, groups, 60, {has_connector ? &connector : nullptr});
  return made ? "" : made.error().message;
}

TEST(HiSparseRefusals, WhatIsNotModelledIsNamed) {
  auto groups = four_groups();
  EXPECT_EQ(refusal_of(groups, engine_config()), "");
  EXPECT_NE(refusal_of(groups, engine_config(), false).find("KV connector"), std::string::npos);
  EngineConfig config = engine_config();
  config.host_pool_num_blocks = 17;
  EXPECT_EQ(refusal_of(groups, config),
            "hisparse_host_num_blocks: 17; one request of max_model_len needs 18");
  config = engine_config();
  config.engine = "vllm-0.22.1";
  EXPECT_NE(refusal_of(groups, config), "");
  groups.push_back(group_of(CacheKind::mamba, "states"));
  EXPECT_EQ(refusal_of(groups, engine_config()),
            "states with HiSparse (hisparse_source): how pages of HiSparse move with them is not "
            "modelled; leave one of them out");
  groups = four_groups();
  std::swap(groups[0], groups[1]);
  EXPECT_EQ(refusal_of(groups, engine_config()),
            "groups: expected one group of role hisparse_source, before all others; 1 found");
  groups = four_groups();
  groups[0].role.clear();
  EXPECT_EQ(refusal_of(groups, engine_config()),
            "groups: expected one group of role hisparse_source, before all others; 0 found");
  groups = four_groups();
  groups[2].spec.block_size = 8;
  EXPECT_EQ(refusal_of(groups, engine_config()),
            "groups: resident pages of 8 tokens; host pages have 4");
}

}  // namespace
}  // namespace lockstep
