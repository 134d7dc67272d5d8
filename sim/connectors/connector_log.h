// A KV connector in front of another, which writes down what was asked and answered, in a
// recording's terms: what conform compares and what a run recorder keeps.
//
// Not checked here: whether an answer makes sense.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "reference/types/kv_connector.h"
#include "traces/formats/recording.h"

namespace lockstep {

class ConnectorLog final : public KVConnector {
 public:
  // `inner` must outlive the log.
  explicit ConnectorLog(KVConnector& inner) : inner_(inner) {}

  ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) override;
  void update_state_after_alloc(RequestId request, std::span<const BlockId> blocks,
                                std::int32_t num_external_tokens) override {
    inner_.update_state_after_alloc(request, blocks, num_external_tokens);
  }
  bool request_finished(RequestId request, std::string_view name) override;
  void order_failed_requests(std::vector<RequestId>& requests) override {
    inner_.order_failed_requests(requests);
  }

  // Since the last call, in the order asked.
  std::vector<RecordedConnectorAnswer> take_answers() { return std::exchange(answers_, {}); }
  // Requests that finished since the last call and keep their blocks, in order.
  std::vector<std::string> take_held() { return std::exchange(held_, {}); }
  // A report in a recording's terms. REQUIRES: of requests that went through the log.
  RecordedWorker worker(const KVConnectorOutput& report) const;

 private:
  KVConnector& inner_;
  std::vector<RecordedConnectorAnswer> answers_;
  std::vector<std::string> held_;
  std::map<RequestId, std::string> names_;
};

}  // namespace lockstep
