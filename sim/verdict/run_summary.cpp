#include "sim/verdict/run_summary.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/atomic_file.h"
#include "base/check.h"
#include "sim/verdict/divergence_json.h"

namespace lockstep {

std::string_view name_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::agreed:
      return "agreed";
    case Verdict::divergence:
      return "divergence";
    case Verdict::liveness:
      return "liveness";
  }
  LS_CHECK(false, "verdict {}", static_cast<int>(verdict));
}

std::string to_hex(StateHash hash) { return fmt::format("{:016x}{:016x}", hash.high, hash.low); }

nlohmann::ordered_json json_of(const RunSummary& summary) {
  nlohmann::ordered_json json;
  json["verdict"] = name_of(summary.verdict);
  json["backend"] = summary.backend;
  json["requests"] = summary.requests;
  json["finished_requests"] = summary.finished_requests;
  json["aborted_requests"] = summary.aborted_requests;
  json["refused_requests"] = summary.refused_requests;
  json["steps"] = summary.steps;
  json["request_steps"] = summary.request_steps;
  json["scheduled_tokens"] = summary.scheduled_tokens;
  json["output_tokens"] = summary.output_tokens;
  json["prompt_tokens"] = summary.prompt_tokens;
  json["cached_tokens"] = summary.cached_tokens;
  json["hits"] = summary.hits;
  json["preemptions"] = summary.preemptions;
  json["stored"] = summary.stored;
  json["evictions"] = summary.evictions;
  json["refused_allocations"] = summary.refused_allocations;
  json["simulated_ns"] = summary.simulated_ns;
  json["pages_checked"] = summary.pages_checked;
  json["bytes_checked"] = summary.bytes_checked;
  json["host_blocks_checked"] = summary.host_blocks_checked;
  json["host_bytes_checked"] = summary.host_bytes_checked;
  json["blocks_loaded"] = summary.blocks_loaded;
  json["blocks_stored"] = summary.blocks_stored;
  json["blocks_lost"] = summary.blocks_lost;
  json["host_evictions"] = summary.host_evictions;
  json["frees_delayed"] = summary.frees_delayed;
  json["table_entries_checked"] = summary.table_entries_checked;
  json["slots_checked"] = summary.slots_checked;
  json["rows_read"] = summary.rows_read;
  json["outputs_checked"] = summary.outputs_checked;
  json["state_numbers_checked"] = summary.state_numbers_checked;
  json["state_outputs_checked"] = summary.state_outputs_checked;
  json["rows_extracted"] = summary.rows_extracted;
  json["hidden_files_seen"] = summary.hidden_files_seen;
  json["union_rows_checked"] = summary.union_rows_checked;
  json["idle_rank_steps"] = summary.idle_rank_steps;
  json["eager_rank_steps"] = summary.eager_rank_steps;
  json["collectives_checked"] = summary.collectives_checked;
  json["kernels"] = nlohmann::ordered_json::array();
  for (const KernelStatistics& kernel : summary.kernels)
    json["kernels"].push_back({{"kernel", kernel.kernel},
                               {"launches", kernel.launches},
                               {"ctas", kernel.ctas},
                               {"threads", kernel.threads},
                               {"accesses", kernel.accesses},
                               {"switches", kernel.switches},
                               {"barriers", kernel.barriers}});
  json["graphs"] = {{"captured", summary.graphs.captured},
                    {"replayed", summary.graphs.replayed},
                    {"dropped", summary.graphs.dropped}};
  json["not_checked"] = summary.not_checked;
  json["state_hash"] = to_hex(summary.state_hash);
  json["divergence"] = nullptr;
  if (summary.divergence) json["divergence"] = json_of(*summary.divergence);
  json["wait_cycle"] = summary.wait_cycle;
  json["stuck"] = nlohmann::ordered_json::array();
  for (const StuckRequest& stuck : summary.stuck)
    json["stuck"].push_back({{"request", stuck.name}, {"why", stuck.why}});
  json["stuck_total"] = summary.stuck_total;
  json["stuck_dp_rank"] = summary.stuck_dp_rank;
  json["schedule_s"] = summary.seconds.schedule;
  json["program_s"] = summary.seconds.program;
  json["execute_s"] = summary.seconds.execute;
  json["compare_s"] = summary.seconds.compare;
  json["wall_s"] = summary.seconds.wall;
  return json;
}

void add_kernel(const KernelStatistics& kernel, std::vector<KernelStatistics>& kernels) {
  const auto same = std::ranges::find(kernels, kernel.kernel, &KernelStatistics::kernel);
  if (same == kernels.end()) {
    kernels.push_back(kernel);
    return;
  }
  same->launches += kernel.launches;
  same->ctas += kernel.ctas;
  same->threads += kernel.threads;
  same->accesses += kernel.accesses;
  same->switches += kernel.switches;
  same->barriers += kernel.barriers;
}

std::string result_to_json(const RunSummary& summary) { return json_of(summary).dump(2) + "\n"; }

Result<void> write_result_json(const std::string& path, const RunSummary& summary) {
  return write_file_atomically(path, result_to_json(summary));
}

void StateHashChain::add(const SchedulerOutput& decision) {
  add(static_cast<std::uint64_t>(decision.step) << 32 | decision.scheduled.size());
  for (const ScheduledRequest& scheduled : decision.scheduled) {
    add(static_cast<std::uint64_t>(index_of(scheduled.id)) << 32 |
        static_cast<std::uint32_t>(scheduled.num_tokens));
    add(static_cast<std::uint64_t>(scheduled.computed) << 32 |
        static_cast<std::uint64_t>(scheduled.num_spec) << 2 |
        static_cast<std::uint64_t>(scheduled.is_new) << 1 |
        static_cast<std::uint64_t>(scheduled.is_resumed));
  }
  const auto add_all = [this](const auto& list) {
    add(list.size());
    for (const auto& entry : list) add(static_cast<std::uint64_t>(entry));
  };
  add_all(decision.block_ends);
  add_all(decision.block_ids);
  add_all(decision.spec_tokens);
  add_all(decision.preempted);
  add_all(decision.finished);
  add_all(decision.zero);
  add_all(decision.common_prefix_blocks);
}

}  // namespace lockstep
