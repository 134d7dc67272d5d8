#include "sim/connectors/connector_log.h"

#include "base/check.h"

namespace lockstep {

ExternalHit ConnectorLog::get_num_new_matched_tokens(const ExternalQuery& query) {
  const ExternalHit hit = inner_.get_num_new_matched_tokens(query);
  names_.insert_or_assign(query.request, query.name);
  answers_.push_back({.id = std::string(query.name),
                      .local = query.num_local_tokens,
                      .external = hit.num_tokens,
                      .async = hit.is_async});
  return hit;
}

bool ConnectorLog::request_finished(RequestId request, std::string_view name) {
  const bool keeps = inner_.request_finished(request, name);
  names_.insert_or_assign(request, name);
  if (keeps) held_.emplace_back(name);
  return keeps;
}

RecordedWorker ConnectorLog::worker(const KVConnectorOutput& report) const {
  const auto names = [&](const std::vector<RequestId>& ids) {
    std::vector<std::string> list;
    for (const RequestId id : ids) {
      const auto name = names_.find(id);
      LS_CHECK(name != names_.end(), "request {} was never asked about", index_of(id));
      list.push_back(name->second);
    }
    return list;
  };
  return {.received = names(report.finished_recving),
          .sent = names(report.finished_sending),
          .invalid_blocks = report.invalid_block_ids};
}

}  // namespace lockstep
