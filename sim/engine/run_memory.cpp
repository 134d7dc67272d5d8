#include "sim/engine/run_memory.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <utility>

#include "base/check.h"
#include "base/parallel.h"
#include "base/stopwatch.h"
#include "reference/memory/attention_oracle.h"
#include "sim/check/comparer.h"
#include "sim/step/backend_config.h"
#include "sim/step/draft_planner.h"
#include "sim/step/model_step.h"
#include "sim/step/page_planner.h"
#include "sim/step/probe_planner.h"
#include "sim/step/program_builder.h"

namespace lockstep {

// Returns the cache formats that a kernel has to convert to, for the list of what was not checked.
// Empty: none, or numbers are real and the kernels do convert.
static std::string converted_formats(const BackendConfig& config) {
  std::set<std::string_view> formats;
  for (const KVCacheGroupSpec& group : config.plan.groups)
    for (std::size_t layer = 0; layer < group.layer_names.size(); ++layer)
      if (const KVCacheSpec& spec = group.layer_spec(layer);
          config.numbers == Numbers::words && !is_state_kind(spec.kind) &&
          (spec.kv_quant_mode != KVQuantMode::none || itemsize_bytes(spec.dtype) == 1))
        formats.insert(name_of(ElementType{spec.dtype, spec.kv_quant_mode}));
  return fmt::format("{}", fmt::join(formats, ", "));
}

// A chunk of n tokens has about n * n / 2 rows under queries, so the budget of single queries would
// cover only short chunks. A call of an engine's attention class takes longer than the model, so
// the budget grows by a factor only.
constexpr std::int64_t kBudgetsOfChunks = 4;

// Returns the queries of a step for a backend. Kernels that take the tokens of a step together
// cannot answer for a part of a range; real numbers are only comparable with complete attention.
static QueryPlan query_plan_of(const RunConfig& config, const Backend& backend) {
  const bool chunks = !backend.attends_to_ranges();
  return {.rows = backend.answers_queries()
                      ? config.budget.query_rows * (chunks ? kBudgetsOfChunks : 1)
                      : 0,
          .whole = chunks || config.backend.numbers == Numbers::real,
          .chunks = chunks,
          .dtype = backend.query_dtype()};
}

// Threads that execute a step and compute what it should show. A few take all pieces of a step; to
// wake more costs longer than they save.
static int num_members_of(const RunConfig& config) {
  return std::min(config.backend.num_threads, 4);
}

// Everything that the ranks left out: the sum of all pipeline stages, which hold different layers.
// The ranks of one stage leave out the same checks, so its first rank reports them.
struct NotChecked {
  std::int64_t rows_read = 0, rows_left_out = 0;
  std::int64_t tokens_asked = 0, tokens_left_out = 0;
  std::int64_t state_tokens_read = 0, state_tokens_left_out = 0;
  std::int64_t ignored_zeros = 0;  // equal in all stages that have groups to zero
  std::int64_t probe_rows_max = 0, query_rows_max = 0;
  // With their stages; -1: the line names its layers or formats.
  std::vector<std::pair<std::string, std::vector<std::int32_t>>> lines;

  void add(std::string line, std::int32_t stage) {
    auto same = std::ranges::find(lines, line, [](const auto& one) { return one.first; });
    if (same == lines.end()) same = lines.insert(same, {std::move(line), {}});
    if (same->second.empty() || same->second.back() != stage) same->second.push_back(stage);
  }
};

// One rank: its own copy of the configuration, model, worker and backend. Members are in the order
// of their construction: later ones hold references to earlier ones.
class RankRun final {
 public:
  RankRun(const RunConfig& config, MemoryModel model, Backend& backend, RunSummary& summary)
      : config_(config),
        model_(std::move(model)),
        backend_(backend),
        engine_worker_(backend.engine_worker()),
        summary_(summary),
        worker_(config_.backend.num_rows, config_.backend.context, model_),
        builder_(config_.engine, config_.backend, model_, worker_),
        model_step_(config_.backend.plan, model_, worker_),
        pages_(config_.engine.num_spec_tokens, model_, worker_),
        drafts_(config_.engine, config_.backend, model_, worker_, summary_),
        transfer_step_(model_, worker_, backend_, config_.backend.parallel.tp_rank),
        planner_(config_.backend, model_, worker_, config_.budget.probe_rows,
                 query_plan_of(config, backend), num_members_of(config)),
        comparer_(config_.backend, model_, worker_, backend_, config_.budget.untouched_pages,
                  summary_),
        team_(num_members_of(config)) {
    model_.use_threads(team_.size());
  }

