// Input and output of the scheduler, step by step: requests and model outputs in, decisions out.
// Plain types. Counts are tokens and positions count from 0, unless a field states otherwise.
//
// Lists with one entry per scheduled request or per group are stored flat, with end offsets: a step
// of 256 requests then costs no allocation. SchedulerOutput::blocks() shows how to read them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/ids.h"
#include "reference/types/host_pages.h"
#include "reference/types/kv_connector.h"
#include "reference/types/token_rows.h"

namespace lockstep {

// Ends a request whose output ends with `min_count` repetitions of the same pattern of
// min_pattern_size (0: 1) to max_pattern_size tokens. max_pattern_size 0: never. min_count below 2:
// never. vLLM's RepetitionDetectionParams (v1/core/sched/utils.py, check_sequence_repetition()).
struct RepetitionDetection {
  std::int32_t max_pattern_size = 0;
  std::int32_t min_pattern_size = 0;
  std::int32_t min_count = 0;
  bool operator==(const RepetitionDetection&) const = default;
};

// The requests that a scheduler schedules: all; only running ones and those that hold blocks; none.
// vLLM's PauseState.
enum class PauseState : std::uint8_t { unpaused, paused_new, paused_all };

// Tokens [first, first + count).
struct TokenSpan {
  std::int32_t first = 0;
  std::int32_t count = 0;
  bool operator==(const TokenSpan&) const = default;
};

// Tokens [first, first + count) of a prompt that represent an image or a clip. With a
// cross-attention decoder the item is not part of the prompt, and `first` is 0.
struct PromptItem {
  std::string identifier;  // equal content has an equal identifier
  std::int32_t first = 0;
  std::int32_t count = 0;
  std::string kind = {};               // "image", "audio"; no decision depends on it
  std::vector<TokenSpan> embeds = {};  // its tokens that have a row of the encoder; empty: all
  // Rows of the encoder. A span past the end of the item counts only up to the end.
  std::int32_t num_rows() const {
    std::int32_t rows = 0;
    for (const TokenSpan& span : embeds) rows += std::min(span.count, count - span.first);
    return embeds.empty() ? count : rows;
  }
  bool operator==(const PromptItem&) const = default;
};

// A LoRA adapter. Adapters with equal names and different paths are different adapters.
struct Adapter {
  std::string name = {};  // empty: none
  std::int64_t id = 0;
  std::string path = {};  // of its weights
  bool operator==(const Adapter&) const = default;
};

// Embeddings in place of tokens, one row per position: seeded rows, or the digests of an engine's
// own rows, which Lockstep never sees.
struct PromptEmbeds {
  std::int32_t width = 0;        // elements per row
  std::vector<TokenRun> rows{};  // seeded, in order
  // Positions of the rows, in order and without overlap; positions between them are read as zeros.
  std::vector<TokenSpan> places{};
  // Digests of the whole prompt: one per `digest_tokens` tokens, the last one for the remainder.
  std::vector<std::string> digests{};  // SHA-256, hexadecimal
  std::int32_t digest_tokens = 0;
  bool are_alone = false;  // true if the request has no token ids; zeros take their place
  bool empty() const { return rows.empty() && digests.empty(); }
  // The row at a position of the prompt, counted over all places; -1: none, read as zeros.
  std::int64_t row_at(std::int64_t position) const {
    std::int64_t row = 0;
    for (const TokenSpan& span : places) {
      if (position < span.first) return -1;
      if (position < span.first + span.count) return row + position - span.first;
      row += span.count;
    }
    return -1;
  }
  bool operator==(const PromptEmbeds&) const = default;
};

// Block hashes cover these keys in addition to tokens and the cache salt
// (generate_block_hash_extra_keys in vllm/v1/core/kv_cache_utils.py): requests share blocks only if
// the keys are equal. Items are in the order of their positions and do not overlap.
struct RequestKeys {
  Adapter lora = {};
  std::vector<PromptItem> mm = {};
  PromptEmbeds embeds = {};
  bool empty() const { return lora.name.empty() && mm.empty() && embeds.empty(); }
  bool operator==(const RequestKeys&) const = default;
};

// One request as it reaches the engine.
struct RequestSpec {
  std::string name;  // unique among live requests; the last tie-break of the priority queue
  Prompt prompt;
  std::int32_t max_tokens = 16;
  std::int64_t arrival_ns = 0;
  std::int64_t priority = 0;  // smaller runs first; policy `priority` only
  std::optional<std::int32_t> eos_token = std::nullopt;  // a sampled token that ends the request
  std::vector<std::int32_t> stop_token_ids = {};         // further tokens that end it
  std::string cache_salt = {};                           // empty: none
  RequestKeys keys = {};
  // Sampled tokens before the request may end. EngineProfile::min_tokens_hold_every_end decides
  // whether its length and repetition also wait for them.
  std::int32_t min_tokens = 0;
  RepetitionDetection repetition_detection{};
  // True if the request looks nothing up in the prefix cache. It still publishes its blocks.
  bool skip_reading_prefix_cache = false;
  bool operator==(const RequestSpec&) const = default;
};

// Life of a request: waiting, running, finished. A load and a preemption are the two detours, and
// both lead back to the waiting queue.
enum class RequestStatus : std::uint8_t {
  waiting,
  waiting_for_remote_kvs,  // holds the blocks that a connector loads
  running,
  preempted,
  finished,
};

// Reason for the end of a request; `error` is a failed load under KVLoadFailurePolicy::fail.
enum class FinishReason : std::uint8_t { stop, length, abort, error, repetition };

// A request of the queue ahead of the waiting requests: its load is in flight, the connector's
// answer was pending, or the scheduler passed it over before newer requests arrived. Releases with
// their own queue for requests that hold blocks list only those here.
struct SkippedRequest {
  RequestId id{};
  RequestStatus status{};
  bool is_loading = false;  // true if its load has not been reported complete
};

// A finished request that keeps its blocks: a send from them or a load into them is in flight.
struct HeldRequest {
  RequestId id{};
  // False: a send.
  bool is_loading = false;
};

// The worker copies `from` to `to` before the step's forward pass: a state to its new block, or a
// block that a hit shares only in part (copy on write). Neither block is free until then.
struct KVCacheBlockCopy {
  BlockId from{};
  BlockId to{};
  bool operator==(const KVCacheBlockCopy&) const = default;
};

// One request of a step. `computed` counts the tokens whose cache existed before the step. The step
// computes tokens [computed, computed + num_tokens), the last `num_spec` of them unverified drafts.
// Example: a decode with three drafts has num_tokens 4 and num_spec 3.
struct ScheduledRequest {
  RequestId id{};
  std::int32_t num_tokens = 0;
  std::int32_t computed = 0;
  std::int32_t num_spec = 0;
  bool is_new = false;      // from the waiting queue: the step reports its whole block table
  bool is_resumed = false;  // also new: preempted before, the worker replaces its table
  // Block ids for the worker, per group: all of the request's blocks if it is new or resumed,
  // otherwise those that this step added. SchedulerOutput::blocks() reads them.
  std::uint32_t first_block = 0;  // index into SchedulerOutput::block_ends
  // With cross attention groups: items that the encoder computes in this step, and their rows.
  std::int32_t num_encoded = 0;
  std::int32_t num_encoder_rows = 0;
};

// One decision of the scheduler, which owns it and overwrites it in the next schedule(). A caller
// that keeps a decision for longer copies it.
struct SchedulerOutput {
  std::int64_t step = 0;
  std::int32_t num_groups = 0;
  std::vector<ScheduledRequest> scheduled;  // in the engine's order
  std::vector<std::uint32_t>
      block_ends;                  // per scheduled request and group, end offset in block_ids
  std::vector<BlockId> block_ids;  // of all scheduled requests: request by request, group by group
  std::vector<std::int32_t> spec_tokens;  // drafts to verify, num_spec per request; -1: none yet
  std::vector<RequestId> preempted;       // in order of preemption
  std::vector<RequestId> replaced;        // of those, running: only their tables are sent again
  std::vector<RequestId> finished;        // since the previous step, in order
  std::vector<std::int32_t> common_prefix_blocks;  // per group
  std::vector<BlockId> zero;             // blocks that the worker zeroes before use, in order
  std::vector<KVCacheBlockCopy> copies;  // before the step, in order
  bool loads_within = false;             // true if a connector loads within the step
  // With cross attention groups: numbers of the items to encode, request by request; identifiers
  // whose rows the worker drops before the step; rows that the engine counts as free after it.
  std::vector<std::int32_t> encode;
  std::vector<std::string> free_encoder;
  std::optional<std::int32_t> encoder_slots;
  std::int64_t total_num_scheduled_tokens = 0;
  HostPageCommand host_pages{};

