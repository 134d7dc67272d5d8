#include "cli/replay_summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/output_file.h"
#include "cli/output/reports.h"
#include "cli/output/terminal.h"
#include "reference/plan/capacity.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/token_rows.h"
#include "sim/verdict/run_summary.h"
#include "traces/formats/run_fields.h"
#include "traces/formats/run_spec.h"

namespace lockstep {
namespace {

// True if a layer of the group stores hidden states: in its own group, or among attention layers
// whose entries have the same size.
bool keeps_hidden_states(const KVCacheGroupSpec& group) {
  for (std::size_t layer = 0; layer < group.layer_names.size(); ++layer)
    if (is_hidden_state(group.layer_spec(layer).kind)) return true;
  return false;
}

}  // namespace

Result<void> HiddenStateFolder::check(const LockstepConfig& config, bool has_backend) const {
  if (std::ranges::none_of(config.backend.plan.groups, keeps_hidden_states))
    return fail(
        "--hidden-states: the model has none; give a --model with a layer of kind hidden_state "
        "(docs/planner.md)");
  if (!has_backend) return fail("--hidden-states are read from a cache; --backend none has none");
  if (num_ranks(config.backend) > 1 || config.data_parallel.dp_size > 1)
    return fail(
        "--hidden-states needs a run with one rank: each of several ranks has only a part of them");
  if (!std::filesystem::is_directory(path_))
    return fail("--hidden-states {}: no such folder", path_);
  // An output file that is never committed leaves nothing behind.
  const auto probe = OutputFile::create(std::filesystem::path(path_) / "probe");
  if (!probe) return fail("--hidden-states: {}", probe.error().message);
  return {};
}

Result<void> HiddenStateFolder::write(std::span<const HiddenStates> requests) {
  for (const HiddenStates& states : requests) {
    const std::vector<std::uint8_t> bytes = hidden_state_file(states);
    const auto path = std::filesystem::path(path_) / names_.next(states.request);
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    LS_RETURN_IF_ERROR(write_output(path, text));
    ++num_files_;
    num_bytes_ += std::ssize(bytes);
  }
  return {};
}

namespace {

// Returns the release, the scheduling policy, the limits of a step and of a request, and every
// option that differs from its default.
std::string engine_text(const RunSpec& run) {
  const EngineConfig& engine = run.engine;
  std::string text = fmt::format("{}, {}, {} and {} per step, {} per request", engine.engine,
                                 engine.policy == SchedulingPolicy::priority ? "priority" : "fcfs",
                                 counted(engine.max_num_seqs, "request"),
                                 counted(engine.max_num_batched_tokens, "token"),
                                 with_commas(engine.max_model_len));
  for (const RunField& field : run_fields())
    if (!field.phrase.empty() && !field.is_default(run))
      text += fmt::format(fmt::runtime(field.phrase), value_text(field, run));
  if (engine.dcp > 1 || engine.pcp > 1)
    text += fmt::format(", dcp {} pcp {}", engine.dcp, engine.pcp);
  return text;
}

// "10 layers of full, 8 x 128 bf16, blocks of 16 tokens": kv heads x head size. A state has no
// entries per token, so its line has the cache mode instead.
std::string group_text(const KVCacheGroupSpec& group) {
  const KVCacheSpec& spec = group.spec;
  const std::string layers = counted(static_cast<std::int64_t>(group.layer_names.size()), "layer");
  if (is_state_kind(spec.kind))
    return fmt::format("{} of {} (mode {})", layers, name_of(spec.kind),
                       name_of(spec.mamba_cache_mode));
  const std::string rows =
      is_one_row(spec.tokens_per_state)
          ? ""
          : fmt::format(", {} tokens per entry", text_of(spec.tokens_per_state));
  return fmt::format("{} of {}, {} x {} {}{}, blocks of {}", layers, name_of(spec.kind),
                     spec.num_kv_heads, spec.head_size,
                     name_of(ElementType{spec.dtype, spec.kv_quant_mode}), rows,
                     counted(spec.block_size, "token"));
}

// Returns the first planned faults, at most 20; the effects of all are counted at the end. Every
// engine has the same plan.
std::span<const PlannedFault> faults_in(const OpenReplay& prepared) {
  constexpr std::size_t kShown = 20;
  if (prepared.run.faults.empty()) return {};
  const auto faults = prepared.session->engines().front().faulty->plan().faults();
  return faults.first(std::min(faults.size(), kShown));
}

// Returns how often faults of this kind took effect, in all engines together.
std::int64_t num_effects(const OpenReplay& prepared, FaultKind kind) {
  std::int64_t times = 0;
  for (const SessionEngine& engine : prepared.session->engines())
    times += engine.faulty->num_effects(kind);
  return times;
}

// "tp 4, pp 2, cp 2": the kinds of ranks of which there are several.
std::string ranks_text(const BackendConfig& config) {
  std::string text;
  for (const auto& [name, size] : {std::pair{"tp", config.parallel.tp_size},
                                   {"pp", config.parallel.pp_size},
                                   {"cp", config.context.num_ranks}})
    if (size > 1) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, size);
  return text;
}

// Returns the options that the release's server sets by default, in one line, and each option that
// the trace, the model or the command line set instead.
std::string served_text(const OpenReplay& prepared) {
  std::string taken;
  std::string text;
  for (const ServedOption& option : prepared.served) {
    if (option.said_by == "release")
      taken += fmt::format("{}{} {}", taken.empty() ? "" : ", ", option.name, option.value);
    else
      text += fmt::format("  set     {} {} by the {} (as served: {})\n", option.name, option.value,
                          option.said_by, option.by_default);
  }
  if (!taken.empty())
    text =
        fmt::format("  served  {} (as {} does by default)\n", taken, prepared.run.engine.engine) +
        text;
  return text;
}

std::string pages_text(const RunSummary& s) {
  return fmt::format("pages ({})", size_text(s.bytes_checked));
}

}  // namespace