  Result<void> begin() {
    return engine_worker_ == nullptr ? Result<void>() : engine_worker_->begin(config_.engine);
  }
  void add_request(RequestId id, const RequestSpec& spec) {
    worker_.add_request(id, spec);
    if (engine_worker_ != nullptr) engine_worker_->add_request(id, spec);
  }
  void append_sampled(RequestId id, std::span<const std::int32_t> tokens) {
    if (tokens.empty()) return;
    // Before append_sampled(): the number of accepted drafts decides which block has the state.
    builder_.settle_states(id, std::ssize(tokens));
    worker_.append_sampled(id, tokens);
    if (engine_worker_ != nullptr) engine_worker_->sampled(id, tokens);
  }

  void drop_sampled(RequestId id, std::int64_t num_tokens) {
    worker_.drop_sampled(id, num_tokens);
    if (engine_worker_ != nullptr) engine_worker_->dropped(id, num_tokens);
  }
  void preempt(RequestId id) { builder_.preempt(id); }
  void release(std::span<const HeldRequest> held) { builder_.release(held); }

  Checked run_step(const SchedulerOutput& decision, const ModelOutput& output,
                   const StepTransfers& transfers, const AgreedBatch& agreed,
                   StateHashChain& chain) {
    Stopwatch watch;
    // Builds the whole program before anything runs. The parts follow StepProgram's order.
    LS_RETURN_UNLESS_FINE(builder_.build(decision, transfers, program_));
    LS_RETURN_UNLESS_FINE(pages_.plan(decision, builder_.row_requests(), program_));
    drafts_.plan(decision, output, builder_.row_requests(), program_);
    // A data parallel rank pads to the largest batch of all ranks.
    program_.num_padded_tokens = std::max(program_.num_padded_tokens, agreed.num_tokens);
    program_.agreed = agreed;
    LS_RETURN_IF_ERROR(transfer_step_.begin(transfers, program_));
    LS_RETURN_UNLESS_FINE(transfer_step_.check_loads(transfers, decision.step));
    summary_.seconds.program += watch.lap();
    const auto requests = builder_.row_requests();
    Checked reused;
    // A worker whose views differ from the plan has no readable pages; execute() reports it.
    if (engine_worker_ == nullptr || engine_worker_->views_hold())
      reused = comparer_.check_reused(program_, requests);
    summary_.seconds.compare += watch.lap();
    if (!reused) return reused;
    LS_RETURN_UNLESS_FINE(model_step_.apply(program_, requests, expected_));
    LS_RETURN_UNLESS_FINE(pages_.apply(program_, requests));
    LS_RETURN_UNLESS_FINE(transfer_step_.check_stores(transfers, decision.step));
    // After the model has applied the step: it needs the loads within the step, and finds a wrong
    // hit before its consequences appear as wrong attention.
    LS_RETURN_UNLESS_FINE(check_hits(decision));
    LS_RETURN_UNLESS_FINE(drafts_.apply(program_, requests));
    planner_.plan(program_, requests, [&](std::size_t i) { return builder_.is_void(i); });
    // In a team, member 0 executes while the others compute expectations, and then helps them.
    // Neither side writes what the other reads.
    next_piece_ = 0;
    if (team_.size() == 1) expect(0);
    summary_.seconds.program += watch.lap();
    // The engine's own worker receives the decision itself, not the program.
    if (engine_worker_ != nullptr) engine_worker_->decided(decision);
    Result<void> ran;
    team_.run([&](int member) {
      if (member == 0) ran = backend_.execute(program_, readback_);
      expect(member);
    });
    if (!ran) {
      // Tells a failure of Lockstep's code in the worker's process from one of the worker.
      if (engine_worker_ != nullptr)
        if (const EngineFailure* failure = engine_worker_->harness_failure())
          summary_.engine_failure = *failure;
      return tl::unexpected(ran.error());
    }
    summary_.seconds.execute += watch.lap();
    auto compared = comparer_.check_step(program_, requests, expected_, planner_, readback_, chain);
    summary_.seconds.compare += watch.lap();
    return compared;
  }

