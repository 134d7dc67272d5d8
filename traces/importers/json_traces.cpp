// Traces in JSON whose requests may wait for each other: Bailian's chats, Dynamo's sessions,
// LLMServingSim's sessions and Weka's conversations. Each reader collects the whole file into a
// list of linked requests; request_graph.h orders it.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "traces/formats/prompt_json.h"
#include "traces/importers/foreign_rows.h"
#include "traces/importers/foreign_traces.h"
#include "traces/importers/request_graph.h"

namespace lockstep {
namespace {

// The chats of a Bailian trace.
//
// Invariants
// (1) requests, parents and turns have one entry per row, in file order.
// (2) place_of maps each chat_id to its row.
struct BailianChats {
  // The file's convention: its last id covers the remainder. in_order() gets `floor`, since the ids
  // of partial blocks are dropped.
  HashIdConvention read_as;
  std::vector<LinkedRequest> requests;
  // chat_id of each chat's parent; -1: none.
  std::vector<std::int64_t> parents;
  std::vector<std::int64_t> turns;
  std::unordered_map<std::int64_t, std::size_t> place_of;
  WideIds wide;

  void read_row(JsonValue value, std::int64_t line, const ImportOptions& options) {
    JsonObject object = value.object();
    JsonValue chat = object.required("chat_id");
    const std::int64_t chat_id = chat.integer(0);
    if (!place_of.emplace(chat_id, requests.size()).second) chat.refuse("a chat_id that is new");
    parents.push_back(object.required("parent_chat_id").integer(-1));
    turns.push_back(object.required("turn").integer(1));
    object.required("type").string();
    LinkedRequest linked{.keeps_time = true, .line = line};
    linked.request.spec.name = fmt::format("chat{}", chat_id);
    linked.t_ns = read_arrival_ns(object, "timestamp", kDigitsOfSeconds, options);
    linked.prompt_tokens = object.required("input_length").integer(1, kPromptTokensMax);
    linked.set_output(object.required("output_length").integer<std::int32_t>(0));
    linked.hash_ids =
        read_hash_ids(object.required("hash_ids"), linked.prompt_tokens, read_as, wide);
    // The id of a block that is not full may stand for padding: the next turn, whose prompt starts
    // with the same tokens, has another id there.
    if (linked.prompt_tokens % read_as.block_tokens != 0 && !linked.hash_ids.empty())
      linked.hash_ids.pop_back();
    object.finish();
    requests.push_back(std::move(linked));
  }

  // Links chats to their parents. A part of a trace starts in the middle of conversations, so a
  // parent that is not in the file counts as none.
  Result<void> link(const std::string& path) {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const auto parent = place_of.find(parents[i]);
      if (parent == place_of.end()) continue;
      requests[i].waits_for.push_back(parent->second);
    }
    return check_turns(path);
  }

  // Refuses a chat whose turn is not above its parent's. Chats that precede their parent in time
  // are left to in_order(), which names both.
  Result<void> check_turns(const std::string& path) const {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      for (const std::size_t parent : requests[i].waits_for) {
        // Chats that follow each other in a cycle have no turns; in_order() names them.
        if (turns[parent] < turns[i] || requests[parent].t_ns >= requests[i].t_ns) continue;
        return fail(
            "{}:{}: field `turn`: found {}; expected more than {}, the turn of its parent_chat_id",
            path, requests[i].line, turns[i], turns[parent]);
      }
    }
    return {};
  }
};

}  // namespace

