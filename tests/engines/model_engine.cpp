// A scheduler behind the scheduler protocol (docs/protocols.md), in C++: here Lockstep's own model,
// so that its tests can compare decisions through a pipe with direct ones. Your engine has the same
// few calls. The argument is the release that it decides as: 0.22.1 unless given.
//
//     lockstep fuzz --decisions build/release/model_engine
//     lockstep fuzz --decisions 'build/release/model_engine 0.33.0'
#include <iostream>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "base/json_reader.h"
#include "base/json_writer.h"
#include "reference/schedule/scheduler.h"
#include "sim/recording/recorded_terms.h"
#include "traces/formats/engine_options.h"
#include "traces/formats/lines_json.h"
#include "traces/formats/prompt_json.h"
#include "traces/formats/spec_json.h"

namespace lockstep {
namespace {

void answer(JsonWriter& out) { std::cout << out.take_line() << std::flush; }

// The input ends: so does the engine.
bool read_line(JsonReader& json) {
  static std::string line;
  if (!std::getline(std::cin, line)) return false;
  json = JsonReader("message");
  return json.parse(line) || true;
}

JsonObject read_answer(JsonReader& json) {
  if (!read_line(json) || !json.ok()) std::exit(0);
  return json.root().object();
}

// What the engine's connector would ask its peers, it asks Lockstep.
class AskingConnector final : public KVConnector {
 public:
  ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) override {
    out_.begin_object().string("ask", "matched_tokens").string("id", query.name);
    answer(out_.integer("local", query.num_local_tokens).end_object());
    JsonReader json("answer");
    JsonObject said = read_answer(json);
    JsonValue external = said.required("external");
    ExternalHit hit{.num_tokens = std::nullopt, .is_async = said.required("async").boolean()};
    if (!external.is_null()) hit.num_tokens = external.integer<std::int32_t>();
    return hit;
  }
  void update_state_after_alloc(RequestId request, std::span<const BlockId> blocks,
                                std::int32_t num_external_tokens) override {
    out_.begin_object().string("tell", "allocated").string("id", names_[request]);
    out_.integer("external", num_external_tokens).key("blocks").begin_array().begin_array();
    for (const BlockId block : blocks) out_.integer(index_of(block));
    answer(out_.end_array().end_array().end_object());
  }
  bool request_finished(RequestId request, std::string_view name) override {
    out_.begin_object().string("ask", "finished").string("id", name).key("blocks").begin_array();
    for (std::int32_t group = 0; group < num_groups_; ++group) {
      out_.begin_array();
      for (const BlockId block : scheduler_->block_table(request, group))
        out_.integer(index_of(block));
      out_.end_array();
    }
    answer(out_.end_array().end_object());
    JsonReader json("answer");
    JsonObject said = read_answer(json);
    return said.required("keeps").boolean();
  }
  KVConnectorTraits traits() const override { return {.requires_kv_delivery = delivers_}; }
  void require_delivery(bool delivers) { delivers_ = delivers; }
  void know(RequestId id, std::string name) { names_[id] = std::move(name); }
  void serve(const Scheduler& scheduler, std::size_t num_groups) {
    scheduler_ = &scheduler;
    num_groups_ = static_cast<std::int32_t>(num_groups);
  }

 private:
  JsonWriter out_;
  bool delivers_ = false;
  std::map<RequestId, std::string> names_;
  const Scheduler* scheduler_ = nullptr;
  std::int32_t num_groups_ = 0;
};

using Rows = std::vector<std::pair<RequestId, std::string>>;

class Engine {
 public:
  explicit Engine(std::string version) : version_(std::move(version)) {}
  // False: the input has ended.
  bool handle_next() {
    if (!read_line(json_)) return false;
    if (!json_.ok()) return fail(), true;
    handle(json_.root().object());
    return true;
  }

 private:
  void handle(JsonObject message) {
    if (message.has("hello")) return say_hello(message);
    if (message.has("open")) return open(message);
    if (message.has("close")) return close(message);
    if (scheduler_ == nullptr) {
      message.refuse_because("no case is open, or none of these messages");
      return fail();
    }
    if (message.has("add")) return add(message);
    if (message.has("abort")) return abort(message);
    if (message.has("pause_state")) return pause(message);
    if (message.has("reset_prefix_cache")) return reset_cache(message);
    if (message.has("schedule")) return schedule(message);
    if (message.has("update")) return update(message);
    message.refuse_because("no such message");
    fail();
  }

  // True if the message was read to its last key and is complete; otherwise the case ends.
  bool is_whole(JsonObject& message) {
    message.finish();
    if (!json_.ok()) fail();
    return json_.ok();
  }
  void fail() {
    scheduler_.reset();
    out_.begin_object().key("failed").begin_object();
    answer(
        out_.string("what", "ProtocolError: " + json_.error().message).end_object().end_object());
  }

