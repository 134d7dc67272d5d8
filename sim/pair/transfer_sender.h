// The prefill engine's KV connector: keeps the blocks of a prompt that it has computed until the
// decode engine has read them, and answers its reads.
// Source of the behaviour: vllm/distributed/kv_transfer/kv_connector/v1/nixl/scheduler.py and
// worker.py, where the decode engine reads and notifies, and a lease ends what nobody reads.
//
// (1) Blocks are held from the end of their request to a `release` of the same transfer, or until
//     nothing was heard of it for a lease; then, once, they are reported in finished_sending.
// (2) What is not held is never read: a `read` of it is answered with `gone`.
// (3) A `release` is answered however often it comes.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "reference/kv_connector.h"
#include "sim/decision_source.h"
#include "sim/pair/transfer_protocol.h"

namespace lockstep {

class TransferSender final : public KVConnector {
 public:
  // REQUIRES: the link's `self` is the prefill engine.
  TransferSender(const TransferLink& link, std::int32_t num_groups, ReadBlock read_block)
      : link_(link), num_groups_(num_groups), read_block_(std::move(read_block)) {}
  // Whose block tables are sent. REQUIRES: before the first request finishes.
  void attach(const DecisionSource& decisions) { decisions_ = &decisions; }

  // The request is prefilled for this transfer, or not for any after all.
  void expect(const std::string& name, TransferId transfer) { expected_[name] = transfer; }
  void forget(const std::string& name) { expected_.erase(name); }

  ExternalHit get_num_new_matched_tokens(const ExternalQuery&) override { return {}; }
  bool request_finished(RequestId request, std::string_view name) override;

  // Time passes: leases may end.
  void at(std::int64_t now_ns);
  void take(const TransferMessage& message);
  std::optional<std::int64_t> next_timer_ns() const;

  // What is to be reported with the next step.
  bool has_news() const { return !sent_.empty(); }
  void report(KVConnectorOutput& report);
  // Whose blocks `report` gave back, since the last call.
  std::vector<TransferId> take_freed() { return std::exchange(freed_, {}); }

 private:
  struct Held {
    RequestId request{};
    std::vector<std::vector<BlockId>> tables;  // per group
    std::int64_t expires_ns = 0;
    bool is_free = false;  // only with a planted defect: it was given back and is still read
  };
  std::map<TransferId, Held>::iterator find(TransferId transfer);
  void answer_read(const TransferMessage& message);
  void release(const TransferMessage& message);

  const TransferLink link_;
  const std::int32_t num_groups_;
  const ReadBlock read_block_;
  const DecisionSource* decisions_ = nullptr;
  std::int64_t now_ns_ = 0;
  std::map<std::string, TransferId, std::less<>> expected_;
  std::map<TransferId, Held> held_;
  std::vector<std::pair<TransferId, RequestId>> sent_;
  std::vector<TransferId> freed_;
};

}  // namespace lockstep