  // Block ids that the step reports for scheduled request `i` and group `g`; empty: no new block.
  std::span<const BlockId> blocks(std::size_t i, std::int32_t g) const {
    const std::uint32_t at = scheduled[i].first_block + static_cast<std::uint32_t>(g);
    const std::uint32_t begin = at == 0 ? 0 : block_ends[at - 1];
    return {block_ids.data() + begin, block_ends[at] - begin};
  }
};

// The model's output of one step, rows in the order of SchedulerOutput::scheduled.
struct ModelOutput {
  std::vector<std::int32_t> tokens;         // sampled tokens of all rows, back to back
  std::vector<std::uint32_t> token_ends;    // per row, end offset in `tokens`; a row may be empty
  std::vector<std::int32_t> draft_tokens;   // drafts for the next step, back to back
  std::vector<std::uint32_t> draft_ends;    // per row; empty vector: no drafts in this step
  KVConnectorOutput kv_connector_output{};  // reports of a connector's workers
};

// A request that the last output ended.
struct StoppedRequest {
  RequestId id{};
  FinishReason reason{};
};

// Output of a live request that was preempted after its step had been decided.
struct StaleOutput {
  RequestId id{};
  std::int32_t num_taken = 0;  // tokens of it that the request kept
};

// Description of an engine that failed in the middle of a run.
struct EngineFailure {
  // "exception", "crash", "hang", "reply": docs/protocols.md. "check": a check inside the model.
  // "harness": an exception in Lockstep's own code in the engine's process, which is not the
  // engine's fault.
  std::string kind;
  std::string what;        // error message, one line
  std::string trace = {};  // output of the failing code; may be empty

  bool is_harness() const { return kind == "harness"; }
};

// Events of the pool and the prefix cache since the counters were last taken.
struct CacheCounters {
  std::int64_t stored = 0;   // block hashes added
  std::int64_t evicted = 0;  // block hashes removed: block reused, withdrawn or promoted
  std::int64_t refused = 0;  // allocations that only the limit on the pool refused
  // True if the prefix cache was reset.
  bool cleared = false;
};

}  // namespace lockstep
