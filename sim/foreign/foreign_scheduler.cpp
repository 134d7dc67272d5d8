#include "sim/foreign/foreign_scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "sim/foreign/reported_decisions.h"
#include "traces/formats/engine_options.h"
#include "traces/formats/run_field_rows.h"

namespace lockstep {
namespace {

std::string lacks(const EngineHello& hello, std::string_view feature) {
  return fmt::format("{}: the engine cannot be asked for {}", hello.engine.text(), feature);
}

// Features that a request asks for.
std::vector<std::string_view> features_of(const RequestSpec& request) {
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

}  // namespace

std::string missing_feature(const EngineHello& hello, const RecordingHeader& header) {
  const EngineConfig& config = header.options.config;
  std::vector<std::string> features;
  const auto need = [&](bool needs, std::string feature) {
    if (needs) features.push_back(std::move(feature));
  };
  for (const KVCacheGroupSpec& group : header.groups)
    features.emplace_back(name_of(group.spec.kind));
  need(config.async_scheduling, "async_scheduling");
  need(config.policy == SchedulingPolicy::priority, "priority");
  need(config.num_spec_tokens > 0,
       fmt::format("spec:{}",
                   run_rows::kWordsOf<SpecMethod>[static_cast<std::size_t>(config.spec_method)]));
  need(config.dcp > 1, "dcp");
  need(config.pcp > 1, "pcp");
  need(config.dcp > 1 && std::ranges::any_of(
                             header.groups,
                             [](const KVCacheGroupSpec& group) { return !group.spec.dcp_sharded; }),
       "dcp_sharded");
  need(!config.enable_chunked_prefill, "no_chunked_prefill");
  need(!config.enable_prefix_caching, "no_prefix_caching");
  need(header.connector.has_value(), "connector");
  for (const std::string& feature : features)
    if (!hello.can(feature)) return feature;
  return {};
}

namespace {

// An engine in its process, message by message.
class EngineReporter final : public StepReporter {
 public:
  EngineReporter(ForeignEngines::Lease engine, RecordingHeader header, std::int64_t tables_every)
      : engine_(std::move(engine)), header_(std::move(header)), tables_every_(tables_every) {}

  // Block sizes and whatever else the engine derives. Errors: a refusal.
  Result<RecordingHeader> open() {
    std::string refused;
    ask(open_message(header_), [&](JsonObject& reply) { refused = read_opened(reply, header_); });
    if (!refused.empty())
      return lockstep::fail(fmt::format("{}: {}", engine_->hello().engine.text(), refused));
    return header_;
  }
  // With a KV connector: `connector` answers its queries.
  void connect(ConnectorQueries& connector) { connector_ = &connector; }

  Result<void> add(const RequestSpec& request) override {
    for (const std::string_view feature : features_of(request))
      if (!engine_->hello().can(feature)) return lockstep::fail(lacks(engine_->hello(), feature));
    std::string refused;
    ask(add_message(request), [&](JsonObject& reply) { refused = read_refusal(reply); });
    if (!refused.empty()) return lockstep::fail(std::move(refused));
    return {};
  }
  void abort_request(const std::string& name) override {
    ask(abort_message(name), [](JsonObject&) {});
  }
  void set_pause_state(PauseState state) override {
    if (can("pause_state")) ask(pause_message(state), [](JsonObject&) {});
  }
  std::optional<bool> reset_prefix_cache(bool preempts_running, RecordedStep& step) override {
    if (!can(preempts_running ? "reset_running" : "reset_prefix_cache")) return std::nullopt;
    bool succeeded = false;
    const bool replied = ask(reset_message(preempts_running), [&](JsonObject& reply) {
      succeeded = read_reset(reply, header_, step);
    });
    return replied ? std::optional(succeeded) : std::nullopt;
  }
  bool decide(std::int64_t number, RecordedStep& step) override {
    const bool shows_tables = (number + 1) % tables_every_ == 0;
    return ask(schedule_message(number, shows_tables),
               [&](JsonObject& reply) { read_decision(reply, header_, step); });
  }
  bool update(const RecordedStep& output, RecordedStep& step, TokenCounts& counts) override {
    return ask(update_message(output), [&](JsonObject& reply) {
      counts.num_tokens = read_outcome(reply, header_, step).num_tokens;
    });
  }
  const EngineFailure* failure() const override { return engine_->failure(); }
  void fail(std::string what) override { engine_->fail_reply("reply:" + what); }

 private:
  bool can(std::string_view feature) {
    if (engine_->hello().can(feature)) return true;
    engine_->fail_reply(lacks(engine_->hello(), feature));
    return false;
  }
  bool ask(const std::string& message, const std::function<void(JsonObject& reply)>& read) {
    if (connector_ == nullptr) return engine_->ask(message, read);
    return engine_->ask(message, read, [this](JsonObject& line) { return answer(line); });
  }
  // The line to answer the engine's connector with; empty: none.
  std::string answer(JsonObject& line) {
    const ConnectorLine said = read_connector_line(line, header_);
    switch (said.kind) {
      case ConnectorLine::Kind::matched_tokens:
        if (const auto hit = connector_->matched_tokens(said.id, said.tokens))
          return connector_answer_message({.id = said.id,
                                           .local = said.tokens,
                                           .external = hit->num_tokens,
                                           .async = hit->is_async});
        break;
      case ConnectorLine::Kind::finished:
        if (const auto keeps = connector_->request_finished(said.id)) return keeps_message(*keeps);
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
  LS_ASSIGN_OR_RETURN(auto engine, engines.take());
  auto reporter = std::make_unique<EngineReporter>(std::move(engine), header, tables_every);
  LS_ASSIGN_OR_RETURN(header, reporter->open());
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
