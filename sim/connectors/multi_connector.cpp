#include "sim/connectors/multi_connector.h"

#include <algorithm>
#include <array>

#include "base/check.h"

namespace lockstep {
namespace {

// The connector that vLLM's native offloading sets (_post_init_kv_transfer_config() in
// vllm/config/vllm.py). A function static, because connector_classes() copies it.
const ConnectorClass& offloading_connector() {
  static const ConnectorClass offloading{"OffloadingConnector", true};
  return offloading;
}

// Returns whether the connectors support several groups: all must. MultiConnector itself subclasses
// SupportsHMA, so a check of only its class would accept any parts; vLLM 0.22.1 checks each part
// (config/vllm.py, __post_init__()). Errors: no connector is named.
Result<bool> all_support_hybrid_groups(const std::vector<ConnectorClass>& connectors,
                                       MultiConnectorDefect defect) {
  if (connectors.empty()) return fail("the KV transfer has no connector; name one");
  const auto supports = &ConnectorClass::supports_hybrid_groups;
  return defect == MultiConnectorDefect::hma_any ? std::ranges::any_of(connectors, supports)
                                                 : std::ranges::all_of(connectors, supports);
}

}  // namespace

std::span<const ConnectorClass> connector_classes() {
  static const std::array classes = std::to_array<ConnectorClass>({
      {"ExampleConnector", false},
      {"ExampleHiddenStatesConnector", true},
      {"P2pNcclConnector", false},
      {"LMCacheConnectorV1", false},
      {"LMCacheMPConnector", false},
      {"NixlConnector", true},
      {"MoRIIOConnector", false},
      offloading_connector(),
      {"DecodeBenchConnector", true},
      {"MooncakeConnector", true},
      {"MooncakeStoreConnector", true},
      {"FlexKVConnectorV1", false},
      {"SimpleCPUOffloadConnector", true},
      {"HF3FSKVConnector", false},
  });
  return classes;
}

Result<MultiConnectorSetup> set_up_connectors(const MultiConnectorConfig& config,
                                              MultiConnectorDefect defect) {
  MultiConnectorSetup setup{.connectors = config.connectors, .hybrid_groups = true};
  const bool transfers = config.offloads || !config.connectors.empty();
  if (!transfers) return setup;
  // The offloading backend's connector replaces any other: it overwrites kv_connector.
  const auto put_offloading = [&] {
    if (config.offloads) setup.connectors = {offloading_connector()};
  };
  if (defect != MultiConnectorDefect::hma_before_config) put_offloading();
  LS_ASSIGN_OR_RETURN(const auto supported, all_support_hybrid_groups(setup.connectors, defect));
  if (defect == MultiConnectorDefect::hma_before_config) put_offloading();
  // vLLM refuses as well if the user enables the hybrid manager and start-up would disable it.
  if (config.hybrid_groups == true && !supported)
    return fail(
        "several KV cache groups were requested, but not every connector supports them ({} does "
        "not); leave the choice to the engine",
        std::ranges::find(setup.connectors, false, &ConnectorClass::supports_hybrid_groups)->name);
  // The user's "no" always applies; without a choice, support decides.
  setup.hybrid_groups = config.hybrid_groups.value_or(supported);
  return setup;
}

MultiConnector::MultiConnector(std::vector<KVConnector*> parts, bool async_scheduling)
    : parts_(std::move(parts)), unheard_(async_scheduling) {
  LS_CHECK(!parts_.empty(), "a MultiConnector of {} parts", parts_.size());
}

KVConnectorTraits MultiConnector::traits() const {
  KVConnectorTraits all;
  // Every part must complete them (vLLM 0.33.0, kv_connector/v1/multi_connector.py,
  // supports_divergent_local_hybrid_hits). One part is enough for the other traits.
  all.completes_divergent_hits = true;
  for (const KVConnector* part : parts_) {
    const KVConnectorTraits traits = part->traits();
    all.requires_kv_delivery |= traits.requires_kv_delivery;
    all.completes_divergent_hits &= traits.completes_divergent_hits;
    all.waits_for_sends |= traits.waits_for_sends;
  }
  return all;
}

ExternalHit MultiConnector::get_num_new_matched_tokens(const ExternalQuery& query) {
  // Queries every part, even after one has a hit: its own state follows the queries. An undecided
  // part ends the round at once, so later parts do not receive this query (vLLM 0.33.0,
  // kv_connector/v1/multi_connector.py, get_num_new_matched_tokens()). A hit that an earlier part
  // gave in that round stays in loads_from_, as it does in _requests_to_connector there.
  ExternalHit chosen;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const ExternalHit hit = parts_[i]->get_num_new_matched_tokens(query);
    if (!hit.num_tokens) return hit;
    if (*chosen.num_tokens > 0 || *hit.num_tokens == 0) continue;
    chosen = hit;
    loads_from_[query.request] = {i, hit.is_async};
  }
  return chosen;
}

