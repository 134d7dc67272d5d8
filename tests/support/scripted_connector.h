// A KV connector that answers and reports what a script says.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/check.h"
#include "reference/types/kv_connector.h"

namespace lockstep {

class ScriptedConnector final : public KVConnector {
 public:
  // Per request its answers in the order asked, the last of them again and again; without any, the
  // connector has nothing. Per step the requests whose load is then over.
  std::map<std::string, std::vector<ExternalHit>> answers;
  std::map<std::size_t, std::vector<std::string>> received;
  std::map<std::size_t, std::vector<BlockId>> invalid;  // and the blocks that were not filled

  ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) override {
    const std::string name(query.name);
    ids_[name] = query.request;
    const auto script = answers.find(name);
    if (script == answers.end()) return {};
    std::size_t& next = num_asked_[name];
    return script->second[std::min(next++, script->second.size() - 1)];
  }
  bool request_finished(RequestId, std::string_view) override { return false; }

  KVConnectorOutput report(std::size_t step) {
    KVConnectorOutput report;
    for (const std::string& name : received[step]) {
      LS_CHECK(ids_.contains(name), "{} was never asked about", name);
      report.finished_recving.push_back(ids_[name]);
    }
    report.invalid_block_ids = invalid[step];
    return report;
  }

 private:
  std::map<std::string, RequestId> ids_;
  std::map<std::string, std::size_t> num_asked_;
};

}  // namespace lockstep
