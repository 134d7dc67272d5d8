// Prompts and rare request keys as JSON. Reading produces runs, never a token per element, except
// for literal tokens; writing chooses the shortest form.
#include "traces/formats/prompt_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace lockstep {
namespace {

constexpr std::int64_t kSeedMax = (std::int64_t{1} << 32) - 1;  // a seed has 32 bits
constexpr std::int64_t kHashIdsMax = std::int64_t{1} << 22;     // of one prompt

// True if every run can be written as a segment.
bool are_segments(const Prompt& prompt) {
  return std::ranges::all_of(prompt.runs, [](const TokenRun& run) {
    return run.kind == TokenRun::Kind::seeded || run.kind == TokenRun::Kind::repeated;
  });
}

// Tokens whose identity is (seed, position) instead of their ids: content behind a hash id.
TokenRun symbolic_run(std::uint64_t seed, std::int64_t count) {
  return {.kind = TokenRun::Kind::symbolic,
          .seed = seed,
          .first = 0,
          .count = static_cast<std::uint32_t>(count)};
}

// Refuses an empty prompt and one of more than kPromptTokensMax tokens, which 32-bit positions
// could not address.
void check_size(JsonValue value, const Prompt& prompt) {
  const std::int64_t size = prompt.size();
  if (size == 0) value.refuse("a prompt of at least one token");
  if (size > kPromptTokensMax)
    value.refuse_because(
        fmt::format("found a prompt of {} tokens; expected at most {}", size, kPromptTokensMax));
}

// {"ids":[[first,count],...],"length":n}: runs of consecutive ids, as most prompts have them.
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
    // More ids than the prompt can have: one extra id is enough for the error, and a count of 2^31
    // must not allocate memory.
    if (static_cast<std::int64_t>(hash_ids.size()) + count > expected) {
      hash_ids.resize(static_cast<std::size_t>(expected) + 1);
      break;
    }
    for (std::int64_t i = 0; i < count; ++i) hash_ids.push_back(first++);
  }
  auto prompt = prompt_of_hash_ids(hash_ids, length, *ids, ordinal);
  if (!prompt)
    runs.refuse_because(
        fmt::format("found {}{} ids for {} tokens; expected {} (blocks of {}, tail {})",
                    static_cast<std::int64_t>(hash_ids.size()) > expected ? "more than " : "",
                    std::min<std::int64_t>(hash_ids.size(), expected), length, expected,
                    ids->block_tokens, ids->tail == IdTail::ceil ? "ceil" : "floor"));
  return prompt.value_or(Prompt{});
}

// {"token":t,"n":n}
TokenRun read_repeated(JsonValue element) {
  JsonObject object = element.object();
  TokenRun run{.kind = TokenRun::Kind::repeated};
  run.seed = static_cast<std::uint64_t>(object.required("token").integer(0, kTokenIdMax));
  run.count = object.required("n").integer<std::uint32_t>(1, kPromptTokensMax);
  object.finish();
  return run;
}
void write_repeated(JsonWriter& out, const TokenRun& run) {
  out.begin_object().key("token").uint64(run.seed).integer("n", run.count).end_object();
}

// ["seeded" or "symbolic", seed, first, count], ["tokens", [..]] or {"token":t,"n":n}. Seeded runs
// take 32 bits of seed, as their tokens are made from them; symbolic ones are identified by all 64.
void read_run(JsonValue element, Prompt& prompt) {
  if (element.is_object()) return prompt.append(read_repeated(element));
  const JsonArray run = element.array();
  const bool is_tokens = run.size() == 2 && run[0].is_string() && run[0].string() == "tokens";
  if (is_tokens) return append_tokens(prompt, read_token_ids(run[1]));
  if (run.size() != 4)
    return element.refuse("[\"seeded\" or \"symbolic\", seed, first, count] or [\"tokens\", [..]]");
  constexpr JsonWord<TokenRun::Kind> kKinds[] = {{"seeded", TokenRun::Kind::seeded},
                                                 {"symbolic", TokenRun::Kind::symbolic}};
  TokenRun read;
  read.kind = run[0].word<TokenRun::Kind>(kKinds);
  read.seed = read.kind == TokenRun::Kind::seeded ? run[1].integer(0, kSeedMax) : run[1].uint64();
  read.first = run[2].integer<std::uint32_t>(0, kPromptTokensMax);
  read.count = run[3].integer<std::uint32_t>(1, kPromptTokensMax - read.first);
  prompt.append(read);
}

