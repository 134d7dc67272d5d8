// Several connectors behind one: which one loads, what each is notified of, when blocks are freed,
// and whether an engine may pass them several groups.
#include "sim/connectors/multi_connector.h"

#include <gtest/gtest.h>

#include <vector>

namespace lockstep {
namespace {

// A part that writes down what it hears.
class ListeningConnector final : public KVConnector {
 public:
  ExternalHit hit;
  bool keeps = false;
  KVConnectorTraits own_traits;
  std::vector<std::int32_t> heard;  // external tokens of each allocation

  KVConnectorTraits traits() const override { return own_traits; }

  ExternalHit get_num_new_matched_tokens(const ExternalQuery&) override { return hit; }
  void update_state_after_alloc(RequestId, std::span<const BlockId>,
                                std::int32_t num_external_tokens) override {
    heard.push_back(num_external_tokens);
  }
  bool request_finished(RequestId, std::string_view) override { return keeps; }
};

constexpr RequestId kRequest{7};
const ExternalQuery kQuery{kRequest, "r7", 64, 0};

TEST(MultiConnector, LoadsFromTheFirstPartThatHasTokensAndTellsTheOthersOfNone) {
  ListeningConnector none, first, second;
  first.hit = {.num_tokens = 16, .is_async = true};
  second.hit = {.num_tokens = 48};
  MultiConnector all({&none, &first, &second});
  const ExternalHit hit = all.get_num_new_matched_tokens(kQuery);
  EXPECT_EQ(hit.num_tokens, 16);
  EXPECT_TRUE(hit.is_async);
  all.update_state_after_alloc(kRequest, {}, 16);
  EXPECT_EQ(none.heard, std::vector<std::int32_t>{0});
  EXPECT_EQ(first.heard, std::vector<std::int32_t>{16});
  EXPECT_EQ(second.heard, std::vector<std::int32_t>{0});
}

TEST(MultiConnector, CompletesDivergentHitsOnlyIfEveryPartDoes) {
  ListeningConnector completes, other;
  completes.own_traits.completes_divergent_hits = true;
  EXPECT_FALSE(MultiConnector({&completes, &other}).traits().completes_divergent_hits);
  EXPECT_TRUE(MultiConnector({&completes, &completes}).traits().completes_divergent_hits);
}

TEST(MultiConnector, WaitsWhileAnyPartDoesNotKnowYet) {
  ListeningConnector knows, wonders;
  knows.hit = {.num_tokens = 16};
  wonders.hit = {.num_tokens = std::nullopt};
  EXPECT_FALSE(MultiConnector({&knows, &wonders}).get_num_new_matched_tokens(kQuery).num_tokens);
}

TEST(MultiConnector, GivesBlocksBackOnceWhenTheLastPartHasSentThem) {
  ListeningConnector first, second, third;
  first.keeps = third.keeps = true;
  MultiConnector all({&first, &second, &third});
  EXPECT_TRUE(all.request_finished(kRequest, "r7"));
  const KVConnectorOutput sent{
      .finished_recving = {}, .finished_sending = {kRequest}, .invalid_block_ids = {}};
  const KVConnectorOutput silent;
  EXPECT_TRUE(all.merge(std::vector{sent, silent, silent}).finished_sending.empty());
  EXPECT_EQ(all.merge(std::vector{silent, silent, sent}).finished_sending,
            std::vector<RequestId>{kRequest});
  first.keeps = third.keeps = false;
  EXPECT_FALSE(all.request_finished(kRequest, "r7"));
}

TEST(MultiConnector, HandsOutSeveralGroupsOnlyIfEveryPartSupportsThem) {
  for (const ConnectorClass& left : connector_classes())
    for (const ConnectorClass& right : connector_classes()) {
      const auto setup =
          set_up_connectors({.connectors = {left, right}, .offloads = false, .hybrid_groups = {}});
      ASSERT_TRUE(setup);
      EXPECT_EQ(setup->hybrid_groups, left.supports_hybrid_groups && right.supports_hybrid_groups);
      const auto insisted = set_up_connectors(
          {.connectors = {left, right}, .offloads = false, .hybrid_groups = true});
      EXPECT_EQ(insisted.has_value(), setup->hybrid_groups);
      const auto declined = set_up_connectors(
          {.connectors = {left, right}, .offloads = false, .hybrid_groups = false});
      ASSERT_TRUE(declined);
      EXPECT_FALSE(declined->hybrid_groups);
    }
}

TEST(MultiConnector, AnOffloadingBackendBringsItsConnectorBeforeAnybodyAsks) {
  const auto setup = set_up_connectors({.connectors = {}, .offloads = true, .hybrid_groups = {}});
  ASSERT_TRUE(setup) << setup.error().message;
  EXPECT_EQ(setup->connectors[0].name, "OffloadingConnector");
  EXPECT_TRUE(setup->hybrid_groups);
  const auto late = set_up_connectors({.connectors = {}, .offloads = true, .hybrid_groups = {}},
                                      MultiConnectorDefect::hma_before_config);
  ASSERT_FALSE(late);
  EXPECT_NE(late.error().message.find("no connector"), std::string::npos);
}

}  // namespace
}  // namespace lockstep
