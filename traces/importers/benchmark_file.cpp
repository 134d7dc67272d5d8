#include "traces/importers/benchmark_file.h"

#include <unordered_set>

#include "base/json_reader.h"
#include "base/line_reader.h"
#include "traces/formats/engine_options.h"
#include "traces/formats/lines_json.h"
#include "traces/formats/prompt_json.h"
#include "traces/formats/spec_json.h"

namespace lockstep {
namespace {

BenchmarkFile read_header(JsonValue value) {
  JsonObject object = value.object();
  BenchmarkFile file;
  file.name = object.required("benchmark").nonempty_string();
  file.engine = read_recorded_engine(object.required("engine"));
  file.options = read_engine_options(object.required("config"));
  file.options.config.engine = file.engine.profile();
  file.groups = read_kv_cache_groups(object.required("groups"));
  file.num_blocks = object.required("num_blocks").integer(1, kBlocksMax);
  file.sampled_token = object.required("sampled_token").integer<std::int32_t>(0);
  JsonObject totals = object.required("totals").object();
  file.totals.steps = totals.required("steps").integer(0);
  file.totals.scheduled_tokens = totals.required("scheduled_tokens").integer(0);
  file.totals.request_steps = totals.required("request_steps").integer(0);
  totals.finish();
  object.finish();
  return file;
}

RequestSpec read_request(JsonValue value, std::unordered_set<std::string>& names) {
  JsonObject object = value.object();
  bool priority_given = false;
  RequestSpec request = read_added_request(object, priority_given);
  if (!names.insert(request.name).second) {
    object.required("add").refuse("a name that no earlier request has");
  }
  object.finish();
  return request;
}

}  // namespace

Result<BenchmarkFile> read_benchmark_file(const std::string& path) {
  auto lines = LineReader::open(path);
  if (!lines) return tl::unexpected(lines.error());
  JsonReader json(path);
  BenchmarkFile file;
  std::unordered_set<std::string> names;
  while (true) {
    std::string_view line;
    const auto more = lines->next(line);
    if (!more) return tl::unexpected(more.error());
    if (!*more) return file;
    if (json.parse(line, lines->number(), lines->is_cut_off())) {
      if (lines->number() == 1) {
        file = read_header(json.root());
      } else {
        file.requests.push_back(read_request(json.root(), names));
      }
    }
    if (!json.ok()) return json.failure();
  }
}

}  // namespace lockstep
