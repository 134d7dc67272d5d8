// Traces of Mooncake's kind and their dialects. Rows without links are streamed (MooncakeReader);
// files with sessions or waits are collected and ordered (LinkedRows). dialect_of() decides between
// them by the first rows.
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <unordered_map>

#include "base/json_reader.h"
#include "base/line_reader.h"
#include "base/number_text.h"
#include "traces/formats/prompt_json.h"
#include "traces/importers/foreign_rows.h"
#include "traces/importers/foreign_traces.h"
#include "traces/importers/request_graph.h"

namespace lockstep {
namespace {

constexpr std::int32_t kMooncakeBlock = 512;
constexpr std::int32_t kTimedTraceBlock = 16;
// An answer that the next prompt contains is written token by token into the trace, hence the
// limit.
constexpr std::int32_t kAnswerTokensMax = 1 << 20;

// Keys of the first row that announce links between rows.
constexpr const char* kLinkKeys[] = {"session_id", "request_id", "wait_for", "extra"};

// Interpretation of a file's rows.
struct Dialect {
  HashIdConvention ids{.block_tokens = kMooncakeBlock, .tail = IdTail::ceil};
  // Decimal digits from a timestamp's unit to nanoseconds.
  int digits = kDigitsOfMs;
  std::string kind = "mooncake";
  // True if rows have names, sessions, and names of rows that they wait for.
  bool is_linked = false;
  // True if the prompt of a later turn has only the new tokens.
  bool turns_are_added = false;
  // False with Arrivals::closed, for which rows need no times.
  bool has_times = true;
  ReadNotes notes = {};  // assumptions of dialect_of()
};

// A row as read; absent times and delays are distinguished from 0, since sessions treat them
// differently.
struct MooncakeRow {
  LinkedRequest linked;
  std::optional<std::int64_t> t_ns;
  std::optional<std::int64_t> delay_ns;
  std::string request_id;
  std::string session;
  std::vector<std::string> wait_for;
};

// Refuses rows with texts instead of lengths and ids.
void refuse_text(JsonObject& object) {
  for (const char* key : {"text_input", "messages", "payload"})
    if (JsonValue text = object.optional(key))
      text.refuse_because(
          "found text; expected input_length and hash_ids: only the model's tokenizer can count "
          "the tokens of a text");
}

// Reads parameters that AIPerf adds to a request's body, as far as a scheduler depends on them.
// ignore_eos is implied: a request ends by its length.
void read_extra(JsonValue value, RequestSpec& spec) {
  JsonObject extra = value.object();
  if (auto ignores = extra.optional("ignore_eos")) ignores.boolean();
  if (auto tokens = extra.optional("min_tokens"))
    spec.min_tokens = tokens.integer<std::int32_t>(0, kPromptTokensMax);
  if (auto priority = extra.optional("priority")) spec.priority = priority.integer<std::int64_t>();
  if (auto salt = extra.optional("cache_salt")) spec.cache_salt = salt.nonempty_string();
  extra.finish();
}

// `delay` and `tool_wait_ms` are added: both pass between the previous answer and this request.
void read_links(JsonObject& object, MooncakeRow& row) {
  if (auto id = object.optional("request_id")) row.request_id = id.nonempty_string();
  if (auto session = object.optional("session_id")) row.session = session.nonempty_string();
  if (auto delay = optional_alias(object, "delay", "delay_ms"))
    row.delay_ns = read_span_ns(delay, kDigitsOfMs);
  if (auto tool = object.optional("tool_wait_ms"))
    row.delay_ns = row.delay_ns.value_or(0) + read_span_ns(tool, kDigitsOfMs);
  if (auto names = object.optional("wait_for"))
    for (JsonValue name : names.array()) row.wait_for.emplace_back(name.nonempty_string());
  if (auto type = object.optional("type"); type && type.string() != "mooncake_trace")
    type.refuse("\"mooncake_trace\"");
  if (auto extra = object.optional("extra")) read_extra(extra, row.linked.request.spec);
  // Keys of routers and harnesses, which engines do not receive. A server's priority is in `extra`.
  for (const char* told :
       {"group_id", "is_restart", "parent_session_id", "request_kind", "branches", "prefix_reset",
        "tool_events", "priority", "strict_priority", "policy_class", "routing_constraints"})
    object.optional(told);
}

// Reads the recorded answer; its length must be the row's output_length.
void read_answer(JsonValue tokens, OutputPlan& output) {
  output.tokens = read_token_ids(tokens);
  if (std::ssize(output.tokens) != output.length)
    tokens.refuse_because(fmt::format("found {} tokens; expected {}, the output_length",
                                      output.tokens.size(), output.length));
}

// Reads a row by the dialect. A link in a file whose first row has none is refused: such rows would
// otherwise arrive without waiting.
MooncakeRow read_mooncake_row(JsonValue value, std::int64_t line, const Dialect& dialect,
                              WideIds& wide) {
  JsonObject object = value.object();
  MooncakeRow row;
  LinkedRequest& linked = row.linked;
  linked.line = line;
  refuse_text(object);
  if (dialect.is_linked) read_links(object, row);
  for (const char* key : kLinkKeys)
    if (JsonValue link = dialect.is_linked ? JsonValue() : object.optional(key))
      link.refuse_because("found a link to other rows; the first row of the file has none");
  JsonValue time = optional_alias(object, "timestamp", "created_time");
  if (!time && !dialect.is_linked && dialect.has_times)
    object.refuse_because(
        "found no key \"timestamp\"; expected it, or --import arrival=closed: all arrive at once");
  if (time && dialect.has_times)
    row.t_ns = dialect.is_linked ? read_span_ns(time, dialect.digits)
                                 : time.scaled_decimal(dialect.digits);
  linked.prompt_tokens =
      required_alias(object, "input_length", "input_tokens").integer(1, kPromptTokensMax);
  linked.set_output(
      required_alias(object, "output_length", "output_tokens").integer<std::int32_t>(0));
  if (auto tokens = dialect.is_linked ? object.optional("output_token_ids") : JsonValue())
    read_answer(tokens, linked.request.output);
  if (linked.request.spec.min_tokens > linked.request.spec.max_tokens)
    object.refuse_because(fmt::format("found min_tokens {}; expected at most the output_length, {}",
                                      linked.request.spec.min_tokens,
                                      linked.request.spec.max_tokens));
  if (auto ids = object.optional("hash_ids"))
    linked.hash_ids = read_hash_ids(ids, linked.prompt_tokens, dialect.ids, wide);
  object.finish();
  return row;
}

// Streams rows without links.
//
// Invariants
// (1) last_t_ns_ is the previous row's time; times never decrease.
// (2) Equal ids of different rows have equal seeds: all rows share one WideIds.
class MooncakeReader final : public ImportReader {
 public:
  MooncakeReader(LineReader&& lines, const ImportOptions& options, Dialect dialect)
      : ImportReader(std::move(lines), options, dialect.kind),
        json_(lines_.path()),
        dialect_(std::move(dialect)) {
    header_.ids = dialect_.ids;
    notes_ = std::move(dialect_.notes);
    json_.skip_unknown_keys(notes_.skipped);
  }