std::string configuration_text(const OpenReplay& prepared) {
  const KVCacheConfig& plan = prepared.config.backend.plan;
  std::string text = fmt::format("  engine  {}\n", engine_text(prepared.run));
  for (const KVCacheGroupSpec& group : plan.groups)
    text += fmt::format("  cache   {}\n", group_text(group));
  text += fmt::format("  pool    {}, layout {}\n", counted(plan.num_blocks, "block"),
                      name_of(prepared.config.backend.layout));
  if (const std::string connector = connector_text(prepared.config.connector); !connector.empty())
    text += fmt::format("  with    {}\n", connector);
  const auto& ranks = prepared.session->engines().front().ranks;
  text += fmt::format("  device  {}\n", ranks.empty() ? "none: only the model"
                                                      : fmt::format("{}: {}", ranks.front()->name(),
                                                                    ranks.front()->device()));
  // Every rank is compared with its own part of the expectations.
  if (ranks.size() > 1)
    text += fmt::format("  ranks   {}: {}, each with its own device\n", ranks.size(),
                        ranks_text(prepared.config.backend));
  if (prepared.session->engines().size() > 1)
    text += fmt::format("  engines {} data parallel ranks{}, each with its own pool\n",
                        prepared.session->engines().size(),
                        ranks.size() > 1 ? " of this many ranks each" : "");
  for (const std::string& mutant : prepared.run.mutants)
    text += fmt::format("  mutant  {}\n", mutant);
  for (const PlannedFault& fault : faults_in(prepared))
    text += fmt::format("  fault   {}\n", to_text(fault));
  text += served_text(prepared);
  for (const std::string& choice : prepared.chosen) text += fmt::format("  chosen  {}\n", choice);
  if (!prepared.cut_off.empty()) text += fmt::format("  input   {}\n", prepared.cut_off);
  return text;
}

