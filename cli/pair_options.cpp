#include "cli/pair_options.h"

#include <CLI/CLI.hpp>
#include <limits>

namespace lockstep {
namespace {

constexpr const char* kNetwork = "Network";

void add_percent(CLI::App& command, const std::string& name, std::int32_t& value,
                 const std::string& help) {
  CLI::Range range(0, 100);
  range.description("");
  command.add_option(name, value, help)->check(range)->type_name("PERCENT")->group(kNetwork);
}

template <class T>
void add_number(CLI::App& command, const std::string& name, T& value, const std::string& help,
                std::int64_t at_least, std::int64_t at_most) {
  CLI::Range range(at_least, at_most);
  range.description("");
  command.add_option(name, value, help)
      ->check(range)
      ->type_name("N")
      ->capture_default_str()
      ->group(kNetwork);
}

}  // namespace

void declare_pair_options(CLI::App& command, PairCommandOptions& o) {
  declare_replay_options(command, o.replay);
  constexpr std::int64_t kHour = 3'600'000'000'000;
  command
      .add_option("--prefill-blocks", o.prefill_blocks,
                  "blocks of the prefill engine's pool (as many as the decode engine's)")
      ->check(CLI::Range(std::int64_t{2}, std::int64_t{std::numeric_limits<std::int32_t>::max()}))
      ->type_name("N")
      ->group("Cache");
  command
      .add_option("--steps", o.steps_max, "end after so many steps of both engines; 0: no limit")
      ->check(CLI::NonNegativeNumber)
      ->type_name("N")
      ->group("Run");
  add_percent(command, "--loss", o.network.loss_percent, "of the packets are lost");
  add_percent(command, "--duplicate", o.network.duplicate_percent, "... arrive twice");
  add_percent(command, "--damage", o.network.damage_percent, "... arrive with a bit turned over");
  add_percent(command, "--straggle", o.network.straggler_percent, "... are overtaken by others");
  add_percent(command, "--slow", o.network.slow_percent, "of the time an engine is slow to reach");
  add_percent(command, "--dead", o.network.dead_percent, "... cannot be reached at all");
  add_percent(command, "--offer", o.offer_percent,
              "of a prompt's blocks that the prefill engine offers (100)");
  add_number(command, "--delay-ns", o.network.delay_ns_max, "of a packet at most", 100'000, kHour);
  add_number(command, "--period-ns", o.network.period_ns, "that an engine stays slow or dead", 1,
             kHour);
  add_number(command, "--retry-ns", o.times.retry_ns, "until what has no answer is said again", 1,
             kHour);
  add_number(command, "--retries", o.times.retries_max, "in a row without anything new", 0, 1'000);
  add_number(command, "--lease-ns", o.times.lease_ns,
             "that blocks are kept for a decode engine not heard of", 1, kHour);
  add_number(command, "--staging-blocks", o.staging_blocks,
             "of each engine's buffer in host memory, through which its blocks come and go", 1,
             std::numeric_limits<std::int32_t>::max());
  add_number(command, "--attempts", o.attempts_max,
             "prefills of a request whose blocks do not come, before it is refused", 1, 1'000);
}

}  // namespace lockstep