 private:
  Result<ImportedRow> read_row(std::string_view line) override {
    ImportedRow row;
    json_.set_file(lines_.path());
    if (json_.parse(line, lines_.number(), lines_.is_cut_off())) row = row_of(json_.root());
    if (!json_.ok()) return json_.failure();
    last_t_ns_ = row.t_ns;
    return row;
  }

  // Refusals that need a key's position read the object again: required_alias() returns the same
  // value.
  ImportedRow row_of(JsonValue value) {
    const MooncakeRow found = read_mooncake_row(value, lines_.number(), dialect_, wide_);
    ImportedRow row;
    if (!json_.ok()) return row;
    JsonObject object = value.object();
    row.t_ns = found.t_ns.value_or(0);
    if (row.t_ns < last_t_ns_)
      required_alias(object, "timestamp", "created_time")
          .refuse("a time not before that of the row above, and not below 0");
    if (found.linked.has_no_output && options_.zero_output == ZeroOutput::refuse)
      required_alias(object, "output_length", "output_tokens").refuse("at least one output token");
    if (!found.linked.has_no_output) row.output_length = found.linked.request.output.length;
    row.prompt = object.has("hash_ids")
                     ? prompt_of_hash_ids(found.linked.hash_ids, found.linked.prompt_tokens,
                                          dialect_.ids, ordinal_)
                           .value()
                     : private_prompt(found.linked.prompt_tokens, ordinal_);
    return row;
  }

