// Benchmark files, and the loop over rows that the line-by-line importers share.
#include "traces/importers/foreign_traces.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>

#include "base/json_reader.h"
#include "traces/formats/engine_options.h"
#include "traces/formats/lines_json.h"
#include "traces/formats/spec_json.h"

namespace lockstep {
namespace {

// Totals are required: a benchmark without them could not be checked.
BenchmarkFile read_header(JsonValue value) {
  JsonObject object = value.object();
  BenchmarkFile file{.name = std::string(object.required("benchmark").nonempty_string()),
                     .engine = read_recorded_engine(object.required("engine")),
                     .options = read_engine_options(object.required("config"))};
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

// An `add` without `arrival`. `names` has those of earlier requests.
RequestSpec read_request(JsonValue value, std::unordered_set<std::string>& names) {
  JsonObject object = value.object();
  bool priority_given = false;
  RequestSpec request = read_added_request(object, priority_given);
  if (!names.insert(request.name).second)
    object.required("add").refuse("a name that no earlier request has");
  object.finish();
  return request;
}

// The requests of a benchmark file, all at time 0. Requests are moved out as they are read.
class BenchmarkRequests final : public TraceReader {
 public:
  BenchmarkRequests(BenchmarkFile&& file, std::string_view path) : file_(std::move(file)) {
    header_.source = {.kind = "benchmark", .name = file_name_of(path), .seed = {}};
    header_.engine = {.options = file_.options, .num_blocks = file_.num_blocks};
  }

  const TraceHeader& header() const override { return header_; }

  Result<bool> next(TraceRecord& record) override {
    if (next_ == file_.requests.size()) return false;
    TraceRequest request;
    request.spec = std::move(file_.requests[next_++]);
    request.output.length = request.spec.max_tokens;
    request.output.fill = file_.sampled_token;
    record = std::move(request);
    return true;
  }

 private:
  BenchmarkFile file_;
  TraceHeader header_;
  std::size_t next_ = 0;
};

}  // namespace

// max_tokens is the output's length, so that nothing else needs to end the request.
TraceRequest request_of(ImportedRow&& row, std::uint64_t ordinal) {
  TraceRequest request;
  request.spec.name = fmt::format("r{}", ordinal);
  request.spec.prompt = std::move(row.prompt);
  request.spec.arrival_ns = row.t_ns;
  request.output.length = std::max(row.output_length, 1);
  request.spec.max_tokens = request.output.length;
  return request;
}

Result<bool> ImportReader::next(TraceRecord& record) {
  while (true) {
    std::string_view line;
    LS_ASSIGN_OR_RETURN(const auto got, lines_.next(line));
    if (!got) return false;
    if (leaves_out_torn(lines_, line, options_, notes_)) continue;
    LS_ASSIGN_OR_RETURN(auto row, read_row(line));
    if (options_.arrivals == Arrivals::closed) row.t_ns = 0;
    if (row.output_length == 0) ++notes_.zero_outputs;
    const bool kept = row.output_length > 0 || options_.zero_output != ZeroOutput::skip;
    // The ordinal advances for omitted rows too.
    if (kept) record = request_of(std::move(row), ordinal_);
    ++ordinal_;
    if (kept) return true;
  }
}

std::string file_name_of(std::string_view path) {
  return std::string(path.substr(path.rfind('/') + 1));  // npos + 1 is 0
}

// The format has no end line, so a file that lost whole lines is not noticed here; its totals then
// differ in the replay.
Result<BenchmarkFile> read_benchmark_file(const std::string& path) {
  LS_ASSIGN_OR_RETURN(auto lines, LineReader::open(path));
  JsonReader json(path);
  BenchmarkFile file;
  std::unordered_set<std::string> names;
  while (true) {
    std::string_view line;
    LS_ASSIGN_OR_RETURN(const auto more, lines.next(line));
    if (!more) return file;
    if (json.parse(line, lines.number(), lines.is_cut_off())) {
      if (lines.number() == 1)
        file = read_header(json.root());
      else
        file.requests.push_back(read_request(json.root(), names));
    }
    if (!json.ok()) return json.failure();
  }
}

std::unique_ptr<TraceReader> requests_of(BenchmarkFile file, std::string_view path) {
  return std::make_unique<BenchmarkRequests>(std::move(file), path);
}

}  // namespace lockstep
