// The result of a run: counts, verdict, times, and what was not checked.
//
// Invariants
// (1) state_hash and all counts depend only on configuration, workload and seed; times do not.
// (2) Every count is a row of kRunCounters, so JSON, sums over ranks and texts cannot miss one.
#pragma once

#include <bit>
#include <cstdint>
#include <iterator>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "reference/memory/content.h"
#include "reference/types/scheduler_types.h"
#include "sim/protocol/backend.h"
#include "sim/verdict/divergence.h"

namespace lockstep {

// How a run ended. A run has one verdict; the first failure decides it.
enum class Verdict : std::uint8_t {
  agreed,          // everything that was compared is equal
  done,            // nothing was compared
  interrupted,     // by a stop signal, before anything failed
  divergence,      // see RunSummary::divergence
  liveness,        // requests wait, nothing runs and nothing can arrive
  engine_failure,  // the deciding engine has failed
  mismatch,        // it decides differently from the model
  parted,          // of a recording: no failure, but other decisions than recorded
  audit,           // the audit of the decisions has findings, see RunSummary::violation
  violation,       // of a saved case: another check fails, also in RunSummary::violation
  harness,         // Lockstep's own code in an engine's process raised: no verdict on the engine
};

// 128 bits, printed as 32 hexadecimal digits.
struct StateHash {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  bool operator==(const StateHash&) const = default;
};
std::string to_hex(StateHash hash);

// One request that waits forever.
struct StuckRequest {
  std::string name;
  std::string why;  // "needs 12 blocks more; 3 of 40 are free, no running request will free any"
};

// Elapsed seconds of a run by phase. They are the only fields that differ between equal runs.
struct PhaseSeconds {
  double schedule = 0;  // only the model's decisions: schedule and update_from_output
  double program = 0;   // deriving the program and the memory model's step
  double execute = 0;   // the backend
  double compare = 0;   // reading back and comparing
  double wall = 0;      // the whole run
};

// What a run counts. Each count is a member here and a row of kRunCounters. All are totals over the
// run and over ranks.
struct RunCounts {
  std::int64_t requests = 0;  // arrivals
  std::int64_t finished_requests = 0;
  std::int64_t aborted_requests = 0;
  std::int64_t refused_requests = 0;  // longer than max_model_len allows
  std::int64_t steps = 0;
  std::int64_t request_steps = 0;  // requests scheduled, summed over steps
  std::int64_t scheduled_tokens = 0;
  std::int64_t output_tokens = 0;
  std::int64_t prompt_tokens = 0;  // of requests at their first scheduling
  std::int64_t cached_tokens = 0;  // of the prompts, found in the prefix cache at first scheduling
  std::int64_t hits = 0;           // requests with cached tokens at first scheduling
  std::int64_t preemptions = 0;
  std::int64_t stored = 0;               // block hashes added to the prefix cache
  std::int64_t evictions = 0;            // block hashes removed by reuse of their block
  std::int64_t refused_allocations = 0;  // by a fault: the pool had the blocks
  std::int64_t simulated_ns = 0;         // virtual time at the end
  std::int64_t pages_checked = 0;        // fingerprints compared
  std::int64_t bytes_checked = 0;        // of those pages
  std::int64_t host_blocks_checked = 0;  // of the host tier, fingerprints compared
  std::int64_t host_bytes_checked = 0;   // of those blocks
  std::int64_t blocks_loaded = 0;        // from the host tier
  std::int64_t blocks_stored = 0;        // to it
  std::int64_t blocks_lost = 0;          // whose load failed
  std::int64_t host_evictions = 0;       // blocks of the host tier given to another content
  std::int64_t frees_delayed = 0;  // requests that kept their blocks after their end, to be sent
  std::int64_t table_entries_checked = 0;
  std::int64_t slots_checked = 0;
  std::int64_t rows_read = 0;              // cache rows under compared attention digests
  std::int64_t outputs_checked = 0;        // floats of attention outputs
  std::int64_t state_numbers_checked = 0;  // of states of real numbers, after updates
  std::int64_t state_outputs_checked = 0;  // floats of convolution and recurrence outputs
  std::int64_t rows_extracted = 0;         // hidden states of finished requests, compared
  std::int64_t hidden_files_seen = 0;      // complete files of them on a simulated disk
  std::int64_t union_rows_checked = 0;     // rows of the whole model found on enough ranks
  std::int64_t idle_rank_steps = 0;        // of data parallel ranks without work of their own
  std::int64_t eager_rank_steps = 0;       // of data parallel ranks that agreed on no graph
  std::int64_t collectives_checked = 0;    // calls of data parallel ranks, matched
  std::int64_t draft_rows_written = 0;     // slots that passes of a draft model wrote
  std::int64_t draft_rows_replaced = 0;    // of those, slots of drafts, accepted or not
  std::int64_t draft_rows_next_block = 0;  // ... in the block after the last token's
  std::int64_t draft_rows_at_end = 0;      // ... clamped to the last position of max_model_len
  std::int64_t draft_rows_again = 0;       // ... run again, because of rejected drafts
  std::int64_t draft_rows_read = 0;        // rows that passes read, each checked once
  std::int64_t draft_rows_hit = 0;         // of those, of a prefix hit
  std::int64_t stale_draft_rows = 0;       // of those, wrong, as the release leaves them
};

// A count: its key in JSON, and the words after its figure in the text; empty: not in the text.
struct RunCounter {
  const char* name;
  std::int64_t RunCounts::*count;
  std::string_view text = {};
};
inline constexpr RunCounter kRunCounters[] = {
    {"requests", &RunCounts::requests},
    {"finished_requests", &RunCounts::finished_requests},
    {"aborted_requests", &RunCounts::aborted_requests},
    {"refused_requests", &RunCounts::refused_requests},
    {"steps", &RunCounts::steps},
    {"request_steps", &RunCounts::request_steps},
    {"scheduled_tokens", &RunCounts::scheduled_tokens},
    {"output_tokens", &RunCounts::output_tokens},
    {"prompt_tokens", &RunCounts::prompt_tokens},
    {"cached_tokens", &RunCounts::cached_tokens},
    {"hits", &RunCounts::hits},
    {"preemptions", &RunCounts::preemptions},
    {"stored", &RunCounts::stored},
    {"evictions", &RunCounts::evictions},
    {"refused_allocations", &RunCounts::refused_allocations},
    {"simulated_ns", &RunCounts::simulated_ns},
    {"pages_checked", &RunCounts::pages_checked},
    {"bytes_checked", &RunCounts::bytes_checked},
    {"host_blocks_checked", &RunCounts::host_blocks_checked},
    {"host_bytes_checked", &RunCounts::host_bytes_checked},
    {"blocks_loaded", &RunCounts::blocks_loaded},
    {"blocks_stored", &RunCounts::blocks_stored},
    {"blocks_lost", &RunCounts::blocks_lost},
    {"host_evictions", &RunCounts::host_evictions},
    {"frees_delayed", &RunCounts::frees_delayed},
    {"table_entries_checked", &RunCounts::table_entries_checked, "block table entries"},
    {"slots_checked", &RunCounts::slots_checked, "slots"},
    {"rows_read", &RunCounts::rows_read, "KV entries read back by attention"},
    {"outputs_checked", &RunCounts::outputs_checked, "attention outputs"},
    {"state_numbers_checked", &RunCounts::state_numbers_checked},
    {"state_outputs_checked", &RunCounts::state_outputs_checked},
    {"rows_extracted", &RunCounts::rows_extracted},
    {"hidden_files_seen", &RunCounts::hidden_files_seen},
    {"union_rows_checked", &RunCounts::union_rows_checked,
     "entries of the whole model found among the ranks"},
    {"idle_rank_steps", &RunCounts::idle_rank_steps},
    {"eager_rank_steps", &RunCounts::eager_rank_steps},
    {"collectives_checked", &RunCounts::collectives_checked},
    {"draft_rows_written", &RunCounts::draft_rows_written},
    {"draft_rows_replaced", &RunCounts::draft_rows_replaced},
    {"draft_rows_next_block", &RunCounts::draft_rows_next_block},
    {"draft_rows_at_end", &RunCounts::draft_rows_at_end},
    {"draft_rows_again", &RunCounts::draft_rows_again},
    {"draft_rows_hit", &RunCounts::draft_rows_hit},
    {"draft_rows_read", &RunCounts::draft_rows_read, "entries that the draft model read"},
    {"stale_draft_rows", &RunCounts::stale_draft_rows,
     "of them stale or never written, as in the release"},
};
// Fails if a member has no row.
static_assert(sizeof(RunCounts) == std::size(kRunCounters) * sizeof(std::int64_t));

// A failed check in addition to the run's own: the first decision of another engine that the model
// does not make, or a finding of the audit or the invariants.
struct CheckFailure {
  std::string check;  // "conform.scheduled", "audit.attention_read"
  std::int64_t step = -1;
  std::string what;       // "scheduled[0].tokens: the engine has 3, the model of vllm-0.33.0 4"
  std::string request{};  // empty: none
};

// How a run ended, and its evidence. Only the members of its verdict are set.
struct RunVerdict {
  Verdict verdict = Verdict::agreed;
  std::optional<Divergence> divergence;
  std::optional<EngineFailure> engine_failure;
  std::optional<CheckFailure> mismatch;
  std::optional<CheckFailure> violation;
  std::string wait_cycle;                // liveness: the cycle of waiting requests; may be empty
  bool cycle_head_holds_blocks = false;  // True if its first request has loaded a part
  std::vector<StuckRequest> stuck;       // liveness
  std::int64_t stuck_total = 0;          // all; `stuck` lists the first few
  std::int32_t stuck_dp_rank = -1;       // their data parallel rank; -1: there is one
};

struct RunSummary : RunCounts, RunVerdict {
  std::vector<std::string> not_checked;  // one line each
  std::vector<std::string> unreported;   // those of not_checked that a decision source left out

