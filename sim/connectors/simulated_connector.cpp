#include "sim/connectors/simulated_connector.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace lockstep {

SimulatedConnector::Knowledge& SimulatedConnector::knowledge_of(const ExternalQuery& query) {
  const auto known = known_.find(query.name);
  if (known != known_.end()) return known->second;
  Knowledge knowledge{.random = SeededRandom(options_.seed, query.name)};
  SeededRandom& random = knowledge.random;
  const std::int32_t num_blocks = query.num_tokens / options_.block_size;
  if (num_blocks > 0 && random.chance(options_.known_percent))
    knowledge.num_tokens = random.between(1, num_blocks) * options_.block_size;
  if (random.chance(options_.undetermined_percent))
    knowledge.num_silent = static_cast<std::int32_t>(random.between(1, 3));
  knowledge.is_async = random.chance(options_.async_percent);
  return known_.emplace(query.name, knowledge).first->second;
}

ExternalHit SimulatedConnector::get_num_new_matched_tokens(const ExternalQuery& query) {
  Knowledge& knowledge = knowledge_of(query);
  if (knowledge.num_silent > 0) {
    --knowledge.num_silent;
    owes_answer_ = true;
    return {.num_tokens = std::nullopt};
  }
  // Within the step at least one token is left to compute.
  const std::int64_t most = knowledge.is_async ? query.num_tokens : query.num_tokens - 1;
  const std::int64_t tokens =
      std::min(knowledge.num_tokens, most) / options_.block_size * options_.block_size;
  const auto external =
      static_cast<std::int32_t>(std::max<std::int64_t>(tokens - query.num_local_tokens, 0));
  const bool is_async = knowledge.is_async && external > 0;
  asked_[query.request] = {std::string(query.name), query.num_local_tokens, is_async};
  return {.num_tokens = external, .is_async = is_async};
}

void SimulatedConnector::update_state_after_alloc(RequestId request,
                                                  std::span<const BlockId> blocks,
                                                  std::int32_t num_external_tokens) {
  if (num_external_tokens == 0) return;
  const auto asked = asked_.find(request);
  LS_CHECK(asked != asked_.end(), "request {} loads unasked", index_of(request));
  SeededRandom& random = known_.find(asked->second.name)->second.random;
  const std::int32_t first = asked->second.num_local_tokens / options_.block_size;
  const std::int32_t count = num_external_tokens / options_.block_size;
  const bool is_dead = asked->second.is_async && random.chance(options_.dead_percent);
  std::vector<BlockId> lost;
  if (options_.num_groups == 1 && (is_dead || random.chance(options_.lossy_percent))) {
    const std::int64_t begin = first + (is_dead ? 0 : random.below(count));
    lost.assign(blocks.begin() + begin, blocks.begin() + first + count);
    std::erase(lost, kNullBlock);  // nobody reads what a window has left behind, nor loads it
  }
  if (!asked->second.is_async) {
    invalid_.insert(invalid_.end(), lost.begin(), lost.end());
    if (!lost.empty()) losing_.push_back(request);
    return;
  }
  const std::int64_t delay =
      is_dead ? options_.timeout_steps : random.below(options_.delay_steps_max);
  transfers_.push_back({step_ + delay, request, true, std::move(lost)});
}

bool SimulatedConnector::request_finished(RequestId request, std::string_view name) {
  const auto known = known_.find(name);
  if (known == known_.end()) return false;  // nobody has asked: it holds nothing to be sent
  SeededRandom random = known->second.random;
  known_.erase(known);
  asked_.erase(request);
  // The engine fails requests before it takes note of loads that the same report says are over.
  const bool is_loading = unheard_.contains(request) ||
                          (loads_elsewhere_ && loads_elsewhere_(request)) ||
                          std::ranges::any_of(transfers_, [&](const Transfer& transfer) {
                            return transfer.request == request && transfer.is_load;
                          });
  if (is_loading || !random.chance(options_.kept_percent)) return false;
  transfers_.push_back({step_ + random.between(1, options_.delay_steps_max), request, false, {}});
  return true;
}

KVConnectorOutput SimulatedConnector::report() {
  KVConnectorOutput report;
  report.invalid_block_ids = std::move(invalid_);
  invalid_.clear();
  owes_answer_ = false;
  std::erase_if(transfers_, [&](Transfer& transfer) {
    if (transfer.due_step > step_) return false;
    (transfer.is_load ? report.finished_recving : report.finished_sending)
        .push_back(transfer.request);
    report.invalid_block_ids.insert(report.invalid_block_ids.end(), transfer.lost.begin(),
                                    transfer.lost.end());
    return true;
  });
  std::vector<RequestId> over = std::exchange(losing_, {});
  over.insert(over.end(), report.finished_recving.begin(), report.finished_recving.end());
  unheard_.report(std::move(over));
  ++step_;
  return report;
}

}  // namespace lockstep
