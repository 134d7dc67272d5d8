// Self-contained parts: changes of the prefix cache, encoder and grammar inputs of a step; a whole
// recording, and where it ends.
#include <fmt/format.h>

#include "reference/plan/limits.h"
#include "traces/formats/lines_json.h"
#include "traces/formats/prompt_json.h"
#include "traces/formats/spec_json.h"

namespace lockstep {

std::string read_name(JsonValue value) { return std::string(value.nonempty_string()); }

namespace {

std::optional<std::string> name_or_null(JsonValue value) {
  if (value.is_null()) return {};
  return read_name(value);
}

// null, or [key, ...]: a text, or [text, place].
std::vector<RecordedExtraKey> read_extra_keys(JsonValue value) {
  std::vector<RecordedExtraKey> keys;
  if (value.is_null()) return keys;
  for (JsonValue element : value.array()) {
    if (!element.is_array()) {
      keys.push_back({read_name(element)});
      continue;
    }
    const JsonArray pair = element.array();
    if (pair.size() != 2) element.refuse("a text, or [text, place]");
    if (pair.size() != 2) break;
    keys.push_back({read_name(pair[0]), pair[1].integer(-kTokensMax, kTokensMax)});
  }
  if (keys.empty()) value.refuse("at least one key, or null");
  return keys;
}

}  // namespace

RecordedCacheEvent read_cache_event(JsonValue value, const RecordingHeader& header) {
  using Kind = RecordedCacheEvent::Kind;
  constexpr JsonWord<Kind> kKinds[] = {{"BlockStored", Kind::stored},
                                       {"BlockRemoved", Kind::removed},
                                       {"AllBlocksCleared", Kind::cleared}};
  JsonObject object = value.object();
  RecordedCacheEvent event;
  event.kind = object.required("type").word<Kind>(kKinds);
  if (event.kind != Kind::cleared) {
    event.group =
        object.required("group_idx").integer<std::int32_t>(0, std::ssize(header.groups) - 1);
    event.block_hashes = read_names(object.required("block_hashes"));
    if (auto medium = object.optional("medium")) event.medium = read_name(medium);
  }
  if (event.kind == Kind::stored) {
    event.parent = name_or_null(object.required("parent_block_hash"));
    event.token_ids = read_token_ids(object.required("token_ids"));
    event.block_size = object.required("block_size").integer<std::int32_t>(1, kTokensMax);
    if (auto list = object.optional("extra_keys"))
      for (JsonValue keys : list.array()) event.extra_keys.push_back(read_extra_keys(keys));
    if (auto id = object.optional("lora_id")) event.lora_id = id.integer(0);
    const auto read_text = [&](std::string_view key, std::string& text) {
      if (auto value_of = object.optional(key)) text = value_of.nonempty_string();
    };
    read_text("lora_name", event.lora_name);
    read_text("session_id", event.session_id);
    read_text("kv_cache_spec_kind", event.kv_cache_spec_kind);
    if (auto window = object.optional("kv_cache_spec_sliding_window"))
      event.kv_cache_spec_sliding_window = window.integer<std::int32_t>(1, kTokensMax);
  }
  object.finish();
  return event;
}

std::vector<RecordedEncoderEntry> read_encoder_cache(JsonValue value) {
  std::vector<RecordedEncoderEntry> entries;
  for (auto& [id, holders] : value.object().entries())
    entries.push_back({std::string(id), read_names(holders)});
  return entries;
}

std::vector<RecordedGrammar> read_grammar(JsonValue value) {
  std::vector<RecordedGrammar> answers;
  for (JsonValue element : value.array()) {
    JsonObject object = element.object();
    RecordedGrammar answer;
    answer.id = read_name(object.required("id"));
    answer.asked = object.required("asked").integer<std::int32_t>(0, kTokensMax);
    answer.valid = object.required("valid").integer<std::int32_t>(0, answer.asked);
    object.finish();
    answers.push_back(std::move(answer));
  }
  return answers;
}

std::string cut_off_text(const RecordingEnd& end) {
  if (!end.is_cut_off) return {};
  if (end.steps == 0) return "cut off before its first step";
  return fmt::format("cut off after step {}", end.steps - 1);
}

Result<Recording> read_recording(const std::string& path) {
  auto reader = RecordingReader::open(path);
  if (!reader) return tl::unexpected(reader.error());
  Recording recording{.header = reader->header(), .steps = {}, .end = {}};
  while (true) {
    RecordedStep step;
    const auto more = reader->next(step);
    if (!more) return tl::unexpected(more.error());
    if (!*more) break;
    recording.steps.push_back(std::move(step));
  }
  recording.end = reader->end();
  return recording;
}

}  // namespace lockstep
