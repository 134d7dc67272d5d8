#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <unordered_set>

#include "traces/formats/prompt_json.h"
#include "traces/importers/foreign_rows.h"
#include "traces/importers/foreign_traces.h"
#include "traces/importers/request_graph.h"

namespace lockstep {
namespace {

// One conversation; a file holds one or many.
class WekaReader {
 public:
  void read_conversation(JsonValue value, std::int64_t line) {
    line_ = line;
    JsonObject object = value.object();
    id_ = object.required("id").nonempty_string();
    if (!conversations_.insert(id_).second)
      object.required("id").refuse(
          "a conversation that is not in the file yet: editions with and "
          "without sub-agents have the same ids, and do not mix");
    object.optional("models");
    read_block_size(object);
    read_scope(object);
    object.optional("tool_tokens");
    object.optional("system_tokens");
    object.optional("totals");
    std::int64_t place = 0;
    for (JsonValue request : object.required("requests").array()) read_entry(request, place++);
    object.finish();
  }

  // Guesses about keys that the file need not have.
  std::vector<std::string> assumed() const {
    std::vector<std::string> all;
    if (!says_scope_)
      all.push_back("ids of one conversation are not those of another: no hash_id_scope says more");
    if (is_relative_)
      all.push_back(fmt::format(
          "times in a sub-agent count from the start of its {}: {}",
          *is_relative_ ? "own" : "conversation",
          *is_relative_ ? "some are before the sub-agent's" : "none is before the sub-agent's"));
    return all;
  }

  HashIdConvention convention() const { return *ids_; }
  std::vector<LinkedRequest> take() { return link_sessions(std::move(requests_)); }

 private:
  void read_block_size(JsonObject& object) {
    JsonValue value = object.required("block_size");
    const auto tokens = value.integer<std::int32_t>(1);
    if (!ids_) ids_ = {.block_tokens = tokens, .tail = IdTail::floor};
    if (tokens != ids_->block_tokens)
      value.refuse(fmt::format("{}, as in the first conversation", ids_->block_tokens));
  }

  // Ids of two conversations are the same only where the file declares it.
  void read_scope(JsonObject& object) {
    bool is_global = false;
    JsonValue scope = object.optional("hash_id_scope");
    constexpr JsonWord<bool> kScopes[] = {{"local", false}, {"global", true}};
    if (scope) is_global = scope.word<bool>(kScopes);
    says_scope_ |= static_cast<bool>(scope);
    if (!is_global_) is_global_ = is_global;
    if (is_global != *is_global_) scope.refuse("the scope of the first conversation");
    scope_ = is_global ? 0 : conversations_.size();
  }

  void read_entry(JsonValue value, std::int64_t place) {
    JsonObject object = value.object();
    JsonValue type = object.required("type");
    if (type.string() == "subagent") return read_sub_agent(object);
    read_request(value, id_, {}, fmt::format("{}/{}", id_, place));
  }

  void read_sub_agent(JsonObject& object) {
    const std::int64_t start_ns = read_span_ns(object.required("t"), kDigitsOfSeconds);
    const std::string session =
        fmt::format("{}/{}", id_, object.required("agent_id").nonempty_string());
    for (const char* told : {"subagent_type", "duration_ms", "total_tokens", "tool_use_count",
                             "status", "models", "tool_tokens", "system_tokens"})
      object.optional(told);
    JsonValue inner = object.required("requests");
    const std::size_t first = requests_.size();
    std::int64_t place = 0;
    for (JsonValue request : inner.array())
      read_request(request, session, id_, fmt::format("{}/{}", session, place++));
    object.finish();
    place_in_time(inner, first, start_ns);
  }

  // Times inside a sub-agent count from its start, or from that of the conversation: one of the two
  // in a whole file.
  void place_in_time(JsonValue inner, std::size_t first, std::int64_t start_ns) {
    if (first == requests_.size()) return;
    std::int64_t earliest = requests_[first].linked.t_ns;
    for (std::size_t i = first; i < requests_.size(); ++i)
      earliest = std::min(earliest, requests_[i].linked.t_ns);
    const bool is_relative = earliest < start_ns;
    if (start_ns > 0) {
      if (!is_relative_) is_relative_ = is_relative;
      if (is_relative != *is_relative_)
        inner.refuse_because(
            fmt::format("found times that count from the start of the {}; those of a sub-agent "
                        "above count from the other: two editions do not mix",
                        is_relative ? "sub-agent" : "conversation"));
    }
    for (std::size_t i = first; is_relative && i < requests_.size(); ++i) {
      requests_[i].linked.t_ns += start_ns;
      requests_[i].end_ns += start_ns;
    }
  }

  void read_request(JsonValue value, const std::string& session, const std::string& parent,
                    std::string name) {
    JsonObject object = value.object();
    AgentRequest request{.session = session, .parent = parent, .end_ns = 0, .linked = {}};
    LinkedRequest& linked = request.linked;
    JsonValue type = object.required("type");
    if (const auto word = type.string(); word != "n" && word != "s")
      type.refuse("\"n\", \"s\", or outside of a sub-agent \"subagent\"");
    for (const char* told : {"model", "input_types", "output_types", "stop", "think_time", "ttft"})
      object.optional(told);
    linked.line = line_;
    linked.t_ns = read_span_ns(object.required("t"), kDigitsOfSeconds);
    request.end_ns = linked.t_ns;
    if (auto took = object.optional("api_time"); took && !took.is_null())
      request.end_ns += read_span_ns(took, kDigitsOfSeconds);
    linked.prompt_tokens = object.required("in").integer(1, kPromptTokensMax);
    linked.set_output(object.required("out").integer<std::int32_t>(0));
    linked.hash_ids = ids_table_.ids_of(
        scope_, read_hash_ids(object.required("hash_ids"), linked.prompt_tokens, *ids_, wide_));
    object.finish();
    linked.request.spec.name = std::move(name);
    requests_.push_back(std::move(request));
  }

  std::optional<HashIdConvention> ids_;
  std::optional<bool> is_global_;
  bool says_scope_ = false;
  std::optional<bool> is_relative_;
  std::unordered_set<std::string> conversations_;
  IdTable ids_table_;
  WideIds wide_;
  std::vector<AgentRequest> requests_;
  std::string id_;  // of the conversation being read
  std::uint64_t scope_ = 0;
  std::int64_t line_ = 1;
};

}  // namespace

Result<std::unique_ptr<TraceReader>> open_weka(const std::string& path,
                                               const ImportOptions& options) {
  WekaReader reader;
  ReadNotes notes;
  const auto read = [&](JsonValue value, std::int64_t line) {
    reader.read_conversation(value, line);
  };
  LS_RETURN_IF_ERROR(for_each_document(path, options, notes, read));
  for (const std::string& shard : options.shards)
    LS_RETURN_IF_ERROR(for_each_document(shard, options, notes, read));
  std::ranges::move(reader.assumed(), std::back_inserter(notes.assumed));
  return in_order(path, header_of("weka", path, reader.convention()), reader.take(), options,
                  std::move(notes));
}

}  // namespace lockstep
