#include "sim/foreign/foreign_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "sim/foreign/reported_decisions.h"
#include "traces/formats/engine_options.h"
#include "traces/formats/run_field_rows.h"
#include "traces/formats/spec_json.h"

namespace lockstep {

Result<std::unique_ptr<ForeignEngine>> ForeignEngine::start(ForeignEngineOptions options) {
  std::unique_ptr<ForeignEngine> engine(new ForeignEngine(std::move(options)));
  LS_RETURN_IF_ERROR(engine->launch());
  return engine;
}

Result<void> ForeignEngine::launch() {
  failure_.reset();
  num_replies_ = 0;
  LS_ASSIGN_OR_RETURN(process_, LineProcess::start(options_.command));
  const bool said = converse(
      options_.hello, [this](JsonObject& reply) { hello_ = options_.read_hello(reply); }, {},
      options_.start_limit);
  if (said) return {};
  // A failed hello is an Error of the start, not a failure in a case.
  const EngineFailure failure = std::exchange(failure_, std::nullopt).value();
  // The engine's own message states what is missing, such as a package. The command would add
  // nothing.
  if (failure.what.find(fmt::format("({})", kEngineNotReady)) != std::string::npos)
    return fail("{}: {}", options_.option, last_line(failure.trace));
  std::string message = fmt::format("{} `{}`: {}", options_.option, options_.command, failure.what);
  if (!failure.trace.empty()) message += "\n" + failure.trace;
  return fail(std::move(message));
}

Result<void> ForeignEngine::begin_case() {
  if (process_ == nullptr) return launch();
  failure_.reset();
  return {};
}

void ForeignEngine::fail_as(std::string kind, std::string what, std::string trace) {
  if (failure_) return;
  // A process that hangs, has ended or violates the protocol cannot take another case.
  if (kind != "exception" && kind != "harness") process_.reset();
  failure_ = {.kind = std::move(kind), .what = std::move(what), .trace = std::move(trace)};
}

// The process's last lines on stderr usually give the reason, so they become the trace.
bool ForeignEngine::answered(LineProcess::End end, std::chrono::milliseconds limit) {
  if (end == LineProcess::End::answered) return true;
  if (end == LineProcess::End::timed_out) {
    fail_as("hang",
            fmt::format("{} did not answer in {} s", options_.subject, limit.count() / 1000),
            process_->last_words());
    return false;
  }
  const std::string how = process_->how_it_ended();
  const std::string words = process_->last_words();
  fail_as("crash",
          fmt::format("{}'s process has ended ({}){}{}", options_.subject, how,
                      words.empty() ? "" : ": ", last_line(words)),
          words);
  return false;
}

bool ForeignEngine::ask(std::string_view message,
                        const std::function<void(JsonObject& reply)>& read,
                        const Connector& connector) {
  return !failure_ && converse(message, read, connector, options_.time_limit);
}

bool ForeignEngine::converse(std::string_view message,
                             const std::function<void(JsonObject& reply)>& read,
                             const Connector& connector, std::chrono::milliseconds limit) {
  LS_CHECK(process_ != nullptr, "no engine to send {} to", message);
  if (!answered(process_->send(message, limit), limit)) return false;
  for (;;) {
    std::string_view line;
    if (!answered(process_->receive(line, limit), limit)) return false;
    JsonReader json("reply");
    if (json.parse(line, ++num_replies_)) {
      JsonObject object = json.root().object();
      // The engine raised: it names the exception, and whether Lockstep's own code in its process
      // did.
      if (auto failed = object.optional("failed")) {
        JsonObject said = failed.object();
        std::string what(said.required("what").string());
        const JsonValue trace = said.optional("trace");
        std::string words = trace ? std::string(JsonValue(trace).string()) : std::string();
        JsonValue side = said.optional("harness");
        const bool is_harness = side && side.boolean();
        said.finish();
        if (json.ok()) {
          fail_as(is_harness ? "harness" : "exception", std::move(what), std::move(words));
          return false;
        }
        // A line of the connector is not the reply: answer it and continue to read.
      } else if (connector && (object.has("ask") || object.has("tell"))) {
        const std::string answer = connector(object);
        object.finish();
        if (json.ok() && failure_) return false;
        if (json.ok()) {
          if (!answer.empty() && !answered(process_->send(answer, limit), limit)) return false;
          continue;
        }
      } else {
        read(object);
        object.finish();
        // `read` itself may have found the reply senseless.
        if (json.ok()) return !failure_;
      }
    }
    // Everything that is not valid JSON of the protocol ends here, with the message that it replies
    // to.
    message.remove_suffix(message.ends_with('\n') ? 1 : 0);
    fail_as("reply", fmt::format("{} (to {})", json.error().message, printable_excerpt(message)));
    return false;
  }
}

Result<std::shared_ptr<ForeignEngines>> ForeignEngines::open(ForeignEngineOptions options) {
  std::shared_ptr<ForeignEngines> engines(new ForeignEngines(std::move(options)));
  LS_ASSIGN_OR_RETURN(auto first, ForeignEngine::start(engines->options_));
  engines->hello_ = first->hello();
  engines->idle_.push_back(std::move(first));
  return engines;
}

Result<ForeignEngines::Lease> ForeignEngines::take() {
  std::unique_ptr<ForeignEngine> engine;
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      // The most recently used one: its process is the most likely to be warm.
      engine = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (engine == nullptr) {
    // Outside the lock: a start may take minutes.
    LS_ASSIGN_OR_RETURN(engine, ForeignEngine::start(options_));
  }
  LS_RETURN_IF_ERROR(engine->begin_case());
  return Lease(engine.release(), [home = shared_from_this()](ForeignEngine* given_back) {
    const std::lock_guard lock(home->mutex_);
    home->idle_.emplace_back(given_back);
  });
}

void ForeignEngines::restart() {
  const std::lock_guard lock(mutex_);
  idle_.clear();
}

static std::string lacks(const EngineHello& hello, std::string_view feature) {
  return fmt::format("{}: the engine does not support {}", hello.engine.text(), feature);
}

// Returns the features that a request needs, in a fixed order.
static std::vector<std::string_view> features_of(const RequestSpec& request) {
  std::vector<std::string_view> features;
  if (!request.cache_salt.empty()) features.push_back("cache_salt");
  if (!request.keys.lora.name.empty()) features.push_back("lora");
  if (!request.keys.mm.empty()) features.push_back("mm");
  if (!request.keys.embeds.empty()) features.push_back("embeds");
  if (request.min_tokens > 0) features.push_back("min_tokens");
  if (request.repetition_detection.max_pattern_size > 0) features.push_back("repetition_detection");
  if (request.skip_reading_prefix_cache) features.push_back("skip_reading_prefix_cache");
  return features;
}

std::string missing_feature(const EngineHello& hello, const RecordingHeader& header) {
  const EngineConfig& config = header.options.config;
  std::vector<std::string> features;
  const auto need = [&](bool needs, std::string feature) {
    if (needs) features.push_back(std::move(feature));
  };
  for (const KVCacheGroupSpec& group : header.groups) {
    features.emplace_back(type_name_of(group.spec.kind));
    need(group.spec.bounded_replay, "bounded_replay");
  }
  need(config.async_scheduling, "async_scheduling");
  need(config.policy == SchedulingPolicy::priority, "priority");
  need(config.num_spec_tokens > 0, fmt::format("spec:{}", name_of(config.spec_method)));
  need(config.dcp > 1, "dcp");
  need(config.pcp > 1, "pcp");
  need(config.dcp > 1 && std::ranges::any_of(
                             header.groups,
                             [](const KVCacheGroupSpec& group) { return !group.spec.dcp_sharded; }),
       "dcp_sharded");
  // Features that switch something off: an engine may have no such switch.
  need(!config.enable_chunked_prefill, "no_chunked_prefill");
  need(!config.enable_prefix_caching, "no_prefix_caching");
  need(header.connector.has_value(), "connector");
  for (const std::string& feature : features)
    if (!hello.can(feature)) return feature;
  return {};
}

namespace {

// Reports the steps of an engine in its process, message by message.
class EngineReporter final : public StepReporter {
 public:
  EngineReporter(ForeignEngines::Lease engine, RecordingHeader header, std::int64_t tables_every)
      : engine_(std::move(engine)), header_(std::move(header)), tables_every_(tables_every) {}

