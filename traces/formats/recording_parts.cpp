// Self-contained parts: changes of the prefix cache, encoder and grammar inputs of a step; a whole
// recording, and where it ends.
#include "traces/formats/recording_parts.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

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

// Host pages in a recording: what a step tells workers, and what they report.

std::vector<BlockId> read_blocks(JsonValue value, std::int64_t num_blocks) {
  std::vector<BlockId> blocks;
  const JsonArray array = value.array();
  blocks.reserve(array.size());
  for (JsonValue block : array)
    blocks.push_back(BlockId{block.integer<std::int32_t>(0, num_blocks - 1)});
  return blocks;
}

void write_blocks(JsonWriter& out, const std::vector<BlockId>& blocks) {
  out.begin_array();
  for (const BlockId block : blocks) out.integer(index_of(block));
  out.end_array();
}

namespace {

constexpr std::int64_t kNumberMax = std::int64_t{1} << 40;

BlockId read_block(JsonValue value, std::int64_t num_blocks) {
  return BlockId{value.integer<std::int32_t>(0, num_blocks - 1)};
}

// A list of that many elements; false: it is another.
bool has_size(JsonValue value, std::size_t size, std::string_view expected) {
  if (value.array().size() == size) return true;
  value.refuse(expected);
  return false;
}

PageTransfer read_transfer(JsonValue value, const RecordingHeader& header) {
  PageTransfer transfer;
  if (!has_size(value, 4, "[number, host block, [blocks], \"spill\" or \"restore\"]"))
    return transfer;
  const JsonArray parts = value.array();
  constexpr JsonWord<bool> kWays[] = {{"spill", false}, {"restore", true}};
  transfer.id = parts[0].integer(0, kNumberMax);
  transfer.host = read_block(parts[1], header.options.config.host_pool_num_blocks);
  transfer.resident = read_blocks(parts[2], header.num_blocks);
  transfer.restores = parts[3].word<bool>(kWays);
  return transfer;
}

RowMirror read_mirror(JsonValue value) {
  RowMirror mirror;
  if (!has_size(value, 3, "[[first rows], first host row, rows]")) return mirror;
  const JsonArray parts = value.array();
  for (JsonValue row : parts[0].array()) mirror.sources.push_back(row.integer(0, kNumberMax));
  mirror.destination = parts[1].integer(0, kNumberMax);
  mirror.num_rows = parts[2].integer<std::int32_t>(1, kTokensMax);
  return mirror;
}

ResidencyUpdate read_residency(JsonValue value, const RecordingHeader& header) {
  ResidencyUpdate update;
  if (!has_size(value, 2, "[[pages], [[blocks], ...]]")) return update;
  const JsonArray parts = value.array();
  for (JsonValue page : parts[0].array())
    update.pages.push_back(page.integer<std::int32_t>(0, kTokensMax));
  for (JsonValue blocks : parts[1].array()) {
    update.blocks.push_back(read_blocks(blocks, header.num_blocks));
    if (update.blocks.back().size() != update.pages.size())
      blocks.refuse(fmt::format("a block for each of the {} pages", update.pages.size()));
  }
  return update;
}

}  // namespace

std::vector<TransferCount> read_transfer_counts(JsonValue value) {
  std::vector<TransferCount> counts;
  for (JsonValue element : value.array()) {
    if (!has_size(element, 2, "[number, workers]")) break;
    const JsonArray pair = element.array();
    counts.push_back(
        {pair[0].integer(0, kNumberMax), pair[1].integer<std::int32_t>(1, kTokensMax)});
  }
  return counts;
}

RecordedPages read_pages(JsonValue value, const RecordingHeader& header) {
  JsonObject object = value.object();
  RecordedPages pages;
  for (JsonValue transfer : object.required("transfers").array())
    pages.transfers.push_back(read_transfer(transfer, header));
  for (auto& [id, mirrors] : object.required("mirrors").object().entries()) {
    auto& row = pages.mirrors.emplace_back(std::string(id), std::vector<RowMirror>{});
    for (JsonValue mirror : mirrors.array()) row.second.push_back(read_mirror(mirror));
  }
  pages.all_resident = object.required("all_resident").boolean();
  for (auto& [id, update] : object.required("residency").object().entries())
    pages.residency.emplace_back(std::string(id), read_residency(update, header));
  pages.free_host_blocks =
      object.required("free_host_blocks").integer(0, header.options.config.host_pool_num_blocks);
  object.finish();
  return pages;
}

void write_transfer_counts(JsonWriter& out, const std::vector<TransferCount>& counts) {
  out.begin_array();
  for (const TransferCount& count : counts)
    out.begin_array().integer(count.id).integer(count.count).end_array();
  out.end_array();
}

