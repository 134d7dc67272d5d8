#include "traces/formats/prompt_json.h"

#include <fmt/format.h>

#include <algorithm>

namespace lockstep {
namespace {

constexpr std::int64_t kSeedMax = (std::int64_t{1} << 32) - 1;  // a seed has 32 bits
constexpr std::int64_t kHashIdsMax = std::int64_t{1} << 22;     // of one prompt

bool all_of_kind(const Prompt& prompt, TokenRun::Kind kind) {
  return std::all_of(prompt.runs.begin(), prompt.runs.end(),
                     [kind](const TokenRun& run) { return run.kind == kind; });
}

TokenRun symbolic_run(std::uint64_t seed, std::int64_t count) {
  return {.kind = TokenRun::Kind::symbolic,
          .seed = seed,
          .first = 0,
          .count = static_cast<std::uint32_t>(count)};
}

void append_tokens(Prompt& prompt, const std::vector<std::int32_t>& tokens) {
  prompt.append({.kind = TokenRun::Kind::literal,
                 .seed = 0,
                 .first = static_cast<std::uint32_t>(prompt.tokens.size()),
                 .count = static_cast<std::uint32_t>(tokens.size())});
  prompt.tokens.insert(prompt.tokens.end(), tokens.begin(), tokens.end());
}

// Checks what holds for every prompt: it has tokens, and not too many.
void check_size(JsonValue value, const Prompt& prompt) {
  const std::int64_t size = prompt.size();
  if (size == 0) value.refuse("a prompt of at least one token");
  if (size > kPromptTokensMax) {
    value.refuse_because(
        fmt::format("found a prompt of {} tokens; expected at most {}", size, kPromptTokensMax));
  }
}

Prompt read_hash_ids(JsonObject& object, JsonValue runs, const std::optional<HashIdConvention>& ids,
                     std::uint64_t ordinal) {
  const auto length = object.required("length").integer(1, kPromptTokensMax);
  if (!ids) {
    runs.refuse_because("found hash ids; expected none, since the header has no \"ids\"");
    return {};
  }
  const std::int64_t expected = hash_ids_for(length, *ids);
  if (expected > kHashIdsMax) {
    runs.refuse_because(
        fmt::format("found a prompt of {} hash ids; expected at most {}", expected, kHashIdsMax));
    return {};
  }
  std::vector<std::uint64_t> hash_ids;
  for (JsonValue element : runs.array()) {
    const JsonArray run = element.array();
    if (run.size() != 2) element.refuse("[first id, count]");
    if (run.size() != 2) break;
    std::uint64_t first = run[0].integer(0, kHashIdMax);
    const auto count = run[1].integer(1, kPromptTokensMax);
    // More ids than the prompt can have: no need to make room for them.
    if (static_cast<std::int64_t>(hash_ids.size()) + count > expected) {
      hash_ids.resize(static_cast<std::size_t>(expected) + 1);
      break;
    }
    for (std::int64_t i = 0; i < count; ++i) hash_ids.push_back(first++);
  }
  auto prompt = prompt_of_hash_ids(hash_ids, length, *ids, ordinal);
  if (!prompt) {
    runs.refuse_because(
        fmt::format("found {}{} ids for {} tokens; expected {} (blocks of {}, tail {})",
                    static_cast<std::int64_t>(hash_ids.size()) > expected ? "more than " : "",
                    std::min<std::int64_t>(hash_ids.size(), expected), length, expected,
                    ids->block_tokens, ids->tail == IdTail::ceil ? "ceil" : "floor"));
  }
  return prompt.value_or(Prompt{});
}

// ["seeded"|"symbolic",seed,first,count] or ["tokens",[..]]
void read_run(JsonValue element, Prompt& prompt) {
  const JsonArray run = element.array();
  const bool is_tokens = run.size() == 2 && run[0].is_string() && run[0].string() == "tokens";
  if (is_tokens) return append_tokens(prompt, read_token_ids(run[1]));
  if (run.size() != 4) {
    return element.refuse("[\"seeded\" or \"symbolic\", seed, first, count] or [\"tokens\", [..]]");
  }
  constexpr JsonWord<TokenRun::Kind> kKinds[] = {{"seeded", TokenRun::Kind::seeded},
                                                 {"symbolic", TokenRun::Kind::symbolic}};
  TokenRun read;
  read.kind = run[0].word<TokenRun::Kind>(kKinds);
  read.seed = read.kind == TokenRun::Kind::seeded ? run[1].integer(0, kSeedMax) : run[1].uint64();
  read.first = run[2].integer<std::uint32_t>(0, kPromptTokensMax);
  read.count = run[3].integer<std::uint32_t>(1, kPromptTokensMax - read.first);
  prompt.append(read);
}

// Whether the prompt is what prompt_of_hash_ids() would make of its seeds.
std::optional<std::vector<std::uint64_t>> hash_ids_of(const Prompt& prompt,
                                                      const HashIdConvention& ids,
                                                      std::uint64_t ordinal) {
  const auto expected = static_cast<std::size_t>(hash_ids_for(prompt.size(), ids));
  if (prompt.runs.size() < expected) return std::nullopt;
  std::vector<std::uint64_t> hash_ids;
  for (std::size_t i = 0; i < expected; ++i) hash_ids.push_back(prompt.runs[i].seed);
  for (const std::uint64_t id : hash_ids) {
    if (id > kHashIdMax) return std::nullopt;
  }
  const auto made = prompt_of_hash_ids(hash_ids, prompt.size(), ids, ordinal);
  return made && *made == prompt ? std::optional(hash_ids) : std::nullopt;
}

void write_hash_ids(JsonWriter& out, const std::vector<std::uint64_t>& hash_ids,
                    std::int64_t length) {
  out.begin_object().key("ids").begin_array();
  for (std::size_t i = 0; i < hash_ids.size();) {
    std::size_t end = i + 1;
    while (end < hash_ids.size() && hash_ids[end] == hash_ids[end - 1] + 1) ++end;
    out.begin_array().uint64(hash_ids[i]).integer(static_cast<std::int64_t>(end - i)).end_array();
    i = end;
  }
  out.end_array().integer("length", length).end_object();
}

void write_runs(JsonWriter& out, const Prompt& prompt) {
  out.begin_object().key("runs").begin_array();
  for (const TokenRun& run : prompt.runs) {
    out.begin_array();
    if (run.kind == TokenRun::Kind::literal) {
      const auto first = prompt.tokens.begin() + run.first;
      out.string("tokens").integers(std::vector<std::int32_t>(first, first + run.count));
    } else {
      out.string(run.kind == TokenRun::Kind::seeded ? "seeded" : "symbolic");
      out.uint64(run.seed).integer(run.first).integer(run.count);
    }
    out.end_array();
  }
  out.end_array().end_object();
}

RepetitionDetection read_repetition_detection(JsonValue value) {
  JsonObject object = value.object();
  RepetitionDetection detection;
  const auto read = [&](const char* key, std::int32_t& field) {
    if (auto tokens = object.optional(key))
      field = tokens.integer<std::int32_t>(0, kPromptTokensMax);
  };
  read("max_pattern_size", detection.max_pattern_size);
  read("min_pattern_size", detection.min_pattern_size);
  read("min_count", detection.min_count);
  object.finish();
  return detection;
}

}  // namespace

Prompt read_seeded_segments(JsonValue value) {
  Prompt prompt;
  for (JsonValue element : value.array()) {
    const JsonArray segment = element.array();
    if (segment.size() != 2 && segment.size() != 3) {
      element.refuse("[seed, n] or [seed, first, n]");
      break;
    }
    const auto seed = static_cast<std::uint64_t>(segment[0].integer(0, kSeedMax));
    const auto first =
        segment.size() == 3 ? segment[1].integer<std::uint32_t>(0, kPromptTokensMax) : 0;
    const auto count =
        segment[segment.size() - 1].integer<std::uint32_t>(1, kPromptTokensMax - first);
    prompt.append({.kind = TokenRun::Kind::seeded, .seed = seed, .first = first, .count = count});
  }
  check_size(value, prompt);
  return prompt;
}

void write_seeded_segments(JsonWriter& out, const Prompt& prompt) {
  LS_CHECK(all_of_kind(prompt, TokenRun::Kind::seeded), "a run of another kind");
  out.begin_array();
  for (const TokenRun& run : prompt.runs) {
    out.begin_array().uint64(run.seed);
    if (run.first != 0) out.integer(run.first);
    out.integer(run.count).end_array();
  }
  out.end_array();
}

std::vector<std::int32_t> read_token_ids(JsonValue value, std::int64_t min) {
  std::vector<std::int32_t> tokens;
  const JsonArray array = value.array();
  tokens.reserve(array.size());
  for (JsonValue token : array) tokens.push_back(token.integer<std::int32_t>(min, kTokenIdMax));
  return tokens;
}

Prompt read_recorded_prompt(JsonValue value) {
  if (value.is_array()) return read_seeded_segments(value);
  if (!value.is_object()) {
    value.refuse("segments [[seed, n],...] or {\"tokens\": [...]}");
    return {};
  }
  JsonObject object = value.object();
  Prompt prompt;
  append_tokens(prompt, read_token_ids(object.required("tokens")));
  check_size(value, prompt);
  object.finish();
  return prompt;
}

void write_recorded_prompt(JsonWriter& out, const Prompt& prompt) {
  if (all_of_kind(prompt, TokenRun::Kind::seeded)) return write_seeded_segments(out, prompt);
  out.begin_object().key("tokens").integers(prompt.materialize()).end_object();
}

Prompt read_prompt(JsonValue value, const std::optional<HashIdConvention>& ids,
                   std::uint64_t ordinal) {
  if (value.is_array()) return read_seeded_segments(value);
  if (!value.is_object()) {
    value.refuse("segments [[seed, n],...] or an object with ids, tokens, length or runs");
    return {};
  }
  JsonObject object = value.object();
  Prompt prompt;
  if (auto runs = object.optional("ids")) {
    prompt = read_hash_ids(object, runs, ids, ordinal);
  } else if (auto tokens = object.optional("tokens")) {
    append_tokens(prompt, read_token_ids(tokens));
  } else if (auto length = object.optional("length")) {
    prompt = private_prompt(length.integer(1, kPromptTokensMax), ordinal);
  } else {
    for (JsonValue run : object.required("runs").array()) read_run(run, prompt);
  }
  check_size(value, prompt);
  object.finish();
  return prompt;
}

void write_prompt(JsonWriter& out, const Prompt& prompt, const std::optional<HashIdConvention>& ids,
                  std::uint64_t ordinal) {
  if (all_of_kind(prompt, TokenRun::Kind::seeded)) return write_seeded_segments(out, prompt);
  if (prompt.runs.size() == 1 && prompt.runs[0].kind == TokenRun::Kind::literal &&
      prompt.runs[0].first == 0 && prompt.runs[0].count == prompt.tokens.size()) {
    out.begin_object().key("tokens").integers(prompt.tokens).end_object();
    return;
  }
  if (prompt == private_prompt(prompt.size(), ordinal)) {
    out.begin_object().integer("length", prompt.size()).end_object();
    return;
  }
  if (ids) {
    if (const auto hash_ids = hash_ids_of(prompt, *ids, ordinal)) {
      return write_hash_ids(out, *hash_ids, prompt.size());
    }
  }
  write_runs(out, prompt);
}

std::int64_t hash_ids_for(std::int64_t length, const HashIdConvention& ids) {
  return ids.tail == IdTail::floor ? length / ids.block_tokens
                                   : (length + ids.block_tokens - 1) / ids.block_tokens;
}

std::optional<Prompt> prompt_of_hash_ids(const std::vector<std::uint64_t>& hash_ids,
                                         std::int64_t length, const HashIdConvention& ids,
                                         std::uint64_t ordinal) {
  if (static_cast<std::int64_t>(hash_ids.size()) != hash_ids_for(length, ids)) return std::nullopt;
  Prompt prompt;
  prompt.runs.reserve(hash_ids.size() + 1);
  std::int64_t left = length;
  for (const std::uint64_t id : hash_ids) {
    const std::int64_t count = std::min<std::int64_t>(left, ids.block_tokens);
    prompt.append(symbolic_run(id, count));
    left -= count;
  }
  if (left > 0) prompt.append(symbolic_run(private_seed(ordinal), left));
  return prompt;
}

Prompt private_prompt(std::int64_t length, std::uint64_t ordinal) {
  Prompt prompt;
  prompt.append(symbolic_run(private_seed(ordinal), length));
  return prompt;
}

// [[identifier, first, count], ...], in the order of their places.
static std::vector<PromptItem> read_prompt_items(JsonValue value, std::int64_t prompt_size,
                                                 bool are_digests) {
  std::vector<PromptItem> items;
  std::int64_t end = 0;
  for (JsonValue element : value.array()) {
    const JsonArray item = element.array();
    if (item.size() != 3) element.refuse("[identifier, first token, count]");
    if (item.size() != 3) break;
    const std::string identifier(item[0].nonempty_string());
    const bool is_digest = identifier.size() % 2 == 0 &&
                           identifier.find_first_not_of("0123456789abcdef") == std::string::npos;
    if (are_digests && !is_digest) JsonValue(item[0]).refuse("a digest, hexadecimal");
    const auto first = item[1].integer<std::int32_t>(end, std::max(end, prompt_size - 1));
    const auto count =
        item[2].integer<std::int32_t>(1, std::max<std::int64_t>(1, prompt_size - first));
    end = std::int64_t{first} + count;
    items.push_back({identifier, first, count});
  }
  if (items.empty()) value.refuse("at least one item, or no such key");
  return items;
}

static void write_prompt_items(JsonWriter& out, std::string_view key,
                               const std::vector<PromptItem>& items) {
  if (items.empty()) return;
  out.key(key).begin_array();
  for (const PromptItem& item : items)
    out.begin_array().string(item.identifier).integer(item.first).integer(item.count).end_array();
  out.end_array();
}

static void read_hash_keys(JsonObject& object, RequestSpec& request) {
  RequestKeys& keys = request.keys;
  if (auto lora = object.optional("lora")) keys.lora = lora.nonempty_string();
  if (auto path = object.optional("lora_path")) {
    keys.lora_path = path.nonempty_string();
    if (keys.lora.empty())
      path.refuse_because("found the path of an adapter; expected \"lora\" too");
  }
  const std::int64_t size = request.prompt.size();
  if (auto items = object.optional("multimodal"))
    keys.multimodal = read_prompt_items(items, size, false);
  if (auto items = object.optional("prompt_embeds"))
    keys.prompt_embeds = read_prompt_items(items, size, true);
}

void read_rare_request_keys(JsonObject& object, RequestSpec& request) {
  read_hash_keys(object, request);
  if (auto tokens = object.optional("min_tokens"))
    request.min_tokens = tokens.integer<std::int32_t>(0, kPromptTokensMax);
  if (auto detection = object.optional("repetition_detection"))
    request.repetition_detection = read_repetition_detection(detection);
  if (auto skips = object.optional("skip_reading_prefix_cache"))
    request.skip_reading_prefix_cache = skips.boolean();
}

void write_rare_request_keys(JsonWriter& out, const RequestSpec& request) {
  if (!request.keys.lora.empty()) out.string("lora", request.keys.lora);
  if (!request.keys.lora_path.empty()) out.string("lora_path", request.keys.lora_path);
  write_prompt_items(out, "multimodal", request.keys.multimodal);
  write_prompt_items(out, "prompt_embeds", request.keys.prompt_embeds);
  if (request.min_tokens != 0) out.integer("min_tokens", request.min_tokens);
  const RepetitionDetection& repetition = request.repetition_detection;
  if (repetition != RepetitionDetection{}) {
    out.key("repetition_detection").begin_object();
    out.integer("max_pattern_size", repetition.max_pattern_size);
    out.integer("min_pattern_size", repetition.min_pattern_size);
    out.integer("min_count", repetition.min_count).end_object();
  }
  if (request.skip_reading_prefix_cache) out.boolean("skip_reading_prefix_cache", true);
}

}  // namespace lockstep