  // Opens the case. Returns the header with the block sizes that the engine derives. Errors: a
  // refusal.
  Result<RecordingHeader> open() {
    std::string refused;
    const bool replied = ask(open_message(header_),
                             [&](JsonObject& reply) { refused = read_opened(reply, header_); });
    if (replied && !refused.empty())
      return lockstep::fail("{}: {}", engine_->hello().engine.text(), refused);
    return header_;
  }
  // Sets the connector that answers the engine's queries.
  void connect(ConnectorQueries& connector) { connector_ = &connector; }

  Result<void> add(const RequestSpec& request) override {
    for (const std::string_view feature : features_of(request))
      if (!engine_->hello().can(feature)) return lockstep::fail(lacks(engine_->hello(), feature));
    std::string refused;
    const bool replied =
        ask(add_message(request), [&](JsonObject& reply) { refused = read_refusal(reply); });
    if (replied && !refused.empty()) return lockstep::fail(std::move(refused));
    return {};
  }
  void abort_request(const std::string& name) override {
    ask(abort_message(name), [](JsonObject&) {});
  }
  void set_pause_state(PauseState state) override {
    if (can("pause_state")) ask(pause_message(state), [](JsonObject&) {});
  }
  std::optional<bool> reset_prefix_cache(bool preempts_running, RecordedStep& step) override {
    if (!can(reset_feature(preempts_running))) return std::nullopt;
    bool succeeded = false;
    const bool replied = ask(reset_message(preempts_running), [&](JsonObject& reply) {
      succeeded = read_reset(reply, header_, step);
      check_state(step);
    });
    return replied ? std::optional(succeeded) : std::nullopt;
  }
  bool decide(std::int64_t number, RecordedStep& step) override {
    // With tables_every_ 4: steps 3, 7, 11.
    const bool shows_tables = (number + 1) % tables_every_ == 0;
    return ask(schedule_message(number, shows_tables), [&](JsonObject& reply) {
      read_decision(reply, header_, step);
      check_state(step);
      lacks_tables_ |= shows_tables && !shows_all(step);
      lacks_free_blocks_ |= step.free_blocks < 0;
    });
  }
  bool update(const RecordedStep& output, RecordedStep& step, TokenCounts& counts) override {
    return ask(update_message(output), [&](JsonObject& reply) {
      counts = {.num_tokens = read_outcome(reply, header_, step).num_tokens, .are_claims = true};
      check_state(step);
    });
  }
  std::vector<std::string> not_checked() const override {
    std::vector<std::string> lines;
    if (lacks_tables_)
      lines.emplace_back(
          "block tables: a `schedule` with \"tables\" was answered without all of them");
    if (counts_hashes_)
      lines.emplace_back(
          "counts of block hashes (`stored`, `evicted`, `cleared`): without a model");
    if (engine_->hello().engine.name != "vllm" && connector_ == nullptr &&
        header_.options.config.enable_prefix_caching)
      lines.emplace_back("whether hits are lost without a reason: the engine has no profile");
    if (lacks_free_blocks_) lines.emplace_back("free blocks: the engine does not report them");
    return lines;
  }
  const EngineFailure* failure() const override { return engine_->failure(); }
  // "reply:" marks a reply that is well-formed but contradicts the run.
  void fail(std::string what) override { engine_->fail_reply("reply:" + what); }

