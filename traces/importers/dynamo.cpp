#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "traces/formats/prompt_json.h"
#include "traces/importers/foreign_rows.h"
#include "traces/importers/foreign_traces.h"
#include "traces/importers/request_graph.h"

namespace lockstep {
namespace {

class DynamoReader {
 public:
  explicit DynamoReader(const ImportOptions& options) : options_(options) {}

  void read_record(JsonValue value, std::int64_t line) {
    JsonObject object = value.object();
    JsonValue schema = object.required("schema");
    if (schema.string() != kDynamoSchema) schema.refuse(fmt::format("\"{}\"", kDynamoSchema));
    JsonValue type = object.required("event_type");
    object.optional("event_source");
    JsonValue event_time = object.required("event_time_unix_ms");
    // What tools took is in the time between two requests.
    if (type.string() != "request_end") return;
    AgentRequest request;
    request.linked.line = line;
    request.end_ns = read_span_ns(event_time, kDigitsOfMs);
    JsonValue context = object.optional("agent_context");
    const bool is_agent = context && !context.is_null();
    if (requests_.empty()) is_agents_ = is_agent;
    if (is_agent != is_agents_)
      object.refuse_because(fmt::format("found {} agent_context; all rows have one, or none",
                                        is_agent ? "an" : "no"));
    read_request(object.required("request"), request);
    if (is_agent) read_context(context, request);
    object.finish();
    requests_.push_back(std::move(request));
  }

  HashIdConvention convention() const {
    return {.block_tokens = block_tokens_.value_or(16), .tail = IdTail::ceil};
  }

  std::vector<LinkedRequest> take() {
    std::int64_t first_ns = kSpanMaxNs;
    for (const AgentRequest& request : requests_)
      first_ns = std::min(first_ns, request.linked.t_ns);
    for (AgentRequest& request : requests_) {
      request.linked.t_ns -= first_ns;
      request.end_ns = std::max(request.end_ns - first_ns, request.linked.t_ns);
    }
    if (is_agents_) return link_sessions(std::move(requests_));
    std::vector<LinkedRequest> linked;
    for (AgentRequest& request : requests_) linked.push_back(std::move(request.linked));
    return linked;
  }

 private:
  static void read_context(JsonValue value, AgentRequest& request) {
    JsonObject context = value.object();
    request.session = context.required("session_id").nonempty_string();
    JsonValue parent = context.optional("parent_session_id");
    if (parent && !parent.is_null()) request.parent = parent.nonempty_string();
    context.entries();  // what else a harness says about itself
  }

  void read_request(JsonValue value, AgentRequest& request) {
    JsonObject object = value.object();
    LinkedRequest& linked = request.linked;
    linked.request.spec.name = object.required("request_id").nonempty_string();
    linked.t_ns = read_arrival_ns(object, "request_received_ms", kDigitsOfMs, options_);
    linked.set_output(object.required("output_tokens").integer<std::int32_t>(0));
    for (const char* told :
         {"x_request_id", "model", "input_tokens", "cached_tokens", "prefill_wait_time_ms",
          "prefill_time_ms", "ttft_ms", "total_time_ms", "avg_itl_ms", "kv_hit_rate", "queue_depth",
          "worker", "finish_reason_metadata"})
      object.optional(told);
    read_replay(object.required("replay"), linked);
    object.finish();
  }

  void read_replay(JsonValue value, LinkedRequest& linked) {
    JsonObject object = value.object();
    JsonValue block = object.required("trace_block_size");
    const auto tokens = block.integer<std::int32_t>(1);
    if (!block_tokens_) block_tokens_ = tokens;
    if (tokens != *block_tokens_)
      block.refuse(fmt::format("{}, as in the first row", *block_tokens_));
    linked.prompt_tokens = object.required("input_length").integer(1, kPromptTokensMax);
    JsonValue hashes = object.required("input_sequence_hashes");
    std::vector<std::uint64_t> found;
    for (JsonValue hash : hashes.array()) found.push_back(hash.uint64());
    check_id_count(hashes, found.size(), linked.prompt_tokens, convention());
    object.optional("completion_sequence_hashes");
    linked.hash_ids = ids_.ids_of(0, found);
    object.finish();
  }

  const ImportOptions& options_;
  std::optional<std::int32_t> block_tokens_;
  bool is_agents_ = false;
  IdTable ids_;
  std::vector<AgentRequest> requests_;
};

}  // namespace

Result<std::unique_ptr<TraceReader>> open_dynamo(const std::string& path,
                                                 const ImportOptions& options) {
  DynamoReader reader(options);
  ReadNotes notes;
  LS_RETURN_IF_ERROR(for_each_row(path, options, notes, [&](JsonValue value, std::int64_t line) {
    reader.read_record(value, line);
  }));
  return in_order(path, header_of("dynamo", path, reader.convention()), reader.take(), options,
                  std::move(notes));
}

}  // namespace lockstep
