// A scheduler, driven step by step by a test: every step's output comes back at once, one token a
// request.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "reference/schedule/scheduler.h"

namespace lockstep {

inline KVCacheGroupSpec group_of(CacheKind kind, std::int64_t block_size) {
  KVCacheSpec spec;
  spec.kind = kind;
  spec.block_size = block_size;
  return {.layer_names = {}, .spec = spec, .layer_specs = {}};
}
inline KVCacheGroupSpec full(std::int64_t block_size) {
  return group_of(CacheKind::full_attention, block_size);
}
inline KVCacheGroupSpec window(std::int64_t block_size, std::int64_t num_tokens) {
  KVCacheGroupSpec group = group_of(CacheKind::sliding_window, block_size);
  group.spec.sliding_window = num_tokens;
  return group;
}
inline KVCacheGroupSpec states(std::int64_t block_size, MambaCacheMode mode,
                               std::int64_t num_speculative_blocks = 0) {
  KVCacheGroupSpec group = group_of(CacheKind::mamba, block_size);
  group.spec.mamba_cache_mode = mode;
  group.spec.num_speculative_blocks = num_speculative_blocks;
  return group;
}

// A prompt of `count` tokens of source `seed`, then `more` of source `other`.
inline Prompt prompt_of(std::uint64_t seed, std::uint32_t count, std::uint64_t other = 0,
                        std::uint32_t more = 0) {
  Prompt prompt;
  prompt.append({TokenRun::Kind::seeded, seed, 0, count});
  if (more > 0) prompt.append({TokenRun::Kind::seeded, other, 0, more});
  return prompt;
}

class Engine {
 public:
  Engine(const EngineConfig& config, const std::vector<KVCacheGroupSpec>& groups,
         std::int64_t num_blocks, const KVTransfer& transfer = {})
      : num_spec_tokens_(config.num_spec_tokens),
        is_async_(config.async_scheduling),
        scheduler_(make(config, groups, num_blocks, transfer)) {}

  RequestId add(std::string name, Prompt prompt, std::int32_t max_tokens = 16,
                std::int32_t priority = 0) {
    RequestSpec spec;
    spec.name = std::move(name);
    spec.prompt = std::move(prompt);
    spec.max_tokens = max_tokens;
    spec.arrival_ns = num_added_++;
    spec.priority = priority;
    return scheduler_.add_request(std::move(spec)).value();
  }

  // One step, and the output of the oldest in flight: token 7 for every row that ends its prompt,
  // and drafts of 8 for the next step when the engine drafts. With it what a connector's workers
  // report.
  const SchedulerOutput& step(const KVConnectorOutput& report = {}) {
    const SchedulerOutput& output = scheduler_.schedule();
    if (!output.scheduled.empty() || !report.empty()) in_flight_.push_back(answer(output));
    if (!report.empty()) in_flight_.back().kv_connector_output = report;
    const bool keeps_one = is_async_ && !output.scheduled.empty();
    if (in_flight_.size() > (keeps_one ? 1u : 0u)) {
      const auto stopped = scheduler_.update_from_output(in_flight_.front());
      stopped_.assign(stopped.begin(), stopped.end());
      in_flight_.erase(in_flight_.begin());
    }
    return output;
  }
  void finish_all() {
    while (scheduler_.has_unfinished_requests() || !in_flight_.empty()) step();
  }

  Scheduler& scheduler() { return scheduler_; }
  // By the last output that came back.
  const std::vector<StoppedRequest>& stopped() const { return stopped_; }

 private:
  static Scheduler make(const EngineConfig& config, const std::vector<KVCacheGroupSpec>& groups,
                        std::int64_t num_blocks, const KVTransfer& transfer) {
    Result<Scheduler> made = Scheduler::create(config, groups, num_blocks, transfer);
    if (!made) throw std::runtime_error(made.error().message);
    return std::move(*made);
  }

  ModelOutput answer(const SchedulerOutput& output) const {
    ModelOutput answer;
    for (const ScheduledRequest& row : output.scheduled) {
      const std::int64_t end = row.computed + row.num_tokens - row.num_spec;
      if (end >= scheduler_.num_tokens(row.id)) answer.tokens.push_back(7);
      answer.token_ends.push_back(static_cast<std::uint32_t>(answer.tokens.size()));
      if (num_spec_tokens_ == 0 || is_async_) continue;
      answer.draft_tokens.insert(answer.draft_tokens.end(),
                                 static_cast<std::size_t>(num_spec_tokens_), 8);
      answer.draft_ends.push_back(static_cast<std::uint32_t>(answer.draft_tokens.size()));
    }
    return answer;
  }

  std::int32_t num_spec_tokens_;
  bool is_async_;
  std::int64_t num_added_ = 0;
  Scheduler scheduler_;
  std::vector<ModelOutput> in_flight_;
  std::vector<StoppedRequest> stopped_;
};

// What a step did, by name: tokens scheduled.
inline std::map<std::string, std::int32_t> tokens_of(const Scheduler& scheduler,
                                                     const SchedulerOutput& output) {
  std::map<std::string, std::int32_t> tokens;
  for (const ScheduledRequest& row : output.scheduled)
    tokens[std::string(scheduler.name(row.id))] = row.num_tokens;
  return tokens;
}

inline std::vector<std::int32_t> ids(std::span<const BlockId> blocks) {
  std::vector<std::int32_t> out;
  for (const BlockId block : blocks) out.push_back(index_of(block));
  return out;
}

// A connector that answers by name, always the same; keeps the blocks of the requests in a list.
struct AnsweringConnector final : KVConnector {
  KVConnectorTraits traits() const override { return own_traits; }
  ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) override {
    asked.emplace_back(query.name, query.num_local_tokens);
    const auto answer = answers.find(std::string(query.name));
    return answer == answers.end() ? ExternalHit{} : answer->second;
  }
  bool request_finished(RequestId, std::string_view name) override {
    return kept.contains(std::string(name));
  }
  KVConnectorTraits own_traits;
  std::map<std::string, ExternalHit> answers;
  std::set<std::string> kept;
  std::vector<std::pair<std::string, std::int32_t>> asked;  // name, local tokens
};

}  // namespace lockstep