 private:
  bool can(std::string_view feature) {
    if (engine_->hello().can(feature)) return true;
    engine_->fail_reply(lacks(engine_->hello(), feature));
    return false;
  }
  static bool shows_all(const RecordedStep& step) {
    return std::ranges::all_of(step.running, [&](const std::string& name) {
      return step.tables && std::ranges::count(*step.tables, name, &RecordedTable::id) > 0;
    });
  }
  // Without a connector nothing else reads `held` and `skipped`.
  void check_state(const RecordedStep& step) {
    counts_hashes_ |= step.stored > 0 || step.evicted > 0 || step.cleared;
    if (connector_ != nullptr) return;
    if (!step.held.empty()) fail(fmt::format("held: `{}`, without a connector", step.held.front()));
    for (const RecordedSkipped& row : step.skipped.value_or(std::vector<RecordedSkipped>{}))
      if (step.runs(row.id)) fail(fmt::format("skipped: `{}` is running", row.id));
  }
  bool ask(const std::string& message, const std::function<void(JsonObject& reply)>& read) {
    if (connector_ == nullptr) return engine_->ask(message, read);
    return engine_->ask(message, read, [this](JsonObject& line) { return answer(line); });
  }
  // Returns the line that answers the engine's connector; empty: none. A query for an unknown
  // request is a failure of the engine.
  std::string answer(JsonObject& line) {
    ConnectorLine said = read_connector_line(line, header_);
    switch (said.kind) {
      case ConnectorLine::Kind::matched_tokens:
        if (const auto hit = connector_->matched_tokens(said.id, said.tokens))
          return connector_answer_message({.id = said.id,
                                           .local = said.tokens,
                                           .external = hit->num_tokens,
                                           .async = hit->is_async});
        break;
      case ConnectorLine::Kind::finished:
        if (const auto keeps = connector_->request_finished(said.id, std::move(said.kept)))
          return keeps_message(*keeps);
        break;
      case ConnectorLine::Kind::allocated:
        if (connector_->allocated(said.id, said.blocks, said.tokens)) return {};
        break;
    }
    engine_->fail_reply(
        fmt::format("the connector is queried for `{}`, which is not a live request", said.id));
    return {};
  }

