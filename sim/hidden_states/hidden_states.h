// The hidden states of a request that has ended, as a trainer gets them, and their file.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "reference/memory/content.h"
#include "reference/memory/memory_model.h"
#include "reference/types/kv_cache_spec.h"
#include "sim/protocol/backend.h"
#include "sim/step/worker.h"
#include "sim/verdict/checked.h"

namespace lockstep {

// Of one layer.
struct HiddenStateRows {
  std::string layer;  // its name in the plan
  DType dtype = DType::bf16;
  std::int64_t num_heads = 0;
  std::int64_t row_size_bytes = 0;  // of a head
  std::vector<std::uint8_t> bytes;  // [num_tokens, num_heads, row]
};

struct HiddenStates {
  std::string request;
  std::vector<ContentId> contents;  // one for each token
  std::vector<HiddenStateRows> layers;
};

// A safetensors file: a tensor [num_tokens, num_heads, hidden_size] for each layer, under its name,
// and `content_ids`, [num_tokens].
std::vector<std::uint8_t> hidden_state_file(const HiddenStates& states);

// Names of files: that of the request with everything but letters, digits, '.', '_' and '-' as
// %XX, and a number behind it where another request of that name was before.
class HiddenStateFileNames {
 public:
  std::string next(std::string_view request);

 private:
  std::set<std::string> used_;
};

// The hidden states of finished requests, read completely from the cache and compared with what the
// model expects for their tokens. Training data for draft models is taken from an engine this way
// (vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py).
//
// Invariants
// (1) For every request that ends by its own output: all computed tokens, once, in order, from 0 to
//     the token before the last sampled one.
// (2) They are read after the step that ends the request, when its blocks are free and not yet
//     reallocated.
//
// Not here: aborted requests, whose hidden states are not extracted; files (watched_files.h).

class HiddenStateExtraction {
 public:
  HiddenStateExtraction(const MemoryModel& model, Worker& worker);

  void begin(std::int64_t step);
  void add(RequestId id);
  const StepProgram& program() const { return program_; }
  // Of the program's readback.
  Checked compare(const StepReadback& readback);
  // What was read, request by request. REQUIRES: it has compared equal.
  std::vector<HiddenStates> states(const StepReadback& readback);

  std::int64_t rows_compared() const { return rows_compared_; }
  // Requests whose end came with the output of a step before the one that preempted them.
  std::int64_t requests_without_a_row() const { return requests_without_a_row_; }

 private:
  Divergence difference(const RowExtraction& extraction, RequestId id, std::int64_t token,
                        std::span<const std::uint8_t> expected,
                        std::span<const std::uint8_t> found_row) const;

  const MemoryModel& model_;
  Worker& worker_;
  std::vector<std::int32_t> layers_;  // of hidden states
  StepProgram program_;
  std::vector<RequestId> requests_;  // of the program's extractions
  std::int64_t rows_compared_ = 0;
  std::int64_t requests_without_a_row_ = 0;
};

}  // namespace lockstep
