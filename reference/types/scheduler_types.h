// What goes into the scheduler and what comes out of it, step by step. Plain types.
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

// Ends a request whose output repeats itself at its end: `min_count` times the same tokens, of
// min_pattern_size (0: 1) to max_pattern_size of them (0: no such end). vLLM's
// RepetitionDetectionParams.
struct RepetitionDetection {
  std::int32_t max_pattern_size = 0;
  std::int32_t min_pattern_size = 0;
  std::int32_t min_count = 0;
  bool operator==(const RepetitionDetection&) const = default;
};

// Which requests a scheduler schedules: all; no new ones; none. vLLM's PauseState.
enum class PauseState : std::uint8_t { unpaused, paused_new, paused_all };

// Tokens [first, first + count).
struct TokenSpan {
  std::int32_t first = 0;
  std::int32_t count = 0;
  bool operator==(const TokenSpan&) const = default;
};

// Tokens [first, first + count) of a prompt that represent an image or a clip. With a
// cross-attention decoder it is not part of the prompt, and `first` is 0.
struct PromptItem {
  std::string identifier;  // equal content, equal identifier
  std::int32_t first = 0;
  std::int32_t count = 0;
  std::string kind = {};               // "image", "audio"; decides nothing
  std::vector<TokenSpan> embeds = {};  // its tokens that get a row of the encoder; empty: all
  // Rows of the encoder.
  std::int32_t num_rows() const {
    std::int32_t rows = 0;
    for (const TokenSpan& span : embeds) rows += std::min(span.count, count - span.first);
    return embeds.empty() ? count : rows;
  }
  bool operator==(const PromptItem&) const = default;
};

// Of LoRA. Two of one name and another path are two.
struct Adapter {
  std::string name = {};  // empty: none
  std::int64_t id = 0;
  std::string path = {};  // where its weights lie
  bool operator==(const Adapter&) const = default;
};

// Embeddings in place of tokens, one row each: seeded rows, or the digests of an engine's own.
struct PromptEmbeds {
  std::int32_t width = 0;        // of a row
  std::vector<TokenRun> rows{};  // seeded, in order
  // Where the rows stand, in order; the rows between them are zeros.
  std::vector<TokenSpan> places{};
  // ... or of the whole prompt: one to `digest_tokens` tokens, and one of what is left behind.
  std::vector<std::string> digests{};  // hexadecimal
  std::int32_t digest_tokens = 0;
  bool are_alone = false;  // the request has no tokens; in their places are zeros
  bool empty() const { return rows.empty() && digests.empty(); }
  // The row at a position of the prompt; -1: none, read as zeros.
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

// What block hashes cover in addition to tokens and the cache salt (generate_block_hash_extra_keys
// in vllm/v1/core/kv_cache_utils.py): requests share blocks only if these are equal. Items are in
// the order of their positions and do not overlap.
struct RequestKeys {
  Adapter lora = {};
  std::vector<PromptItem> mm = {};
  PromptEmbeds embeds = {};
  bool empty() const { return lora.name.empty() && mm.empty() && embeds.empty(); }
  bool operator==(const RequestKeys&) const = default;
};

// One request as it reaches the engine.
struct RequestSpec {
  std::string name;  // unique among live requests; ties of the priority queue are broken by it
  Prompt prompt;
  std::int32_t max_tokens = 16;
  std::int64_t arrival_ns = 0;
  std::int32_t priority = 0;  // smaller runs first; policy `priority` only
  std::optional<std::int32_t> eos_token = std::nullopt;  // a sampled token that ends the request
  std::vector<std::int32_t> stop_token_ids = {};         // further ones
  std::string cache_salt = {};                           // empty: none
  RequestKeys keys = {};
  std::int32_t min_tokens = 0;  // minimum of sampled tokens before it may end
  RepetitionDetection repetition_detection{};
  bool skip_reading_prefix_cache = false;
  bool operator==(const RequestSpec&) const = default;
};

enum class RequestStatus : std::uint8_t {
  waiting,
  waiting_for_remote_kvs,  // holds the blocks that a connector loads
  running,
  preempted,
  finished,
};

enum class FinishReason : std::uint8_t { stop, length, abort, error, repetition };

// A request of the queue ahead of waiting requests: its load is in flight, or the connector's
// answer was pending, or it was passed over and precedes new arrivals. Where a release keeps
// requests with blocks apart, the queue has no others.
struct SkippedRequest {
  RequestId id{};
  RequestStatus status{};
  bool is_loading = false;  // waits for a load that has not been reported complete
};

// A finished request that keeps its blocks: a send or a load into them is in flight.
struct HeldRequest {
  RequestId id{};
  bool is_loading = false;
};

// The worker copies the state of one block into another before the step.
struct KVCacheBlockCopy {
  BlockId from{};
  BlockId to{};
  bool operator==(const KVCacheBlockCopy&) const = default;
};

// One request of a step. `computed` counts the tokens whose cache existed before the step; the step
// computes `num_tokens` more, the last `num_spec` of them unverified drafts.
struct ScheduledRequest {
  RequestId id{};
  std::int32_t num_tokens = 0;
  std::int32_t computed = 0;
  std::int32_t num_spec = 0;
  bool is_new = false;      // from the waiting queue: all its blocks are handed over
  bool is_resumed = false;  // new, and back after a preemption: its block table is replaced
  // Block ids handed to the worker: blocks[new_blocks_begin(g) .. ) of the output, per group; all
  // of the request's blocks when new or resumed, the newly added ones otherwise.
  std::uint32_t first_block = 0;  // index into SchedulerOutput::block_ends
  // Items of the request that its encoder computes for this step, and their rows: with groups of
  // cross attention.
  std::int32_t num_encoded = 0;
  std::int32_t num_encoder_rows = 0;
};

// One decision of the scheduler. Owned by it and overwritten by the next call of schedule().
struct SchedulerOutput {
  std::int64_t step = 0;
  std::int32_t num_groups = 0;
  std::vector<ScheduledRequest> scheduled;  // in the engine's order
  std::vector<std::uint32_t>
      block_ends;                  // per scheduled request and group, end offset in block_ids
  std::vector<BlockId> block_ids;  // all handed blocks, request by request, group by group
  std::vector<std::int32_t> spec_tokens;  // drafts to verify, request by request (num_spec each)
  std::vector<RequestId> preempted;       // in order of preemption
  std::vector<RequestId> finished;        // since the previous step
  std::vector<std::int32_t> common_prefix_blocks;  // per group
  std::vector<BlockId> zero;             // blocks that the worker zeroes before use, in order
  std::vector<KVCacheBlockCopy> copies;  // before the step, in order
  bool loads_within = false;             // a connector loads within the step
  // With groups of cross attention: items to encode, by number, request by request; items whose
  // rows the worker drops before the step; rows that the engine counts as free, after the step.
  std::vector<std::int32_t> encode;
  std::vector<std::string> free_encoder;
  std::optional<std::int32_t> encoder_slots;
  std::int64_t total_num_scheduled_tokens = 0;
  HostPageCommand host_pages{};