std::optional<CountedHits> hits_of(const OpenReplay& prepared) {
  std::optional<CountedHits> all;
  for (const auto& audit : prepared.audits)
    if (audit->hits() != nullptr) {
      if (!all) all.emplace();
      *all += *audit->hits();
      all->is_whole &= !audit->has_ended();
    }
  return all;
}

std::string unfilled_text(const OpenReplay& prepared) {
  const EngineConfig& engine = prepared.config.engine;
  if (!engine.enable_prefix_caching) return {};
  // A hit is a multiple of this many tokens. max_model_len equal to one step is too short already:
  // it includes at least one output token.
  std::int64_t step = engine.prefix_match_unit;
  if (step == 0) step = prepared.session->engines().front().decisions->scheduler_block_size();
  if (engine.max_model_len <= step)
    return unfilled_block_text(step, engine.max_model_len, "max_model_len");
  if (prepared.trace == nullptr) return {};
  // A recording has no trace here; its prompts are not searched.
  std::int64_t longest = 0;
  for (const TraceRecord& record : prepared.trace->records)
    if (const auto* request = std::get_if<TraceRequest>(&record))
      longest = std::max<std::int64_t>(longest, request->spec.prompt.size());
  return longest < step ? unfilled_block_text(step, longest, "the longest prompt") : std::string();
}

// Returns the rows about what was compared with the backend. A row is present only if its count can
// be more than zero in this run.
static std::string checked_text(const RunSummary& s) {
  std::string text;
  const auto row = [&text](std::string_view name, std::string figure, std::string_view more = {}) {
    text += row_text(name, figure, more);
  };
  const auto count_row = [&](std::int64_t RunCounts::*count) {
    const auto counter = std::ranges::find(kRunCounters, count, &RunCounter::count);
    row("", with_commas(s.*count), counter->text);
  };
  row("checked", with_commas(s.pages_checked), pages_text(s));
  for (const auto count : {&RunCounts::table_entries_checked, &RunCounts::slots_checked,
                           &RunCounts::rows_read, &RunCounts::outputs_checked})
    count_row(count);
  if (s.state_numbers_checked > 0)
    row("", with_commas(s.state_numbers_checked),
        fmt::format("state numbers; {} outputs computed from them",
                    with_commas(s.state_outputs_checked)));
  if (s.host_blocks_checked > 0)
    row("", with_commas(s.host_blocks_checked),
        fmt::format("host blocks ({})", size_text(s.host_bytes_checked)));
  if (s.rows_extracted > 0)
    row("", with_commas(s.rows_extracted),
        fmt::format("hidden states of finished requests, in {} that a trainer read in full",
                    counted(s.hidden_files_seen, "file")));
  if (s.union_rows_checked > 0) count_row(&RunCounts::union_rows_checked);
  if (s.draft_rows_read > 0) count_row(&RunCounts::draft_rows_read);
  if (s.stale_draft_rows > 0) count_row(&RunCounts::stale_draft_rows);
  return text;
}