  ForeignEngines::Lease engine_;
  RecordingHeader header_;
  ConnectorQueries* connector_ = nullptr;  // null: none
  const std::int64_t tables_every_;
  bool lacks_tables_ = false;
  bool counts_hashes_ = false;
  bool lacks_free_blocks_ = false;
};

Result<std::unique_ptr<DecisionSource>> open_decisions(ForeignEngines& engines,
                                                       const EngineToDecide& to_decide,
                                                       std::int64_t tables_every) {
  RecordingHeader header =
      header_of_engine(to_decide.engine, to_decide.plan.groups, to_decide.plan.num_blocks);
  const KVTransfer& transfer = to_decide.transfer;
  if (transfer.connector != nullptr)
    connect_engine(header, transfer.kv_load_failure_policy, transfer.connector->traits());
  if (const std::string missing = missing_feature(engines.hello(), header); !missing.empty())
    return fail(lacks(engines.hello(), missing));
  for (const std::string_view feature : to_decide.features)
    if (!engines.hello().can(feature))
      return fail(lacks(engines.hello(), feature) + "; use a trace without it, or --limit");
  LS_ASSIGN_OR_RETURN(auto engine, engines.take());
  auto reporter = std::make_unique<EngineReporter>(std::move(engine), header, tables_every);
  LS_ASSIGN_OR_RETURN(header, reporter->open());
  // For vLLM the header keeps the profile's release, whose rules the recording's readers apply.
  if (engines.hello().engine.name != "vllm") header.engine = engines.hello().engine;
  EngineReporter& connected = *reporter;
  auto decisions = std::make_unique<ReportedDecisions>(std::move(reporter), std::move(header),
                                                       transfer.connector);
  if (transfer.connector != nullptr) connected.connect(*decisions);
  return decisions;
}

}  // namespace

DecisionsFactory decisions_of(std::shared_ptr<ForeignEngines> engines, std::int64_t tables_every) {
  return [engines = std::move(engines),
          tables_every](const EngineToDecide& engine) -> Result<std::unique_ptr<DecisionSource>> {
    return open_decisions(*engines, engine, tables_every);
  };
}

}  // namespace lockstep