  Checked finish(bool agreed) {
    Stopwatch watch;
    Checked compared;
    // Without a step there is no program that a divergence could describe.
    if (agreed && program_.step >= 0) compared = comparer_.check_all_pages();
    summary_.seconds.compare += watch.lap();
    summary_.rows_read += planner_.rows_read();
    for (const KernelStatistics& kernel : backend_.kernel_statistics())
      add_kernel(kernel, summary_.kernels);
    // Ranks add up: each captures its own graphs.
    const GraphStatistics graphs = backend_.graph_statistics();
    summary_.graphs.captured += graphs.captured;
    summary_.graphs.replayed += graphs.replayed;
    summary_.graphs.dropped += graphs.dropped;
    return compared;
  }

  void add_not_checked(NotChecked& sum) const {
    const ParallelRank& at = config_.backend.parallel;
    if (config_.backend.context.rank != 0 || at.tp_rank != 0) return;
    sum.rows_read += planner_.rows_read();
    sum.rows_left_out += planner_.rows_left_out();
    sum.tokens_asked += planner_.tokens_asked();
    sum.tokens_left_out += planner_.tokens_left_out();
    sum.state_tokens_read += comparer_.states().tokens_read();
    sum.state_tokens_left_out += comparer_.states().tokens_left_out();
    sum.ignored_zeros = std::max(sum.ignored_zeros, builder_.ignored_zeros());
    sum.probe_rows_max = config_.budget.probe_rows;
    sum.query_rows_max = std::max(sum.query_rows_max, query_plan_of(config_, backend_).rows);
    for (std::string& line : backend_.not_checked()) sum.add(std::move(line), at.pp_rank);
    for (const ModelLayer& layer : model_.layers())
      if (layer.num_kv > 0 && !has_attention_oracle(layer))
        sum.add(
            fmt::format("attention outputs of layer {}: {}", layer.name,
                        is_hidden_state(layer.kind) ? "hidden states are not attended to"
                                                    : "its elements are not numbers within +-1"),
            -1);
    if (const std::string formats = converted_formats(config_.backend); !formats.empty())
      sum.add(fmt::format("conversion of K and V to {}: rows are moved as words; `--numbers real` "
                          "converts, on cuda and simt",
                          formats),
              -1);
  }

  RankMemory memory() { return {config_.backend, model_, worker_, backend_, program_}; }

 private:
  // Computes the expensive part of what the step should show, in pieces that no member has taken
  // yet: first the fingerprints of written pages, then digests and attention outputs. Pages with
  // real states have no image until their check settles them.
  void expect(int member) {
    for (std::int64_t piece = next_piece_++; piece <= planner_.num_pieces();
         piece = next_piece_++) {
      if (piece > 0)
        planner_.expect(program_, piece - 1, member);
      else if (!model_.has_real_states())
        for (const ModelPage& page : model_.written_pages()) model_.fingerprint(page);
    }
  }