std::string summary_text(const RunSummary& s, const OpenReplay& prepared) {
  std::string text;
  const auto row = [&text](std::string_view name, std::string figure, std::string_view more = {}) {
    text += row_text(name, figure, more);
  };
  row("requests", with_commas(s.requests),
      fmt::format("{} finished, {} aborted, {} refused", with_commas(s.finished_requests),
                  with_commas(s.aborted_requests), with_commas(s.refused_requests)));
  row("steps", with_commas(s.steps), fmt::format("{} request-steps", with_commas(s.request_steps)));
  row("tokens", with_commas(s.scheduled_tokens),
      fmt::format("scheduled; {} sampled", with_commas(s.output_tokens)));
  row("prefix hits", percent_text(s.cached_tokens, s.prompt_tokens),
      fmt::format("{} of {} prompt tokens, in {}", with_commas(s.cached_tokens),
                  with_commas(s.prompt_tokens), counted(s.hits, "request")));
  if (const auto hits = hits_of(prepared); hits && !losses_text(*hits).empty())
    row("", with_commas(hits->there),
        fmt::format("were in the pool{}; not hit: {}",
                    hits->is_whole
                        ? ""
                        : fmt::format(" for the first {}", counted(hits->lookups, "request")),
                    losses_text(*hits)));
  if (const std::string unfilled = unfilled_text(prepared); !unfilled.empty())
    row("", "", unfilled);
  row("preemptions", with_commas(s.preemptions));
  row("evictions", with_commas(s.evictions),
      fmt::format("of {} block hashes stored", with_commas(s.stored)));
  if (s.blocks_loaded + s.blocks_stored + s.blocks_lost > 0) {
    row("transfers", with_commas(s.blocks_loaded),
        fmt::format("blocks loaded; {} stored, {} lost", with_commas(s.blocks_stored),
                    with_commas(s.blocks_lost)));
    row("", with_commas(s.frees_delayed),
        fmt::format("frees delayed; {} of host blocks", counted(s.host_evictions, "eviction")));
  }
  // Without a backend all of these counts are zero.
  if (s.backend != "none") text += checked_text(s);
  // A rank without a graph for its size makes all ranks run without one.
  if (s.graphs.captured > 0)
    row("graphs", with_commas(s.graphs.captured),
        fmt::format("captured; {} replays{}", with_commas(s.graphs.replayed),
                    s.eager_rank_steps == 0
                        ? ""
                        : fmt::format("; {} of ranks without graphs, because one rank had none",
                                      counted(s.eager_rank_steps, "step"))));
  if (s.collectives_checked > 0)
    row("collectives", with_commas(s.collectives_checked),
        fmt::format("calls; {} of ranks without work", counted(s.idle_rank_steps, "step")));
  std::string parts = "decisions " + duration_text(s.seconds.schedule);
  if (s.backend != "none")
    parts +=
        fmt::format(", expectations {}, backend {}, compare {}", duration_text(s.seconds.program),
                    duration_text(s.seconds.execute), duration_text(s.seconds.compare));
  row("time", duration_text(s.seconds.wall), parts);
  text += fmt::format("  {:<14}{}\n", "state hash", to_hex(s.state_hash));
  return text + not_checked_text(s.not_checked);
}

std::string faults_text(const OpenReplay& prepared, const RunSummary& summary) {
  if (prepared.run.faults.empty()) return {};
  std::vector<std::string> effects;
  for (std::size_t i = 0; i < kNumFaultKinds; ++i) {
    const auto kind = static_cast<FaultKind>(i);
    if (const std::int64_t times = num_effects(prepared, kind); times > 0)
      effects.push_back(fmt::format("{} {}", name_of(kind), with_commas(times)));
  }
  std::string text =
      row_text("faults",
               with_commas(std::ssize(prepared.session->engines().front().faulty->plan().faults())),
               effects.empty() ? "none took effect"
                               : fmt::format("took effect: {}", fmt::join(effects, ", ")));
  return text + row_text("refused", with_commas(summary.refused_allocations),
                         "allocations for which the pool had blocks");
}

std::string missed_totals(const OpenReplay& prepared, const RunSummary& summary) {
  if (!prepared.totals) return {};
  const BenchmarkTotals& totals = *prepared.totals;
  std::string text;
  const auto compare = [&text](std::string_view what, std::int64_t recorded, std::int64_t model) {
    // Only totals that differ are listed; the caller prints that all were reached.
    if (recorded == model) return;
    text +=
        fmt::format("{}: recorded {}, model {}\n", what, with_commas(recorded), with_commas(model));
  };
  compare("steps", totals.steps, summary.steps);
  compare("scheduled tokens", totals.scheduled_tokens, summary.scheduled_tokens);
  compare("request-steps", totals.request_steps, summary.request_steps);
  return text;
}

