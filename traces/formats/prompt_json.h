// Prompts in files, and the keys of requests that few set. Everywhere: segments, seeded [seed,n] or
// of one token {"token":t,"n":n}, or {"tokens":[..]}. In request traces also hash-id runs, a bare
// length, and runs of any kind; docs/formats.md, "Prompts".
#pragma once

#include <cstdint>
#include <optional>

#include "base/json_fields.h"
#include "traces/formats/request_trace.h"

namespace lockstep {

inline constexpr std::int64_t kPromptTokensMax = (std::int64_t{1} << 31) - 1;
inline constexpr std::int64_t kTokenIdMax = (std::int64_t{1} << 31) - 1;
inline constexpr std::int64_t kHashIdMax = (std::int64_t{1} << 62) - 1;

// In the place of tokens that are given as embeddings.
inline constexpr std::int32_t kEmbeddedToken = 50004;

// Each [seed,n], [seed,first,n] or {"token":t,"n":n}; at least one token.
Prompt read_segments(JsonValue value);
// Requires: every run is seeded or repeated.
void write_segments(JsonWriter& out, const Prompt& prompt);

// As recordings have them: segments, or {"tokens":[..]} as an engine that serves gets them.
Prompt read_recorded_prompt(JsonValue value);
// Such runs stay runs; with others among them all is tokens, as an engine gets them.
void write_recorded_prompt(JsonWriter& out, const Prompt& prompt);

// The prompt of a request, with kEmbeddedToken where embeddings stand.
void write_prompt_of(JsonWriter& out, const RequestSpec& request);

// Tokens given one by one, each from 0 (or `min`) to kTokenIdMax.
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

// The prompt of request number `ordinal` of a trace with the convention `ids`.
Prompt read_prompt(JsonValue value, const std::optional<HashIdConvention>& ids,
                   std::uint64_t ordinal);
void write_prompt(JsonWriter& out, const Prompt& prompt, const std::optional<HashIdConvention>& ids,
                  std::uint64_t ordinal);

// The prompt of `length` tokens that hash ids cover, each once; nothing when their number is not
// what the convention asks for. A tail without an id is private to request `ordinal`.
std::optional<Prompt> prompt_of_hash_ids(const std::vector<std::uint64_t>& hash_ids,
                                         std::int64_t length, const HashIdConvention& ids,
                                         std::uint64_t ordinal);
std::int64_t hash_ids_for(std::int64_t length, const HashIdConvention& ids);

// A request without "prompt" is one of embeddings alone: true, and its prompt is zeros.
bool read_embeds_alone(JsonObject& object, RequestSpec& request);
struct KeysForm {
  bool has_items_beside = false;  // of the prompt: a decoder reads them by cross-attention
  // The engine has token 0 at the positions of embeddings (vllm/v1/request.py, since 0.29.0).
  bool zeroes_embedded = false;
};
// `lora`, `mm`, `embeds`, `min_tokens`, `repetition_detection`, `skip_reading_prefix_cache`: each
// left out when default.
// REQUIRES: the prompt has been read.
void read_rare_request_keys(JsonObject& object, RequestSpec& request, KeysForm form = {});
// `mm`. A negative prompt size: the items are not part of the prompt.
std::vector<PromptItem> read_prompt_items(JsonValue value, std::int64_t prompt_size);
void write_prompt_items(JsonWriter& out, const std::vector<PromptItem>& items);
void write_rare_request_keys(JsonWriter& out, const RequestSpec& request);

// A prompt of `length` tokens that no other request shares.
Prompt private_prompt(std::int64_t length, std::uint64_t ordinal);

}  // namespace lockstep
