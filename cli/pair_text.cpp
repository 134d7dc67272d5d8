#include "cli/pair_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/output/terminal.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {
namespace {

std::string engine_row(const RunSummary& engine) {
  return fmt::format("{} of a request, {} scheduled, {} preempted",
                     with_commas(engine.request_steps), counted(engine.scheduled_tokens, "token"),
                     with_commas(engine.preemptions));
}

std::string ranks_text(const PairOptions& options) {
  const std::int32_t tp_size = options.decode.backend.parallel.tp_size;
  return tp_size == 1 ? std::string() : fmt::format(", {} ranks in each engine", tp_size);
}

std::string stuck_text(std::string_view who, const RunSummary& engine) {
  if (engine.verdict != Verdict::liveness) return {};
  std::string text = fmt::format(
      "  {} engine: {} forever\n", who,
      counted(engine.stuck_total, "request") + (engine.stuck_total == 1 ? " waits" : " wait"));
  if (!engine.wait_cycle.empty()) text += fmt::format("  Cycle: {}.\n", engine.wait_cycle);
  for (const StuckRequest& stuck : engine.stuck)
    text += fmt::format("    {}: {}\n", stuck.name, stuck.why);
  return text;
}

// Of both engines, each sentence once.
std::vector<std::string> not_checked_of(const PairReport& report) {
  std::vector<std::string> lines;
  if (report.decode.backend == "none")
    lines.emplace_back("the bytes of pages, staged, sent and loaded: --backend simt has them");
  for (const RunSummary* engine : {&report.prefill, &report.decode})
    for (const std::string& line : engine->not_checked)
      if (std::ranges::find(lines, line) == lines.end()) lines.push_back(line);
  return lines;
}

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

std::string_view name_of(PairVerdict verdict) {
  return verdict == PairVerdict::kept     ? "kept"
         : verdict == PairVerdict::broken ? "broken"
                                          : "liveness";
}

}  // namespace

std::string pair_configuration_text(const PairOptions& o) {
  const NetworkOptions& n = o.network;
  std::string text =
      fmt::format("  engines  {}, prefill with {}, decode with {}\n", o.decode.engine.engine,
                  counted(o.prefill.backend.plan.num_blocks, "block"),
                  counted(o.decode.backend.plan.num_blocks, "block"));
  text += fmt::format(
      "  network  {} % lost, {} % twice, {} % damaged, {} % overtaken; engines slow {} % and dead "
      "{} % of the time\n",
      n.loss_percent, n.duplicate_percent, n.damage_percent, n.straggler_percent, n.slow_percent,
      n.dead_percent);
  text += fmt::format("  failed loads: {}, in {}\n",
                      o.load_failure_policy == KVLoadFailurePolicy::fail ? "fail" : "recompute",
                      counted(o.attempts_max, "attempt"));
  text += fmt::format("  pages    {}, through staging buffers of {}\n",
                      o.has_pages() ? fmt::format("on {} ({}){}", o.decode_ranks.front()->name(),
                                                  o.decode_ranks.front()->device(), ranks_text(o))
                                    : "none: content ids stand for them",
                      counted(o.staging_blocks, "block"));
  if (!o.decode.backend.mutant.empty())
    text += fmt::format("  mutant   {}, in both engines\n", o.decode.backend.mutant);
  if (o.defect != TransferDefect::none) text += fmt::format("  mutant   {}\n", name_of(o.defect));
  return text;
}

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
      fmt::format("received and compared; {} reads said again, {} copies and {} stale messages "
                  "dropped",
                  with_commas(t.reads_again), with_commas(t.duplicates), with_commas(t.stale)));
  if (r.decode.backend != "none")
    row("pages", with_commas(r.prefill.pages_checked + r.decode.pages_checked),
        fmt::format("of both engines compared ({}), and {} host blocks",
                    size_text(r.prefill.bytes_checked + r.decode.bytes_checked),
                    with_commas(r.prefill.host_blocks_checked + r.decode.host_blocks_checked)));
  row("packets", with_commas(r.network.sent),
      fmt::format("{} lost, {} twice, {} damaged, {} out of order, {} at dead engines",
                  with_commas(r.network.lost), with_commas(r.network.duplicated),
                  with_commas(r.network.damaged), with_commas(r.network.reordered),
                  with_commas(r.network.swallowed)));
  row("leases ended", with_commas(t.leases_expired),
      fmt::format("of {} sendings", with_commas(t.releases + t.leases_expired)));
  row("time", duration_text(seconds));
  text += fmt::format("  {:<14}{} {}\n", "state hashes", to_hex(r.prefill.state_hash),
                      to_hex(r.decode.state_hash));
  for (const RefusedRequest& refused : r.refused)
    text += fmt::format("  refused  {}: {}\n", refused.name, refused.why);
  return text + not_checked_text(not_checked_of(r));
}

std::string pair_verdict_text(const PairReport& report) {
  if (report.verdict == PairVerdict::broken)
    return fmt::format("Verdict: BROKEN. {}\n  {}\n", report.finding->check, report.finding->what);
  if (report.verdict == PairVerdict::liveness)
    return "Verdict: STUCK.\n" + stuck_text("prefill", report.prefill) +
           stuck_text("decode", report.decode);
  if (report.is_cut_short)
    return "Verdict: kept so far. The run was cut short by --steps; nothing was broken.\n";
  return "Verdict: kept. Nothing was lost, nothing was delivered twice, every request ended.\n";
}

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
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace lockstep
