// Which connectors an engine has: as text, as the number of a saved case, and what is refused.
#include "sim/connectors/connect.h"

#include <gtest/gtest.h>

#include "tests/sim/world.h"

namespace lockstep {
namespace {

using enum ConnectorKind;
using Parts = std::vector<ConnectorKind>;

const KVCacheConfig& one_group() {
  static const KVCacheConfig plan = *plan_for_groups({make_group("a", 1, full_spec())}, 8);
  return plan;
}
const KVCacheConfig& plan_of_two_groups() {
  static const KVCacheConfig plan =
      *plan_for_groups({make_group("a", 1, full_spec()), make_group("w", 1, sliding_spec(40))}, 8);
  return plan;
}

bool takes(const ConnectorConfig& config, const EngineConfig& engine, const KVCacheConfig& plan) {
  return check_connector(config, plan) &&
         supported(facts_of(engine, plan.groups).with(connector_traits(config)));
}

TEST(ConnectorConfig, PartsAreReadAsTheyAreWritten) {
  for (const Parts& parts : {Parts{peers}, Parts{host, peers}, Parts{one_group_peers, host, host}})
    EXPECT_EQ(connector_parts_from_text(connector_parts_text(parts)), parts);
  EXPECT_EQ(connector_parts_text({}), "none");
  for (const char* const text :
       {"", "+", "peers+", "+host", "nfs", "peers,host", "host+host+host+host+host"})
    EXPECT_FALSE(connector_parts_from_text(text)) << text;
}

TEST(ConnectorConfig, AnEngineAsksEveryPartWhetherItTakesSeveralGroups) {
  const auto asked = [](Parts parts, std::optional<bool> wants,
                        MultiConnectorDefect defect = MultiConnectorDefect::none) {
    ConnectorConfig config;
    config.parts = std::move(parts);
    config.setup_defect = defect;
    return hybrid_groups_of(config, wants);
  };
  EXPECT_TRUE(*asked({peers, host}, {}));
  EXPECT_FALSE(*asked({peers, one_group_peers}, {}));
  EXPECT_FALSE(*asked({peers, host}, false));
  EXPECT_FALSE(*asked({}, false));
  EXPECT_FALSE(asked({one_group_peers, host}, true));
  EXPECT_TRUE(*asked({one_group_peers, host}, {}, MultiConnectorDefect::hma_any));
  EXPECT_TRUE(*asked({host}, {}));
  EXPECT_FALSE(asked({host}, {}, MultiConnectorDefect::hma_before_config));
}

TEST(ConnectorConfig, SeveralGroupsAreForPartsThatTakeThemAndLoseNothing) {
  ConnectorConfig config;
  config.parts = {one_group_peers, host};
  EXPECT_TRUE(takes(config, {}, one_group()));
  EXPECT_FALSE(takes(config, {}, plan_of_two_groups()));
  config.parts = {peers, host};
  EXPECT_TRUE(takes(config, {}, plan_of_two_groups()));
  EngineConfig without_hashes;
  without_hashes.enable_prefix_caching = false;
  EXPECT_FALSE(takes(config, without_hashes, plan_of_two_groups()));
  config.load_failed_percent = 5;
  EXPECT_TRUE(takes(config, {}, one_group()));
  EXPECT_FALSE(takes(config, {}, plan_of_two_groups()));
}

TEST(ConnectorConfig, ADefectThatWouldChangeNothingIsRefused) {
  ConnectorConfig config;
  config.parts = {peers};
  config.defect = ConnectorDefect::free_send_in_flight;
  EXPECT_FALSE(takes(config, {}, one_group()));
  config.parts = {peers, host};
  EXPECT_TRUE(takes(config, {}, one_group()));
  config.setup_defect = MultiConnectorDefect::hma_any;
  EXPECT_FALSE(takes(config, {}, plan_of_two_groups()));
}

TEST(ConnectorConfig, EveryPartHasHostBlocksOfItsOwn) {
  ConnectorConfig config;
  config.num_host_blocks = 30;
  EngineConfig engine;
  EXPECT_EQ(num_host_blocks(config, engine, one_group()), 8);
  config.parts = {host, peers, host};
  EXPECT_EQ(num_host_blocks(config, engine, one_group()), 68);
  engine.host_pool_num_blocks = 5;  // a pool of their own
  EXPECT_EQ(num_host_blocks(config, engine, one_group()), 73);
}

}  // namespace
}  // namespace lockstep
