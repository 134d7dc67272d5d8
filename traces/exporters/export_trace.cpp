#include "traces/exporters/export_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>

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
    {"an arrival after another request ends",
     [](const TraceRequest& request) { return !request.after.empty(); }},
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
    take_requests(trace);
    if (arrivals_.empty()) return fail(fmt::format("{}: there are no requests to export", file_));
    std::vector<const TraceRequest*> requests;
    for (const Arrival& arrival : arrivals_) requests.push_back(arrival.request);
    choose_block(shared_prefixes(requests));
    if (!options_.is_lossy && !obstacles_.empty()) return fail(obstacles_text());
    for (Obstacle& obstacle : obstacles_)
      exported_.left_out.push_back({.what = std::move(obstacle.what), .count = obstacle.count});
    const auto ids = prefix_ids(requests, exported_.block_tokens);
    for (std::size_t i = 0; i < arrivals_.size(); ++i)
      exported_.text += row_of(arrivals_[i], ids[i]);
    exported_.num_requests = std::ssize(arrivals_);
    return std::move(exported_);
  }

 private:
  struct Arrival {
    const TraceRequest* request;
    std::int64_t t_ns;
  };
  struct Obstacle {
    std::string first;  // that has it
    std::string what;
    std::int64_t count = 1;
  };

  void note(std::string first, std::string_view what) {
    const auto found = std::ranges::find(obstacles_, what, &Obstacle::what);
    if (found != obstacles_.end())
      ++found->count;
    else
      obstacles_.push_back({.first = std::move(first), .what = std::string(what)});
  }

  // "an abort (request r1 and 4 more), a priority (request r2)"
  std::string obstacles_text() const {
    std::string list;
    for (const Obstacle& obstacle : obstacles_)
      list += fmt::format(
          "{}{} ({}{})", list.empty() ? "" : ", ", obstacle.what, obstacle.first,
          obstacle.count > 1 ? fmt::format(" and {} more", with_commas(obstacle.count - 1)) : "");
    const bool is_one = obstacles_.size() == 1;
    return fmt::format("{}: {} cannot hold {}{}; --lossy leaves {} out", file_, format_.name,
                       is_one ? "" : fmt::format("{} things: ", obstacles_.size()), list,
                       is_one ? "it" : "them");
  }

  // A request that arrives after others is sent when its delay has passed since they arrived.
  void take_requests(const Trace& trace) {
    std::map<std::string_view, std::int64_t> arrived;
    for (const TraceRecord& record : trace.records) {
      const auto* const request = std::get_if<TraceRequest>(&record);
      if (request == nullptr) {
        note("the trace", "a reset of the prefix cache");
        continue;
      }
      for (const RarePart& part : kRareParts)
        if (part.is_there(*request) && !(part.is_in_aiperf && options_.as == ExportAs::aiperf))
          note(fmt::format("request {}", request->spec.name), part.what);
      std::int64_t t_ns = request->after.empty() ? request->spec.arrival_ns : 0;
      for (const std::string& name : request->after)
        t_ns = std::max(t_ns, arrived[name] + request->delay_ns);
      arrived[request->spec.name] = t_ns;
      arrivals_.push_back({request, t_ns});
    }
    std::ranges::stable_sort(arrivals_, {}, &Arrival::t_ns);
  }

  void choose_block(const SharedPrefixes& shared) {
    const std::int32_t tells_all = block_that_tells_all(shared, format_.block_tokens_max);
    exported_.block_tokens = options_.block_tokens.value_or(tells_all);
    if (options_.is_lossy) return;
    std::int64_t count = 0;
    for (const SharedPrefixes::Between& pair : shared.pairs)
      if (pair.tokens % exported_.block_tokens != 0 && count++ == 0)
        obstacles_.push_back({.first = fmt::format("requests {} and {}", pair.first, pair.second),
                              .what = fmt::format("{} of a shared prefix in ids of {}, as --block "
                                                  "{} does",
                                                  counted(pair.tokens, "token"),
                                                  exported_.block_tokens, tells_all)});
    if (count > 1) obstacles_.back().count = count;
  }

  std::string row_of(const Arrival& arrival, const std::vector<std::uint64_t>& ids) const {
    const TraceRequest& request = *arrival.request;
    JsonWriter out;
    out.begin_object();
    if (options_.as == ExportAs::aiperf) out.string("session_id", request.spec.name);
    const int digits = options_.as == ExportAs::timed_trace ? 9 : 6;
    std::string time = decimal_text_of(arrival.t_ns, digits);
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
  std::vector<Arrival> arrivals_;  // ascending
  std::vector<Obstacle> obstacles_;
  ExportedTrace exported_;
};

}  // namespace

std::span<const ExportFormat> export_formats() { return kExportFormats; }

Result<ExportedTrace> export_trace(const std::string& file, const Trace& trace,
                                   const ExportOptions& options) {
  return Exporter(file, options).run(trace);
}

}  // namespace lockstep