void write_pages(JsonWriter& out, const RecordedPages& pages) {
  out.begin_object().key("transfers").begin_array();
  for (const PageTransfer& transfer : pages.transfers) {
    out.begin_array().integer(transfer.id).integer(index_of(transfer.host));
    write_blocks(out, transfer.resident);
    out.string(transfer.restores ? "restore" : "spill").end_array();
  }
  out.end_array().key("mirrors").begin_object();
  for (const auto& [id, mirrors] : pages.mirrors) {
    out.key(id).begin_array();
    for (const RowMirror& mirror : mirrors) {
      out.begin_array().integers(mirror.sources);
      out.integer(mirror.destination).integer(mirror.num_rows).end_array();
    }
    out.end_array();
  }
  out.end_object().boolean("all_resident", pages.all_resident).key("residency").begin_object();
  for (const auto& [id, update] : pages.residency) {
    out.key(id).begin_array().integers(update.pages).begin_array();
    for (const std::vector<BlockId>& blocks : update.blocks) write_blocks(out, blocks);
    out.end_array().end_array();
  }
  out.end_object().integer("free_host_blocks", pages.free_host_blocks).end_object();
}

namespace {

// What a recording says about how each request ended.
struct Ends {
  std::map<std::string, std::vector<std::int32_t>> tokens;  // sampled, in order
  std::map<std::string, std::string> reasons;               // of those that stopped
};

Ends ends_of(const Recording& recording) {
  Ends ends;
  for (const RecordedStep& step : recording.steps) {
    for (const RecordedTokens& row : step.sampled) {
      std::vector<std::int32_t>& tokens = ends.tokens[row.id];
      tokens.insert(tokens.end(), row.tokens.begin(), row.tokens.end());
    }
    for (const RecordedStopped& row : step.stopped) ends.reasons[row.id] = row.reason;
  }
  return ends;
}

// The output as the engine kept it: what a stop cut off is not part of it.
OutputPlan output_of(const RequestSpec& spec, const Ends& ends) {
  OutputPlan output;
  const auto sampled = ends.tokens.find(spec.name);
  if (!ends.reasons.contains(spec.name) || sampled == ends.tokens.end()) {
    output.length = spec.max_tokens;
    return output;
  }
  for (const std::int32_t token : sampled->second) {
    output.tokens.push_back(token);
    const bool stops = token == spec.eos_token ||
                       std::ranges::find(spec.stop_token_ids, token) != spec.stop_token_ids.end();
    if (stops || std::ssize(output.tokens) == spec.max_tokens) break;
  }
  output.length = static_cast<std::int32_t>(output.tokens.size());
  // A placeholder that the recorded model accepted is no token of another.
  if (std::ranges::any_of(output.tokens, [](std::int32_t token) { return token < 0; }))
    output.tokens.clear();
  return output;
}

}  // namespace

Result<Trace> trace_of(const Recording& recording, std::int64_t step_ns) {
  if (recording.header.connector)
    return fail("a recording of a KV connector, whose answers no request trace holds");
  const Ends ends = ends_of(recording);
  Trace trace;
  trace.header.source = {.kind = "recording", .name = recording.header.family, .seed = {}};
  std::map<std::string, std::size_t> places;
  for (const RecordedStep& step : recording.steps) {
    std::vector<RecordedEvent> events = step.before;
    events.insert(events.end(), step.during.begin(), step.during.end());
    for (const RecordedEvent& event : events) {
      const std::int64_t t_ns = step.step * step_ns;
      if (event.kind == RecordedEvent::Kind::add) {
        TraceRequest request;
        request.spec = event.request;
        request.output = output_of(event.request, ends);
        request.spec.arrival_ns = t_ns;
        request.spec.max_tokens = request.output.length;  // nothing else ends it
        request.spec.eos_token.reset();
        request.spec.stop_token_ids.clear();
        places[event.request.name] = trace.records.size();
        trace.records.emplace_back(std::move(request));
      } else if (event.kind == RecordedEvent::Kind::abort) {
        const auto place = places.find(event.name);
        if (place == places.end()) continue;  // no block of that name
        auto& request = std::get<TraceRequest>(trace.records[place->second]);
        request.abort = AbortPlan{.t_ns = t_ns, .after_tokens = {}};
      } else if (event.kind == RecordedEvent::Kind::output) {
        continue;
      } else if (event.kind == RecordedEvent::Kind::pause_state) {
        return fail("a recording of an engine that paused, which no request trace says");
      } else {
        trace.records.emplace_back(
            TraceControl{.t_ns = t_ns, .preempts_running = event.resets_running});
      }
    }
  }
  return trace;
}

}  // namespace lockstep
