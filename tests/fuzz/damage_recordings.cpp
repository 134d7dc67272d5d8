// damage_recordings RUNS [FIRST_SEED]
// damage_recordings --print SEED
// Long runs over damaged recordings (tests/fuzz/recording_damage.h); exit status 1 if any of them
// stopped the process that judged it. --print writes the recording of a seed to standard output.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>

#include "tests/fuzz/recording_damage.h"

namespace {

constexpr std::int64_t kRunsAtATime = 20'000;

std::optional<std::int64_t> number_of(std::string_view text) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 0) return std::nullopt;
  return number;
}

int usage() {
  fmt::print(stderr, "damage_recordings RUNS [FIRST_SEED] | damage_recordings --print SEED\n");
  return 2;
}

int run(std::int64_t first_seed, std::int64_t runs) {
  using namespace lockstep;
  std::int64_t crashes = 0;
  DamageCounts total;
  for (std::int64_t done = 0; done < runs; done += kRunsAtATime) {
    const DamageRuns part = run_damaged(static_cast<std::uint64_t>(first_seed + done),
                                        std::min(kRunsAtATime, runs - done));
    total.add(part.counts);
    crashes += part.crashes;
    fmt::print(
        "{} damaged recordings: {} read; conform: {} agree, {} part; audit: {} clean, {} "
        "with findings; replay: {} run; {} stopped the process\n{}",
        total.runs, total.read, total.conforming, total.parting, total.clean, total.faulted,
        total.replayed, crashes, part.report);
    std::fflush(stdout);
  }
  return crashes == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) return usage();
  const std::string_view first = argv[1];
  const auto last = number_of(argv[argc - 1]);
  if (first == "--print") {
    if (argc != 3 || !last) return usage();
    lockstep::SeededChoices choices(static_cast<std::uint64_t>(*last));
    fmt::print("{}", lockstep::damaged_recording(choices));
    return 0;
  }
  const auto runs = number_of(first);
  if (!runs || !last) return usage();
  return run(argc == 3 ? *last : 1, *runs);
}
