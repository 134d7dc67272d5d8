#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "traces/formats/prompt_json.h"
#include "traces/importers/foreign_rows.h"
#include "traces/importers/foreign_traces.h"
#include "traces/importers/request_graph.h"

namespace lockstep {
namespace {

// Workloads with all tokens, agentic ones in sessions, and the requests of a recorded run.
class ServingSimReader {
 public:
  explicit ServingSimReader(const ImportOptions& options) : options_(options) {}

  void read_row(JsonValue value, std::int64_t line) {
    line_ = line;
    JsonObject object = value.object();
    if (object.has("sub_requests")) return read_session(object);
    LinkedRequest linked = read_call(object);
    if (object.has("arrival_time")) {
      linked.t_ns = read_arrival_ns(object, "arrival_time", kDigitsOfSeconds, options_);
      linked.request.spec.name = object.required("request_id").nonempty_string();
      for (const char* told : {"queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts"})
        object.optional(told);
    } else {
      linked.t_ns = read_arrival_ns(object, "arrival_time_ns", 0, options_);
      linked.request.spec.name = fmt::format("r{}", requests_.size());
    }
    object.finish();
    requests_.push_back(std::move(linked));
  }

  // Since the first arrival: a recording has the time of the day.
  std::vector<LinkedRequest> take() {
    std::int64_t first_ns = kSpanMaxNs;
    for (const LinkedRequest& linked : requests_) first_ns = std::min(first_ns, linked.t_ns);
    for (LinkedRequest& linked : requests_) linked.t_ns -= first_ns;
    return std::move(requests_);
  }

 private:
  LinkedRequest read_call(JsonObject& object) {
    LinkedRequest linked;
    linked.line = line_;
    linked.prompt_tokens = object.required("input_toks").integer(1, kPromptTokensMax);
    JsonValue output = object.required("output_toks");
    linked.set_output(output.integer<std::int32_t>(0));
    if (auto tokens = object.optional("input_tok_ids")) {
      Prompt prompt;
      prompt.tokens = read_token_ids(tokens);
      check_count(tokens, prompt.tokens.size(), linked.prompt_tokens);
      prompt.runs.push_back({.kind = TokenRun::Kind::literal,
                             .seed = 0,
                             .first = 0,
                             .count = static_cast<std::uint32_t>(prompt.tokens.size())});
      linked.request.spec.prompt = std::move(prompt);
      linked.prompt_tokens = 0;
    }
    if (auto tokens = object.optional("output_tok_ids")) {
      linked.request.output.tokens = read_token_ids(tokens);
      check_count(tokens, linked.request.output.tokens.size(),
                  linked.has_no_output ? 0 : linked.request.output.length);
    }
    return linked;
  }

  static void check_count(JsonValue value, std::size_t found, std::int64_t expected) {
    if (static_cast<std::int64_t>(found) != expected)
      value.refuse_because(
          fmt::format("found {} tokens; expected {}, as the row says", found, expected));
  }

  // One call after the other; a tool runs between two of them.
  void read_session(JsonObject& object) {
    const std::string session(object.required("session_id").nonempty_string());
    const std::int64_t start_ns = object.required("arrival_time_ns").integer(0, kSpanMaxNs);
    std::int64_t tool_ns = 0;
    std::int64_t turn = 0;
    for (JsonValue call : object.required("sub_requests").array()) {
      JsonObject sub_request = call.object();
      LinkedRequest linked = read_call(sub_request);
      linked.t_ns = start_ns;
      linked.request.spec.name = fmt::format("{}/{}", session, turn);
      if (turn++ > 0) {
        linked.waits_for = {requests_.size() - 1};
        linked.request.delay_ns = tool_ns;
      }
      JsonValue tool = sub_request.optional("tool_duration_ns");
      tool_ns = tool && !tool.is_null() ? tool.integer(0, kSpanMaxNs) : 0;
      sub_request.finish();
      requests_.push_back(std::move(linked));
    }
    object.finish();
  }

  const ImportOptions& options_;
  std::vector<LinkedRequest> requests_;
  std::int64_t line_ = 1;
};

}  // namespace

Result<std::unique_ptr<TraceReader>> open_llmservingsim(const std::string& path,
                                                        const ImportOptions& options) {
  ServingSimReader reader(options);
  ReadNotes notes;
  LS_RETURN_IF_ERROR(for_each_row(path, options, notes, [&](JsonValue value, std::int64_t line) {
    reader.read_row(value, line);
  }));
  return in_order(path, header_of("llmservingsim", path), reader.take(), options, std::move(notes));
}

}  // namespace lockstep
