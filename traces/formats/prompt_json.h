// Prompts in files, and request keys that few requests set. All files have segments, seeded
// [seed,n] or of one token {"token":t,"n":n}, or {"tokens":[..]}. Request traces also have runs of
// hash ids, a bare length, and runs of any kind; docs/formats.md, "Prompts".
//
// A prompt stays a list of runs in memory: 100,000 tokens of one seed are one run. Functions that
// need token ids materialize them.
#pragma once

#include <cstdint>
#include <optional>

#include "base/json_fields.h"
#include "traces/formats/request_trace.h"

namespace lockstep {

// Limits of files. Hash ids stay below 2^62, so that private seeds (private_seed()) never collide
// with them.
inline constexpr std::int64_t kPromptTokensMax = (std::int64_t{1} << 31) - 1;
inline constexpr std::int64_t kTokenIdMax = (std::int64_t{1} << 31) - 1;
inline constexpr std::int64_t kHashIdMax = (std::int64_t{1} << 62) - 1;

// The token at positions of a prompt that are given as embeddings. Seeded tokens are below 50,000,
// so no segment contains it by chance.
inline constexpr std::int32_t kEmbeddedToken = 50004;

// Reads [seed,n], [seed,first,n] or {"token":t,"n":n} elements; at least one token.
Prompt read_segments(JsonValue value);
// REQUIRES: every run is seeded or repeated.
void write_segments(JsonWriter& out, const Prompt& prompt);
// Appends `tokens` as they are.
void append_tokens(Prompt& prompt, const std::vector<std::int32_t>& tokens);

// Reads a prompt of a recording: segments, or {"tokens":[..]} as a serving engine receives it.
Prompt read_recorded_prompt(JsonValue value);
// Writes runs as segments where all of them can be; otherwise every token, as an engine receives
// them. A symbolic run loses its identity then, which recordings do not have.
void write_recorded_prompt(JsonWriter& out, const Prompt& prompt);

// Writes the request's prompt with kEmbeddedToken at the positions of embeddings, whatever token
// the release stores there.
void write_prompt_of(JsonWriter& out, const RequestSpec& request);

// Reads a list of token ids, each from `min` to kTokenIdMax. `min` is -1 for drafts, whose
// placeholder is -1.
std::vector<std::int32_t> read_token_ids(JsonValue value, std::int64_t min = 0);
// The same as a form.
struct TokenIds {
  std::int64_t min = 0;
  void read(JsonValue value, std::vector<std::int32_t>& tokens) const {
    tokens = read_token_ids(value, min);
  }
  static void write(JsonWriter& out, const std::vector<std::int32_t>& tokens) {
    out.integers(tokens);
  }
};

// Reads any form of prompt, for request number `ordinal` of a trace with the convention `ids`.
// Without a convention, hash ids are refused.
Prompt read_prompt(JsonValue value, const std::optional<HashIdConvention>& ids,
                   std::uint64_t ordinal);
// Writes the shortest form that reads back as an equal prompt.
void write_prompt(JsonWriter& out, const Prompt& prompt, const std::optional<HashIdConvention>& ids,
                  std::uint64_t ordinal);

// Returns the prompt of `length` tokens that hash ids cover, one symbolic run per id; nullopt: the
// number of ids is not hash_ids_for(). A tail without an id (IdTail::floor) is private to request
// `ordinal`. block_tokens 512, 1,300 tokens: runs of 512, 512 and 276 with `ceil` and 3 ids; with
// `floor` the ids are 2 and the last run is private.
std::optional<Prompt> prompt_of_hash_ids(const std::vector<std::uint64_t>& hash_ids,
                                         std::int64_t length, const HashIdConvention& ids,
                                         std::uint64_t ordinal);
// Returns the number of ids that a prompt of `length` tokens must have.
std::int64_t hash_ids_for(std::int64_t length, const HashIdConvention& ids);

// Reads `embeds` of a request without `prompt`: true, and its prompt becomes zeros, one per row.
// False: the request has a prompt, and nothing was read.
bool read_embeds_alone(JsonObject& object, RequestSpec& request);
struct KeysForm {
  // True if multimodal items are not part of the prompt: a decoder reads them by cross attention.
  bool has_items_beside = false;
  // True if the engine stores token 0 at the positions of embeddings (vllm/v1/request.py, since
  // 0.29.0). Block hashes cover those tokens.
  bool zeroes_embedded = false;
};
// Reads `lora`, `mm`, `embeds`, `min_tokens`, `repetition_detection` and
// `skip_reading_prefix_cache`, each omitted when default. REQUIRES: the prompt has been read.
void read_rare_request_keys(JsonObject& object, RequestSpec& request, KeysForm form = {});
// Reads `mm`: items in order, inside the prompt, without overlap. A negative prompt size: the items
// are not part of the prompt, and each starts at 0.
std::vector<PromptItem> read_prompt_items(JsonValue value, std::int64_t prompt_size);
void write_prompt_items(JsonWriter& out, const std::vector<PromptItem>& items);
void write_rare_request_keys(JsonWriter& out, const RequestSpec& request);

// Returns a prompt of `length` tokens that no other request shares.
Prompt private_prompt(std::int64_t length, std::uint64_t ordinal);

}  // namespace lockstep
