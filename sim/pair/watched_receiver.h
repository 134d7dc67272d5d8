// The decode engine's connector as the ledger sees it: every load that the engine begins, by the
// engine's own block tables, and every load that its workers report as over. It stands before the
// receiver and knows nothing of what that one has said or heard.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "reference/schedule/scheduler.h"
#include "reference/types/kv_connector.h"
#include "sim/pair/transfer_ledger.h"
#include "sim/pair/transfer_receiver.h"

namespace lockstep {

class WatchedReceiver final : public KVConnector {
 public:
  // Which transfer brings a live request's blocks.
  using TransferOf = std::function<TransferId(std::string_view name)>;

  WatchedReceiver(TransferReceiver& receiver, TransferLedger& ledger,
                  std::span<const KVCacheGroupSpec> groups, TransferOf transfer_of)
      : receiver_(receiver),
        ledger_(ledger),
        groups_(groups),
        transfer_of_(std::move(transfer_of)) {}
  // REQUIRES: before the first request is admitted.
  void attach(const Scheduler& scheduler) { scheduler_ = &scheduler; }

  ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) override;
  void update_state_after_alloc(RequestId request, std::span<const BlockId> blocks,
                                std::int32_t num_external_tokens) override;
  bool request_finished(RequestId request, std::string_view name) override;

  // The receiver's report, appended.
  void report(KVConnectorOutput& report);

 private:
  struct Question {
    std::string name;
    std::int32_t num_tokens = 0;
    std::int32_t num_local_tokens = 0;
  };
  void begin(RequestId request, const Question& asked, std::int32_t num_external_tokens);

  TransferReceiver& receiver_;
  TransferLedger& ledger_;
  const std::span<const KVCacheGroupSpec> groups_;
  const TransferOf transfer_of_;
  const Scheduler* scheduler_ = nullptr;
  std::map<RequestId, Question> asked_;
  std::map<RequestId, TransferId> loading_;
};

}  // namespace lockstep