  JsonReader json_;
  Dialect dialect_;
  WideIds wide_;
  std::int64_t last_t_ns_ = 0;
};

// Collects rows of sessions and rows that name the requests that they wait for.
//
// Invariants
// (1) requests_ has one entry per row, in file order; place_of_ and waits_ refer to it by index.
// (2) A turn waits for the previous turn of its session, unless it names other requests.
class LinkedRows {
 public:
  explicit LinkedRows(const Dialect& dialect) : dialect_(dialect) {}

  void read_row(JsonValue value, std::int64_t line) {
    MooncakeRow row = read_mooncake_row(value, line, dialect_, wide_);
    LinkedRequest& linked = row.linked;
    linked.t_ns = row.t_ns.value_or(0);
    linked.request.delay_ns = row.delay_ns.value_or(0);
    std::string name = std::move(row.request_id);
    if (!row.session.empty()) {
      Session& session = sessions_[row.session];
      if (name.empty())
        name = session.turns == 0 ? row.session : fmt::format("{}/{}", row.session, session.turns);
      if (session.turns > 0 && row.wait_for.empty()) {
        linked.waits_for = {session.last};
        // Without a delay, the difference of both timestamps is the delay. It includes the previous
        // answer's duration, so the request tends to be late; assumed() reports it.
        const std::int64_t before_ns = requests_[session.last].t_ns;
        has_guessed_delays_ |= !row.delay_ns && row.t_ns;
        if (!row.delay_ns && row.t_ns) linked.request.delay_ns = *row.t_ns - before_ns;
        if (linked.request.delay_ns < 0)
          value.refuse_because(
              "found a turn before that of its session above; expected a later timestamp, or a "
              "delay");
        // The order of requests must not put a turn before its predecessor.
        linked.t_ns = std::max(linked.t_ns, before_ns);
      }
      if (dialect_.turns_are_added) add_to(session, linked, value);
      ++session.turns;
      session.last = requests_.size();
    }
    if (name.empty()) name = fmt::format("r{}", requests_.size());
    // The first of two equal names; in_order() refuses the second.
    place_of_.try_emplace(name, requests_.size());
    for (std::string& other : row.wait_for)
      waits_.push_back({.who = requests_.size(), .for_whom = std::move(other)});
    linked.request.spec.name = std::move(name);
    requests_.push_back(std::move(linked));
  }

  std::size_t num_sessions() const { return sessions_.size(); }
  bool has_guessed_delays() const { return has_guessed_delays_; }

  // Resolves the names in wait_for and returns the requests. A name may refer to a later row;
  // in_order() detects cycles.
  Result<std::vector<LinkedRequest>> take(const std::string& path) {
    for (const Wait& wait : waits_) {
      const auto found = place_of_.find(wait.for_whom);
      LinkedRequest& who = requests_[wait.who];
      if (found == place_of_.end())
        return fail("{}:{}: field `wait_for`: found \"{}\"; expected the request_id of a row", path,
                    who.line, printable_excerpt(wait.for_whom));
      if (std::ranges::find(who.waits_for, found->second) == who.waits_for.end())
        who.waits_for.push_back(found->second);
    }
    return std::move(requests_);
  }

 private:
  // The turns of a session so far.
  struct Session {
    std::int64_t turns = 0;
    std::size_t last = 0;
    // With added turns: the conversation so far.
    Prompt prompt;
  };
  struct Wait {
    std::size_t who;
    std::string for_whom;
  };

