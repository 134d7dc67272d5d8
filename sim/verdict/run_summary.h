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

// What a run counts, over the run and over ranks. A row makes a member of RunCounts and a row of
// kRunCounters: the name, which is its key in JSON, and the words after its figure in the text; "":
// not in the text.
#define LOCKSTEP_RUN_COUNTS(X)                                                                 \
  X(requests, "") /* arrivals */                                                               \
  X(finished_requests, "")                                                                     \
  X(aborted_requests, "")                                                                      \
  X(refused_requests, "") /* longer than max_model_len allows */                               \
  X(steps, "")                                                                                 \
  X(request_steps, "") /* requests scheduled, summed over steps */                             \
  X(scheduled_tokens, "")                                                                      \
  X(output_tokens, "")                                                                         \
  X(prompt_tokens, "") /* of requests at their first scheduling */                             \
  X(cached_tokens, "") /* of the prompts, found in the prefix cache at first scheduling */     \
  X(hits, "")          /* requests with cached tokens at first scheduling */                   \
  X(preemptions, "")                                                                           \
  X(stored, "")              /* block hashes added to the prefix cache */                      \
  X(evictions, "")           /* block hashes removed by reuse of their block */                \
  X(refused_allocations, "") /* by a fault: the pool had the blocks */                         \
  X(simulated_ns, "")        /* virtual time at the end */                                     \
  X(pages_checked, "")       /* fingerprints compared */                                       \
  X(bytes_checked, "")       /* of those pages */                                              \
  X(host_blocks_checked, "") /* of the host tier, fingerprints compared */                     \
  X(host_bytes_checked, "")  /* of those blocks */                                             \
  X(blocks_loaded, "")       /* from the host tier */                                          \
  X(blocks_stored, "")       /* to it */                                                       \
  X(blocks_lost, "")         /* whose load failed */                                           \
  X(host_evictions, "")      /* blocks of the host tier given to another content */            \
  X(frees_delayed, "")       /* requests that kept their blocks after their end, to be sent */ \
  X(table_entries_checked, "block table entries")                                              \
  X(slots_checked, "slots")                                                                    \
  /* cache rows under compared attention digests */                                            \
  X(rows_read, "KV entries read back by attention")                                            \
  X(outputs_checked, "attention outputs") /* floats of attention outputs */                    \
  X(state_numbers_checked, "")            /* of states of real numbers, after updates */       \
  X(state_outputs_checked, "")            /* floats of convolution and recurrence outputs */   \
  X(rows_extracted, "")                   /* hidden states of finished requests, compared */   \
  X(hidden_files_seen, "")                /* complete files of them on a simulated disk */     \
  /* rows of the whole model found on enough ranks */                                          \
  X(union_rows_checked, "entries of the whole model found among the ranks")                    \
  X(idle_rank_steps, "")       /* of data parallel ranks without work of their own */          \
  X(eager_rank_steps, "")      /* of data parallel ranks that agreed on no graph */            \
  X(collectives_checked, "")   /* calls of data parallel ranks, matched */                     \
  X(draft_rows_written, "")    /* slots that passes of a draft model wrote */                  \
  X(draft_rows_replaced, "")   /* of those, slots of drafts, accepted or not */                \
  X(draft_rows_next_block, "") /* ... in the block after the last token's */                   \
  X(draft_rows_at_end, "")     /* ... clamped to the last position of max_model_len */         \
  X(draft_rows_again, "")      /* ... run again, because of rejected drafts */                 \
  X(draft_rows_hit, "")        /* of those, of a prefix hit */                                 \
  /* rows that passes read, each checked once */                                               \
  X(draft_rows_read, "entries that the draft model read")                                      \
  /* of those, wrong, as the release leaves them */                                            \
  X(stale_draft_rows, "of them stale or never written, as in the release")
struct RunCounts {
#define LOCKSTEP_RUN_COUNT(name, text) std::int64_t name = 0;
  LOCKSTEP_RUN_COUNTS(LOCKSTEP_RUN_COUNT)
#undef LOCKSTEP_RUN_COUNT
};

struct RunCounter {
  const char* name;
  std::int64_t RunCounts::*count;
  std::string_view text;
};
inline constexpr RunCounter kRunCounters[] = {
#define LOCKSTEP_RUN_COUNT(name, text) {#name, &RunCounts::name, text},
    LOCKSTEP_RUN_COUNTS(LOCKSTEP_RUN_COUNT)
#undef LOCKSTEP_RUN_COUNT
};

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
