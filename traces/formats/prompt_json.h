// Prompts in files, and the keys of requests that few set. Everywhere: seeded segments
// [[seed,n],...] or {"tokens":[..]}. In request traces also hash-id runs, a bare length, and runs
// of any kind; docs/formats.md, "Prompts".
#pragma once

#include <cstdint>
#include <optional>

#include "base/json_reader.h"
#include "base/json_writer.h"
#include "traces/formats/request_trace.h"

namespace lockstep {

inline constexpr std::int64_t kPromptTokensMax = (std::int64_t{1} << 31) - 1;
inline constexpr std::int64_t kTokenIdMax = (std::int64_t{1} << 31) - 1;
inline constexpr std::int64_t kHashIdMax = (std::int64_t{1} << 62) - 1;

// [[seed,n],...] or [[seed,first,n],...]; at least one token.
Prompt read_seeded_segments(JsonValue value);
// Requires: every run is seeded.
void write_seeded_segments(JsonWriter& out, const Prompt& prompt);

// As recordings have them: seeded segments, or {"tokens":[..]} as an engine that serves gets them.
Prompt read_recorded_prompt(JsonValue value);
// Seeded runs stay runs; with others among them all is tokens, as an engine gets them.
void write_recorded_prompt(JsonWriter& out, const Prompt& prompt);

// Tokens given one by one, each from 0 (or `min`) to kTokenIdMax.
std::vector<std::int32_t> read_token_ids(JsonValue value, std::int64_t min = 0);

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

// `min_tokens`, `repetition_detection`, `skip_reading_prefix_cache`: each left out when default.
void read_rare_request_keys(JsonObject& object, RequestSpec& request);
void write_rare_request_keys(JsonWriter& out, const RequestSpec& request);

// A prompt of `length` tokens that no other request shares.
Prompt private_prompt(std::int64_t length, std::uint64_t ordinal);

}  // namespace lockstep