  // Appends to the session's prompt the previous answer and the new tokens of this turn, and makes
  // the result the request's prompt. Tokens of an answer that the file does not state are generated
  // here and planned as the previous request's output, so that the next prompt hits its blocks.
  void add_to(Session& session, LinkedRequest& linked, JsonValue value) {
    if (session.turns > 0) {
      LinkedRequest& before = requests_[session.last];
      OutputPlan& answer = before.request.output;
      if (answer.length > kAnswerTokensMax) {
        value.refuse_because(
            fmt::format("found an answer of {} tokens before this turn; expected at most {}",
                        answer.length, kAnswerTokensMax));
        return;
      }
      if (answer.tokens.empty()) {
        const TokenRun run = own_run(answer.length);
        Prompt tokens;
        tokens.append(run);
        answer.tokens = tokens.materialize();
        session.prompt.append(run);
      } else {
        append_tokens(session.prompt, answer.tokens);
      }
    }
    if (linked.hash_ids.empty()) {
      session.prompt.append(own_run(linked.prompt_tokens));
    } else if (const auto added =
                   prompt_of_hash_ids(linked.hash_ids, linked.prompt_tokens, dialect_.ids, 0)) {
      for (const TokenRun& run : added->runs) session.prompt.append(run);
    }
    if (session.prompt.size() > kPromptTokensMax)
      value.refuse_because(fmt::format("found a session of more than {} tokens", kPromptTokensMax));
    linked.request.spec.prompt = session.prompt;
    linked.prompt_tokens = 0;
  }

  // Returns tokens that occur nowhere else, by seeds from 2^31 on. The run is seeded and not
  // symbolic: an answer is also planned as plain output tokens, which must equal those of the next
  // prompt.
  TokenRun own_run(std::int64_t count) {
    return {.kind = TokenRun::Kind::seeded,
            .seed = (std::uint64_t{1} << 31) + own_runs_++,
            .first = 0,
            .count = static_cast<std::uint32_t>(count)};
  }

