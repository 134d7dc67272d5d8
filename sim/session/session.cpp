#include "sim/session/session.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "reference/memory/model_placement.h"
#include "reference/plan/page_size.h"
#include "reference/plan/rank_plan.h"
#include "reference/profiles/engine_profile.h"
#include "reference/profiles/releases.h"
#include "sim/connectors/recorded_connector.h"
#include "sim/recording/recording_workload.h"
#include "sim/step/draft_planner.h"

namespace lockstep {

RunFacts facts_of(const LockstepConfig& config) {
  RunFacts facts = facts_of(config.engine, config.backend);
  facts.traits.add(connector_traits(config.connector));
  facts.traits.add_if(config.data_parallel.dp_size > 1, RunTrait::data_parallel);
  facts.traits.add_if(config.data_parallel.enforce_eager, RunTrait::enforce_eager);
  facts.traits.add_if(config.scheduler_defect != SchedulerDefect::none, RunTrait::model_inputs);
  return facts;
}

namespace {

// Checks the number of engines, and that a defect of data parallel ranks has ranks and graphs in
// which it can show. A mutant that cannot act would count as missed.
Result<void> check_engines(const LockstepConfig& config) {
  constexpr std::int32_t kEnginesMax = 64;
  const std::int32_t dp_size = config.data_parallel.dp_size;
  if (dp_size < 1 || dp_size > kEnginesMax)
    return fail("data_parallel_size {}: expected 1 to {}", dp_size, kEnginesMax);
  if (config.data_parallel.defect != DataParallelDefect::none && dp_size == 1)
    return fail("mutant: {} is planted in data parallel ranks, but there is one engine",
                name_of(config.data_parallel.defect));
  if (config.data_parallel.defect == DataParallelDefect::dp_graph_alone &&
      config.backend.max_cudagraph_capture_size == 0)
    return fail("mutant: dp-graph-alone needs captured graphs, and none are captured");
  return {};
}

}  // namespace

// The connector comes first: the facts below assume that its parts exist.
Result<void> check_setup(const LockstepConfig& config, RunTraits more) {
  LS_RETURN_IF_ERROR(check_connector(config.connector, config.backend.plan));
  more.add_if(is_overlaid(config.backend.layout), RunTrait::overlaid_layout);
  LS_RETURN_IF_ERROR(supported(facts_of(config).with(more)));
  if (is_overlaid(config.backend.layout))
    LS_RETURN_IF_ERROR(placed_order(config.backend.plan, config.backend.layout));
  LS_RETURN_IF_ERROR(check_engines(config));
  return check_ranks(config.backend);
}

Result<std::vector<std::unique_ptr<Backend>>> open_backends(const BackendConfig& config,
                                                            const BackendFactory& factory) {
  std::vector<std::unique_ptr<Backend>> backends;
  for (std::int32_t rank = 0; rank < num_ranks(config); ++rank) {
    LS_ASSIGN_OR_RETURN(auto backend, factory(config_of_rank(config, rank)));
    if (backend) backends.push_back(std::move(backend));
  }
  return backends;
}

// Assembles one engine in the order of the head of session.h. With several engines it uses `parts`
// once per engine, so it takes only the clients out of it.
Result<void> Session::add_engine(std::int32_t dp_rank, SessionParts& parts) {
  SessionEngine& engine = engines_[dp_rank];
  std::unique_ptr<Workload> given = std::move(parts.clients);
  if (clients_ != nullptr) {
    auto dealt = std::make_unique<DealtWorkload>(*clients_);
    engine.dealt = dealt.get();
    given = std::move(dealt);
  }
  std::vector<std::string_view> features;
  if (given != nullptr) features = given->features();
  // A scripted workload fixes each step, a connector's answers included. It has its own connector.
  if (given != nullptr && !given->is_scripted())
    given =
        connect(std::move(given), config_.connector, config_.engine, config_.backend.plan,
                config_.backend.context.num_ranks, connector_seed(parts.connector_seed, dp_rank));
  FaultyWorkload* faulty = nullptr;
  if (!parts.faults.empty()) {
    LS_ASSIGN_OR_RETURN(auto behind, make_faulty_workload(std::move(given), parts.faults));
    engine.faulty = faulty = behind.get();
    given = std::move(behind);
  }
  engine.owned = std::move(given);
  engine.workload = engine.owned.get();
  KVConnector* connector = nullptr;
  if (parts.attach) {
    const Onlooker onlooker = parts.attach(dp_rank, engine.workload);
    if (onlooker.workload != nullptr) engine.workload = onlooker.workload;
    if (onlooker.observer != nullptr) engine.observers.add(*onlooker.observer);
    connector = onlooker.connector;
  }
  if (connector == nullptr) connector = engine.workload->connector();
  const KVTransfer transfer{connector, config_.connector.load_failure_policy};
  RunFacts facts = facts_of(config_);
  facts.traits.add_if(connector != nullptr, RunTrait::connector);
  // With another engine's decisions, only the loop can decide: their factory may return no backend.
  facts.traits.add_if(!parts.decisions && (parts.backend || !parts.borrowed.empty()),
                      RunTrait::backend);
  facts.traits.add_if(faulty != nullptr || !parts.free_order.empty(), RunTrait::model_inputs);
  facts.traits.add_if(bool{parts.decisions}, RunTrait::other_engine);
  // check_setup() could not know these traits: the workload's connector, faults, a foreign decider.
  LS_RETURN_IF_ERROR(supported(facts));
  if (parts.decisions) {
    LS_ASSIGN_OR_RETURN(engine.decisions, parts.decisions({config_.engine, config_.backend.plan,
                                                           transfer, std::move(features)}));
  } else {
    const PlantedParts planted(config_.scheduler_defect);
    const bool healthy = config_.scheduler_defect == SchedulerDefect::none;
    LS_ASSIGN_OR_RETURN(
        auto scheduler,
        Scheduler::create(config_.engine, config_.backend.plan.groups,
                          config_.backend.plan.num_blocks, transfer, healthy ? nullptr : &planted));
    if (!parts.free_order.empty()) scheduler.order_free_blocks(parts.free_order);
    auto model = std::make_unique<Scheduler>(std::move(scheduler));
    // Some faults depend on what the scheduler holds, such as a refused allocation.
    if (faulty != nullptr) faulty->watch(*model);
    engine.decisions = std::move(model);
  }
  engine.ranks = parts.borrowed;
  if (parts.backend) {
    LS_ASSIGN_OR_RETURN(auto backends, open_backends(config_.backend, parts.backend));
    engine.backends = std::move(backends);
    for (const auto& backend : engine.backends) engine.ranks.push_back(backend.get());
  }
  engine.hidden_states =
      std::make_unique<HiddenStateCheck>(config_.backend.seed, config_.hidden_state_defect);
  engine.together = std::make_unique<RankUnion>();
  engine.checks = {engine.hidden_states.get(), engine.together.get()};
  if (config_.draw) engine.drawer = std::make_unique<TimelineRecorder>(config_);
  return {};
}

Result<std::unique_ptr<Session>> Session::open(const LockstepConfig& config, SessionParts parts) {
  std::unique_ptr<Session> session(new Session(config));
  const std::int32_t num_engines = config.data_parallel.dp_size;
  if (num_engines > 1) session->clients_ = std::move(parts.clients);
  session->engines_.resize(num_engines);
  for (std::int32_t dp_rank = 0; dp_rank < num_engines; ++dp_rank)
    LS_RETURN_IF_ERROR(session->add_engine(dp_rank, parts));
  return session;
}

void Session::observe(std::int32_t dp_rank, StepObserver& observer) {
  engines_[dp_rank].observers.add(observer);
}

void Session::check(std::int32_t dp_rank, MemoryCheck& check) {
  engines_[dp_rank].checks.push_back(&check);
}

void Session::give_hidden_states(const HiddenStateCheck::Sink& sink) {
  for (SessionEngine& engine : engines_) engine.hidden_states->set_sink(sink);
}

// Returns the engine's parts for the loop. The timeline's recorder comes after the caller's
// observers.
RunParts Session::parts_of(SessionEngine& engine) {
  if (engine.drawer != nullptr) engine.observers.add(*engine.drawer);
  return {*engine.decisions, *engine.workload, engine.ranks, &engine.observers, engine.checks};
}

Result<std::unique_ptr<LockstepRun>> Session::start() {
  LS_CHECK(engines_.size() == 1, "{} engines", engines_.size());
  return LockstepRun::start(config_, parts_of(engines_.front()));
}

// One engine runs without the data parallel loop: its rank calls no collectives.
Result<RunReport> Session::run() {
  if (engines_.size() == 1) return run_lockstep(config_, parts_of(engines_.front()));
  std::vector<EngineParts> engines;
  for (SessionEngine& engine : engines_) engines.push_back({*engine.dealt, parts_of(engine)});
  return run_data_parallel(config_, config_.data_parallel, engines, *clients_);
}

Timeline Session::take_timeline(std::int32_t dp_rank) { return engines_[dp_rank].drawer->take(); }

namespace {

// Plants the named defect in its module: the scheduler, a connector, an engine's connector set-up,
// data parallel ranks, hidden state files. Any other name goes to the backend, which refuses
// unknown ones.
void plant(LockstepConfig& config, const std::string& mutant) {
  if (const auto defect = defect_from_name<SchedulerDefect>(mutant))
    config.scheduler_defect = *defect;
  else if (const auto planted = defect_from_name<ConnectorDefect>(mutant))
    config.connector.defect = *planted;
  else if (const auto of_start = defect_from_name<MultiConnectorDefect>(mutant))
    config.connector.setup_defect = *of_start;
  else if (const auto of_ranks = defect_from_name<DataParallelDefect>(mutant))
    config.data_parallel.defect = *of_ranks;
  else if (const auto of_files = defect_from_name<HiddenStateDefect>(mutant))
    config.hidden_state_defect = *of_files;
  else
    config.backend.mutant = mutant;
}

}  // namespace

// Stores the chosen kernel block sizes, not the given ones: a later version may choose others. The
// backend's name is the summary's first word; the device is not part of a case.
SavedCase case_of(std::string name, const RunSpec& run, const RunSummary& summary) {
  SavedCase saved;
  static_cast<RunSpec&>(saved) = run;
  saved.recipe = {};
  saved.name = std::move(name);
  saved.backend = summary.backend.substr(0, summary.backend.find(' '));
  saved.kernel_block_sizes = config_of(run).backend.kernel_block_sizes;
  if (summary.divergence)
    saved.expected = {.kind = std::string(name_of(summary.divergence->phase)),
                      .step = summary.divergence->step};
  else
    saved.expected = {.kind = std::string(name_of(summary.verdict)), .step = {}};
  return saved;
}

void keep_records(Trace& trace, std::int64_t count) {
  if (count < static_cast<std::int64_t>(trace.records.size())) trace.records.resize(count);
}

namespace {

// Returns true if each rank's own plan can have the layout. A rank holds fewer heads and layers, so
// its pages may violate an alignment that the whole model's pages meet.
bool ranks_are_placed(const BackendConfig& backend, CacheLayout order) {
  for (std::int32_t rank = 0; rank < num_ranks(backend); ++rank) {
    const auto plan =
        rank_plan(backend.plan, config_of_rank(backend, rank).parallel, backend.queries_per_kv);
    if (plan && !placed_layout(plan->plan, backend.attention_backend, order)) return false;
  }
  return true;
}

// Sets the kernel block sizes of the overlaid layout. A saved case stores sizes of the older rule;
// they are replaced, unless the user chose different ones.
void take_kernel_blocks(const RunSpec& run, BackendConfig& backend) {
  const auto sizes = placed_kernel_sizes(run.cache, run.attention_backend);
  if (!sizes) return;
  const bool fp32_states = has_fp32_states(run.cache);
  for (std::size_t g = 0; g < sizes->size(); ++g) {
    const auto older =
        kernel_block_size(run.cache.groups[g], run.attention_backend, fp32_states, g);
    if (!older || *older == backend.kernel_block_sizes[g])
      backend.kernel_block_sizes[g] = (*sizes)[g];
  }
}

// Gives a run of a release that overlays its groups that release's layout: the requested order, or
// the one that the engine would choose. If the caches cannot be placed that way, the plan of 0.22.1
// stays when no layout was requested. With a requested layout, memory model and backend refuse it.
void place_cache(const RunSpec& run, BackendConfig& backend) {
  if (!overlays_memory(run)) return;
  const auto order = placed_order(run.cache, run.layout);
  if (!order) return;
  const auto placed = placed_layout(run.cache, run.attention_backend, *order);
  if (!is_overlaid(run.layout) && !(placed && ranks_are_placed(backend, *order))) return;
  backend.layout = *order;
  take_kernel_blocks(run, backend);
  backend.mapped_kernel_blocks = mapped_kernel_blocks(run.cache, run.attention_backend);
  if (placed) backend.plan = with_placed_tensors(std::move(backend.plan), *placed);
}

// Sets how the draft model's passes are followed, and why not otherwise. Without passes, its layers
// receive the rows of the step's tokens like any other layer, so they are no longer draft modules.
void follow_drafter(const RunSpec& run, bool has_recorded_connector, LockstepConfig& config) {
  FollowedDrafter followed =
      followed_drafter(config.engine, config.backend, !run.connector.parts.empty());
  const bool is_foreign = is_engine_worker(run.backend);
  if ((is_foreign || has_recorded_connector) && followed.config.shape != DraftShape::none)
    followed = {.config = {}, .why_not = is_foreign ? "the user's own backend" : "a KV connector"};
  config.backend.drafter = followed.config;
  config.drafter_not_followed = followed.why_not;
  if (followed.config.shape == DraftShape::none) config.backend.plan.draft_modules.clear();
}

}  // namespace

bool overlays_memory(const RunSpec& run) {
  const EngineProfile* profile = find_engine_profile(run.engine.engine);
  return profile != nullptr && overlays_groups(*profile->release) && !is_engine_worker(run.backend);
}

namespace {

// `recorded`: a recording with a connector, which is not part of the spec. Null: none.
LockstepConfig config_of(const RunSpec& run, const RecordingHeader* recorded) {
  LockstepConfig config;
  config.engine = run.engine;
  config.budget = run.budget;
  BackendConfig& backend = config.backend;
  backend = make_backend_config(run.engine, run.cache, run.attention_backend);
  if (!run.kernel_block_sizes.empty()) backend.kernel_block_sizes = run.kernel_block_sizes;
  backend.layout = run.layout;
  backend.layout_rule = run.layout_rule;
  backend.queries_per_kv = run.queries_per_kv;
  backend.num_streams = run.num_streams;
  backend.delay_streams = run.delay_streams;
  backend.max_cudagraph_capture_size = run.max_cudagraph_capture_size;
  backend.numbers = run.numbers;
  backend.parallel.tp_size = run.tensor_parallel_size;
  backend.parallel.pp_size = run.pipeline_parallel_size;
  backend.context.interleave = run.cp_kv_cache_interleave_size;
  backend.check = run.check;
  backend.seed = run.seed;
  place_cache(run, backend);
  config.data_parallel.dp_size = run.data_parallel_size;
  config.data_parallel.enforce_eager = run.enforce_eager;
  static_cast<ConnectorSpec&>(config.connector) = run.connector;
  if (recorded != nullptr)
    config.connector.load_failure_policy = kv_transfer(*recorded, nullptr).kv_load_failure_policy;
  if (recorded != nullptr || !run.connector.parts.empty()) {
    config.engine = beside_connector(config.engine);
    backend.num_host_blocks = num_host_blocks(config.connector, run.engine, run.cache);
  }
  follow_drafter(run, recorded != nullptr, config);
  if (!run.mutants.empty()) plant(config, run.mutants.front());
  return config;
}

}  // namespace

LockstepConfig config_of(const RunSpec& run) { return config_of(run, nullptr); }

LockstepConfig config_of(const SavedCase& saved) {
  const bool is_connected = saved.recording && saved.recording->header.connector;
  return config_of(saved, is_connected ? &saved.recording->header : nullptr);
}

std::vector<BlockId> free_order_of(const RunSpec& run) {
  if (run.block_order == 0) return {};
  std::vector<BlockId> order;
  for (std::int32_t block = 1; block < run.cache.num_blocks; ++block)
    order.push_back(BlockId{block});
  // Fisher-Yates, with the position hashed together with block_order: independent of any generator.
  for (std::size_t left = order.size(); left > 1; --left)
    std::swap(order[left - 1], order[splitmix64(run.block_order << 32 | left) % left]);
  return order;
}

TraceWorkloadOptions workload_options_of(const RunSpec& run) {
  return {.step_time = run.step_time,
          .seed = run.seed,
          .num_spec_tokens = run.engine.num_spec_tokens,
          .draft_acceptance_percent = run.draft_acceptance_percent,
          .short_drafts_percent = run.short_drafts_percent,
          .async_scheduling = run.engine.async_scheduling};
}

bool follows_recording(const SavedCase& saved, const DecisionsFactory& decisions) {
  return saved.recording && saved.decide == Decides::recording && !decisions;
}

// The recording is copied, since a session owns everything it runs.
std::unique_ptr<Workload> workload_of(const SavedCase& saved) {
  if (saved.recording)
    return make_recording_workload(std::make_shared<const Recording>(*saved.recording));
  return make_trace_workload(saved.trace, workload_options_of(saved));
}

// Decisions and arrivals of a followed recording come from one reader, which keeps them in step.
SessionParts parts_of(const SavedCase& saved, DecisionsFactory decisions) {
  SessionParts parts;
  if (follows_recording(saved, decisions)) {
    auto followed = follow_recording(std::make_shared<const Recording>(*saved.recording));
    parts.clients = std::move(followed.clients);
    parts.decisions = std::move(followed.decisions);
  } else {
    parts.clients = workload_of(saved);
    parts.decisions = std::move(decisions);
  }
  parts.connector_seed = saved.seed;
  parts.faults = saved.faults;
  parts.free_order = free_order_of(saved);
  return parts;
}

Result<std::unique_ptr<Session>> open_undisturbed(const SavedCase& saved, LockstepConfig config,
                                                  BackendFactory backend, Attach attach,
                                                  DecisionsFactory decisions) {
  // Connectors of data parallel ranks belong to ranks that this run does not have.
  if (config.data_parallel.dp_size > 1) config.connector.parts.clear();
  config.data_parallel.dp_size = 1;
  SessionParts parts = parts_of(saved, std::move(decisions));
  parts.faults.clear();
  parts.backend = std::move(backend);
  parts.attach = std::move(attach);
  return Session::open(config, std::move(parts));
}

}  // namespace lockstep
