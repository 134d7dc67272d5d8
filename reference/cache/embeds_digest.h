// What a block hash covers of a prompt that is given as embeddings: the SHA-256 of their bytes
// (_gen_prompt_embeds_extra_hash_keys in vllm/v1/core/kv_cache_utils.py).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "reference/types/scheduler_types.h"

namespace lockstep {

std::vector<std::uint8_t> sha256(std::span<const std::uint8_t> bytes);

// Row `row` of the embeddings, float32: [width]. Seeded; column j of row i of a run is
// (splitmix64(seed * 2^32 + i * width + j) mod 65536 - 32768) / 256.
// REQUIRES: seeded rows, 0 <= row < as many as there are.
std::vector<float> embedding_row(const PromptEmbeds& embeds, std::int64_t row);

// The digest of the embeddings of tokens [first, first + count) of a prompt of `prompt_size`
// tokens. Positions past the prompt contribute nothing. Returns an engine's own digest where one
// covers exactly these tokens; otherwise hashes its digests together.
std::vector<std::uint8_t> embeds_digest(const PromptEmbeds& embeds, std::int64_t prompt_size,
                                        std::int64_t first, std::int64_t count);

}  // namespace lockstep