// Returns the ids from which prompt_of_hash_ids() makes exactly this prompt; nullopt: there are
// none, and the prompt needs another form. Comparing the result covers run lengths, the tail and
// private seeds at once.
std::optional<std::vector<std::uint64_t>> hash_ids_of(const Prompt& prompt,
                                                      const HashIdConvention& ids,
                                                      std::uint64_t ordinal) {
  const auto expected = static_cast<std::size_t>(hash_ids_for(prompt.size(), ids));
  if (prompt.runs.size() < expected) return std::nullopt;
  std::vector<std::uint64_t> hash_ids;
  for (std::size_t i = 0; i < expected; ++i) hash_ids.push_back(prompt.runs[i].seed);
  for (const std::uint64_t id : hash_ids)
    if (id > kHashIdMax) return std::nullopt;
  const auto made = prompt_of_hash_ids(hash_ids, prompt.size(), ids, ordinal);
  return made && *made == prompt ? std::optional(hash_ids) : std::nullopt;
}

// Joins consecutive ids to [first, count] runs.
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

// The form for any prompt: each run as it is, literal ones as tokens.
void write_runs(JsonWriter& out, const Prompt& prompt) {
  out.begin_object().key("runs").begin_array();
  for (const TokenRun& run : prompt.runs) {
    if (run.kind == TokenRun::Kind::repeated) {
      write_repeated(out, run);
      continue;
    }
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

// Replaces the tokens at positions of embeddings by `to`: literal tokens whatever they are,
// repeated runs only if they repeat `from`. The first position of a repeated run decides for all of
// it, since reading keeps every span of embeddings in its own run.
void swap_tokens(Prompt& prompt, const PromptEmbeds& embeds, std::int32_t from, std::int32_t to) {
  // places are sorted and disjoint, so the first span that ends after the position decides.
  const auto is_embedded = [&](std::int64_t position) {
    const auto behind = std::ranges::partition_point(
        embeds.places, [&](const TokenSpan& span) { return span.first + span.count <= position; });
    return behind != embeds.places.end() && behind->first <= position;
  };
  std::int64_t position = 0;
  for (TokenRun& run : prompt.runs) {
    if (run.kind == TokenRun::Kind::repeated && std::cmp_equal(run.seed, from) &&
        is_embedded(position))
      run.seed = static_cast<std::uint64_t>(to);
    for (std::uint32_t i = 0; run.kind == TokenRun::Kind::literal && i < run.count; ++i)
      if (is_embedded(position + i)) prompt.tokens[run.first + i] = to;
    position += run.count;
  }
}

}  // namespace

// Literal runs point into prompt.tokens, which only grows.
void append_tokens(Prompt& prompt, const std::vector<std::int32_t>& tokens) {
  prompt.append({.kind = TokenRun::Kind::literal,
                 .seed = 0,
                 .first = static_cast<std::uint32_t>(prompt.tokens.size()),
                 .count = static_cast<std::uint32_t>(tokens.size())});
  prompt.tokens.insert(prompt.tokens.end(), tokens.begin(), tokens.end());
}

// Three elements are [seed, first, n], two [seed, n] from first 0.
Prompt read_segments(JsonValue value) {
  Prompt prompt;
  for (JsonValue element : value.array()) {
    if (element.is_object()) {
      prompt.append(read_repeated(element));
      continue;
    }
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

void write_segments(JsonWriter& out, const Prompt& prompt) {
  LS_CHECK(are_segments(prompt), "a run of another kind");
  out.begin_array();
  for (const TokenRun& run : prompt.runs) {
    if (run.kind == TokenRun::Kind::repeated) {
      write_repeated(out, run);
      continue;
    }
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
  if (value.is_array()) return read_segments(value);
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

void write_prompt_of(JsonWriter& out, const RequestSpec& request) {
  const PromptEmbeds& embeds = request.keys.embeds;
  Prompt prompt = request.prompt;
  swap_tokens(prompt, embeds, 0, kEmbeddedToken);
  write_recorded_prompt(out, prompt);
}

void write_recorded_prompt(JsonWriter& out, const Prompt& prompt) {
  if (are_segments(prompt)) return write_segments(out, prompt);
  out.begin_object().key("tokens").integers(prompt.materialize()).end_object();
}

// The key chooses the form; further keys are refused by finish().
Prompt read_prompt(JsonValue value, const std::optional<HashIdConvention>& ids,
                   std::uint64_t ordinal) {
  if (value.is_array()) return read_segments(value);
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

// Forms from the most specific to the most general. A literal run that is not the whole token list
// has been cut or joined and is written as runs.
void write_prompt(JsonWriter& out, const Prompt& prompt, const std::optional<HashIdConvention>& ids,
                  std::uint64_t ordinal) {
  if (are_segments(prompt)) return write_segments(out, prompt);
  if (prompt.runs.size() == 1 && prompt.runs[0].kind == TokenRun::Kind::literal &&
      prompt.runs[0].first == 0 && prompt.runs[0].count == prompt.tokens.size()) {
    out.begin_object().key("tokens").integers(prompt.tokens).end_object();
    return;
  }
  if (prompt == private_prompt(prompt.size(), ordinal)) {
    out.begin_object().integer("length", prompt.size()).end_object();
    return;
  }
  if (ids)
    if (const auto hash_ids = hash_ids_of(prompt, *ids, ordinal))
      return write_hash_ids(out, *hash_ids, prompt.size());
  write_runs(out, prompt);
}

std::int64_t hash_ids_for(std::int64_t length, const HashIdConvention& ids) {
  return ids.tail == IdTail::floor ? length / ids.block_tokens
                                   : (length + ids.block_tokens - 1) / ids.block_tokens;
}

// Each id covers block_tokens tokens, the last one the remainder (`ceil`); what `floor` leaves gets
// the request's private seed.
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

namespace {

// [[first, count], ...]: runs of an item's tokens, ascending and disjoint. The last run may end
// after the item, as vLLM's masks may; PromptItem::num_rows() cuts it.
struct Spans {
  std::int32_t size = 0;
  void read(JsonValue value, std::vector<TokenSpan>& spans) const {
    std::int32_t end = 0;
    for (JsonValue element : value.array()) {
      const form::Pair<form::Between, form::Between> span{
          "[first, count]", {end, std::max(end, size - 1)}, {1, std::max(1, size)}};
      span.read(element, spans.emplace_back());
      end = spans.back().first + spans.back().count;
    }
    if (spans.empty()) value.refuse("at least one run, or no such key");
  }
  static void write(JsonWriter& out, const std::vector<TokenSpan>& spans) {
    form::Each<form::Pair<form::Between, form::Between>>{}.write(out, spans);
  }
};

// Rows of embeddings that a request brings.
std::int64_t num_rows(const PromptEmbeds& embeds) {
  std::int64_t rows = 0;
  for (const TokenRun& run : embeds.rows) rows += run.count;
  return rows;
}

// Sets the spans of the prompt that embeddings cover. With digests there are none: one digest per
// digest_tokens tokens, and one for the rest, covers the whole prompt. With rows only, the whole
// prompt is one span. Otherwise each row belongs to one position of kEmbeddedToken, in order, and
// their numbers must be equal.
void place_embeds(JsonValue value, const Prompt& prompt, PromptEmbeds& embeds) {
  if (!embeds.digests.empty()) {
    const std::int64_t each = embeds.digest_tokens;
    const std::int64_t expected = (prompt.size() + each - 1) / each;
    if (std::ssize(embeds.digests) != expected)
      value.refuse_because(fmt::format("found {} digests; expected {} for {} tokens",
                                       embeds.digests.size(), expected, prompt.size()));
    return;
  }
  if (embeds.are_alone) {
    embeds.places = {{0, static_cast<std::int32_t>(prompt.size())}};
    return;
  }
  std::int32_t position = 0;
  std::int64_t num_places = 0;
  for (const std::int32_t token : prompt.materialize()) {
    if (token == kEmbeddedToken) {
      ++num_places;
      TokenSpan* const last = embeds.places.empty() ? nullptr : &embeds.places.back();
      if (last != nullptr && last->first + last->count == position)
        ++last->count;
      else
        embeds.places.push_back({position, 1});
    }
    ++position;
  }
  if (num_places != num_rows(embeds))
    value.refuse_because(
        fmt::format("found {} rows; expected {}, as many as the prompt has of token {}",
                    num_rows(embeds), num_places, kEmbeddedToken));
}

// Where the next item of a prompt may start, so that items do not overlap. room: tokens of the
// prompt; -1: items are not part of it.
struct ItemPlace {
  std::int32_t end = 0;
  std::int64_t room = -1;
};

}  // namespace

template <class Io>
void fields(Io& io, FieldsOf<Io, Adapter>& adapter) {
  io.required("name", adapter.name);
  io.required("id", adapter.id, form::Between{0, INT64_MAX});
  io.required("path", adapter.path, form::AnyText{});
}

// All three keys are always written, so that a file shows the whole rule; an absent one is 0.
template <class Io>
void fields(Io& io, FieldsOf<Io, RepetitionDetection>& detection) {
  constexpr form::Between kTokens{0, kPromptTokensMax};
  io.defaulted("max_pattern_size", detection.max_pattern_size, kTokens);
  io.defaulted("min_pattern_size", detection.min_pattern_size, kTokens);
  io.defaulted("min_count", detection.min_count, kTokens);
}

// `at` of an item outside the prompt is 0. kPromptTokensMax bounds its length there; otherwise the
// prompt does.
template <class Io>
void fields(Io& io, FieldsOf<Io, PromptItem>& item, const ItemPlace& at) {
  const bool is_beside = at.room < 0;
  const std::int64_t room = is_beside ? kPromptTokensMax : at.room;
  const std::int64_t last = std::max<std::int64_t>(at.end, room - 1);
  io.required("id", item.identifier);
  io.required("kind", item.kind);
  io.required("at", item.first, is_beside ? form::Between{0, 0} : form::Between{at.end, last});
  io.required("n", item.count, form::Between{1, std::max<std::int64_t>(1, room - item.first)});
  io.optional("embed", item.embeds, Spans{item.count});
}

// Either digests of the engine's own embeddings, or seeded rows that a replay can generate. The
// keys exclude each other.
template <class Io>
void fields(Io& io, FieldsOf<Io, PromptEmbeds>& embeds) {
  const form::Between tokens{1, kSeedMax / 4};
  bool has_digests = !embeds.digests.empty();
  if constexpr (Io::kReads) has_digests = io.object.has("digests");
  if (has_digests) {
    io.required("digest_tokens", embeds.digest_tokens, tokens);
    io.required("digests", embeds.digests, form::Each<form::Hexadecimal>{});
    if constexpr (Io::kReads)
      if (embeds.digests.empty()) io.object.required("digests").refuse("at least one digest");
    return;
  }
  Prompt rows;
  if constexpr (!Io::kReads) rows.runs = embeds.rows;
  io.required("rows", rows, form::Code{read_segments, write_segments});
  io.required("width", embeds.width, form::Between{1, 1 << 20});
  if constexpr (Io::kReads) embeds.rows = rows.runs;
}

// Rows of a repeated token would all be equal, which `rows` cannot mean; they need a seed.
static PromptEmbeds read_embeds(JsonValue value) {
  PromptEmbeds embeds;
  read_fields(value, embeds);
  if (std::ranges::any_of(embeds.rows,
                          [](const TokenRun& run) { return run.kind != TokenRun::Kind::seeded; }))
    value.refuse_because("found rows that have no seed; expected [seed, n]");
  return embeds;
}

std::vector<PromptItem> read_prompt_items(JsonValue value, std::int64_t prompt_size) {
  std::vector<PromptItem> items;
  ItemPlace at{.end = 0, .room = prompt_size};
  for (JsonValue element : value.array()) {
    read_fields(element, items.emplace_back(), at);
    at.end = items.back().first + items.back().count;
  }
  if (items.empty()) value.refuse("at least one item, or no such key");
  return items;
}

void write_prompt_items(JsonWriter& out, const std::vector<PromptItem>& items) {
  const ItemPlace anywhere;
  if (!items.empty()) form::Each{form::With{anywhere}}.write(out.key("mm"), items);
}

// Digests describe an engine's own embeddings by position and need the prompt's length, hence the
// refusal without `prompt`.
bool read_embeds_alone(JsonObject& object, RequestSpec& request) {
  if (object.has("prompt")) return false;
  PromptEmbeds& embeds = request.keys.embeds;
  JsonValue value = object.required("embeds");
  embeds = read_embeds(value);
  embeds.are_alone = true;
  if (!embeds.digests.empty()) value.refuse_because("found digests alone; expected \"prompt\" too");
  request.prompt.append(
      {.kind = TokenRun::Kind::repeated, .count = static_cast<std::uint32_t>(num_rows(embeds))});
  check_size(value, request.prompt);
  return true;
}

// Keys that block hashes cover. `embeds` may have been read already, with the prompt.
static void read_hash_keys(JsonObject& object, KeysForm form, RequestSpec& request) {
  RequestKeys& keys = request.keys;
  if (auto lora = object.optional("lora")) read_fields(lora, keys.lora);
  if (auto items = object.optional("mm"))
    keys.mm = read_prompt_items(items, form.has_items_beside ? -1 : request.prompt.size());
  if (auto embeds = object.optional("embeds")) {
    if (!keys.embeds.are_alone) keys.embeds = read_embeds(embeds);
    place_embeds(embeds, request.prompt, keys.embeds);
    if (form.zeroes_embedded) swap_tokens(request.prompt, keys.embeds, kEmbeddedToken, 0);
  }
}

// Keys that hashes do not cover.
template <class Io>
static void rare_fields(Io& io, FieldsOf<Io, RequestSpec>& request) {
  io.optional("min_tokens", request.min_tokens, form::Between{0, kPromptTokensMax});
  io.unless(RepetitionDetection{}, "repetition_detection", request.repetition_detection);
  io.optional("skip_reading_prefix_cache", request.skip_reading_prefix_cache);
}

void read_rare_request_keys(JsonObject& object, RequestSpec& request, KeysForm form) {
  read_hash_keys(object, form, request);
  FieldReader io(object);
  rare_fields(io, request);
}

void write_rare_request_keys(JsonWriter& out, const RequestSpec& request) {
  if (!request.keys.lora.name.empty()) write_fields(out.key("lora"), request.keys.lora);
  write_prompt_items(out, request.keys.mm);
  if (!request.keys.embeds.empty()) write_fields(out.key("embeds"), request.keys.embeds);
  FieldWriter io(out);
  rare_fields(io, request);
}

}  // namespace lockstep