  // Blocks handed to scheduled request `i` for group `g`.
  std::span<const BlockId> blocks(std::size_t i, std::int32_t g) const {
    const std::uint32_t at = scheduled[i].first_block + static_cast<std::uint32_t>(g);
    const std::uint32_t begin = at == 0 ? 0 : block_ends[at - 1];
    return {block_ids.data() + begin, block_ends[at] - begin};
  }
};

// What the model returned for a step: rows in the order of SchedulerOutput::scheduled.
struct ModelOutput {
  std::vector<std::int32_t> tokens;         // sampled tokens of all rows, one after the other
  std::vector<std::uint32_t> token_ends;    // per row, end offset in `tokens`; a row may be empty
  std::vector<std::int32_t> draft_tokens;   // drafts proposed for the next step, likewise
  std::vector<std::uint32_t> draft_ends;    // empty: no drafts at all
  KVConnectorOutput kv_connector_output{};  // what a connector's workers report with it
};

struct StoppedRequest {
  RequestId id{};
  FinishReason reason{};
};

// Output of a live request that was preempted after its step had been decided.
struct StaleOutput {
  RequestId id{};
  std::int32_t num_taken = 0;  // tokens of it that the request was given
};

// How an engine ended in the middle of a run.
struct EngineFailure {
  // "exception", "crash", "hang", "reply": docs/protocols.md. "check": a check inside the model.
  // "harness": Lockstep's own code in the engine's process raised; the engine is not judged.
  std::string kind;
  std::string what;        // one line
  std::string trace = {};  // output of the code that raised; may be empty

  bool is_harness() const { return kind == "harness"; }
};

// What happened to the pool and the prefix cache since the counters were last taken.
struct CacheCounters {
  std::int64_t stored = 0;   // block hashes added
  std::int64_t evicted = 0;  // block hashes removed, by reuse of their block
  std::int64_t refused = 0;  // requests for blocks that a limit on the pool alone refused
  bool cleared = false;
};

}  // namespace lockstep
