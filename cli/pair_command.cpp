// lockstep pair TRACE: does disaggregated prefill lose, duplicate or damage a block?
//
// Runs a trace through a prefill engine and a decode engine with an unreliable network between them
// (sim/pair/engine_pair.h). A ledger follows every block from its announcement to its delivery, and
// ends the run at the first broken rule. With --backend simt the pages are staged, sent, loaded and
// compared as well.
//
// Not checked: recurrent states, and ranks other than tensor parallel ones.
#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/stop_signal.h"
#include "base/stopwatch.h"
#include "cli/commands.h"
#include "cli/options/replay_options.h"
#include "cli/output/reports.h"
#include "cli/output/terminal.h"
#include "reference/profiles/releases.h"
#include "sim/pair/engine_pair.h"
#include "sim/pair/transfer_protocol.h"
#include "sim/setup/replay_setup.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {

// The texts and the JSON of the command.

namespace {

// "13,963 of a request, 20,000 tokens scheduled, 4 preempted": the figures of one engine.
std::string engine_row(const RunSummary& engine) {
  return fmt::format("{} request-steps, {} scheduled, {} preempted",
                     with_commas(engine.request_steps), counted(engine.scheduled_tokens, "token"),
                     with_commas(engine.preemptions));
}

std::string ranks_text(const PairOptions& options) {
  const std::int32_t tp_size = options.decode.backend.parallel.tp_size;
  return tp_size == 1 ? std::string() : fmt::format(", {} ranks in each engine", tp_size);
}

// Lists the requests that wait forever in one engine; empty: none does.
std::string stuck_text(std::string_view who, const RunSummary& engine) {
  if (engine.verdict != Verdict::liveness) return {};
  std::string text = fmt::format(
      "  {} engine: {} forever\n", who,
      counted(engine.stuck_total, "request") + (engine.stuck_total == 1 ? " waits" : " wait"));
  if (!engine.wait_cycle.empty())
    text += fmt::format("  Cycle: {}.\n", on_one_line(engine.wait_cycle));
  for (const StuckRequest& stuck : engine.stuck)
    text += on_one_line(fmt::format("    {}: {}", stuck.name, stuck.why)) + "\n";
  return text;
}

// Returns what neither engine checked, each line once.
std::vector<std::string> not_checked_of(const PairReport& report) {
  std::vector<std::string> lines;
  if (report.decode.backend == "none")
    lines.emplace_back("the bytes of pages, staged, sent and loaded: use --backend simt");
  for (const RunSummary* engine : {&report.prefill, &report.decode})
    for (const std::string& line : engine->not_checked)
      // Both engines usually leave out the same things.
      if (std::ranges::find(lines, line) == lines.end()) lines.push_back(line);
  return lines;
}

// Packets by their fate, in the names of NetworkCounts.
nlohmann::ordered_json network_json(const NetworkCounts& c) {
  return {{"sent", c.sent},           {"delivered", c.delivered},   {"lost", c.lost},
          {"swallowed", c.swallowed}, {"duplicated", c.duplicated}, {"damaged", c.damaged},
          {"straggled", c.straggled}, {"slowed", c.slowed},         {"reordered", c.reordered}};
}

nlohmann::ordered_json transfers_json(const TransferCounts& c) {
  return {{"loads", c.loads},
          {"loads_failed", c.loads_failed},
          {"full_hits", c.full_hits},
          {"reads", c.reads},
          {"reads_again", c.reads_again},
          {"blocks_sent", c.blocks_sent},
          {"blocks_received", c.blocks_received},
          {"blocks_lost", c.blocks_lost},
          {"duplicates", c.duplicates},
          {"stale", c.stale},
          {"damaged", c.damaged},
          {"gone", c.gone},
          {"releases", c.releases},
          {"releases_again", c.releases_again},
          {"leases_expired", c.leases_expired}};
}

// What runs: engines, network, failure policy, pages and planted defects, one line each.
std::string pair_configuration_text(const PairOptions& o) {
  const NetworkOptions& n = o.network;
  std::string text =
      fmt::format("  engines  {}, prefill with {}, decode with {}\n", o.decode.engine.engine,
                  counted(o.prefill.backend.plan.num_blocks, "block"),
                  counted(o.decode.backend.plan.num_blocks, "block"));
  text += fmt::format(
      "  network  {} % lost, {} % duplicated, {} % damaged, {} % overtaken; engines slow {} % and "
      "dead {} % of the time\n",
      n.loss_percent, n.duplicate_percent, n.damage_percent, n.straggler_percent, n.slow_percent,
      n.dead_percent);
  text += fmt::format("  failed loads: {}, up to {}\n",
                      o.load_failure_policy == KVLoadFailurePolicy::fail ? "fail" : "recompute",
                      counted(o.attempts_max, "attempt"));
  text += fmt::format("  pages    {}, through staging buffers of {}\n",
                      o.has_pages() ? fmt::format("on {} ({}){}", o.decode_ranks.front()->name(),
                                                  o.decode_ranks.front()->device(), ranks_text(o))
                                    : "none: content ids instead of bytes",
                      counted(o.staging_blocks, "block"));
  if (!o.decode.backend.mutant.empty())
    text += fmt::format("  mutant   {}, in both engines\n", o.decode.backend.mutant);
  if (o.defect != TransferDefect::none) text += fmt::format("  mutant   {}\n", name_of(o.defect));
  return text;
}

// The figures of a run and what was not checked. `seconds`: of the whole run.
std::string pair_text(const PairReport& r, double seconds) {
  std::string text;
  const auto row = [&text](std::string_view name, std::string figure, std::string_view more = {}) {
    text += row_text(name, figure, more);
  };
  const TransferCounts& t = r.transfers;
  row("requests", with_commas(r.requests),
      fmt::format("{} finished, {} aborted, {} refused; {} prefilled again",
                  with_commas(r.finished_requests), with_commas(r.aborted_requests),
                  with_commas(r.refused_requests), with_commas(r.prefilled_again)));
  row("steps", with_commas(r.steps()), "of both engines");
  row("  prefill", with_commas(r.prefill.steps), engine_row(r.prefill));
  row("  decode", with_commas(r.decode.steps), engine_row(r.decode));
  row("loads", with_commas(t.loads),
      fmt::format("{} failed, {} blocks lost for good", with_commas(t.loads_failed),
                  with_commas(t.blocks_lost)));
  row("blocks", with_commas(t.blocks_received),
      fmt::format(
          "received and compared; {} reads retried, {} duplicates and {} stale messages dropped",
          with_commas(t.reads_again), with_commas(t.duplicates), with_commas(t.stale)));
  if (r.decode.backend != "none")
    row("pages", with_commas(r.prefill.pages_checked + r.decode.pages_checked),
        fmt::format("of both engines compared ({}), and {} host blocks",
                    size_text(r.prefill.bytes_checked + r.decode.bytes_checked),
                    with_commas(r.prefill.host_blocks_checked + r.decode.host_blocks_checked)));
  row("packets", with_commas(r.network.sent),
      fmt::format("{} lost, {} duplicated, {} damaged, {} out of order, {} to dead engines",
                  with_commas(r.network.lost), with_commas(r.network.duplicated),
                  with_commas(r.network.damaged), with_commas(r.network.reordered),
                  with_commas(r.network.swallowed)));
  row("leases expired", with_commas(t.leases_expired),
      fmt::format("of {}", with_commas(t.releases + t.leases_expired)));
  row("time", duration_text(seconds));
  text += fmt::format("  {:<14}{} {}\n", "state hashes", to_hex(r.prefill.state_hash),
                      to_hex(r.decode.state_hash));
  for (const RefusedRequest& refused : r.refused)
    text += fmt::format("  refused  {}: {}\n", refused.name, refused.why);
  return text + not_checked_text(not_checked_of(r));
}

// "kept" is a statement about the whole trace, so the text for a run that --steps or a signal ended
// is different.
std::string pair_verdict_text(const PairReport& report) {
  if (report.verdict == PairVerdict::broken)
    return fmt::format("Verdict: BROKEN. {}\n  {}\n", report.finding->check,
                       on_one_line(report.finding->what));
  if (report.verdict == PairVerdict::liveness)
    return "Verdict: STUCK.\n" + stuck_text("prefill", report.prefill) +
           stuck_text("decode", report.decode);
  if (report.is_cut_short)
    return fmt::format("Verdict: kept so far. The run was cut short{}; nothing was broken.\n",
                       stop_requested() ? "" : " by --steps");
  return "Verdict: kept. Nothing was lost, nothing was delivered twice, every request ended.\n";
}

// The configuration, the verdict, the counts of network and transfers, and the summary of each
// engine.
std::string pair_json(const std::string& file, const PairOptions& options,
                      const PairReport& report) {
  using Json = nlohmann::ordered_json;
  const NetworkOptions& n = options.network;
  Json json;
  json["file"] = file;
  json["not_checked"] = not_checked_of(report);
  json["configuration"] = {
      {"engine", options.decode.engine.engine},
      {"prefill_blocks", options.prefill.backend.plan.num_blocks},
      {"decode_blocks", options.decode.backend.plan.num_blocks},
      {"block_size", options.decode.engine.block_size},
      {"seed", n.seed},
      {"loss_percent", n.loss_percent},
      {"duplicate_percent", n.duplicate_percent},
      {"damage_percent", n.damage_percent},
      {"straggler_percent", n.straggler_percent},
      {"slow_percent", n.slow_percent},
      {"dead_percent", n.dead_percent},
      {"delay_ns_max", n.delay_ns_max},
      {"period_ns", n.period_ns},
      {"retry_ns", options.times.retry_ns},
      {"retries_max", options.times.retries_max},
      {"lease_ns", options.times.lease_ns},
      {"attempts_max", options.attempts_max},
      {"offer_percent", options.offer_percent},
      {"backend", report.decode.backend},
      {"tensor_parallel_size", options.decode.backend.parallel.tp_size},
      {"staging_blocks", options.staging_blocks},
      {"kv_load_failure_policy",
       options.load_failure_policy == KVLoadFailurePolicy::fail ? "fail" : "recompute"},
      // One defect is planted at most: of the transfer, or of both engines.
      {"mutant", options.defect == TransferDefect::none
                     ? std::string_view(options.decode.backend.mutant)
                     : name_of(options.defect)},
  };
  json["verdict"] = name_of(report.verdict);
  json["finding"] = report.finding
                        ? Json{{"check", report.finding->check}, {"what", report.finding->what}}
                        : Json(nullptr);
  json["cut_short"] = report.is_cut_short;
  json["requests"] = report.requests;
  json["finished_requests"] = report.finished_requests;
  json["aborted_requests"] = report.aborted_requests;
  json["refused_requests"] = report.refused_requests;
  json["prefilled_again"] = report.prefilled_again;
  json["refused"] = Json::array();
  for (const RefusedRequest& refused : report.refused)
    json["refused"].push_back({{"name", refused.name}, {"why", refused.why}});
  json["steps"] = report.steps();
  json["simulated_ns"] = report.simulated_ns;
  json["blocks_checked"] = report.blocks_checked;
  json["network"] = network_json(report.network);
  json["transfers"] = transfers_json(report.transfers);
  json["prefill"] = json_of(report.prefill);
  json["decode"] = json_of(report.decode);
  return json_text(json);
}

// The options of `lockstep pair`: those of a replay, for both engines, and those of the network.
struct PairCommandOptions {
  ReplayOptions replay;  // the decode engine's, and the prefill engine's except its pool
  std::optional<std::int64_t> prefill_blocks;  // absent: as many as the decode engine's
  PairOptions pair;  // without the engines and their backends, which prepare() adds
};

constexpr const char* kNetwork = "Network";

// The description is empty so that the help shows PERCENT instead of CLI11's range.
void add_percent(CLI::App& command, const std::string& name, std::int32_t& value,
                 const std::string& help) {
  command.add_option(name, value, help)
      ->check(CLI::Range(0, 100).description(""))
      ->type_name("PERCENT")
      ->group(kNetwork);
}

template <class T>
void add_number(CLI::App& command, const std::string& name, T& value, const std::string& help,
                std::int64_t at_least, std::int64_t at_most) {
  command.add_option(name, value, help)
      ->check(CLI::Range(at_least, at_most).description(""))
      ->type_name("N")
      ->capture_default_str()
      ->group(kNetwork);
}

void declare_pair_options(CLI::App& command, PairCommandOptions& o) {
  declare_replay_options(command, o.replay);
  command.get_option("FILE")->description(
      "request trace, trace of another tool (several files: its shards, in order), or saved case "
      "of `pair`; or the name of a bundled sample");
  constexpr std::int64_t kHour = 3'600'000'000'000;
  command
      .add_option("--prefill-blocks", o.prefill_blocks,
                  "blocks of the prefill engine's pool (the decode engine's)")
      ->check(CLI::Range(std::int64_t{2}, std::int64_t{std::numeric_limits<std::int32_t>::max()}))
      ->type_name("N")
      ->group("Cache");
  command
      .add_option("--steps", o.pair.steps_max, "stop after N steps of both engines; 0: no limit")
      ->check(CLI::NonNegativeNumber)
      ->type_name("N")
      ->group("Run");
  add_percent(command, "--loss", o.pair.network.loss_percent, "packets that are lost");
  add_percent(command, "--duplicate", o.pair.network.duplicate_percent,
              "packets that arrive twice");
  add_percent(command, "--damage", o.pair.network.damage_percent, "packets with a flipped bit");
  add_percent(command, "--straggle", o.pair.network.straggler_percent,
              "packets that others overtake");
  add_percent(command, "--slow", o.pair.network.slow_percent,
              "time that an engine is slow to reach");
  add_percent(command, "--dead", o.pair.network.dead_percent, "time that an engine is unreachable");
  add_percent(command, "--offer", o.pair.offer_percent,
              "share of a prompt's blocks that the prefill engine offers (100)");
  add_number(command, "--delay-ns", o.pair.network.delay_ns_max, "max packet delay", 100'000,
             kHour);
  add_number(command, "--period-ns", o.pair.network.period_ns,
             "time that an engine stays slow or unreachable", 1, kHour);
  add_number(command, "--retry-ns", o.pair.times.retry_ns,
             "time after which an unanswered request is sent again", 1, kHour);
  add_number(command, "--retries", o.pair.times.retries_max, "retries without progress", 0, 1'000);
  add_number(command, "--lease-ns", o.pair.times.lease_ns,
             "time for which blocks are kept for a silent decode engine", 1, kHour);
  add_number(command, "--staging-blocks", o.pair.staging_blocks,
             "blocks of each engine's staging buffer in host memory", 1,
             std::numeric_limits<std::int32_t>::max());
  add_number(command, "--attempts", o.pair.attempts_max,
             "prefills of a request whose blocks do not arrive, before it is refused", 1, 1'000);
}

// Refuses options of a replay that have no meaning with two engines.
Result<void> check_options(const ReplayOptions& options) {
  const GivenRun& run = options.run;
  const std::pair<bool, std::string_view> useless[] = {
      {run.has("pipeline_parallel_size"), "--pipeline-parallel-size"},
      {run.has("data_parallel_size"), "--data-parallel-size"},
      {run.has("faults"), "--faults"},
      {run.has("connector"), "--connector"},
      {run.has("async_scheduling"), "--async-scheduling"},
      {!options.report_path.empty(), "--report"},
      {!options.save_dir.empty(), "--save"},
  };
  const std::string also = given_for_one_engine(options);
  if (!also.empty()) return fail("{} does not apply to two engines; omit it", also);
  for (const auto& [is_given, name] : useless)
    if (is_given) return fail("{} does not apply to two engines; omit it", name);
  return {};
}

using Backends = std::vector<std::unique_ptr<Backend>>;

// A pair that is ready to run. `options` holds pointers to the backends.
struct PreparedPair {
  PairOptions options;
  std::unique_ptr<Workload> client;
  std::int64_t num_records = 0;
  Backends prefill, decode;
};

// Takes a defect of the transfer out of the run and into `defect`. Any other defect stays and is
// planted in both engines by the replay.
void plant(GivenRun& run, TransferDefect& defect) {
  if (!run.has("mutants")) return;
  const auto planted = defect_from_name<TransferDefect>(run.spec.mutants.front());
  if (!planted) return;
  defect = *planted;
  run.forget("mutants");
}

std::vector<Backend*> ranks_of(const Backends& backends) {
  std::vector<Backend*> ranks;
  for (const auto& rank : backends) ranks.push_back(rank.get());
  return ranks;
}

// Builds both engines from one set of options: the decode engine's first, then the prefill engine's
// with its own pool. Errors of the second name --prefill-blocks, the only option in which it
// differs.
Result<PreparedPair> prepare(const PairCommandOptions& given) {
  LS_RETURN_IF_ERROR(check_options(given.replay));
  PreparedPair prepared;
  PairOptions& options = prepared.options = given.pair;
  ReplayRequest replay = request_of(given.replay);
  GivenRun& run = replay.run;
  // The policy belongs to the pair (load_failure_policy below) and not to a connector of the
  // replay.
  run.forget("kv_load_failure_policy");
  replay.staging_blocks = options.staging_blocks;
  plant(run, options.defect);
  if (run.has("mutants") && run.spec.backend == "none")
    return fail(
        "--mutant {}: not a defect of the transfer between two engines, and a backend's defect "
        "needs --backend; `lockstep mutants --list` lists them",
        run.spec.mutants.front());
  LS_ASSIGN_OR_RETURN(const ReplayInput input, read_input(replay));
  if (input.trace == nullptr)
    return fail("{}: this {} is the run of one engine; give a request trace", replay.file,
                name_of(input.format));
  // The file is read once: both engines receive the same trace.
  LS_ASSIGN_OR_RETURN(auto decode, resolve_replay(replay, input));
  LS_ASSIGN_OR_RETURN(prepared.decode,
                      open_backends(decode.config.backend, replay_backend(decode.run.backend)));
  // From here on `run` describes the prefill engine.
  if (given.prefill_blocks) {
    run.spec.cache.num_blocks = *given.prefill_blocks;
    run.add(run_field("num_blocks"));
  }
  auto prefill = resolve_replay(replay, input);
  if (!prefill) return fail("--prefill-blocks: " + prefill.error().message);
  auto backends = open_backends(prefill->config.backend, replay_backend(prefill->run.backend));
  if (!backends) return fail("--prefill-blocks: " + backends.error().message);
  prepared.prefill = std::move(*backends);
  options.decode = decode.config;
  options.prefill = prefill->config;
  options.decode_ranks = ranks_of(prepared.decode);
  options.prefill_ranks = ranks_of(prepared.prefill);
  options.network.seed = given.replay.run.spec.seed;
  options.step_time = decode.run.step_time;
  options.load_failure_policy = given.replay.run.spec.connector.load_failure_policy;
  // One client for both engines; the prefill engine's own workload is not used.
  prepared.client = std::move(decode.parts.clients);
  prepared.num_records = decode.num_records;
  return prepared;
}

int exit_code_of(PairVerdict verdict) {
  if (verdict == PairVerdict::broken) return kExitDisagreed;
  return verdict == PairVerdict::liveness ? kExitStuck : kExitAgreed;
}

// The run as one item. A deadlock has no finding, so its check is "liveness".
ReportedItem item_of(const std::string& file, const PairReport& report, std::string again) {
  ReportedItem item{.name = file, .file = file};
  if (report.verdict == PairVerdict::kept) return item;
  item.kind = ItemKind::failed;
  item.again = std::move(again);
  item.check = report.finding ? report.finding->check : "liveness";
  item.details = pair_verdict_text(report);
  item.line = stable_line(item.check, -1, {},
                          report.finding ? report.finding->what : "requests wait forever");
  return item;
}

Result<int> pair(const PairCommandOptions& given, CommandReport& out) {
  watch_stop_signals();
  LS_ASSIGN_OR_RETURN(auto prepared, prepare(given));
  fmt::print("{}\n{}\n", given.replay.file, pair_configuration_text(prepared.options));
  Stopwatch watch;
  LS_ASSIGN_OR_RETURN(auto report, [&] {
    Progress progress("requests", prepared.num_records);
    return run_pair(prepared.options, *prepared.client, [&](const PairProgress& so_far) {
      if (progress.shown()) progress.at(so_far.requests_ended, counted(so_far.steps, "step"));
    });
  }());
  fmt::print("{}\n{}", pair_text(report, watch.lap()), pair_verdict_text(report));
  if (out.wants_json()) out.set_json(pair_json(given.replay.file, prepared.options, report));
  out.add_run(item_of(given.replay.file, report, out.again({.without = {"--jobs"}})));
  return exit_code_of(report.verdict);
}

}  // namespace

void add_pair_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<PairCommandOptions>();
  options->replay.run.set_text("backend", "none");
  options->replay.run.set_text("engine", connector_profile().name);
  CLI::App* command = app.add_subcommand(
      "pair", "Run a trace through a prefill and a decode engine over a lossy network");
  declare_pair_options(*command, *options);
  run_when_chosen(*command, options->replay.reports, exit_code,
                  [options](CommandReport& report) { return pair(*options, report); });
}

}  // namespace lockstep
