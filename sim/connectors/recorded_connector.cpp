#include "sim/connectors/recorded_connector.h"

#include <fmt/core.h>

#include <algorithm>

#include "sim/connectors/python_set_order.h"

namespace lockstep {

KVTransfer kv_transfer(const RecordingHeader& header, KVConnector* connector) {
  const bool fails = header.connector && header.connector->fail_on_load_error;
  return {
      .connector = connector,
      .kv_load_failure_policy = fails ? KVLoadFailurePolicy::fail : KVLoadFailurePolicy::recompute};
}

ExternalHit RecordedConnector::get_num_new_matched_tokens(const ExternalQuery& query) {
  const std::string name(query.name);
  names_.insert_or_assign(query.request, name);
  moving_.erase(name);
  if (!step_.connector) return {.num_tokens = std::nullopt};
  const auto answer = std::ranges::find(*step_.connector, name, &RecordedConnectorAnswer::id);
  if (answer == step_.connector->end() || !answer->external) return {.num_tokens = std::nullopt};
  // Tokens behind another local hit: the difference in the hit is what will be told.
  if (answer->local != query.num_local_tokens) return {.num_tokens = std::nullopt};
  const bool loads = answer->async && *answer->external > 0;
  const std::int32_t limit = query.num_tokens - query.num_local_tokens - (loads ? 0 : 1);
  if (*answer->external > limit) {
    error_ =
        Error{fmt::format("step {}: connector: {} external tokens of request {}; expected at "
                          "most {}",
                          step_.step, *answer->external, name, limit)};
    return {.num_tokens = std::nullopt};
  }
  if (loads) moving_.insert_or_assign(name, query.request);
  return {.num_tokens = answer->external, .is_async = loads};
}

bool RecordedConnector::request_finished(RequestId request, std::string_view name) {
  const bool keeps = std::ranges::find(step_.held, name) != step_.held.end();
  if (keeps) moving_.insert_or_assign(std::string(name), request);
  return keeps;
}

void RecordedConnector::order_failed_requests(std::vector<RequestId>& requests) {
  const auto place = [&](RequestId id) {
    return std::ranges::find(step_.stopped, names_[id], &RecordedStopped::id);
  };
  std::ranges::stable_sort(requests, {}, place);
}

Result<RequestId> RecordedConnector::take(std::string_view key, const std::string& name) {
  const auto request = moving_.find(name);
  if (request != moving_.end()) return request->second;
  return fail(fmt::format("step {}: worker.{}: nothing of request {} is being transferred",
                          step_.step, key, name));
}

Result<void> RecordedConnector::take_report(KVConnectorOutput& report) {
  if (error_) return tl::unexpected(*error_);
  if (!step_.worker) return {};
  for (const std::string& name : in_python_set_order(step_.worker->received)) {
    const auto request = take("received", name);
    if (!request) return tl::unexpected(request.error());
    report.finished_recving.push_back(*request);
  }
  for (const std::string& name : in_python_set_order(step_.worker->sent)) {
    const auto request = take("sent", name);
    if (!request) return tl::unexpected(request.error());
    report.finished_sending.push_back(*request);
  }
  report.invalid_block_ids = step_.worker->invalid_blocks;
  return {};
}

}  // namespace lockstep
