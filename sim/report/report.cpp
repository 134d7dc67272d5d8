#include "sim/report/timeline.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <boost/algorithm/string/replace.hpp>

#include "base/check.h"
#include "base/json_writer.h"
#include "base/number_text.h"
#include "base/output_file.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {
namespace {

using Json = nlohmann::ordered_json;

// One list per field instead of one object per step: 4,096 steps cost a few bytes per value.
Json steps_json(const std::vector<TimelineStep>& steps) {
  Json json;
  const auto add = [&](const char* key, auto member) {
    Json& list = json[key] = Json::array();
    for (const TimelineStep& step : steps) list.push_back(step.*member);
  };
  add("step", &TimelineStep::step);
  add("num", &TimelineStep::num_steps);
  add("time", &TimelineStep::time_ns);
  add("tokens", &TimelineStep::scheduled_tokens);
  add("requests", &TimelineStep::scheduled_requests);
  add("running", &TimelineStep::running);
  add("waiting", &TimelineStep::waiting);
  add("used", &TimelineStep::used_blocks);
  add("cached", &TimelineStep::cached_blocks);
  add("free", &TimelineStep::free_blocks);
  add("preempted", &TimelineStep::preempted);
  add("hits", &TimelineStep::hit_tokens);
  add("evicted", &TimelineStep::evicted);
  add("stored", &TimelineStep::stored);
  return json;
}

// Spans are triples: LaneSpan::Kind as a number, first step, last step.
Json lanes_json(const std::vector<Lane>& lanes) {
  Json json = Json::array();
  for (const Lane& lane : lanes) {
    Json spans = Json::array();
    for (const LaneSpan& span : lane.spans)
      spans.push_back({static_cast<int>(span.kind), span.first_step, span.last_step});
    json.push_back({{"name", lane.name},
                    {"prompt", lane.prompt_tokens},
                    {"cached", lane.cached_tokens},
                    {"output", lane.output_tokens},
                    {"ended", lane.ended},
                    {"spans", std::move(spans)}});
  }
  return json;
}

// Changes are one flat list of 6 numbers each, as they may be 400,000.
Json timeline_json(const Timeline& timeline) {
  Json changes = Json::array();
  std::int32_t last_block = 0;
  for (const BlockChange& change : timeline.block_changes) {
    for (const std::int64_t value :
         {change.step, std::int64_t{change.block}, std::int64_t{change.holders},
          std::int64_t{change.lane}, std::int64_t{change.group}, std::int64_t{change.cached}})
      changes.push_back(value);
    last_block = std::max(last_block, change.block);
  }
  return {{"steps", steps_json(timeline.steps)}, {"lanes", lanes_json(timeline.lanes)},
          {"changes", std::move(changes)},       {"num_blocks", timeline.num_blocks},
          {"blocks_drawn", last_block + 1},      {"token_budget", timeline.token_budget},
          {"num_steps", timeline.num_steps},     {"notes", timeline.notes}};
}

// Escapes "<", because "</" and "<!" could end or change the script element. JSON strings accept
// the escape, and "<" occurs only in strings.
std::string escaped_for_script(const std::string& json) {
  return boost::replace_all_copy(json, "<", "\\u003c");
}

}  // namespace

std::string html_report(const ReportInfo& info, const RunSummary& summary,
                        const Timeline& timeline) {
  const Json data = {
      {"info",
       {{"title", info.title}, {"command", info.command}, {"configuration", info.configuration}}},
      {"summary", json_of(summary)},
      {"timeline", timeline_json(timeline)}};
  // Concatenation, not a replacement in the finished text: the data itself may contain the mark.
  const std::string_view page = report_page();
  constexpr std::string_view mark = "%DATA%";
  const std::size_t at = page.find(mark);
  LS_CHECK(at != std::string_view::npos, "the page has no place for its data");
  std::string html(page.substr(0, at));
  html += escaped_for_script(data.dump(-1, ' ', false, Json::error_handler_t::replace));
  html += page.substr(at + mark.size());
  return html;
}

Result<void> write_html_report(const std::string& path, const ReportInfo& info,
                               const RunSummary& summary, const Timeline& timeline) {
  return write_output(path, html_report(info, summary, timeline));
}

// Hashes as hexadecimal digits: JSON numbers have too few bits for them.
static void write_hashes(JsonWriter& out, const CacheEvent& event) {
  out.key("block_hashes").each(event.block_hashes, [&](const ExternalBlockHash& hash) {
    out.string(hex_digits(hash));
  });
}

// Writes what a router needs to follow the chain of hashes: the parent's hash, null for the first
// block of a prompt, the tokens, and the salt of each block.
static void write_stored(JsonWriter& out, const CacheEvent& event) {
  write_hashes(out, event);
  out.key("parent_block_hash");
  event.parent ? out.string(hex_digits(*event.parent)) : out.null();
  out.key("token_ids").integers(event.token_ids).integer("block_size", event.block_size);
  out.key("extra_keys").each(event.extra_keys, [&](const auto& salt) {
    salt ? out.strings(std::array{*salt}) : out.null();
  });
}

// Event names are those of vLLM 0.33.0, distributed/kv_events.py.
std::string cache_events_line(std::int64_t step, std::span<const CacheEvent> events) {
  if (events.empty()) return {};
  return object_line([&](JsonWriter& out) {
    out.integer("step", step).key("events").each(events, [&](const CacheEvent& event) {
      out.begin_object();
      switch (event.kind) {
        case CacheEvent::Kind::stored:
          out.string("type", "BlockStored").integer("group_idx", event.group);
          write_stored(out, event);
          break;
        case CacheEvent::Kind::removed:
          out.string("type", "BlockRemoved").integer("group_idx", event.group);
          write_hashes(out, event);
          break;
        case CacheEvent::Kind::cleared:
          out.string("type", "AllBlocksCleared");
          break;
      }
      out.end_object();
    });
  });
}

}  // namespace lockstep