void MultiConnector::update_state_after_alloc(RequestId request, std::span<const BlockId> blocks,
                                              std::int32_t num_external_tokens) {
  const auto loads_from = loads_from_.find(request);
  if (num_external_tokens > 0) {
    LS_CHECK(loads_from != loads_from_.end(), "request {} loads without a query",
             index_of(request));
    (loads_from->second.is_async ? loading_ : loads_in_step_).insert(request);
  }
  // The parts that load nothing receive 0 tokens. vLLM 0.22.1 passes them empty blocks, 0.33.0 the
  // real ones; no connector here reads blocks without tokens to load.
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (loads_from != loads_from_.end() && loads_from->second.part == i)
      parts_[i]->update_state_after_alloc(request, blocks, num_external_tokens);
    else
      parts_[i]->update_state_after_alloc(request, {}, 0);
  }
}

bool MultiConnector::request_finished(RequestId request, std::string_view name) {
  // The blocks stay until the last part that sends them has reported: _extra_async_saves in vLLM
  // counts the sends beyond the first.
  std::int32_t num_sends = 0;
  for (KVConnector* part : parts_) num_sends += part->request_finished(request, name) ? 1 : 0;
  if (num_sends > 1) sends_to_come_[request] = num_sends - 1;
  loads_from_.erase(request);
  num_frees_delayed_ += num_sends > 0 ? 1 : 0;
  return num_sends > 0;
}

KVConnectorOutput MultiConnector::merge(std::span<const KVConnectorOutput> reports) {
  LS_CHECK(reports.size() == parts_.size(), "{} reports of {} parts", reports.size(),
           parts_.size());
  KVConnectorOutput merged;
  // Loads within the step have completed when its reports arrive, without any report naming them.
  std::vector<RequestId> over(loads_in_step_.begin(), loads_in_step_.end());
  loads_in_step_.clear();
  for (const KVConnectorOutput& report : reports) {
    merged.finished_recving.insert(merged.finished_recving.end(), report.finished_recving.begin(),
                                   report.finished_recving.end());
    for (const RequestId request : report.finished_recving) {
      loading_.erase(request);
      over.push_back(request);
    }
    merged.failed_recving.insert(merged.failed_recving.end(), report.failed_recving.begin(),
                                 report.failed_recving.end());
    merged.invalid_block_ids.insert(merged.invalid_block_ids.end(),
                                    report.invalid_block_ids.begin(),
                                    report.invalid_block_ids.end());
    merged.enqueued.insert(merged.enqueued.end(), report.enqueued.begin(), report.enqueued.end());
    merged.completed.insert(merged.completed.end(), report.completed.begin(),
                            report.completed.end());
    for (const RequestId request : report.finished_sending) {
      // Passes on only the last of several reports: the scheduler frees the blocks once.
      const auto to_come = sends_to_come_.find(request);
      if (to_come == sends_to_come_.end())
        merged.finished_sending.push_back(request);
      else if (--to_come->second == 0)
        sends_to_come_.erase(to_come);
    }
  }
  unheard_.report(std::move(over));
  return merged;
}

// Appends the transfers with their host blocks shifted by `first_host`.
static void append(std::vector<BlockTransfer>&& from, std::int64_t first_host,
                   std::vector<BlockTransfer>& to) {
  for (BlockTransfer& block : from) {
    block.host = HostBlockId{static_cast<std::int32_t>(index_of(block.host) + first_host)};
    to.push_back(block);
  }
}

std::vector<KVConnector*> MultiTransfers::connectors_of(const std::vector<TransferPart>& parts) {
  std::vector<KVConnector*> connectors;
  for (const TransferPart& part : parts) connectors.push_back(part.connector);
  return connectors;
}

KVConnectorOutput MultiTransfers::report() {
  reports_.clear();
  for (const TransferPart& part : parts_) reports_.push_back(part.workers->report());
  return connector_.merge(reports_);
}

bool MultiTransfers::is_busy() const {
  return std::ranges::any_of(parts_, [](const auto& part) { return part.workers->is_busy(); });
}

void MultiTransfers::plan(const DecidedStep& step, StepTransfers& transfers) {
  LS_CHECK(reports_.size() == parts_.size(), "{} reports of {} parts", reports_.size(),
           parts_.size());
  // Parts number their host blocks from 0. The run's tier holds them back to back: with tiers of 32
  // and 64 blocks, block 5 of the second part is host block 37.
  std::int64_t first_host = 0;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    StepTransfers own;
    own.lost = transfers.lost;
    parts_[i].transfers->plan({.decision = step.decision,
                               .decisions = step.decisions,
                               .report = reports_[i],
                               .block_tokens = step.block_tokens},
                              own);
    // Payloads match StepTransfers::brought by index, which merging would break.
    LS_CHECK(own.payloads.empty(), "part {} brings bytes of its own", i);
    append(std::move(own.begun), first_host, transfers.begun);
    append(std::move(own.brought), first_host, transfers.brought);
    append(std::move(own.loads), first_host, transfers.loads);
    append(std::move(own.stores), first_host, transfers.stores);
    transfers.num_evicted += own.num_evicted;
    first_host += parts_[i].num_host_blocks;
  }
  // Not the sum of the parts: two parts may keep the same request.
  transfers.num_frees_delayed = connector_.num_frees_delayed();
}

}  // namespace lockstep