Result<std::unique_ptr<TraceReader>> open_bailian(const std::string& path,
                                                  const ImportOptions& options) {
  BailianChats chats;
  chats.read_as = {.block_tokens = options.block_tokens.value_or(16), .tail = IdTail::ceil};
  ReadNotes notes;
  if (!options.block_tokens)
    notes.assumed.emplace_back("ids of 16 tokens, as Bailian's (--import block=N)");
  LS_RETURN_IF_ERROR(for_each_row(path, options, notes, [&](JsonValue value, std::int64_t line) {
    chats.read_row(value, line, options);
  }));
  LS_RETURN_IF_ERROR(chats.link(path));
  const HashIdConvention kept{.block_tokens = chats.read_as.block_tokens, .tail = IdTail::floor};
  return in_order(path, header_of("bailian", path, kept), std::move(chats.requests), options,
                  std::move(notes));
}

namespace {

// Reads Dynamo's request trace.
//
// Invariants
// (1) All rows have the first row's block size.
// (2) All rows have an agent_context, or none does: sessions are linked only in the first case.
class DynamoReader {
 public:
  explicit DynamoReader(const ImportOptions& options) : options_(options) {}

  // Reads an event; only the end of a request is used, as it has both times.
  void read_record(JsonValue value, std::int64_t line) {
    JsonObject object = value.object();
    JsonValue schema = object.required("schema");
    if (schema.string() != kDynamoSchema) schema.refuse(fmt::format("\"{}\"", kDynamoSchema));
    JsonValue type = object.required("event_type");
    object.optional("event_source");
    JsonValue event_time = object.required("event_time_unix_ms");
    // Time that tools took is part of the time between two requests.
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

  // 16 for a file without requests, whose convention has no effect.
  HashIdConvention convention() const {
    return {.block_tokens = block_tokens_.value_or(16), .tail = IdTail::ceil};
  }

  // Returns the requests with times since the first arrival. An end before its start, as clocks of
  // two machines may state, counts as its start.
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
  // entries() marks all keys as known: harnesses add their own.
  static void read_context(JsonValue value, AgentRequest& request) {
    JsonObject context = value.object();
    request.session = context.required("session_id").nonempty_string();
    JsonValue parent = context.optional("parent_session_id");
    if (parent && !parent.is_null()) request.parent = parent.nonempty_string();
    context.entries();
  }

  // Measurements of the recorded server are known keys that a replay does not use.
  void read_request(JsonValue value, AgentRequest& request) {
    JsonObject object = value.object();
    LinkedRequest& linked = request.linked;
    linked.request.spec.name = object.required("request_id").nonempty_string();
    // Links of sessions follow from times, which all requests therefore keep until then.
    linked.t_ns = is_agents_
                      ? read_span_ns(object.required("request_received_ms"), kDigitsOfMs)
                      : read_arrival_ns(object, "request_received_ms", kDigitsOfMs, options_);
    linked.set_output(object.required("output_tokens").integer<std::int32_t>(0));
    for (const char* told :
         {"x_request_id", "model", "input_tokens", "cached_tokens", "prefill_wait_time_ms",
          "prefill_time_ms", "ttft_ms", "total_time_ms", "avg_itl_ms", "kv_hit_rate", "queue_depth",
          "worker", "finish_reason_metadata"})
      object.optional(told);
    read_replay(object.required("replay"), linked);
    object.finish();
  }

  // The part that makes a request replayable. Hashes have any 64 bits, so they are numbered by an
  // IdTable.
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

namespace {

// Reads LLMServingSim's files: workloads with all tokens, agentic ones in sessions, and the
// requests of a recorded run, which a row's keys tell apart.
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

  // Returns the requests with times since the first arrival: a recording has absolute times.
  std::vector<LinkedRequest> take() {
    std::int64_t first_ns = kSpanMaxNs;
    for (const LinkedRequest& linked : requests_) first_ns = std::min(first_ns, linked.t_ns);
    for (LinkedRequest& linked : requests_) linked.t_ns -= first_ns;
    return std::move(requests_);
  }

 private:
  // Reads one call of the model. With token ids the prompt is literal and prompt_tokens is 0, which
  // marks it as complete.
  LinkedRequest read_call(JsonObject& object) {
    LinkedRequest linked;
    linked.line = line_;
    linked.prompt_tokens = object.required("input_toks").integer(1, kPromptTokensMax);
    JsonValue output = object.required("output_toks");
    linked.set_output(output.integer<std::int32_t>(0));
    if (auto tokens = object.optional("input_tok_ids")) {
      Prompt prompt;
      append_tokens(prompt, read_token_ids(tokens));
      check_count(tokens, prompt.tokens.size(), linked.prompt_tokens);
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

  // The lengths are stated twice: a difference means that the row is damaged.
  static void check_count(JsonValue value, std::size_t found, std::int64_t expected) {
    if (static_cast<std::int64_t>(found) != expected)
      value.refuse_because(
          fmt::format("found {} tokens; expected {}, as the row says", found, expected));
  }

  // Reads a session: calls in sequence, with the duration of a tool between two of them. Only the
  // session has an arrival; a call waits for the previous one.
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

namespace {

// Reads conversations of coding agents; a file has one or many.
//
// Invariants
// (1) All conversations have the same block size and scope of ids.
// (2) Times of all sub-agents count from the same start.
class WekaReader {
 public:
  void read_conversation(JsonValue value, std::int64_t line) {
    line_ = line;
    JsonObject object = value.object();
    id_ = object.required("id").nonempty_string();
    if (!conversations_.insert(id_).second)
      object.required("id").refuse(
          "a new conversation: editions with and without sub-agents share ids and cannot be mixed");
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

  // Returns the assumptions about keys that the file does not have.
  std::vector<std::string> assumed() const {
    std::vector<std::string> all;
    if (!says_scope_)
      all.push_back("ids are local to a conversation: the file has no hash_id_scope");
    if (is_relative_)
      all.push_back(fmt::format(
          "times in a sub-agent count from the start of its {}: {}",
          *is_relative_ ? "own" : "conversation",
          *is_relative_ ? "some are before the sub-agent's" : "none is before the sub-agent's"));
    return all;
  }

  // REQUIRES: a conversation has been read without an error.
  HashIdConvention convention() const { return *ids_; }
  std::vector<LinkedRequest> take() { return link_sessions(std::move(requests_)); }

 private:
  // Tail `floor`: tokens after the last whole block have no id.
  void read_block_size(JsonObject& object) {
    JsonValue value = object.required("block_size");
    const auto tokens = value.integer<std::int32_t>(1);
    if (!ids_) ids_ = {.block_tokens = tokens, .tail = IdTail::floor};
    if (tokens != ids_->block_tokens)
      value.refuse(fmt::format("{}, as in the first conversation", ids_->block_tokens));
  }

  // Ids of two conversations are equal only where the file declares a global scope. scope_ 0 is the
  // global one; local scopes count from 1.
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

  // Reads a request of the conversation, or a sub-agent with its own requests.
  void read_entry(JsonValue value, std::int64_t place) {
    JsonObject object = value.object();
    JsonValue type = object.required("type");
    if (type.string() == "subagent") return read_sub_agent(object);
    read_request(value, id_, {}, fmt::format("{}/{}", id_, place));
  }

  // A sub-agent is a session of its own, started by the conversation.
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

  // Converts the times of a sub-agent's requests, those from index `first` on, to the
  // conversation's clock. Editions of the data differ in the start from which they count: a time
  // before the sub-agent's own start shows that it counts from there. A file has one kind only; a
  // sub-agent that starts at 0 fits both.
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
            fmt::format("found times that count from the start of the {}; those of an earlier "
                        "sub-agent do not: two editions cannot be mixed",
                        is_relative ? "sub-agent" : "conversation"));
    }
    for (std::size_t i = first; is_relative && i < requests_.size(); ++i) {
      requests_[i].linked.t_ns += start_ns;
      requests_[i].end_ns += start_ns;
    }
  }

  // Reads a request of `session`. Its end is the start plus api_time; without one, the start.
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

// Shards are read one by one, since each may be a document over many lines.
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
