// Several KV connectors combined into one, and the start-up of an engine with connectors. Sources:
// vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py; the order of the start-up is
// that of VllmConfig.__post_init__() in vllm/config/vllm.py.
//
// Invariants
// (1) The first part with tokens for a request loads it. While any part is undecided, none loads:
//     the answer is "query again".
// (2) Every connector is notified of every allocation; those that do not load receive 0 tokens.
// (3) Blocks are kept while any part sends them, and reported once, in finished_sending.
// (4) While a load into a request's blocks is in flight, or has ended with the last report,
//     is_loading() is true. vLLM frees blocks once, so a part that would hold them for a send has
//     to check it.
// (5) Several KV cache groups are passed to connectors only if every part supports them. This is
//     checked when all connectors exist, including the one that an offloading backend adds.
//
// Not modelled: the metadata of workers, kv_transfer_params, and layouts that connectors require.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/names.h"
#include "base/result.h"
#include "reference/types/kv_connector.h"
#include "sim/connectors/worker_connector.h"
#include "sim/engine/workload.h"

namespace lockstep {

// Defects that can be planted here; docs/reference/mutants.md describes them. hma_any accepts
// several groups if any part supports them (domain.md, id hma-any). hma_before_config checks the
// support before the offloading backend has set its connector.
enum class MultiConnectorDefect : std::uint8_t { none, hma_any, hma_before_config };
template <>
inline constexpr char kWordJoint<MultiConnectorDefect> = '-';

// A connector class, as far as start-up reads it.
struct ConnectorClass {
  std::string name;
  bool supports_hybrid_groups = false;  // vLLM: SupportsHMA
  bool operator==(const ConnectorClass&) const = default;
};
// Returns the classes that vLLM 0.22.1 registers
// (vllm/distributed/kv_transfer/kv_connector/factory.py), except MultiConnector, which its parts
// stand for.
std::span<const ConnectorClass> connector_classes();

struct MultiConnectorConfig {
  std::vector<ConnectorClass> connectors;  // several: parts of a MultiConnector
  bool offloads = false;                   // true if a size is given for the cache on the host
  // The user's choice about several groups; absent: the engine decides.
  std::optional<bool> hybrid_groups;
};

// The outcome of start-up: the connectors in use, and whether they receive several groups.
struct MultiConnectorSetup {
  std::vector<ConnectorClass> connectors;
  bool hybrid_groups = true;
};

// Sets up the connectors as VllmConfig.__post_init__() does. Without a connector, several groups
// are always allowed. Errors: offloading is off and no connector is named; the user requires
// several groups and a connector does not support them.
Result<MultiConnectorSetup> set_up_connectors(
    const MultiConnectorConfig& config, MultiConnectorDefect defect = MultiConnectorDefect::none);

class MultiConnector final : public KVConnector {
 public:
  // The parts outlive it. REQUIRES: at least one.
  explicit MultiConnector(std::vector<KVConnector*> parts, bool async_scheduling = false);

  // Returns the traits that at least one part has.
  KVConnectorTraits traits() const override;
  ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) override;
  void update_state_after_alloc(RequestId request, std::span<const BlockId> blocks,
                                std::int32_t num_external_tokens) override;
  void start_pages(const HostPageCommand& command) override {
    for (KVConnector* part : parts_) part->start_pages(command);
  }
  // Notifies every part. True if at least one keeps the blocks for a send.
  bool request_finished(RequestId request, std::string_view name) override;

  // Merges the reports of the parts' workers in a step into one. A request that several parts send
  // appears in finished_sending with the last part's report. REQUIRES: one report per part, in
  // order.
  KVConnectorOutput merge(std::span<const KVConnectorOutput> reports);

  // True if a load into the request's blocks is in flight, or has completed and the engine is not
  // yet notified.
  bool is_loading(RequestId request) const {
    return loading_.contains(request) || unheard_.contains(request);
  }
  // Finished requests that kept their blocks, since the start; each counted once.
  std::int64_t num_frees_delayed() const { return num_frees_delayed_; }

 private:
  // The part that answered last with tokens for a request.
  struct Chosen {
    std::size_t part = 0;  // index in parts_
    bool is_async = false;
  };

  const std::vector<KVConnector*> parts_;
  std::map<RequestId, Chosen> loads_from_;
  std::set<RequestId> loading_;  // loads longer than a step, in flight
  std::set<RequestId> loads_in_step_;
  UnheardLoads unheard_;
  std::map<RequestId, std::int32_t> sends_to_come_;  // sends left beyond the first; only if > 0
  std::int64_t num_frees_delayed_ = 0;
};

// A MultiConnector together with the workers of its parts and what they move, as one connector.
//
// (1) Each part plans with the report of its own workers. Blocks that any part has lost are known
//     to all (StepTransfers::lost).
// (2) Host blocks of a part are its own: they follow those of the parts before it.
// (3) A request whose blocks are kept is counted once, however many parts keep them.

struct TransferPart {
  // The three interfaces of a part; they may be one object. All outlive the MultiTransfers.
  KVConnector* connector = nullptr;
  WorkerConnector* workers = nullptr;
  TransferPlanner* transfers = nullptr;
  // Host blocks that the part numbers from 0.
  std::int64_t num_host_blocks = 0;
};

class MultiTransfers final : public WorkerConnector, public TransferPlanner {
 public:
  // The parts outlive it. REQUIRES: at least one.
  explicit MultiTransfers(std::vector<TransferPart> parts, bool async_scheduling = false)
      : parts_(std::move(parts)), connector_(connectors_of(parts_), async_scheduling) {}

  KVConnectorTraits traits() const override { return connector_.traits(); }
  ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) override {
    return connector_.get_num_new_matched_tokens(query);
  }
  void update_state_after_alloc(RequestId request, std::span<const BlockId> blocks,
                                std::int32_t num_external_tokens) override {
    connector_.update_state_after_alloc(request, blocks, num_external_tokens);
  }
  void start_pages(const HostPageCommand& command) override { connector_.start_pages(command); }
  bool request_finished(RequestId request, std::string_view name) override {
    return connector_.request_finished(request, name);
  }
  bool is_loading(RequestId request) const { return connector_.is_loading(request); }

  KVConnectorOutput report() override;
  bool is_busy() const override;
  // Plans the transfers of every part, in order, with host blocks renumbered to the common tier.
  // REQUIRES: report() of the same step.
  void plan(const DecidedStep& step, StepTransfers& transfers) override;

 private:
  static std::vector<KVConnector*> connectors_of(const std::vector<TransferPart>& parts);

  const std::vector<TransferPart> parts_;
  MultiConnector connector_;
  // Reports of the current step, one per part.
  std::vector<KVConnectorOutput> reports_;
};

}  // namespace lockstep