namespace {

// Returns every option of the run by its name in files, and what follows from them. "mutants" is
// left out: `mutant` has the name.
nlohmann::ordered_json configuration_json(const OpenReplay& prepared) {
  nlohmann::ordered_json json;
  const RunSpec& run = prepared.run;
  for (const RunField& field : run_fields()) {
    if (field.saved_in == SavedIn::nowhere || field.name == "mutants") continue;
    JsonWriter value;
    field.write(value, run);
    json[std::string(field.name)] = nlohmann::ordered_json::parse(value.take_line());
  }
  const auto engines = prepared.session->engines();
  json["num_blocks"] = run.cache.num_blocks;
  json["groups"] = run.cache.groups.size();
  json["num_host_blocks"] = prepared.config.backend.num_host_blocks;
  json["decode_context_parallel_size"] = run.engine.dcp;
  json["prefill_context_parallel_size"] = run.engine.pcp;
  json["ranks"] = engines.size() * engines.front().ranks.size();
  json["mutant"] = run.mutants.empty() ? "" : run.mutants.front();
  return json;
}

}  // namespace

std::string summary_json(const ReplayOptions& options, const OpenReplay& prepared,
                         const RunSummary& summary, const HiddenStateFolder* folder,
                         const std::optional<RecordingCheck>& recorded, int finding) {
  using Json = nlohmann::ordered_json;
  Json json;
  json["file"] = options.file;
  if (!options.shards.empty()) json["shards"] = options.shards;
  json["configuration"] = configuration_json(prepared);
  json["chosen"] = prepared.chosen;
  if (!prepared.cut_off.empty()) json["cut_off"] = prepared.cut_off;
  if (folder != nullptr)
    json["hidden_states"] = {{"folder", options.hidden_states_dir},
                             {"files", folder->num_files()},
                             {"bytes", folder->num_bytes()}};
  // Numbers and switches become JSON numbers and booleans, words become strings.
  const auto value_of = [](const std::string& text) {
    return Json::accept(text) ? Json::parse(text) : Json(text);
  };
  for (const ServedOption& option : prepared.served)
    json["serving"][option.name] = {{"value", value_of(option.value)},
                                    {"default", value_of(option.by_default)},
                                    {"said_by", option.said_by}};
  if (prepared.totals)
    json["recorded_totals"] = {{"steps", prepared.totals->steps},
                               {"scheduled_tokens", prepared.totals->scheduled_tokens},
                               {"request_steps", prepared.totals->request_steps},
                               {"met", missed_totals(prepared, summary).empty()}};
  if (!prepared.run.faults.empty()) {
    json["faults"] = Json::array();
    for (const PlannedFault& fault : prepared.session->engines().front().faulty->plan().faults())
      json["faults"].push_back(to_text(fault));
    for (std::size_t i = 0; i < kNumFaultKinds; ++i)
      json["fault_effects"][std::string(name_of(static_cast<FaultKind>(i)))] =
          num_effects(prepared, static_cast<FaultKind>(i));
  }
  // The summary's keys are at the top level, after those of the configuration.
  json.update(json_of(summary));
  if (const auto hits = hits_of(prepared)) {
    json["prefix_hits"] = json_of(*hits);
    json["prefix_hits"]["is_whole"] = hits->is_whole;
  }
  if (const std::string text = unfilled_text(prepared); !text.empty()) json["warnings"] = {text};
  if (recorded) json["recording"] = json_of(*recorded);
  if (finding != 0) json["finding"] = finding;
  return json_text(json);
}

bool passes(Verdict verdict) {
  return verdict == Verdict::agreed || verdict == Verdict::done ||
         verdict == Verdict::interrupted || verdict == Verdict::parted;
}