  // Checks the rows that an admitted request reads from blocks it did not compute. Rows after a
  // failed load are void and not checked.
  Checked check_hits(const SchedulerOutput& decision) {
    for (std::size_t i = 0; i < decision.scheduled.size(); ++i) {
      const ScheduledRequest& scheduled = decision.scheduled[i];
      if ((!scheduled.is_new && !scheduled.is_resumed) || builder_.is_void(i)) continue;
      if (auto hit = check_hit(model_, worker_, worker_.at(scheduled.id), config_.backend.plan,
                               decision.step, scheduled.computed);
          !hit)
        return hit;
    }
    return {};
  }

  const RunConfig config_;
  MemoryModel model_;
  Backend& backend_;
  EngineWorker* const engine_worker_;  // null: the backend follows only the programs
  RunSummary& summary_;
  Worker worker_;
  ProgramBuilder builder_;
  ModelStep model_step_;
  PagePlanner pages_;
  DraftPlanner drafts_;
  TransferStep transfer_step_;
  ProbePlanner planner_;
  Comparer comparer_;
  StepProgram program_;
  StepExpectation expected_;
  StepReadback readback_;
  std::atomic<std::int64_t> next_piece_ = 0;  // of the step's expectations
  ThreadTeam team_;
};

RunMemory::RunMemory(const RunConfig& config, std::span<MemoryCheck* const> checks,
                     RunSummary& summary)
    : config_(config.backend), summary_(summary), checks_(checks.begin(), checks.end()) {}
RunMemory::~RunMemory() = default;

void RunMemory::add_request(RequestId id, const RequestSpec& spec) {
  for (const auto& rank : ranks_) rank->add_request(id, spec);
}

void RunMemory::append_sampled(RequestId id, std::span<const std::int32_t> tokens) {
  for (const auto& rank : ranks_) rank->append_sampled(id, tokens);
}

void RunMemory::drop_sampled(RequestId id, std::int64_t num_tokens) {
  for (const auto& rank : ranks_) rank->drop_sampled(id, num_tokens);
}

void RunMemory::preempt(RequestId id) {
  for (const auto& rank : ranks_) rank->preempt(id);
}

void RunMemory::release(std::span<const HeldRequest> held) {
  for (const auto& rank : ranks_) rank->release(held);
}

Checked RunMemory::run_step(const SchedulerOutput& decision, const ModelOutput& output,
                            const StepTransfers& transfers, const AgreedBatch& agreed,
                            StateHashChain& chain) {
  auto compared = first_of_ranks(
      [&](RankRun& rank) { return rank.run_step(decision, output, transfers, agreed, chain); });
  if (!compared) return compared;
  for (MemoryCheck* check : checks_) LS_RETURN_UNLESS_FINE(check->step_compared());
  return {};
}

Checked RunMemory::output_taken(std::span<const StoppedRequest> stopped, std::int64_t now_ns) {
  for (MemoryCheck* check : checks_) LS_RETURN_UNLESS_FINE(check->output_taken(stopped, now_ns));
  return {};
}

Checked RunMemory::finish(bool agreed) {
  auto compared = first_of_ranks([&](RankRun& rank) { return rank.finish(agreed); });
  say_what_was_not_checked(agreed);
  for (MemoryCheck* check : checks_) {
    auto checked = check->finish(agreed && compared);
    if (compared) compared = std::move(checked);
  }
  return compared;
}

// Adds one line per reason. A verdict of "agrees" is only as strong as this list is short.
void RunMemory::say_what_was_not_checked(bool agreed) {
  NotChecked sum;
  for (const auto& rank : ranks_) rank->add_not_checked(sum);
  std::vector<std::string>& not_checked = summary_.not_checked;
  const std::int32_t num_stages = config_.parallel.pp_size;
  const std::string_view per = num_stages > 1 ? "per step and pipeline stage" : "per step";
  // Digests and queries have separate budgets, so each has its own line.
  if (sum.rows_left_out > 0)
    not_checked.push_back(
        fmt::format("attention digests read {} of {} KV entries that the steps could have read; "
                    "the budget is {} {}",
                    sum.rows_read, sum.rows_read + sum.rows_left_out, sum.probe_rows_max, per));
  if (sum.tokens_left_out > 0)
    not_checked.push_back(fmt::format(
        "attention outputs are those of {} of {} query tokens, each counted per layer; "
        "the budget is {} rows {}",
        sum.tokens_asked, sum.tokens_asked + sum.tokens_left_out, sum.query_rows_max, per));
  if (sum.state_tokens_left_out > 0)
    not_checked.push_back(
        fmt::format("outputs of states are those of {} of {} tokens, each counted per group",
                    sum.state_tokens_read, sum.state_tokens_read + sum.state_tokens_left_out));
  for (const MemoryCheck* check : checks_)
    for (std::string& sentence : check->not_checked()) not_checked.push_back(std::move(sentence));
  if (sum.ignored_zeros > 0)
    not_checked.push_back(fmt::format(
        "zeroing of {} blocks whose request was preempted in the same step", sum.ignored_zeros));
  for (auto& [line, stages] : sum.lines)
    not_checked.push_back(
        std::ssize(stages) == num_stages || stages.front() < 0
            ? std::move(line)
            : fmt::format("pipeline stage {}: {}", fmt::join(stages, ", "), line));
  if (config_.check == CheckMode::fast)
    not_checked.push_back(
        "single accesses of threads (bounds, races, uninitialised reads): the check mode is fast");
  if (!agreed) not_checked.push_back("everything after the divergence");
}

// Of the lowest rank that diverges; an error ends it.
template <class Call>
Checked RunMemory::first_of_ranks(const Call& call) {
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    Checked checked = call(*ranks_[rank]);
    if (checked) continue;
    if (checked.has_diverged() && ranks_.size() > 1)
      set_rank(config_, static_cast<std::int32_t>(rank), checked.divergence());
    return checked;
  }
  return {};
}

