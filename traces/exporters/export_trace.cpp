#include "traces/exporters/export_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/json_writer.h"
#include "base/number_text.h"
#include "traces/exporters/prefix_ids.h"

namespace lockstep {
namespace {

constexpr std::array kExportFormats = std::to_array<ExportFormat>({
    {ExportAs::mooncake, "mooncake", 512},
    {ExportAs::aiperf, "aiperf", 512},
    {ExportAs::timed_trace, "timed_trace", 16},
});

const ExportFormat& format_of(ExportAs as) {
  return *std::ranges::find(kExportFormats, as, &ExportFormat::as);
}

// Optional parts of a request besides arrival, lengths and a prompt.
struct RarePart {
  std::string_view what;
  bool (*is_there)(const TraceRequest& request);
  bool is_in_aiperf = false;
};

constexpr RarePart kRareParts[] = {
    {"an abort", [](const TraceRequest& request) { return request.abort.has_value(); }},
    {"an end by a token (eos, stop_token_ids)",
     [](const TraceRequest& request) {
       return request.spec.eos_token || !request.spec.stop_token_ids.empty();
     }},
    {"a priority", [](const TraceRequest& request) { return request.spec.priority != 0; }, true},
    {"min_tokens", [](const TraceRequest& request) { return request.spec.min_tokens != 0; }, true},
    {"repetition_detection",
     [](const TraceRequest& request) {
       return request.spec.repetition_detection != RepetitionDetection{};
     }},
    {"skip_reading_prefix_cache",
     [](const TraceRequest& request) { return request.spec.skip_reading_prefix_cache; }},
};

class Exporter {
 public:
  Exporter(const std::string& file, const ExportOptions& options)
      : file_(file), options_(options), format_(format_of(options.as)) {}

  Result<ExportedTrace> run(const Trace& trace) {
    LS_RETURN_IF_ERROR(take_requests(trace));
    LS_RETURN_IF_ERROR(choose_block());
    const auto ids = prefix_ids(requests_, exported_.block_tokens);
    for (std::size_t i = 0; i < requests_.size(); ++i)
      exported_.text += row_of(*requests_[i], ids[i]);
    exported_.num_requests = std::ssize(requests_);
    return std::move(exported_);
  }

 private:
  Result<void> leave_out(std::string_view who, std::string_view what) {
    if (!options_.is_lossy)
      return fail(fmt::format("{}: {} has {}, which {} has no word for; --lossy leaves it out",
                              file_, who, what, format_.name));
    const auto found = std::ranges::find(exported_.left_out, what, &LeftOut::what);
    if (found == exported_.left_out.end())
      exported_.left_out.push_back({.what = std::string(what), .count = 1});
    else
      ++found->count;
    return {};
  }

  Result<void> take_requests(const Trace& trace) {
    for (const TraceRecord& record : trace.records) {
      const auto* const request = std::get_if<TraceRequest>(&record);
      if (request == nullptr) {
        LS_RETURN_IF_ERROR(leave_out("the trace", "a reset of the prefix cache"));
        continue;
      }
      const std::string who = fmt::format("request {}", request->spec.name);
      if (!request->after.empty())
        return fail(
            fmt::format("{}: {} arrives after {} has left; {} has arrivals at fixed times "
                        "alone",
                        file_, who, request->after.front(), format_.name));
      for (const RarePart& part : kRareParts) {
        if (!part.is_there(*request) || (part.is_in_aiperf && options_.as == ExportAs::aiperf))
          continue;
        LS_RETURN_IF_ERROR(leave_out(who, part.what));
      }
      requests_.push_back(request);
    }
    if (requests_.empty()) return fail(fmt::format("{}: there are no requests to export", file_));
    return {};
  }

  Result<void> choose_block() {
    const SharedPrefixes shared = shared_prefixes(requests_);
    const std::int32_t tells_all = block_that_tells_all(shared, format_.block_tokens_max);
    exported_.block_tokens = options_.block_tokens.value_or(tells_all);
    if (options_.is_lossy) return {};
    for (const SharedPrefixes::Between& pair : shared.pairs)
      if (pair.tokens % exported_.block_tokens != 0)
        return fail(fmt::format(
            "{}: requests {} and {} share {}, which ids of {} do not tell; --block {} does, and "
            "--lossy leaves it out",
            file_, pair.first, pair.second, counted(pair.tokens, "token"), exported_.block_tokens,
            tells_all));
    return {};
  }

  std::string row_of(const TraceRequest& request, const std::vector<std::uint64_t>& ids) const {
    JsonWriter out;
    out.begin_object();
    if (options_.as == ExportAs::aiperf) out.string("session_id", request.spec.name);
    const int digits = options_.as == ExportAs::timed_trace ? 9 : 6;
    std::string time = decimal_text_of(request.spec.arrival_ns, digits);
    if (time.ends_with(".0")) time.resize(time.size() - 2);
    out.key("timestamp").raw(time);
    out.integer("input_length", request.spec.prompt.size());
    out.integer("output_length", request.output.length);
    out.key("hash_ids").integers(ids);
    if (options_.as == ExportAs::aiperf) write_extra(out, request.spec);
    out.end_object();
    return out.take_line();
  }

  static void write_extra(JsonWriter& out, const RequestSpec& spec) {
    out.key("extra").begin_object().boolean("ignore_eos", true);
    if (spec.min_tokens != 0) out.integer("min_tokens", spec.min_tokens);
    if (spec.priority != 0) out.integer("priority", spec.priority);
    out.end_object();
  }

  const std::string& file_;
  const ExportOptions& options_;
  const ExportFormat& format_;
  std::vector<const TraceRequest*> requests_;
  ExportedTrace exported_;
};

}  // namespace

std::span<const ExportFormat> export_formats() { return kExportFormats; }

Result<ExportedTrace> export_trace(const std::string& file, const Trace& trace,
                                   const ExportOptions& options) {
  return Exporter(file, options).run(trace);
}

}  // namespace lockstep