  void say_hello(JsonObject& message) {
    JsonObject hello = message.required("hello").object();
    hello.required("scheduler_protocol").integer(1, 1);
    hello.finish();
    if (!is_whole(message)) return;
    out_.begin_object().key("hello").begin_object().integer("scheduler_protocol", 1);
    out_.key("engine").begin_object().string("name", "vllm").string("version", version_);
    out_.end_object().key("features").begin_array();
    for (const char* feature : {"full",
                                "mla",
                                "sliding_window",
                                "sliding_window_mla",
                                "chunked_local",
                                "mamba",
                                "hidden_state",
                                "async_scheduling",
                                "priority",
                                "dcp",
                                "pcp",
                                "connector",
                                "no_chunked_prefill",
                                "no_prefix_caching",
                                "cache_salt",
                                "min_tokens",
                                "reset_prefix_cache",
                                "reset_running",
                                "pause_state",
                                "spec:ngram",
                                "spec:draft_model",
                                "spec:eagle"})
      out_.string(feature);
    answer(out_.end_array().end_object().end_object());
  }

  void open(JsonObject& message) {
    scheduler_.reset();
    JsonObject plan = message.required("open").object();
    EngineConfig config = read_engine_options(plan.required("config")).config;
    config.engine = "vllm-" + version_;
    const auto groups = read_kv_cache_groups(plan.required("groups"));
    connector_ = std::make_unique<AskingConnector>();
    KVTransfer transfer;
    if (auto keys = plan.optional("connector")) {
      transfer.connector = connector_.get();
      JsonObject connector = keys.object();
      if (connector.required("kv_load_failure_policy").string() == "fail")
        transfer.kv_load_failure_policy = KVLoadFailurePolicy::fail;
      connector.optional("supports_hybrid_groups");
      if (auto delivers = connector.optional("requires_kv_delivery"))
        connector_->require_delivery(delivers.boolean());
      connector.finish();
    }
    const std::int64_t num_blocks = plan.required("num_blocks").integer();
    plan.optional("seed");
    plan.finish();
    if (!is_whole(message)) return;
    has_connector_ = transfer.connector != nullptr;
    is_async_ = config.async_scheduling;
    in_flight_.clear();
    names_.clear();
    live_.clear();
    auto made = Scheduler::create(config, groups, num_blocks, transfer);
    if (!made) return refuse(made.error().message);
    scheduler_ = std::make_unique<Scheduler>(std::move(*made));
    connector_->serve(*scheduler_, groups.size());
    out_.begin_object().key("opened").begin_object();
    out_.integer("scheduler_block_size", scheduler_->scheduler_block_size());
    out_.integer("hash_block_size", scheduler_->hash_block_size()).end_object();
    answer(out_.end_object());
  }

  void add(JsonObject& event) {
    bool has_priority = false;
    RequestSpec request = read_added_request(event, has_priority);
    request.arrival_ns = event.required("arrival").scaled_decimal(9);
    if (!is_whole(event)) return;
    const std::string name = request.name;
    const auto id = scheduler_->add_request(std::move(request));
    if (!id) return refuse(id.error().message);
    names_[*id] = name;
    live_.insert(*id);
    connector_->know(*id, name);
    answer(out_.begin_object().end_object());
  }

  void abort(JsonObject& message) {
    const std::string name(message.required("abort").string());
    if (!is_whole(message)) return;
    for (const auto& [id, known] : names_)
      if (known == name) scheduler_->abort_request(id);
    answer(out_.begin_object().end_object());
  }

  void pause(JsonObject& message) {
    constexpr JsonWord<PauseState> kStates[] = {{"UNPAUSED", PauseState::unpaused},
                                                {"PAUSED_NEW", PauseState::paused_new},
                                                {"PAUSED_ALL", PauseState::paused_all}};
    const auto state = message.required("pause_state").word<PauseState>(kStates);
    if (!is_whole(message)) return;
    scheduler_->set_pause_state(state);
    answer(out_.begin_object().end_object());
  }

  void close(JsonObject& message) {
    message.required("close").boolean();
    if (!is_whole(message)) return;
    scheduler_.reset();
    answer(out_.begin_object().end_object());
  }

  void reset_cache(JsonObject& message) {
    JsonObject how = message.required("reset_prefix_cache").object();
    const bool running = how.required("running").boolean();
    how.finish();
    if (!is_whole(message)) return;
    const bool done = scheduler_->reset_prefix_cache(running);
    out_.begin_object().boolean("reset_prefix_cache", done);
    answer_with_state(seen({}, {}), false);
  }