  std::vector<KernelStatistics> kernels;  // by kernel, of the backend
  GraphStatistics graphs;

  std::string backend;  // name and device; "none"
  StateHash state_hash;
  PhaseSeconds seconds;
};

// Returns the summary as JSON. Its texts may not be UTF-8: dump it with error_handler_t::replace.
nlohmann::ordered_json json_of(const RunSummary& summary);

// Adds one rank's totals of a kernel to those of other ranks, found by the kernel's name.
void add_kernel(const KernelStatistics& kernel, std::vector<KernelStatistics>& kernels);
// Adds one data parallel rank's counts, times, kernels and graphs to the sum, and lists what it did
// not check, each line once. The verdict is not changed.
void add_counts(const RunSummary& one, RunSummary& sum);

// The chain of state hashes: 128 bits that every step's decisions and expectations extend. Two runs
// with equal chains at a step have agreed in everything that was put in up to there.
//
// Order matters, and so does what is absent: lists go in with their length.

class StateHashChain {
 public:
  // Both halves depend on all previous values and on their order.
  void add(std::uint64_t value) {
    low_ = mix(low_ ^ value);
    high_ = (high_ + std::rotl(low_, 31)) * kStateStep + value;
  }
  // The length comes first, then the bytes in words of 8.
  void add(std::string_view text) {
    add(text.size());
    std::uint64_t word = 0;
    for (std::size_t i = 0; i < text.size(); ++i) {
      word = word << 8 | static_cast<unsigned char>(text[i]);
      if (i % 8 == 7) add(word);
    }
    add(word);
  }
  void add(const SchedulerOutput& decision);
  StateHash value() const { return {mix(high_), low_}; }

 private:
  std::uint64_t high_ = 0x6C6F636B73746570ull;
  std::uint64_t low_ = 0x636861696E6F6620ull;
};

}  // namespace lockstep
