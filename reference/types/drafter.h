// How a drafter with a cache of its own runs behind the model's layers: plain words for the model
// and for backends, rule (24) of sim/protocol/backend.h.
//
// Of a request's step, L is the last position that stands: the tokens behind it were drafts and
// have been rejected. The token at L + 1 was just sampled, or is the next one of the prompt.
#pragma once

#include <cstdint>

namespace lockstep {

// What a drafter's row at position p is made of.
enum class DraftShape : std::uint8_t {
  none,        // there is no drafter, or its rows are not followed
  one_by_one,  // EAGLE, MTP of one module: tokens up to p + 1. A pass over the step's tokens, then
               // one for each further draft, at L + 1, L + 2 and so on
  standalone,  // a draft model: tokens up to p. The same passes, each a position further
  modules,     // MTP of several modules: of module m tokens up to p + 1 + m. A pass of each module
               // over the step's tokens, and over those before whose rows rejected drafts went into
};

// vLLM's model runner that runs the draft model: V1 (vllm/v1/spec_decode/llm_base_proposer.py) or
// V2 (vllm/v1/worker/gpu/spec_decode). They differ after chunks of a prompt, after rejected drafts
// and near max_model_len.
enum class DraftRunner : std::uint8_t { unknown, first, second };

struct DrafterConfig {
  DraftShape shape = DraftShape::none;
  DraftRunner runner = DraftRunner::unknown;
  std::int32_t num_drafts = 0;     // that it proposes in a step, and runs as many passes for
  std::int32_t max_model_len = 0;  // tokens: drafts behind it take the last one's place
  bool operator==(const DrafterConfig&) const = default;
};

}  // namespace lockstep