  void schedule(JsonObject& message) {
    message.required("schedule").integer(0);
    const bool shows_tables = message.optional("tables") ? true : false;
    if (!is_whole(message)) return;
    const SchedulerOutput& decision = scheduler_->schedule();
    RecordedStep step = seen(decision, {});
    write_decision(view(decision, {}), step);
    if (!decision.common_prefix_blocks.empty())
      step.common_prefix_blocks = decision.common_prefix_blocks;
    if (shows_tables) step.tables = tables_of(view(decision, {}));
    for (const RequestId id : decision.finished) live_.erase(id);
    Rows rows;
    for (const ScheduledRequest& row : decision.scheduled)
      rows.emplace_back(row.id, names_[row.id]);
    if (!rows.empty() || (has_connector_ && is_async_)) in_flight_.push_back(std::move(rows));
    write_decision_keys(out_.begin_object(), step);
    answer_with_state(step, true);
  }

  void update(JsonObject& message) {
    message.required("update").integer(0);
    Rows rows;
    if (!in_flight_.empty()) {
      rows = std::move(in_flight_.front());
      in_flight_.erase(in_flight_.begin());
    }
    ModelOutput output;
    fill(message.required("sampled"), rows, output.tokens, output.token_ends);
    if (auto drafts = message.optional("drafts"))
      fill(drafts, rows, output.draft_tokens, output.draft_ends);
    if (auto worker = message.optional("worker")) {
      JsonObject said = worker.object();
      output.kv_connector_output.finished_recving = ids_of(said.required("received"));
      output.kv_connector_output.finished_sending = ids_of(said.required("sent"));
      for (JsonValue block : said.required("invalid_blocks").array())
        output.kv_connector_output.invalid_block_ids.push_back(
            BlockId{block.integer<std::int32_t>()});
      if (auto failed = said.optional("failed"))
        output.kv_connector_output.failed_recving = ids_of(failed);
    }
    if (!is_whole(message)) return;
    const auto stopped = scheduler_->update_from_output(output);
    RecordedStep step = seen({}, stopped);
    write_outcome(view({}, stopped), step);
    write_stopped_key(out_.begin_object(), step);
    out_.key("num_tokens").begin_object();
    for (const auto& [id, name] : rows)
      if (live_.contains(id) && names_[id] == name) out_.integer(name, scheduler_->num_tokens(id));
    out_.end_object();
    answer_with_state(step, false);
  }

  void fill(JsonValue by_request, const Rows& rows, std::vector<std::int32_t>& tokens,
            std::vector<std::uint32_t>& ends) {
    JsonObject given = by_request.object();
    for (const auto& [id, name] : rows) {
      if (auto row = given.optional(name))
        for (const std::int32_t token : read_token_ids(row)) tokens.push_back(token);
      ends.push_back(static_cast<std::uint32_t>(tokens.size()));
    }
  }

  std::vector<RequestId> ids_of(JsonValue list) {
    std::vector<RequestId> ids;
    for (JsonValue name : list.array())
      for (const auto& [id, known] : names_)
        if (known == name.string()) ids.push_back(id);
    return ids;
  }

  StepView view(const SchedulerOutput& decision, std::span<const StoppedRequest> stopped) {
    return {.decision = decision,
            .stopped = stopped,
            .counters = counters_,
            .decisions = *scheduler_,
            .name = name_of_};
  }

  // The queues and the pool as they are now.
  RecordedStep seen(const SchedulerOutput& decision, std::span<const StoppedRequest> stopped) {
    counters_ = scheduler_->take_cache_counters();
    RecordedStep step;
    const StepView now = view(decision, stopped);
    write_names(now, scheduler_->running(), step.running);
    write_names(now, scheduler_->waiting(), step.waiting);
    step.free_blocks = scheduler_->num_free_blocks();
    if (has_connector_) write_transfers(now, {}, step);
    // The protocol's name of the queue of requests that hold blocks.
    if (const auto& holding = step.transfers.kv_holding) step.skipped = *holding;
    step.stored = counters_.stored;
    step.evicted = counters_.evicted;
    step.cleared = counters_.cleared;
    return step;
  }

  void answer_with_state(RecordedStep step, bool is_decision) {
    if (!is_decision) step.loading.reset();
    write_state_keys(out_, step);
    answer(out_.end_object());
  }

  void refuse(const std::string& why) {
    answer(out_.begin_object().string("refused", why).end_object());
  }

  const std::string version_;  // of vLLM
  JsonReader json_{"message"};
  JsonWriter out_;
  std::unique_ptr<AskingConnector> connector_;
  std::unique_ptr<Scheduler> scheduler_;
  bool has_connector_ = false, is_async_ = false;
  std::map<RequestId, std::string> names_;  // also of those whose blocks are kept
  std::set<RequestId> live_;
  std::vector<Rows> in_flight_;
  CacheCounters counters_;
  std::function<std::string_view(RequestId)> name_of_ = [this](RequestId id) {
    return std::string_view(names_[id]);
  };
};

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::Engine engine(argc > 1 ? argv[1] : "0.22.1");
  while (engine.handle_next()) {
  }
}