namespace {

// Requests in the text of a deadlock; the JSON has all that the summary keeps.
constexpr std::size_t kStuckShown = 5;

// Returns the verdict of a recording on whose inputs the model decided. What ran on the backend are
// the model's decisions, not the recorded ones.
std::string recording_text(const RunSummary& summary, const RecordingCheck& recorded) {
  const bool agrees = summary.verdict == Verdict::agreed;
  const std::string run = summary.backend == "none" ? "the model's decisions ran without a backend"
                                                    : "the model's decisions agree on the backend";
  return fmt::format("Verdict: {}{}; {}.\n{}", agrees ? "agreed: " : "", run, summary_of(recorded),
                     details_of(recorded));
}

// The verdict of decisions that are not the model's: those of a recording, or another engine's.
std::string audited_text(const RunSummary& summary, std::string_view decisions,
                         const std::string& not_audited) {
  return fmt::format(
      "Verdict: {}. The {} decisions {}; {}.\n", name_of(summary.verdict), decisions,
      summary.backend != "none" ? "compared equal in every step"
                                : "ran without a backend, so no page was compared",
      not_audited.empty() ? "their audit has no finding" : "they were not audited: " + not_audited);
}

std::string violation_text(const RunSummary& summary) {
  const CheckFailure& found = *summary.violation;
  return fmt::format("Verdict: {}{}{}\n  {}\n", found.check,
                     found.step < 0 ? "" : fmt::format(" in step {}", found.step),
                     found.request.empty() ? "" : ", request " + on_one_line(found.request),
                     on_one_line(found.what));
}

}  // namespace

std::string verdict_text(const RunSummary& summary, const OtherVerdicts& others) {
  switch (summary.verdict) {
    case Verdict::interrupted:
      return fmt::format("Verdict: none. Interrupted after {}{}.\n", counted(summary.steps, "step"),
                         others.has_compared(summary) ? ", which compared equal" : "");
    case Verdict::agreed:
    case Verdict::done:
    case Verdict::parted:
    case Verdict::audit:
    case Verdict::violation:
      if (summary.violation) return violation_text(summary);
      if (summary.request_steps == 0)
        return "Verdict: done. No request ran, so nothing was compared.\n";
      if (const std::string* reason = others.not_audited())
        return audited_text(summary, others.audit != nullptr ? "recorded" : "engine's", *reason);
      if (others.recorded) return recording_text(summary, *others.recorded);
      return summary.verdict == Verdict::done
                 ? "Verdict: done. Nothing was compared (--backend none).\n"
                 : "Verdict: agreed. Every step compared equal.\n";
    case Verdict::divergence:
      return "Verdict: DIVERGENCE\n" + to_text(*summary.divergence);
    case Verdict::engine_failure:
      return fmt::format("Verdict: THE ENGINE FAILED in step {} (engine.{})\n  {}\n{}",
                         summary.steps, summary.engine_failure->kind, summary.engine_failure->what,
                         summary.engine_failure->trace);
    case Verdict::harness:
      return fmt::format("Verdict: LOCKSTEP FAILED; the engine was not checked.\n  {}\n{}",
                         summary.engine_failure->what, summary.engine_failure->trace);
    case Verdict::mismatch:
      return fmt::format("Verdict: THE ENGINE DECIDES DIFFERENTLY in step {} ({})\n  {}\n",
                         summary.mismatch->step, summary.mismatch->check,
                         on_one_line(summary.mismatch->what));
    case Verdict::liveness:
      break;
  }
  std::string text = fmt::format(
      "Verdict: STUCK. {} forever and nothing runs.\n",
      counted(summary.stuck_total, "request") + (summary.stuck_total == 1 ? " waits" : " wait"));
  if (!summary.wait_cycle.empty())
    text += fmt::format("  Cycle: {}.\n", on_one_line(summary.wait_cycle));
  const std::size_t shown = std::min(summary.stuck.size(), kStuckShown);
  for (const StuckRequest& stuck : std::span(summary.stuck).first(shown))
    text += on_one_line(fmt::format("  {}: {}", stuck.name, stuck.why)) + "\n";
  const std::int64_t more = summary.stuck_total - static_cast<std::int64_t>(shown);
  if (more > 0) text += fmt::format("  ... and {} more\n", with_commas(more));
  return text;
}

}  // namespace lockstep