  Dialect dialect_;
  WideIds wide_;
  bool has_guessed_delays_ = false;
  std::vector<LinkedRequest> requests_;
  std::unordered_map<std::string, Session> sessions_;
  std::unordered_map<std::string, std::size_t> place_of_;
  std::vector<Wait> waits_;
  std::uint64_t own_runs_ = 0;
};

// True if the row's ids could be of `block_tokens` tokens. Rows without length or ids exclude
// nothing.
bool covers(JsonObject& row, std::int32_t block_tokens) {
  JsonValue length = optional_alias(row, "input_length", "input_tokens");
  JsonValue ids = row.optional("hash_ids");
  if (!length || !ids || !ids.is_array() || !length.is_number()) return true;
  return std::ssize(ids.array()) ==
         hash_ids_for(length.integer(1, kPromptTokensMax),
                      {.block_tokens = block_tokens, .tail = IdTail::ceil});
}

// Adds a note about each fact that neither the file nor the command line states; `why` is the row
// that decided it.
void note_guesses(const ImportOptions& options, const std::string& why, Dialect& dialect) {
  std::string guess;
  if (!options.block_tokens) guess = fmt::format("ids of {} tokens", dialect.ids.block_tokens);
  if (!options.time_unit && dialect.has_times)
    guess += fmt::format("{}times in {}", guess.empty() ? "" : ", ",
                         dialect.digits == kDigitsOfMs ? "ms" : "seconds");
  if (guess.empty()) return;
  const std::string_view as = dialect.digits == kDigitsOfMs ? "Mooncake's" : "vLLM's timed traces";
  dialect.notes.assumed.push_back(fmt::format("{}, as {}: {} (--import block=N,time=ms|s)", guess,
                                              as, why.empty() ? "no row says otherwise" : why));
}

// Determines the dialect. The first row decides about links. A row of more than 16 tokens shows
// whether ids are of 512 tokens, as Mooncake's, or of 16, as those of vLLM's timed traces, which
// count seconds: no row fits both. 1,000 tokens: 2 ids or 63.
Result<Dialect> dialect_of(const std::string& path, const ImportOptions& options) {
  LS_ASSIGN_OR_RETURN(auto lines, LineReader::open(path));
  Dialect dialect{.has_times = options.arrivals == Arrivals::recorded};
  std::string_view line;
  std::string why;  // the row that decided
  // Rows of up to 16 tokens have one id in either dialect, so the search continues.
  for (bool is_first = true;; is_first = false) {
    const auto more = lines.next(line);
    JsonReader json(path);
    // The reader reports errors of the file.
    if (!more || !*more || !json.parse(line) || !json.root().is_object()) break;
    JsonObject row = json.root().object();
    if (is_first) {
      for (const char* key : kLinkKeys) dialect.is_linked |= row.has(key);
      dialect.turns_are_added = row.has("group_id");
    }
    // A file with the tokens per id, or with Dynamo's names for the keys, is not a timed trace.
    if (dialect.is_linked || options.block_tokens || !row.has("timestamp")) break;
    if (covers(row, kMooncakeBlock) != covers(row, kTimedTraceBlock) && json.ok()) {
      const bool is_mooncake = covers(row, kMooncakeBlock);
      why = fmt::format(
          "line {} has {} for {}", lines.number(),
          counted(std::ssize(row.optional("hash_ids").array()), "id"),
          counted(optional_alias(row, "input_length", "input_tokens").integer(), "token"));
      if (is_mooncake) break;
      dialect.ids.block_tokens = kTimedTraceBlock;
      dialect.digits = kDigitsOfSeconds;
      dialect.kind = "timed_trace";
      break;
    }
  }
  if (options.block_tokens) dialect.ids.block_tokens = *options.block_tokens;
  if (options.time_unit)
    dialect.digits = *options.time_unit == TimeUnit::s ? kDigitsOfSeconds : kDigitsOfMs;
  note_guesses(options, why, dialect);
  if (options.turns) dialect.turns_are_added = *options.turns == Turns::added;
  return dialect;
}

// Reads a whole file with links. num_sessions: the manifest's number; absent: not stated.
Result<std::unique_ptr<TraceReader>> open_linked(const std::string& path, const Dialect& dialect,
                                                 const ImportOptions& options,
                                                 std::optional<std::size_t> num_sessions) {
  LinkedRows rows(dialect);
  ReadNotes notes = dialect.notes;
  LS_RETURN_IF_ERROR(for_each_row(path, options, notes, [&](JsonValue value, std::int64_t line) {
    rows.read_row(value, line);
  }));
  if (rows.has_guessed_delays())
    notes.assumed.emplace_back("a turn without a delay waits for the difference of the timestamps");
  if (num_sessions && rows.num_sessions() != *num_sessions)
    return fail("{}: found {} sessions; expected {}, as its manifest states", path,
                rows.num_sessions(), *num_sessions);
  LS_ASSIGN_OR_RETURN(auto requests, rows.take(path));
  return in_order(path, header_of(dialect.kind, path, dialect.ids), std::move(requests), options,
                  std::move(notes));
}

}  // namespace

Result<std::unique_ptr<TraceReader>> open_mooncake(const std::string& path,
                                                   const ImportOptions& options) {
  LS_ASSIGN_OR_RETURN(auto dialect, dialect_of(path, options));
  if (dialect.is_linked) return open_linked(path, dialect, options, {});
  LS_ASSIGN_OR_RETURN(auto lines, LineReader::open(path, options.shards));
  return std::make_unique<MooncakeReader>(std::move(lines), options, std::move(dialect));
}

// Reads the block size and the number of sessions; the latter detects a truncated dataset, since
// its lines have no count.
Result<std::unique_ptr<TraceReader>> open_aiperf_manifest(const std::string& path,
                                                          const ImportOptions& options) {
  LS_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, kJsonTextBytesMax));
  JsonReader json(path);
  Dialect dialect{.kind = "aiperf", .is_linked = true, .turns_are_added = true};
  std::size_t num_sessions = 0;
  if (json.parse(text, 1, true)) {
    JsonObject manifest = json.root().object();
    manifest.required("seed");
    manifest.optional("config_name");
    num_sessions = manifest.required("num_sessions").integer<std::size_t>(1, kPromptTokensMax);
    JsonObject made = manifest.required("generation_params").object();
    dialect.ids.block_tokens = made.required("block_size").integer<std::int32_t>(1);
    made.entries();  // what the rows were made from
    manifest.finish();
  }
  if (!json.ok()) return json.failure();
  // The rows are in the manifest's folder.
  const std::string rows =
      path.substr(0, path.size() - file_name_of(path).size()) + std::string(kAiperfRows);
  if (const auto there = LineReader::open(rows); !there)
    return fail("{}: the rows of this manifest: {}", path, there.error().message);
  return open_linked(rows, dialect, options, num_sessions);
}

}  // namespace lockstep