void set_rank(const BackendConfig& config, std::int32_t rank, Divergence& found) {
  const BackendConfig own = config_of_rank(config, rank);
  found.rank = rank;
  if (own.parallel.tp_size > 1) found.tp_rank = own.parallel.tp_rank;
  if (own.parallel.pp_size > 1) found.pp_rank = own.parallel.pp_rank;
  if (own.context.num_ranks > 1) found.cp_rank = own.context.rank;
}

Result<std::unique_ptr<RunMemory>> RunMemory::create(const RunConfig& config,
                                                     std::span<Backend* const> ranks,
                                                     std::span<MemoryCheck* const> checks,
                                                     RunSummary& summary) {
  LS_CHECK(std::ssize(ranks) == num_ranks(config.backend), "{} backends for {} ranks", ranks.size(),
           num_ranks(config.backend));
  LS_RETURN_IF_ERROR(check_ranks(config.backend));
  std::unique_ptr<RunMemory> memory(new RunMemory(config, checks, summary));
  std::vector<RankMemory> looked_at;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    RunConfig own = config;
    LS_ASSIGN_OR_RETURN(auto one, rank_model(config.backend, static_cast<std::int32_t>(rank)));
    own.backend = std::move(one.config);
    memory->ranks_.push_back(
        std::make_unique<RankRun>(own, std::move(one.model), *ranks[rank], summary));
    // Before the first request: an engine's worker may refuse the options.
    LS_RETURN_IF_ERROR(memory->ranks_.back()->begin());
    looked_at.push_back(memory->ranks_.back()->memory());
  }
  for (MemoryCheck* check : checks) check->begin(memory->config_, looked_at, summary);
  if (!config.drafter_not_followed.empty())
    summary.not_checked.push_back(
        fmt::format("what the draft model writes for drafts and reads of them ({}): its entries "
                    "are written with the step's tokens",
                    config.drafter_not_followed));
  if (config.engine.dcp * config.engine.pcp != config.backend.context.num_ranks)
    summary.not_checked.push_back(
        fmt::format("{} more prefill context parallel ranks, which hold the same cache",
                    config.engine.dcp * config.engine.pcp - config.backend.context.num_ranks));
  return memory;
}

}  // namespace lockstep
